"""Megatron-Core command line of a plan.

Flags as Megatron-LM commit d98e8a64ddf3 (core 0.20.0 dev) takes them: megatron/training/arguments.py and the fields of
ModelParallelConfig and TransformerConfig. Stages go into `--pipeline-model-parallel-layout`
(core/transformer/pipeline_parallel_layer_layout.py), those of hybrid models into `--hybrid-layer-pattern`
(core/models/hybrid/hybrid_layer_allocation.py).

The shape of the model is told by flags too. A tensor that no flag creates is refused by name, so that the model launched
is the model planned.
"""

from __future__ import annotations

import re
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from shardwise.data.faults import InputError
from shardwise.data.model import Attention, LayerKind, Mamba, Mlp, Model, Moe
from shardwise.data.rules import MEGATRON_CORE, plan_faults

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.data.instance import Instance
    from shardwise.data.plan import Degrees, Plan
    from shardwise.data.workload import Training

VOCAB_MULTIPLE = 128
MAMBA_CONV_KERNEL = 4
"""Fixed in Megatron-Core (core/ssm/mamba_mixer.py, d_conv)."""

PRECISIONS = {
    "bf16": ("--bf16",),
    "fp16": ("--fp16",),
    "fp8": ("--bf16", "--fp8-format hybrid"),
    "mxfp8": ("--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"),
    "nvfp4": ("--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4"),
}
"""arguments.py and TransformerConfig: `fp8`, `fp8_recipe`, `fp4`, `fp4_recipe`."""
BACKENDS = {"flash": "flash", "flash2": "flash", "unfused": "unfused"}
"""core/transformer/enums.py, `AttnBackend`, whose `local` is not for layers of Transformer Engine."""
QKV_BIASES = frozenset({"q_proj.bias", "k_proj.bias", "v_proj.bias"})
LINEAR_BIASES = frozenset({"o_proj.bias", "gate_proj.bias", "up_proj.bias", "down_proj.bias"})
QK_NORMS = frozenset({"q_norm.weight", "k_norm.weight", "q_a_norm.weight", "kv_a_norm.weight"})
LAYER_TENSORS = frozenset(
    {
        *(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "q_a", "q_b", "kv_a", "kv_b", "gate", "up", "down")),
        *(f"{part}.{name}_proj.weight" for part in ("experts", "shared_expert") for name in ("gate", "up", "down")),
        *("router.weight", "router.bias", "shared_expert_gate.weight"),
        *("in_proj.weight", "out_proj.weight", "conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias", "norm.weight"),
        *QKV_BIASES,
        *LINEAR_BIASES,
        *QK_NORMS,
    }
)
"""Tensors of a layer that the flags below create; the norms before its parts are counted apart."""
END_TENSORS = frozenset(
    {"embed_tokens.weight", "position_embeddings.weight", "final_norm.weight", "final_norm.bias", "lm_head.weight"}
)
_NORM = re.compile(r"norm\d+\.(weight|bias)")


def to_megatron(instance: Instance, plan: Plan) -> str:
    """The launch command as shell text, with what it leaves out said in comments.

    Raises
    ------
    InputError
        As `megatron_flags` does.
    """
    flags = megatron_flags(instance, plan)
    lines = [*_comments(instance, plan), *_launcher(instance.model, plan)]
    lines += [f"  {flag} \\" for flag in flags[:-1]] + [f"  {flags[-1]}"]
    return "\n".join(lines) + "\n"


def megatron_flags(instance: Instance, plan: Plan) -> list[str]:
    """Every flag with its value, one per entry, quoted for the shell where needed.

    Raises
    ------
    InputError
        When Megatron-Core does not accept the plan, or has no flags for the model; every reason is named.
    """
    faults = [*megatron_faults(instance, plan), *_model_faults(instance.model)]
    if faults:
        raise InputError(faults)
    model = instance.model
    return [
        *_parallel_flags(model, plan),
        *(["--tp-comm-overlap"] if instance.overlaps and plan.degrees.sequence_parallel else []),
        *_stage_flags(model, plan, instance.workload.mtp_layers),
        *_run_flags(instance, plan),
        *_capacity_flags(instance.workload),
        *_offload_flags(plan.degrees),
        *_shape_flags(model),
    ]


