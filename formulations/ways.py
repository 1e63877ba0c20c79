"""Bounds from the ways that leave every path short: (C4) of `free_chunks`.

(W3) A way through the stage graph grows stage by stage. It is dropped where one of the paths P is longer than T on all
     that it may still become: what P takes so far, and the least that P takes from its node on. Only splits that last
     longer than T are dropped.
(W4) Where the ways are few all of them are timed (P4), and no plan is below  min(T + 1, the least of them). Where they are
     many, some are followed to the end: those with most room and some by chance. The longest paths of these join the P,
     and the ways grow again; splits that are alike are slow for the same reason.
(W5) T is tried above a bound that is known: twice as far each time until the ways stay many, then half as far. One graph
     holds the ways from a few first nodes on, those with most room first: where T is too far, these tell it soon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardwise.formulations.bounds import SAFETY
from shardwise.formulations.mean_paths import followed, longest_of
from shardwise.formulations.stage_graph import MOST_ARCS, Ahead, least_by, stage_graph

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.formulations.free_chunks import Floats, FreeChunks, Ints, MeanPath
    from shardwise.formulations.stage_graph import Arcs, StageGraph

MOST_WAYS = 30_000
"""(W4) What is timed at most, in a few seconds."""
MOST_DRAWN, ARCS_A_WAY = 2_000, 8
"""(W4) Ways that are followed where they are many, and arcs that they may go on by, for each."""
MOST_PATHS, NEWEST = 160, 60
"""(W3) Paths that are looked at, and how many of them are the newest; the others have dropped most so far."""
ROUNDS, TIMED, FOLLOWED = 8, 512, 40
"""(W4) How often ways grow for one T, how many of many are timed, and of how many the longest path is found."""
FIRST_NODES, NODES_A_GRAPH = 16, 64
"""(W5) First nodes of the first graph for one T; half as many where it is too large, twice as many where it is small. More
than so many for each graph are not begun."""
TRIES = 24
FIRST_STEP, FINEST = 1e-2, 1e-3
"""(W5) Values of T that are tried, and how far above a bound the first and the nearest of them are, as shares of it."""
BLOCK = 16_384
"""Ways, or arcs, that are looked at at once."""


class Paths:
    """Distinct paths, and how many ways each has dropped; the best mean path (C2) is one of them."""

    def __init__(self, mean: MeanPath) -> None:
        self.all: list[MeanPath] = []
        self.dropped: list[int] = []
        self._place: dict[tuple[bytes, float], int] = {}
        self.lead(mean)

    def lead(self, mean: MeanPath) -> None:
        """Make one the best mean path."""
        self.add([mean])
        self.mean = self._place[mean.key]

    def add(self, paths: Sequence[MeanPath]) -> int:
        """How many of them are new."""
        before = len(self.all)
        for path in paths:
            if path.key not in self._place:
                self._place[path.key] = len(self.all)
                self.all.append(path)
                self.dropped.append(0)
        return len(self.all) - before

    def best(self, most: int, newest: int) -> list[int]:
        """The numbers of the best mean path, the `newest`, and those that have dropped most, `most` in all."""
        start = max(len(self.all) - newest, 0)
        order = [self.mean, *range(start, len(self.all)), *sorted(range(start), key=lambda at: -self.dropped[at])]
        return list(dict.fromkeys(order))[:most]


def by_ways(
    free: FreeChunks, paths: Paths, least: int, tries: int = TRIES, graphs: int = 1
) -> Iterator[tuple[int, Ints | None]]:
    """(C4), (W5) Bounds of at least `least`, which is one itself, and with each the fastest cuts timed for it, if they are
    within the limit. The last one is above the limit where no plan is within it, and the step of the fastest cuts where
    they are known to be the fastest of all. Tries T = limit first; each T takes `graphs` at most. Paths that are found join
    `paths`."""
    most = Ahead.most_tables(free)
    if most < 1:
        return
    low, top, step, growth = least, free.limit, int(FIRST_STEP * least), 2.0
    ahead, known = _ahead(free, paths, most), len(paths.all)
    for tried in range(tries):
        within, told = min(low + step, top) if tried else top, low
        for bound, cuts, units in _tried(ahead, paths, within, ROUNDS if tried else 1, graphs):
            low = max(low, bound)
            if cuts is not None:
                top = min(top, units - 1)
            yield low, cuts
        if tried:
            growth = 0.5 if low == told else growth
            step = int(step * growth)
        if low > top or step < FINEST * low:
            return
        if len(paths.all) > known:
            ahead, known = _ahead(free, paths, most), len(paths.all)


def _ahead(free: FreeChunks, paths: Paths, most: int) -> Ahead:
    return Ahead(free, [paths.all[at] for at in paths.best(most, most // 2)])


def _tried(ahead: Ahead, paths: Paths, within: int, rounds: int, graphs: int) -> Iterator[tuple[int, Ints | None, int]]:
    """(W5) With T = `within`: bounds, 0 for none, and cuts with their step; graph by graph, a few first nodes each."""
    first = ahead.first_nodes(ahead.room(within))
    if first is None or len(first) > NODES_A_GRAPH * graphs:
        return
    draw, low, fastest = np.random.default_rng(0), within + 1, None
    begun, most = 0, FIRST_NODES
    for _ in range(graphs):
        if begun >= len(first):
            break
        graph = stage_graph(ahead, within, first[begun : begun + most])
        yield 0, None, 0
        if graph is None:
            if most == 1:
                return
            most //= 2
            continue
        begun += most
        if graph.grown < MOST_ARCS // 8:
            most *= 2
        if graph.least > within:
            continue
        every = False
        for cuts, steps, every in _grown(graph, paths, within, rounds, draw):
            units = int(steps.min(initial=2**62))
            if every:
                low, fastest = (units, cuts[int(steps.argmin())]) if units < low else (low, fastest)
            yield 0, cuts[int(steps.argmin())] if units <= ahead.free.limit else None, units
        if not every:
            return
    if begun >= len(first):
        yield low, fastest, low


def _grown(
    graph: StageGraph, paths: Paths, within: int, rounds: int, draw: np.random.Generator
) -> Iterator[tuple[Ints, Ints, bool]]:
    """(W3), (W4) Of one graph: cuts, their steps and whether they are all, round after round until they are."""
    free = graph.ahead.free
    for _ in range(rounds):
        ways = Ways(graph, within, paths)
        cuts, every = ways.grown(draw)
        timed = cuts if every else draw.permutation(cuts)[:TIMED]
        steps = free.steps(timed)
        yield timed, steps, every
        if every or not followed(free):
            return
        order = np.argsort(steps, kind="stable")
        slow = draw.permutation(order[FOLLOWED // 2 :])[: FOLLOWED // 2]
        if not paths.add(longest_of(free, timed[np.concatenate((order[: FOLLOWED // 2], slow))])):
            return


class Ways:
    """(W3) The ways of one graph: of each path, the least that it takes from every node on, shape (nodes, paths)."""

    def __init__(self, graph: StageGraph, within: int, paths: Paths) -> None:
        self.graph, self.free, self.paths = graph, graph.ahead.free, paths
        self.looked_at = paths.best(MOST_PATHS, NEWEST)
        own = [paths.all[at] for at in self.looked_at]
        self.weights = np.stack([path.weights.T for path in own], axis=-1)
        self.room = (within + 1) / SAFETY - np.array([self.free.fixed(path) for path in own])
        self.onward = [np.zeros((graph.nodes[-1], len(own)))]
        for k in reversed(range(self.free.p)):
            lengths = self._lengths(k, graph.arcs[k], self.onward[-1])
            self.onward.append(least_by(graph.arcs[k].source, lengths, graph.nodes[k]))
        self.onward.reverse()

    def grown(self, draw: np.random.Generator) -> tuple[Ints, bool]:
        """The cuts of every way, or of a few where they are many, and whether they are all."""
        graph, free, most, every = self.graph, self.free, MOST_WAYS, True
        node, so_far = np.arange(graph.nodes[0]), np.zeros((graph.nodes[0], len(self.room)))
        cuts = np.zeros((len(node), free.chunks + 1), np.int64)
        cuts[:, -1] = free.layers
        for k, arcs in enumerate(graph.arcs):
            first = np.searchsorted(arcs.source, node)
            count = np.searchsorted(arcs.source, node, side="right") - first
            if count.sum() > ARCS_A_WAY * most:
                some = draw.permutation(len(node))
                some = some[np.cumsum(count[some]) - count[some] < ARCS_A_WAY * most]  # one at least that goes on
                node, so_far, cuts, first, count = node[some], so_far[some], cuts[some], first[some], count[some]
                most, every = MOST_DRAWN, False
            found = []
            for block in _blocks(count):
                own = count[block]
                way = np.repeat(np.arange(block.start, block.stop), own)
                arc = np.arange(len(way)) - np.repeat(np.cumsum(own) - own, own) + np.repeat(first[block], own)
                length = so_far[way] + self._lengths(k, arcs.rows(arc))
                found.append((way, arc, length, self._spare(length + self.onward[k + 1][arcs.target[arc]])))
            way, arc, so_far, spare = (np.concatenate([part[i] for part in found]) for i in range(4))
            keep = np.flatnonzero(spare >= 0)
            if not len(keep) and not every:  # the few lead nowhere: they end as the shortest that they may become
                keep = np.argsort(-spare)[: most // 2]
            elif len(keep) > most:
                most, every = MOST_DRAWN, False
                order = keep[np.argsort(-spare[keep], kind="stable")]
                keep = np.concatenate((order[: most // 2], draw.permutation(order[most // 2 :])[: most // 2]))
            so_far, node, cuts = so_far[keep], arcs.target[arc[keep]], cuts[way[keep]]
            cuts[:, graph.ahead.chunks[k]] = arcs.start[arc[keep]]
            if not len(keep):
                break
        return cuts, every

    def _spare(self, length: Floats) -> Floats:
        """What is left on the path with least room, and note the paths by which ways are dropped."""
        spare = self.room - length
        worst = spare.argmin(axis=1)
        out = np.take_along_axis(spare, worst[:, None], 1)[:, 0]
        for own, times in zip(*np.unique(worst[out < 0], return_counts=True), strict=True):
            self.paths.dropped[self.looked_at[own]] += int(times)
        return np.asarray(out)

    def _lengths(self, k: int, arcs: Arcs, onward: Floats | None = None) -> Floats:
        """What the chunks of some arcs of stage k take on each path, with all behind them if `onward` says it."""
        out = np.zeros((len(arcs.source), len(self.room)))
        for first in range(0, len(out), BLOCK):
            own = slice(first, first + BLOCK)
            for run, chunk in enumerate(self.graph.ahead.chunks[k]):
                out[own] += self.free.loads[:, arcs.start[own, run], arcs.size[own, run]].T @ self.weights[chunk]
            if onward is not None:
                out[own] += onward[arcs.target[own]]
        return out


def _blocks(count: Ints) -> Iterator[slice]:
    """Rows that go on by about `BLOCK` arcs together."""
    total = np.cumsum(count)
    first = 0
    while first < len(count):
        behind = total[first - 1] if first else 0
        last = max(int(np.searchsorted(total, behind + BLOCK, side="right")), first + 1)
        yield slice(first, last)
        first = last
