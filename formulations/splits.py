"""The best split of the layers of one candidate: an exact minimum of a relaxation, in integer units.

(P1) v = 1. With the layers before stage k fixed, fill and drain without recompute are known, so the step is at least
     the largest over k of the simple path (T6) through stage k, and of its drain to stage 0 with the floor tail of the
     embedding. A dynamic program over (stage, first layer) minimises that maximum, and a best-first search through it
     finds all splits in ascending order.
(P2) v > 1. Even chunks leave two numbers to choose, the layers of the first and of the last chunk; all pairs are tried
     at once (chunks of any size: `free_chunks`). Interleaved, one more path is simple: the first micro-batch passes all
     chunks up to the last one of stage k, which has had p micro-batches on each of its other chunks by then, and so
     backwards at the end.
(P3) recompute: each stage takes on its own the cheapest setting that fits its memory, of one mode for all stages where
     the pack wants that (the modes are then tried one by one, and full recompute repeats at least one layer of every
     chunk). A common number of layers can only be slower, and recompute in fill and drain can only add. With v > 1
     memory is taken at one moment of the schedule only.

(P4) a few splits go through the timeline of the schedule together. With v = 1, or one setting for all stages, no plan of a
     split repeats less on any stage than the split says, and every path is longer where more is repeated: its step with
     those settings is a bound too, and that of its best plan if they fit at every moment. In all other cases its step
     without recompute is a bound, and that of a plan that repeats nothing.

So the value is an admissible bound for every plan of the candidate, and its split a good plan to try. Where (P4) holds,
trying the splits in order, each with its least setting that fits, finds the best plan of the candidate.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.data.pipeline import FOLDED, layout
from shardwise.data.plan import Plan, stage_in
from shardwise.formulations.passes import chunk_counts, links_of, pass_times
from shardwise.formulations.reach import Reach
from shardwise.formulations.schedule import DRAINED, UNSYNCHRONISED, in_flight_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.data.instance import Instance
    from shardwise.formulations.candidates import Candidate
    from shardwise.formulations.coefficients import CostTables, MemoryCoefficients, TimeCoefficients
    from shardwise.formulations.passes import ChunkCounts

Ints = npt.NDArray[np.int64]
Modes = tuple[str, ...]
"""Modes of `Stage.mode`: nothing, sets of modules, full."""
INFINITE = np.int64(2**62)


@dataclass(frozen=True)
class Split:
    """`bound` in integer units; the cuts, and per stage the recompute mode and block that fit its memory."""

    bound: int
    cuts: tuple[int, ...]
    settings: tuple[tuple[str, int], ...]


@dataclass(frozen=True, eq=False)
class _StageChoices:
    """(P1) What each size of a stage costs, by the layers before it: rows from `first` on, columns from `least` on.

    cost
        The paths through the stage.
    onward
        The largest of it and of the best that can follow.
    mode, block
        The recompute setting, the mode as an index into `modes`.
    """

    modes: Modes
    first: int
    least: int
    cost: Ints
    onward: Ints
    mode: Ints
    block: Ints


def _by_bound(choices: list[_StageChoices], limit: int) -> Iterator[Split]:
    """(P1) The splits within `limit`, best first: the bound of a part is its cost and the best that can follow it."""
    if not choices:
        return
    serial = itertools.count()
    open_parts: list[tuple[int, int, int, int, tuple[int, ...], tuple[tuple[str, int], ...]]] = [
        (0, 0, next(serial), 0, (0,), ())
    ]
    while open_parts:
        bound, deep, _, cost, cuts, settings = heapq.heappop(open_parts)
        if -deep == len(choices):
            yield Split(bound, cuts, settings)
            continue
        stage = choices[-deep]
        row = cuts[-1] - stage.first
        for column in np.nonzero(stage.onward[row] <= limit)[0].tolist():
            part = max(cost, int(stage.cost[row, column]))
            setting = stage.modes[int(stage.mode[row, column])], int(stage.block[row, column])
            grown = (*cuts, cuts[-1] + stage.least + column)
            ahead = max(cost, int(stage.onward[row, column]))
            heapq.heappush(open_parts, (ahead, deep - 1, next(serial), part, grown, (*settings, setting)))


def _opened_late(waiting: list[tuple[int, Callable[[], Iterator[Split]]]], limit: int) -> Iterator[Split]:
    """Several runs of splits as one, ascending; each is made when no other has a split below its least bound."""
    serial = itertools.count()
    runs: list[tuple[int, int, Split | None, Any]] = [
        (least, next(serial), None, make) for least, make in waiting if least <= limit
    ]
    heapq.heapify(runs)
    while runs:
        _, _, split, run = heapq.heappop(runs)
        if split is not None:
            yield split
        splits: Iterator[Split] = run if split is not None else run()
        for following in itertools.islice(splits, 1):
            heapq.heappush(runs, (following.bound, next(serial), following, splits))


class SplitSearch:
    """(P1)-(P3) for the candidates of one instance."""

    def __init__(self, instance: Instance, tables: CostTables) -> None:
        self.instance, self.tables = instance, tables
        self.kinds = np.array(instance.model.kind_indices)
        self.layers = len(self.kinds)
        self.whole = instance.limits.recompute == "full"
        self._kept_prefixes: dict[tuple[int, int, str], Ints] = {}
        self._held: dict[tuple[int, int, str], list[int]] = {}
        self._room_lines: dict[tuple[int, int], tuple[int, int]] = {}
        self._saved: dict[tuple[int, int], int] = {}
        self.all_modes: Modes = ("none", *tables.sets, "full")
        wanted = {None: self.all_modes, "selective": tables.sets}
        modes: Modes = wanted.get(instance.limits.recompute, (str(instance.limits.recompute),))
        self.mode_sets: tuple[Modes, ...] = (
            tuple((mode,) for mode in modes) if instance.rules.uniform_recompute else (modes,)
        )

    def modes_of(self, candidate: Candidate) -> tuple[Modes, ...]:
        """Those that the stages of a candidate may have, `mode_sets` but for (U5)."""
        return (("none",),) if candidate.degrees.offload_layers else self.mode_sets

    def prefix(self, per_kind: tuple[float, ...]) -> Ints:
        """Sums over the first 0, 1, ... L layers."""
        out = np.zeros(self.layers + 1, dtype=np.int64)
        np.cumsum(np.asarray(per_kind, dtype=np.int64)[self.kinds], out=out[1:])
        return out

    def ascending(self, candidate: Candidate, time: TimeCoefficients, limit: int) -> Iterator[Split]:
        """Every relaxed split within `limit` units and memory, ascending by bound: no plan of the candidate is below the
        first, and no plan of a split that is still to come below the last."""
        memory = self.tables.memory(candidate.degrees, candidate.schedule)
        several = candidate.degrees.vpp > 1
        splits = self._even_splits(candidate, time, limit) if several else None
        reach = None if several else Reach(self, candidate, time, memory, limit)

        def of_modes(modes: Modes) -> Iterator[Split]:
            if reach is None:
                return iter(() if splits is None else self._interleaved(candidate, memory, limit, modes, *splits))
            if candidate.degrees.pp > 1 and modes == ("full",) and not self.whole:
                return self._by_block(candidate, time, memory, limit, reach)
            if len(modes) == 1 and modes != ("full",) and not reach.all_layers(modes[0]):
                return iter(())
            return _by_bound(self._stage_choices(candidate, time, memory, limit, modes), limit)

        return _opened_late(
            [(self._least(candidate, time, modes), partial(of_modes, modes)) for modes in self.modes_of(candidate)],
            limit,
        )

    def _least(self, candidate: Candidate, time: TimeCoefficients, modes: Modes) -> int:
        """(P3) The mean over stages of their busy time, with what the only mode adds to every layer: no split in these modes
        is below it."""
        p, m = candidate.degrees.pp, candidate.micro_batches
        sent = [int(x) for x in time.sends[:p]]
        sends = sum(sent[link] for links in links_of(candidate.layout, p) for link in links.tolist() if link < p)
        work = int(self.prefix(_both(time))[-1] + sum(_both(time)[-2:]) + sends)
        if len(modes) == 1 and modes[0] in self.tables.sets:
            work += int(self.prefix(time.of_set(self.tables.sets.index(modes[0])))[-1])
        elif modes == ("full",):
            work += max(candidate.degrees.virtual_stages - 2, 0) * int(min(time.full[:-2]))
        return int(time.overhead) + m * work // p

    def of_cuts(self, candidate: Candidate, time: TimeCoefficients, cuts: Ints, limit: int) -> list[Split]:
        """The splits of some cuts of v > 1, one row each, as (P2) and (P3) judge them: those within `limit` and memory."""
        memory = self.tables.memory(candidate.degrees, candidate.schedule)
        if not len(cuts):
            return []
        sums = _ChunkSums.of(self.prefix, time, cuts, candidate)
        within = sums.value(0) <= limit
        if not within.any():
            return []
        cuts, sums = cuts[within], sums.rows(within)
        found: list[Split] = []
        for modes in self.mode_sets:
            found += self._interleaved(candidate, memory, limit, modes, cuts, sums)
            if modes == ("none",) and len(found) == len(cuts):
                break  # all fit as they are
        return found

    def exact(self, candidate: Candidate) -> bool:
        """(P4) Whether no plan of a split repeats less than the split says, on any chunk."""
        return candidate.degrees.vpp == 1 or self.instance.rules.uniform_recompute

    def timed(self, candidate: Candidate, time: TimeCoefficients, splits: list[Split]) -> tuple[Ints, ChunkCounts]:
        """(P4) The step of each split, with its own settings where they are exact and without recompute where not, and
        what it repeats then: no plan of the split is faster or repeats less."""
        where, stage = candidate.layout, np.array(candidate.layout.stage)
        cuts = np.array([split.cuts for split in splits]).T
        sets = self.tables.sets
        block = np.zeros((len(stage), len(splits)), np.int64)
        selective = np.zeros((len(stage), len(sets), len(splits)), bool)
        if self.exact(candidate):
            full = np.array([[block if mode == "full" else 0 for mode, block in split.settings] for split in splits])
            block = full.T[stage]
            chosen = [[[mode == own for mode, _ in split.settings] for split in splits] for own in sets]
            selective = np.array(chosen).transpose(2, 0, 1)[stage]
        counts = chunk_counts(where, self.tables.kind_prefixes, cuts, block, selective)
        passes = pass_times(time, candidate.shape, where, counts)
        return np.asarray(passes.step(candidate.shape) + int(time.overhead)), counts

    def kept(self, memory: MemoryCoefficients, in_flight_count: int, mode: str) -> Ints:
        """Prefix sums of the MiB kept for `in_flight_count` micro-batches; `tables` keeps `memory` alive, so its id."""
        key = (id(memory), in_flight_count, mode)
        if key not in self._kept_prefixes:
            kept = tuple(memory.kept(kind, in_flight_count, mode) for kind in range(len(memory.state)))
            self._kept_prefixes[key] = self.prefix(kept)
        return self._kept_prefixes[key]

    def held(self, memory: MemoryCoefficients, in_flight_count: int, mode: str) -> list[int]:
        """`kept` with the states of the layers."""
        key = (id(memory), in_flight_count, mode)
        if key not in self._held:
            each = (state + memory.kept(kind, in_flight_count, mode) for kind, state in enumerate(memory.state))
            self._held[key] = self.prefix(tuple(each)).tolist()
        return self._held[key]

    def _by_block(
        self, candidate: Candidate, time: TimeCoefficients, memory: MemoryCoefficients, limit: int, reach: Reach
    ) -> Iterator[Split]:
        """(P3) The splits of v = 1 with one block of full recompute for all stages, best first. Each block has a dynamic
        program of its own, which is opened when a bound on it is reached: with blocks of b layers and stages of at most n
        at least min(1, b / n) of all layers are repeated, and T >= overhead + m / p (W + sends + what is repeated).
        Blocks that (W2) excludes have none."""
        p, m = candidate.degrees.pp, candidate.micro_batches
        most, each = self._most_layers(time, m, limit), int(min(time.full[:-2]))
        work = int(self.prefix(_both(time))[-1] + sum(_both(time)[-2:]) + 2 * _links(time, p)[0].sum())

        def least(block: int) -> int:
            largest = max(min(most, max(self._rooms(candidate, memory, block))), 1)
            repeated = self.layers * min(block, largest) * each // largest
            return int(time.overhead) + m * (work + repeated) // p

        opened: list[tuple[int, int, Split, Iterator[Split]]] = []
        block = 1
        while block <= most and sum(self._rooms(candidate, memory, block)) < self.layers:
            block += 1
        while opened or block <= most:
            while block <= most and least(block) <= limit and (not opened or least(block) <= opened[0][0]):
                choices = (
                    self._stage_choices(candidate, time, memory, limit, ("full",), block)
                    if reach.all_layers("full", block)
                    else []
                )
                splits = _by_bound(choices, limit)
                for split in itertools.islice(splits, 1):
                    heapq.heappush(opened, (split.bound, block, split, splits))
                block += 1
            if not opened:
                return
            _, own, split, splits = heapq.heappop(opened)
            yield split
            for following in itertools.islice(splits, 1):
                heapq.heappush(opened, (following.bound, own, following, splits))

    def _stage_choices(
        self,
        candidate: Candidate,
        time: TimeCoefficients,
        memory: MemoryCoefficients,
        limit: int,
        modes: Modes,
        common: int = 0,
    ) -> list[_StageChoices]:
        """(P1) The dynamic program, the first stage first; nothing where no split is within `limit`. With `common` every
        stage repeats that many layers in full, and the drain has its share of them."""
        p, m, total = candidate.degrees.pp, candidate.micro_batches, self.layers
        fills, drains = candidate.schedule not in UNSYNCHRONISED, candidate.schedule in DRAINED
        most = self._most_layers(time, m, limit)
        rooms = self._rooms(candidate, memory, common) if common or modes == ("none",) else [total] * p
        largest = max(min(most, max(rooms)), 1)
        busy = m * self.prefix(_both(time))
        forward, backward = self.prefix(time.forward), self.prefix(time.backward)
        floor, overlap = self.prefix(time.tail_floor), self.prefix(time.tail_overlap)
        state = self.prefix(memory.state)
        sends, lags = _links(time, p)
        fill, drain = np.cumsum(sends[1:] + lags[1:]), np.cumsum(sends[:-1] + lags[1:])
        value = np.full(total + 1, INFINITE)
        value[total] = 0
        choices: list[_StageChoices] = []
        for k in reversed(range(p)):
            least = 0 if k in (0, p - 1) and p > 1 else 1
            first = np.arange(
                max(k - 1, 0, total - (p - k) * most), min(total - max(p - 2 - max(k - 1, 0), 0), k * most) + 1
            )
            if k == 0:
                first = np.zeros(1, dtype=np.int64)
            size = np.arange(least, min(most, rooms[k]) + 1)
            if not len(first) or not len(size):
                return []
            start = first[:, None]
            end = np.minimum(start + size, total)
            flying = in_flight_once(p, 1, m, k, candidate.schedule)[0]
            extra, mode, block = self._stage_recompute(memory, time, state, start, end, flying, k, p, modes, common)
            extra = np.where(extra < INFINITE // 4, m * extra, INFINITE // 2)
            work = busy[end] - busy[start] + extra + m * int(sends[k] + (sends[k + 1] if k < p - 1 else 0))
            tail_floor, tail_overlap = floor[end] - floor[start], overlap[end] - overlap[start]
            for unit, stage in ((-2, 0), (-1, p - 1)):
                if k == stage:
                    work = work + m * int(time.forward[unit] + time.backward[unit])
                    tail_floor = tail_floor + int(time.tail_floor[unit])
                    tail_overlap = tail_overlap + int(time.tail_overlap[unit])
            tied = int(time.tied) if p > 1 and k in (0, p - 1) else 0
            tail = np.maximum(tail_floor, tail_overlap) + tied
            cost = work + int(time.overhead)
            if k and fills:
                cost = cost + forward[start] + int(time.forward[-2]) + int(fill[k - 1])
            if k and drains:
                drained = backward[start] + int(time.backward[-2]) + int(drain[k - 1])
                drained = drained + start * min(common, largest) * int(min(time.full[:-2])) // largest
                tail = np.maximum(tail, drained + int(time.tail_floor[-2]) + (int(time.tied) if p > 1 else 0))
            cost = cost + tail
            cost = np.where((extra < INFINITE // 4) & (start + size <= total), cost, INFINITE)
            onward = np.maximum(cost, value[end])
            choices.append(_StageChoices(self.all_modes, int(first[0]), least, cost, onward, mode, block))
            value = np.full(total + 1, INFINITE)
            value[first] = onward.min(axis=1)
        return choices[::-1] if value[0] <= limit else []

    def _rooms(self, candidate: Candidate, memory: MemoryCoefficients, block: int) -> list[int]:
        """Layers that each stage of v = 1 holds at most when it repeats `block` of them in full."""
        p, m = candidate.degrees.pp, candidate.micro_batches
        lines = [self._room_line(memory, in_flight_once(p, 1, m, k, candidate.schedule)[0]) for k in range(p)]
        free = memory.capacity - memory.fixed
        return [
            self.layers if each <= 0 else max(min((free + block * saved) // each, self.layers), 0)
            for saved, each in lines
        ]

    def _room_line(self, memory: MemoryCoefficients, flying: int) -> tuple[int, int]:
        """MiB that full recompute of a layer frees at most, and that a layer needs at least without it."""
        key = (id(memory), flying)
        if key not in self._room_lines:
            kinds = range(len(memory.state))
            plain = [memory.kept(kind, flying, "none") for kind in kinds]
            saved = max(kept - memory.kept(kind, flying, "full") for kind, kept in zip(kinds, plain, strict=True))
            each = min(state + kept for state, kept in zip(memory.state, plain, strict=True))
            self._room_lines[key] = max(saved, 0), each
        return self._room_lines[key]

    def _most_layers(self, time: TimeCoefficients, micro_batches: int, limit: int) -> int:
        """No stage of a plan within `limit` holds more layers than this."""
        room = limit - int(time.overhead)
        fastest = micro_batches * min(_both(time)[:-2])
        return self.layers if fastest <= 0 else max(0, min(self.layers, int(room // fastest)))

    def _stage_recompute(
        self,
        memory: MemoryCoefficients,
        time: TimeCoefficients,
        state: Ints,
        start: Ints,
        end: Ints,
        flying: int,
        stage: int,
        stages: int,
        modes: Modes,
        common: int = 0,
    ) -> tuple[Ints, Ints, Ints]:
        """(P3) for one chunk a stage: extra busy time, mode index and recomputed layers of each (start, end)."""
        base = memory.fixed + (memory.embedding if stage == 0 else 0) + (memory.head if stage == stages - 1 else 0)
        none = self.kept(memory, flying, "none")
        held = base + state[end] - state[start]
        spare = memory.capacity - held
        plain = none[end] - none[start]
        extra = np.full(plain.shape, INFINITE // 2)
        mode, block = np.zeros(plain.shape, np.int64), np.zeros(plain.shape, np.int64)
        last = len(self.all_modes) - 1
        if "full" in modes:
            full = self.kept(memory, flying, "full")
            saved = none - full
            again = self.prefix(time.full)
            need = np.maximum(plain + memory.working - spare, 0)
            least = 1 if modes == ("full",) else 0
            until = np.maximum(np.searchsorted(saved, saved[start] + need), np.minimum(start + least, end))
            until = np.where((until <= end) & self.whole, end, until)
            if common:
                fits = saved[np.minimum(start + common, end)] - saved[start] >= need
                until = np.where(fits, np.minimum(start + common, end), self.layers + 1)
            reachable = until <= end
            cost = again[np.minimum(until, end)] - again[start]
            extra = np.where(reachable, cost, extra)
            mode = np.where(reachable, last, mode)
            block = np.where(reachable, common or np.maximum(until - start, 1), block)
            if least and np.any(start == end):
                empty = (start == end) & (spare >= 0)
                extra, mode = np.where(empty, 0, extra), np.where(empty, last, mode)
                block = np.where(empty, common or 1, block)
        for index, own in enumerate(self.tables.sets):
            if own not in modes:
                continue
            selective, again = self.kept(memory, flying, own), self.prefix(time.of_set(index))
            cost = again[end] - again[start]
            room = spare - np.where(end > start, memory.needed(own), 0)
            better = (selective[end] - selective[start] <= room) & (cost < extra)
            extra, block = np.where(better, cost, extra), np.where(better, 0, block)
            mode = np.where(better, index + 1, mode)
        if "none" in modes:
            plainly = plain <= spare
            extra, mode, block = np.where(plainly, 0, extra), np.where(plainly, 0, mode), np.where(plainly, 0, block)
        return extra, mode, block

    def _even_splits(self, candidate: Candidate, time: TimeCoefficients, limit: int) -> tuple[Ints, _ChunkSums] | None:
        """(P2) The cuts of every even split that is within `limit` without recompute, and their sums."""
        p, v, m = candidate.degrees.pp, candidate.degrees.vpp, candidate.micro_batches
        columns = _columns(candidate)
        cuts = even_cuts(self.layers, p, v, self._most_layers(time, m, limit), folded=candidate.schedule in FOLDED)
        busy = m * self.prefix(_both(time))
        worked = (busy[cuts[:, 1:]] - busy[cuts[:, :-1]])[:, columns].sum(axis=1)
        cuts = cuts[worked.max(axis=1, initial=0) <= limit]
        if not len(cuts):
            return None
        sums = _ChunkSums.of(self.prefix, time, cuts, candidate)
        within = sums.value(0) <= limit
        return (cuts[within], sums.rows(within)) if within.any() else None

    def _interleaved(
        self, candidate: Candidate, memory: MemoryCoefficients, limit: int, modes: Modes, cuts: Ints, sums: _ChunkSums
    ) -> list[Split]:
        """(P2) under one set of recompute modes."""
        p, time = candidate.degrees.pp, sums.time
        if len(modes) == 1 and modes != ("none",):
            chosen = sums.value(self._least_extra(time, cuts, candidate, modes)) <= limit
            if not chosen.any():
                return []
            cuts, sums = cuts[chosen], sums.rows(chosen)
        if modes == ("full",) and self.instance.rules.uniform_recompute:
            cuts, blocks, value = self._interleaved_block(candidate, memory, sums, cuts, limit)
            mode, block = np.full((len(cuts), p), len(self.all_modes) - 1), np.repeat(blocks[:, None], p, axis=1)
        else:
            rows, extra, mode, block = self._interleaved_recompute(candidate, memory, time, cuts, modes)
            cuts, value = cuts[rows], sums.rows(rows).value(extra)
        within = np.nonzero(value <= limit)[0]
        return [
            Split(
                int(value[row]),
                tuple(int(cut) for cut in cuts[row]),
                tuple((self.all_modes[int(a)], int(b)) for a, b in zip(mode[row], block[row], strict=True)),
            )
            for row in within[np.argsort(value[within], kind="stable")]
        ]

    def _least_extra(self, time: TimeCoefficients, cuts: Ints, candidate: Candidate, modes: Modes) -> Ints:
        """Busy time that the only allowed mode adds at least: its modules of all layers, or one layer of every chunk."""
        (mode,) = modes
        again = self.prefix(time.full if mode == "full" else time.of_set(self.tables.sets.index(mode)))
        start, end = cuts[:, :-1], cuts[:, 1:]
        until = end if mode != "full" or self.whole else np.minimum(start + 1, end)
        extra: Ints = (again[until] - again[start])[:, _columns(candidate)].sum(axis=1)
        return candidate.micro_batches * extra

    def _kept_by(
        self,
        candidate: Candidate,
        memory: MemoryCoefficients,
        stage: int,
        start: Ints,
        middle: Ints,
        end: Ints,
        mode: str,
    ) -> Ints:
        """MiB of activations after the warm-up when each chunk is in `mode` up to `middle` and keeps all after it."""
        d = candidate.degrees
        total = np.zeros(len(start), np.int64)
        for row, count in enumerate(in_flight_once(d.pp, d.vpp, candidate.micro_batches, stage, candidate.schedule)):
            head, plain = self.kept(memory, count, mode), self.kept(memory, count, "none")
            total += head[middle[:, row]] - head[start[:, row]] + plain[end[:, row]] - plain[middle[:, row]]
        return total

    def _most_saved(self, candidate: Candidate, memory: MemoryCoefficients, stage: int) -> int:
        """MiB that full recompute of one more layer of every chunk of the stage frees at most, after the warm-up."""
        d, saved = candidate.degrees, 0
        for count in in_flight_once(d.pp, d.vpp, candidate.micro_batches, stage, candidate.schedule):
            key = (id(memory), count)
            if key not in self._saved:
                freed = np.diff(self.kept(memory, count, "none") - self.kept(memory, count, "full"))
                self._saved[key] = max(int(freed.max()), 0)
            saved += self._saved[key]
        return saved

    def _interleaved_block(
        self, candidate: Candidate, memory: MemoryCoefficients, sums: _ChunkSums, cuts: Ints, limit: int
    ) -> tuple[Ints, Ints, Ints]:
        """(P3) with one full-recompute block for all stages: the splits within `limit`, the block and the value of each.

        Stage by stage the block grows until the stage fits; splits whose value with that block is above `limit` are
        dropped at once, and most are after the first stage.
        """
        p, m, time = candidate.degrees.pp, candidate.micro_batches, sums.time
        columns = _columns(candidate)
        states, again = self.prefix(memory.state), self.prefix(time.full)
        sizes = np.diff(cuts)
        blocks = np.maximum(sizes.max(axis=1), 1) if self.whole else np.ones(len(cuts), np.int64)
        value = np.zeros(len(cuts), np.int64)
        for k in range(p):
            own = columns[:, k]
            base = memory.fixed + memory.embedding * (0 in own) + memory.head * (cuts.shape[1] - 2 in own)
            start, end = cuts[:, own], cuts[:, own + 1]
            spare = memory.capacity - base - (states[end] - states[start]).sum(axis=1)
            spare = spare - np.where((end > start).any(axis=1), memory.working, 0)
            largest = np.diff(cuts).max(axis=1)
            saved = self._most_saved(candidate, memory, k)
            while True:
                middle = np.minimum(start + blocks[:, None], end)
                missing = self._kept_by(candidate, memory, k, start, middle, end, "full") - spare
                over = missing > 0
                grow = over & (blocks < largest)
                if not grow.any():
                    break
                # one more layer of every chunk frees at most `saved`, so no smaller block than this can fit
                step = -(-missing // saved) if saved > 0 else largest
                blocks = np.where(grow, np.minimum(blocks + step, largest), blocks)
            until = np.minimum(cuts[:, :-1] + blocks[:, None], cuts[:, 1:])
            repeated = again[until] - again[cuts[:, :-1]]
            value = sums.value(m * repeated[:, columns].sum(axis=1), repeated[:, :p])
            alive = ~over & (value <= limit)
            cuts, blocks, value, sums = cuts[alive], blocks[alive], value[alive], sums.rows(alive)
            if not len(cuts):
                break
        return cuts, blocks, value

    def _interleaved_recompute(
        self, candidate: Candidate, memory: MemoryCoefficients, time: TimeCoefficients, cuts: Ints, modes: Modes
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """(P3) for several chunks a stage: the rows that fit, and extra busy time, mode index and block by stage."""
        p = candidate.degrees.pp
        rows = np.arange(len(cuts))
        shape = (len(cuts), p)
        extra, mode, block = np.full(shape, INFINITE // 2), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        again, full = candidate.micro_batches * self.prefix(time.full), len(self.all_modes) - 1
        states, columns = self.prefix(memory.state), _columns(candidate)
        for k in range(p):
            own = columns[:, k]
            start, end = cuts[:, own], cuts[:, own + 1]
            base = memory.fixed + memory.embedding * (0 in own) + memory.head * (cuts.shape[1] - 2 in own)
            spare = memory.capacity - base - (states[end] - states[start]).sum(axis=1)

            def kept(middle: Ints, mode: str, *, start: Ints = start, end: Ints = end, k: int = k) -> Ints:
                return self._kept_by(candidate, memory, k, start, middle, end, mode)

            cost = extra[:, k]
            if "none" in modes:
                cost[kept(end, "none") <= spare] = 0
            for index, own_set in enumerate(self.tables.sets):
                if own_set not in modes or (cost == 0).all():
                    continue
                selective = candidate.micro_batches * self.prefix(time.of_set(index))
                added = (selective[end] - selective[start]).sum(axis=1)
                needed = np.where((end > start).any(axis=1), memory.needed(own_set), 0)
                better = (kept(end, own_set) + needed <= spare) & (added < cost)
                cost[better], mode[better, k] = added[better], index + 1
            if "full" in modes:
                largest = int((end - start).max())
                for size in range(max(largest, 1) if self.whole else 1, max(largest, 1) + 1):
                    undecided = (cost >= INFINITE // 4) | ((mode[:, k] > 0) & (mode[:, k] < full))
                    if not undecided.any():
                        break
                    middle = np.minimum(start + size, end)
                    added = (again[middle] - again[start]).sum(axis=1)
                    working = np.where((middle > start).any(axis=1), memory.working, 0)
                    better = undecided & (kept(middle, "full") + working <= spare) & (added < cost)
                    cost[better], mode[better, k] = added[better], full
                    block[better, k] = np.minimum(size, np.maximum((end - start).max(axis=1), 1))[better]
            alive = cost < INFINITE // 4
            if not alive.all():
                cuts, extra, mode, block, rows = cuts[alive], extra[alive], mode[alive], block[alive], rows[alive]
                if not len(cuts):
                    break
        return rows, extra, mode, block


def _both(time: TimeCoefficients) -> tuple[float, ...]:
    """Forward and backward pass of each unit."""
    return tuple(f + b for f, b in zip(time.forward, time.backward, strict=True))


def _links(time: TimeCoefficients, p: int) -> tuple[Ints, Ints]:
    """What a stage sends and the rest of the transfer, of the link before each stage; stage 0 has none."""
    sends, lags = (np.array([0, *(int(x) for x in values[: p - 1])], np.int64) for values in (time.sends, time.lags))
    return sends, lags


def _columns(candidate: Candidate) -> Ints:
    """Chunks by row and stage, shape (v, p)."""
    return _chunks_by_stage(candidate.schedule, candidate.degrees.pp, candidate.degrees.vpp)


@lru_cache(maxsize=4096)
def _chunks_by_stage(schedule: str, pp: int, vpp: int) -> Ints:
    where = layout(schedule, pp, vpp)
    return np.array([where.chunks_of(k) for k in range(pp)]).T


@dataclass(frozen=True)
class _ChunkSums:
    """Sums of the time coefficients over the chunks of many splits: one row per split.

    busy, tail
        Per stage.
    forward, backward
        Per stage: one pass of its first chunk and the transfer that follows it.
    late_start, late_end
        (P2) per stage, interleaved: what the first pass of its last chunk adds to the time before it, and the last
        backward pass of that chunk to the time behind it.
    """

    time: TimeCoefficients
    schedule: str
    busy: Ints
    forward: Ints
    backward: Ints
    tail: Ints
    late_start: Ints
    late_end: Ints

    @staticmethod
    def of(
        prefix: Callable[[tuple[float, ...]], Ints], time: TimeCoefficients, cuts: Ints, candidate: Candidate
    ) -> _ChunkSums:
        """Of all `cuts`, shape (rows, chunks + 1)."""
        p, m, columns = candidate.degrees.pp, candidate.micro_batches, _columns(candidate)
        table = np.stack([prefix(c) for c in (time.forward, time.backward, time.tail_floor, time.tail_overlap)])
        chunk = np.diff(table[:, cuts])
        for row, values in enumerate((time.forward, time.backward, time.tail_floor, time.tail_overlap)):
            chunk[row, :, 0] += int(values[-2])
            chunk[row, :, -1] += int(values[-1])
        sends = np.array([*(int(x) for x in time.sends[:p]), 0], np.int64)
        for row, links in enumerate(links_of(candidate.layout, p)):
            chunk[row] += sends[links]
        forward, backward, floor, overlap = chunk
        lags = np.array([0, *(int(x) for x in time.lags[: p - 1])], np.int64)
        tail = np.maximum(floor[:, columns].sum(axis=1), overlap[:, columns].sum(axis=1))
        tail[:, [0, -1]] += int(time.tied)
        late = (
            [_late(passes, candidate, time) for passes in (forward, backward)]
            if candidate.schedule == "interleaved-1f1b" and m >= p
            else [np.zeros_like(tail)] * 2
        )
        return _ChunkSums(
            time,
            candidate.schedule,
            m * (forward + backward)[:, columns].sum(axis=1),
            forward[:, : p - 1] + lags[1:],
            backward[:, : p - 1] + lags[1:],
            tail,
            *late,
        )

    def rows(self, chosen: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> _ChunkSums:
        """The sums of some of the splits."""
        parts = (self.busy, self.forward, self.backward, self.tail, self.late_start, self.late_end)
        return _ChunkSums(self.time, self.schedule, *(part[chosen] for part in parts))

    def value(self, extra: Ints | int, repeated: Ints | int = 0) -> Ints:
        """(T6) of each split, with `extra` busy time per stage and `repeated` more in the first chunk's backward pass."""
        ends = self.busy + extra
        if self.schedule not in UNSYNCHRONISED:
            starts = np.zeros_like(ends)
            np.cumsum(self.forward, axis=1, out=starts[:, 1:])
            ends += np.maximum(starts, self.late_start)
        if self.schedule in DRAINED:
            # The end of stage j is the latest arrival plus the drain to it: shifted by the drain to stage 0, a running
            # maximum.
            drain = np.zeros_like(ends)
            more = repeated if isinstance(repeated, int) else repeated[:, :-1]
            np.cumsum(self.backward + more, axis=1, out=drain[:, 1:])
            last = (ends + (self.late_end if isinstance(extra, int) else 0)).max(axis=1)
            ends = np.maximum.accumulate((ends + drain)[:, ::-1], axis=1)[:, ::-1] - drain
            ends[:, 0] = np.maximum(ends[:, 0], last)
        value: Ints = int(self.time.overhead) + (ends + self.tail).max(axis=1)
        return value


