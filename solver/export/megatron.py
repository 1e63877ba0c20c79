"""Megatron-Core command line of a plan.

Flags as Megatron-LM commit d98e8a64ddf3 (core 0.20.0 dev) takes them: megatron/training/arguments.py and the fields of
ModelParallelConfig and TransformerConfig. Stages go into `--pipeline-model-parallel-layout`
(core/transformer/pipeline_parallel_layer_layout.py), those of hybrid models into `--hybrid-layer-pattern`
(core/models/hybrid/hybrid_layer_allocation.py).
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from shardwise.data.faults import InputError
from shardwise.data.model import Attention, LayerKind, Mamba, Mlp, Model, Moe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan

VOCAB_MULTIPLE = 128


def to_megatron(instance: Instance, plan: Plan) -> str:
    """The launch command as shell text, with what it leaves out said in comments."""
    d = plan.degrees
    per_node = plan.placement.blocks[0]
    lines = [
        f"# {instance.model.name} on {instance.cluster.name}: {d.devices} ranks, {per_node} per node, dp={d.dp} follows",
        "# from the world size. Data, tokenizer, optimizer schedule and checkpoint flags are yours to add.",
        f"torchrun --nproc-per-node {per_node} --nnodes {d.devices // per_node} pretrain_{_script(instance.model)}.py \\",
    ]
    flags = megatron_flags(instance, plan)
    lines += [f"  {flag} \\" for flag in flags[:-1]] + [f"  {flags[-1]}"]
    return "\n".join(lines) + "\n"


def megatron_flags(instance: Instance, plan: Plan) -> list[str]:
    """Every flag with its value, one per entry.

    Raises
    ------
    InputError
        When the model has layers that the flags cannot describe.
    """
    return (
        _parallel_flags(plan) + _stage_flags(instance.model, plan) + _run_flags(instance, plan) + _shape_flags(instance)
    )


def _parallel_flags(plan: Plan) -> list[str]:
    d = plan.degrees
    flags = [f"--tensor-model-parallel-size {d.tp}", f"--pipeline-model-parallel-size {d.pp}"]
    if d.sequence_parallel:
        flags.append("--sequence-parallel")
    if d.zero == 1:
        flags.append("--use-distributed-optimizer")
    if d.dp > 1:
        flags.append("--overlap-grad-reduce")
        if d.zero == 1:
            flags.append("--overlap-param-gather")
    if plan.placement.rank_order == "tp-pp-dp":
        flags.append("--use-tp-pp-dp-mapping")
    return flags


def _stage_flags(model: Model, plan: Plan) -> list[str]:
    """Layers of the stages, and recompute."""
    flags = []
    if is_hybrid(model):
        flags.append(f"--hybrid-layer-pattern '{hybrid_pattern(model, plan)}'")
    else:
        flags.append(f"--num-layers {len(model.layers)}")
        if plan.degrees.pp > 1:
            flags.append(f"--pipeline-model-parallel-layout '{pipeline_layout(plan.chunk_layers)}'")
    setting = plan.stages[0]
    if any((s.recompute, s.recompute_layers) != (setting.recompute, setting.recompute_layers) for s in plan.stages):
        raise InputError("recompute differs between stages, which Megatron-Core has no flag for: plan with its rules")
    if setting.recompute == "full":
        flags += [
            "--recompute-granularity full",
            "--recompute-method block",
            f"--recompute-num-layers {setting.recompute_layers}",
        ]
    elif setting.recompute == "selective":
        flags += ["--recompute-granularity selective", "--recompute-modules core_attn"]
    return flags


def pipeline_layout(chunks: Sequence[int]) -> str:
    """The stages in the layout grammar: E embedding, t layer, L loss, `|` between stages, `(...)*n` repeats.

    Runs of equal stages are written as one repeat. A repeat of fewer than three is written out, and no repeat is nested,
    because the grammar expands parentheses once.
    """
    last = len(chunks) - 1
    stages = [("E" if i == 0 else "") + "t" * n + ("L" if i == last else "") for i, n in enumerate(chunks)]
    out = [_run(stages[0]) + "|"]
    for stage, run in groupby(stages[1:last]):
        count = len(list(run))
        out.append(f"({stage}|)*{count}" if count > 2 else (_run(stage) + "|") * count)
    return "".join(out) + _run(stages[last])


def _run(stage: str) -> str:
    """`ttttt` as `t*5` where that is shorter."""
    count = stage.count("t")
    return stage.replace("t" * count, f"t*{count}") if count > 3 else stage


def is_hybrid(model: Model) -> bool:
    """Whether layers are single mixers or feed-forward parts, which only the hybrid pattern can describe."""
    return any(kind.mixer is None or kind.ffn is None or isinstance(kind.mixer, Mamba) for kind in model.kinds)


def hybrid_pattern(model: Model, plan: Plan) -> str:
    """One letter per layer with `|` between stages."""
    letters = [_letter(kind) for kind in model.layers]
    cuts = plan.cuts
    return "|".join("".join(letters[a:b]) for a, b in pairwise(cuts))


def _letter(kind: LayerKind) -> str:
    if isinstance(kind.mixer, Mamba) and kind.ffn is None and kind.mixer.version == 2:
        return "M"
    if isinstance(kind.mixer, Attention) and kind.ffn is None:
        return "+" if kind.mixer.latent else "*"
    if kind.mixer is None and isinstance(kind.ffn, Mlp):
        return "-"
    if kind.mixer is None and isinstance(kind.ffn, Moe):
        return "E"
    raise InputError(f"layer kind {kind.name} has no letter in Megatron-Core's hybrid layer pattern")


def _script(model: Model) -> str:
    return "hybrid" if is_hybrid(model) else "gpt"


def _run_flags(instance: Instance, plan: Plan) -> list[str]:
    """Batch, precision and kernels."""
    workload = instance.workload
    flags = [
        f"--micro-batch-size {plan.degrees.micro_batch}",
        f"--global-batch-size {workload.global_batch}",
        f"--seq-length {workload.seq_len}",
        f"--max-position-embeddings {max(workload.seq_len, instance.model.max_positions or 0)}",
        f"--attention-backend {workload.attention}",
        f"--optimizer {'adam' if workload.optimizer == 'adamw' else workload.optimizer}",
    ]
    flags += {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format hybrid"]}[workload.precision]
    return flags


def _shape_flags(instance: Instance) -> list[str]:
    """The shape of the model."""
    model = instance.model
    flags = [f"--hidden-size {model.hidden}", f"--vocab-size {model.vocab}"]
    flags.append(f"--make-vocab-size-divisible-by {VOCAB_MULTIPLE}")
    flags += _common(model, [_attention_flags(part) for part in _mixers(model)])
    flags += _common(model, [["--swiglu"] if kind.ffn.gated else [] for kind in model.kinds if kind.ffn is not None])
    flags += dense_width_flags(model)
    moes = [kind.ffn for kind in model.layers if isinstance(kind.ffn, Moe)]
    if moes:
        flags += _moe_flags(model, moes[0])
    mambas = [kind.mixer for kind in model.layers if isinstance(kind.mixer, Mamba)]
    if mambas:
        flags += [
            f"--mamba-state-dim {mambas[0].state}",
            f"--mamba-num-heads {mambas[0].heads}",
            f"--mamba-head-dim {mambas[0].inner // (mambas[0].heads or 1)}",
            f"--mamba-num-groups {mambas[0].groups}",
        ]
    flags.append(f"--normalization {'RMSNorm' if model.norm == 'rmsnorm' else 'LayerNorm'}")
    if not any("position" in tensor.name for tensor in model.embedding):
        flags.append("--position-embedding-type rope" if not mambas else "--position-embedding-type none")
    if not model.tied:
        flags.append("--untie-embeddings-and-output-weights")
    if not any(tensor.name.endswith("proj.bias") for kind in model.kinds for tensor in kind.tensors):
        flags.append("--disable-bias-linear")
    return flags


def _mixers(model: Model) -> list[Attention]:
    found = []
    for kind in model.kinds:
        if isinstance(kind.mixer, Attention):
            found.append(kind.mixer)
        elif kind.mixer is not None and not isinstance(kind.mixer, Mamba):
            raise InputError(f"layer kind {kind.name}: linear attention is not exported to Megatron-Core yet")
    return found


def _common(model: Model, described: list[list[str]]) -> list[str]:
    """The flags that all layers share; Megatron-Core has none that differ by layer."""
    distinct = list(dict.fromkeys(tuple(flags) for flags in described))
    if len(distinct) > 1:
        raise InputError(
            f"model {model.name}: its layers differ in {' and '.join(' '.join(flags) for flags in distinct[:2])}, which "
            "Megatron-Core's flags cannot say layer by layer"
        )
    return list(distinct[0]) if distinct else []


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
        flags.append(f"--window-size {part.window},0")
    return flags


def _moe_flags(model: Model, part: Moe) -> list[str]:
    flags = [
        f"--num-experts {part.experts}",
        f"--moe-router-topk {part.top_k}",
        f"--moe-ffn-hidden-size {part.intermediate}",
        "--moe-grouped-gemm",
    ]
    if part.shared_intermediate:
        flags.append(f"--moe-shared-expert-intermediate-size {part.shared_intermediate}")
    if not is_hybrid(model):
        frequency = "+".join(
            f"[{int(routed)}]*{len(list(run))}" for routed, run in groupby(isinstance(k.ffn, Moe) for k in model.layers)
        )
        flags.append(f"--moe-layer-freq '({frequency})'")
    return flags


def dense_width_flags(model: Model) -> list[str]:
    """`--ffn-hidden-size` of the dense layers, if there are any."""
    widths = {kind.ffn.intermediate for kind in model.kinds if isinstance(kind.ffn, Mlp)}
    if len(widths) > 1:
        raise InputError(f"model {model.name}: dense layers of widths {sorted(widths)}; Megatron-Core takes one")
    return [f"--ffn-hidden-size {width}" for width in widths]
