"""What one candidate's step time and memory are linear in: seconds (or units) and MiB per layer of each kind.

(F1) Time coefficients are those of (T1)-(T5) in `step_time`: per layer kind the passes of one micro-batch, the part of
     the backward pass that is weight gradients, what recompute adds, and the two tails of (T4). `in_units` rounds each
     down to a multiple of the instance's time unit; nothing is rounded after that, so a path that is the sum of n
     rounded terms is at most as long as the same path in seconds, and less than n units shorter.
(F2) Memory coefficients are the lines of `memory`, each rounded up to MiB.
     What leaves for the host (U5) is the same for every plan of a candidate, which has one stage: `fixed` has less for it,
     and a mode of recompute frees nothing, since none is legal beside. Likewise what shows of its copies is a part of the
     embedding's passes, after the tails.
(F3) Sets of modules: with the modules of the pack that drop something, sorted by the time that each adds for a byte that it
     drops on one device with one sequence, the first, the first two, ... all of them, and the attention core alone. A module
     that holds others takes their place.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import floor, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.data.pipeline import FOLDED, SPLIT
from shardwise.data.recompute import ANY, CORE, MODULES, WITHIN, module_set, modules_of
from shardwise.data.rules import repeatable
from shardwise.formulations.collectives import split_spans
from shardwise.formulations.layer_costs import (
    Groups,
    LayerTerms,
    Sharding,
    ShardTerms,
    compute_terms,
    module_terms,
    shard_terms,
    sharding_of,
)
from shardwise.formulations.layer_time import LayerTime, exposed, layer_time, modules_time_s, weight_gradient_s
from shardwise.formulations.memory import (
    MIB,
    ON_HOST,
    ActivationBytes,
    KindParams,
    end_units,
    gather_buffer_bytes,
    head_activations_bytes,
    kind_params_on_device,
    layer_activations,
    mib_up,
    state_bytes,
    tied_copy,
    transfer_buffer_bytes,
)
from shardwise.formulations.offload import host_capacity_bytes, host_copy_s
from shardwise.formulations.step_time import (
    SyncRates,
    exchange_time_s,
    gathers_each_pass,
    group_of,
    hop_times_s,
    lag_time_s,
    pair_rate_s,
    params_optimizer_s,
    params_sync_s,
    spans_of,
    straggling,
    sync_rates,
    tied_sync_s,
    unit_times_s,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.data.instance import Instance
    from shardwise.data.plan import Degrees, Placement
    from shardwise.data.profile import Profile

REMEMBERED = 2**15
"""Coefficients that are kept."""

Numbers = Any
"""One number per unit or link; with a row for each plan behind them, an array."""


@dataclass(frozen=True, slots=True)
class TimeCoefficients:
    """(F1) Per-kind tuples follow `Model.kinds`, with the embedding and the head behind them.

    forward, backward, weight
        One micro-batch's passes without recompute; `weight` is the part of `backward` that the schedule splits off.
    selective, full
        What recompute adds to the backward pass; `selective` has the units of each set of modules one after the other.
    tail_floor, tail_overlap
        (T4) exposed sync plus optimizer: at the floor, and less what one micro-batch hides.
    sends, lags
        (T2) per link: what both stages wait for, and what only the receiver does.
    """

    forward: Numbers
    backward: Numbers
    weight: Numbers
    selective: Numbers
    full: Numbers
    tail_floor: Numbers
    tail_overlap: Numbers
    sends: Numbers
    lags: Numbers
    tied: float
    overhead: float

    def of_set(self, index: int) -> Numbers:
        """What the set of modules with that index adds, by unit."""
        units = len(self.full)
        return self.selective[index * units : (index + 1) * units]

    def in_units(self, unit_s: float) -> TimeCoefficients:
        """Every coefficient as a whole number of `unit_s`, rounded down; both parts of a backward pass on their own."""
        rounded: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                rounded[field.name] = tuple(floor(item / unit_s) for item in value)
            else:
                rounded[field.name] = floor(value / unit_s)
        rounded["backward"] = tuple(
            floor((both - apart) / unit_s) + floor(apart / unit_s)
            for both, apart in zip(self.backward, self.weight, strict=True)
        )
        return replace(self, **rounded)


@dataclass(frozen=True)
class MemoryCoefficients:
    """(F2) MiB per layer and stage; activations per layer depend on the micro-batches in flight. `host` is (U1) per kind, with
    the embedding and the head behind them; a device has `host_capacity` (U2), less what (U5) takes of it."""

    state: tuple[int, ...]
    activations: tuple[ActivationBytes, ...]
    embedding: int
    head: int
    fixed: int
    capacity: int
    host: tuple[int, ...] = ()
    host_capacity: int = 0

    def kept(self, kind: int, in_flight: int, mode: str) -> int:
        """MiB that `in_flight` micro-batches keep for one layer of `kind` under a recompute mode."""
        return mib_up(in_flight * self.activations[kind].kept(mode))

    def needed(self, mode: str) -> int:
        """MiB that a stage needs while one of its layers is repeated, whatever its kind."""
        return max(mib_up(kept.needed(mode)) for kept in self.activations)

    @cached_property
    def working(self) -> int:
        """`needed` of full recompute."""
        return self.needed("full")

    def of_all_layers(self, counts: list[int]) -> int:
        """MiB of p = 1, one micro-batch in flight and nothing repeated, with `counts` layers of each kind."""
        layers = sum(n * (self.state[kind] + self.kept(kind, 1, "none")) for kind, n in enumerate(counts))
        return self.fixed + layers + self.embedding + self.head


@dataclass(frozen=True, slots=True)
class ShardTimes:
    """Times of every layer kind (in the order of `Model.kinds`), the embedding and the head."""

    kinds: tuple[LayerTime, ...]
    embedding: LayerTime
    head: LayerTime

    @staticmethod
    def of(terms: ShardTerms, profile: Profile, tp: int) -> ShardTimes:
        """On one device, without stragglers."""
        kinds = tuple(layer_time(kind, profile, tp) for kind in terms.kinds)
        return ShardTimes(kinds, layer_time(terms.embedding, profile, tp), layer_time(terms.head, profile, tp))


class CostTables:
    """The coefficients of one instance's candidates, remembered by what each part depends on.

    `sets` are the sets of modules that plans of the search may repeat.
    """

    def __init__(self, instance: Instance, sets: tuple[str, ...] = ()) -> None:
        self.instance = instance
        self.sets = sets or searched_sets(instance)
        self._selective: dict[tuple[Sharding, Groups, tuple[str, ...]], tuple[float, ...]] = {}
        self._modules: dict[tuple[Sharding, Groups, str], tuple[LayerTerms, ...]] = {}
        self._coefficients: dict[tuple[object, ...], TimeCoefficients] = {}
        self._compute: dict[Sharding, ShardTerms] = {}
        self._terms: dict[tuple[Sharding, Groups], ShardTerms] = {}
        self._times: dict[tuple[Sharding, Groups], ShardTimes] = {}
        self._rates: dict[tuple[tuple[int, ...], int, int, bool, float], SyncRates] = {}
        self._memory: dict[tuple[object, ...], MemoryCoefficients] = {}
        self._params: dict[tuple[int, int, int], tuple[KindParams, ...]] = {}
        self._activations: dict[Sharding, tuple[ActivationBytes, ...]] = {}

    def terms(self, sharding: Sharding, groups: Groups) -> ShardTerms:
        """`layer_costs.shard_terms`, remembered."""
        key = (sharding, groups)
        if key not in self._terms:
            self._terms[key] = shard_terms(self.instance, sharding, groups, self.computed(sharding))
        return self._terms[key]

    def computed(self, sharding: Sharding) -> ShardTerms:
        """`layer_costs.compute_terms`, remembered."""
        key = sharding.ring
        if key not in self._compute:
            self._compute[key] = compute_terms(self.instance, key)
        return self._compute[key]

    def times(self, sharding: Sharding, groups: Groups) -> ShardTimes:
        """Times of all layer kinds, embedding and head on one device, without stragglers."""
        key = (sharding, groups)
        if key not in self._times:
            self._times[key] = ShardTimes.of(self.terms(sharding, groups), self.instance.profile, sharding.tp)
        return self._times[key]

    def module_terms(self, sharding: Sharding, groups: Groups, modules: str) -> tuple[LayerTerms, ...]:
        """What each layer kind repeats of a set of modules beside its attention core, remembered."""
        key = (sharding, groups, modules)
        if key not in self._modules:
            self._modules[key] = tuple(
                sum(
                    (module_terms(self.instance, kind, sharding, groups, m) for m in modules_of(modules) if m != CORE),
                    LayerTerms(),
                )
                for kind in self.instance.model.kinds
            )
        return self._modules[key]

    def selective_s(self, sharding: Sharding, groups: Groups, sets: tuple[str, ...]) -> tuple[float, ...]:
        """Seconds that repeating each set adds, by unit, without stragglers, remembered."""
        key = (sharding, groups, sets)
        if key not in self._selective:
            profile, kinds = self.instance.profile, self.times(sharding, groups).kinds
            out: list[float] = []
            for own in sets:
                core = [time.selective_s if CORE in modules_of(own) else 0.0 for time in kinds]
                if own != CORE:
                    terms = self.module_terms(sharding, groups, own)
                    more = [modules_time_s(again, profile, sharding.tp) for again in terms]
                    core = [a + b for a, b in zip(core, more, strict=True)]
                out += [*core, 0.0, 0.0]
            self._selective[key] = tuple(out)
        return self._selective[key]

    def sets_with(self, modes: Iterable[str]) -> tuple[str, ...]:
        """Those of the search, or where `modes` name others, the sets among them."""
        named = tuple(sorted(set(modes) - {"none", "full"}))
        return self.sets if set(named) <= set(self.sets) else named

    def sync_rates(
        self,
        dp_factors: tuple[int, ...],
        zero: int,
        dp_replicate: int = 1,
        *,
        each_pass: bool = False,
        offload: float = 0.0,
    ) -> SyncRates:
        """`step_time.sync_rates`, remembered."""
        key = (dp_factors, zero, dp_replicate, each_pass, offload)
        if key not in self._rates:
            spans = spans_of(dp_factors, self.instance.levels)
            self._rates[key] = sync_rates(
                self.instance, spans, prod(dp_factors), zero, dp_replicate, each_pass=each_pass, offload=offload
            )
        return self._rates[key]

    def kind_params(self, tp: int, ep: int = 1, etp: int = 0) -> tuple[KindParams, ...]:
        """What one device holds of one layer of each kind."""
        key = (tp, ep, etp or tp)
        if key not in self._params:
            workload = self.instance.workload
            self._params[key] = tuple(kind_params_on_device(kind, *key, workload) for kind in self.instance.model.kinds)
        return self._params[key]

    def activations(self, sharding: Sharding) -> tuple[ActivationBytes, ...]:
        """Activation bytes of one layer of each kind."""
        key = replace(sharding, ep=min(sharding.ep, 2))  # spread or not is all that matters of ep
        if key not in self._activations:
            self._activations[key] = tuple(
                layer_activations(self.instance, kind, key) for kind in self.instance.model.kinds
            )
        return self._activations[key]

    def time(
        self, degrees: Degrees, placement: Placement, schedule: str = "", sets: tuple[str, ...] = ()
    ) -> TimeCoefficients:
        """(F1) in seconds, remembered: one object for all that `vpp` and the schedule do not tell apart. Without `sets`
        those of the search."""
        schedule, sets = schedule or degrees.schedule, sets or self.sets
        alike = degrees if degrees.vpp <= 2 else replace(degrees, vpp=2)
        key = (alike, placement, schedule in SPLIT, schedule in FOLDED, schedule == "dualpipe", sets)
        if key not in self._coefficients:
            if len(self._coefficients) >= REMEMBERED:
                self._coefficients.clear()
            self._coefficients[key] = self._time_coefficients(degrees, placement, schedule, sets)
        return self._coefficients[key]

    def _time_coefficients(
        self, degrees: Degrees, placement: Placement, schedule: str, sets: tuple[str, ...]
    ) -> TimeCoefficients:
        instance = self.instance
        profile = instance.profile
        sharding, groups = sharding_of(degrees), groups_of(instance, degrees, placement)
        times, terms = self.times(sharding, groups), self.terms(sharding, groups)
        scale = straggling(instance, degrees.devices)
        apart = tied_copy(instance, degrees.pp, schedule)
        ends = end_units(instance, degrees.tp, degrees.ep, degrees.etp, with_tied_copy=apart)
        params = [*self.kind_params(degrees.tp, degrees.ep, degrees.etp), *ends]
        dense, expert = self.group_rates(degrees, placement, schedule)
        units, tails = [], []
        for index, (size, time) in enumerate(zip(params, (*times.kinds, times.embedding, times.head), strict=True)):
            end = index >= len(times.kinds)
            units.append(_scaled(self._sharded(degrees, placement, size, time, end=end), scale))
            tails.append(self._tails(dense, expert, size, units[-1]))
        weights = [weight_gradient_s(own, profile) * scale for own in (*terms.kinds, terms.embedding, terms.head)]
        if degrees.offload_layers:
            waits = self.copies_s(degrees, placement)
            first = units[-2]
            units[-2] = replace(first, forward_s=first.forward_s + waits[0], backward_s=first.backward_s + waits[1])
        hops = hop_times_s(instance, degrees, placement)
        tied = tied_sync_s(instance, degrees, placement, ends[0].dense) if apart else 0.0
        return TimeCoefficients(
            forward=tuple(time.forward_s for time in units),
            backward=tuple(time.backward_s for time in units),
            weight=tuple(
                min(own, time.backward_s) if schedule in SPLIT else 0.0
                for own, time in zip(weights, units, strict=True)
            ),
            selective=tuple(again * scale for again in self.selective_s(sharding, groups, sets)),
            full=tuple(time.full_s for time in units),
            tail_floor=tuple(floor for floor, _ in tails),
            tail_overlap=tuple(overlap for _, overlap in tails),
            sends=tuple(exchange_time_s(profile, hop, degrees.vpp) for hop in hops),
            lags=tuple(lag_time_s(profile, hop, degrees.vpp) for hop in hops),
            tied=tied,
            overhead=profile.step_overhead_s,
        )

    def copies_s(self, degrees: Degrees, placement: Placement) -> tuple[float, float]:
        """(U5) Seconds that the copies of saved activations add to the forward and the backward pass of a micro-batch."""
        bare = self.time(replace(degrees, offload_layers=0), placement)
        forward = backward = 0.0
        counts = self.kind_prefixes[degrees.offload_layers].tolist()
        for count, size, f, b in zip(counts, self._saved_bytes(degrees), bare.forward, bare.backward, strict=False):
            copied = size * host_copy_s(self.instance)
            forward += count * max(0.0, copied - f)
            backward += count * max(0.0, copied - b)
        return forward, backward

    def _saved_bytes(self, degrees: Degrees) -> list[float]:
        """(U5) What a layer of each kind sends to the host."""
        held = 1 + self.instance.profile.memory_fragmentation
        return [kept.none / held for kept in self.activations(sharding_of(degrees))]

    def host_activations_bytes(self, degrees: Degrees) -> float:
        """(U5) Saved activations of one device on its host."""
        counts = self.kind_prefixes[degrees.offload_layers].tolist()
        return float(sum(count * size for count, size in zip(counts, self._saved_bytes(degrees), strict=False)))

    def least_offload(self, degrees: Degrees) -> int | None:
        """(U6) The fewest layers whose activations have to leave for p = 1 to fit the device; None where all but one are too
        few."""
        plain, kinds = self.memory(replace(degrees, offload_layers=0), "1f1b"), self.instance.model.kind_indices
        over = plain.of_all_layers(self.kind_counts.tolist()) - plain.capacity
        if over <= 0:
            return 0
        kept = np.array([plain.kept(kind, 1, "none") for kind in range(len(plain.state))])
        enough = np.cumsum(kept[list(kinds[:-1])]) >= over + plain.needed(ON_HOST)
        return int(enough.argmax()) + 1 if enough.any() else None

    def group_rates(self, degrees: Degrees, placement: Placement, schedule: str = "") -> tuple[SyncRates, SyncRates]:
        """(T4) of dense parameters, over dp and cp together, and of experts, over the ranks that hold the same ones;
        DualPipe also adds the gradients of its two copies."""
        each_pass, share = gathers_each_pass(degrees.zero, degrees.pp), degrees.offload_optimizer
        dense = expert = self.sync_rates(
            group_of(placement.dp, placement.cp), degrees.zero, degrees.dp_replicate, each_pass=each_pass, offload=share
        )
        if sharding_of(degrees).spread:
            stage = spans_of(group_of(placement.tp, placement.cp, placement.dp), self.instance.levels)
            _, same = split_spans(stage, degrees.ep * degrees.etp)
            replicate = degrees.expert_dp // degrees.expert_dp_shard
            members = tuple(count for count, _ in same)
            expert = self.sync_rates(members, degrees.zero, replicate, each_pass=each_pass, offload=share)
        if schedule == "dualpipe":
            pair = pair_rate_s(self.instance, placement)
            dense, expert = (replace(rate, communication_s=rate.communication_s + pair) for rate in (dense, expert))
        return dense, expert

    def _sharded(
        self, degrees: Degrees, placement: Placement, params: KindParams, time: LayerTime, *, end: bool
    ) -> LayerTime:
        """(J5) of a layer whose weights or gradients are sharded over data parallelism and move with each pass."""
        if not gathers_each_pass(degrees.zero, degrees.pp):
            return time
        gather, both = unit_times_s(self.instance, degrees, placement, params, end=end)
        profile = self.instance.profile
        return LayerTime(
            time.forward_s + exposed(gather, time.forward_s, profile),
            time.backward_s + exposed(both, time.backward_s, profile),
            time.selective_s,
            time.full_s,
        )

    def _tails(self, dense: SyncRates, expert: SyncRates, params: KindParams, time: LayerTime) -> tuple[float, float]:
        """(T4) The two tails of parameters whose passes take `time`."""
        profile = self.instance.profile
        sync, optimizer = params_sync_s(dense, expert, params), params_optimizer_s(dense, expert, params)
        hidden = profile.dp_comm_overlap * time.both_s if sync else 0.0
        return profile.dp_comm_floor * sync + optimizer, sync - hidden + optimizer

    def memory(self, degrees: Degrees, schedule: str = "") -> MemoryCoefficients:
        """(F2) of a candidate; the placement does not matter."""
        sharding = sharding_of(degrees)
        shard = degrees.cp * degrees.dp_shard if degrees.zero else 1
        apart = tied_copy(self.instance, degrees.pp, schedule)
        offload = degrees.offload_optimizer, degrees.offload_param, degrees.offload_layers
        key = (sharding, shard, degrees.expert_dp_shard, degrees.zero, degrees.pp > 1, apart, offload)
        if key not in self._memory:
            self._memory[key] = self._memory_coefficients(degrees, apart=apart)
        return self._memory[key]

    def _memory_coefficients(self, degrees: Degrees, *, apart: bool) -> MemoryCoefficients:
        if degrees.offload_layers:
            return self._with_activations_away(degrees, self.memory(replace(degrees, offload_layers=0), "1f1b"))
        instance, tp = self.instance, degrees.tp
        sharding = sharding_of(degrees)
        activations = self.activations(sharding)
        embedding, head = end_units(instance, tp, degrees.ep, degrees.etp, with_tied_copy=apart)
        kinds = self.kind_params(tp, degrees.ep, degrees.etp)
        held = [state_bytes(instance, params, degrees) for params in (*kinds, embedding, head)]
        return MemoryCoefficients(
            state=tuple(mib_up(own.total) for own in held[:-2]),
            activations=activations,
            embedding=mib_up(held[-2].total),
            head=mib_up(held[-1].total) + mib_up(head_activations_bytes(instance, sharding)),
            fixed=mib_up(instance.profile.memory_reserve_bytes)
            + mib_up(transfer_buffer_bytes(instance, degrees))
            + mib_up(gather_buffer_bytes(instance, kinds, degrees)),
            capacity=self.capacity_mib,
            host=tuple(mib_up(own.host) for own in held),
            host_capacity=self.host_capacity_mib if degrees.offload_optimizer else 0,
        )

    def _with_activations_away(self, degrees: Degrees, plain: MemoryCoefficients) -> MemoryCoefficients:
        """(U5) of a candidate, from what it takes with nothing away."""
        counts = self.kind_prefixes[degrees.offload_layers].tolist()
        away = sum(count * plain.kept(kind, 1, "none") for kind, count in enumerate(counts[:-2]))
        nothing_freed = tuple(
            replace(kept, full=kept.none, working=0.0, dropped=(0.0,) * len(kept.dropped)) for kept in plain.activations
        )
        return replace(
            plain,
            activations=nothing_freed,
            fixed=plain.fixed + plain.needed(ON_HOST) - away,
            host_capacity=self.host_capacity_mib - mib_up(self.host_activations_bytes(degrees)),
        )

    @cached_property
    def kind_prefixes(self) -> npt.NDArray[np.int64]:
        """How many of the first 0, 1, ... L layers are of each unit, shape (L + 1, kinds + 2)."""
        kinds = self.instance.model.kind_indices
        out = np.zeros((len(kinds) + 1, len(self.instance.model.kinds) + 2), dtype=np.int64)
        out[np.arange(1, len(kinds) + 1), list(kinds)] = 1
        return out.cumsum(axis=0)

    @cached_property
    def kind_counts(self) -> npt.NDArray[np.int64]:
        """Layers of each kind."""
        return self.kind_prefixes[-1, :-2]

    @cached_property
    def capacity_mib(self) -> int:
        """Usable memory of a device over `memory_quantile`, down to whole MiB."""
        return int(self.instance.memory_limit_bytes / self.instance.profile.memory_quantile) // MIB

    @cached_property
    def host_capacity_mib(self) -> int:
        """(U2) What a device may take of its host's memory, down to whole MiB."""
        return int(host_capacity_bytes(self.instance)) // MIB