def megatron_faults(instance: Instance, plan: Plan) -> list[str]:
    """Every rule of Megatron-Core that the plan breaks, whichever rule pack it was planned with."""
    workload = instance.workload
    faults = plan_faults(MEGATRON_CORE, instance.model, workload, plan)
    if workload.lora_rank is not None:
        faults.append(
            f"workload.lora_rank={workload.lora_rank}: the pre-training scripts of Megatron-Core have no flags for adapters"
        )
    if workload.attention not in BACKENDS:
        faults.append(
            f"workload.attention={workload.attention}: Megatron-Core has no such kernel; it has {', '.join(BACKENDS)}"
        )
    return faults


def _comments(instance: Instance, plan: Plan) -> list[str]:
    model, d, placement = instance.model, plan.degrees, plan.placement
    lines = [
        f"{model.name} on {instance.cluster.name}: {d.devices} ranks, dp={d.dp} follows from the world size.",
        "Data, tokenizer, optimizer schedule and checkpoint flags are left out: add yours, and those of the model that",
        "do not change the plan (activation function, rotary base and scaling, norm epsilon, initialisation).",
    ]
    if d.devices > placement.blocks[0]:
        used = ", ".join(
            f"{count} per {name}" for count, name in zip(placement.blocks, instance.cluster.levels, strict=True)
        )
        lines.append(f"Ranks follow the devices ({used}): number the nodes in that order.")
    if instance.workload.assumes_even_routing and any(isinstance(kind.ffn, Moe) for kind in model.kinds):
        lines.append("The plan assumes that tokens are routed evenly over the experts.")
    if instance.workload.lengths is not None:
        lines.append(
            "The plan assumes packed sequences whose documents do not attend to each other: the data has to ask."
        )
    if model.mtp_depth > instance.workload.mtp_layers:
        lines.append(f"Of {model.mtp_depth} multi-token-prediction modules {instance.workload.mtp_layers} are trained.")
    return [f"# {line}" for line in lines]


def _launcher(model: Model, plan: Plan) -> list[str]:
    """Lines that start the script on each node."""
    d, per_node = plan.degrees, plan.placement.blocks[0]
    nodes = d.devices // per_node
    # arguments.py: tensor and context parallelism before Blackwell assert this value, so that kernels start in the order
    # issued; Megatron-FSDP asserts any other.
    environment = "CUDA_DEVICE_MAX_CONNECTIONS=1 " if d.tp * d.cp > 1 and d.zero < 2 else ""
    script = "pretrain_hybrid.py" if is_hybrid(model) else "pretrain_gpt.py"
    lines = [f"{environment}torchrun --nproc-per-node {per_node} --nnodes {nodes} \\"]
    if nodes > 1:
        lines.append('  --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\')
    return [*lines, f"  {script} \\"]


def _parallel_flags(model: Model, plan: Plan) -> list[str]:
    d = plan.degrees
    flags = [f"--tensor-model-parallel-size {d.tp}", f"--pipeline-model-parallel-size {d.pp}"]
    if any(isinstance(kind.ffn, Moe) for kind in model.kinds):
        flags += [f"--expert-model-parallel-size {d.ep}", f"--expert-tensor-parallel-size {d.etp}"]
    if d.cp > 1:
        flags += [f"--context-parallel-size {d.cp}", f"--cp-comm-type {d.cp_comm_type}"]
    if d.cp_a2a > 1:
        flags.append(f"--hierarchical-context-parallel-sizes {d.cp_a2a} {d.cp // d.cp_a2a}")
    if d.dp_replicate > 1:
        flags.append(f"--num-distributed-optimizer-instances {d.dp_replicate}")
    if d.sequence_parallel:
        flags.append("--sequence-parallel")
    if d.zero:
        flags.append("--use-distributed-optimizer")
    if d.zero >= 2:
        strategy = "optim_grads_params" if d.zero == 3 else "optim_grads"
        flags += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}", "--ckpt-format fsdp_dtensor"]
    if d.dp * d.cp > 1:
        flags.append("--overlap-grad-reduce")
        if d.zero:
            flags.append("--overlap-param-gather")
    if plan.placement.rank_order == "tp-pp-dp":
        flags.append("--use-tp-pp-dp-mapping")
    return flags


def _stage_flags(model: Model, plan: Plan, mtp: int) -> list[str]:
    """Layers of the stages, and recompute. The layout also sets the number of virtual stages."""
    flags = []
    if is_hybrid(model):
        flags += [
            "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
            f"--hybrid-layer-pattern '{hybrid_pattern(model, plan)}'",
        ]
    else:
        flags.append(f"--num-layers {len(model.layers)}")
        if plan.degrees.pp > 1:
            flags.append(f"--pipeline-model-parallel-layout '{pipeline_layout(plan.chunk_layers, mtp)}'")
        if mtp:
            flags.append(f"--mtp-num-layers {mtp}")
    setting = plan.stages[0]
    if setting.recompute == "full":
        flags += [
            "--recompute-granularity full",
            "--recompute-method block",
            f"--recompute-num-layers {setting.recompute_layers}",
        ]
    elif setting.recompute == "selective":
        flags += ["--recompute-granularity selective", f"--recompute-modules {' '.join(setting.recompute_modules)}"]
    return flags


