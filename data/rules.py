"""Rule packs: which plans a framework accepts.

A pack is a `Rules` value: what it allows as data, checked by the functions below. Each function returns every rule that
its arguments break, in words that name the values, so that a caller can report all of them together; the candidates of
a search are those that the same functions pass. Sources are the lines of each framework named in `docs/rules.md`; a
file without a framework before it is one of Megatron-LM.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from shardwise.data.faults import InputError
from shardwise.data.model import Attention, LayerKind, LinearAttention, Mamba, Mlp, Model, Moe
from shardwise.data.pipeline import micro_batch_faults
from shardwise.data.recompute import CORE, MODULES, has_module

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.data.plan import CpCommType, Degrees, Placement, Plan, RankOrder
    from shardwise.data.workload import Training

RINGS = ("p2p", "a2a+p2p")
"""Algorithms of context parallelism with a ring in them."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What one framework and version accepts.

    schedules, evaluated_schedules
        Searched, and accepted beside them.
    profile
        The constants used where no other profile is asked for.
    max_vpp, max_micro_batch
        The most that is searched; the framework accepts more.
    even_chunks
        With vpp > 1 the chunks between the first and the last are as even as can be.
    without
        Degrees that the framework has not: they are 1, or off.
    sharded_pipelines
        ZeRO-2 and 3 may have pp > 1.
    unsharded
        Which data parallelism goes without ZeRO: any, only "alone" (without tp and cp), or none.
    kv_replicas
        Key/value heads are replicated where tp is a multiple of them.
    context
        Algorithms of context parallelism, the one that is taken where none is asked for first.
    zigzag
        Every algorithm splits the sequence into 2 cp pieces, not the ring and the gather alone.
    ulysses_kv
        What cp does to the key/value heads of a device under Ulysses: it divides them, or is a "multiple" of them too, or
        "any".
    mtp
        Multi-token prediction can be trained.
    capacity
        Experts may have a capacity: it only drops tokens or pads experts too ("any"), it always pads ("padded"), or there is
        none.
    tp_overlap
        Matrix products and collectives of tensor parallelism can overlap piece by piece.
    transformer_engine
        Attention under context parallelism is that of Transformer Engine, with its own rules.
    fused_context
        Rings and gathers of context parallelism take fused attention kernels alone.
    bf16_experts
        Experts are trained in bf16, or in 8 or 4 bits with it, not in fp16.
    delayed_scaling
        fp8 scales by what earlier steps saw, which repeating norms and expert activations would upset.
    joint_sequence
        With sequence and context parallelism each of the 2 cp pieces splits tp ways.
    expert_split
        What etp may be, if not everything that divides.
    offload
        Where the host can have a share of the optimizer: "any" with any ZeRO stage, with the "distributed" optimizer (stage
        1), in "stages" 1 to 3, of which only 3 divides it, or in none.
    activations_to_host
        The first layers can leave their saved activations to the host.
    strict_dualpipe
        DualPipe-V takes neither tied embeddings nor context parallelism nor fewer layers than chunks.
    recompute_modules
        What selective recompute can repeat.
    """

    name: str
    version: str
    schedules: tuple[str, ...]
    zero_stages: tuple[int, ...]
    rank_orders: tuple[RankOrder, ...]
    uniform_recompute: bool
    linear_ranks: bool
    interleave_group_is_pp: bool
    experts_need_sequence_parallel: bool
    profile: str = "megatron-core"
    max_vpp: int = 16
    max_micro_batch: int = 32
    evaluated_schedules: tuple[str, ...] = ()
    even_chunks: bool = True
    without: tuple[str, ...] = ()
    sharded_pipelines: bool = False
    unsharded: Literal["any", "alone", "none"] = "any"
    kv_replicas: bool = True
    context: tuple[CpCommType, ...] = ("p2p",)
    zigzag: bool = True
    ulysses_kv: Literal["divides", "multiple", "any"] = "divides"
    transformer_engine: bool = False
    tp_overlap: bool = False
    mtp: bool = False
    capacity: Literal["none", "any", "padded"] = "none"
    fused_context: bool = True
    bf16_experts: bool = False
    delayed_scaling: bool = False
    joint_sequence: bool = False
    expert_split: Literal["any", "1", "tp"] = "any"
    strict_dualpipe: bool = False
    offload: Literal["none", "any", "distributed", "stages"] = "none"
    activations_to_host: bool = False
    recompute_modules: tuple[str, ...] = (CORE,)


MEGATRON_CORE = Rules(
    name="megatron-core",
    version="core 0.20.0 dev (d98e8a64ddf3)",
    schedules=("1f1b", "interleaved-1f1b"),
    zero_stages=(0, 1, 2, 3),
    rank_orders=("tp-dp-pp", "tp-pp-dp"),
    uniform_recompute=True,
    linear_ranks=True,
    interleave_group_is_pp=True,
    experts_need_sequence_parallel=True,
    context=("p2p", "allgather", "a2a", "a2a+p2p"),
    transformer_engine=True,
    bf16_experts=True,
    delayed_scaling=True,
    tp_overlap=True,
    mtp=True,
    capacity="any",
    offload="distributed",
    activations_to_host=True,
    recompute_modules=MODULES,
)
TORCHTITAN = Rules(
    name="torchtitan",
    version="0.3.0",
    schedules=("1f1b", "interleaved-1f1b", "gpipe", "zb-v", "dualpipe-v"),
    zero_stages=(0, 2, 3),
    rank_orders=("tp-dp-pp",),
    uniform_recompute=True,
    linear_ranks=True,
    interleave_group_is_pp=True,
    experts_need_sequence_parallel=False,
    profile="torchtitan",
    sharded_pipelines=True,
    unsharded="none",
    kv_replicas=False,
    context=("p2p", "allgather"),
    joint_sequence=True,
    tp_overlap=True,
    expert_split="1",
)
DEEPSPEED = Rules(
    name="deepspeed",
    version="0.19.8",
    schedules=("1f1b",),
    zero_stages=(0, 1, 2, 3),
    rank_orders=("tp-dp-pp",),
    uniform_recompute=True,
    linear_ranks=True,
    interleave_group_is_pp=True,
    experts_need_sequence_parallel=False,
    without=("vpp", "sequence_parallel", "dp_replicate"),
    kv_replicas=False,
    context=("a2a",),
    zigzag=False,
    ulysses_kv="multiple",
    capacity="padded",
    offload="stages",
)
ACCELERATE = Rules(
    name="accelerate",
    version="1.15.0",
    schedules=("1f1b",),
    zero_stages=(0, 2, 3),
    rank_orders=("tp-dp-pp",),
    uniform_recompute=True,
    linear_ranks=True,
    interleave_group_is_pp=True,
    experts_need_sequence_parallel=False,
    profile="torchtitan",
    without=("pp", "vpp", "ep", "sequence_parallel"),
    unsharded="alone",
    kv_replicas=False,
    context=("p2p", "allgather"),
    expert_split="tp",
)
MINDSPEED = replace(
    MEGATRON_CORE,
    name="mindspeed",
    version="028de58ca6",
    schedules=("1f1b", "interleaved-1f1b", "dualpipe-v"),
    context=("p2p", "allgather", "a2a", "a2a+p2p"),
    zigzag=False,
    ulysses_kv="any",
    transformer_engine=False,
    tp_overlap=False,
    activations_to_host=False,
    strict_dualpipe=True,
)
FREE = Rules(
    name="free",
    version="1",
    schedules=("1f1b", "eager-1f1b", "interleaved-1f1b", "gpipe", "zb-h1", "zb-2p", "zb-v", "dualpipe-v"),
    zero_stages=(0, 1, 2, 3),
    rank_orders=("tp-dp-pp",),
    uniform_recompute=False,
    linear_ranks=False,
    interleave_group_is_pp=True,
    experts_need_sequence_parallel=False,
    evaluated_schedules=("dualpipe",),
    sharded_pipelines=True,
    context=("p2p", "allgather", "a2a", "a2a+p2p"),
    zigzag=False,
    ulysses_kv="multiple",
    fused_context=False,
    mtp=True,
    capacity="any",
    offload="any",
    activations_to_host=True,
    tp_overlap=True,
    recompute_modules=MODULES,
)
PACKS = {pack.name: pack for pack in (MEGATRON_CORE, TORCHTITAN, DEEPSPEED, ACCELERATE, MINDSPEED, FREE)}
FREE_CHUNKS = "+free-chunks"
FP8_WIDTH = {"fp8": 16, "mxfp8": 32}
"""What the width of a product in 8 bits is a multiple of (TransformerEngine pytorch/utils.py, `check_dim_for_fp8_exec`;
pytorch/constants.py, `MXFP8_BLOCK_SCALING_SIZE`)."""
ABSENT = {
    "pp": "pipeline parallelism",
    "vpp": "interleaved chunks",
    "ep": "expert parallelism",
    "sequence_parallel": "sequence parallelism beside tensor parallelism",
    "dp_replicate": "groups of replicas that shard within",
}


def load_rules(name: str) -> Rules:
    """The rule pack of that name, which may end in `FREE_CHUNKS`; raises `InputError` for an unknown one."""
    known = name.removesuffix(FREE_CHUNKS)
    if known not in PACKS:
        raise InputError(f"rules={name!r} is unknown; known packs are {', '.join(PACKS)}")
    return PACKS[known] if name == known else free_chunks(PACKS[known])


def free_chunks(rules: Rules) -> Rules:
    """The pack with any contiguous split into chunks, as a pipeline layout can state it (core/transformer/
    pipeline_parallel_layer_layout.py)."""
    return replace(rules, name=rules.name + FREE_CHUNKS, even_chunks=False)


def absent_faults(rules: Rules, **degrees: int) -> list[str]:
    """Degrees that the framework has not; sequence parallelism is one of 0 or 1."""
    return [
        f"{name}={int(value)}: {rules.name} has no {ABSENT[name]}"
        for name, value in degrees.items()
        if name in rules.without and value > (name != "sequence_parallel")
    ]


def tensor_faults(rules: Rules, model: Model, tp: int, sequence_parallel: bool, seq_len: int) -> list[str]:
    """Rules on tensor parallelism: every sharded dimension divides.

    Heads and key/value groups: transformer_config.py L1446, L1461-1468, torchtitan models/common/decoder.py L149-158;
    linear attention L1500-1509; Mamba: ssm/mamba_mixer.py L250-274; column and row dimensions:
    tensor_parallel/layers.py L1038, L1408.
    """
    faults = [fault for kind in model.kinds for fault in _kind_faults(rules, kind, tp)]
    if sequence_parallel and tp == 1:
        faults.append("sequence_parallel=true needs tp > 1")
    if sequence_parallel and seq_len % tp:
        faults.append(f"tp={tp} does not divide seq_len={seq_len}, as sequence_parallel=true requires")
    return list(dict.fromkeys(faults))


def _kind_faults(rules: Rules, kind: LayerKind, tp: int) -> Iterable[str]:
    mixer, ffn = kind.mixer, kind.ffn
    if isinstance(mixer, Attention):
        if mixer.heads % tp:
            yield f"tp={tp} does not divide num_attention_heads={mixer.heads}"
        if mixer.latent is None and mixer.kv_heads % tp:
            if not rules.kv_replicas:
                yield f"tp={tp} does not divide num_key_value_heads={mixer.kv_heads} ({rules.name} does not replicate them)"
            elif tp % mixer.kv_heads:
                yield f"tp={tp} neither divides nor is a multiple of num_key_value_heads={mixer.kv_heads}"
    elif isinstance(mixer, LinearAttention):
        for name, heads in (("key", mixer.key_heads), ("value", mixer.value_heads)):
            if heads % tp:
                yield f"tp={tp} does not divide linear_num_{name}_heads={heads}"
    elif isinstance(mixer, Mamba):
        if mixer.heads is not None and mixer.heads % tp:
            yield f"tp={tp} does not divide mamba_num_heads={mixer.heads}"
        if mixer.heads is not None and mixer.groups % tp:
            yield f"tp={tp} does not divide mamba n_groups={mixer.groups}"
        if mixer.inner % tp:
            yield f"tp={tp} does not divide mamba inner size={mixer.inner}"
        if mixer.heads is not None and mixer.heads % mixer.groups:
            yield f"mamba n_groups={mixer.groups} does not divide mamba_num_heads={mixer.heads}"
        width = 2 * mixer.inner + 2 * mixer.groups * mixer.state + (mixer.heads or 0)
        if mixer.heads is not None and width % 16:
            yield f"mamba input projection of width {width} is not a multiple of 16"
    if isinstance(ffn, Mlp) and ffn.intermediate % tp:
        yield f"tp={tp} does not divide intermediate_size={ffn.intermediate}"
    if isinstance(ffn, Moe) and ffn.shared_intermediate % tp:
        yield f"tp={tp} does not divide shared_expert_intermediate_size={ffn.shared_intermediate}"


def expert_faults(rules: Rules, model: Model, tp: int, sequence_parallel: bool) -> list[str]:
    """Megatron refuses to train experts with tensor but without sequence parallelism (core/transformer/moe/moe_layer.py)."""
    experts = any(isinstance(kind.ffn, Moe) for kind in model.kinds)
    if rules.experts_need_sequence_parallel and experts and tp > 1 and not sequence_parallel:
        return [f"tp={tp} with experts needs sequence_parallel=true"]
    return []


def mtp_faults(rules: Rules, model: Model, modules: int) -> list[str]:
    """Multi-token prediction: the pack has it, the model so many modules, and its last layer is what they repeat (Megatron
    core/models/gpt/gpt_layer_specs.py, `get_gpt_mtp_block_spec`)."""
    if not modules:
        return []
    faults = [] if rules.mtp else [f"mtp_layers={modules}: {rules.name} trains no multi-token prediction"]
    if modules > model.mtp_depth:
        faults.append(f"mtp_layers={modules}: {model.name} has {model.mtp_depth} multi-token-prediction modules")
    elif not isinstance(model.layers[-1].mixer, Attention) or model.layers[-1].ffn is None:
        faults.append(f"mtp_layers={modules}: the last layer of {model.name} is no transformer layer")
    return faults


def precision_faults(rules: Rules, model: Model, precision: str) -> list[str]:
    """Megatron's grouped experts take bf16, and its expert parallelism no fp16 (arguments.py, `moe_grouped_gemm`, L1657)."""
    if rules.bf16_experts and precision == "fp16" and any(isinstance(kind.ffn, Moe) for kind in model.kinds):
        return [f"precision=fp16: {rules.name} trains the experts of {model.name} in bf16, fp8 or narrower"]
    return []


