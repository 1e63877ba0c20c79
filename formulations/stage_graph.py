"""Splits into chunks of any size as ways through stages: (C3), (C4) of `free_chunks`.

(W1) A node behind stage k says where each run of chunks stands, and where each began, which is where the run before it has
     to end. An arc is what the v chunks of stage k + 1 hold. In a folded pipeline two runs approach each other.
(W2) An arc is left out where the simple paths through its stage take longer than T = `within`, and where no split that it
     belongs to has a mean path within T. The shortest mean path so far is known node by node; what is left is at least
     the sum over runs of the shortest from where each stands to where it has to end, which is tabulated. Where that is
     infinite the layers that are left cannot be dealt out.
(W3) Of the ways that are left no plan of the candidate is below  min(T + 1, the least of the largest arcs). Where the ways
     are few, all are timed (P4), and no plan is below  min(T + 1, the least of them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.data.pipeline import FOLDED
from shardwise.formulations.bounds import SAFETY
from shardwise.formulations.schedule import DRAINED, UNSYNCHRONISED

if TYPE_CHECKING:
    from shardwise.formulations.free_chunks import Floats, FreeChunks, Ints, MeanPath

Mask = npt.NDArray[np.bool_]

MOST_CELLS = 20_000_000
MOST_ARCS = 1_000_000
"""(W2) Entries of the table, and arcs, that are kept at most."""
MOST_WAYS = 30_000
"""(W3) What is timed at most, in a few seconds."""
TRIES = 16
CLOSE = 1e-3
"""(W3) Values of T that are tried, and by what share of itself the first of them is above a bound."""


def by_ways(free: FreeChunks, path: MeanPath, least: int, tries: int = TRIES) -> tuple[int, Ints | None]:
    """(C4) A bound of at least `least`, which is one itself, and the fastest cuts that were timed. It is above the limit
    where no plan is within it. Tries T = limit, then values above the bound: twice as far each time until the ways are
    many, then half as far."""
    if (free.p + 1) * free.v * (free.layers + 1) ** 2 > MOST_CELLS:
        return least, None
    ahead, cuts = Ahead(free, path), None
    finest = int(CLOSE * least)
    low, within, step, growth = least, free.limit, finest, 2.0
    for tried in range(tries):
        graph = stage_graph(ahead, within)
        if graph is not None:
            low = max(low, min(graph.least, within + 1))
        ways = None if graph is None else graph.ways()
        if ways is not None:
            low = max(low, within + 1)
            if len(ways):
                steps = free.steps(ways)
                first = int(steps.argmin())
                cuts = ways[first]
                if steps[first] <= within:
                    return max(least, int(steps[first])), cuts
        elif tried:
            growth = 0.5
        if tried:
            step = int(step * growth)
        if low > free.limit or step < finest:
            break
        within = min(low + step, free.limit)
    return low, cuts


class Ahead:
    """(W2) The mean path through each chunk, and the shortest one through what is left from stage k on: per run, by where
    it stands and where it ends. A folded pipeline has one table for both runs, by where each stands."""

    def __init__(self, free: FreeChunks, path: MeanPath) -> None:
        self.free = free
        self.folded = free.candidate.schedule in FOLDED
        self.chunks = [free.candidate.layout.chunks_of(k) for k in range(free.p)]
        self.fixed = float((path.weights[:, [0, -1]] * free.ends).sum() + path.constant)
        nothing = np.zeros(free.layers + 1)
        self.costs = [free.onwards(free.through(path, chunk), chunk, nothing) for chunk in range(free.chunks)]
        runs = 1 if self.folded else free.v
        self.left = np.empty((free.p + 1, runs, free.layers + 1, free.layers + 1))
        self.left[-1] = np.where(np.eye(free.layers + 1, dtype=bool), 0.0, np.inf)
        self.half = np.empty_like(self.left[:-1, 0] if self.folded else self.left[:0, 0])
        """Folded: the same where the first chunk of stage k is dealt out already."""
        for k in reversed(range(free.p)):
            if self.folded:
                self.half[k] = self._through(self.left[k + 1, 0], self.chunks[k][1], backwards=True)
                self.left[k, 0] = self._through(self.half[k], self.chunks[k][0])
            else:
                for run, chunk in enumerate(self.chunks[k]):
                    self.left[k, run] = self._through(self.left[k + 1, run], chunk)

    def _through(self, after: Floats, chunk: int, *, backwards: bool = False) -> Floats:
        """The shortest through a chunk and what is left `after` it."""
        costs, out = self.costs[chunk], np.full_like(after, np.inf)
        for size in range(costs.shape[1]):
            rows = len(costs) - size
            own = costs[:rows, size]
            if backwards:
                np.minimum(out[:, size:], after[:, :rows] + own, out=out[:, size:])
            else:
                np.minimum(out[:rows], after[size:] + own[:, None], out=out[:rows])
        return out

    def first_nodes(self, room: float) -> Ints | None:
        """(W1) Before stage 0, those with a mean path within `room`; none where they are too many."""
        free = self.free
        if self.folded:
            return np.array([[0, free.layers]])
        tails = [self.left[0, -1, :, -1]]
        for run in reversed(range(free.v - 1)):
            tails.append((self.left[0, run] + tails[-1]).min(axis=1))
        begins, length = np.zeros((1, 1), np.int64), np.zeros(1)
        for run, tail in enumerate(reversed(tails[:-1])):
            whole = length[:, None] + self.left[0, run][begins[:, -1]]
            node, at = np.nonzero(whole + tail <= room)
            if len(node) > MOST_ARCS:
                return None
            begins, length = np.column_stack((begins[node], at)), whole[node, at]
        return np.column_stack((begins, begins[:, 1:]))


@dataclass(frozen=True, eq=False)
class _Arcs:
    """(W1) The chunks that one stage may hold: source and target node, layers before its chunks and in them, the simple
    paths through the stage, and what the chunks add to the mean path."""

    source: Ints
    target: Ints
    start: Ints
    size: Ints
    cost: Ints
    length: Floats

    def rows(self, chosen: Mask | Ints) -> _Arcs:
        whole = (self.source, self.target, self.start, self.size, self.cost)
        source, target, start, size, cost = (part[chosen] for part in whole)
        return _Arcs(source, target, start, size, cost, self.length[chosen])


@dataclass(frozen=True, eq=False)
class StageGraph:
    """(W2) Nodes and arcs by stage, those alone that lead on; `least` is the largest arc of the way where it is least."""

    ahead: Ahead
    nodes: tuple[int, ...]
    arcs: tuple[_Arcs, ...]
    least: int
    room: float

    def ways(self) -> Ints | None:
        """(W3) The cuts of every way whose mean path is within T; none where they are many."""
        free = self.ahead.free
        onward = np.zeros(self.nodes[-1])
        potentials = [onward]
        for nodes, arcs in zip(self.nodes[-2::-1], reversed(self.arcs), strict=True):
            onward = np.full(nodes, np.inf)
            np.minimum.at(onward, arcs.source, arcs.length + potentials[-1][arcs.target])
            potentials.append(onward)
        potentials = potentials[::-1]
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
            length = so_far[way] + arcs.length[arc]
            keep = length + potentials[k + 1][arcs.target[arc]] <= self.room
            way, arc, so_far = way[keep], arc[keep], length[keep]
            if len(way) > MOST_WAYS:
                return None
            node, cuts = arcs.target[arc], cuts[way]
            cuts[:, self.ahead.chunks[k]] = arcs.start[arc]
        return cuts


def stage_graph(ahead: Ahead, within: int) -> StageGraph | None:
    """(W2) Stage after stage, then those that lead on; none where they are too many."""
    free = ahead.free
    room = (within + 1) / SAFETY - ahead.fixed
    first = ahead.first_nodes(room)
    if first is None:
        return None
    nodes, arcs, so_far = [first], [], np.zeros(len(first))
    for k in range(free.p):
        grown = _stage_arcs(ahead, k, nodes[-1], so_far, within, room)
        if grown is None:
            return None
        ends, found = grown
        reached, target = _distinct(ends, free.layers + 1)
        whole, so_far = so_far[found.source] + found.length, np.full(len(reached), np.inf)
        np.minimum.at(so_far, target, whole)
        nodes.append(reached)
        arcs.append(replace(found, target=target))
        if sum(len(own.source) for own in arcs) > MOST_ARCS:
            return None
    onward = np.full(len(nodes[-1]), -1, np.int64)
    for k in reversed(range(free.p)):
        worst = np.maximum(arcs[k].cost, onward[arcs[k].target])
        alive = worst <= within
        arcs[k] = arcs[k].rows(alive)
        onward = np.full(len(nodes[k]), 2**62, np.int64)
        np.minimum.at(onward, arcs[k].source, worst[alive])
        order = np.argsort(arcs[k].source, kind="stable")
        arcs[k] = arcs[k].rows(order)
    return StageGraph(ahead, tuple(map(len, nodes)), tuple(arcs), int(onward.min(initial=2**62)), room)


def _distinct(rows: Ints, below: int) -> tuple[Ints, Ints]:
    """The distinct rows of numbers from 0 to below, and which of them each row is."""
    key, span = np.zeros(len(rows), np.int64), 1
    for column in rows.T:
        if span > 2**62 // below:
            key = np.unique(key, return_inverse=True)[1].reshape(-1)
            span = int(key.max(initial=0)) + 1
        key, span = key * below + column, span * below
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return rows[first], which.reshape(-1)


def _stage_arcs(
    ahead: Ahead, k: int, nodes: Ints, so_far: Floats, within: int, room: float
) -> tuple[Ints, _Arcs] | None:
    """(W2) All that stage k can hold behind each node: the nodes that follow, and arcs to them."""
    free, own, folded = ahead.free, ahead.chunks[k], ahead.folded
    v, m, after = free.v, free.m, free.p - 1 - k
    work = m * (free.sums[0] + free.sums[1])
    base = m * int(free.sent[:, own].sum()) + int(free.time.overhead)
    base += m * sum(int(free.ends[:2, end].sum()) for end, chunk in ((0, 0), (1, free.chunks - 1)) if chunk in own)
    ends = np.column_stack((nodes[:, v:], np.full(len(nodes), free.layers)))
    left = np.zeros((v + 1, len(nodes)))
    if not folded:
        for run in reversed(range(v)):
            left[run] = left[run + 1] + ahead.left[k, run, nodes[:, run], ends[:, run]]
    source, size = np.arange(len(nodes)), np.zeros((len(nodes), 0), np.int64)
    load, length = np.full(len(nodes), base), so_far
    for run in range(v):
        parts = []
        at = nodes[source, run]
        for layers in range(free.most + 1):
            start = at - layers if folded and run else at
            stop = start + layers
            inside = (start >= 0) & (stop <= free.layers)
            start, stop = np.where(inside, start, 0), np.where(inside, stop, 0)
            if not folded:
                rest = ahead.left[k + 1, run, stop, ends[source, run]] + left[run + 1, source]
            elif run:
                rest = ahead.left[k + 1, 0, nodes[source, 0] + size[:, 0], start]
            else:
                rest = ahead.half[k, stop, nodes[source, 1]]
            grown = length + ahead.costs[own[run]][start, layers]
            taken = load + work[stop] - work[start]
            inside &= (taken <= within) & (grown + rest <= room)
            if inside.any():
                sizes = np.column_stack((size[inside], np.full(int(inside.sum()), layers)))
                parts.append((source[inside], sizes, taken[inside], grown[inside]))
        if not parts:
            size, source, load, length = np.zeros((0, v), np.int64), source[:0], load[:0], length[:0]
            break
        source, size, load, length = (np.concatenate([part[i] for part in parts]) for i in range(4))
        if len(source) > MOST_ARCS:
            return None
    forward = np.ones(v, np.int64)
    if folded:
        forward[1] = -1
    reached = nodes[source]
    reached[:, :v] += forward * size
    start = nodes[source, :v] - np.where(forward < 0, size, 0)
    stops = reached[:, 1:] if folded else ends[source]
    work_left = (work[stops] - work[reached[:, : stops.shape[1]]]).sum(axis=1)
    cost = load + _before_and_behind(free, k, start, size)
    keep = (cost <= within) & (work_left <= after * (within - int(free.time.overhead)))
    arcs = _Arcs(source, source, start, size, cost, length - so_far[source])
    return reached[keep], arcs.rows(keep)


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
