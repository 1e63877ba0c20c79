"""Admissible lower bounds on the step time of candidates, before any stage is decided.

With W the time of one micro-batch through all layers, embedding and head (forward and backward, no recompute), the best
placement of every group assumed, m micro-batches, p stages, v chunks a stage, L layers, and t the fastest layer kind:

(B1) memory: all stages together hold every layer's states and at least one micro-batch of fully recomputed activations,
     so  sum of those + p * fixed <= p * capacity, or the candidate has no plan.
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
(B5) sync: the mean over stages of busy time and tail gives  T >= overhead + (m W + sum of floor tails) / p; with p = 1
     the tail is exact.
(B6) recompute, interleaving, p > 2, one setting for all stages: stage 1 holds at least the mean of the middle stages, l >=
     (L - 2 n) / (p - 2) layers, and in-flight passes and layers both fall from chunk to chunk, so it keeps at least
     l / v times its passes in flight. Where that does not fit, every plan repeats one layer of every middle chunk, and
     the mean of (B3) grows by  m t_full (p v - 2) / p.

Each is proven from the simple paths (T6) alone and property-tested against exhaustive minima.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.data.pipeline import FOLDED
from shardwise.data.plan import Degrees
from shardwise.formulations.candidates import Grid, PlacementTable, divisors
from shardwise.formulations.layer_costs import Groups, Sharding, tensor_parallel_time_s
from shardwise.formulations.memory import (
    MIB,
    KindParams,
    end_params_on_device,
    head_activations_bytes,
    state_bytes,
    tied_copy,
)
from shardwise.formulations.schedule import DRAINED
from shardwise.formulations.step_time import exchange_time_s, hop_time_s, spans_of

if TYPE_CHECKING:
    from shardwise.formulations.coefficients import CostTables, ShardTimes

Floats = npt.NDArray[np.float64]
SAFETY = 1 - 1e-9
"""Float bounds are scaled down by this before they are compared: their own rounding never prunes an optimum."""


@dataclass(frozen=True)
class BestCase:
    """Per instance: the best placement of each group alone, which no real placement beats."""

    tables: CostTables
    placement_table: PlacementTable
    fits: dict[int, tuple[Grid, npt.NDArray[np.bool_]]] = field(default_factory=dict, compare=False, repr=False)

    def group_factors(self, size: int) -> list[tuple[int, ...]]:
        """Every way to spread a group of `size` over the levels when it has the cluster for itself."""
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
        return found

    def times(self, sharding: Sharding) -> ShardTimes:
        """Layer times with the fastest placement of the tensor-parallel group, which must fit somewhere."""
        instance = self.tables.instance
        spans = [spans_of(factors, instance.levels) for factors in self.group_factors(sharding.tp)]
        best = min(spans, key=lambda option: tensor_parallel_time_s(instance, sharding, option))
        return self.tables.times(sharding, Groups(best))

    def sync_rate_s(self, dp: int, zero: int) -> float | None:
        """Seconds of gradient sync per parameter with the fastest data-parallel placement."""
        rates = [self.tables.sync_rates(factors, zero).communication_s for factors in self.group_factors(dp)]
        return min(rates, default=None)


def work_bound_s(
    work: npt.ArrayLike, transfers: npt.ArrayLike, fastest: npt.ArrayLike, whole: npt.ArrayLike, micro_batches: npt.ArrayLike,
    pp: npt.ArrayLike, vpp: npt.ArrayLike, layers: int, last_chunk: npt.ArrayLike, repeated: npt.ArrayLike = 0.0,
    *, drains: bool = True, even: bool = True,
) -> Floats:  # fmt: skip
    """(B2), (B3), (B4) without overhead, element by element.

    Parameters
    ----------
    work, transfers, fastest, whole
        Seconds per micro-batch: W, exposed transfers summed over stages, t, and `whole_layers_s`.
    last_chunk
        n of (B3).
    repeated
        Seconds per micro-batch that (B6) adds to W; 0 for v = 1.
    drains
        Whether the schedule's last backward pass on each stage is followed by those of the stages before it.
    even
        Whether the middle chunks are even.
    """
    w, x, t = (np.asarray(values, dtype=np.float64) for values in (work, transfers, fastest))
    m, p, v = (np.asarray(values, dtype=np.float64) for values in (micro_batches, pp, vpp))
    largest = m * np.asarray(whole, dtype=np.float64)
    mean = m / p * (w + x + np.asarray(repeated))
    if not drains:
        return np.asarray(np.maximum(mean, largest))
    weight = 1 / -np.expm1(p * np.log1p(-1 / np.maximum(m, 1 + 1e-12)))
    chunk = np.maximum(layers - np.asarray(last_chunk, dtype=np.float64), 0) / np.maximum(p * v - 2, 1)
    chunk = chunk if even else np.ones_like(chunk)
    interleaved = mean + t * chunk * (p - 1) * (p - 2) / (2 * p)
    return np.asarray(np.maximum(np.where(v == 1, weight * (w + x), interleaved), largest))


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


def last_chunk_layers(incumbent_s: float, layer_s: npt.ArrayLike, layers: int) -> Floats:
    """n of (B3): layers of `layer_s` seconds each that fit into the incumbent; all of them when a layer takes no time."""
    seconds = np.asarray(layer_s, dtype=np.float64)
    fitting = np.floor(incumbent_s / np.where(seconds > 0, seconds, 1.0))
    return np.where(seconds > 0, np.minimum(fitting, layers), float(layers))


@dataclass(frozen=True)
class GridBounds:
    """Bounds of all rows of a grid: `lower_s` in seconds, and whether (B1) leaves a plan at all."""

    lower_s: Floats
    fits: npt.NDArray[np.bool_]


def grid_bounds(best: BestCase, grid: Grid, incumbent_s: float | None) -> GridBounds:
    """(B1)-(B5) of every row of `grid`, with the best placement of each group assumed."""
    instance, shape = best.tables.instance, grid.shape
    if not best.group_factors(shape.tp):
        return GridBounds(np.full(len(grid), np.inf), np.zeros(len(grid), dtype=bool))
    kinds = np.array(instance.model.kind_indices)
    counts = np.bincount(kinds, minlength=len(instance.model.kinds))
    layers, profile = len(kinds), instance.profile
    work, fastest, whole, hops = (np.full(len(grid), np.inf) for _ in range(4))
    for micro_batch in np.unique(grid.micro_batch):
        rows = grid.micro_batch == micro_batch
        sharding = shape.sharding(int(micro_batch))
        times = best.times(sharding)
        total = sum(n * time.both_s for n, time in zip(counts, times.kinds, strict=True))
        work[rows] = total + times.embedding.both_s + times.head.both_s
        kinds_s = [time.both_s for time in times.kinds]
        fastest[rows] = min(kinds_s)
        whole[rows] = whole_layers_s(kinds_s, counts, grid.pp[rows])
        probe = Degrees(tp=shape.tp, micro_batch=int(micro_batch), sequence_parallel=shape.sequence_parallel)
        hops[rows] = min(hop_time_s(instance, probe, link) for link in instance.levels)
    scale = 1 + profile.straggler * np.log2(shape.tp * grid.pp * grid.dp)
    work, fastest, whole = work * scale, fastest * scale, whole * scale
    sums = _tails(best, grid, counts, work)
    exchange = exchange_time_s(profile, hops, grid.vpp)
    sends = 2 * (grid.pp - 1) if shape.schedule in FOLDED else grid.pp * grid.vpp - 1
    transfers = np.where(grid.pp > 1, 2.0 * sends * exchange, 0.0)
    last_chunk = np.full(len(grid), float(layers))
    if incumbent_s is not None:
        most = last_chunk_layers(incumbent_s, grid.micro_batches * fastest, layers)
        last_chunk = np.asarray(most, dtype=np.float64)
    repeated = _repeated(best, grid, last_chunk) * scale
    lower = work_bound_s(
        work, transfers, fastest, whole, grid.micro_batches, grid.pp, grid.vpp, layers, last_chunk, repeated,
        drains=shape.schedule in DRAINED, even=instance.rules.even_chunks,
    )  # fmt: skip
    lower = np.maximum(lower, (grid.micro_batches * work + sums) / grid.pp) + profile.step_overhead_s
    return GridBounds(lower * SAFETY, _memory_fits(best, grid, counts))


def _repeated(best: BestCase, grid: Grid, most: Floats) -> Floats:
    """(B6) per row: seconds per micro-batch of recompute that no plan avoids; `most` is n."""
    tables, instance, shape = best.tables, best.tables.instance, grid.shape
    out = np.zeros(len(grid))
    rules = instance.rules
    if not (rules.uniform_recompute and rules.even_chunks) or shape.schedule != "interleaved-1f1b":
        return out
    params = tables.kind_params(shape.tp)
    middle = np.maximum(grid.pp - 2, 1)
    held = np.ceil(np.maximum(len(instance.model.layers) - 2 * most, 0) / middle)
    passes = 2 * (grid.pp - 2) + (grid.vpp - 1) * grid.pp + 1
    flying = np.minimum(passes, grid.micro_batches * grid.vpp) / grid.vpp
    spare = tables.capacity_mib * MIB - instance.profile.memory_reserve_bytes
    for micro_batch in np.unique(grid.micro_batch):
        times = best.times(shape.sharding(int(micro_batch)))
        kept = min(min(a.none, a.selective) for a in tables.activations(shape.sharding(int(micro_batch))))
        repeat = min(time.full_s for time in times.kinds)
        for dp in np.unique(grid.dp):
            states = min(state_bytes(instance, n, shape.replicated(int(dp))).total for n in params)
            rows = (grid.micro_batch == micro_batch) & (grid.dp == dp) & (grid.vpp > 1) & (grid.pp > 2)
            over = held * (states + flying * kept) > spare
            out[rows & over] = repeat
    return np.asarray(out * (grid.pp * grid.vpp - 2))


def _tails(best: BestCase, grid: Grid, counts: npt.NDArray[np.int64], work: Floats) -> Floats:
    """(B5): sums of floor tails over all stages; with one stage the larger of both tails."""
    tables, instance, tp, zero = best.tables, best.tables.instance, grid.shape.tp, grid.shape.zero
    profile = instance.profile
    params = sum(int(n) * size.total for n, size in zip(counts, tables.kind_params(tp), strict=True))
    params += end_params_on_device(instance, tp, head=False) + end_params_on_device(instance, tp, head=True)
    out = np.full(len(grid), np.inf)
    for dp in np.unique(grid.dp):
        rate = best.sync_rate_s(int(dp), zero)
        if rate is None:
            continue
        rows = grid.dp == dp
        optimizer = tables.sync_rates(best.group_factors(int(dp))[0], zero).optimizer_s
        floor = profile.dp_comm_floor * rate * params + optimizer * params
        hidden = profile.dp_comm_overlap * work[rows] if rate else 0.0
        overlap = rate * params - hidden + optimizer * params
        out[rows] = np.where(grid.pp[rows] == 1, np.maximum(floor, overlap), floor)
    return out


def _memory_fits(best: BestCase, grid: Grid, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """(B1) of every row, remembered: bounds are asked for once without an incumbent and once with one."""
    known = best.fits.get(id(grid))
    if known is None or known[0] is not grid:
        best.fits[id(grid)] = known = grid, least_memory(best, grid, counts) <= best.tables.capacity_mib * MIB
    return known[1]


def least_memory(best: BestCase, grid: Grid, counts: npt.NDArray[np.int64]) -> Floats:
    """(B1) Bytes that some device needs at least, for every row."""
    tables, instance, shape = best.tables, best.tables.instance, grid.shape
    params = sum(int(n) * size.total for n, size in zip(counts, tables.kind_params(shape.tp), strict=True))
    out = np.zeros(len(grid))
    for dp in np.unique(grid.dp):
        for micro_batch in np.unique(grid.micro_batch[grid.dp == dp]):
            rows = (grid.dp == dp) & (grid.micro_batch == micro_batch)
            micro = int(micro_batch)
            kept = tables.activations(shape.sharding(micro))
            activations = sum(n * min(a.full, a.none) for n, a in zip(counts, kept, strict=True))
            for pipelined in (False, True):
                chosen = rows & ((grid.pp > 1) == pipelined)
                ends = end_params_on_device(instance, shape.tp, head=False) + end_params_on_device(
                    instance,
                    shape.tp,
                    head=True,
                    with_tied_copy=tied_copy(instance, 2 if pipelined else 1, shape.schedule),
                )
                held = KindParams(params + ends, 0)
                states = state_bytes(instance, held, shape.replicated(int(dp))).total
                need = states + activations + head_activations_bytes(instance, shape.sharding(micro))
                out[chosen] = need / grid.pp[chosen] + instance.profile.memory_reserve_bytes
    return out


def least_memory_bytes(best: BestCase, grids: list[Grid]) -> tuple[float, Degrees]:
    """The smallest (B1) of all candidates, and its degrees."""
    counts = np.bincount(np.array(best.tables.instance.model.kind_indices))
    lowest: tuple[float, Degrees] | None = None
    for grid in grids:
        need = least_memory(best, grid, counts)
        row = int(np.argmin(need))
        if lowest is None or need[row] < lowest[0]:
            lowest = float(need[row]), grid.degrees(row)
    assert lowest is not None
    return lowest
