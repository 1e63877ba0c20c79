"""Splits into chunks of any size as ways through stages: (C3) of `free_chunks`.

(W1) A node behind stage k says where each run of chunks stands, and where each began, which is where the run before it has
     to end. An arc is what the v chunks of stage k + 1 hold. In a folded pipeline two runs approach each other.
(W2) An arc is left out where the simple paths through its stage take longer than T = `within`, and where every split that
     it belongs to is longer than T on one of some paths. The least that a path takes so far is known node by node; what is
     left is at least the sum over runs of the shortest from where each stands to where it has to end, which is
     tabulated. Where that is infinite the layers that are left cannot be dealt out.

Of the splits that are left, the ways, no plan of the candidate is below  min(T + 1, the least of the largest arcs).
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
    from collections.abc import Sequence

    from shardwise.formulations.free_chunks import Floats, FreeChunks, Ints, MeanPath

Mask = npt.NDArray[np.bool_]

MOST_CELLS = 40_000_000
MOST_ARCS = 300_000
"""(W2) Entries of the tables, and arcs, that are kept at most."""
MOST_TABLES = 16
"""(W2) Paths that are looked at while the arcs grow."""
BLOCK = 16_384
"""(W2) Nodes that are followed at once."""


class Ahead:
    """(W2) What some paths take through each chunk, and the least that each takes through what is left from stage k on: per
    run, by where it stands and where it ends. A folded pipeline has one table for both runs, by where each stands.

    costs
        Per chunk, shape (paths, first layer, size).
    left
        Shape (stages + 1, runs, paths, layers + 1, layers + 1).
    """

    def __init__(self, free: FreeChunks, paths: Sequence[MeanPath]) -> None:
        self.free = free
        self.folded = free.candidate.schedule in FOLDED
        self.chunks = [free.candidate.layout.chunks_of(k) for k in range(free.p)]
        self.fixed = np.array([free.fixed(path) for path in paths])
        self.costs = [
            np.stack([free.through(path, chunk) for path in paths]) + free.bars(chunk) for chunk in range(free.chunks)
        ]
        runs = 1 if self.folded else free.v
        self.left = np.empty((free.p + 1, runs, len(paths), free.layers + 1, free.layers + 1))
        self.left[-1] = np.where(np.eye(free.layers + 1, dtype=bool), 0.0, np.inf)
        self.half = np.empty_like(self.left[:-1, 0] if self.folded else self.left[:0, 0])
        """Folded: the same where the first chunk of stage k is dealt out already."""
        for k in reversed(range(free.p)):
            if self.folded:
                self.half[k] = self._onward(self.left[k + 1, 0], self.chunks[k][1], backwards=True)
                self.left[k, 0] = self._onward(self.half[k], self.chunks[k][0])
            else:
                for run, chunk in enumerate(self.chunks[k]):
                    self.left[k, run] = self._onward(self.left[k + 1, run], chunk)

    @staticmethod
    def most_tables(free: FreeChunks) -> int:
        """Paths that there is room for; 0 where not even one fits."""
        return min(MOST_CELLS // ((free.p + 1) * free.v * (free.layers + 1) ** 2), MOST_TABLES)

    def _onward(self, after: Floats, chunk: int, *, backwards: bool = False) -> Floats:
        """The least through a chunk and what is left `after` it."""
        costs, out = self.costs[chunk], np.full_like(after, np.inf)
        for size in range(costs.shape[2]):
            rows = costs.shape[1] - size
            own = costs[:, :rows, size]
            if backwards:
                np.minimum(out[:, :, size:], after[:, :, :rows] + own[:, None], out=out[:, :, size:])
            else:
                np.minimum(out[:, :rows], after[:, size:] + own[:, :, None], out=out[:, :rows])
        return out

    def room(self, within: int) -> Floats:
        """What the chunks may take on each path."""
        return np.asarray((within + 1) / SAFETY - self.fixed)

    def first_nodes(self, room: Floats) -> Ints | None:
        """(W1) Before stage 0, those with every path within `room`, those with most of it left first; none where they are too
        many."""
        free = self.free
        if self.folded:
            return np.array([[0, free.layers]])
        tails = [self.left[0, -1, :, :, -1]]
        for run in reversed(range(free.v - 1)):
            tails.append((self.left[0, run] + tails[-1][:, None]).min(axis=2))
        begins, length, whole = np.zeros((1, 1), np.int64), np.zeros((1, len(room))), np.zeros((1, len(room)))
        for run, tail in enumerate(reversed(tails[:-1])):
            if not len(begins):
                return np.zeros((0, 2 * free.v - 1), np.int64)
            here, found, lengths, wholes = self.left[0, run], [], [], []
            for first in range(0, len(begins), BLOCK):
                at_once = slice(first, first + BLOCK)
                node, at = np.nonzero(length[at_once, :1] + here[0, begins[at_once, -1]] + tail[0] <= room[0])
                own = length[at_once][node] + here[:, begins[at_once][node, -1], at].T
                all_of_it = own + tail[:, at].T
                keep = (all_of_it <= room).all(axis=1)
                found.append(np.column_stack((begins[at_once][node[keep]], at[keep])))
                lengths.append(own[keep])
                wholes.append(all_of_it[keep])
                if sum(map(len, found)) > MOST_ARCS:
                    return None
            begins, length, whole = np.concatenate(found), np.concatenate(lengths), np.concatenate(wholes)
        order = np.argsort(-(room - whole).min(axis=1), kind="stable")
        return np.column_stack((begins, begins[:, 1:]))[order]


@dataclass(frozen=True, eq=False)
class Arcs:
    """(W1) The chunks that one stage may hold: source and target node, layers before its chunks and in them, (C3), and what
    the chunks add to each path, shape (arcs, paths)."""

    source: Ints
    target: Ints
    start: Ints
    size: Ints
    cost: Ints
    length: Floats

    def rows(self, chosen: Mask | Ints) -> Arcs:
        whole = (self.source, self.target, self.start, self.size, self.cost)
        source, target, start, size, cost = (part[chosen] for part in whole)
        return Arcs(source, target, start, size, cost, self.length[chosen])


@dataclass(frozen=True, eq=False)
class StageGraph:
    """(W2) Nodes by stage, and arcs, those alone that lead on, by their source; `least` is the largest arc of the way where
    it is least, `grown` how many arcs there were."""

    ahead: Ahead
    nodes: tuple[int, ...]
    arcs: tuple[Arcs, ...]
    least: int
    grown: int


def stage_graph(ahead: Ahead, within: int, first: Ints) -> StageGraph | None:
    """(W2) From some nodes before stage 0 on: stage after stage, then those that lead on; none where they are too many."""
    free, room = ahead.free, ahead.room(within)
    nodes, arcs, so_far = [first], [], [np.zeros((len(first), len(room)))]
    for k in range(free.p):
        grown = _stage_arcs(ahead, k, nodes[-1], so_far[-1], within, room)
        if grown is None:
            return None
        ends, found = grown
        reached, target = _distinct(ends, free.layers + 1)
        so_far.append(least_by(target, so_far[-1][found.source] + found.length, len(reached)))
        nodes.append(reached)
        arcs.append(replace(found, target=target))
        if sum(len(own.source) for own in arcs) > MOST_ARCS:
            return None
    grown_in_all = sum(len(own.source) for own in arcs)
    onward, left = np.full(len(nodes[-1]), -1, np.int64), np.zeros((len(nodes[-1]), len(room)))
    for k in reversed(range(free.p)):
        own = arcs[k]
        worst, lengths = np.maximum(own.cost, onward[own.target]), own.length + left[own.target]
        alive = (worst <= within) & (so_far[k][own.source] + lengths <= room).all(axis=1)
        order = np.flatnonzero(alive)[np.argsort(own.source[alive], kind="stable")]
        arcs[k] = own.rows(order)
        onward = np.full(len(nodes[k]), 2**62, np.int64)
        np.minimum.at(onward, arcs[k].source, worst[order])
        left = least_by(arcs[k].source, lengths[order], len(nodes[k]))
    return StageGraph(ahead, tuple(map(len, nodes)), tuple(arcs), int(onward.min(initial=2**62)), grown_in_all)


def least_by(group: Ints, rows: Floats, groups: int) -> Floats:
    """Column by column the least of the rows of each group, shape (groups, columns); infinite where it has none."""
    out = np.full((groups, rows.shape[1]), np.inf)
    if len(rows):
        order = np.argsort(group, kind="stable")
        firsts = np.flatnonzero(np.diff(group[order], prepend=-1))
        out[group[order[firsts]]] = np.minimum.reduceat(rows[order], firsts, axis=0)
    return out


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
    ahead: Ahead, k: int, nodes: Ints, so_far: Floats, within: int, room: Floats
) -> tuple[Ints, Arcs] | None:
    """(W2) All that stage k can hold behind each node: the nodes that follow, and arcs to them."""
    free, own, folded = ahead.free, ahead.chunks[k], ahead.folded
    v, m, after = free.v, free.m, free.p - 1 - k
    work = m * (free.sums[0] + free.sums[1])
    base = m * int(free.sent[:, own].sum()) + int(free.time.overhead)
    base += m * sum(int(free.ends[:2, end].sum()) for end, chunk in ((0, 0), (1, free.chunks - 1)) if chunk in own)
    ends = np.column_stack((nodes[:, v:], np.full(len(nodes), free.layers)))
    left = np.zeros((v + 1, len(nodes), len(room)))
    if not folded:
        for run in reversed(range(v)):
            left[run] = left[run + 1] + ahead.left[k, run][:, nodes[:, run], ends[:, run]].T
    source, size = np.arange(len(nodes)), np.zeros((len(nodes), 0), np.int64)
    load, length = np.full(len(nodes), base), so_far
    for run in range(v):
        parts, kept = [], 0
        at = nodes[source, run]
        for layers in range(free.most + 1):
            start = at - layers if folded and run else at
            stop = start + layers
            row = np.flatnonzero((start >= 0) & (stop <= free.layers))
            taken = load[row] + work[stop[row]] - work[start[row]]
            row, taken = row[taken <= within], taken[taken <= within]
            start, stop, node = start[row], stop[row], source[row]
            grown = length[row] + ahead.costs[own[run]][:, start, layers].T
            if not folded:
                rest = ahead.left[k + 1, run][:, stop, ends[node, run]].T + left[run + 1, node]
            elif run:
                rest = ahead.left[k + 1, 0][:, nodes[node, 0] + size[row, 0], start].T
            else:
                rest = ahead.half[k][:, stop, nodes[node, 1]].T
            inside = (grown + rest <= room).all(axis=1)
            if inside.any():
                row, kept = row[inside], kept + int(inside.sum())
                sizes = np.column_stack((size[row], np.full(len(row), layers)))
                parts.append((node[inside], sizes, taken[inside], grown[inside]))
            if kept > MOST_ARCS:
                return None
        if not parts:
            size, source, load, length = np.zeros((0, v), np.int64), source[:0], load[:0], length[:0]
            break
        source, size, load, length = (np.concatenate([part[i] for part in parts]) for i in range(4))
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
    arcs = Arcs(source, source, start, size, cost, length - so_far[source])
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
