"""Small instances, and every plan of their universe, enumerated from its definition by code of its own.

The universe as documented in DESIGN.md section 2 and docs/rules.md: all degrees, micro-batches up to 32, up to 16 chunks
a stage, contiguous splits (with several chunks a stage even ones, the first and the last free), recompute settings (one
for all stages, or one for each), and placements. A placement is how each degree factors over the levels of the cluster.
Nothing here comes from `formulations` or from the search: plans are judged by `evaluate` and by nothing else.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from shardwise.data.cluster import Accelerator, Cluster, Domain, Host, Link
from shardwise.data.faults import InputError
from shardwise.data.instance import Instance
from shardwise.data.limits import parse_limits
from shardwise.data.model import Attention, LayerKind, Mamba, Mlp, Model, Moe, Tensor
from shardwise.data.model_parts import attention, layer, mamba2, mlp, moe
from shardwise.data.plan import Degrees, Placement, Plan, Stage
from shardwise.data.profile import load_profile
from shardwise.data.rules import capacity_faults, load_rules, module_faults, mtp_faults, overlap_faults
from shardwise.data.workload import Precision, Training
from shardwise.formulations.coefficients import searched_sets
from shardwise.solver.evaluate import admitted_units, evaluate, timed_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.data.pipeline import Schedule
    from shardwise.data.plan import CpCommType, RankOrder
    from shardwise.data.profile import Profile

THOROUGH = bool(os.environ.get("SHARDWISE_THOROUGH"))
MOST_PLANS = 20_000 if THOROUGH else 700
MIB = 2**20
MANY_BYTES = 2**45

Splits = list[tuple[int, ...]]
Settings = tuple[tuple[str, int], ...]


def examples(few: int) -> settings:
    """Profile of a property test: `few` examples, forty times as many with SHARDWISE_THOROUGH=1."""
    return settings(
        max_examples=few * 40 if THOROUGH else few,
        deadline=None,
        derandomize=not THOROUGH,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )


# -- instances ---------------------------------------------------------------------------------------------------------


def accelerator(memory_bytes: int = MANY_BYTES) -> Accelerator:
    peaks = {"bf16": 1e15, "fp16": 1e15, "fp8": 2e15}
    return Accelerator(
        "toy", "none", memory_bytes, 3e12, peaks, tdp_w=700.0, host_link_bytes_per_s=32e9, price_usd_per_hour=2.0
    )


def llama(layers: int = 2, hidden: int = 1024, vocab: int = 32000, *, tied: bool = False) -> Model:
    """A dense model: attention heads of 128, half as many key/value heads, a gated MLP of 4 h."""
    return model_of([dense(hidden)] * layers, hidden, vocab, tied=tied)


def dense(hidden: int, *, kv_heads: int | None = None, width: int = 4, head_dim: int = 128) -> LayerKind:
    heads = hidden // head_dim
    kv = max(heads // 2, 1) if kv_heads is None else min(kv_heads, heads)
    return layer(hidden, attention(hidden, heads, kv, head_dim), mlp(hidden, width * hidden, gated=True))


def model_of(layers: list[LayerKind], hidden: int, vocab: int, *, tied: bool) -> Model:
    head: tuple[Tensor, ...] = (Tensor("norm.weight", (hidden,)),)
    if not tied:
        head += (Tensor("lm_head.weight", (vocab, hidden), "vocab"),)
    embedding = (Tensor("embed_tokens.weight", (vocab, hidden), "vocab"),)
    return Model("small", "small", hidden, vocab, tied, tuple(layers), embedding, head)


NVLINK = Link("nvlink", "nvlink", 450e9, 3e-7)
PCIE = Link("pcie", "pcie", 32e9, 1e-6)
INFINIBAND = Link("infiniband", "infiniband", 50e9, 2e-6)
ETHERNET = Link("ethernet", "roce", 12.5e9, 4e-6, 2.0)


def node(devices: int, link: Link = NVLINK, device: Accelerator | None = None) -> Domain:
    return Domain(f"node-{devices}", "node", link, device or accelerator(), devices)


def cluster_of(
    sizes: tuple[Any, ...], links: tuple[Link, ...], device: Accelerator | None = None, host_bytes: float = 2e12
) -> Cluster:
    """The cluster of nested sizes: `(4,)` is one node, `(4, 3)` two nodes, `((4, 3), (2,))` three nodes in two racks."""
    depth = len(links)

    def domain(size: Any, level: int, name: str) -> Domain:
        if level == 0:
            return Domain(name, "node", links[0], device or accelerator(), size)
        children = tuple(domain(child, level - 1, f"{name}.{i}") for i, child in enumerate(size))
        return Domain(name, ("rack", "site")[level - 1], links[level], children=children)

    root = domain(sizes if depth > 1 else sizes[0], depth - 1, "root")
    return Cluster("small", root, host=Host(host_bytes, 4e11))


def instance_of(
    model: Model | None = None,
    sizes: tuple[Any, ...] = (4,),
    links: tuple[Link, ...] = (NVLINK,),
    *,
    rules: str = "megatron-core",
    limits: tuple[str, ...] = (),
    workload: Training | None = None,
    profile: Profile | None = None,
    memory_bytes: int = MANY_BYTES,
    host_bytes: float = 2e12,
) -> Instance:
    return Instance(
        model or llama(),
        cluster_of(sizes, links, accelerator(memory_bytes), host_bytes),
        workload or Training(1024, 8),
        load_rules(rules),
        profile or load_profile("megatron-core"),
        parse_limits(limits),
    )


@st.composite
def kinds(draw: st.DrawFn, hidden: int) -> LayerKind:
    """A layer kind; small heads and few of them, so that some tensor-parallel degrees do not divide."""
    head_dim = draw(st.sampled_from((64, 128)))
    heads = hidden // head_dim
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if heads % n == 0]))
    window = draw(st.sampled_from((None, 256)))
    mixer = attention(hidden, heads, kv_heads, head_dim, window=window)
    width = draw(st.sampled_from((1, 3, 4, 8))) * hidden
    gated = draw(st.booleans())
    name = draw(st.sampled_from(KIND_NAMES))
    if name == "dense":
        return layer(hidden, mixer, mlp(hidden, width, gated=gated), label=f"-{width}-{gated}")
    if name == "mlp":
        return layer(hidden, None, mlp(hidden, width, gated=gated))
    if name == "attention":
        return layer(hidden, mixer, None)
    if name == "moe":
        experts = draw(st.sampled_from((4, 8, 16)))
        shared = draw(st.sampled_from((0, hidden)))
        return layer(hidden, mixer, moe(hidden, experts, 2, hidden, gated=gated, shared_intermediate=shared))
    if name == "mamba":
        part = Mamba(2, 2 * hidden, 128, 4, groups=draw(st.sampled_from((1, 2, 8))), heads=2 * hidden // 64)
        return layer(hidden, mamba2(hidden, part), None)
    return LayerKind("identity", None, None, (Tensor("norm.weight", (hidden,)),))


@st.composite
def models(draw: st.DrawFn) -> Model:
    hidden = draw(st.sampled_from((512, 768, 1024, 2048, 4096)))
    vocab = draw(st.sampled_from((1000, 32000, 50257, 128256)))
    pool = draw(st.lists(kinds(hidden), min_size=1, max_size=3))
    order = draw(st.lists(st.integers(0, len(pool) - 1), min_size=1, max_size=6))
    return model_of([pool[i] for i in order], hidden, vocab, tied=draw(st.booleans()))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[tuple[Any, ...], tuple[Link, ...]]:
    """Nested sizes and the link of each level: one to three levels, equal or unequal members, at most 16 devices."""
    sizes = draw(
        st.sampled_from(
            (
                (1,), (2,), (3,), (4,), (6,), (8,),
                (2, 2), (4, 4), (4, 2), (3, 3), (2, 2, 2), (4, 3, 1), (8, 8), (1, 1, 1, 1), (4, 4, 4, 4), (6, 2),
                ((2, 2), (2, 2)), ((4, 2), (2, 1)), ((2, 2, 2), (2, 2)), ((4, 4), (4, 4)), ((1, 1), (1, 1), (1, 1)),
            )
        )
    )  # fmt: skip
    depth = 3 if isinstance(sizes[0], tuple) else 1 if len(sizes) == 1 else 2
    inner = draw(st.sampled_from((NVLINK, PCIE)))
    outer = draw(st.sampled_from(((INFINIBAND, ETHERNET), (ETHERNET, INFINIBAND), (INFINIBAND, INFINIBAND))))
    return sizes, (inner, *outer)[:depth]


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """The constants of Megatron-Core, or extreme ones within their meaning."""
    base = load_profile("megatron-core")
    if draw(st.booleans()):
        return base
    share = st.sampled_from((0.0, 0.3, 1.0))
    return replace(
        base,
        tp_comm_exposed=draw(share),
        dp_comm_floor=draw(share),
        dp_comm_overlap=draw(share),
        sync_contention=draw(st.sampled_from((0.0, 2.0))),
        p2p_exposed=draw(share),
        p2p_exposed_interleaved=draw(share),
        gemm=draw(st.sampled_from((0.2, 1.0, 3.0))),
        host_launch_s=draw(st.sampled_from((0.0, 4e-5))),
        tp_sync_s=draw(st.sampled_from((0.0, 1e-5))),
        straggler=draw(st.sampled_from((0.0, 0.02))),
        step_overhead_s=draw(st.sampled_from((0.0, 0.02))),
        recompute_overlap=draw(share),
        memory_reserve_bytes=draw(st.sampled_from((0.0, 1e9))),
        memory_fragmentation=draw(st.sampled_from((0.0, 0.05, 0.3))),
    )


PACKS = (
    "megatron-core", "megatron-core", "megatron-core", "free", "free", "free", "torchtitan", "deepspeed", "accelerate",
    "mindspeed",
)  # fmt: skip
KIND_NAMES = ("dense", "dense", "mlp", "attention", "moe", "mamba", "identity")
LIMITS = (
    "pp<=2", "pp>=2", "pp>=3", "tp<=2", "tp>=2", "tp=3", "vpp=1", "vpp>=2", "micro_batch<=2", "micro_batch=1", "zero=1",
    "zero=0", "dp<=2", "dp>=2", "devices<=3", "devices>=4", "sequence_parallel=0", "sequence_parallel=1",
    "cp=1", "cp=1", "cp>=2", "cp<=2", "ep=1", "ep>=2", "etp=1", "zero>=2", "dp_replicate=2", "dp_replicate>=2",
    "recompute=none", "recompute=selective", "recompute=full", "recompute=full", "schedule=zb-v",
    "schedule=interleaved-1f1b", "schedule=dualpipe-v", "cp_comm_type=allgather", "cp_comm_type=a2a",
    "cp_comm_type=a2a+p2p", "cp_a2a=1", "cp_a2a>=2",
    "free_nodes>=1", "free_nodes>=1", "free_nodes<=1", "stage[0]>=1", "stage[1]<=1", "stage[2]=1", "stage[3]>=2",
    "stage[0]=stage[2]", "stage[1]=stage[2]", "stage[0]=stage[4]",
)  # fmt: skip
MODULE_LIMITS = (None, None, None, "any", "any", "any", "mlp", "core_attn+mlp", "layernorm+moe_act", "moe")
SHRINKING = (
    "vpp<=3", "cp_comm_type=p2p", "micro_batch<=2", "zero<=1", "cp<=2", "ep<=2", "zero=1", "cp=1", "ep=1", "etp=1",
    "dp_replicate=1", "pp<=4", "sequence_parallel=0", "dp<=4", "vpp<=2", "micro_batch=1", "pp<=3", "tp<=2", "vpp=1",
    "pp<=2", "tp=1", "pp=1",
)  # fmt: skip
DEEP = (
    "cp=1",
    "ep<=2",
    "etp=1",
    "zero<=2",
    "dp_replicate=1",
    "tp<=2",
    "micro_batch<=2",
    "sequence_parallel=0",
    "zero=1",
    "pp>=2",
    "dp<=2",
    "vpp>=2",
    "vpp<=2",
    "pp>=3",
    "tp=1",
)
"""Limits that hold a universe to its size, in this order or a drawn one until it is small enough; `DEEP` keep pipelines."""


TUNINGS: tuple[dict[str, Any], ...] = (
    *({},) * 8,
    {"lora_rank": 8},
    {"lora_rank": 16, "lora_modules": "attention"},
    {"lora_rank": 64, "base_precision": "nf4"},
    {"lengths": ((100, 3), (700, 1))},
    {"mtp_layers": 1},
    {"expert_capacity": 1.25, "expert_imbalance": 1.5},
    {"expert_capacity": 0.7, "pad_experts": True},
    {"offload_optimizer": 0.5},
    {"offload_optimizer": 1.0},
    {"offload_optimizer": 1.0, "offload_param": True},
    {"tp_overlap": True},
    {"tp_overlap": False},
)
"""Adapters, packing, multi-token prediction, capacity, the optimizer on the host and overlap, each in one instance of a few."""


@st.composite
def instances(draw: st.DrawFn, *, most: int = MOST_PLANS, tunings: tuple[dict[str, Any], ...] = TUNINGS) -> Instance:
    """An instance of at most `most` plans; its memory limits, of devices and hosts, are drawn from what its own plans need."""
    sizes, links = draw(clusters())
    batch = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 12, 16, 24, 64)))
    model, profile, tuned = draw(models()), draw(profiles()), draw(st.sampled_from(tunings))
    if "mtp_layers" in tuned:
        model = replace(model, mtp_depth=1)
        if mtp_faults(load_rules("free"), model, 1):
            tuned = {}
    if "expert_capacity" in tuned and not any(isinstance(kind.ffn, Moe) for kind in model.kinds):
        tuned = {}
    precision: Precision = "bf16" if "base_precision" in tuned else draw(st.sampled_from(("bf16", "bf16", "fp8")))
    workload = Training(
        draw(st.sampled_from((512, 1000, 2048, 4096))),
        batch,
        precision=precision,
        optimizer=draw(st.sampled_from(("adamw", "sgd"))),
        attention=draw(st.sampled_from(("flash", "unfused"))),
        **tuned,
    )
    packs = [
        name
        for name in PACKS
        if not mtp_faults(load_rules(name), model, workload.mtp_layers)
        and not capacity_faults(load_rules(name), model, workload)
        and (not workload.offload_optimizer or name not in ("torchtitan", "accelerate"))
        and (not workload.offload_optimizer or workload.optimizer == "adamw" or name in ("deepspeed", "free"))
        and (not workload.offload_param or name in ("deepspeed", "free"))
        and (not workload.offload_activations or name in ("megatron-core", "free"))
        and not overlap_faults(load_rules(name), workload)
    ]
    rules = draw(st.sampled_from(packs)) + draw(st.sampled_from(("", "", "+free-chunks")))
    own = [limit for limit in LIMITS if not parse_limits([limit]).layer_faults(len(model.layers))]
    limits = draw(st.lists(st.sampled_from(own), max_size=2, unique=True))
    modules = draw(st.sampled_from(MODULE_LIMITS))
    if modules and not (modules != "any" and module_faults(load_rules(rules), model, modules.split("+"), precision)):
        limits.append(f"recompute_modules={modules}")
    order = [*draw(st.permutations(DEEP))[: draw(st.integers(0, len(DEEP)))], *SHRINKING]

    def build(limits: list[str], memory_bytes: int, host_bytes: float = 2e15) -> Instance:
        return instance_of(
            model, sizes, links, rules=rules, limits=tuple(limits), workload=workload, profile=profile,
            memory_bytes=memory_bytes, host_bytes=host_bytes,
        )  # fmt: skip

    limits = _consistent(limits)
    instance = build(limits, MANY_BYTES)
    for limit in order:
        if count_plans(instance, most) <= most:
            break
        limits = _consistent([*limits, limit])
        instance = build(limits, MANY_BYTES)
    rank = draw(st.sampled_from((None, None, 0.0, 0.02, 0.1, 0.3, 0.6)))
    if rank is None:
        return instance
    found = [evaluate(instance, plan) for plan in _sample(instance, 120)]
    needed = sorted(max(one.memory_mib) for one in found)
    if not needed:
        return instance
    hosts = sorted(one.host.node_bytes for one in found if one.host)
    host_bytes = 2e15
    if draw(st.booleans()) and hosts:
        kept = draw(st.sampled_from((0.0, 0.05, 0.2, 0.5)))
        host_bytes = hosts[int(kept * (len(hosts) - 1))] / 0.9 + 2e7
    # One MiB less than a plan needs, or exactly that.
    memory_mib = max(needed[int(rank * (len(needed) - 1))] - draw(st.integers(0, 1)), 1)
    if draw(st.booleans()):
        return build(limits, memory_mib * MIB + draw(st.sampled_from((0, MIB - 1))), host_bytes)
    return build([*limits, f"memory_gb<={(memory_mib + 0.5) * MIB / 1e9:.9f}"], MANY_BYTES, host_bytes)


def _consistent(limits: list[str]) -> list[str]:
    """`limits` without those that contradict earlier ones."""
    out: list[str] = []
    for limit in limits:
        try:
            parse_limits([*out, limit])
        except InputError:
            continue
        out.append(limit)
    return out


def _sample(instance: Instance, most: int) -> list[Plan]:
    every = list(itertools.islice(plans(instance), 4000))
    return every[:: max(len(every) // most, 1)]


# -- the universe ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corner:
    """Degrees with a placement and a schedule: all that a plan is besides its stages."""

    degrees: Degrees
    placement: Placement
    micro_batches: int
    schedule: Schedule

    def plans(self, instance: Instance) -> Iterator[Plan]:
        d = self.degrees
        for chunks in splits(len(instance.model.layers), d.pp, d.vpp, even=instance.rules.even_chunks):
            if not pinned(instance, chunks, d.pp, self.schedule):
                continue
            stages = chunks_by_stage(chunks, d.pp, self.schedule)
            for setting in recompute_settings(instance, stages):
                if d.offload_layers and any(mode != "none" for mode, _ in setting):
                    continue
                yield Plan(
                    d,
                    tuple(stage_of(own, mode, block) for own, (mode, block) in zip(stages, setting, strict=True)),
                    self.placement,
                    self.micro_batches,
                    schedule=self.schedule,
                )


def pinned(instance: Instance, chunks: tuple[int, ...], pp: int, schedule: str) -> bool:
    """Whether the layers lie where the limits want them."""
    on: list[int] = []
    for i, layers in enumerate(chunks):
        folded = schedule in ("zb-v", "dualpipe-v") and i >= pp
        on += [2 * pp - 1 - i if folded else i % pp] * layers
    return all(allowed.low <= on[layer] <= allowed.high for layer, allowed in instance.limits.pinned.items()) and all(
        on[one] == on[other] for one, other in instance.limits.together
    )


def chunks_by_stage(chunks: tuple[int, ...], pp: int, schedule: str) -> list[tuple[int, ...]]:
    """Layers of the chunks of each stage: dealt out in turn, or down the stages and up again."""
    if schedule in ("zb-v", "dualpipe-v"):
        return [(chunks[k], chunks[2 * pp - 1 - k]) for k in range(pp)]
    return [chunks[k::pp] for k in range(pp)]


def plans(instance: Instance) -> Iterator[Plan]:
    """Every plan within the rules and limits, whether or not it fits the memory."""
    for corner in corners(instance):
        yield from corner.plans(instance)


def count_plans(instance: Instance, enough: int) -> int:
    """How many plans there are, or some number above `enough`."""
    total = 0
    per_shape: dict[tuple[int, int, str], int] = {}
    for corner in corners(instance):
        d = corner.degrees
        key = d.pp, d.vpp, corner.schedule
        if key not in per_shape:
            per_shape[key] = sum(
                _count_settings(instance, chunks_by_stage(chunks, d.pp, corner.schedule))
                for chunks in splits(len(instance.model.layers), d.pp, d.vpp, even=instance.rules.even_chunks)
                if pinned(instance, chunks, d.pp, corner.schedule)
            )
        total += per_shape[key]
        if total > enough:
            break
    return total


def pack_of(instance: Instance) -> str:
    return instance.rules.name.removesuffix("+free-chunks")


def corners(instance: Instance) -> Iterator[Corner]:
    """Every tuple of degrees within the rules and limits, with every placement and number of replicas."""
    for degrees, micro_batches in legal_degrees(instance):
        for placement in placements(instance, degrees):
            for count in replicas(instance, degrees, placement):
                for schedule in legal_schedules(instance, degrees, micro_batches):
                    if instance.limits.schedule not in (None, schedule):
                        continue
                    yield Corner(replace(degrees, dp_replicate=count), placement, micro_batches, schedule)


def replicas(instance: Instance, degrees: Degrees, placement: Placement) -> list[int]:
    """One, or with ZeRO the data-parallel factors from some level outwards, or what a limit asks for by an equation."""
    allowed = instance.limits.range("dp_replicate")
    found = {1}
    if degrees.zero > 0:
        for level in range(1, len(placement.dp)):
            outer = prod(placement.dp[level:])
            if outer != degrees.dp:
                found.add(outer)
        if allowed.low == allowed.high > 0 and degrees.dp % allowed.low == 0:
            found.add(allowed.low)
    same = degrees.tp * degrees.cp * degrees.dp // (degrees.ep * degrees.etp)
    if pack_of(instance) == "deepspeed":
        found = {1}
    if pack_of(instance) == "torchtitan" and degrees.zero > 0:
        found = {n for n in found if n < degrees.dp or degrees.cp > 1}
    if pack_of(instance) == "accelerate" and degrees.zero > 0:
        found = {n for n in found if n < degrees.dp or (degrees.cp > 1 and n == 1)}
    return [n for n in sorted(found) if allowed.low <= n <= allowed.high and same % n == 0]


def legal_schedules(instance: Instance, degrees: Degrees, micro_batches: int) -> list[Schedule]:
    """The rows of docs/rules.md on schedules."""
    pp, vpp = degrees.pp, degrees.vpp
    if pp == 1:
        return ["1f1b"]
    one: dict[str, list[Schedule]] = {
        "torchtitan": ["1f1b", "gpipe"],
        "free": ["1f1b", "eager-1f1b", "gpipe", "zb-h1", "zb-2p"],
    }
    if vpp == 1:
        return one.get(pack_of(instance), ["1f1b"])
    interleaved: list[Schedule] = ["interleaved-1f1b"] if micro_batches % pp == 0 else []
    zb_v: list[Schedule] = ["zb-v"] if vpp == 2 else []
    dualpipe: list[Schedule] = ["dualpipe-v"] if vpp == 2 and micro_batches >= 2 * pp else []
    match pack_of(instance):
        case "deepspeed" | "accelerate":
            return []
        case "megatron-core":
            return interleaved
        case "mindspeed":
            possible = not instance.model.tied and degrees.cp == 1 and len(instance.model.layers) >= 2 * pp
            return [*interleaved, *(dualpipe if possible else [])]
        case _:
            return [*interleaved, "gpipe", *zb_v, *dualpipe]


def legal_degrees(instance: Instance) -> Iterator[tuple[Degrees, int]]:
    devices, batch, layers = (
        device_count(instance.cluster.root),
        instance.workload.global_batch,
        len(instance.model.layers),
    )
    sizes = range(1, devices + 1)
    for tp, cp in itertools.product(sizes, sizes):
        algorithms = [] if tp * cp > devices or not divides(instance, tp) else ways_of_context(instance, tp, cp)
        if not algorithms:
            continue
        for pp, dp in itertools.product(sizes, sizes):
            if tp * cp * pp * dp > devices or (pp > 1 and pack_of(instance) == "accelerate"):
                continue
            for vpp, micro_batch in itertools.product(range(1, 17), range(1, 33)):
                if batch % (micro_batch * dp) or not splits(layers, pp, vpp):
                    continue
                if vpp > 1 and pp == 1:
                    continue
                for (zero, sp), (ep, etp), (algorithm, near) in itertools.product(
                    itertools.product(range(4), (False, True)), expert_ways(instance, tp, tp * cp * dp), algorithms
                ):
                    if not shards_sequence(instance, tp, cp) if sp else needs_shards(instance, tp):
                        continue
                    degrees = Degrees(tp, pp, dp, vpp, micro_batch, zero, sp, cp, ep, etp, 1, algorithm, near)
                    if not within_limits(instance, degrees):
                        continue
                    for share, param in on_the_host(instance, zero):
                        if may_shard(instance, zero, tp, cp, pp, dp, param=param):
                            own = replace(degrees, offload_optimizer=share, offload_param=param)
                            for away in layers_away(instance, pp):
                                yield replace(own, offload_layers=away), batch // (micro_batch * dp)


def layers_away(instance: Instance, pp: int) -> range:
    """The rows of docs/rules.md on saved activations: of any layers but the last, without a pipeline."""
    may = instance.workload.offload_activations and pp == 1 and pack_of(instance) in ("megatron-core", "free")
    return range(len(instance.model.layers) if may else 1)


def shards_sequence(instance: Instance, tp: int, cp: int) -> bool:
    """The rows of docs/rules.md on sequence parallelism."""
    if tp == 1 or pack_of(instance) in ("deepspeed", "accelerate"):
        return False
    pieces = 2 * cp if cp > 1 and pack_of(instance) == "torchtitan" else cp
    return instance.workload.seq_len % (tp * pieces) == 0


def needs_shards(instance: Instance, tp: int) -> bool:
    return tp > 1 and pack_of(instance) in ("megatron-core", "mindspeed") and has_experts(instance)


def may_shard(instance: Instance, zero: int, tp: int, cp: int, pp: int, dp: int, *, param: bool) -> bool:
    """The rows of docs/rules.md on ZeRO; with nothing to share stages 2 and 3 are 1 or 0 again, unless the host has the
    weights (`param`), which takes no pipeline."""
    replicas = cp * dp > 1
    if param and pp > 1:
        return False
    if zero > 1 and not replicas and not param:
        return False
    match pack_of(instance):
        case "torchtitan":
            return zero > 1 or (zero == 0 and not replicas)
        case "accelerate":
            return zero > 1 or (zero == 0 and (not replicas or tp * cp == 1))
        case "free":
            return True
        case _:
            return zero <= 1 or pp == 1


def on_the_host(instance: Instance, zero: int) -> list[tuple[float, bool]]:
    """The rows of docs/rules.md on the host: no share of the optimizer, or those that the workload allows; with all of it
    the weights too."""
    asked = instance.workload.offload_optimizer
    some = [0.25, 0.5, 0.75, 1.0] if asked == "auto" else [asked] if asked else []
    match pack_of(instance):
        case "megatron-core" | "mindspeed":
            some = some if zero == 1 else []
        case "deepspeed":
            some = [share for share in some if zero == 3 or (zero > 0 and share == 1)]
    weights = instance.workload.offload_param and zero == 3 and 1.0 in some
    return [(share, False) for share in (0.0, *some)] + ([(1.0, True)] if weights else [])


def expert_ways(instance: Instance, tp: int, ranks: int) -> list[tuple[int, int]]:
    """How experts are spread and split: evenly, whole or as everything else is."""
    experts = [kind.ffn for kind in instance.model.layers if isinstance(kind.ffn, Moe)]
    if not experts:
        return [(1, tp)]
    ways = {"torchtitan": {1}, "accelerate": {tp}}.get(pack_of(instance), {1, tp})
    most = 1 if pack_of(instance) == "accelerate" else min(part.experts for part in experts)
    return [
        (ep, etp)
        for ep in range(1, most + 1)
        for etp in sorted(ways)
        if all(part.experts % ep == 0 and part.intermediate % etp == 0 for part in experts)
        if ranks % (ep * etp) == 0
    ]


def ways_of_context(instance: Instance, tp: int, cp: int) -> list[tuple[CpCommType, int]]:
    """The rows of docs/rules.md on context parallelism: the algorithms that its degree may have, with `cp_a2a`."""
    if cp == 1:
        return [("p2p", 1)]
    pack, seq_len = pack_of(instance), instance.workload.seq_len
    halves, whole = seq_len % (2 * cp) == 0, seq_len % cp == 0
    ring, gather, ulysses = pack != "deepspeed" and halves, pack != "deepspeed" and halves, whole
    if pack in ("torchtitan", "accelerate"):
        ulysses = False
    if pack == "megatron-core":
        ulysses = halves
    hierarchies = [n for n in range(2, cp) if cp % n == 0 and halves and pack in ("megatron-core", "mindspeed", "free")]
    for kind in instance.model.layers:
        mixer = kind.mixer
        if isinstance(mixer, Attention):
            here = max(mixer.kv_heads // tp, 1)
            several = {
                n: {"megatron-core": here % n == 0, "mindspeed": True}.get(pack, here % n == 0 or n % here == 0)
                for n in (*hierarchies, cp)
            }
            ulysses = ulysses and mixer.heads % (tp * cp) == 0 and several[cp]
            hierarchies = [n for n in hierarchies if mixer.heads % (tp * n) == 0 and several[n]]
            if pack == "megatron-core" and mixer.window:
                ring, hierarchies = False, []
            if instance.workload.attention == "unfused" and pack != "free":
                ring, gather, hierarchies = False, False, []
                ulysses = ulysses and pack != "megatron-core"
        if isinstance(mixer, Mamba):
            if mixer.heads is None or mixer.heads % (tp * cp):
                return []
            groups = max(mixer.groups // tp, 1)
            if groups % cp != 0 and cp % groups != 0:
                return []
    accepted: dict[CpCommType, bool] = {"p2p": ring, "allgather": gather, "a2a": ulysses}
    flat: list[tuple[CpCommType, int]] = [(name, 1) for name, legal in accepted.items() if legal]
    return [*flat, *(("a2a+p2p", n) for n in hierarchies)]


def has_experts(instance: Instance) -> bool:
    return any(hasattr(kind.ffn, "experts") for kind in instance.model.layers)


def within_limits(instance: Instance, degrees: Degrees) -> bool:
    """All but the limits on dp_replicate, nodes, layers and the schedule, which are kept elsewhere."""
    if instance.limits.cp_comm_type not in (None, degrees.cp_comm_type):
        return False
    return all(
        allowed.low <= int(getattr(degrees, name)) <= allowed.high
        for name, allowed in instance.limits.ranges.items()
        if name not in ("dp_replicate", "free_nodes")
    )


def divides(instance: Instance, tp: int) -> bool:
    """The rows of docs/rules.md on what tensor parallelism divides."""
    for kind in instance.model.layers:
        mixer, ffn = kind.mixer, kind.ffn
        sizes = []
        if isinstance(mixer, Attention):
            sizes.append(mixer.heads)
            copied = pack_of(instance) in ("megatron-core", "mindspeed", "free") and tp % mixer.kv_heads == 0
            if mixer.kv_heads % tp != 0 and not copied:
                return False
        if isinstance(mixer, Mamba):
            sizes += [mixer.inner] if mixer.heads is None else [mixer.inner, mixer.heads, mixer.groups]
            width = 2 * mixer.inner + 2 * mixer.groups * mixer.state + (mixer.heads or 0)
            if mixer.heads is not None and (mixer.heads % mixer.groups or width % 16):
                return False
        if isinstance(ffn, Mlp):
            sizes.append(ffn.intermediate)
        if isinstance(ffn, Moe):
            sizes.append(ffn.shared_intermediate)
        if any(size % tp for size in sizes):
            return False
    return True


@lru_cache(maxsize=4096)
def splits(layers: int, pp: int, vpp: int, *, even: bool = True) -> Splits:
    """Layers of each chunk in network order, for every split that is allowed."""
    chunks = pp * vpp
    if chunks == 1:
        return [(layers,)]
    out: Splits = []
    for first in range(layers + 1):
        for last in range(layers + 1 - first):
            rest = layers - first - last
            if vpp == 1 or not even:
                middles: Iterator[tuple[int, ...]] = _positive(rest, chunks - 2)
            else:
                base, larger = divmod(rest, chunks - 2) if chunks > 2 else (0, 0)
                middles = iter([(base + 1,) * larger + (base,) * (chunks - 2 - larger)] if base else [])
            out += [(first, *middle, last) for middle in middles]
    return out


def _positive(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as `parts` positive numbers."""
    if parts == 0:
        if total == 0:
            yield ()
        return
    for first in range(1, total + 1):
        for rest in _positive(total - first, parts - 1):
            yield (first, *rest)