def _late(passes: Ints, candidate: Candidate, time: TimeCoefficients) -> Ints:
    """(P2) The way of one micro-batch through all chunks before the last one of each stage, less the passes of p
    micro-batches that the stage has for its earlier chunks in the meantime."""
    d = candidate.degrees
    lags = np.array([*(int(x) for x in time.lags[: d.pp])], np.int64)
    way = np.zeros((len(passes), d.virtual_stages + 1), np.int64)
    np.cumsum(passes + lags[np.arange(d.virtual_stages) % d.pp], axis=1, out=way[:, 1:])
    earlier = passes.reshape(-1, d.vpp, d.pp)[:, :-1].sum(axis=1)
    late: Ints = way[:, (d.vpp - 1) * d.pp : d.virtual_stages] - d.pp * earlier
    return late


@lru_cache(maxsize=512)
def even_cuts(layers: int, p: int, v: int, most: int, *, folded: bool = False) -> Ints:
    """(P2) The cuts of all even chunkings that leave at most `most` layers on a stage; one row each."""
    sizes = even_chunks(layers, p * v, most)
    rows = sizes.reshape(-1, v, p)
    if folded:
        rows = np.concatenate((rows[:, :1], rows[:, 1:, ::-1]), axis=1)
    sizes = sizes[rows.sum(axis=1).max(axis=1, initial=0) <= most]
    cuts = np.zeros((len(sizes), p * v + 1), dtype=np.int64)
    np.cumsum(sizes, axis=1, out=cuts[:, 1:])
    return cuts


