"""What a pass, a transfer and the end of a step take: the numbers that the timeline of the schedule is made of.

With `F`, `B` the forward and backward pass of one layer for one micro-batch (layer_time, J1-J5), `hop_j` the transfer
between stages j and j + 1 (hop_p-1: from the last stage back to the first), and m micro-batches:

(T1) a forward pass of a chunk holds its stage for the sum of F over its layers, embedding or head included, + x of the
     link to the next chunk; a backward pass for the sum of B and of what is recomputed, + x of the link to the one
     before. A schedule that splits the backward pass takes w = gemm / 2 of the matrix products of B out of it, no more
     than B, and computes it apart; frozen matrices have no part in it.
(T2) x_j = p2p_exposed hop_j + launches: sends and receives that the stage waits for. What is left of the transfer,
     L_j = max(0, 1 - p2p_exposed) hop_j, delays the other stage only.
(T3) end_k of stage k: the timeline of the schedule (timeline, E1-E3).
(T4) gradient reduce and parameter gather overlap the passes of one micro-batch and leave
     X_k = exposed (J5) of G_k beside F + B of one micro-batch on stage k, + optimizer. All groups of ranks send at once
     then; what crosses N > 8 nodes is taken to last 1 + sync_contention log2(N / 8) times as long as a collective alone;
     frozen weights have no gradients, and are gathered once a step by ZeRO-3 in a pipeline. What the host has of the
     optimizer is copied and updated there in turn (offload, U3)
(T5) T = overhead + max_k (end_k + X_k). A zero-bubble schedule does not wait for the other stages before its optimizer
     (Qi et al., arXiv 2401.10241, section 4), so that stages stay apart from step to step, and
     T = overhead + max_k (end_k - start_k + X_k).
(T6) every path through the schedule is a lower bound on T. Simple ones: stage k starts after the fill and is then busy,
     T >= overhead + sum_{j<k} (F_j + x_j + L_j) + W_k + X_k, W_k the sum of all its passes; with 1F1B, GPipe and
     interleaving its last backward pass is followed by those of the stages before it. One micro-batch goes
     through all chunks and back: T >= overhead + sum of F, L and B (less w) over all of them, there and back, + X_0.
(T7) devices straggle: every pass is longer by `straggler` per doubling of the devices.

For even stages and no communication (T5) is the textbook (m + (p - 1) / v) (F + B) of (interleaved) 1F1B (Narayanan et
al., arXiv 2104.04473, section 2.2); for uneven ones it is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2, prod
from typing import TYPE_CHECKING

import numpy as np

from shardwise.data.efficiency import SCALE_UP_KINDS
from shardwise.data.workload import OPTIMIZER_STATE_BYTES
from shardwise.formulations.collectives import bandwidth_time_per_byte, collective_time_s, p2p_time_s, split_spans
from shardwise.formulations.kernels import memory_bound_time_s
from shardwise.formulations.layer_costs import ACTIVATION_BYTES, Spans
from shardwise.formulations.layer_time import larger
from shardwise.formulations.memory import GRADIENT_BYTES, WEIGHT_BYTES, KindParams
from shardwise.formulations.offload import host_copy_s, host_rates_s

if TYPE_CHECKING:
    from shardwise.data.cluster import Link
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Degrees, Placement
    from shardwise.data.profile import Profile
    from shardwise.formulations.layer_time import Number


GRADIENT_PASS_BYTES = 18
"""Per gradient before the optimizer: unscale into fp32 (read 2, write 4), norm (read 4), clip (read and write 4)."""

P2P_LAUNCHES = 10

UNCROWDED_NODES = 8
"""Chosen on Aleph's runs alone: those on 8 nodes are no slower than a collective alone says, those across 16 and 32 are."""

BUCKET_RANKS = 40
"""Buckets grow beyond this many ranks: max(40 million, one million per rank) elements (Megatron
core/distributed/distributed_data_parallel.py)."""


def spans_of(factors: tuple[int, ...], levels: tuple[Link, ...]) -> Spans:
    """The group of one axis as (members, link) per level, innermost first."""
    return tuple(zip(factors, levels, strict=True))


@dataclass(frozen=True, slots=True)
class SyncRates:
    """(T4) Seconds per trained parameter held by one device, and per byte of frozen weights; `crowded_s` is what
    `communication_s` has for each unit of `sync_contention`; `optimizer_s` is what the device computes, `copied_s` and
    `host_s` are (U3)."""

    communication_s: float
    optimizer_s: float
    frozen_s: float = 0.0
    crowded_s: float = 0.0
    copied_s: float = 0.0
    host_s: float = 0.0

    @property
    def update_s(self) -> float:
        """The optimizer, wherever it runs."""
        return self.optimizer_s + self.copied_s + self.host_s