def overlap_faults(rules: Rules, workload: Training) -> list[str]:
    """Overlap of tensor parallelism (arguments.py L1442; torchtitan `enable_async_tensor_parallel`)."""
    if workload.tp_overlap and not rules.tp_overlap:
        return [f"tp_overlap=true: {rules.name} does not overlap the collectives of tensor parallelism"]
    return []


def capacity_faults(rules: Rules, model: Model, workload: Training) -> list[str]:
    """The capacity of experts: the pack has one, and no expert is to take more tokens than there are (Megatron
    core/transformer/moe/moe_utils.py, `apply_router_token_dropping`; DeepSpeed moe/sharded_moe.py, `topkgating`)."""
    factor, load = workload.expert_capacity, workload.expert_imbalance
    parts = list(dict.fromkeys(kind.ffn for kind in model.kinds if isinstance(kind.ffn, Moe)))
    faults = [f"expert_imbalance={load:g}: {model.name} has no experts"] if load > 1 and not parts else []
    if factor is None:
        return faults
    faults += [] if parts else [f"expert_capacity={factor:g}: {model.name} has no experts"]
    if rules.capacity == "none":
        faults.append(f"expert_capacity={factor:g}: {rules.name} drops no tokens")
    elif rules.capacity == "padded" and not workload.pad_experts:
        faults.append(f"expert_capacity={factor:g} needs pad_experts=true: {rules.name} pads every expert")
    return faults + [
        f"expert_capacity={factor:g} is more than num_experts={part.experts} / top_k={part.top_k}, which is every token"
        for part in parts
        if factor * part.top_k > part.experts
    ]