def pipeline_layout(chunks: Sequence[int], mtp: int = 0) -> str:
    """The stages in the layout grammar: E embedding, t layer, m module of multi-token prediction, L loss, `|` between
    stages, `(...)*n` repeats.

    Parentheses are expanded first and cannot be nested, single characters after them (`t*5`), so the stage inside a
    repeat may be shortened too.
    """
    last = len(chunks) - 1
    stages = [
        ("E" if i == 0 else "") + _layers(n) + ("m" * mtp + "L" if i == last else "") for i, n in enumerate(chunks)
    ]
    parts = [stages[0] + "|"] if last else []
    for stage, run in groupby(stages[1:last]):
        count = len(list(run))
        parts.append(f"({stage}|)*{count}" if count > 2 else f"{stage}|" * count)
    return "".join(parts) + stages[last]


def _layers(count: int) -> str:
    """`ttttt` as `t*5` where that is shorter."""
    return f"t*{count}" if count > 3 else "t" * count


def is_hybrid(model: Model) -> bool:
    """Whether layers are single mixers or feed-forward parts, which only the hybrid pattern can describe."""
    return any(kind.mixer is None or kind.ffn is None or isinstance(kind.mixer, Mamba) for kind in model.kinds)


def hybrid_pattern(model: Model, plan: Plan) -> str:
    """One letter per layer with `|` between stages."""
    letters = [_letter(kind) or "?" for kind in model.layers]
    return "|".join("".join(letters[a:b]) for a, b in pairwise(plan.cuts))


def _letter(kind: LayerKind) -> str | None:
    if isinstance(kind.mixer, Mamba) and kind.ffn is None and kind.mixer.version == 2:
        return "M"
    if isinstance(kind.mixer, Attention) and kind.ffn is None:
        return "+" if kind.mixer.latent else "*"
    if kind.mixer is None and isinstance(kind.ffn, Mlp):
        return "-"
    if kind.mixer is None and isinstance(kind.ffn, Moe):
        return "E"
    return None


def _run_flags(instance: Instance, plan: Plan) -> list[str]:
    """Batch, precision and kernels."""
    workload, model = instance.workload, instance.model
    learned = [tensor.shape[0] for tensor in model.embedding if tensor.name.startswith("position_embeddings")]
    positions = learned[0] if learned else max(workload.seq_len, model.max_positions or 0)
    return [
        f"--micro-batch-size {plan.degrees.micro_batch}",
        f"--global-batch-size {workload.global_batch}",
        f"--seq-length {workload.seq_len}",
        f"--max-position-embeddings {positions}",
        f"--attention-backend {_backend(model, workload)}",
        f"--optimizer {'adam' if workload.optimizer == 'adamw' else workload.optimizer}",
        *PRECISIONS[workload.precision],
        "--accumulate-allreduce-grads-in-fp32",  # as the memory of the plan counts gradients; the default with bf16
        *("--attention-dropout 0.0", "--hidden-dropout 0.0"),  # the plan counts no dropout masks
    ]


def _backend(model: Model, workload: Training) -> str:
    """FlashAttention-2 takes no values narrower than the keys (Transformer Engine, get_attention_backend)."""
    widths = [(m.head_dim, m.v_head_dim) for m in (kind.mixer for kind in model.kinds) if isinstance(m, Attention)]
    backend = BACKENDS[workload.attention]
    return "auto" if backend == "flash" and any(k != v for k, v in widths) else backend


def _capacity_flags(workload: Training) -> list[str]:
    """(L14); the dispatcher of `_moe_flags` is the one that takes a capacity (transformer_config.py)."""
    if workload.expert_capacity is None:
        return []
    padded = ["--moe-pad-expert-input-to-capacity"] if workload.pad_experts else []
    return [f"--moe-expert-capacity-factor {workload.expert_capacity}", *padded]


def _offload_flags(degrees: Degrees) -> list[str]:
    """(U1); arguments.py wants the precision-aware optimizer with it, whose states are in fp32 unless more is said. (U5)."""
    share, layers, flags = degrees.offload_optimizer, degrees.offload_layers, []
    if share:
        flags = ["--optimizer-cpu-offload", f"--optimizer-offload-fraction {share}", "--use-precision-aware-optimizer"]
    return [*flags, *(["--cpu-offloading", f"--cpu-offloading-num-layers {layers}"] if layers else [])]


