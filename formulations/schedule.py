"""The order of the passes on every stage, made from (schedule, p, v, m) alone and never from durations.

A pass is (kind, slot, micro-batch); `data.pipeline.Layout` says what a slot holds and where it lies. p stages, v chunks
on each, m micro-batches; a stage that is "a passes ahead" runs a forward passes before its first backward one.

(S1) 1F1B (Narayanan et al., arXiv 2006.09503): stage k is p - k - 1 ahead, then alternates one forward and one backward.
     Eager 1F1B (Zhuang et al., arXiv 2211.05322, section 4): 2 (p - k - 1) ahead, so that transfers have time to pass.
(S2) Interleaved 1F1B (Megatron core/pipeline_parallel/schedules.py, `get_pp_rank_microbatches`): forward passes run in
     groups of p micro-batches per chunk; stage k is min(m v, 2 (p - k - 1) + (v - 1) p) passes ahead. Backward passes
     take the chunks in reverse order.
(S3) GPipe (Huang et al., arXiv 1811.06965): all forward passes, then all backward passes; with v > 1 chunk by chunk
     (breadth-first, Lamy-Poirier, arXiv 2211.05953).
(S4) ZB-H1 (Qi et al., arXiv 2401.10241, section 2): 1F1B with the backward pass split into input gradient and weight
     gradient, which stage k puts off by k micro-batches. ZB-2p (ZB-H2 there): 2 (p - k - 1) ahead, weight gradients put
     off by 2 k.
(S5) ZB-V (Qi et al., arXiv 2405.15362, figure 5): two chunks, chunk p + j on stage p - j - 1, so that a micro-batch
     goes down the stages and comes back up. Order as in torch distributed/pipelining/schedules.py,
     `ScheduleZBVZeroBubble`.
(S6) DualPipe-V ("cut-in-half" of DualPipe; DeepSeek-V3, arXiv 2412.19437, section 3.2.1): the layout of ZB-V; in the
     steady state a forward pass of one chunk stands beside a backward pass of the other. DualPipe itself sends half of
     the micro-batches from each end: every stage holds two chunks of two copies of the network.

In flight is a vector with one entry per chunk of the stage: forward passes whose backward pass (with a split one: whose
weight gradient) has not ended. Memory is linear in it, so the maximal vectors of the order are enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwise.data.pipeline import SPLIT, layout

FORWARD, BACKWARD, INPUT, WEIGHT = 0, 1, 2, 3
"""Kinds of passes; `BACKWARD` is both gradients at once, `INPUT` and `WEIGHT` are its parts."""

DRAINED = frozenset({"1f1b", "eager-1f1b", "interleaved-1f1b", "gpipe"})
"""Schedules whose last pass on each stage is the backward pass of its first chunk."""
UNSYNCHRONISED = frozenset({"zb-h1", "zb-2p", "zb-v"})
"""Schedules whose optimizer does not wait for the other stages (arXiv 2401.10241, section 4)."""

Op = tuple[int, int, int]


@lru_cache(maxsize=256)
def orders(schedule: str, pp: int, vpp: int, micro_batches: int) -> tuple[tuple[Op, ...], ...]:
    """(S1)-(S6) The passes of every stage, in order."""
    return tuple(tuple(_order(schedule, pp, vpp, micro_batches, stage)) for stage in range(pp))


def _order(schedule: str, p: int, v: int, m: int, k: int) -> list[Op]:
    if schedule == "gpipe":
        rows = range(v)
        first = [(FORWARD, row * p + k, i) for row in rows for i in range(m)]
        return first + [(BACKWARD, row * p + k, i) for row in reversed(rows) for i in range(m)]
    if schedule == "zb-v":
        return _zb_v(p, m, k)
    if schedule == "dualpipe-v":
        return _dualpipe_v(p, m, k)
    if schedule == "dualpipe":
        return _dualpipe(p, m, k)
    forward = [(FORWARD, row * p + k, i) for row, i in _grouped(p, v, m)]
    backward = [(BACKWARD, (v - 1 - row) * p + k, i) for row, i in _grouped(p, v, m)]
    ahead = min(ahead_of(schedule, p, v, k), len(forward))
    if schedule in ("zb-h1", "zb-2p"):
        return _delayed(forward, backward, ahead, k if schedule == "zb-h1" else 2 * k)
    out = forward[:ahead]
    for position, op in enumerate(backward):
        out += forward[ahead + position : ahead + position + 1]
        out.append(op)
    return out


@dataclass(frozen=True, slots=True)
class PassesPerStep:
    """The kinds of passes that every slot runs, and for how many micro-batches."""

    kinds: list[int]
    micro_batches: int


def passes_per_step(schedule: str, micro_batches: int) -> PassesPerStep:
    """DualPipe sends half of the micro-batches through each of its two copies."""
    kinds = [FORWARD, INPUT, WEIGHT] if schedule in SPLIT else [FORWARD, BACKWARD]
    return PassesPerStep(kinds, micro_batches // 2 if schedule == "dualpipe" else micro_batches)


def ahead_of(schedule: str, pp: int, vpp: int, stage: int) -> int:
    """(S1), (S2), (S4) How many forward passes a stage is ahead, if there are as many."""
    if vpp > 1:
        return 2 * (pp - stage - 1) + (vpp - 1) * pp
    return (pp - stage - 1) * (2 if schedule in ("eager-1f1b", "zb-2p") else 1)


def _grouped(p: int, v: int, m: int) -> list[tuple[int, int]]:
    """(S2) (row, micro-batch) in groups of p micro-batches per chunk."""
    if v == 1:
        return [(0, i) for i in range(m)]
    return [(row, i) for first in range(0, m, p) for row in range(v) for i in range(first, min(first + p, m))]


def _delayed(forward: list[Op], backward: list[Op], ahead: int, delay: int) -> list[Op]:
    """(S4) Weight gradients put off by `delay` micro-batches, the rest of them at the end."""
    out = forward[:ahead]
    for position, (_, slot, i) in enumerate(backward):
        out += forward[ahead + position : ahead + position + 1]
        out.append((INPUT, slot, i))
        if position >= delay:
            out.append((WEIGHT, slot, i - delay))
    return out + [(WEIGHT, slot, i) for _, slot, i in backward[max(len(backward) - delay, 0) :]]


class _Passes:
    """Issues passes of the two chunks of a stage, row 0 and row 1, each kind in the order of micro-batches."""

    def __init__(self, slots: tuple[int, int], micro_batches: int) -> None:
        self.slots, self.micro_batches = slots, micro_batches
        self.done = {(forward, row): 0 for forward in (True, False) for row in (0, 1)}
        self.out: list[Op] = []
        self.waiting: list[Op] = []

    def run(self, kind: int, row: int) -> bool:
        """The next pass of a kind; whether a micro-batch is left for it. An `INPUT` queues its weight gradient."""
        counter = (kind == FORWARD, row)
        i = self.done[counter]
        self.done[counter] += 1
        if i >= self.micro_batches:
            return False
        self.out.append((kind, self.slots[row], i))
        if kind == INPUT:
            self.waiting.append((WEIGHT, self.slots[row], i))
        return True

    def both(self, row: int) -> None:
        """An input gradient, and its weight gradient at once."""
        if self.run(INPUT, row):
            self.out.append(self.waiting.pop())

    def weight(self, row: int | None = None) -> None:
        """The weight gradient that has waited longest, of a row if one is given."""
        own = [op for op in self.waiting if row is None or op[1] == self.slots[row]]
        if own:
            self.waiting.remove(own[0])
            self.out.append(own[0])


def _zb_v(p: int, m: int, k: int) -> list[Op]:
    """(S5); a table for at least 2 p - 1 micro-batches, less those that are not there."""
    passes, enough = _Passes((k, 2 * p - 1 - k), m), max(2 * p - 1, m)
    done = passes.done
    for _ in range(2 * (p - k) - 1):
        passes.run(FORWARD, 0)
    for _ in range(k):
        passes.run(FORWARD, 1)
        passes.run(FORWARD, 0)
    for _ in range(p - k):
        passes.run(FORWARD, 1)
        passes.both(1)
    while done[True, 1] < done[True, 0] or done[True, 0] < enough:
        if done[True, 0] < enough:
            passes.run(FORWARD, 0)
        passes.both(0)
        passes.run(FORWARD, 1)
        passes.both(1)
    for _ in range(k):
        passes.run(INPUT, 0)
        passes.run(INPUT, 1)
    for _ in range(p - k):
        passes.run(INPUT, 0)
        passes.weight(0)
    for row in (1, 0):
        for _ in range(p):
            passes.weight(row)
    return passes.out


def _dualpipe_v(p: int, m: int, k: int) -> list[Op]:
    """(S6) with the stages folded; m >= 2 p."""
    return _dual(_Passes((k, 2 * p - 1 - k), m), p, k, m - 2 * p + k + 1)


def _dualpipe(p: int, m: int, k: int) -> list[Op]:
    """(S6) with half of the micro-batches from each end; p and m even, m >= 2 p."""
    near, half = min(k, p - 1 - k), p // 2
    slots = (k, 2 * p - 1 - k) if k < half else (2 * p - 1 - k, k)
    return _dual(_Passes(slots, m // 2), half, near, m // 2 - p + near + 1)


def _dual(passes: _Passes, p: int, k: int, steady: int) -> list[Op]:
    """The eight steps of DualPipe on the stage that is k-th of p from the end where row 0 starts."""
    for _ in range(2 * (p - k - 1)):
        passes.run(FORWARD, 0)
    for _ in range(k + 1):
        passes.run(FORWARD, 0)
        passes.run(FORWARD, 1)
    for _ in range(p - k - 1):
        passes.run(INPUT, 1)
        passes.weight()
        passes.run(FORWARD, 1)
    for _ in range(steady):
        passes.run(FORWARD, 0)
        passes.run(BACKWARD, 1)
        passes.run(FORWARD, 1)
        passes.run(BACKWARD, 0)
    for _ in range(p - k - 1):
        passes.run(BACKWARD, 1)
        passes.run(FORWARD, 1)
        passes.run(BACKWARD, 0)
    split = False
    for step in range(k + 1):
        split = split or (step == (k + 1) // 2 and k % 2 == 1)
        passes.run(INPUT if split else BACKWARD, 1)
        split = split or (step == (k + 1) // 2 and k % 2 == 0)
        passes.run(INPUT if split else BACKWARD, 0)
    for _ in range(p - k - 1):
        passes.weight()
        passes.run(INPUT, 0)
    while passes.waiting:
        passes.weight()
    return passes.out


@lru_cache(maxsize=65536)
def in_flight(pp: int, vpp: int, micro_batches: int, stage: int, schedule: str = "") -> tuple[tuple[int, ...], ...]:
    """Maximal vectors of micro-batches in flight per chunk of `stage`, of (interleaved) 1F1B if no schedule is named."""
    if schedule == "gpipe":
        return ((micro_batches,) * vpp,)
    if schedule in SPLIT:
        # One micro-batch more than four for each stage adds a period to the steady state and nothing to its peak.
        few = min(micro_batches, 4 * pp + micro_batches % 2)
        return _maximal(_moments(orders(schedule, pp, vpp, few)[stage], layout(schedule, pp, vpp).slots_of(stage)))
    if vpp > 1 and micro_batches % pp:
        order = orders("interleaved-1f1b", pp, vpp, micro_batches)[stage]
        return _maximal(_moments(order, layout("interleaved-1f1b", pp, vpp).slots_of(stage)))
    ahead = min(micro_batches * vpp, ahead_of(schedule, pp, vpp, stage))
    if vpp == 1:
        return ((min(micro_batches, ahead + 1),),)
    total = micro_batches * vpp
    counts = _counts(ahead, pp, vpp)
    seen = {tuple(counts)}
    # The order repeats every pp * vpp passes; one period after the warm-up shows every moment of the steady state.
    for position in range(ahead, min(total, ahead + 2 * pp * vpp)):
        counts[_chunk(position, pp, vpp)] += 1
        seen.add(tuple(counts))
        counts[vpp - 1 - _chunk(position - ahead, pp, vpp)] -= 1
    return _maximal(seen)


@lru_cache(maxsize=65536)
def in_flight_once(pp: int, vpp: int, micro_batches: int, stage: int, schedule: str = "") -> tuple[int, ...]:
    """The vector at one moment, quickly: with (S2) after the warm-up and the first forward pass that follows."""
    if vpp == 1 or schedule in SPLIT or schedule == "gpipe" or micro_batches % pp:
        return in_flight(pp, vpp, micro_batches, stage, schedule)[0]
    total = micro_batches * vpp
    return tuple(_counts(min(total, ahead_of(schedule, pp, vpp, stage) + 1), pp, vpp))


def _moments(order: tuple[Op, ...], slots: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The vectors after every pass of a stage."""
    counts, seen = dict.fromkeys(slots, 0), set()
    for kind, slot, _ in order:
        counts[slot] += {FORWARD: 1, BACKWARD: -1, INPUT: 0, WEIGHT: -1}[kind]
        seen.add(tuple(counts.values()))
    return seen


def _maximal(seen: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    vectors = sorted(seen)
    table = np.array(vectors)
    return tuple(own for own, row in zip(vectors, table, strict=True) if (table >= row).all(axis=1).sum() == 1)


def _counts(passes: int, pp: int, vpp: int) -> list[int]:
    """How many of the first `passes` forward passes work on each chunk."""
    rounds, left = divmod(passes, pp * vpp)
    return [rounds * pp + min(max(left - chunk * pp, 0), pp) for chunk in range(vpp)]


def _chunk(position: int, pp: int, vpp: int) -> int:
    """The chunk that the `position`-th pass of a stage works on."""
    return position // pp % vpp
