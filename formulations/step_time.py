"""Step time as the longest of the simple paths through the schedule.

Stage k of p runs its passes in a fixed order, so any path through the graph of passes is a valid lower bound on the
step, and the longest of a family of paths is the step time that is minimised. The family used here, with `F_j`, `B_j`
the passes of the first chunk of stage j for one micro-batch (embedding included for j = 0), `hop_j` the transfer
between stages j and j + 1, and `W_k` the time that stage k works on all chunks of all m micro-batches:

(T1) stage k starts after the fill and is then busy:  A_k = sum_{j<k} (F_j + hop_j) + W_k
(T2) W_k = m (sum of forward and backward over its layers, recompute included, + exposed transfers)
(T3) its last backward is followed by the drain:      E_j = max(A_j, E_{j+1} + hop_j + B_j)
(T4) gradient reduce and parameter gather overlap the passes of one micro-batch and leave
     X_j = exposed (J5) of G_j beside F + B of one micro-batch on stage j, + optimizer
(T5) T = overhead + max_j (E_j + X_j)

For even stages and no communication (T1) is the textbook (m + (p - 1) / v) (F + B) of (interleaved) 1F1B (Narayanan et
al., arXiv 2104.04473, section 2.2). A simulator may add longer paths of the same linear form later.

(T6) A schedule that splits the backward pass fills the drain with weight gradients, w of one micro-batch each: ZB-H1
     leaves F + B - 2 w of a stage's fill and drain, ZB-2p and ZB-V, with W = F = B - W, nothing (Qi et al., arXiv
     2401.10241, table 2; arXiv 2405.15362). The drain passes B_j are shortened by 2 w, or 3 w, to no less than -F_j.
(T7) Devices straggle: every pass is longer by `straggler` per doubling of the devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, log2, prod
from typing import TYPE_CHECKING

import numpy as np

from shardwise.data.workload import OPTIMIZER_STATE_BYTES
from shardwise.formulations.collectives import bandwidth_time_per_byte, collective_time_s, p2p_time_s
from shardwise.formulations.kernels import memory_bound_time_s
from shardwise.formulations.layer_costs import ACTIVATION_BYTES, Spans
from shardwise.formulations.memory import GRADIENT_BYTES, WEIGHT_BYTES, KindParams

if TYPE_CHECKING:
    from shardwise.data.cluster import Link
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Degrees, Placement
    from shardwise.data.profile import Profile
    from shardwise.formulations.layer_time import Number


GRADIENT_PASS_BYTES = 18
"""Per gradient before the optimizer: unscale into fp32 (read 2, write 4), norm (read 4), clip (read and write 4)."""

P2P_LAUNCHES = 10

BUCKET_RANKS = 40
"""Buckets grow beyond this many ranks: max(40 million, one million per rank) elements (Megatron
core/distributed/distributed_data_parallel.py)."""


def spans_of(factors: tuple[int, ...], levels: tuple[Link, ...]) -> Spans:
    """The group of one axis as (members, link) per level, innermost first."""
    return tuple(zip(factors, levels, strict=True))


@dataclass(frozen=True, slots=True)
class SyncRates:
    """(T4) Seconds per parameter held by one device."""

    communication_s: float
    optimizer_s: float


def sync_rates(
    instance: Instance, dp_spans: Spans, dp: int, zero: int, dp_replicate: int = 1, *, each_pass: bool = False
) -> SyncRates:
    """(T4) Gradient sync at the end of a step, and the optimizer, per parameter on one device.

    ZeRO-0 all-reduces gradients; ZeRO-1 and 2 reduce-scatter them and gather 16-bit weights within dp_shard ranks, and
    groups all-reduce what each rank owns. What moves with every pass (`each_pass`, `unit_times_s`) is not counted again:
    ZeRO-2 has its gather left, ZeRO-3 the replicas. The optimizer reads the
    gradient, reads and writes its states and writes the weight of the parameters it owns; before it the gradient is
    unscaled, its norm is taken and it is clipped, one pass each.
    """
    profile, accelerator = instance.profile, instance.accelerator
    reduce_bytes = profile.reduce_bytes
    bucket = profile.bucket_bytes * max(1.0, dp / BUCKET_RANKS)
    shard = dp // dp_replicate
    inner, outer = split_spans(dp_spans, shard)
    communication = 0.0
    if dp > 1 and zero == 0:
        communication = reduce_bytes * bandwidth_time_per_byte(accelerator, "all_reduce", dp_spans, bucket)
    elif dp > 1:
        if shard > 1 and not each_pass:
            communication = reduce_bytes * bandwidth_time_per_byte(accelerator, "reduce_scatter", inner, bucket)
        if shard > 1 and not (each_pass and zero == 3):
            communication += WEIGHT_BYTES * bandwidth_time_per_byte(
                accelerator, "all_gather", inner, bucket * WEIGHT_BYTES / GRADIENT_BYTES
            )
        if dp_replicate > 1:
            rate = bandwidth_time_per_byte(accelerator, "all_reduce", outer, bucket)
            communication += reduce_bytes * rate / shard
    moved = GRADIENT_PASS_BYTES + GRADIENT_BYTES + 2 * OPTIMIZER_STATE_BYTES[instance.workload.optimizer] + WEIGHT_BYTES
    owned = shard if zero >= 1 else 1
    rate = memory_bound_time_s(accelerator, 1e9 * moved, launches=0) / 1e9
    return SyncRates(communication, rate / owned)


def gathers_each_pass(degrees: Degrees) -> bool:
    """Whether sharded weights or gradients move with every micro-batch. In a pipeline FSDP2 keeps weights gathered and
    gradients whole until the last backward pass (torch distributed/pipelining/stage.py)."""
    return degrees.zero >= 2 and degrees.pp == 1


def unit_times_s(
    instance: Instance, degrees: Degrees, placement: Placement, params: KindParams, *, end: bool = False
) -> tuple[float, float]:
    """(J5) Transfers of one unit beside its forward and its backward pass, where they come with every micro-batch.

    ZeRO-3 gathers 16-bit weights before each pass (`end`: the embedding and the head, in FSDP's root, once) and
    reduce-scatters gradients after the backward one (Zhao et al., arXiv 2304.11277, section 3.2); ZeRO-2 only the
    latter. Experts move among the ranks that hold the same ones.
    """
    if not gathers_each_pass(degrees):
        return 0.0, 0.0
    accelerator, levels = instance.accelerator, instance.levels
    dense, _ = split_spans(spans_of(group_of(placement.dp, placement.cp), levels), degrees.cp * degrees.dp_shard)
    stage = spans_of(group_of(placement.tp, placement.cp, placement.dp), levels)
    _, same = split_spans(stage, degrees.ep * degrees.etp)
    forward = backward = 0.0
    for count, spans in ((params.dense, dense), (params.expert, same)):
        gather = collective_time_s(accelerator, "all_gather", WEIGHT_BYTES * count, spans)
        reduce = collective_time_s(accelerator, "reduce_scatter", instance.profile.reduce_bytes * count, spans)
        forward += gather if degrees.zero == 3 else 0.0
        backward += reduce + (gather if degrees.zero == 3 and not end else 0.0)
    return forward, backward


def split_spans(spans: Spans, inner: int) -> tuple[Spans, Spans]:
    """A group as its blocks of `inner` neighbouring ranks, and the group of those blocks."""
    near: list[tuple[int, Link]] = []
    far: list[tuple[int, Link]] = []
    left = inner
    for members, link in spans:
        taken = gcd(members, left)
        left //= taken
        near.append((taken, link))
        far.append((members // taken, link))
    return tuple(near), tuple(far)


def group_of(*groups: tuple[int, ...]) -> tuple[int, ...]:
    """Factors per level of the group that several axes span together."""
    return tuple(prod(factors) for factors in zip(*groups, strict=True))


def straggling(instance: Instance, devices: float) -> float:
    """(T7) What every pass is multiplied by."""
    return 1 + instance.profile.straggler * log2(float(devices))


def hop_times_s(instance: Instance, degrees: Degrees, placement: Placement) -> tuple[float, ...]:
    """Transfer time between stages j and j + 1, for j = 0 .. p - 2."""
    by_level = [hop_time_s(instance, degrees, link) for link in instance.levels]
    return tuple(by_level[placement.crossing_level(j)] for j in range(degrees.pp - 1))


def hop_time_s(instance: Instance, degrees: Degrees, link: Link) -> float:
    """One micro-batch's activations from stage to stage; each rank sends a 1 / tp share, which is gathered on arrival
    (Narayanan et al., arXiv 2104.04473, section 4.1; DeepSpeed partitions them likewise)."""
    size = ACTIVATION_BYTES * degrees.micro_batch * instance.workload.seq_len * instance.model.hidden / degrees.cp
    return p2p_time_s(instance.accelerator, size / degrees.tp, link)


def exposed_transfer_s(instance: Instance, degrees: Degrees, hops: tuple[float, ...], stage: int) -> float:
    """(T2) Transfer time per micro-batch that stage `stage` waits for: one exchange with each neighbour and chunk."""
    beside = hops[max(stage - 1, 0) : stage + 1]
    waits: float = sum(exchange_time_s(instance.profile, hop, degrees.vpp) for hop in beside)
    return degrees.vpp * waits


def exchange_time_s(profile: Profile, hop: Number, vpp: Number) -> Number:
    """(T2) What a stage waits for one exchange with a neighbour: the share of the transfer that shows, and the launches
    of sends and receives, which Megatron issues together and waits for (core/pipeline_parallel/p2p_communication.py)."""
    share: Number
    if isinstance(vpp, np.ndarray):
        share = np.where(vpp == 1, profile.p2p_exposed, profile.p2p_exposed_interleaved)
    else:
        share = profile.p2p_exposed if vpp == 1 else profile.p2p_exposed_interleaved
    return share * hop + profile.host_launch_s * P2P_LAUNCHES


def tied_sync_s(instance: Instance, degrees: Degrees, placement: Placement, embedding_params: int) -> float:
    """All-reduce of tied embedding gradients between the first and the last stage."""
    if degrees.pp == 1:
        return 0.0
    outermost = max(level for level, factor in enumerate(placement.pp) if factor > 1)
    spans = tuple((2 if level == outermost else 1, link) for level, link in enumerate(instance.levels))
    return collective_time_s(instance.accelerator, "all_reduce", GRADIENT_BYTES * embedding_params, spans)