@lru_cache(maxsize=64)
def searched_sets(instance: Instance) -> tuple[str, ...]:
    """(F3) The sets of modules that selective recompute may repeat in a plan of the search."""
    wanted = instance.limits.recompute_modules
    if wanted != ANY:
        return (wanted or CORE,)
    counts = Counter(instance.model.kind_indices)
    alone, groups = Sharding(1, 1, False), Groups(((),))
    tables = CostTables(instance, (CORE,))
    activations, found = tables.activations(alone), []
    for module in repeatable(instance.rules, instance.workload.precision):
        index = MODULES.index(module)
        dropped = sum(n * activations[kind].dropped[index] for kind, n in counts.items())
        again = tables.selective_s(alone, groups, (module,))
        if dropped > 0:
            found.append((sum(n * again[kind] for kind, n in counts.items()) / dropped, index, module))
    sets, taken = [CORE], set[str]()
    for _, _, module in sorted(found):
        if not any(module in inner for outer, inner in WITHIN.items() if outer in taken):
            taken = taken - set(WITHIN.get(module, ())) | {module}
            sets.append(module_set(taken))
    return tuple(dict.fromkeys(sets))


def groups_of(instance: Instance, degrees: Degrees, placement: Placement) -> Groups:
    """Where the groups of a layer lie. Experts take neighbouring ranks of tp x cp x dp, each split over the first etp
    of them (Megatron core/parallel_state.py)."""
    levels = instance.levels
    tp = spans_of(placement.tp, levels)
    if degrees.cp == 1 and not sharding_of(degrees).spread:
        return Groups((tp,))
    stage = spans_of(group_of(placement.tp, placement.cp, placement.dp), levels)
    etp, rest = split_spans(stage, degrees.etp)
    ep, _ = split_spans(rest, degrees.ep)
    return Groups((tp,), (spans_of(placement.cp, levels),), (ep,), (etp,))


def _scaled(time: LayerTime, scale: float) -> LayerTime:
    return LayerTime(time.forward_s * scale, time.backward_s * scale, time.selective_s * scale, time.full_s * scale)
