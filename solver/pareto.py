"""The front of step time against energy or cost, by the epsilon-constraint method.

Sets of plans are ordered by step time T and by the other value E (Haimes, Lasdon & Wismer, IEEE Trans. SMC 1, 1971):

(Y1) the slowest point is the plan of least E at all; each further one the plan of least E among those that are faster than
     the last point by more than `step`, until the fastest plan is reached. Every point carries the bound of its own solve:
     no plan that lasts no longer than its deadline has less E.
(Y2) with step = 0 every non-dominated value is met, but for ties in E; with more, only those that far apart.
(Y3) a point that another one beats in both values, or equals in one and beats in the other, is left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.data.faults import InputError
from shardwise.solver.solve import solve

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.data.instance import Instance
    from shardwise.solver.result import Progress, Result

AGAINST = ("energy", "cost")
STEP = 0.02
LEAST_STEP = 1e-6
"""Faster than a point means by at least this, so that rounding does not meet it again."""
MOST_POINTS = 200


@dataclass(frozen=True, slots=True)
class Point:
    """A plan of least E among those of at most `deadline_s` seconds a step; `result` has its value, bound and gap."""

    deadline_s: float
    result: Result

    @property
    def step_time_s(self) -> float:
        assert self.result.evaluation is not None
        return self.result.evaluation.step_time_s

    @property
    def value(self) -> float:
        assert self.result.value is not None
        return self.result.value

    def beaten_by(self, other: Point) -> bool:
        """(Y3)."""
        no_worse = other.step_time_s <= self.step_time_s and other.value <= self.value
        return no_worse and (other.step_time_s, other.value) != (self.step_time_s, self.value)


@dataclass(frozen=True, slots=True)
class Front:
    """Points from the fastest on; `complete` where no deadline between the first and the last was left out."""

    objective: str
    unit: str
    step: float
    points: tuple[Point, ...]
    fastest: Result
    complete: bool

    def to_dict(self) -> dict[str, Any]:
        """The document that `plan --pareto --json` adds."""
        return {
            "objective": self.objective,
            "unit": self.unit,
            "step": self.step,
            "complete": self.complete,
            "points": [
                {
                    "step_time_s": point.step_time_s,
                    "value": point.value,
                    "bound": point.result.bound,
                    "gap": point.result.gap,
                    "status": point.result.status,
                    "deadline_s": point.deadline_s,
                    "plan": None if point.result.plan is None else point.result.plan.to_dict(),
                }
                for point in self.points
            ],
        }


def pareto_front(
    instance: Instance,
    against: str,
    *,
    step: float = STEP,
    price: float | None = None,
    deadline_s: float | None = None,
    time_limit_s: float | None = None,
    workers: int | None = None,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> Front:
    """(Y1)-(Y3) of an instance.

    Parameters
    ----------
    against
        "energy" or "cost".
    step
        Points are at least this share of their step time apart; 0 for all of them.
    time_limit_s
        For the whole front; `complete` says whether it was enough.

    Raises
    ------
    InputError
        With every fault of the input.
    """
    faults = [] if against in AGAINST else [f"pareto={against!r} must be one of {', '.join(AGAINST)}"]
    if not 0 <= step < 1:
        faults.append(f"step={step} must be at least 0 and less than 1")
    if faults:
        raise InputError(faults)
    ends = None if time_limit_s is None else time.monotonic() + time_limit_s

    def best(objective: str, longest_s: float | None) -> Result:
        left = None if ends is None else max(ends - time.monotonic(), 1e-3)
        return solve(
            instance=instance,
            objective=objective,
            price=price,
            deadline_s=longest_s,
            time_limit_s=left,
            workers=workers,
            seed=seed,
            top=0,
            on_progress=on_progress,
        )

    fastest = best("step-time", deadline_s)
    points: list[Point] = []
    complete = fastest.status == "OPTIMAL"
    longest_s = deadline_s
    while fastest.evaluation is not None and len(points) < MOST_POINTS:
        result = best(against, longest_s)
        if result.evaluation is None:
            complete = complete and result.status == "INFEASIBLE"
            break
        complete = complete and result.status == "OPTIMAL"
        points.append(Point(float("inf") if longest_s is None else longest_s, result))
        longest_s = result.evaluation.step_time_s * (1 - max(step, LEAST_STEP))
        if longest_s < fastest.evaluation.step_time_s:
            break
    if points and fastest.evaluation is not None and points[-1].step_time_s > fastest.evaluation.step_time_s:
        nearest_s = fastest.evaluation.step_time_s * (1 + LEAST_STEP)
        last = best(against, nearest_s)
        complete = complete and last.status == "OPTIMAL"
        if last.evaluation is not None:
            points.append(Point(nearest_s, last))
    kept = [point for point in points if not any(point.beaten_by(other) for other in points)]
    unit = points[0].result.unit if points else ""
    front = tuple(sorted(kept, key=lambda point: point.step_time_s))
    return Front(against, unit, step, front, fastest, complete and len(points) < MOST_POINTS)
