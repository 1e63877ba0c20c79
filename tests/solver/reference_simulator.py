"""A pipeline step event by event, in plain Python: stages take their passes in order, each as soon as its input is there.

The order of the passes is that of `schedule.orders`, which the formulas of the papers check; layout, dependencies, links
and times are worked out here alone.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from shardwise.data.pipeline import FOLDED
from shardwise.formulations.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Op, orders
from shardwise.solver.evaluate import timed_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan

Event = tuple[int, int, int, int]
"""Stage, kind, slot, micro-batch."""


def stage_of(schedule: str, pp: int, slot: int) -> int:
    """Chunks lie on the stages in turn, or go down and come up again; the second copy of DualPipe comes from below."""
    if schedule in FOLDED:
        return slot if slot < pp else 2 * pp - 1 - slot
    return slot % pp


def reference(
    schedule: str, pp: int, vpp: int, micro_batches: int, duration: Callable[[int, int], float], lags: list[float]
) -> dict[Event, tuple[float, float]]:
    """Start and end of every pass: stages take their passes in order, each when its input has come. One event at a time."""
    tables = orders(schedule, pp, vpp, micro_batches)
    slots = 2 * pp if schedule in FOLDED else pp * vpp
    copies = 2 if schedule == "dualpipe" else 1
    length = slots // copies
    split = {(slot, i) for table in tables for kind, slot, i in table if kind == INPUT}

    def needs(op: Op) -> Op | None:
        kind, slot, i = op
        if kind == FORWARD:
            return (FORWARD, slot - 1, i) if slot % length else None
        if kind == WEIGHT or slot % length == length - 1:
            return None
        return (INPUT if (slot + 1, i) in split else BACKWARD, slot + 1, i)

    def lag(a: int, b: int) -> float:
        return 0.0 if a == b else lags[min(a, b)] if abs(a - b) == 1 else lags[pp - 1]

    out: dict[Event, tuple[float, float]] = {}
    ended: dict[Op, float] = {}
    position, free = [0] * pp, [0.0] * pp
    events: list[tuple[float, int, int, Op | None]] = [(0.0, -1, k, None) for k in range(pp)]
    while events:
        now, _, k, done = heappop(events)
        if done is not None:
            ended[done] = now
        # What ended may let any stage go on: its own, or one that waits for the transfer.
        for stage in range(pp) if done is not None else (k,):
            while position[stage] < len(tables[stage]):
                op = tables[stage][position[stage]]
                source = needs(op)
                if source is not None and source not in ended:
                    break
                if op[0] == WEIGHT:
                    assert any(e[1:] == (INPUT, *op[1:]) for e in out), "a weight gradient before its input gradient"
                arrived = 0.0 if source is None else ended[source] + lag(stage_of(schedule, pp, source[1]), stage)
                start = max(free[stage], arrived)
                end = start + duration(op[0], op[1])
                out[(stage, *op)] = (start, end)
                free[stage] = end
                position[stage] += 1
                heappush(events, (end, len(out), stage, op))
    assert position == [len(table) for table in tables]
    return out


def simulated_step_s(instance: Instance, plan: Plan) -> float:
    """The step of a plan: until its last stage has ended, or, where stages do not wait for each other before the
    optimizer, the longest time that a stage is at work."""
    timed, d = timed_plan(instance, plan), plan.degrees

    def duration(kind: int, slot: int) -> float:
        return float(timed.passes.durations[kind, slot])

    passes = reference(plan.schedule, d.pp, d.vpp, plan.micro_batches, duration, timed.passes.lags.tolist())
    spans = []
    for stage in range(d.pp):
        own = [times for event, times in passes.items() if event[0] == stage]
        start = min(times[0] for times in own) if plan.schedule in ("zb-h1", "zb-2p", "zb-v") else 0.0
        spans.append(max(times[1] for times in own) - start + float(timed.passes.tails[stage]))
    return max(spans) + float(timed.coefficients.overhead)