def even_chunks(layers: int, chunks: int, most: int) -> Ints:
    """(P2) All even chunkings: first and last free up to `most`, larger middle chunks first; one row each."""
    first, last = (grid.ravel() for grid in np.meshgrid(np.arange(most + 1), np.arange(most + 1), indexing="ij"))
    middle = layers - first - last
    keep = middle >= chunks - 2
    first, last, middle = first[keep], last[keep], middle[keep]
    base, larger = middle // (chunks - 2), middle % (chunks - 2)
    inner = base[:, None] + (np.arange(chunks - 2) < larger[:, None])
    return np.concatenate((first[:, None], inner, last[:, None]), axis=1).astype(np.int64)


def plans_to_try(instance: Instance, candidate: Candidate, split: Split) -> list[Plan]:
    """Plans with the cuts of `split`: its own recompute settings, or one for all stages where the pack wants that.

    With one setting for all stages the blocks grow from the largest that a stage needs; with v > 1 no plan of this split
    and mode is faster than the first of them that is admitted.
    """
    d = candidate.degrees
    sizes = [b - a for a, b in zip(split.cuts, split.cuts[1:], strict=False)]
    chunks = [tuple(sizes[i] for i in candidate.layout.chunks_of(k)) for k in range(d.pp)]
    options = [list(split.settings)]
    if instance.rules.uniform_recompute:
        (mode,) = {mode for mode, _ in split.settings}
        options = [[(mode, 0)] * d.pp]
        if mode == "full":
            largest = max(sizes)
            needed = max(block for _, block in split.settings)
            first = largest if instance.limits.recompute == "full" else min(needed, largest)
            options = [[(mode, block)] * d.pp for block in range(max(first, 1), max(largest, 1) + 1)]
    return [
        candidate.plan(tuple(stage_in(part, mode, block) for part, (mode, block) in zip(chunks, option, strict=True)))
        for option in options
    ]
