"""How far the layers of a candidate reach, stage by stage, within a step: an answer without a dynamic program.

With one chunk a stage, one recompute mode for all and s layers before stage k, the stage takes the layers s .. e - 1 in the
time and memory of (P1), (P3), which rise with e, so the furthest e is found by bisection.

(W1) Where a layer more in the stage is never quicker than one more before it, for every kind with passes F, B, tail
     O = `tail_overlap` and m micro-batches

         m (F + B) >= F + max(B, -O),

     the layers s + 1 .. e - 1 are no slower than s .. e - 1; they need no more memory in any case. With the first b
     layers of every stage repeated the window of what is repeated moves on: from the left comes m (R - max R) more, R
     what the kind repeats; and a layer keeps no more when it is repeated.
(W2) Then no split has more layers on the stages up to k than taking the furthest e on each of them, by induction: what a
     stage reaches from fewer layers it reaches from more. No split is within the step where the last stage does not
     reach L. Where (W1) does not hold nothing is said. The share of (P1) that repeated layers have in the drain is left
     out, so the dynamic program may still find nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from shardwise.formulations.schedule import DRAINED, UNSYNCHRONISED, in_flight_once

if TYPE_CHECKING:
    from shardwise.formulations.candidates import Candidate
    from shardwise.formulations.coefficients import MemoryCoefficients, TimeCoefficients
    from shardwise.formulations.splits import SplitSearch


class Reach:
    """(W1), (W2) of one candidate with one chunk a stage and the units that its step may last."""

    def __init__(
        self, splits: SplitSearch, candidate: Candidate, time: TimeCoefficients, memory: MemoryCoefficients, limit: int
    ) -> None:
        self.splits, self.candidate, self.time, self.memory, self.limit = splits, candidate, time, memory, limit
        self.m = candidate.micro_batches
        sets = splits.tables.sets
        again = (time.full, *map(time.of_set, range(len(sets))))
        table = np.array((time.forward, time.backward, time.tail_floor, time.tail_overlap, *again), np.int64)[:, :-2]
        forward, backward, _, overlap, full = table[:5]
        self._margin = self.m * (forward + backward) - forward - np.maximum(backward, np.maximum(-overlap, 0))
        self._steady = bool((self._margin >= 0).all())
        self._steady_block = bool((self._margin >= self.m * (full.max() - full)).all()) and all(
            kept.full <= kept.none for kept in memory.activations
        )
        self._sums = np.zeros((len(table), splits.layers + 1), np.int64)
        np.cumsum(table[:, splits.kinds], axis=1, out=self._sums[:, 1:])
        self._again = dict(zip(("full", *sets), self._sums[4:], strict=True))
        self._busy: dict[str, tuple[list[int], list[int], list[int]]] = {}

    def all_layers(self, mode: str, block: int = 0) -> bool:
        """Whether every layer may find a place; with mode "full" each stage repeats `block` layers."""
        if not (self._steady_block if block else self._steady):
            return True
        splits, candidate, time, memory = self.splits, self.candidate, self.time, self.memory
        p, m, layers = candidate.degrees.pp, self.m, splits.layers
        fills, drains = candidate.schedule not in UNSYNCHRONISED, candidate.schedule in DRAINED
        busy, repeated = self._seconds("none" if block else mode), self._seconds("full") if block else None
        forward, backward, again = (self._sums[row].tolist() for row in (0, 1, 4))
        sends, lags = ([0, *values[: p - 1], 0] for values in (time.sends, time.lags))
        tied, fill, drain, reached = int(time.tied) if p > 1 else 0, 0, 0, 0
        for k in range(p):
            units = [unit for unit, stage in ((-2, 0), (-1, p - 1)) if k == stage]
            room = self.limit - int(time.overhead) - m * (sends[k] + sends[k + 1])
            room -= m * sum(time.forward[unit] + time.backward[unit] for unit in units)
            drained = 0
            if k:
                fill, drain = fill + sends[k] + lags[k], drain + sends[k - 1] + lags[k]
                room -= forward[reached] + time.forward[-2] + fill if fills else 0
                drained = backward[reached] + time.backward[-2] + drain + time.tail_floor[-2] + tied if drains else 0
            own = tied if units else 0
            tails = (
                sum(time.tail_floor[unit] for unit in units) + own,
                sum(time.tail_overlap[unit] for unit in units) + own,
                drained,
            )
            until = min(reached + block, layers)
            extra = m * (again[until] - again[reached])
            ends = []
            for row, tail in enumerate(tails):
                end = bisect_right(busy[row], busy[row][reached] + room - tail - extra) - 1
                if repeated is not None and end < until:
                    end = bisect_right(repeated[row], repeated[row][reached] + room - tail) - 1
                ends.append(end)
            spare = memory.capacity - memory.fixed
            spare -= (memory.embedding if k == 0 else 0) + (memory.head if k == p - 1 else 0)
            (flying,) = in_flight_once(p, 1, m, k, candidate.schedule)
            ends.append(self._fitting(flying, spare, reached, until, "none" if block else mode))
            if k == p - 1:
                return min(ends) >= layers
            reached = max(reached, min(*ends, layers - (p - 2 - k)))
        raise AssertionError

    def _seconds(self, mode: str) -> tuple[list[int], list[int], list[int]]:
        """Sums over layers of the busy time with the floor tail, with the other one, and alone."""
        if mode not in self._busy:
            forward, backward, floor, overlap = self._sums[:4]
            busy = self.m * (forward + backward + self._again.get(mode, 0))
            self._busy[mode] = ((busy + floor).tolist(), (busy + overlap).tolist(), busy.tolist())
        return self._busy[mode]

    def _fitting(self, flying: int, spare: int, start: int, until: int, mode: str) -> int:
        """The last end that fits from `start` on, the layers before `until` repeated in full."""
        held = self.splits.held(self.memory, flying, mode)
        if until == start:
            return bisect_right(held, held[start] + spare) - 1
        full, room = self.splits.held(self.memory, flying, "full"), spare - self.memory.working
        end = bisect_right(held, held[until] + room - full[until] + full[start]) - 1
        return end if end >= until else bisect_right(full, full[start] + room) - 1