def pipeline_faults(rules: Rules, layers: int, pp: int, vpp: int) -> list[str]:
    """Rules on the shape of the pipeline. Interleaving needs pp > 1 (arguments.py L1002-1006)."""
    faults = absent_faults(rules, pp=pp, vpp=vpp)
    if pp > 1 and pp * vpp > layers + 2:
        faults.append(
            f"pp={pp} x vpp={vpp} makes {pp * vpp} chunks, more than layers={layers} + 2: "
            "only the first and the last chunk may be without a layer"
        )
    if vpp > 1 and pp == 1:
        faults.append(f"vpp={vpp} needs pp > 1")
    return faults


def batch_faults(global_batch: int, micro_batch: int, dp: int) -> list[str]:
    """global_batch % (micro_batch * dp) == 0 (num_microbatches_calculator.py L381)."""
    if global_batch % (micro_batch * dp):
        return [f"micro_batch={micro_batch} x dp={dp} does not divide global_batch={global_batch}"]
    return []


def interleave_faults(rules: Rules, pp: int, vpp: int, micro_batches: int) -> list[str]:
    """Interleaving runs groups of pp micro-batches, so M % pp == 0 (schedules.py L1157-1180, the default group); in groups
    of another size at least pp of them."""
    if vpp > 1 and not rules.interleave_group_is_pp and micro_batches < pp:
        return [f"vpp={vpp} needs micro_batches={micro_batches} to be at least pp={pp}"]
    if vpp > 1 and rules.interleave_group_is_pp and micro_batches % pp:
        return [
            f"vpp={vpp} needs micro_batches={micro_batches} to be a multiple of pp={pp}; they are "
            "global_batch / (micro_batch x dp): raise global_batch, or lower micro_batch, dp or pp"
        ]
    return []