def params_sync_s(dense: SyncRates, expert: SyncRates, params: KindParams) -> float:
    """(T4) Communication at the end of a step, of what one device holds."""
    trained = dense.communication_s * params.dense + expert.communication_s * params.expert
    return trained + (dense.frozen_s * params.frozen + expert.frozen_s * params.frozen_expert)


def params_crowded_s(dense: SyncRates, expert: SyncRates, params: KindParams) -> float:
    """(T4) What `params_sync_s` has for each unit of `sync_contention`."""
    return dense.crowded_s * params.dense + expert.crowded_s * params.expert


def params_optimizer_s(dense: SyncRates, expert: SyncRates, params: KindParams) -> float:
    """(T4) The optimizer of what one device trains, with (U3)."""
    return dense.update_s * params.dense + expert.update_s * params.expert


def sync_rates(
    instance: Instance,
    dp_spans: Spans,
    dp: int,
    zero: int,
    dp_replicate: int = 1,
    *,
    each_pass: bool = False,
    offload: float = 0.0,
) -> SyncRates:
    """(T4) Gradient sync at the end of a step, and the optimizer, per parameter on one device.

    ZeRO-0 all-reduces gradients; ZeRO-1 and 2 reduce-scatter them and gather 16-bit weights within dp_shard ranks, and
    groups all-reduce what each rank owns. What moves with every pass (`each_pass`, `unit_times_s`) is not counted again:
    ZeRO-2 has its gather left, ZeRO-3 the replicas. Frozen weights are gathered by ZeRO-3 alone and reduce nothing. The
    optimizer reads the gradient, reads and writes its states and writes the weight of the parameters it owns; before it
    the gradient is unscaled, its norm is taken and it is clipped, one pass each.
    """
    profile, accelerator = instance.profile, instance.accelerator
    reduce_bytes = profile.reduce_bytes
    bucket = profile.bucket_bytes * max(1.0, dp / BUCKET_RANKS)
    shard = dp // dp_replicate
    inner, outer = split_spans(dp_spans, shard)
    communication = frozen = 0.0
    if dp > 1 and zero == 0:
        communication = reduce_bytes * bandwidth_time_per_byte(accelerator, "all_reduce", dp_spans, bucket)
    elif dp > 1:
        if shard > 1 and not each_pass:
            communication = reduce_bytes * bandwidth_time_per_byte(accelerator, "reduce_scatter", inner, bucket)
        if shard > 1 and not (each_pass and zero == 3):
            gather = bandwidth_time_per_byte(accelerator, "all_gather", inner, bucket * WEIGHT_BYTES / GRADIENT_BYTES)
            communication += WEIGHT_BYTES * gather
            frozen = gather if zero == 3 else 0.0
        if dp_replicate > 1:
            rate = bandwidth_time_per_byte(accelerator, "all_reduce", outer, bucket)
            communication += reduce_bytes * rate / shard
    owned = shard if zero >= 1 else 1
    crowded = communication * crowding(dp_spans)
    contended = communication + profile.sync_contention * crowded
    found = SyncRates(contended, _update_s(instance, offload) / owned, frozen, crowded)
    if not offload:
        return found
    copied, updated = (offload * seconds / owned for seconds in host_rates_s(instance))
    return replace(found, copied_s=copied, host_s=updated)


def _update_s(instance: Instance, offload: float) -> float:
    """Seconds on the device per parameter that it owns: before the optimizer, and in what the host does not have of it."""
    updated = GRADIENT_BYTES + 2 * OPTIMIZER_STATE_BYTES[instance.workload.optimizer] + WEIGHT_BYTES
    moved = GRADIENT_PASS_BYTES + (1 - offload) * updated
    return memory_bound_time_s(instance.accelerator, 1e9 * moved, launches=0) / 1e9


def offload_is_slower(instance: Instance) -> bool:
    """Whether the host takes longer over a parameter than the device would."""
    return sum(host_rates_s(instance)) >= _update_s(instance, 0.0) - _update_s(instance, 1.0)


def crowding(spans: Spans) -> float:
    """(T4) Doublings of the nodes of a group, beyond those that do not crowd each other."""
    nodes = prod(members for members, link in spans if link.kind not in SCALE_UP_KINDS)
    return max(0.0, log2(nodes / UNCROWDED_NODES))


def gathers_each_pass(zero: int, pp: Number) -> Number:
    """Whether sharded weights or gradients move with every micro-batch. In a pipeline FSDP2 keeps weights gathered and
    gradients whole until the last backward pass (torch distributed/pipelining/stage.py)."""
    return (zero >= 2) & (pp == 1)


