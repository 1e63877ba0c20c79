"""Splits into chunks of any size (`--free-chunks`, v > 1): bounds for all of them, and good ones to try.

A split x cuts the L layers into S = p v chunks that follow each other; all but the first and the last hold a layer. All
times are in integer units and without recompute, but for what a limit asks of every layer. Bounds speak of the plans that
last no longer than a `limit`.

(C1) mean paths: the step is the longest of the paths through the schedule (E2), and each path P is a sum over chunks,
     P(x) = c_P + sum_s a_Ps F(x_s) + b_Ps B(x_s) + ...  So for weights w_P >= 0 with sum 1
     T(x) >= w(x) = sum_P w_P P(x)  for every split x, and  min_x w(x)  is a shortest way through the grid of (chunk,
     first layer): an admissible bound for any w, however it was found.
(C2) the weights: paths and splits play against each other (fictitious play; Brown 1951, Robinson 1951). The next split is
     the one that the mean path is shortest for, the next paths are the longest for the mean of the splits so far. Some
     random noise on the durations that the paths answer to spreads them, which converges in far fewer turns. The limit
     is the linear relaxation, in which a chunk may be the mean of several.
(C3) stages: fill, drain and work of a stage (T6), and the late paths of (P2), depend on where its v chunks start and end,
     and on no other chunk. The chunks of the stages before it end where its own start, so a split is a way through p + 1
     layers of nodes (end of each run of chunks so far; where each run began), and the step is at least the largest of
     the p costs on the way. Here whole layers count: a way is a split, not a mean of splits.
(C4) the ways within T in (C3), and within T in (C1), are counted as they grow stage by stage. Where they are few, all of
     them go through the timeline (P4): no plan of the candidate is below  min(T, the least of them).
(C5) good splits: local search that moves runs of neighbouring cuts by one layer, each split with settings that fit its
     memory (P3); where no move is left, a few random ones lead away. Generators are seeded: no run differs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.data.pipeline import FOLDED, SPLIT
from shardwise.formulations.bounds import SAFETY
from shardwise.formulations.passes import links_of
from shardwise.formulations.schedule import BACKWARD, DRAINED, FORWARD, INPUT, UNSYNCHRONISED, WEIGHT
from shardwise.formulations.splits import Split
from shardwise.formulations.timeline import longest_paths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.data.plan import Recompute
    from shardwise.formulations.candidates import Candidate
    from shardwise.formulations.coefficients import TimeCoefficients
    from shardwise.formulations.splits import SplitSearch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

TERMS = ("forward", "backward", "weight", "tail_floor", "tail_overlap")
"""What a path is a weighted sum of, per chunk."""
MOST_PASSES = 200_000
"""(C2) Passes of a step up to which paths are followed through all of it."""
TURNS = 400
ROWS = 32
NOISE = 0.05
"""(C2) Turns, paths in each, and the standard deviation of the noise on durations. Of 1, 8, 16 and 32 rows and 0 to 0.5
these raised the bound fastest on pipelines of 10 to 15 stages."""
CONVERGED = 1e-3
MOST_ARCS = 1_000_000
MOST_WAYS = 30_000
"""(C4) What is timed at most, in a few seconds."""
HALVINGS = 6
ROUNDS = 250
NEIGHBOURS = 512
NEAR = 0.01
"""(C5) Rounds of moves, moves in each, and how much slower than the best a split may be that the search goes on from."""
BATCH = 64
"""Splits timed at once: what fits into the cache."""


@dataclass(frozen=True, eq=False)
class MeanPath:
    """(C1) A convex combination of paths: what each of `TERMS` counts in every chunk, shape (terms, chunks)."""

    weights: Floats
    constant: float

    @staticmethod
    def nothing(chunks: int) -> MeanPath:
        """No path at all, which every split is longer than."""
        return MeanPath(np.zeros((len(TERMS), chunks)), 0.0)

    def towards(self, other: MeanPath, share: float) -> MeanPath:
        """The combination that gives `share` to `other`."""
        return MeanPath(
            (1 - share) * self.weights + share * other.weights,
            (1 - share) * self.constant + share * other.constant,
        )


class FreeChunks:
    """(C1)-(C5) of one candidate, for plans that last at most `limit` units."""

    def __init__(self, splits: SplitSearch, candidate: Candidate, time: TimeCoefficients, limit: int) -> None:
        self.splits, self.candidate, self.limit = splits, candidate, limit
        self.given, self.time = time, _repeated(time, splits.instance.limits.recompute)
        d, self.layers = candidate.degrees, splits.layers
        self.p, self.v, self.m, self.chunks = d.pp, d.vpp, candidate.micro_batches, d.virtual_stages
        self.sums = np.stack([splits.prefix(getattr(self.time, name)) for name in TERMS])
        self.ends = np.array([[getattr(self.time, name)[unit] for unit in (-2, -1)] for name in TERMS], np.int64)
        sends = np.array([*(int(x) for x in time.sends[: self.p]), 0], np.int64)
        self.sent = np.stack([sends[links] for links in links_of(candidate.layout, self.p)])
        self.lags = np.array([int(x) for x in time.lags[: self.p]], np.int64)
        self.stage = np.array(candidate.layout.stage)
        first, size = np.arange(self.layers + 1)[:, None], np.arange(self.layers + 1)
        work = self.m * (self.sums[0] + self.sums[1])
        after = np.minimum(first + size, self.layers)
        fits = (first + size <= self.layers) & (work[after] - work[first] + int(time.overhead) <= limit)
        self.most = int(np.flatnonzero(fits.any(axis=0)).max(initial=0))
        self.fits, self.after = fits[:, : self.most + 1], after[:, : self.most + 1]
        self.loads = (self.sums[:, self.after] - self.sums[:, first]).astype(np.float64)
        """What 0, 1, ... `most` layers from each on take, shape (terms, first, size)."""

    # -- (C1), (C2) -----------------------------------------------------------------------------------------------

    def shortest(self, path: MeanPath) -> tuple[float, Ints | None]:
        """(C1) The least length of a mean path, and the cuts that have it; infinite, and none, where no split is within
        the limit."""
        onward = np.full(self.layers + 1, np.inf)
        onward[-1] = 0
        choices = []
        for chunk in reversed(range(self.chunks)):
            cost = np.where(self.fits, np.tensordot(path.weights[:, chunk], self.loads, 1) + onward[self.after], np.inf)
            if 0 < chunk < self.chunks - 1:
                cost[:, 0] = np.inf
            choices.append(cost.argmin(axis=1))
            onward = cost.min(axis=1)
        if not np.isfinite(onward[0]):
            return np.inf, None
        cuts = [0]
        for choice in reversed(choices):
            cuts.append(cuts[-1] + int(choice[cuts[-1]]))
        ends = (path.weights[:, [0, -1]] * self.ends).sum()
        return float(onward[0] + ends + path.constant), np.array(cuts)

    def chunk_sums(self, cuts: Ints) -> Floats:
        """The `TERMS` of every chunk, embedding and head included."""
        out = np.diff(self.sums[:, cuts]).astype(np.float64)
        out[:, 0] += self.ends[:, 0]
        out[:, -1] += self.ends[:, 1]
        return out

    def answer(self, sums: Floats, noise: Floats) -> tuple[MeanPath, float]:
        """(C2) The mean of the longest paths of chunks that take `sums`, one for each row of `noise`, the first without;
        and the length of that one."""
        rows = noise.shape[-1]
        forward, backward, weight, floor, overlap = sums
        durations = np.zeros((4, self.chunks))
        durations[FORWARD], durations[BACKWARD] = forward + self.sent[0], backward + self.sent[1]
        if self.candidate.schedule in SPLIT:
            durations[WEIGHT], durations[INPUT] = weight, durations[BACKWARD] - weight
        tied = np.zeros(self.p)
        tied[[0, -1]] = int(self.time.tied)
        own = (self.stage == np.arange(self.p)[:, None]).astype(np.float64)
        tails = own @ np.stack((floor, overlap), axis=1)
        lags = np.repeat(self.lags.astype(np.float64)[:, None], rows, axis=1)
        late = np.repeat((tails.max(axis=1) + tied)[:, None], rows, axis=1)
        paths = longest_paths(self.candidate.shape, durations[..., None] * noise, lags, late)
        passes, hops = paths.passes.mean(axis=2), paths.hops.mean(axis=1)
        ending = np.bincount(paths.stage, minlength=self.p) / rows
        by_floor = tails[:, 0] >= tails[:, 1]
        weights = np.stack(
            (
                passes[FORWARD],
                passes[BACKWARD] + passes[INPUT],
                passes[WEIGHT] - passes[INPUT],
                (ending * by_floor) @ own,
                (ending * ~by_floor) @ own,
            )
        )
        constant = (weights[:2] * self.sent).sum() + hops @ self.lags + ending @ tied + int(self.time.overhead)
        length = (paths.passes[..., 0] * durations).sum() + paths.hops[:, 0] @ self.lags + late[paths.stage[0], 0]
        return MeanPath(weights, float(constant)), float(length) + int(self.time.overhead)

    def play(self, cuts: Ints) -> Iterator[tuple[float, MeanPath, Ints | None]]:
        """(C2) from one split on: the length of the shortest way in every turn, its mean path and its cuts."""
        if 2 * self.m * self.chunks > MOST_PASSES:
            return
        draw = np.random.default_rng(0)
        sums, path = self.chunk_sums(cuts), None
        for turn in range(TURNS):
            noise = np.maximum(1 + NOISE * draw.standard_normal((4, self.chunks, ROWS)), 0)
            noise[..., 0] = 1
            found, longest = self.answer(sums, noise)
            share = 2 / (turn + 2)
            path = found if path is None else path.towards(found, share)
            length, best = self.shortest(path)
            yield length, path, best
            if best is None or length >= longest * (1 - CONVERGED):
                return
            sums = (1 - share) * sums + share * self.chunk_sums(best)

    # -- (C3), (C4) -----------------------------------------------------------------------------------------------

    @cached_property
    def graph(self) -> StageGraph | None:
        """(C3) within the limit; none where it is too large."""
        return stage_graph(self)

    def by_ways(self, path: MeanPath, least: int, tries: int = HALVINGS) -> tuple[int, Ints | None]:
        """(C4) A bound of at least `least`, which is one itself, and the fastest cuts that were timed. It is above the
        limit where no plan is within it. Tries T = limit, then halves the way to the bound until the ways are few."""
        if self.graph is None:
            return least, None
        low, high = max(least, min(self.graph.least, self.limit + 1)), self.limit + 1
        within, found = self.limit, None
        for _ in range(tries):
            if within < low:
                break
            ways = self.graph.ways(path, within)
            if ways is None:
                high = within
            else:
                found, low = ways, within + 1
            within = (low + high) // 2
            if high - low < CONVERGED * high:
                break
        if found is None or not len(found):
            return low, None
        steps = self.steps(found)
        first = int(steps.argmin())
        return max(least, min(low, int(steps[first]))), found[first]

    def steps(self, cuts: Ints) -> Ints:
        """(P4) The steps of splits without recompute, one row of cuts each."""
        plain: tuple[tuple[Recompute, int], ...] = (("none", 0),) * self.p
        out = [np.zeros(0, np.int64)]
        for first in range(0, len(cuts), BATCH):
            batch = [Split(0, tuple(row), plain) for row in cuts[first : first + BATCH].tolist()]
            out.append(self.splits.timed(self.candidate, self.time, batch)[0])
        return np.concatenate(out)

    # -- (C5) -----------------------------------------------------------------------------------------------------

    def better(self, cuts: Ints) -> Iterator[Split | None]:
        """(C5) from one split on: every split that is faster than all before it, with settings; none for a round."""
        moves, draw = _moves(self.chunks), np.random.default_rng(0)
        here, step = cuts, 2**62
        best, least = here, self.limit + 1
        for _ in range(ROUNDS):
            yield None
            tried = here + (moves if len(moves) <= NEIGHBOURS else draw.permutation(moves)[:NEIGHBOURS])
            split, length = self.fastest(tried, step)
            if split is None:
                here, step = here if step <= least * (1 + NEAR) else best, 2**62
                for _ in range(int(draw.integers(1, 4))):
                    near = here + moves
                    near = near[_legal(near)]
                    here = near[draw.integers(len(near))] if len(near) else here
                continue
            here, step = np.array(split.cuts), length
            if step < least:
                best, least = here, step
                yield split

    def fastest(self, cuts: Ints, below: int) -> tuple[Split | None, int]:
        """The fastest split and its step, of the first splits by simple paths among which one fits the memory and lasts
        less than `below` units; none if there is none."""
        found = self.splits.of_cuts(self.candidate, self.given, cuts[_legal(cuts)], below - 1)
        found.sort(key=lambda split: split.bound)
        for first in range(0, len(found), BATCH):
            batch = found[first : first + BATCH]
            steps, _ = self.splits.timed(self.candidate, self.given, batch)
            steps = np.maximum(steps, [split.bound for split in batch])
            if steps.min() < below:
                return batch[int(steps.argmin())], int(steps.min())
        return None, below


@dataclass(frozen=True, eq=False)
class _Arcs:
    """(C3) The chunks that one stage may hold: source and target node, layers before its chunks and in them, cost."""

    source: Ints
    target: Ints
    start: Ints
    size: Ints
    cost: Ints

    def rows(self, chosen: Mask | Ints) -> _Arcs:
        return _Arcs(*(part[chosen] for part in (self.source, self.target, self.start, self.size, self.cost)))


@dataclass(frozen=True, eq=False)
class StageGraph:
    """(C3) Nodes and arcs by stage, those alone that lie on a way within the limit; `least` is the bound."""

    free: FreeChunks
    nodes: tuple[int, ...]
    arcs: tuple[_Arcs, ...]
    least: int

    def ways(self, path: MeanPath, within: int) -> Ints | None:
        """(C4) The cuts of every way within T = `within` by stages and by the mean path; none where they are many."""
        free = self.free
        chunks = np.array([free.candidate.layout.chunks_of(k) for k in range(free.p)])
        ends = (path.weights[:, [0, -1]] * free.ends).sum()
        room = (within + 1) / SAFETY - path.constant - ends
        lengths, onward = [], np.zeros(self.nodes[-1])
        potentials = [onward]
        for k, arcs in reversed(list(enumerate(self.arcs))):
            length = np.where(arcs.cost <= within, 0.0, np.inf)
            for run, chunk in enumerate(chunks[k]):
                loads = np.tensordot(path.weights[:, chunk], free.loads, 1)
                length += loads[arcs.start[:, run], arcs.size[:, run]]
            lengths.append(length)
            onward = np.full(self.nodes[k], np.inf)
            np.minimum.at(onward, arcs.source, length + potentials[-1][arcs.target])
            potentials.append(onward)
        lengths, potentials = lengths[::-1], potentials[::-1]
        node, so_far = np.arange(self.nodes[0]), np.zeros(self.nodes[0])
        cuts = np.zeros((self.nodes[0], free.chunks + 1), np.int64)
        cuts[:, -1] = free.layers
        for k, arcs in enumerate(self.arcs):
            first = np.searchsorted(arcs.source, node)
            count = np.searchsorted(arcs.source, node, side="right") - first
            if count.sum() > 8 * MOST_WAYS:
                return None
            way = np.repeat(np.arange(len(node)), count)
            arc = np.arange(len(way)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
            length = so_far[way] + lengths[k][arc]
            keep = length + potentials[k + 1][arcs.target[arc]] <= room
            way, arc, so_far = way[keep], arc[keep], length[keep]
            if len(way) > MOST_WAYS:
                return None
            node, cuts = arcs.target[arc], cuts[way]
            cuts[:, chunks[k]] = arcs.start[arc]
        return cuts


def stage_graph(free: FreeChunks) -> StageGraph | None:
    """(C3) Stage after stage, each as far as the layers and the work that are left allow; then those that lead on."""
    first = _first_nodes(free)
    if first is None:
        return None
    nodes, arcs = [first], []
    for k in range(free.p):
        grown = _stage_arcs(free, k, nodes[-1])
        if grown is None:
            return None
        ends, found = grown
        reached, target = np.unique(ends, axis=0, return_inverse=True)
        nodes.append(reached)
        arcs.append(replace(found, target=target.reshape(-1)))
        if sum(len(own.source) for own in arcs) > MOST_ARCS:
            return None
    onward = np.full(len(nodes[-1]), -1, np.int64)
    for k in reversed(range(free.p)):
        worst = np.maximum(arcs[k].cost, onward[arcs[k].target])
        alive = worst <= free.limit
        arcs[k] = arcs[k].rows(alive)
        onward = np.full(len(nodes[k]), 2**62, np.int64)
        np.minimum.at(onward, arcs[k].source, worst[alive])
        order = np.argsort(arcs[k].source, kind="stable")
        arcs[k] = arcs[k].rows(order)
    return StageGraph(free, tuple(map(len, nodes)), tuple(arcs), int(onward.min(initial=2**62)))


def _first_nodes(free: FreeChunks) -> Ints | None:
    """(C3) One row a node: where each run of chunks stands, and where the runs behind the first began. A folded pipeline
    has two runs that meet: one from the first layer on, one backwards from the last."""
    if free.candidate.schedule in FOLDED:
        return np.array([[0, free.layers]])
    if math.comb(max(free.layers + 2 - free.p, 0), free.v - 1) > MOST_ARCS:
        return None
    begin = np.array(list(itertools.combinations(range(free.p - 1, free.layers + 1), free.v - 1)), np.int64)
    begin = begin.reshape(-1, free.v - 1)
    return np.concatenate((np.zeros((len(begin), 1), np.int64), begin, begin), axis=1)


def _stage_arcs(free: FreeChunks, k: int, nodes: Ints) -> tuple[Ints, _Arcs] | None:
    """(C3) All that stage k can hold behind each node, within the limit: the nodes that follow, and arcs to them."""
    p, v, m, folded = free.p, free.v, free.m, free.candidate.schedule in FOLDED
    own = free.candidate.layout.chunks_of(k)
    work = m * (free.sums[0] + free.sums[1])
    base = m * int(free.sent[:, own].sum()) + int(free.time.overhead)
    base += m * sum(int(free.ends[:2, end].sum()) for end, chunk in ((0, 0), (1, free.chunks - 1)) if chunk in own)
    least = np.array([0 if chunk in (0, free.chunks - 1) else 1 for chunk in own])
    after = p - 1 - k
    source, size, load = np.arange(len(nodes)), np.zeros((len(nodes), 0), np.int64), np.full(len(nodes), base)
    for run in range(v):
        parts = []
        at = nodes[source, run]
        for layers in range(int(least[run]), free.most + 1):
            start = at - layers if folded and run else at
            stop = start + layers
            if folded:
                room = nodes[source, 1] - nodes[source, 0] - size.sum(axis=1) - layers - 2 * after
                inside = (room == 0) if not after and run else (room >= 0)
            else:
                end = nodes[source, v + run] if run < v - 1 else free.layers
                room = end - stop - after + (run == v - 1 and after > 0)
                inside = room >= 0 if after else room == 0
            taken = load + np.where(inside, work[np.minimum(stop, free.layers)] - work[np.maximum(start, 0)], 0)
            inside &= taken <= free.limit
            if inside.any():
                grown = np.concatenate((size[inside], np.full((int(inside.sum()), 1), layers)), axis=1)
                parts.append((source[inside], grown, taken[inside]))
        if not parts:
            size = np.zeros((0, v), np.int64)
            source, load = source[:0], load[:0]
            break
        source, size, load = (np.concatenate([part[i] for part in parts]) for i in range(3))
        if len(source) > MOST_ARCS:
            return None
    forward = np.ones(v, np.int64)
    if folded:
        forward[1] = -1
    ends = nodes[source]
    ends[:, :v] += forward * size
    start = nodes[source, :v] - np.where(forward < 0, size, 0)
    if folded:
        left = work[ends[:, 1]] - work[ends[:, 0]]
    else:
        left = work[free.layers] - work[ends[:, v - 1]]
        left = left + sum(work[ends[:, v + run]] - work[ends[:, run]] for run in range(v - 1))
    cost = load + _before_and_behind(free, k, start, size)
    keep = (cost <= free.limit) & (left <= after * (free.limit - int(free.time.overhead)))
    return ends[keep], _Arcs(source[keep], source[keep], start[keep], size[keep], cost[keep])


def _before_and_behind(free: FreeChunks, k: int, start: Ints, size: Ints) -> Ints:
    """(C3) What the paths through stage k take before and behind its work: fill, drain and late paths, and its tail."""
    time, schedule, p, v = free.time, free.candidate.schedule, free.p, free.v
    own = np.array(free.candidate.layout.chunks_of(k))
    held = free.sums[:, start + size] - free.sums[:, start]
    tail = held[3:].sum(axis=2)
    for end, chunk in ((0, 0), (1, free.chunks - 1)):
        if chunk in own:
            held[:, :, list(own).index(chunk)] += free.ends[:, end, None]
            tail += free.ends[3:, end, None]
    behind = tail.max(axis=0) + (int(time.tied) if k in (0, p - 1) else 0)
    last = int(free.ends[3, 0]) + int(time.tied)
    lags = free.lags[np.maximum(np.array(free.candidate.layout.hop_before), 0)]
    lags[np.array(free.candidate.layout.hop_before) < 0] = 0

    def way(term: int, chunk: int, at: Ints) -> Ints | int:
        """One micro-batch on all chunks before `chunk`, which starts with layer `at`."""
        if chunk == 0:
            return 0
        passing = int(free.sent[term, :chunk].sum() + lags[1 : chunk + 1].sum() + free.ends[term, 0])
        return np.asarray(free.sums[term, at] + passing)

    before = np.zeros(len(start), np.int64)
    if schedule not in UNSYNCHRONISED:
        before = before + way(0, 0 if k == 0 else k, start[:, 0])
    if schedule in DRAINED and k:
        behind = np.maximum(behind, way(1, k, start[:, 0]) + last)
    if schedule == "interleaved-1f1b" and free.m >= p:
        chunk = (v - 1) * p + k
        earlier = p * (held[:2, :, :-1].sum(axis=2) + free.sent[:, own[:-1]].sum(axis=1)[:, None])
        before = np.maximum(before, way(0, chunk, start[:, -1]) - earlier[0])
        behind = np.maximum(behind, way(1, chunk, start[:, -1]) - earlier[1] + last)
    return np.asarray(before + behind)


def _repeated(time: TimeCoefficients, wanted: str | None) -> TimeCoefficients:
    """With the recompute that a limit asks of every layer."""
    if wanted not in ("selective", "full"):
        return time
    again = [*getattr(time, wanted)[:-2], 0, 0]
    return replace(time, backward=tuple(b + more for b, more in zip(time.backward, again, strict=True)))


def _moves(chunks: int) -> Ints:
    """(C5) Every run of cuts between chunks, one layer up or down."""
    runs = itertools.combinations(range(1, chunks + 1), 2)
    up = np.array([[first <= cut < stop for cut in range(chunks + 1)] for first, stop in runs], dtype=np.int64)
    return np.concatenate((up, -up))


def _legal(cuts: Ints) -> Mask:
    """Rows of cuts whose chunks hold a layer, the first and the last as few as none."""
    sizes = np.diff(cuts)
    return np.asarray((sizes >= 0).all(axis=1) & (sizes[:, 1:-1] >= 1).all(axis=1))
