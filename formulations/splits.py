"""The best split of the layers of one candidate: an exact minimum of a relaxation, in integer units.

(P1) v = 1. With the layers before stage k fixed, fill and drain without recompute are known, so the step is at least
     the largest over k of  max(A_k + drain to stage 0 + floor tail of the embedding, A_k + X_k).  A dynamic program
     over (stage, first layer) minimises that maximum.
(P2) v > 1. Even chunks leave two numbers to choose, the layers of the first and of the last chunk; all pairs are tried
     at once.
(P3) recompute: each stage takes on its own the cheapest setting that fits its memory, of one mode for all stages where
     the pack wants that (the modes are then tried one by one, and full recompute repeats at least one layer of every
     chunk). A common number of layers can only be slower, and recompute in fill and drain can only add. With v > 1
     memory is taken at one moment of the schedule only, right after the warm-up.

So the value is an admissible bound for every plan of the candidate, and its split a good plan to try. With v > 1 and one
setting for all stages the value of a split is its step time, once its memory is checked at every moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.data.plan import Plan, Recompute, Stage
from shardwise.formulations.schedule import in_flight_after_warm_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.data.instance import Instance
    from shardwise.formulations.candidates import Candidate
    from shardwise.formulations.coefficients import CostTables, MemoryCoefficients, TimeCoefficients

Ints = npt.NDArray[np.int64]
Modes = tuple[Recompute, ...]
INFINITE = np.int64(2**62)
_MODES: Modes = ("none", "selective", "full")


@dataclass(frozen=True)
class Split:
    """`bound` in integer units; the cuts, and per stage the recompute mode and block that fit its memory."""

    bound: int
    cuts: tuple[int, ...]
    settings: tuple[tuple[Recompute, int], ...]


class SplitSearch:
    """(P1)-(P3) for the candidates of one instance."""

    def __init__(self, instance: Instance, tables: CostTables) -> None:
        self.instance, self.tables = instance, tables
        self.kinds = np.array(instance.model.kind_indices)
        self.layers = len(self.kinds)
        self.whole = instance.limits.recompute == "full"
        self._kept_prefixes: dict[tuple[int, int, str], Ints] = {}
        self._saved: dict[tuple[int, int], int] = {}
        wanted = instance.limits.recompute
        modes: Modes = _MODES if wanted is None else (wanted,)  # type: ignore[assignment]
        self.mode_sets: tuple[Modes, ...] = (
            tuple((mode,) for mode in modes) if instance.rules.uniform_recompute else (modes,)
        )

    def prefix(self, per_kind: tuple[float, ...]) -> Ints:
        """Sums over the first 0, 1, ... L layers."""
        out = np.zeros(self.layers + 1, dtype=np.int64)
        np.cumsum(np.asarray(per_kind, dtype=np.int64)[self.kinds], out=out[1:])
        return out

    def best(self, candidate: Candidate, time: TimeCoefficients, limit: int) -> list[Split]:
        """Relaxed splits within `limit` units and memory, so that no plan of the candidate is below the smallest bound.

        With v > 1 every split is there, ascending by bound. With v = 1 one of each recompute mode that improves on the
        modes before it.
        """
        memory = self.tables.memory(candidate.degrees)
        found: list[Split] = []
        splits = self._even_splits(candidate, time, limit) if candidate.degrees.vpp > 1 else None
        for modes in self.mode_sets:
            if candidate.degrees.vpp > 1:
                found += [] if splits is None else self._interleaved(candidate, memory, limit, modes, *splits)
            else:
                split = self._single(candidate, time, memory, limit, modes)
                if split is not None:
                    found.append(split)
                    limit = split.bound - 1
        return sorted(found, key=lambda split: split.bound)

    def _kept(self, memory: MemoryCoefficients, in_flight_count: int, mode: str) -> Ints:
        """Prefix sums of the MiB kept for `in_flight_count` micro-batches; `tables` keeps `memory` alive, so its id."""
        key = (id(memory), in_flight_count, mode)
        if key not in self._kept_prefixes:
            kept = tuple(memory.kept(kind, in_flight_count, mode) for kind in range(len(memory.state)))
            self._kept_prefixes[key] = self.prefix(kept)
        return self._kept_prefixes[key]

    def _single(
        self, candidate: Candidate, time: TimeCoefficients, memory: MemoryCoefficients, limit: int, modes: Modes
    ) -> Split | None:
        """(P1)."""
        p, m, total = candidate.degrees.pp, candidate.micro_batches, self.layers
        most = self._most_layers(time, limit)
        busy, forward, backward = (self.prefix(c) for c in (time.busy, time.forward, time.backward))
        floor, overlap = self.prefix(time.tail_floor), self.prefix(time.tail_overlap)
        state = self.prefix(memory.state)
        hops = (
            np.concatenate(([0], np.cumsum(np.asarray(time.hops, dtype=np.int64)))) if p > 1 else np.zeros(1, np.int64)
        )
        value = np.full(total + 1, INFINITE)
        value[total] = 0
        choices: list[tuple[Ints, Ints, Ints, Ints]] = []
        for k in reversed(range(p)):
            least = 0 if k in (0, p - 1) and p > 1 else 1
            first = np.arange(
                max(k - 1, 0, total - (p - k) * most), min(total - max(p - 2 - max(k - 1, 0), 0), k * most) + 1
            )
            if k == 0:
                first = np.zeros(1, dtype=np.int64)
            size = np.arange(least, most + 1)
            if not len(first) or not len(size):
                return None
            start = first[:, None]
            end = np.minimum(start + size, total)
            flying = in_flight_after_warm_up(p, 1, m, k)[0]
            extra, mode, block = self._stage_recompute(memory, time, state, start, end, flying, k, p, modes)
            work = busy[end] - busy[start] + extra + int(time.transfers[k])
            tail_floor, tail_overlap = floor[end] - floor[start], overlap[end] - overlap[start]
            if k == 0:
                work = work + int(time.embedding_busy)
                tail_floor = tail_floor + int(time.embedding_tail_floor)
                tail_overlap = tail_overlap + int(time.embedding_tail_overlap)
            if k == p - 1:
                work = work + int(time.head_busy)
                tail_floor = tail_floor + int(time.head_tail_floor)
                tail_overlap = tail_overlap + int(time.head_tail_overlap)
            tied = int(time.tied) if p > 1 and k in (0, p - 1) else 0
            tail = np.maximum(tail_floor, tail_overlap) + tied
            before = forward[start] + hops[k] + (int(time.embedding_forward) if k else 0)
            after = backward[start] + hops[k] + (int(time.embedding_backward) if k else 0)
            drained = after + int(time.embedding_tail_floor) + (int(time.tied) if p > 1 else 0)
            cost = int(time.overhead) + before + work + np.maximum(tail, drained if k else tail)
            cost = np.where((extra < INFINITE // 4) & (start + size <= total), cost, INFINITE)
            onward = np.maximum(cost, value[end])
            pick = np.argmin(onward, axis=1)
            rows = np.arange(len(first))
            choices.append((first, size[pick], mode[rows, pick], block[rows, pick]))
            value = np.full(total + 1, INFINITE)
            value[first] = onward[rows, pick]
        bound = int(value[0])
        if bound > limit:
            return None
        cuts, settings, position = [0], [], 0
        for first, size, mode, block in reversed(choices):
            row = int(position - first[0])
            settings.append((_MODES[int(mode[row])], int(block[row])))
            position += int(size[row])
            cuts.append(position)
        return Split(bound, tuple(cuts), tuple(settings))

    def _most_layers(self, time: TimeCoefficients, limit: int) -> int:
        """No stage of a plan within `limit` holds more layers than this."""
        room = limit - int(time.overhead)
        fastest = min(time.busy)
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
    ) -> tuple[Ints, Ints, Ints]:
        """(P3) for one chunk a stage: extra busy time, mode index and recomputed layers of each (start, end)."""
        base = memory.fixed + (memory.embedding if stage == 0 else 0) + (memory.head if stage == stages - 1 else 0)
        none = self._kept(memory, flying, "none")
        held = base + state[end] - state[start]
        spare = memory.capacity - held
        plain = none[end] - none[start]
        extra = np.full(plain.shape, INFINITE // 2)
        mode, block = np.zeros(plain.shape, np.int64), np.zeros(plain.shape, np.int64)
        if "full" in modes:
            full = self._kept(memory, flying, "full")
            saved = none - full
            again = self.prefix(time.busy_full)
            need = np.maximum(plain + memory.working - spare, 0)
            least = 1 if modes == ("full",) else 0
            until = np.maximum(np.searchsorted(saved, saved[start] + need), np.minimum(start + least, end))
            until = np.where((until <= end) & self.whole, end, until)
            reachable = until <= end
            cost = again[np.minimum(until, end)] - again[start]
            extra = np.where(reachable, cost, extra)
            mode = np.where(reachable, 2, mode)
            block = np.where(reachable, np.maximum(until - start, 1), block)
            if least and np.any(start == end):
                empty = (start == end) & (spare >= 0)
                extra, block = np.where(empty, 0, extra), np.where(empty, 1, block)
        if "selective" in modes:
            selective = self._kept(memory, flying, "selective")
            again = self.prefix(time.busy_selective)
            cost = again[end] - again[start]
            better = (selective[end] - selective[start] <= spare) & (cost < extra)
            extra, mode, block = np.where(better, cost, extra), np.where(better, 1, mode), np.where(better, 0, block)
        if "none" in modes:
            plainly = plain <= spare
            extra, mode, block = np.where(plainly, 0, extra), np.where(plainly, 0, mode), np.where(plainly, 0, block)
        return extra, mode, block

    def _even_splits(self, candidate: Candidate, time: TimeCoefficients, limit: int) -> tuple[Ints, _ChunkSums] | None:
        """(P2) The cuts of every even split that is within `limit` without recompute, and their sums."""
        p, v = candidate.degrees.pp, candidate.degrees.vpp
        cuts = even_cuts(self.layers, p, v, self._most_layers(time, limit))
        busy = self.prefix(time.busy)
        cuts = cuts[
            (busy[cuts[:, 1:]] - busy[cuts[:, :-1]]).reshape(-1, v, p).sum(axis=1).max(axis=1, initial=0) <= limit
        ]
        if not len(cuts):
            return None
        sums = _ChunkSums.of(self.prefix, time, cuts, p, v)
        within = sums.value(0) <= limit
        return (cuts[within], sums.rows(within)) if within.any() else None

    def _interleaved(
        self, candidate: Candidate, memory: MemoryCoefficients, limit: int, modes: Modes, cuts: Ints, sums: _ChunkSums
    ) -> list[Split]:
        """(P2) under one set of recompute modes."""
        p, v, time = candidate.degrees.pp, candidate.degrees.vpp, sums.time
        if modes in (("selective",), ("full",)):
            chosen = sums.value(self._least_extra(time, cuts, p, v, modes)) <= limit
            if not chosen.any():
                return []
            cuts, sums = cuts[chosen], sums.rows(chosen)
        if modes == ("full",) and self.instance.rules.uniform_recompute:
            cuts, blocks, value = self._interleaved_block(candidate, memory, sums, cuts, limit)
            mode, block = np.full((len(cuts), p), 2), np.repeat(blocks[:, None], p, axis=1)
        else:
            rows, extra, mode, block = self._interleaved_recompute(candidate, memory, time, cuts, modes)
            cuts, value = cuts[rows], sums.rows(rows).value(extra)
        within = np.nonzero(value <= limit)[0]
        return [
            Split(
                int(value[row]),
                tuple(int(cut) for cut in cuts[row]),
                tuple((_MODES[int(a)], int(b)) for a, b in zip(mode[row], block[row], strict=True)),
            )
            for row in within[np.argsort(value[within], kind="stable")]
        ]

    def _least_extra(self, time: TimeCoefficients, cuts: Ints, p: int, v: int, modes: Modes) -> Ints:
        """Busy time that the only allowed mode adds at least: all attention cores, or one layer of every chunk."""
        again = self.prefix(time.busy_selective if modes == ("selective",) else time.busy_full)
        start, end = cuts[:, :-1], cuts[:, 1:]
        until = end if modes == ("selective",) or self.whole else np.minimum(start + 1, end)
        extra: Ints = (again[until] - again[start]).reshape(-1, v, p).sum(axis=1)
        return extra

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
        for row, count in enumerate(in_flight_after_warm_up(d.pp, d.vpp, candidate.micro_batches, stage)):
            head, plain = self._kept(memory, count, mode), self._kept(memory, count, "none")
            total += head[middle[:, row]] - head[start[:, row]] + plain[end[:, row]] - plain[middle[:, row]]
        return total

    def _most_saved(self, candidate: Candidate, memory: MemoryCoefficients, stage: int) -> int:
        """MiB that full recompute of one more layer of every chunk of the stage frees at most, after the warm-up."""
        d, saved = candidate.degrees, 0
        for count in in_flight_after_warm_up(d.pp, d.vpp, candidate.micro_batches, stage):
            key = (id(memory), count)
            if key not in self._saved:
                freed = np.diff(self._kept(memory, count, "none") - self._kept(memory, count, "full"))
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
        p, v, time = candidate.degrees.pp, candidate.degrees.vpp, sums.time
        states, again, drain = (self.prefix(c) for c in (memory.state, time.busy_full, time.backward_full))
        sizes = np.diff(cuts)
        blocks = np.maximum(sizes.max(axis=1), 1) if self.whole else np.ones(len(cuts), np.int64)
        value = np.zeros(len(cuts), np.int64)
        for k in range(p):
            base = memory.fixed + (memory.embedding if k == 0 else 0) + (memory.head if k == p - 1 else 0)
            start, end = cuts[:, k:-1:p], cuts[:, k + 1 :: p]
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
            extra = (again[until] - again[cuts[:, :-1]]).reshape(-1, v, p).sum(axis=1)
            drained = (drain[until] - drain[cuts[:, :-1]])[:, :p]
            value = sums.value(extra, drained)
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
        again, selective = self.prefix(time.busy_full), self.prefix(time.busy_selective)
        states = self.prefix(memory.state)
        for k in range(p):
            start, end = cuts[:, k:-1:p], cuts[:, k + 1 :: p]
            base = memory.fixed + (memory.embedding if k == 0 else 0) + (memory.head if k == p - 1 else 0)
            spare = memory.capacity - base - (states[end] - states[start]).sum(axis=1)

            def kept(middle: Ints, mode: str, *, start: Ints = start, end: Ints = end, k: int = k) -> Ints:
                return self._kept_by(candidate, memory, k, start, middle, end, mode)

            cost = extra[:, k]
            if "none" in modes:
                cost[kept(end, "none") <= spare] = 0
            if "selective" in modes and not (cost == 0).all():
                added = (selective[end] - selective[start]).sum(axis=1)
                better = (kept(end, "selective") <= spare) & (added < cost)
                cost[better], mode[better, k] = added[better], 1
            if "full" in modes:
                largest = int((end - start).max())
                for size in range(max(largest, 1) if self.whole else 1, max(largest, 1) + 1):
                    undecided = (cost >= INFINITE // 4) | (mode[:, k] == 1)
                    if not undecided.any():
                        break
                    middle = np.minimum(start + size, end)
                    added = (again[middle] - again[start]).sum(axis=1)
                    working = np.where((middle > start).any(axis=1), memory.working, 0)
                    better = undecided & (kept(middle, "full") + working <= spare) & (added < cost)
                    cost[better], mode[better, k] = added[better], 2
                    block[better, k] = np.minimum(size, np.maximum((end - start).max(axis=1), 1))[better]
            alive = cost < INFINITE // 4
            if not alive.all():
                cuts, extra, mode, block, rows = cuts[alive], extra[alive], mode[alive], block[alive], rows[alive]
                if not len(cuts):
                    break
        return rows, extra, mode, block


@dataclass(frozen=True)
class _ChunkSums:
    """Sums of the time coefficients over the chunks of many splits: one row per split."""

    time: TimeCoefficients
    busy: Ints
    forward: Ints
    backward: Ints
    tail: Ints

    @staticmethod
    def of(
        prefix: Callable[[tuple[float, ...]], Ints], time: TimeCoefficients, cuts: Ints, p: int, v: int
    ) -> _ChunkSums:
        """Per stage busy time and tail; per stage the passes of its first chunk."""
        table = np.stack(
            [prefix(c) for c in (time.busy, time.tail_floor, time.tail_overlap, time.forward, time.backward)]
        )
        chunk = np.diff(table[:, cuts])
        busy, floor, overlap = chunk[:3].reshape(3, -1, v, p).sum(axis=2)
        forward, backward = chunk[3, :, :p].copy(), chunk[4, :, :p].copy()
        busy += np.asarray(time.transfers, dtype=np.int64)
        busy[:, 0] += int(time.embedding_busy)
        busy[:, -1] += int(time.head_busy)
        forward[:, 0] += int(time.embedding_forward)
        backward[:, 0] += int(time.embedding_backward)
        floor[:, 0] += int(time.embedding_tail_floor)
        overlap[:, 0] += int(time.embedding_tail_overlap)
        floor[:, -1] += int(time.head_tail_floor)
        overlap[:, -1] += int(time.head_tail_overlap)
        tail = np.maximum(floor, overlap)
        tail[:, [0, -1]] += int(time.tied)
        return _ChunkSums(time, busy, forward, backward, tail)

    def rows(self, chosen: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> _ChunkSums:
        """The sums of some of the splits."""
        return _ChunkSums(self.time, self.busy[chosen], self.forward[chosen], self.backward[chosen], self.tail[chosen])

    def value(self, extra: Ints | int, drained: Ints | int = 0) -> Ints:
        """(T1)-(T5) of each split, with `extra` busy time per stage and `drained` more in the first chunk's backward."""
        hops = np.asarray(self.time.hops, dtype=np.int64)
        ends = self.busy + extra
        ends[:, 1:] += np.cumsum(self.forward[:, :-1] + hops, axis=1)
        # E_j is the latest of A_k plus the drain from k to j: shifted by the drain to stage 0, a running maximum.
        drain = np.zeros_like(ends)
        np.cumsum((self.backward + drained)[:, :-1] + hops, axis=1, out=drain[:, 1:])
        ends = np.maximum.accumulate((ends + drain)[:, ::-1], axis=1)[:, ::-1] - drain
        value: Ints = int(self.time.overhead) + (ends + self.tail).max(axis=1)
        return value


@lru_cache(maxsize=512)
def even_cuts(layers: int, p: int, v: int, most: int) -> Ints:
    """(P2) The cuts of all even chunkings that leave at most `most` layers on a stage; one row each."""
    sizes = even_chunks(layers, p * v, most)
    sizes = sizes[sizes.reshape(-1, v, p).sum(axis=1).max(axis=1, initial=0) <= most]
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
    chunks = [tuple(sizes[k :: d.pp]) for k in range(d.pp)]
    options = [list(split.settings)]
    if instance.rules.uniform_recompute:
        modes = {mode for mode, _ in split.settings}
        mode: Recompute = "full" if "full" in modes else "selective" if "selective" in modes else "none"
        options = [[(mode, 0)] * d.pp]
        if mode == "full":
            largest = max(sizes)
            needed = max(block for _, block in split.settings)
            first = largest if instance.limits.recompute == "full" else min(needed, largest)
            options = [[(mode, block)] * d.pp for block in range(max(first, 1), max(largest, 1) + 1)]
    return [
        Plan(
            d,
            tuple(Stage(part, mode, block) for part, (mode, block) in zip(chunks, option, strict=True)),
            candidate.placement,
            candidate.micro_batches,
        )
        for option in options
    ]
