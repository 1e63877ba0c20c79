"""A pipeline step event by event, in plain Python: stages take their passes in order, each as soon as its input is there.

Order and durations of the passes are those of the plan; when each starts and ends is worked out here alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.formulations.schedule import BACKWARD, FORWARD, INPUT, orders
from shardwise.solver.evaluate import timed_plan

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan

Pass = tuple[int, int, int]
"""Kind, slot and micro-batch."""


def simulated_passes(instance: Instance, plan: Plan) -> dict[Pass, tuple[float, float]]:
    """Start and end of every pass, seconds."""
    timed, where = timed_plan(instance, plan), plan.layout
    lags = [*timed.passes.lags.tolist(), 0.0]
    queues = [list(order) for order in orders(plan.schedule, plan.degrees.pp, plan.degrees.vpp, plan.micro_batches)]
    firsts, lasts = {run[0] for run in where.directions}, {run[-1] for run in where.directions}
    done: dict[Pass, tuple[float, float]] = {}
    clock = [0.0] * plan.degrees.pp
    while any(queues):
        moved = False
        for stage, queue in enumerate(queues):
            while queue:
                kind, slot, i = queue[0]
                ready = clock[stage]
                if kind == FORWARD and slot not in firsts:
                    sent, link = done.get((FORWARD, slot - 1, i)), where.hop_before[slot]
                elif kind in (BACKWARD, INPUT) and slot not in lasts:
                    sent = done.get((BACKWARD, slot + 1, i), done.get((INPUT, slot + 1, i)))
                    link = where.hop_before[slot + 1]
                else:
                    sent, link = (0.0, 0.0), -1
                if sent is None:
                    break
                start = max(ready, sent[1] + lags[link])
                clock[stage] = start + float(timed.passes.durations[kind, slot])
                done[kind, slot, i] = start, clock[stage]
                queue.pop(0)
                moved = True
        assert moved, "the schedule is stuck"
    return done


def simulated_step_s(instance: Instance, plan: Plan) -> float:
    """The step of a plan: until its last stage has ended, or, where stages do not wait for each other before the
    optimizer, the longest time that a stage is at work."""
    timed, where = timed_plan(instance, plan), plan.layout
    passes = simulated_passes(instance, plan)
    spans = []
    for stage in range(plan.degrees.pp):
        own = [times for (_, slot, _), times in passes.items() if where.stage[slot] == stage]
        start = min(times[0] for times in own) if plan.schedule in ("zb-h1", "zb-2p", "zb-v") else 0.0
        spans.append(max(times[1] for times in own) - start + float(timed.passes.tails[stage]))
    return max(spans) + float(timed.coefficients.overhead)