def recompute_settings(instance: Instance, stages: list[tuple[int, ...]]) -> Iterator[Settings]:
    """One setting for all stages or one for each; a block larger than the largest chunk is the same plan again."""
    if pack_of(instance) != "free":
        for setting in _settings(instance, max(max(chunks) for chunks in stages)):
            yield (setting,) * len(stages)
    else:
        yield from itertools.product(*(_settings(instance, max(chunks)) for chunks in stages))


def stage_of(chunks: tuple[int, ...], mode: str, block: int) -> Stage:
    if mode == "none":
        return Stage(chunks)
    return Stage(chunks, "full", block) if mode == "full" else Stage(chunks, "selective", 0, tuple(mode.split("+")))


def module_sets(instance: Instance) -> list[str]:
    """What selective recompute may repeat, in the order of the search."""
    wanted = instance.limits.recompute_modules
    return list(searched_sets(instance)) if wanted == "any" else [wanted or "core_attn"]


def _settings(instance: Instance, largest: int) -> list[tuple[str, int]]:
    """Block sizes up to the largest chunk; with recompute=full as a limit every layer must be repeated."""
    wanted = instance.limits.recompute
    least = max(largest, 1) if wanted == "full" else 1
    every = {
        "none": [("none", 0)],
        "selective": [(own, 0) for own in module_sets(instance)],
        "full": [("full", block) for block in range(least, max(largest, 1) + 1)],
    }
    return [setting for name, settings in every.items() if wanted in (None, name) for setting in settings]