def unit_times_s(
    instance: Instance, degrees: Degrees, placement: Placement, params: KindParams, *, end: bool = False
) -> tuple[float, float]:
    """(J5) Transfers of one unit beside its forward and its backward pass, where they come with every micro-batch.

    ZeRO-3 gathers 16-bit weights before each pass (`end`: the embedding and the head, in FSDP's root, once) and
    reduce-scatters gradients after the backward one (Zhao et al., arXiv 2304.11277, section 3.2); ZeRO-2 only the
    latter. Frozen weights are gathered as they are held. Experts move among the ranks that hold the same ones. What the
    host has of the weights comes from there first (offload, U4).
    """
    if not gathers_each_pass(degrees.zero, degrees.pp):
        return 0.0, 0.0
    accelerator, levels = instance.accelerator, instance.levels
    dense, _ = split_spans(spans_of(group_of(placement.dp, placement.cp), levels), degrees.cp * degrees.dp_shard)
    stage = spans_of(group_of(placement.tp, placement.cp, placement.dp), levels)
    _, same = split_spans(stage, degrees.ep * degrees.etp)
    fetch_s = host_copy_s(instance) if degrees.offload_param else 0.0
    forward = backward = 0.0
    for count, frozen, spans, shard in (
        (params.dense, params.frozen, dense, degrees.cp * degrees.dp_shard),
        (params.expert, params.frozen_expert, same, degrees.expert_dp_shard),
    ):
        gather = collective_time_s(accelerator, "all_gather", WEIGHT_BYTES * count + frozen, spans)
        gather += fetch_s * (WEIGHT_BYTES * count + frozen) / shard
        reduce = collective_time_s(accelerator, "reduce_scatter", instance.profile.reduce_bytes * count, spans)
        forward += gather if degrees.zero == 3 else 0.0
        backward += reduce + (gather if degrees.zero == 3 and not end else 0.0)
    return forward, backward


def group_of(*groups: tuple[int, ...]) -> tuple[int, ...]:
    """Factors per level of the group that several axes span together."""
    return tuple(prod(factors) for factors in zip(*groups, strict=True))


def straggling(instance: Instance, devices: float) -> float:
    """(T7) What every pass is multiplied by."""
    return 1 + instance.profile.straggler * log2(float(devices))


def hop_times_s(instance: Instance, degrees: Degrees, placement: Placement) -> tuple[float, ...]:
    """(T1) Transfer time of each link: between stages j and j + 1 for j = 0 .. p - 2, and from the last to the first."""
    by_level = [hop_time_s(instance, degrees, link) for link in instance.levels]
    crossed = [placement.crossing_level(j) for j in range(degrees.pp - 1)]
    return (*(by_level[level] for level in crossed), by_level[max(crossed, default=0)])


def hop_time_s(instance: Instance, degrees: Degrees, link: Link) -> float:
    """One micro-batch's activations from stage to stage; each rank sends a 1 / tp share, which is gathered on arrival
    (Narayanan et al., arXiv 2104.04473, section 4.1; DeepSpeed partitions them likewise)."""
    return p2p_time_s(instance.accelerator, hop_bytes(instance, degrees), link)


def hop_bytes(instance: Instance, degrees: Degrees) -> float:
    """What one rank of a stage sends for one micro-batch."""
    size = ACTIVATION_BYTES * degrees.micro_batch * instance.workload.seq_len * instance.model.hidden / degrees.cp
    return size / degrees.tp


def exchange_time_s(profile: Profile, hop: Number, vpp: Number) -> Number:
    """(T2) x: the share of the transfer that shows, and the launches of sends and receives, which Megatron issues
    together and waits for (core/pipeline_parallel/p2p_communication.py)."""
    return _exposed_share(profile, vpp) * hop + profile.host_launch_s * P2P_LAUNCHES


def lag_time_s(profile: Profile, hop: Number, vpp: Number) -> Number:
    """(T2) L."""
    return larger(1 - _exposed_share(profile, vpp), 0.0) * hop


def _exposed_share(profile: Profile, vpp: Number) -> Number:
    if isinstance(vpp, np.ndarray):
        return np.where(vpp == 1, profile.p2p_exposed, profile.p2p_exposed_interleaved)
    return profile.p2p_exposed if vpp == 1 else profile.p2p_exposed_interleaved


def tied_sync_s(instance: Instance, degrees: Degrees, placement: Placement, embedding_params: int) -> float:
    """All-reduce of tied embedding gradients between the first and the last stage."""
    return collective_time_s(
        instance.accelerator, "all_reduce", GRADIENT_BYTES * embedding_params, _pair_spans(instance, placement)
    )


def pair_rate_s(instance: Instance, placement: Placement) -> float:
    """Seconds per parameter of the all-reduce between the two copies of the network that DualPipe holds."""
    profile = instance.profile
    spans = _pair_spans(instance, placement)
    return profile.reduce_bytes * bandwidth_time_per_byte(
        instance.accelerator, "all_reduce", spans, profile.bucket_bytes
    )


def _pair_spans(instance: Instance, placement: Placement) -> Spans:
    """Two stages as far apart as any."""
    outermost = max((level for level, factor in enumerate(placement.pp) if factor > 1), default=0)
    return tuple((2 if level == outermost else 1, link) for level, link in enumerate(instance.levels))
