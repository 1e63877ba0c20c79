"""What one candidate's step time and memory are linear in: seconds (or units) and MiB per layer of each kind.

(F1) Time coefficients are those of (T1)-(T5) in `step_time`: per layer kind the busy time of all micro-batches, the
     passes of one micro-batch, their additions under recompute, and the two tails of (T4). `in_units` rounds each to
     the nearest multiple of the instance's time unit; nothing is rounded after that, so a step of n rounded terms is
     within n / 2 units of the same step in seconds.
(F2) Memory coefficients are the lines of `memory`, each rounded up to MiB.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from shardwise.formulations.layer_costs import LayerCosts, LayerTime, Sharding
from shardwise.formulations.memory import (
    MIB,
    ActivationBytes,
    end_params_on_device,
    head_activations_bytes,
    kind_params_on_device,
    layer_activations,
    mib_up,
    state_bytes,
    tied_copy,
    transfer_buffer_bytes,
)
from shardwise.formulations.step_time import (
    SyncRates,
    exposed_transfer_s,
    hop_times_s,
    spans_of,
    sync_rates,
    tied_sync_s,
)

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Degrees, Placement

Numbers = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TimeCoefficients:
    """(F1) Per-kind tuples follow `Model.kinds`; `ends` entries belong to the embedding and the head.

    busy, busy_selective, busy_full
        All micro-batches, forward and backward, and what recompute adds.
    forward, backward, backward_selective, backward_full
        One micro-batch's passes, for fill and drain.
    tail_floor, tail_overlap
        (T4) exposed sync plus optimizer: at the floor, and less what one micro-batch hides.
    embedding_*, head_*
        The same for the embedding (first stage) and the head (last stage).
    hops, transfers
        Between stages j and j + 1; exposed transfers of stage k over all micro-batches.
    """

    busy: Numbers
    busy_selective: Numbers
    busy_full: Numbers
    forward: Numbers
    backward: Numbers
    backward_selective: Numbers
    backward_full: Numbers
    tail_floor: Numbers
    tail_overlap: Numbers
    embedding_busy: float
    embedding_forward: float
    embedding_backward: float
    embedding_tail_floor: float
    embedding_tail_overlap: float
    head_busy: float
    head_tail_floor: float
    head_tail_overlap: float
    hops: Numbers
    transfers: Numbers
    tied: float
    overhead: float

    def in_units(self, unit_s: float) -> TimeCoefficients:
        """Every coefficient as a whole number of `unit_s`, rounded to nearest."""
        rounded: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                rounded[field.name] = tuple(round(item / unit_s) for item in value)
            else:
                rounded[field.name] = round(value / unit_s)
        return replace(self, **rounded)


@dataclass(frozen=True)
class MemoryCoefficients:
    """(F2) MiB per layer and stage; activations per layer depend on the micro-batches in flight."""

    state: tuple[int, ...]
    activations: tuple[ActivationBytes, ...]
    embedding: int
    head: int
    fixed: int
    working: int
    capacity: int

    def kept(self, kind: int, in_flight: int, mode: str) -> int:
        """MiB that `in_flight` micro-batches keep for one layer of `kind` under a recompute mode."""
        return mib_up(in_flight * getattr(self.activations[kind], mode))


class CostTables:
    """The coefficients of one instance's candidates, remembered by what each part depends on."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.layer_costs = LayerCosts(instance)
        self._rates: dict[tuple[tuple[int, ...], int], SyncRates] = {}
        self._memory: dict[tuple[int, int, int, int, bool, bool], MemoryCoefficients] = {}
        self._params: dict[int, tuple[int, ...]] = {}
        self._activations: dict[tuple[int, int, bool], tuple[ActivationBytes, ...]] = {}

    def sync_rates(self, dp_factors: tuple[int, ...], zero: int) -> SyncRates:
        """`step_time.sync_rates`, remembered."""
        key = (dp_factors, zero)
        if key not in self._rates:
            spans = spans_of(dp_factors, self.instance.levels)
            self._rates[key] = sync_rates(self.instance, spans, prod(dp_factors), zero)
        return self._rates[key]

    def kind_params(self, tp: int) -> tuple[int, ...]:
        """Parameters of one layer of each kind on one of `tp` devices."""
        if tp not in self._params:
            self._params[tp] = tuple(kind_params_on_device(kind, tp) for kind in self.instance.model.kinds)
        return self._params[tp]

    def activations(self, tp: int, micro_batch: int, sequence_parallel: bool) -> tuple[ActivationBytes, ...]:
        """Activation bytes of one layer of each kind."""
        key = (tp, micro_batch, sequence_parallel)
        if key not in self._activations:
            self._activations[key] = tuple(
                layer_activations(self.instance, kind, tp, micro_batch, sequence_parallel)
                for kind in self.instance.model.kinds
            )
        return self._activations[key]

    def time(self, degrees: Degrees, placement: Placement, micro_batches: int) -> TimeCoefficients:
        """(F1) in seconds."""
        instance, m = self.instance, micro_batches
        sharding = Sharding(degrees.tp, degrees.micro_batch, degrees.sequence_parallel)
        times = self.layer_costs.times(sharding, spans_of(placement.tp, instance.levels))
        rates = self.sync_rates(placement.dp, degrees.zero)
        hops = hop_times_s(instance, degrees, placement)
        embedding_params = end_params_on_device(instance, degrees.tp, head=False)
        head_params = end_params_on_device(
            instance, degrees.tp, head=True, with_tied_copy=tied_copy(instance, degrees.pp)
        )
        tails = [self._tails(rates, n, t) for n, t in zip(self.kind_params(degrees.tp), times.kinds, strict=True)]
        embedding_tail = self._tails(rates, embedding_params, times.embedding)
        head_tail = self._tails(rates, head_params, times.head)
        return TimeCoefficients(
            busy=tuple(m * time.both_s for time in times.kinds),
            busy_selective=tuple(m * time.selective_s for time in times.kinds),
            busy_full=tuple(m * time.full_s for time in times.kinds),
            forward=tuple(time.forward_s for time in times.kinds),
            backward=tuple(time.backward_s for time in times.kinds),
            backward_selective=tuple(time.selective_s for time in times.kinds),
            backward_full=tuple(time.full_s for time in times.kinds),
            tail_floor=tuple(tail[0] for tail in tails),
            tail_overlap=tuple(tail[1] for tail in tails),
            embedding_busy=m * times.embedding.both_s,
            embedding_forward=times.embedding.forward_s,
            embedding_backward=times.embedding.backward_s,
            embedding_tail_floor=embedding_tail[0],
            embedding_tail_overlap=embedding_tail[1],
            head_busy=m * times.head.both_s,
            head_tail_floor=head_tail[0],
            head_tail_overlap=head_tail[1],
            hops=hops,
            transfers=tuple(m * exposed_transfer_s(instance, degrees, hops, k) for k in range(degrees.pp)),
            tied=tied_sync_s(instance, degrees, placement, embedding_params) if instance.model.tied else 0.0,
            overhead=instance.profile.step_overhead_s,
        )

    def _tails(self, rates: SyncRates, params: int, time: LayerTime) -> tuple[float, float]:
        """(T4) The two tails of `params` parameters whose passes take `time`."""
        profile = self.instance.profile
        sync, optimizer = rates.communication_s * params, rates.optimizer_s * params
        hidden = profile.dp_comm_overlap * time.both_s if rates.communication_s else 0.0
        return profile.dp_comm_floor * sync + optimizer, sync - hidden + optimizer

    def memory(self, degrees: Degrees) -> MemoryCoefficients:
        """(F2) of a candidate; the placement does not matter."""
        dp = degrees.dp if degrees.zero else 1
        key = (degrees.tp, dp, degrees.zero, degrees.micro_batch, degrees.sequence_parallel, degrees.pp > 1)
        if key not in self._memory:
            self._memory[key] = self._memory_coefficients(degrees)
        return self._memory[key]

    def _memory_coefficients(self, degrees: Degrees) -> MemoryCoefficients:
        instance, tp, dp, zero = self.instance, degrees.tp, degrees.dp, degrees.zero
        activations = self.activations(tp, degrees.micro_batch, degrees.sequence_parallel)
        embedding = end_params_on_device(instance, tp, head=False)
        head = end_params_on_device(instance, tp, head=True, with_tied_copy=tied_copy(instance, degrees.pp))
        return MemoryCoefficients(
            state=tuple(mib_up(state_bytes(instance, n, dp, zero).total) for n in self.kind_params(tp)),
            activations=activations,
            embedding=mib_up(state_bytes(instance, embedding, dp, zero).total),
            head=mib_up(state_bytes(instance, head, dp, zero).total)
            + mib_up(head_activations_bytes(instance, tp, degrees.micro_batch)),
            fixed=mib_up(instance.profile.memory_reserve_bytes)
            + mib_up(transfer_buffer_bytes(instance, degrees.micro_batch, degrees.pp)),
            working=max(mib_up(kept.none) for kept in activations),
            capacity=self.capacity_mib,
        )

    @cached_property
    def capacity_mib(self) -> int:
        """Usable memory of a device, down to whole MiB."""
        return self.instance.memory_limit_bytes // MIB
