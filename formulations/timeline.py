"""When every pass of a step starts and ends, for durations that are known: the longest paths of the schedule's graph.

The passes of `schedule.orders` are nodes. With D the time that a pass holds its stage (the send of its result included,
as far as it blocks) and L_j the rest of a transfer over link j, in which the stage goes on:

(E1) a pass starts when the one before it on its stage has ended, and when its input has arrived: a forward pass after
     the forward pass of the slot before it, a backward one after that of the slot behind it, both plus L_j.
(E2) end = start + D. Both are longest paths from the start of the step, so each is linear in the D and L on its path, and
     the sum over *any* path is a lower bound: that is what makes a path a valid cut.
(E3) The order repeats: where all passes of one period end later than those of the period before by one and the same
     time, every period after it does too, since each pass is a maximum of sums of earlier ones. The step of m
     micro-batches is then that of fewer, plus that time for each period left out.
(E4) A walk back from the end of the step that turns, at every pass, to one of the two that it waits for, by chance, is a
     path too. The mean of all such walks is a convex combination of paths, found in one sweep. Where the chance falls
     with how much earlier a pass ends, it is nearly as long as the longest path, and moves smoothly with the durations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.data.pipeline import layout
from shardwise.formulations.schedule import BACKWARD, FORWARD, INPUT, UNSYNCHRONISED, WEIGHT, orders

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]
"""Seconds as floats, or integer units."""

KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT)
CLOSE = 1e-9
"""Periods of float times count as equal within this share of the period."""
MOST_NUMBERS = 2**22
"""Ends of passes that are held at once; more rows go in blocks."""


@dataclass(frozen=True, slots=True)
class Shape:
    """All that the order of passes depends on."""

    schedule: str
    pp: int
    vpp: int
    micro_batches: int


@dataclass(frozen=True, eq=False)
class Graph:
    """The passes of one shape, sorted by level: all that a pass waits for stand on lower levels.

    duration, hop
        Per pass: its row in D (kind x slots + slot), and the link its input arrives by (p: none).
    before, source
        Per pass: the pass before it on its stage, and the one its input comes from; the number of passes if none.
    levels
        Of each level: where it starts and ends, and the passes that its own wait for, before them and as their source.
    index
        (kind, slot, micro-batch) to pass; -1 where there is none.
    first, last
        Per stage.
    """

    shape: Shape
    duration: Ints
    hop: Ints
    before: Ints
    source: Ints
    levels: tuple[tuple[int, int, Ints, Ints], ...]
    index: Ints
    first: Ints
    last: Ints

    def __len__(self) -> int:
        return len(self.duration)

    @cached_property
    def followers(self) -> tuple[tuple[int, int, Ints, Ints], ...]:
        """Of each level: where it starts and ends, the passes behind its own on their stages, and those they are the
        source of; the number of passes if none."""
        none = len(self)
        behind, fed = np.full((2, none + 1), none)
        behind[self.before], fed[self.source] = np.arange(none), np.arange(none)
        behind[none] = fed[none] = none
        return tuple((a, b, behind[a:b], fed[a:b]) for a, b, _, _ in self.levels)


@lru_cache(maxsize=256)
def graph(shape: Shape) -> Graph:
    """(E1).

    Raises
    ------
    ValueError
        When the order cannot run: a pass waits for one that stands behind it.
    """
    s, p, m = shape, shape.pp, shape.micro_batches
    where, tables = layout(s.schedule, p, s.vpp), orders(s.schedule, p, s.vpp, m)
    slots = len(where.stage)
    ends = {run[-1] for run in where.directions}
    starts = {run[0] for run in where.directions}
    count = sum(len(table) for table in tables)
    known: dict[tuple[int, int, int], int] = {}
    stage_of: list[int] = []
    kinds: list[int] = []
    slot_of: list[int] = []
    micro: list[int] = []
    for k, table in enumerate(tables):
        for kind, slot, i in table:
            known[kind, slot, i] = len(kinds)
            stage_of.append(k)
            kinds.append(kind)
            slot_of.append(slot)
            micro.append(i)
    before, source, hop = [count] * count, [count] * count, [p] * count
    for op, (kind, slot, i) in enumerate(zip(kinds, slot_of, micro, strict=True)):
        if op and stage_of[op] == stage_of[op - 1]:
            before[op] = op - 1
        if kind == FORWARD and slot not in starts:
            source[op], link = known[FORWARD, slot - 1, i], where.hop_before[slot]
        elif kind in (BACKWARD, INPUT) and slot not in ends:
            other = known.get((BACKWARD, slot + 1, i))
            source[op], link = known[INPUT, slot + 1, i] if other is None else other, where.hop_before[slot + 1]
        else:
            continue
        hop[op] = p if link < 0 else link
    level = _levels(before, source, [len(table) for table in tables])
    order = np.argsort(level, kind="stable")
    place = np.empty(count + 1, dtype=np.int64)
    place[order], place[count] = np.arange(count), count
    index = np.full((len(KINDS), slots, m), -1, dtype=np.int64)
    index[kinds, slot_of, micro] = place[:-1]
    bounds = np.concatenate(([0], np.cumsum(np.bincount(level))))
    offsets = np.concatenate(([0], np.cumsum([len(table) for table in tables])))
    waits, sources = place[np.array(before)[order]], place[np.array(source)[order]]
    return Graph(
        s,
        (np.array(kinds) * slots + np.array(slot_of))[order],
        np.array(hop)[order],
        waits,
        sources,
        tuple((a, b, waits[a:b], sources[a:b]) for a, b in pairwise(bounds.tolist())),
        index,
        place[offsets[:-1]],
        place[offsets[1:] - 1],
    )


@lru_cache(maxsize=65536)
def runnable(shape: Shape) -> Shape:
    """The shape, or where its order cannot run the next larger number of micro-batches that can: what an illegal plan
    would take if it were mended."""
    p, m = shape.pp, shape.micro_batches
    if shape.schedule == "interleaved-1f1b" and m % p:
        try:
            graph(shape)
        except ValueError:
            return replace(shape, micro_batches=m + -m % p)
    elif shape.schedule in ("dualpipe", "dualpipe-v"):
        return replace(shape, micro_batches=max(m + (m % 2 if shape.schedule == "dualpipe" else 0), 2 * p))
    return shape


def _levels(before: list[int], source: list[int], lengths: list[int]) -> Ints:
    """Passes on the longest way to each, stage by stage as far as each can go."""
    count = len(before)
    level = [-1] * count + [-1]
    done = [False] * count + [True]
    first = [sum(lengths[:k]) for k in range(len(lengths))]
    at = list(first)
    stop = [a + b for a, b in zip(first, lengths, strict=True)]
    left, moved = count, True
    while left and moved:
        moved = False
        for k in range(len(lengths)):
            op = at[k]
            while op < stop[k] and done[source[op]]:
                level[op] = max(level[before[op]], level[source[op]]) + 1
                done[op] = True
                op += 1
            moved = moved or op > at[k]
            left -= op - at[k]
            at[k] = op
    if left:
        raise ValueError("the schedule does not run with these micro-batches: a pass waits for one behind it")
    return np.array(level[:-1], dtype=np.int64)


def pass_ends(graph: Graph, durations: Numbers, lags: Numbers) -> Numbers:
    """(E1), (E2) The end of every pass, in the order of the graph.

    Parameters
    ----------
    durations
        D, shape (kinds, slots) or (kinds, slots, rows).
    lags
        L per link, shape (p,) or (p, rows); link p - 1 joins the last stage to the first.
    """
    tail = durations.shape[2:]
    held = durations.reshape(-1, *tail)
    late = np.concatenate([lags, np.zeros((1, *tail), lags.dtype)])
    ends = np.zeros((len(graph) + 1, *tail), dtype=np.result_type(durations, lags))
    for a, b, before, source in graph.levels:  # level by level: what a whole step holds does not fit into the cache
        arrival = ends.take(source, axis=0)
        arrival += late.take(graph.hop[a:b], axis=0)
        np.maximum(arrival, ends.take(before, axis=0), out=arrival)
        np.add(arrival, held.take(graph.duration[a:b], axis=0), out=ends[a:b])
    return ends[:-1]


@dataclass(frozen=True, eq=False)
class StageSpans:
    """Per stage, and row if there are any: start of its first pass, end of its last."""

    start: Numbers
    end: Numbers

    def step(self, shape: Shape, tails: Numbers) -> Numbers:
        """What the step lasts when stage k needs tails[k] more after its last pass."""
        if shape.schedule in UNSYNCHRONISED:
            return np.asarray((self.end + tails - self.start).max(axis=0))
        return np.asarray((self.end + tails).max(axis=0))


def stage_spans(shape: Shape, durations: Numbers, lags: Numbers) -> StageSpans:
    """(E1)-(E3), quickly; arguments as in `pass_ends`."""
    fewer, periods = shorter(shape)
    if durations.ndim == 3:
        return longer_spans(fewer, np.full(durations.shape[2], periods), durations, lags)
    spans = longer_spans(fewer, np.array([periods]), durations[..., None], lags[:, None])
    return StageSpans(spans.start[:, 0], spans.end[:, 0])


@lru_cache(maxsize=65536)
def shorter(shape: Shape) -> tuple[Shape, int]:
    """(E3) The shape with no more micro-batches than show the period, and the periods that this leaves out."""
    m = shape.micro_batches
    few = min(m, 2 if shape.pp == shape.vpp == 1 else _enough(shape))
    return replace(shape, micro_batches=few), (m - few) // _repeats(shape)


def longer_spans(shape: Shape, periods: Ints, durations: Numbers, lags: Numbers) -> StageSpans:
    """(E1)-(E3) of rows that differ in micro-batches too: each is `shape` with so many `periods` more."""
    if shape.pp == shape.vpp == 1:
        kinds = [kind for kind, _, i in orders(shape.schedule, 1, 1, shape.micro_batches)[0] if i == 0]
        total = durations[kinds, 0].sum(axis=0) * (shape.micro_batches + periods)
        return StageSpans(np.zeros_like(total)[None], total[None])
    one, of = _distinct(durations, lags)
    spans, period, agreed = _short_spans(shape, durations[..., one], lags[..., one], repeats=bool(periods.any()))
    start, end = spans.start[:, of], spans.end[:, of] + periods * period[of]
    unknown = ~agreed[of]
    for more in set(periods[unknown].tolist()):  # the whole step
        own = unknown & (periods == more)
        whole = graph(replace(shape, micro_batches=shape.micro_batches + more * _repeats(shape)))
        found = _spans(whole, pass_ends(whole, durations[..., own], lags[..., own]), durations[..., own])
        start[:, own], end[:, own] = found.start, found.end
    return StageSpans(start, end)


def _distinct(durations: Numbers, lags: Numbers) -> tuple[Ints, Ints]:
    """A row for each distinct set of times, and the index of each row's among them: plans that differ in the batch or in
    what comes after the last pass have the same passes."""
    rows = durations.shape[-1]
    times = np.concatenate([durations.reshape(-1, rows), lags]).T.copy()
    place: dict[bytes, int] = {}
    of = np.array([place.setdefault(own.tobytes(), len(place)) for own in times])
    return np.unique(of, return_index=True)[1], of


def _short_spans(
    shape: Shape, durations: Numbers, lags: Numbers, *, repeats: bool
) -> tuple[StageSpans, Numbers, npt.NDArray[np.bool_]]:
    """Spans of exactly `shape`; where the order `repeats`, its period and whether there is one."""
    small, rows = graph(shape), durations.shape[-1]
    at_once = max(MOST_NUMBERS // len(small), 1)
    if rows > at_once:
        blocks = [slice(start, start + at_once) for start in range(0, rows, at_once)]
        parts = [_short_spans(shape, durations[..., own], lags[..., own], repeats=repeats) for own in blocks]
        start, end = (np.concatenate([getattr(spans, name) for spans, _, _ in parts], 1) for name in ("start", "end"))
        period, agreed = (np.concatenate(values) for values in zip(*(part[1:] for part in parts), strict=True))
        return StageSpans(start, end), period, agreed
    ends = pass_ends(small, durations, lags)
    period, agreed = _period(small, ends) if repeats else (np.zeros(rows, ends.dtype), np.ones(rows, dtype=bool))
    return _spans(small, ends, durations), period, agreed


def _spans(graph: Graph, ends: Numbers, durations: Numbers) -> StageSpans:
    first = durations.reshape(-1, *durations.shape[2:])[graph.duration[graph.first]]
    return StageSpans(ends[graph.first] - first, ends[graph.last])


def _repeats(shape: Shape) -> int:
    """Micro-batches after which the order repeats."""
    return (
        shape.pp if shape.vpp > 1 and shape.schedule == "interleaved-1f1b" else 2 if shape.schedule == "dualpipe" else 1
    )


def _reach(shape: Shape) -> int:
    """No pass waits for one whose micro-batch is further away than this."""
    if shape.schedule == "1f1b":
        return shape.pp + 1
    return (4 if shape.schedule == "zb-2p" else 3) * shape.pp + 2


def _enough(shape: Shape) -> int:
    """(E3) Micro-batches of a shorter step that shows the period, congruent to those of the step."""
    if shape.schedule == "gpipe":
        return shape.micro_batches
    repeats = _repeats(shape)
    least = 3 * _reach(shape) + 2 * repeats
    return least + (shape.micro_batches - least) % repeats


def _period(graph: Graph, ends: Numbers) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """(E3) How much later a period ends than the one before it, and whether all passes agree on it, by row."""
    reach, repeats = _reach(graph.shape), _repeats(graph.shape)
    if graph.shape.schedule == "dualpipe":
        repeats //= 2
        reach //= 2
    used = graph.index[:, :, 0].max(axis=1) >= 0
    index = graph.index[used]
    slots = index[:, :, reach : 2 * reach + repeats]
    later, now = slots[:, :, repeats:], slots[:, :, : slots.shape[2] - repeats]
    keep = (later >= 0) & (now >= 0)
    apart = ends[later[keep]] - ends[now[keep]]
    low, high = apart.min(axis=0), apart.max(axis=0)
    return low, low == high if np.issubdtype(apart.dtype, np.integer) else high - low <= CLOSE * high


@dataclass(frozen=True, eq=False)
class Paths:
    """(E2) A way through the graph to the end of a stage, for each row.

    passes, hops
        How often it holds each kind and slot, shape (kinds, slots, rows), and waits for each link, (p, rows). Where the
        time before the first pass of the stage does not count, that time's passes are taken off.
    stage
        Where it ends, shape (rows,).
    """

    passes: Ints
    hops: Ints
    stage: Ints


def longest_paths(shape: Shape, durations: Numbers, lags: Numbers, tails: Numbers) -> Paths:
    """(E2) The paths that the step times are the lengths of; all arguments with an axis of rows."""
    whole = graph(shape)
    ends = pass_ends(whole, durations, lags)
    spans = _spans(whole, ends, durations)
    unsynchronised = shape.schedule in UNSYNCHRONISED
    stage = np.argmax(spans.end + tails - (spans.start if unsynchronised else 0), axis=0)
    ends = np.concatenate([ends, np.zeros_like(ends[:1])])
    late = np.concatenate([lags, np.zeros_like(lags[:1])])
    passes = np.zeros((durations.shape[0] * durations.shape[1], len(stage)), dtype=np.int64)
    hops = np.zeros((shape.pp + 1, len(stage)), dtype=np.int64)
    _walk_back(whole, ends, late, whole.last[stage], passes, hops, 1)
    if unsynchronised:
        first = whole.first[stage]
        _walk_back(whole, ends, late, first, passes, hops, -1)
        passes[whole.duration[first], np.arange(len(stage))] += 1
    return Paths(passes.reshape(*durations.shape[:2], -1), hops[:-1], stage)


def _walk_back(graph: Graph, ends: Numbers, late: Numbers, op: Ints, passes: Ints, hops: Ints, weight: int) -> None:
    """Count the passes and hops that lead to `op`, one per row, `weight` times each."""
    rows, none = np.arange(len(op)), len(graph)
    before, source, hop, duration = (
        np.append(values, end)
        for values, end in ((graph.before, none), (graph.source, none), (graph.hop, -1), (graph.duration, 0))
    )
    while len(rows):
        passes[duration[op], rows] += weight
        link, ahead, other = hop[op], before[op], source[op]
        by_input = (other != none) & ((ahead == none) | (ends[other, rows] + late[link, rows] >= ends[ahead, rows]))
        hops[link[by_input], rows[by_input]] += weight
        op = np.where(by_input, other, ahead)
        left = op != none
        op, rows = op[left], rows[left]


@dataclass(frozen=True, eq=False)
class MixedPaths:
    """(E4) Per row: how often the mean path holds each kind and slot and waits for each link, as in `Paths`; and the share
    of it that ends on each stage, shape (p, rows)."""

    passes: Numbers
    hops: Numbers
    stages: Numbers


def mixed_paths(shape: Shape, durations: Numbers, lags: Numbers, tails: Numbers, spreads: Numbers) -> MixedPaths:
    """(E4) One row for each of the positive `spreads`: the difference between two ends at which the later one is taken e
    times as often. The other arguments are floats without an axis of rows."""
    whole = graph(shape)
    none, rows = len(whole), len(spreads)
    ends = pass_ends(whole, durations, lags)
    spans = _spans(whole, ends, durations)
    unsynchronised = shape.schedule in UNSYNCHRONISED
    last = spans.end + tails - (spans.start if unsynchronised else 0)
    stages = np.exp((last - last.max())[:, None] / spreads)
    stages /= stages.sum(axis=0)
    ends, late = np.append(ends, 0), np.append(lags, 0)
    by_input = preferred((ends[whole.source] + late[whole.hop] - ends[whole.before])[:, None], spreads)
    by_input[whole.before == none] = 1
    by_input[whole.source == none] = 0
    visits = np.zeros((none, rows))
    visits[whole.last] = stages
    if unsynchronised:
        visits[whole.first] -= stages  # the time before the first pass of the stage does not count
    to_input, to_before = (np.zeros((none + 1, rows)) for _ in range(2))
    by_before = 1 - by_input
    for a, b, behind, fed in reversed(whole.followers):
        own = visits[a:b]
        own += to_before.take(behind, axis=0)
        own += to_input.take(fed, axis=0)
        np.multiply(own, by_before[a:b], out=to_before[a:b])
        np.multiply(own, by_input[a:b], out=to_input[a:b])
    if unsynchronised:
        visits[whole.first] += stages
    passes, hops = np.zeros((durations.size, rows)), np.zeros((shape.pp + 1, rows))
    np.add.at(passes, whole.duration, visits)
    np.add.at(hops, whole.hop, to_input[:-1])
    return MixedPaths(passes.reshape(*durations.shape, rows), hops[:-1], stages)


def preferred(ahead: Numbers, spreads: Numbers) -> Numbers:
    """(E4) How often the first of two is taken that is `ahead` by so much: e times as often as the other by a spread."""
    return np.asarray((1 + np.tanh(ahead / (2 * spreads))) / 2)