def _count_settings(instance: Instance, stages: list[tuple[int, ...]]) -> int:
    if pack_of(instance) != "free":
        return len(_settings(instance, max(max(chunks) for chunks in stages)))
    return prod(len(_settings(instance, max(chunks))) for chunks in stages)


# -- placements --------------------------------------------------------------------------------------------------------


def placements(instance: Instance, degrees: Degrees) -> list[Placement]:
    """Every way of factoring the degrees over the levels that exists on the cluster and that the pack reaches."""
    depth = _depth(instance.cluster.root) + 1
    out = []
    sizes = (degrees.tp, degrees.cp, degrees.pp, degrees.dp)
    for tp, cp, pp, dp in itertools.product(*(_factorings(n, depth) for n in sizes)):
        blocks = tuple(prod(own) for own in zip(tp, cp, pp, dp, strict=True))
        if not holds(instance.cluster.root, blocks):
            continue
        free = instance.limits.range("free_nodes")
        if not free.low <= nodes(instance.cluster.root) - prod(blocks[1:]) <= free.high:
            continue
        orders: tuple[RankOrder, ...] = ("tp-dp-pp",)
        alike = degrees.pp == 1 or degrees.ep * degrees.etp == degrees.tp * degrees.cp
        if alike and pack_of(instance) in ("megatron-core", "mindspeed"):
            orders = ("tp-dp-pp", "tp-pp-dp")
        if pack_of(instance) != "free":
            orders = tuple(order for order in orders if reached(tp, cp, pp, dp, order))
        if orders:
            out.append(Placement(tp, pp, dp, orders[0], cp))
    return out