def rank_faults(rules: Rules, placement: Placement) -> list[str]:
    """With ranks numbered along the devices, an axis leaves a level only when all faster axes are complete in it."""
    if placement.rank_order not in rules.rank_orders:
        return [f"rank_order={placement.rank_order} is not one of {', '.join(rules.rank_orders)}"]
    if rules.linear_ranks and not is_linear(placement):
        return [
            f"placement tp={placement.tp}, pp={placement.pp}, dp={placement.dp} is not reached by "
            f"rank order {placement.rank_order}"
        ]
    return []


def is_linear(placement: Placement) -> bool:
    """Whether numbering ranks by `rank_order` along the devices gives this placement.

    Read axis by axis, fastest first, the levels at which an axis splits must never fall back to an inner one.
    """
    levels = [
        level
        for axis in placement.rank_order.replace("tp", "tp-cp").split("-")
        for level, factor in enumerate(placement.factors(axis))
        if factor > 1
    ]
    return levels == sorted(levels)


def stage_faults(rules: Rules, model: Model, plan: Plan, precision: str) -> list[str]:
    """Rules on stages: every layer once, empty chunks only at the ends, even interleaving, uniform recompute."""
    even = plan.degrees.vpp > 1 and rules.even_chunks
    faults = list(_split_faults(plan.chunk_layers, len(model.layers), even=even))
    if rules.uniform_recompute and len({(stage.mode, stage.recompute_layers) for stage in plan.stages}) > 1:
        faults.append(f"{rules.name} takes one recompute setting for all stages")
    named = {module for stage in plan.stages for module in stage.recompute_modules}
    return faults + module_faults(rules, model, named, precision) if named else faults


def repeatable(rules: Rules, precision: str) -> tuple[str, ...]:
    """The modules that selective recompute can repeat: with delayed scaling neither norms nor the activations of experts
    (transformer_config.py, the checks of `recompute_modules`)."""
    barred = ("layernorm", "moe_act") if rules.delayed_scaling and precision == "fp8" else ()
    return tuple(module for module in rules.recompute_modules if module not in barred)


def module_faults(rules: Rules, model: Model, modules: Iterable[str], precision: str) -> list[str]:
    """Modules that selective recompute is to repeat: the pack can, and some layer has each (transformer_config.py, the
    checks of `recompute_modules`)."""
    faults = []
    for module in sorted(modules):
        if module not in rules.recompute_modules:
            known = ", ".join(rules.recompute_modules)
            faults.append(f"recompute_modules={module}: {rules.name} repeats no more than {known}")
        elif module not in repeatable(rules, precision):
            faults.append(f"recompute_modules={module}: not with precision={precision}, whose scaling is delayed")
        elif module != CORE and not any(has_module(kind, module) for kind in model.kinds):
            faults.append(f"recompute_modules={module}: no layer of {model.name} has it")
    return faults


