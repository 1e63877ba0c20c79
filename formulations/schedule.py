"""Micro-batches in flight on each stage, read off the op order of the schedule.

(S1) 1F1B (Narayanan et al., arXiv 2006.09503): stage k of p runs p - k - 1 forward passes ahead, so at most
     min(m, p - k) micro-batches are in flight.
(S2) Interleaved 1F1B (Megatron core/pipeline_parallel/schedules.py, `get_pp_rank_microbatches`): forward passes run in
     groups of p micro-batches per chunk; stage k is min(m v, 2 (p - k - 1) + (v - 1) p) passes ahead, then alternates
     one forward and one backward. Backward passes take the chunks in reverse order.

(S3) GPipe keeps all m micro-batches. ZB-H1 keeps as many as 1F1B; ZB-2p 2 p - 1 on every stage, since weight gradients
     wait; ZB-V puts two chunks on each stage and keeps p micro-batches' worth everywhere (Qi et al., arXiv 2401.10241,
     section 2; arXiv 2405.15362, table 1).

In flight is a vector with one entry per chunk of the stage. Memory is linear in it, so the maximal vectors of the order
are enough: every other moment needs no more.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=65536)
def in_flight(pp: int, vpp: int, micro_batches: int, stage: int, schedule: str = "1f1b") -> tuple[tuple[int, ...], ...]:
    """(S1)-(S3) Maximal vectors of micro-batches in flight per chunk of `stage`."""
    if schedule == "gpipe":
        return ((micro_batches,) * vpp,)
    if schedule == "zb-2p":
        return ((min(micro_batches, 2 * pp - 1),) * vpp,)
    if schedule == "zb-v":
        return ((min(micro_batches, pp),) * vpp,)
    if vpp == 1:
        return ((min(micro_batches, pp - stage),),)
    total, ahead = _passes(pp, vpp, micro_batches, stage)
    counts = _counts(ahead, pp, vpp)
    seen = {tuple(counts)}
    # The order repeats every pp * vpp passes; one period after the warm-up shows every moment of the steady state.
    for position in range(ahead, min(total, ahead + 2 * pp * vpp)):
        counts[_chunk(position, pp, vpp)] += 1
        seen.add(tuple(counts))
        counts[vpp - 1 - _chunk(position - ahead, pp, vpp)] -= 1
    return tuple(
        sorted(a for a in seen if not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for b in seen))
    )


@lru_cache(maxsize=65536)
def in_flight_after_warm_up(pp: int, vpp: int, micro_batches: int, stage: int) -> tuple[int, ...]:
    """(S1), (S2) The vector after the warm-up and the first forward pass that follows: one moment, quickly."""
    if vpp == 1:
        return (min(micro_batches, pp - stage),)
    total, ahead = _passes(pp, vpp, micro_batches, stage)
    return tuple(_counts(min(total, ahead + 1), pp, vpp))


def _passes(pp: int, vpp: int, micro_batches: int, stage: int) -> tuple[int, int]:
    """Forward passes of `stage` in a step, and how many of them come before its first backward pass alternates."""
    total = micro_batches * vpp
    return total, min(total, 2 * (pp - stage - 1) + (vpp - 1) * pp)


def _counts(passes: int, pp: int, vpp: int) -> list[int]:
    """How many of the first `passes` forward passes work on each chunk."""
    rounds, left = divmod(passes, pp * vpp)
    return [rounds * pp + min(max(left - chunk * pp, 0), pp) for chunk in range(vpp)]


def _chunk(position: int, pp: int, vpp: int) -> int:
    """The chunk that the `position`-th pass of a stage works on."""
    return position // pp % vpp