def _model_faults(model: Model) -> list[str]:
    """What of the model no flag can say."""
    faults = []
    hybrid = is_hybrid(model)
    for kind in model.kinds:
        if hybrid and _letter(kind) is None:
            faults.append(f"layer kind {kind.name} has no letter in Megatron-Core's hybrid layer pattern")
        elif not hybrid and not isinstance(kind.mixer, Attention):
            faults.append(f"layer kind {kind.name}: linear attention is not exported to Megatron-Core yet")
            continue
        names = {tensor.name for tensor in kind.tensors}
        norms = {name for name in names if _NORM.fullmatch(name) and name.endswith("weight")}
        parts = (kind.mixer is not None) + (kind.ffn is not None)
        unknown = sorted(name for name in names - LAYER_TENSORS if not _NORM.fullmatch(name))
        if unknown:
            faults.append(f"layer kind {kind.name}: no flag of Megatron-Core is known for {', '.join(unknown)}")
        if len(norms) != parts:
            faults.append(
                f"layer kind {kind.name} has {len(norms)} norms, Megatron-Core one before each of {parts} parts"
            )
        faults += _part_faults(kind)
    ends = sorted({tensor.name for tensor in (*model.embedding, *model.head)} - END_TENSORS)
    if ends:
        faults.append(f"model {model.name}: no flag of Megatron-Core is known for {', '.join(ends)}")
    if not faults:
        faults += [
            f"model {model.name}: layers differ in {what}, which Megatron-Core's flags cannot say layer by layer: "
            + "; ".join(" ".join(flags) or "none" for flags in described)
            for what, described in _shapes(model).items()
            if len(described) > 1
        ]
    return faults


def _part_faults(kind: LayerKind) -> Iterable[str]:
    shapes = {tensor.name: tensor.shape for tensor in kind.tensors}
    if isinstance(kind.mixer, Attention) and shapes.get("q_norm.weight", (kind.mixer.head_dim,)) != (
        kind.mixer.head_dim,
    ):
        yield f"layer kind {kind.name}: norms of queries and keys over a whole layer, Megatron-Core has them per head"
    if isinstance(kind.mixer, Attention) and kind.mixer.chunked:
        yield f"layer kind {kind.name}: attention in chunks of {kind.mixer.window}, Megatron-Core has sliding windows alone"
    if isinstance(kind.mixer, Mamba) and kind.mixer.conv_kernel != MAMBA_CONV_KERNEL:
        yield f"layer kind {kind.name}: conv_kernel={kind.mixer.conv_kernel}, Megatron-Core has {MAMBA_CONV_KERNEL}"
    biased, plain = _bias_pattern(kind)
    if biased and plain:
        yield (
            f"layer kind {kind.name}: biases on {', '.join(sorted(biased))} but not on {', '.join(sorted(plain))}; "
            "Megatron-Core puts them on all, on none, or on queries, keys and values alone"
        )


def _bias_pattern(kind: LayerKind) -> tuple[set[str], set[str]]:
    """Which matrices of a layer have a bias and which have none; biases on all of q, k and v alone count as none."""
    names = {tensor.name for tensor in kind.tensors}
    matrices = {bias for bias in QKV_BIASES | LINEAR_BIASES if bias.replace("bias", "weight") in names}
    biased = matrices & names
    if biased == matrices & QKV_BIASES:
        biased = set()
        matrices -= QKV_BIASES
    return biased, matrices - biased


def _shapes(model: Model) -> dict[str, list[tuple[str, ...]]]:
    """Every distinct description of each aspect of the layers; the flags can say one of each."""
    found: dict[str, dict[tuple[str, ...], None]] = {}

    def note(aspect: str, flags: Iterable[str]) -> None:
        found.setdefault(aspect, {})[tuple(flags)] = None

    for kind in model.kinds:
        names = {tensor.name for tensor in kind.tensors}
        if isinstance(kind.mixer, Attention):
            note("attention", _attention_flags(kind.mixer))
            note("norms of queries and keys", ["--qk-layernorm"] if names & QK_NORMS else [])
        elif isinstance(kind.mixer, Mamba):
            note("Mamba", _mamba_flags(kind.mixer))
        if kind.ffn is not None:
            note("gating", ["--swiglu"] if kind.ffn.gated else [])
        if isinstance(kind.ffn, Mlp):
            note("feed-forward width", [f"--ffn-hidden-size {kind.ffn.intermediate}"])
        elif isinstance(kind.ffn, Moe):
            note("experts", _moe_flags(kind.ffn, names))
        if not isinstance(kind.mixer, Mamba) and not isinstance(kind.ffn, Moe):
            note("biases", _bias_flags(kind, names))
    return {aspect: list(flags) for aspect, flags in found.items()}


