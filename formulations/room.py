"""Whether the layers of a candidate have room at all, whatever the step takes: memory of (F2) alone, in MiB. That of the
host (U2) is not looked at.

The least that a stage needs for layers a .. b - 1 is, over the recompute modes that it may have,

    fixed + ends + sum over its layers of (state + kept in that mode)  + what repeating one of them needs,

all layers of a stage repeated where it is full, since every layer that is not keeps more; "none" keeps no less than
attention cores alone, which need nothing, and is looked at only without them. With one mode for all stages the modes are
tried one by one.

(R1) v = 1. The layers before stage k can be those that some split of the stages before it reaches; from each of them
     stage k reaches every end up to the last that fits. Some split fits if and only if the last stage reaches L.
(R2) v > 1. Even chunks leave two numbers to choose (P2); of all pairs those are kept that fit stage after stage, at one
     moment of the schedule. A candidate without such a pair has no plan; one with such a pair may have one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.data.pipeline import FOLDED
from shardwise.data.plan import Placement
from shardwise.data.recompute import CORE
from shardwise.formulations.candidates import Candidate
from shardwise.formulations.schedule import in_flight_once
from shardwise.formulations.splits import even_cuts

if TYPE_CHECKING:
    from shardwise.formulations.candidates import Grid
    from shardwise.formulations.coefficients import MemoryCoefficients
    from shardwise.formulations.splits import SplitSearch

Ints = npt.NDArray[np.int64]
NOWHERE = Placement((1,), (1,), (1,), cp=(1,))
"""Memory does not depend on the placement."""


def candidate_of(grid: Grid, row: int) -> Candidate:
    """A row of a grid without a placement."""
    return Candidate(grid.degrees(row), NOWHERE, int(grid.micro_batches[row]), grid.shape.schedule)


class Room:
    """(R1), (R2) of the candidates of one instance, remembered by what their memory depends on."""

    def __init__(self, splits: SplitSearch) -> None:
        self.splits = splits
        modes = [
            tuple(mode for mode in own if mode != "none" or CORE not in splits.all_modes) for own in splits.mode_sets
        ]
        self.mode_sets = [own for own in modes if own] or splits.mode_sets
        self.known: dict[tuple[object, ...], bool] = {}

    def rows(self, grid: Grid) -> npt.NDArray[np.bool_]:
        """Which rows of a grid have room, those of (R2) with the least of their replicas."""
        return np.array([self.holds(candidate_of(grid, row)) for row in range(len(grid))], dtype=bool)

    def holds(self, candidate: Candidate) -> bool:
        """False where no plan of the candidate fits; with v = 1, True where one fits its devices."""
        d, m = candidate.degrees, candidate.micro_batches
        memory = self.splits.tables.memory(d, candidate.schedule)
        # GPipe alone has more in flight than all its chunks twice and a pipeline (S2)
        flying = (m, 0) if candidate.schedule == "gpipe" else (min(m, 2 * d.virtual_stages + d.pp), m % d.pp)
        key = (id(memory), d.pp, d.vpp, candidate.schedule, flying)
        if key not in self.known:
            check = self._contiguous if d.vpp == 1 else self._even
            self.known[key] = any(check(candidate, memory, modes) for modes in self.mode_sets)
        return self.known[key]

    def _contiguous(self, candidate: Candidate, memory: MemoryCoefficients, modes: tuple[str, ...]) -> bool:
        """(R1)."""
        p, m, layers = candidate.degrees.pp, candidate.micro_batches, self.splits.layers
        state, starts = self.splits.prefix(memory.state), np.arange(layers + 1)
        reached = starts == 0
        for k in range(p):
            least = 0 if k in (0, p - 1) and p > 1 else 1
            (flying,) = in_flight_once(p, 1, m, k, candidate.schedule)
            spare = memory.capacity - memory.fixed
            spare -= (memory.embedding if k == 0 else 0) + (memory.head if k == p - 1 else 0)
            if spare < 0:
                return False
            last = np.full(layers + 1, -1) if least else starts.copy()
            for mode in modes:
                held = state + self.splits.kept(memory, flying, mode)
                room = spare - memory.needed(mode)
                last = np.maximum(last, np.searchsorted(held, held + room, side="right") - 1)
            first = starts + least
            open_at = reached & (last >= first)
            opened = np.bincount(first[open_at], minlength=layers + 2)
            closed = np.bincount(last[open_at] + 1, minlength=layers + 2)
            reached = np.cumsum(opened - closed)[: layers + 1] > 0
            if not reached.any():
                return False
        return bool(reached[layers])

    def _even(self, candidate: Candidate, memory: MemoryCoefficients, modes: tuple[str, ...]) -> bool:
        """(R2)."""
        if not self.splits.instance.rules.even_chunks:
            return True
        d, layers = candidate.degrees, self.splits.layers
        cuts = even_cuts(layers, d.pp, d.vpp, layers, folded=candidate.schedule in FOLDED)
        state, last_chunk = self.splits.prefix(memory.state), d.virtual_stages - 1
        for k in range(d.pp):
            chunks = list(candidate.layout.chunks_of(k))
            start, end = cuts[:, chunks], cuts[:, np.array(chunks) + 1]
            flying = in_flight_once(d.pp, d.vpp, candidate.micro_batches, k, candidate.schedule)
            spare = memory.capacity - memory.fixed - (state[end] - state[start]).sum(axis=1)
            spare -= memory.embedding * (0 in chunks) + memory.head * (last_chunk in chunks)
            fits = np.zeros(len(cuts), dtype=bool)
            for mode in modes:
                need = np.where((end > start).any(axis=1), memory.needed(mode), 0)
                for row, count in enumerate(flying):
                    kept = self.splits.kept(memory, count, mode)
                    need = need + kept[end[:, row]] - kept[start[:, row]]
                fits |= need <= spare
            cuts = cuts[fits]
            if not len(cuts):
                return False
        return True