@lru_cache(maxsize=4096)
def _split_faults(chunks: tuple[int, ...], layers: int, *, even: bool) -> tuple[str, ...]:
    faults = []
    if sum(chunks) != layers:
        faults.append(f"stages hold {sum(chunks)} layers, the model has {layers}")
    if any(n == 0 for n in chunks[1:-1]):
        faults.append("a chunk between the first and the last has no layer")
    if len(chunks) == 1 and chunks[0] == 0:
        faults.append("the only stage has no layer")
    if even and not is_even(chunks):
        faults.append(
            "with vpp > 1 the chunks between the first and the last must hold q + 1 or q layers each, larger ones first"
        )
    return tuple(faults)


def is_even(chunks: tuple[int, ...]) -> bool:
    """Whether the chunks between the first and the last are q + 1 or q layers, larger ones first."""
    middle = chunks[1:-1]
    return not middle or (all(a >= b for a, b in itertools.pairwise(middle)) and middle[0] - middle[-1] <= 1)


def context_faults(
    rules: Rules,
    model: Model,
    tp: int,
    cp: int,
    seq_len: int,
    cp_comm_type: CpCommType = "p2p",
    cp_a2a: int = 1,
    kernel: str = "flash",
) -> list[str]:
    """The pack has the algorithm, which takes the model, the sequence and the attention kernel, and the heads of recurrent
    layers split (transformer_config.py L1500-1509; ssm/mamba_context_parallel.py L106-130)."""
    if cp == 1:
        return []
    if cp_comm_type not in rules.context:
        return [f"cp_comm_type={cp_comm_type} is not one of {', '.join(rules.context)} ({rules.name})"]
    own = _algorithm_faults(rules, model, tp, cp, seq_len, cp_comm_type, cp_a2a)
    faults = (*_recurrent_faults(model, tp, cp), *own, *_kernel_faults(rules, model, cp, cp_comm_type, kernel))
    return list(dict.fromkeys(faults))


def _kernel_faults(rules: Rules, model: Model, cp: int, cp_comm_type: CpCommType, kernel: str) -> Iterable[str]:
    """Pieces of attention are joined by the sums that fused kernels keep: Transformer Engine pytorch/attention/
    dot_product_attention/utils.py, `get_attention_backend`, has no unfused attention under any of its algorithms, torch
    distributed/tensor/experimental/_attention.py none in rings and gathers, MindSpeed core/context_parallel/
    ring_context_parallel none in rings."""
    split = cp_comm_type != "a2a" or rules.transformer_engine
    if (
        rules.fused_context
        and split
        and kernel == "unfused"
        and any(isinstance(k.mixer, Attention) for k in model.kinds)
    ):
        yield f"attention=unfused needs cp=1, not cp={cp} with cp_comm_type={cp_comm_type} ({rules.name})"


def context_algorithm(rules: Rules, model: Model, tp: int, cp: int, seq_len: int) -> CpCommType:
    """The algorithm that a plan has where none is asked for: the pack's first that accepts it, or its first; never the
    hierarchy, which has to be asked for by its size."""
    accepted = (
        name for name in rules.context if name != "a2a+p2p" and not context_faults(rules, model, tp, cp, seq_len, name)
    )
    return next(accepted, rules.context[0])


