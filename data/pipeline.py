"""Schedules by name, and where the chunks of a pipeline lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

Schedule = Literal[
    "1f1b", "eager-1f1b", "interleaved-1f1b", "gpipe", "zb-h1", "zb-2p", "zb-v", "dualpipe-v", "dualpipe"
]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

SPLIT = frozenset({"zb-h1", "zb-2p", "zb-v", "dualpipe-v", "dualpipe"})
"""Schedules that compute weight gradients apart from input gradients."""
FOLDED = frozenset({"zb-v", "dualpipe-v", "dualpipe"})
"""Schedules whose second half of slots lies on the stages in reverse order."""


@dataclass(frozen=True)
class Layout:
    """Where the slots of a pipeline lie.

    stage, chunk
        Per slot: its stage, and the chunk of the network that it holds.
    hop_before
        Per slot: the link that its input arrives by, j between stages j and j + 1, p - 1 from the last to the first,
        or -1 where it needs none.
    directions
        Runs of slots that a micro-batch passes; more than one where the network lies on the stages twice.
    """

    stage: tuple[int, ...]
    chunk: tuple[int, ...]
    hop_before: tuple[int, ...]
    directions: tuple[range, ...]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Per chunk of the network: its stage, and the how-manieth of that stage's chunks it is."""
        found: dict[int, tuple[int, int]] = {}
        for chunk, stage in zip(self.chunk, self.stage, strict=True):
            found.setdefault(chunk, (stage, sum(own == stage for own, _ in found.values())))
        return tuple(found.values())

    def slots_of(self, stage: int) -> tuple[int, ...]:
        """Slots of a stage, in network order."""
        return tuple(slot for slot, own in enumerate(self.stage) if own == stage)

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Chunks of the network on a stage, one per slot."""
        return tuple(chunk for chunk, own in zip(self.chunk, self.stage, strict=True) if own == stage)


@lru_cache(maxsize=4096)
def layout(schedule: str, pp: int, vpp: int) -> Layout:
    """Where chunk s of `pp` x `vpp` lies: stage s mod p, or down and up again."""
    if schedule == "dualpipe":
        stage = (*range(pp), *reversed(range(pp)))
        return Layout(stage, (*range(pp), *range(pp)), _hops(stage, pp, (0, pp)), (range(pp), range(pp, 2 * pp)))
    stage = (*range(pp), *reversed(range(pp))) if schedule in FOLDED else tuple(range(pp)) * vpp
    slots = range(len(stage))
    return Layout(stage, tuple(slots), _hops(stage, pp, (0,)), (slots,))


def _hops(stage: tuple[int, ...], pp: int, first: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for slot, own in enumerate(stage):
        before = stage[slot - 1]
        if slot in first or own == before:
            out.append(-1)
        else:
            out.append(min(own, before) if abs(own - before) == 1 else pp - 1)
    return tuple(out)


def chunks_faults(schedule: str, vpp: int) -> list[str]:
    """Whether a schedule runs `vpp` chunks a stage."""
    if schedule == "gpipe":
        return []
    needed = {"interleaved-1f1b": "vpp of at least 2", "zb-v": "vpp=2", "dualpipe-v": "vpp=2"}.get(schedule, "vpp=1")
    right = vpp >= 2 if schedule == "interleaved-1f1b" else vpp == (2 if needed == "vpp=2" else 1)
    return [] if right else [f"schedule={schedule} needs {needed}, not vpp={vpp}"]


def micro_batch_faults(schedule: str, pp: int, micro_batches: int) -> list[str]:
    """DualPipe runs at least two micro-batches for each stage; with both ends fed, an even number on an even number of
    stages (deepseek-ai/DualPipe dualpipe/dualpipe.py, `step`)."""
    faults = []
    if schedule in ("dualpipe", "dualpipe-v") and micro_batches < 2 * pp:
        faults.append(f"schedule={schedule} needs micro_batches={micro_batches} to be at least 2 x pp={pp}")
    if schedule == "dualpipe" and (micro_batches % 2 or pp % 2):
        faults.append(f"schedule=dualpipe needs even numbers of stages and micro-batches, not {pp} and {micro_batches}")
    return faults


def schedules_of(pp: int, vpp: int) -> tuple[Schedule, ...]:
    """The schedules that a pipeline of `pp` stages with `vpp` chunks can have; a single stage has one."""
    if pp == 1:
        return ("1f1b",) if vpp == 1 else ()
    return tuple(name for name in SCHEDULES if not chunks_faults(name, vpp))