@lru_cache(maxsize=4096)
def _factorings(degree: int, depth: int) -> list[tuple[int, ...]]:
    return [f for f in itertools.product(range(1, degree + 1), repeat=depth) if prod(f) == degree]


def holds(domain: Domain, blocks: tuple[int, ...]) -> bool:
    """Whether `domain` has `blocks[-1]` members that each hold the blocks below it."""
    if not domain.children:
        return domain.devices >= blocks[0]
    return sum(holds(child, blocks[:-1]) for child in domain.children) >= blocks[-1]


@lru_cache(maxsize=65536)
def reached(tp: tuple[int, ...], cp: tuple[int, ...], pp: tuple[int, ...], dp: tuple[int, ...], order: str) -> bool:
    """Whether ranks numbered along the devices come to lie where the placement says.

    Rank r takes device r of the blocks used, counted from the innermost level. The placement says which ranks share a
    member of each level: those with the same digits of tp, cp, pp and dp there. Both must group the ranks alike.
    """
    factors = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
    blocks = tuple(prod(own) for own in zip(tp, cp, pp, dp, strict=True))
    for level in range(len(blocks)):
        partner: dict[int, tuple[int, ...]] = {}
        for rank in range(prod(blocks)):
            by_device = rank // prod(blocks[:level]) % blocks[level]
            left, by_axis = rank, []
            for axis in order.replace("tp", "tp-cp").split("-"):
                own = factors[axis]
                left, index = divmod(left, prod(own))
                by_axis.append(index // prod(own[:level]) % own[level])
            if partner.setdefault(by_device, tuple(by_axis)) != tuple(by_axis):
                return False
    return True


def _depth(domain: Domain) -> int:
    return 1 + _depth(domain.children[0]) if domain.children else 0


def nodes(domain: Domain) -> int:
    return sum(nodes(child) for child in domain.children) if domain.children else 1


def device_count(domain: Domain) -> int:
    return domain.devices if not domain.children else sum(device_count(child) for child in domain.children)


# -- judging -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """An admitted plan, with its step in units and in seconds."""

    plan: Plan
    units: int
    seconds: float

    @property
    def corner(self) -> Corner:
        return Corner(self.plan.degrees, self.plan.placement, self.plan.micro_batches, self.plan.schedule)


def admitted(instance: Instance, unit_s: float) -> list[Judged]:
    """Every admitted plan of the universe, judged by what `evaluate` is made of."""
    out = []
    for plan in plans(instance):
        units = admitted_units(instance, plan, unit_s)
        if units is not None:
            out.append(Judged(plan, units, timed_plan(instance, plan).step_time))
    return out


SCHEDULE_ORDER = ("1f1b", "eager-1f1b", "interleaved-1f1b", "gpipe", "zb-h1", "zb-2p", "zb-v", "dualpipe-v")


def documented_order(plan: Plan, sets: list[str]) -> tuple[object, ...]:
    """The order among equal optima: `Candidate.tie_key`, then that of solver/close.py, in their words."""
    d, place = plan.degrees, plan.placement
    packing = [-place.factors(axis)[level] for level in range(len(place.tp)) for axis in ("tp", "cp", "dp", "pp")]
    recomputed, size_of_settings, per_stage = 0, 0, []
    for stage in plan.stages:
        if stage.recompute == "full":
            recomputed += sum(min(stage.recompute_layers, n) for n in stage.chunks)
        elif stage.recompute == "selective":
            recomputed += stage.layers
        selective = int(stage.recompute == "selective")
        per_stage.append((stage.recompute_layers, "+".join(stage.recompute_modules)))
        size_of_settings += len(stage.chunks) * (stage.recompute_layers + selective)
    return (
        (d.devices, d.pp, d.tp, d.cp, ("p2p", "allgather", "a2a", "a2a+p2p").index(d.cp_comm_type), d.cp_a2a),
        (d.vpp, SCHEDULE_ORDER.index(plan.schedule)),
        (d.micro_batch, (1, 0, 2, 3).index(d.zero), d.offload_optimizer, d.offload_param, d.offload_layers),
        (-int(d.sequence_parallel), d.ep, d.etp, d.dp_replicate),
        tuple(-block for block in place.blocks),
        tuple(packing),
        place.rank_order == "tp-pp-dp",
        recomputed,
        size_of_settings,
        max(plan.chunk_layers),
        tuple(-n for n in plan.chunk_layers),
        tuple(block for block, _ in per_stage),
        tuple(modules == own for own in reversed(sets) for _, modules in per_stage),
    )