def _recurrent_faults(model: Model, tp: int, cp: int) -> Iterable[str]:
    for kind in model.kinds:
        mixer = kind.mixer
        if isinstance(mixer, LinearAttention):
            for name, heads in (("key", mixer.key_heads), ("value", mixer.value_heads)):
                if heads % (tp * cp):
                    yield f"tp x cp = {tp * cp} does not divide linear_num_{name}_heads={heads}"
        elif isinstance(mixer, Mamba) and mixer.heads is None:
            yield f"cp={cp} is not possible with Mamba-1 layers, which have no heads to split"
        elif isinstance(mixer, Mamba) and mixer.heads is not None:
            groups = max(mixer.groups // tp, 1)
            if mixer.heads % (tp * cp):
                yield f"tp x cp = {tp * cp} does not divide mamba_num_heads={mixer.heads}"
            if groups % cp and cp % groups:
                yield f"cp={cp} neither divides nor is a multiple of mamba n_groups={mixer.groups} / tp={tp}"


def _algorithm_faults(
    rules: Rules, model: Model, tp: int, cp: int, seq_len: int, cp_comm_type: CpCommType, cp_a2a: int
) -> Iterable[str]:
    """A ring and a gather split a causal sequence into 2 cp pieces (arguments.py L1336; MindSpeed
    context_parallel_feature.py L41); Ulysses splits the sequence and the heads (MindSpeed ulysses_context_parallel.py
    L29-33; DeepSpeed runtime/sequence_parallel/ulysses_sp.py L147-150, L706). Transformer Engine
    pytorch/attention/dot_product_attention/context_parallel.py, `attn_forward_func_with_cp`: sliding windows not in a ring,
    keys and values of different widths (MLA) in nothing else; `AttnFuncWithCPAndQKVOA2A`: cp divides both kinds of heads.
    A hierarchy has a ring, and asks of its all-to-all over cp_a2a ranks what Ulysses asks of cp (MindSpeed
    ulysses_context_parallel.py L60-73)."""
    pieces = cp if cp_comm_type == "a2a" and not rules.zigzag else 2 * cp
    if seq_len % pieces:
        yield f"cp={cp} needs seq_len={seq_len} to be a multiple of {pieces}"
    for mixer in (kind.mixer for kind in model.kinds):
        if not isinstance(mixer, Attention):
            continue
        if rules.transformer_engine and mixer.window and cp_comm_type in RINGS:
            yield f"cp_comm_type={cp_comm_type} does not take a sliding window of {mixer.window}: use allgather or a2a"
        if rules.transformer_engine and mixer.head_dim != mixer.v_head_dim and cp_comm_type not in RINGS:
            yield f"cp_comm_type={cp_comm_type} does not take keys of {mixer.head_dim} with values of {mixer.v_head_dim}: use p2p"
        if cp_comm_type == "a2a":
            yield from _ulysses_faults(rules, mixer, tp, "cp", cp)
        elif cp_comm_type == "a2a+p2p":
            yield from _ulysses_faults(rules, mixer, tp, "cp_a2a", cp_a2a)


def _ulysses_faults(rules: Rules, mixer: Attention, tp: int, name: str, ways: int) -> Iterable[str]:
    """Heads are exchanged over `ways` ranks, the degree `name`."""
    if mixer.heads % (tp * ways):
        yield f"tp x {name} = {tp * ways} does not divide num_attention_heads={mixer.heads}"
    if mixer.latent is not None:
        return
    kv_heads = max(mixer.kv_heads // tp, 1)
    stated = f"num_key_value_heads={mixer.kv_heads} / tp={tp}"
    if rules.ulysses_kv == "divides" and kv_heads % ways:
        yield f"{name}={ways} does not divide {stated}, as cp_comm_type={'a2a' if name == 'cp' else 'a2a+p2p'} requires"
    elif rules.ulysses_kv == "multiple" and kv_heads % ways and ways % kv_heads:
        yield f"{name}={ways} neither divides nor is a multiple of {stated}"


def sequence_faults(rules: Rules, tp: int, cp: int, sequence_parallel: bool, seq_len: int) -> list[str]:
    """Whether what context parallelism leaves of the sequence splits once more: torchtitan trainer.py L306-315, and
    Megatron's reduce-scatter behind the embedding (core/tensor_parallel/mappings.py)."""
    pieces = tp * (2 * cp if rules.joint_sequence else cp)
    told = not rules.joint_sequence and seq_len % tp  # by `tensor_faults`
    if sequence_parallel and cp > 1 and seq_len % pieces and not told:
        return [f"tp={tp} with cp={cp} needs seq_len={seq_len} to be a multiple of {pieces}"]
    return []


def expert_group_faults(rules: Rules, model: Model, tp: int, ep: int, etp: int) -> list[str]:
    """Experts are spread evenly (arguments.py L1657; DeepSpeed moe/layer.py L59) and each splits evenly."""
    experts = list(dict.fromkeys(kind.ffn for kind in model.kinds if isinstance(kind.ffn, Moe)))
    faults = absent_faults(rules, ep=ep)
    faults += [f"ep={ep} needs a model with experts"] if ep > 1 and not experts else []
    faults += [f"etp={etp} needs a model with experts"] if etp not in (1, tp) and not experts else []
    faults += [f"ep={ep} does not divide num_experts={part.experts}" for part in experts if part.experts % ep]
    ways = f"tp={tp}" if etp == tp else f"etp={etp}"
    faults += [
        f"{ways} does not divide moe_intermediate_size={part.intermediate}"
        for part in experts
        if part.intermediate % etp
    ]
    if experts and rules.expert_split == "1" and etp > 1:
        faults.append(f"etp={etp} must be 1: {rules.name} keeps experts whole")
    if experts and rules.expert_split == "tp" and etp != tp:
        faults.append(f"etp={etp} must be tp={tp}: {rules.name} splits experts like everything else")
    return faults


def sharding_faults(rules: Rules, zero: int, *, tp: int, cp: int, pp: int, dp: int) -> list[str]:
    """Which ZeRO stages there are and where; of the degrees it matters only whether they are above 1.

    Megatron has stage 1 in a pipeline (its distributed optimizer), FSDP without; DeepSpeed refuses 2 and 3 there
    (runtime/pipe/engine.py L76). torchtitan always shards over replicas; accelerate runs plain ones without tp and cp
    only (parallelism_config.py L311-345).
    """
    if zero not in rules.zero_stages:
        return [f"zero={zero} is not one of {', '.join(map(str, rules.zero_stages))}"]
    if zero >= 2 and pp > 1 and not rules.sharded_pipelines:
        return [f"zero={zero} needs pp=1, not pp={pp}: {rules.name} shards optimizer states only in a pipeline"]
    if zero == 0 and cp * dp > 1 and rules.unsharded == "none":
        return [f"zero=0 needs dp=1 and cp=1, not dp={dp} and cp={cp}: {rules.name} shards over all of them"]
    if zero == 0 and cp * dp > 1 and rules.unsharded == "alone" and tp * cp > 1:
        return [f"zero=0 with tp={tp} and cp={cp} needs dp=1 and cp=1, not dp={dp}: {rules.name} shards beside them"]
    return []


def offload_faults(rules: Rules, zero: int, share: float, param: bool = False, optimizer: str = "adamw") -> list[str]:
    """Which ZeRO stages can leave a share of the optimizer to the host, and their weights too (`param`).

    Megatron wants its precision-aware optimizer, which is Adam and a distributed one (arguments.py, `optimizer_cpu_offload`;
    core/optimizer/optimizer_config.py; MindSpeed-LLM checks the same). DeepSpeed has it in stages 1 to 3 and divides it in
    3, where weights can follow all of it (runtime/zero/offload_config.py).
    """
    if param and rules.offload not in ("any", "stages"):
        return [f"offload_param=true: {rules.name} has no weights on the host"]
    faults = _share_faults(rules, zero, share)
    if share and rules.offload == "distributed" and optimizer != "adamw":
        faults.append(f"offload_optimizer={share:g} needs optimizer=adamw, not {optimizer} ({rules.name})")
    if param and not faults and (zero != 3 or share != 1):
        faults.append(f"offload_param=true needs zero=3 and offload_optimizer=1, not zero={zero} and {share:g}")
    return faults


def activations_faults(rules: Rules, layers: int, pp: int, offload_layers: int, recomputed: bool = False) -> list[str]:
    """Which plans can leave saved activations to the host (transformer_config.py, `cpu_offloading`: fewer layers than there
    are, no pipeline, no recompute; transformer_block.py: Transformer Engine alone)."""
    if not offload_layers:
        return []
    said = f"offload_layers={offload_layers}"
    if not rules.activations_to_host:
        return [f"{said}: {rules.name} has no saved activations on the host"]
    faults = [] if offload_layers < layers else [f"{said} must be less than layers={layers}"]
    faults += [f"{said} needs pp=1, not pp={pp}"] if pp > 1 else []
    return faults + ([f"{said} needs recompute=none"] if recomputed else [])


def _share_faults(rules: Rules, zero: int, share: float) -> list[str]:
    if not share or rules.offload == "any":
        return []
    if rules.offload == "none":
        return [f"offload_optimizer={share:g}: {rules.name} has no optimizer on the host without its weights there too"]
    if rules.offload == "distributed" and zero != 1:
        return [
            f"offload_optimizer={share:g} needs zero=1, not zero={zero}: {rules.name} wants its distributed optimizer"
        ]
    if rules.offload == "stages" and zero == 0:
        return [f"offload_optimizer={share:g} needs zero >= 1: {rules.name} offloads what it shards"]
    if rules.offload == "stages" and zero < 3 and share < 1:
        return [f"offload_optimizer={share:g} with zero={zero} must be 1: {rules.name} divides it in stage 3 only"]
    return []


def replica_faults(rules: Rules, degrees: Degrees) -> list[str]:
    """Which replicas may share a copy under ZeRO: groups that hold every expert equally often, and that are groups at all
    where the framework shards by FSDP (torchtitan configs.py L279; accelerate parallelism_config.py L311-345, L373-395)."""
    d, faults = degrees, absent_faults(rules, dp_replicate=degrees.dp_replicate)
    if d.expert_dp % d.dp_replicate:
        faults.append(
            f"dp_replicate={d.dp_replicate} does not divide tp x cp x dp / (ep x etp) = {d.expert_dp}, "
            "the ranks that hold the same experts"
        )
    if rules.unsharded == "any" or d.zero < 2 or d.dp_shard > 1:
        return faults
    if d.cp == 1:
        faults.append(f"zero={d.zero} needs dp / dp_replicate > 1 or cp > 1, not dp={d.dp} and cp=1")
    elif rules.unsharded == "alone" and d.dp_replicate > 1:
        faults.append(f"cp={d.cp} with dp_replicate={d.dp_replicate} needs dp / dp_replicate > 1, not dp={d.dp}")
    return faults


def schedule_faults(rules: Rules, model: Model, schedule: str, cp: int) -> list[str]:
    """Which schedules there are; what DualPipe-V asks for: MindSpeed dualpipev_feature.py L21-52."""
    accepted = rules.schedules + rules.evaluated_schedules
    if schedule not in accepted:
        return [f"schedule={schedule} is not one of {', '.join(accepted)}"]
    faults = []
    if rules.strict_dualpipe and schedule == "dualpipe-v":
        if model.tied:
            faults.append("schedule=dualpipe-v needs untied embeddings")
        if cp > 1:
            faults.append(f"schedule=dualpipe-v needs cp=1, not cp={cp}")
    return faults


def depth_faults(rules: Rules, layers: int, schedule: str, pp: int) -> list[str]:
    """DualPipe-V with a layer for every chunk (MindSpeed dualpipev_feature.py L21-52)."""
    if rules.strict_dualpipe and schedule == "dualpipe-v" and layers < 2 * pp:
        return [f"schedule=dualpipe-v needs layers={layers} to be at least 2 x pp={pp}"]
    return []


def order_faults(degrees: Degrees, placement: Placement) -> list[str]:
    """With pp inside dp, experts and everything else have to be replicated alike (parallel_state.py L898)."""
    if placement.rank_order == "tp-pp-dp" and degrees.pp > 1 and degrees.ep * degrees.etp != degrees.tp * degrees.cp:
        return [
            f"rank_order=tp-pp-dp needs ep={degrees.ep} x etp={degrees.etp} to be tp x cp = {degrees.tp * degrees.cp}"
        ]
    return []


def plan_faults(rules: Rules, model: Model, workload: Training, plan: Plan) -> list[str]:
    """Every rule that `plan` breaks."""
    d, seq_len, global_batch, precision = plan.degrees, workload.seq_len, workload.global_batch, workload.precision
    faults = precision_faults(rules, model, precision)
    faults += absent_faults(rules, sequence_parallel=d.sequence_parallel)
    faults += tensor_faults(rules, model, d.tp, d.sequence_parallel, seq_len)
    faults += expert_faults(rules, model, d.tp, d.sequence_parallel)
    faults += pipeline_faults(rules, len(model.layers), d.pp, d.vpp)
    faults += batch_faults(global_batch, d.micro_batch, d.dp)
    if plan.micro_batches * d.micro_batch * d.dp != global_batch:
        faults.append(
            f"micro_batches={plan.micro_batches} x micro_batch={d.micro_batch} x dp={d.dp} is not "
            f"global_batch={global_batch}"
        )
    if plan.schedule == "interleaved-1f1b":
        faults += interleave_faults(rules, d.pp, d.vpp, plan.micro_batches)
    faults += micro_batch_faults(plan.schedule, d.pp, plan.micro_batches)
    faults += context_faults(rules, model, d.tp, d.cp, seq_len, d.cp_comm_type, d.cp_a2a, workload.attention)
    faults += sequence_faults(rules, d.tp, d.cp, d.sequence_parallel, seq_len)
    faults += expert_group_faults(rules, model, d.tp, d.ep, d.etp)
    faults += schedule_faults(rules, model, plan.schedule, d.cp)
    faults += depth_faults(rules, len(model.layers), plan.schedule, d.pp)
    faults += sharding_faults(rules, d.zero, tp=d.tp, cp=d.cp, pp=d.pp, dp=d.dp)
    faults += offload_faults(rules, d.zero, d.offload_optimizer, d.offload_param, workload.optimizer)
    if d.offload_param and d.pp > 1:
        faults.append(f"offload_param=true needs pp=1, not pp={d.pp}: in a pipeline weights stay gathered")
    recomputed = any(stage.recompute != "none" for stage in plan.stages)
    faults += activations_faults(rules, len(model.layers), d.pp, d.offload_layers, recomputed)
    faults += replica_faults(rules, d)
    faults += stage_faults(rules, model, plan, precision)
    faults += rank_faults(rules, plan.placement)
    if rules.linear_ranks:
        faults += order_faults(d, plan.placement)
    return faults


def plan_risks(rules: Rules, model: Model, precision: str, degrees: Degrees) -> list[str]:
    """What a legal plan may still run into: another version of the framework, kernels that do not take its shapes, and
    what users reported."""
    d, risks = degrees, []
    for kind in model.kinds:
        mixer, ffn = kind.mixer, kind.ffn
        if (
            isinstance(mixer, Attention)
            and mixer.latent is None
            and d.tp > mixer.kv_heads
            and rules.name.startswith(("megatron-core", "mindspeed"))
            and not any(_kind_faults(rules, kind, d.tp))
        ):
            risks.append(
                f"tp={d.tp} replicates num_key_value_heads={mixer.kv_heads}: Megatron-Core 0.15 and earlier refuse it, 0.16 "
                "takes it (modelscope/ms-swift issue 8219)"
            )
        risks += _narrow_risks(ffn, precision, d)
    experts = any(isinstance(kind.ffn, Moe) for kind in model.kinds)
    if rules.name.startswith("torchtitan") and experts and d.pp > 1 and d.ep > 1:
        risks.append(
            f"pp={d.pp} with ep={d.ep}: legal, but reported to hang (pytorch/torchtitan issue 1558); try it on few layers"
        )
    return list(dict.fromkeys(risks))


def _narrow_risks(ffn: Mlp | Moe | None, precision: str, degrees: Degrees) -> Iterable[str]:
    """Widths on one device that 8-bit products do not take."""
    multiple, tp, etp = FP8_WIDTH.get(precision, 1), degrees.tp, degrees.etp
    widths = []
    if isinstance(ffn, Mlp):
        widths = [("intermediate_size", ffn.intermediate, "tp", tp)]
    elif isinstance(ffn, Moe):
        widths = [("moe_intermediate_size", ffn.intermediate, "etp", etp)]
        widths += [("shared_expert_intermediate_size", ffn.shared_intermediate, "tp", tp)]
    for name, width, axis, ways in widths:
        if width % ways == 0 and width // ways % multiple:
            yield (
                f"precision={precision}: {name}={width} / {axis}={ways} = {width // ways} is not a multiple of {multiple}, "
                f"which its matrix products ask for; lower {axis}"
            )
