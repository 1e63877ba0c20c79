"""Admissible lower bounds on the step time of candidates, before any stage is decided.

With W the time of one micro-batch through all layers, embedding and head (forward and backward, no recompute), the best
placement of every group assumed, m micro-batches, p stages, v chunks a stage, L layers, and t the fastest layer kind:

(B1) memory: all stages together hold every layer's states and at least one micro-batch of fully recomputed activations,
     so  sum of those + p * fixed <= p * capacity, or the candidate has no plan. The host holds all that (U1) gives it of
     all layers: it has no more than p times the share of a device either. Where activations leave for the host (U5) two
     layers' worth of them counts instead of all, and nothing is said of recompute (B6)-(B10): a pass takes no less.
(B2) work, v = 1, a schedule that drains (1F1B, eager 1F1B, GPipe): the path through stage k takes sum_{j<k} t_j + m t_k,
     t_j the time that stage j works on one micro-batch, transfers it waits for included, so any convex combination of
     the p paths bounds the step. The one that weights all stages alike has weight c = 1 / (1 - (1 - 1/m)^p) and gives
     T >= overhead + c (W + transfers).
(B3) work, v > 1: the mean over stages gives m (W + transfers) / p. Where the schedule drains (interleaving, GPipe) comes
     the mean fill of the chunks 1 .. k - 1, each mean at least (L - n) / (p v - 2) layers because larger chunks come
     first; n bounds the layers of the last chunk, as a plan with more than n there is slower than the incumbent. With
     free chunks each has one layer at least. The mean alone holds for every schedule.
(B4) whole layers: of the j slowest layers some stage holds ceil(j / p), so  T >= overhead + m times the sum of the fastest
     ceil(j / p) of them, for every j.
(B5) sync: the mean over stages of fill, busy time and tail gives  T >= overhead + (m (W + transfers) + X) / p, with
     interleaving + the forward part of the mean fill of (B3). A tail is the larger of two sums over layers (T4), so X, the
     sum of all tails, is at least the larger of the two sums over all layers.
(B6) recompute, interleaving, p > 2, one setting for all stages: stage 1 holds at least the mean of the middle stages, l >=
     (L - 2 n) / (p - 2) layers, and in-flight passes and layers both fall from chunk to chunk, so it keeps at least
     l / v times its passes in flight. Where that does not fit, every plan repeats one layer of every middle chunk, and
     the mean of (B3) grows by  m t_full (p v - 2) / p.  For what layers keep see (B10).
(B7) quick: with m / p = B / (b dp p), b the micro-batch, the mean of (B3) gives  T >= overhead + B / (dp p) min W / b  for
     all micro-batches of one shape at once.
(B8) recompute, any schedule: stage k has f_k micro-batches in flight on each of its layers at one moment, and so holds at
     most c_k = spare / (s + f_k a) layers when it repeats none, s and a the least states and activations of a layer; each
     layer more costs (s + f_k a) / (f_k a) repeated layers or more, and each beyond floor(c_k) one. Of all layers L - sum of
     c_k are beyond that, and W grows by t_full for each. f_k is min(p - k, m) with v = 1 (the least of all schedules);
     interleaved with even chunks on a stage between the first and the last, its passes in flight over v, by (B6); else 1.
(B9) recompute, v = 1, one setting for all stages, where (B8) says that some layer is repeated in full: with blocks of b
     layers stage k holds at most h_k + b g_k layers, h_k = spare / (s + f_k a), g_k = f_k (a - a_full) / (s + f_k a), so b is
     at least the first whole number for which the whole layers of all stages are L. A stage of l layers repeats min(b, l)
     >= l min(1, b / l_max), in all L min(1, b / l_max), l_max the most that a stage holds by memory and by n.
(B10) modes: with one setting for all stages a plan repeats nothing where (B6) and (B8) with what layers keep then leave room
     for that; or one set of modules of every layer where they do with what layers keep under that set, and W grows by what
     that takes; or it repeats in full at least one layer of each of p v - 2 chunks, and what (B8) and (B9) say with what
     layers keep when nothing is repeated. W grows by the least of these. With a setting per stage a in (B8) is the least
     of no recompute and of all sets.

Each is proven from the simple paths (T6) alone and property-tested against exhaustive minima.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.data.pipeline import FOLDED
from shardwise.data.plan import Degrees
from shardwise.formulations.candidates import divisors
from shardwise.formulations.coefficients import ShardTimes
from shardwise.formulations.layer_costs import Groups, common_terms, context_by_kind, with_context
from shardwise.formulations.memory import (
    MIB,
    ON_HOST,
    KindParams,
    end_units,
    head_activations_bytes,
    state_bytes,
    tied_copy,
)
from shardwise.formulations.schedule import DRAINED
from shardwise.formulations.step_time import (
    SyncRates,
    exchange_time_s,
    gathers_each_pass,
    hop_time_s,
    params_optimizer_s,
    params_sync_s,
    spans_of,
)

if TYPE_CHECKING:
    from shardwise.formulations.candidates import Column, Grid, GridShape, PlacementTable
    from shardwise.formulations.coefficients import CostTables
    from shardwise.formulations.layer_costs import LayerTerms, Sharding, ShardTerms, Spans

Floats = npt.NDArray[np.float64]
Pair = tuple[int, "LayerTerms", "LayerTerms"]
"""A layer kind, and what a ring and another algorithm of context parallelism do there."""
BLOCKS_TRIED = 8
SAFETY = 1 - 1e-9
"""Float bounds are scaled down by this before they are compared: their own rounding never prunes an optimum."""


@dataclass(frozen=True)
class BestCase:
    """Per instance: the best placement of each group alone, which no real placement beats."""

    tables: CostTables
    placement_table: PlacementTable
    factors: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict, compare=False, repr=False)
    rates: dict[tuple[int, int, bool, float], SyncRates] = field(default_factory=dict, compare=False, repr=False)
    known_times: dict[Sharding, ShardTimes] = field(default_factory=dict, compare=False, repr=False)
    works: dict[Sharding, float] = field(default_factory=dict, compare=False, repr=False)
    commons: dict[Sharding, ShardTerms] = field(default_factory=dict, compare=False, repr=False)
    contexts: dict[Sharding, tuple[LayerTerms, ...]] = field(default_factory=dict, compare=False, repr=False)
    ring_wins: dict[Sharding, bool] = field(default_factory=dict, compare=False, repr=False)
    kept: dict[Sharding, float] = field(default_factory=dict, compare=False, repr=False)
    params: dict[tuple[int, int, int, bool], KindParams] = field(default_factory=dict, compare=False, repr=False)
    states: dict[tuple[GridShape, int, int], float] = field(default_factory=dict, compare=False, repr=False)
    exchanges: dict[Sharding, tuple[Pair, ...] | None] = field(default_factory=dict, compare=False, repr=False)

    def group_factors(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Every way to spread a group of `size` over the levels when it has the cluster for itself."""
        if size in self.factors:
            return self.factors[size]
        found: list[tuple[int, ...]] = []

        def extend(left: int, block: tuple[int, ...]) -> None:
            capacity = self.placement_table.capacity(block)
            if len(block) == self.placement_table.depth - 1:
                if left <= capacity:
                    found.append((*block, left))
                return
            for factor in divisors(left):
                if factor <= capacity:
                    extend(left // factor, (*block, factor))

        extend(size, ())
        self.factors[size] = tuple(found)
        return self.factors[size]

    def groups(self, sharding: Sharding) -> Groups:
        """Every place of the groups of a layer, each of which must fit somewhere."""
        levels = self.tables.instance.levels

        def places(size: int) -> tuple[Spans, ...]:
            return tuple(spans_of(factors, levels) for factors in self.group_factors(size))

        expert = (places(sharding.ep), places(sharding.etp)) if sharding.spread else ((), ())
        return Groups(places(sharding.tp), places(sharding.cp) if sharding.cp > 1 else (), *expert)

    def fits_somewhere(self, sharding: Sharding) -> bool:
        """Whether each group of a layer has a place."""
        return all(self.group_factors(size) for size in (sharding.tp, sharding.cp, sharding.ep, sharding.etp))

    def terms(self, sharding: Sharding) -> ShardTerms:
        """Layer terms with every collective in the fastest place of its group; what several shardings have in common is
        remembered."""
        instance, alone = self.tables.instance, context_alone(sharding)
        if alone not in self.contexts:
            self.contexts[alone] = context_by_kind(instance, alone, self.groups(alone))
        return with_context(instance, self.common(sharding), self.contexts[alone])

    def common(self, sharding: Sharding) -> ShardTerms:
        """Those that all algorithms of context parallelism have in common."""
        ring = sharding.ring
        if ring not in self.commons:
            self.commons[ring] = common_terms(self.tables.instance, ring, self.groups(ring), self.tables.computed(ring))
        return self.commons[ring]

    def times(self, sharding: Sharding) -> ShardTimes:
        """Layer times with every collective in the fastest place of its group, remembered."""
        if sharding not in self.known_times:
            self.known_times[sharding] = ShardTimes.of(self.terms(sharding), self.tables.instance.profile, sharding.tp)
        return self.known_times[sharding]

    def work_s(self, sharding: Sharding) -> float:
        """W, remembered."""
        if sharding not in self.works:
            times = self.times(sharding)
            layers = sum(int(n) * time.both_s for n, time in zip(self.tables.kind_counts, times.kinds, strict=True))
            self.works[sharding] = float(layers + times.embedding.both_s + times.head.both_s)
        return self.works[sharding]

    def set_s(self, sharding: Sharding, modules: str) -> float:
        """What repeating a set of modules of every layer takes, every collective in the fastest place of its group."""
        again = self.tables.selective_s(sharding, self.groups(sharding), (modules,))
        return float(sum(n * own for n, own in zip(self.tables.kind_counts.tolist(), again, strict=False)))

    def kept_bytes(self, sharding: Sharding, *, away: bool = False) -> float:
        """(B1) Fully recomputed activations of one micro-batch, those of the head with them, remembered; `away` as in (U5)."""
        key = replace(sharding, ep=min(sharding.ep, 2))
        if away:
            held = max(kept.needed(ON_HOST) for kept in self.tables.activations(key))
            return held + head_activations_bytes(self.tables.instance, key)
        if key not in self.kept:
            per_kind = [min(a.full, a.none) for a in self.tables.activations(key)]  # no set of modules keeps less
            head = head_activations_bytes(self.tables.instance, key)
            self.kept[key] = float(np.dot(self.tables.kind_counts, per_kind) + head)
        return self.kept[key]

    def states_bytes(self, shape: GridShape, dp: int, pp: int) -> float:
        """(B1) States of all layers and ends on one device of each of `pp` stages, remembered."""
        key = (shape, dp, pp)
        if key not in self.states:
            instance = self.tables.instance
            held = self.all_params(shape, tied=tied_copy(instance, pp, shape.schedule))
            self.states[key] = state_bytes(instance, held, shape.degrees(pp, 1, dp, 1)).total
        return self.states[key]

    def all_params(self, shape: GridShape, *, tied: bool = False) -> KindParams:
        """Parameters of all layers, the embedding and the head on the devices of one pipeline, remembered."""
        key = (shape.tp, shape.ep, shape.etp, tied)
        if key not in self.params:
            tables, (tp, ep, etp, _) = self.tables, key
            counts, kinds = tables.kind_counts, tables.kind_params(tp, ep, etp)
            layers = (unit * int(n) for n, unit in zip(counts, kinds, strict=True))
            ends = end_units(tables.instance, tp, ep, etp, with_tied_copy=tied)
            self.params[key] = sum((*layers, *ends), KindParams(0, 0))
        return self.params[key]

    def sync_rates(self, members: int, zero: int, *, each_pass: bool, offload: float = 0.0) -> SyncRates | None:
        """(B5) The least per parameter of gradient sync and of the optimizer, over places and numbers of replicas; None
        where the group fits nowhere."""
        key = (members, zero, each_pass, offload)
        if key not in self.rates:
            found = [
                self.tables.sync_rates(factors, zero, replicate, each_pass=each_pass, offload=offload)
                for factors in self.group_factors(members)
                for replicate in (divisors(members) if zero else [1])
            ]
            if not found:
                return None
            self.rates[key] = SyncRates(
                min(rate.communication_s for rate in found),
                min(rate.optimizer_s for rate in found),
                min(rate.frozen_s for rate in found),
                copied_s=min(rate.copied_s for rate in found),
                host_s=min(rate.host_s for rate in found),
            )
        return self.rates[key]


def context_alone(sharding: Sharding) -> Sharding:
    """What (L6) depends on of a sharding."""
    return replace(sharding, sequence_parallel=False, ep=1, etp=sharding.tp)


def work_bound_s(
    work: npt.ArrayLike, transfers: npt.ArrayLike, fastest: npt.ArrayLike, whole: npt.ArrayLike, forward: npt.ArrayLike,
    tails: npt.ArrayLike, micro_batches: npt.ArrayLike, pp: npt.ArrayLike, vpp: npt.ArrayLike, layers: int,
    last_chunk: npt.ArrayLike, repeated: npt.ArrayLike = 0.0, *, drains: bool = True, even: bool = True,
) -> Floats:  # fmt: skip
    """(B2)-(B5) without overhead, element by element.

    Parameters
    ----------
    work, transfers, fastest, whole
        Seconds per micro-batch: W, exposed transfers summed over stages, t, and `whole_layers_s`.
    forward, tails
        Seconds: the forward part of t, the least of all kinds, and X of (B5).
    last_chunk
        n of (B3).
    repeated
        Seconds per micro-batch that (B6) or (B8) adds to W.
    drains
        Whether the schedule's last backward pass on each stage is followed by those of the stages before it.
    even
        Whether the middle chunks are even.
    """
    w, x, m, p, v = (np.asarray(values, dtype=np.float64) for values in (work, transfers, micro_batches, pp, vpp))
    through = w + x + np.asarray(repeated)
    synced = (m * through + np.asarray(tails)) / p
    largest = m * np.asarray(whole, dtype=np.float64)
    if not drains:
        return np.asarray(np.maximum(synced, largest))
    weight = 1 / -np.expm1(p * np.log1p(-1 / np.maximum(m, 1 + 1e-12)))
    interleaved = m / p * through + mean_fill_s(fastest, pp, vpp, layers, last_chunk, even=even)
    drained = np.where(v == 1, weight * through, interleaved)
    synced = synced + mean_fill_s(forward, pp, vpp, layers, last_chunk, even=even)
    return np.asarray(np.maximum(np.maximum(drained, synced), largest))


def mean_fill_s(
    layer_s: npt.ArrayLike, pp: npt.ArrayLike, vpp: npt.ArrayLike, layers: int, last_chunk: npt.ArrayLike, *, even: bool
) -> Floats:
    """(B3) The mean over stages of the passes of `layer_s` a layer through the chunks 1 .. k - 1; 0 where v = 1."""
    p, v = (np.asarray(values, dtype=np.float64) for values in (pp, vpp))
    chunk = np.maximum(layers - np.asarray(last_chunk, dtype=np.float64), 0) / np.maximum(p * v - 2, 1)
    chunk = chunk if even else np.ones_like(chunk)
    return np.asarray(np.where(v > 1, np.asarray(layer_s) * chunk * (p - 1) * (p - 2) / (2 * p), 0.0))


def whole_layers_s(kinds_s: list[float], counts: npt.NDArray[np.int64], pp: npt.ArrayLike) -> Floats:
    """(B4) for one micro-batch and each of `pp`: layers of each kind take `kinds_s` and there are `counts` of them."""
    stages = np.asarray(pp, dtype=np.int64)
    if len(kinds_s) == 1:
        return np.asarray(kinds_s[0] * -(-counts[0] // stages), dtype=np.float64)
    several, where = np.unique(stages, return_inverse=True)
    slowest = np.sort(np.repeat(kinds_s, counts))[::-1]
    until = np.concatenate(([0.0], np.cumsum(slowest)))
    among = np.arange(1, len(slowest) + 1)
    held = -(-among // several[:, None])
    found: Floats = (until[among] - until[among - held]).max(axis=1)
    return found[where].reshape(stages.shape)


def last_chunk_layers(within_s: npt.ArrayLike, layer_s: npt.ArrayLike, layers: int) -> Floats:
    """n of (B3): layers of `layer_s` seconds each that fit into `within_s`; all of them when a layer takes no time."""
    seconds = np.asarray(layer_s, dtype=np.float64)
    fitting = np.floor(np.asarray(within_s, dtype=np.float64) / np.where(seconds > 0, seconds, 1.0))
    return np.where(seconds > 0, np.minimum(fitting, layers), float(layers))


def quick_bounds_s(best: BestCase, grid: Grid) -> Floats:
    """(B7) in seconds, for every row of a grid."""
    shape, batch = grid.shape, best.tables.instance.workload.global_batch
    if not best.fits_somewhere(shape.sharding(1)):
        return np.full(len(grid), np.inf)
    least = min(best.work_s(shape.sharding(int(size))) / int(size) for size in grid.sizes[0])
    return np.asarray((best.tables.instance.profile.step_overhead_s + batch * least / (grid.dp * grid.pp)) * SAFETY)


def grid_bounds(best: BestCase, grid: Grid, within_s: Floats | float | None) -> Floats:
    """(B2)-(B6), (B8), (B9) of every row of `grid` in seconds, with the best placement of each group assumed.

    With `within_s` the bounds of rows that have no plan of at most so many seconds may be anything.
    """
    instance, shape = best.tables.instance, grid.shape
    micro, at = grid.sizes
    if not best.fits_somewhere(shape.sharding(1)):
        return np.full(len(grid), np.inf)
    counts, layers, profile = best.tables.kind_counts, len(instance.model.layers), instance.profile
    every = [best.times(shape.sharding(int(size))) for size in micro]
    kinds_s = [[time.both_s for time in times.kinds] for times in every]
    ends_s = [times.embedding.both_s + times.head.both_s for times in every]
    scale = 1 + profile.straggler * np.log2(shape.tp * shape.cp * grid.pp * grid.dp)
    work = (np.array(kinds_s) @ counts + np.array(ends_s))[at] * scale
    fastest = np.array(kinds_s).min(axis=1)[at] * scale
    stages, pipeline = np.unique(grid.pp, return_inverse=True)
    whole = np.array([whole_layers_s(own, counts, stages) for own in kinds_s])[at, pipeline] * scale
    hops = np.array([_least_hop_s(best, Degrees(tp=shape.tp, cp=shape.cp, micro_batch=int(n))) for n in micro])[at]
    exchange = exchange_time_s(profile, hops, grid.vpp)
    sends = 2 * (grid.pp - 1) if shape.schedule in FOLDED else grid.pp * grid.vpp - 1
    transfers = np.where(grid.pp > 1, 2.0 * sends * exchange, 0.0)
    last_chunk = np.full(len(grid), float(layers))
    if within_s is not None:
        last_chunk = last_chunk_layers(within_s, grid.micro_batches * fastest, layers)
    forward = np.array([min(time.forward_s for time in times.kinds) for times in every])[at] * scale
    tails = _tails(best, grid, work)
    columns = (work, transfers, fastest, whole, forward, tails, grid.micro_batches, grid.pp, grid.vpp, last_chunk)
    drains, even = shape.schedule in DRAINED, instance.rules.even_chunks

    def worked(rows: npt.NDArray[np.intp] | slice, repeated: Floats | float) -> Floats:
        w, x, t, largest, f, tail, m, p, v, n = (column[rows] for column in columns)
        return work_bound_s(w, x, t, largest, f, tail, m, p, v, layers, n, repeated, drains=drains, even=even)

    lower = worked(slice(None), 0.0)
    if within_s is not None:
        # what recompute adds takes long to tell, and matters only where the rest leaves the row
        left = np.nonzero((lower + profile.step_overhead_s) * SAFETY <= within_s)[0]
        if len(left) and not shape.offload_layers:
            repeated = _repeated(best, grid.rows(left), last_chunk[left]) * scale[left]
            lower[left] = np.maximum(lower[left], worked(left, repeated))
    return np.asarray((lower + profile.step_overhead_s) * SAFETY)


def _least_hop_s(best: BestCase, degrees: Degrees) -> float:
    """The fastest transfer between stages."""
    return min(hop_time_s(best.tables.instance, degrees, link) for link in best.tables.instance.levels)


def _repeated(best: BestCase, grid: Grid, most: Floats) -> Floats:
    """(B6), (B8), (B9) per row: seconds per micro-batch of recompute that no plan avoids; `most` is n."""
    tables, shape = best.tables, grid.shape
    sizes, at_size = grid.sizes
    groups, at_group = grid.groups
    pipelined = bool((grid.pp > 1).all())
    least = LeastLayer.of(tables, shape, groups.tolist(), sizes.tolist(), pipelined=pipelined).rows(at_group, at_size)
    repeat = np.array([min(time.full_s for time in best.times(shape.sharding(int(size))).kinds) for size in sizes])
    room = LayerRoom(tables, shape.schedule, grid)
    if not tables.instance.rules.uniform_recompute:
        return np.asarray(room.beyond(least.states, least.kept.min(axis=0), slice(None)) * repeat[at_size])
    middle = LeastLayer.of(tables, shape, groups.tolist(), sizes.tolist(), pipelined=True).rows(at_group, at_size)
    held = _middle_layers(tables, shape.schedule, grid, most)

    def short(mode: int, rows: npt.NDArray[np.intp] | slice) -> npt.NDArray[np.bool_]:
        """Which rows have no room for a plan in a mode, of none and the sets."""
        over = held[rows] * (middle.states[rows] + room.middle[rows] * middle.kept[mode, rows]) > room.spare
        return np.asarray(over | (room.beyond(least.states[rows], least.kept[mode, rows], rows) > 0))

    out, left = np.zeros(len(grid)), np.nonzero(short(0, slice(None)))[0]
    if not len(left):
        return out
    out[left] = _repeated_in_full(room, grid, least, most, left) * repeat[at_size][left]
    for index, own in enumerate(tables.sets):
        chosen = left[~short(index + 1, left)]
        if len(chosen):
            seconds = np.array([best.set_s(shape.sharding(int(size)), own) for size in sizes])[at_size]
            out[chosen] = np.minimum(out[chosen], seconds[chosen])
    return out


@dataclass(frozen=True, eq=False)
class LeastLayer:
    """Bytes of a layer, the least of all kinds: its states by number of replicas, and by size of micro-batch what it keeps
    when nothing is repeated and under each set of modules, (1 + sets, sizes), and in full recompute."""

    states: Floats
    kept: Floats
    full: Floats

    @staticmethod
    def of(tables: CostTables, shape: GridShape, groups: list[int], sizes: list[int], *, pipelined: bool) -> LeastLayer:
        instance = tables.instance
        params = tables.kind_params(shape.tp, shape.ep, shape.etp)
        states = [
            min(state_bytes(instance, n, shape.degrees(1 + pipelined, 1, dp, 1)).total for n in params) for dp in groups
        ]
        every = [tables.activations(shape.sharding(size)) for size in sizes]
        return LeastLayer(
            np.array(states),
            np.array([[min(a.kept(mode) for a in kinds) for kinds in every] for mode in ("none", *tables.sets)]),
            np.array([min(a.full for a in kinds) for kinds in every]),
        )

    def rows(self, groups: Column, sizes: Column) -> LeastLayer:
        """One entry a row."""
        return LeastLayer(self.states[groups], self.kept[:, sizes], self.full[sizes])


class LayerRoom:
    """(B8) of the rows of a grid: the bytes that layers have, and the micro-batches in flight on each."""

    def __init__(self, tables: CostTables, schedule: str, grid: Grid) -> None:
        self.spare = tables.capacity_mib * MIB - tables.instance.profile.memory_reserve_bytes
        self.layers, rules = len(tables.instance.model.layers), tables.instance.rules
        self.flying = _in_flight(grid, even=rules.even_chunks and schedule == "interleaved-1f1b")
        passes = 2 * (grid.pp - 2) + (grid.vpp - 1) * grid.pp + 1
        self.middle = np.minimum(passes, grid.micro_batches * grid.vpp) / grid.vpp
        """(B6) On each layer of stage 1."""

    def beyond(self, states: Floats, kept: Floats, rows: npt.NDArray[np.intp] | slice) -> Floats:
        """Layers for which there is no room in a mode that keeps `kept` of each, as (B8) counts them."""
        flying = self.flying[rows]
        if self.spare <= 0:
            return np.zeros(len(states))
        room = (flying > 0) * self.spare / (states[:, None] + flying * kept[:, None])
        whole = np.maximum(self.layers - _whole(room).sum(axis=1), 0.0)
        slope = 1 + states / np.maximum(flying.max(axis=1) * kept, 1e-9)
        return np.asarray(np.maximum(whole, np.maximum(self.layers - room.sum(axis=1), 0.0) * slope))


def _repeated_in_full(
    room: LayerRoom, grid: Grid, least: LeastLayer, most: Floats, rows: npt.NDArray[np.intp]
) -> Floats:
    """(B8)-(B10) Layers that no plan with full recompute avoids to repeat, of some rows; `most` is n."""
    out = np.maximum(room.beyond(least.states[rows], least.kept[0, rows], rows), (grid.pp * grid.vpp)[rows] - 2.0)
    alone = np.nonzero((grid.vpp[rows] == 1) & (room.spare > 0))[0]
    if len(alone):
        chosen = rows[alone]
        own = least.rows(chosen, chosen)
        common = _common_block(own, room.flying[chosen], room.spare, room.layers, np.maximum(most[chosen], 1.0))
        out[alone] = np.maximum(out[alone], common)
    return np.asarray(out)


def _in_flight(grid: Grid, *, even: bool) -> Floats:
    """(B8) f_k, shape (rows, stages); 0 for stages that a row does not have."""
    p, v, m = grid.pp[:, None], grid.vpp[:, None], grid.micro_batches[:, None]
    stage = np.arange(int(p.max()))
    left = p - stage
    flying = np.where(v == 1, np.minimum(left, m), 1).astype(np.float64)
    if even:
        passes = np.minimum(2 * left - 1 + (v - 1) * p, m * v) / v
        flying = np.where((v > 1) & (stage > 0) & (left > 1), np.maximum(passes, 1.0), flying)
    return np.where(left > 0, np.maximum(flying, 1.0), 0.0)


def _common_block(least: LeastLayer, flying: Floats, spare: float, layers: int, most: Floats) -> Floats:
    """(B9) Layers that all stages together repeat."""
    need = least.states[:, None] + flying * least.kept[0][:, None]
    held = (flying > 0) * spare / need
    gained = flying * np.maximum(least.kept[0] - least.full, 0.0)[:, None] / need
    block = np.maximum(layers - held.sum(axis=1), 0.0) / np.maximum(gained.sum(axis=1), 1e-9)
    block = np.maximum(np.ceil(block - 1e-6), 1.0)
    for _ in range(BLOCKS_TRIED):
        short = _whole(held + block[:, None] * gained).sum(axis=1) < layers
        if not short.any():
            break
        block += short
    largest = np.minimum(_whole(held + block[:, None] * gained).max(axis=1), most)
    return np.asarray(layers * np.minimum(block / np.maximum(largest, 1e-9), 1.0))


def _whole(layers: Floats) -> Floats:
    """Down to whole layers, whatever the last digits say."""
    return np.asarray(np.floor(layers + 1e-6))


def _middle_layers(tables: CostTables, schedule: str, grid: Grid, most: Floats) -> Floats:
    """(B6) Layers that stage 1 holds at least; 0 where it says nothing."""
    if not tables.instance.rules.even_chunks or schedule != "interleaved-1f1b":
        return np.zeros(len(grid))
    held = np.ceil(np.maximum(len(tables.instance.model.layers) - 2 * most, 0) / np.maximum(grid.pp - 2, 1))
    return np.asarray(np.where((grid.vpp > 1) & (grid.pp > 2), held, 0.0))


def _tails(best: BestCase, grid: Grid, work: Floats) -> Floats:
    """(B5) X."""
    shape = grid.shape
    profile, zero = best.tables.instance.profile, shape.zero
    params = best.all_params(shape)
    groups, at = grid.groups
    out = np.full(len(grid), np.inf)
    for each_pass in (False, True):
        rows = (gathers_each_pass(zero, grid.pp)) == each_pass
        if not rows.any():
            continue
        sync, optimizer = np.zeros(len(groups)), np.full(len(groups), np.inf)  # infinite where a group has no place
        for index, dp in enumerate(groups.tolist()):
            dense = best.sync_rates(shape.cp * dp, zero, each_pass=each_pass, offload=shape.offload_optimizer)
            expert, own = dense, shape.degrees(1, 1, dp, 1) if _divides(shape, dp) else None
            if own is not None and shape.sharding(1).spread:
                expert = best.sync_rates(own.expert_dp, zero, each_pass=each_pass, offload=shape.offload_optimizer)
            if dense is None or expert is None or own is None:
                continue
            sync[index], optimizer[index] = (
                params_sync_s(dense, expert, params),
                params_optimizer_s(dense, expert, params),
            )
        moved, updated = sync[at[rows]], optimizer[at[rows]]
        floor = profile.dp_comm_floor * moved + updated
        hidden = np.where(moved > 0, profile.dp_comm_overlap * work[rows], 0.0)
        out[rows] = np.maximum(floor, moved - hidden + updated)
    return out


def memory_fits(best: BestCase, grid: Grid) -> npt.NDArray[np.bool_]:
    """(B1) of every row."""
    fits = least_memory(best, grid) <= best.tables.capacity_mib * MIB
    if grid.shape.offload_optimizer:
        fits &= _host_bytes(best, grid) <= best.tables.host_capacity_mib * MIB
    return fits


def _host_bytes(best: BestCase, grid: Grid) -> Floats:
    """(B1) Bytes that some device's share of the host holds at least."""
    groups, at_group = grid.groups
    held = best.all_params(grid.shape)
    need = [
        state_bytes(best.tables.instance, held, grid.shape.degrees(1, 1, dp, 1)).host
        if _divides(grid.shape, dp)
        else 0.0
        for dp in groups.tolist()
    ]
    return np.asarray(np.array(need)[at_group] / grid.pp)


def least_memory(best: BestCase, grid: Grid) -> Floats:
    """(B1) Bytes that some device needs at least, for every row."""
    instance, shape = best.tables.instance, grid.shape
    sizes, at_size = grid.sizes
    groups, at_group = grid.groups
    away = shape.offload_layers > 0
    kept = np.array([best.kept_bytes(shape.sharding(size), away=away) for size in sizes.tolist()])
    own = replace(shape, sequence_parallel=False, cp_comm_type="p2p", cp_a2a=1, offload_layers=0)  # states know neither
    states = np.array(
        [[best.states_bytes(own, dp, pp) if _divides(shape, dp) else 0.0 for dp in groups.tolist()] for pp in (1, 2)]
    )
    need = states[(grid.pp > 1).astype(np.int64), at_group] + kept[at_size]
    return np.asarray(need / grid.pp + instance.profile.memory_reserve_bytes)


def _divides(shape: GridShape, dp: int) -> bool:
    """Whether the experts of a shape can be spread over the ranks of a stage."""
    return shape.tp * shape.cp * dp % (shape.ep * shape.etp) == 0


def least_memory_bytes(best: BestCase, grids: list[Grid]) -> tuple[float, Degrees]:
    """The smallest (B1) of all candidates, and its degrees."""
    lowest: tuple[float, Degrees] | None = None
    for grid in grids:
        need = least_memory(best, grid)
        row = int(np.argmin(need))
        if lowest is None or need[row] < lowest[0]:
            lowest = float(need[row]), grid.degrees(row)
    assert lowest is not None
    return lowest