def _bias_flags(kind: LayerKind, names: set[str]) -> list[str]:
    if names & LINEAR_BIASES:
        return []
    return ["--disable-bias-linear", *(["--add-qkv-bias"] if names & QKV_BIASES else [])]


def _shape_flags(model: Model) -> list[str]:
    """The shape of the model; every aspect has one description by now."""
    flags = [f"--hidden-size {model.hidden}", f"--vocab-size {model.vocab}"]
    flags.append(f"--make-vocab-size-divisible-by {VOCAB_MULTIPLE}")
    shapes = _shapes(model)
    if "attention" not in shapes:
        # arguments.py requires the number of heads of every model, so that of the mixers stands in.
        mamba: Any = next(kind.mixer for kind in model.kinds if isinstance(kind.mixer, Mamba))
        flags += [f"--num-attention-heads {mamba.heads}", f"--kv-channels {mamba.inner // mamba.heads}"]
    flags += [flag for (described, *_) in shapes.values() for flag in described]
    if "biases" not in shapes:
        flags += _moe_biases(model)
    if "experts" in shapes and not is_hybrid(model):
        runs = groupby(isinstance(kind.ffn, Moe) for kind in model.layers)
        frequency = "+".join(f"[{int(routed)}]*{len(list(run))}" for routed, run in runs)
        flags.append(f"--moe-layer-freq '({frequency})'")
    flags.append(f"--normalization {'RMSNorm' if model.norm == 'rmsnorm' else 'LayerNorm'}")
    learned = any(tensor.name.startswith("position_embeddings") for tensor in model.embedding)
    rotary = "none" if "Mamba" in shapes else "rope"
    flags.append(f"--position-embedding-type {'learned_absolute' if learned else rotary}")
    if not model.tied:
        flags.append("--untie-embeddings-and-output-weights")
    return flags


def _moe_biases(model: Model) -> list[str]:
    """Biases of a model whose every feed-forward part is a mixture of experts, or whose layers are all Mamba's."""
    names = {tensor.name for kind in model.kinds for tensor in kind.tensors}
    return ["--disable-bias-linear", *(["--add-qkv-bias"] if names & QKV_BIASES else [])]


def _attention_flags(part: Attention) -> list[str]:
    flags = [f"--num-attention-heads {part.heads}"]
    if part.latent is not None:
        latent = part.latent
        flags += ["--multi-latent-attention", f"--kv-lora-rank {latent.kv_rank}", f"--v-head-dim {part.v_head_dim}"]
        flags += [f"--qk-head-dim {latent.qk_nope_dim}", f"--qk-pos-emb-head-dim {latent.qk_rope_dim}"]
        return flags + ([f"--q-lora-rank {latent.q_rank}"] if latent.q_rank else [])
    flags.append(f"--kv-channels {part.head_dim}")
    if part.kv_heads != part.heads:
        flags += ["--group-query-attention", f"--num-query-groups {part.kv_heads}"]
    if part.window:
        flags.append(f"--window-size {part.window - 1},0")  # keys before the query's own
    return flags


def _mamba_flags(part: Mamba) -> list[str]:
    heads = part.heads or 1
    return [
        f"--mamba-state-dim {part.state}",
        f"--mamba-num-heads {heads}",
        f"--mamba-head-dim {part.inner // heads}",
        f"--mamba-num-groups {part.groups}",
    ]


def _moe_flags(part: Moe, names: set[str]) -> list[str]:
    flags = [
        f"--num-experts {part.experts}",
        f"--moe-router-topk {part.top_k}",
        f"--moe-ffn-hidden-size {part.intermediate}",
        "--moe-token-dispatcher-type alltoall",
        "--moe-grouped-gemm",
    ]
    if part.shared_intermediate:
        flags.append(f"--moe-shared-expert-intermediate-size {part.shared_intermediate}")
    if "shared_expert_gate.weight" in names:
        flags.append("--moe-shared-expert-gate")
    if "router.bias" in names:
        # The balancing bias of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), defined for sigmoid scores.
        flags += ["--moe-router-score-function sigmoid", "--moe-router-enable-expert-bias"]
    return flags
