"""What a solve returns."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from shardwise.data.plan import Degrees, Plan
    from shardwise.solver.evaluate import Evaluation
    from shardwise.solver.robust import Robustness

Status = Literal["OPTIMAL", "FEASIBLE", "INFEASIBLE", "UNKNOWN"]


@dataclass(frozen=True, slots=True)
class Progress:
    """One report of a running solve. Value of the best plan and bound are in `unit`, that of the objective, or seconds of a
    step where it is the number of devices; `gap` is relative; `open` counts candidates neither pruned nor closed."""

    phase: str
    incumbent: float | None
    bound: float | None
    unit: str
    open: int
    elapsed_s: float

    @property
    def gap(self) -> float | None:
        """|incumbent - bound| over the larger of them; None while either is not known."""
        if self.incumbent is None or self.bound is None:
            return None
        return relative_gap(self.incumbent, self.bound)

    def __str__(self) -> str:
        best = "-" if self.incumbent is None else f"{self.incumbent:.4f} {self.unit}"
        bound = "-" if self.bound is None else f"{self.bound:.4f} {self.unit}"
        gap = "-" if self.gap is None else f"{100 * self.gap:.2f} %"
        return f"{self.phase}: incumbent {best}, bound {bound}, gap {gap}, {self.open} candidates left"


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was met on the way, worse than the best one or equal to it, and not proven to be the next best.

    value
        In the unit of the objective; where that is the number of devices, as many as the best plan has, seconds of a step.
    best_share, expected_regret
        (Q3), (Q4) of `solver.robust`; None where they are not known.
    """

    plan: Plan
    value: float
    tie: bool
    best_share: float | None = None
    expected_regret: float | None = None

    def differs(self, best: Plan) -> dict[str, int | str]:
        """Its degrees that are not those of the best plan."""
        return differing_degrees(self.plan, best)


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a solve. `plan` is None unless the status is OPTIMAL or FEASIBLE; then `reason` says why.

    Attributes
    ----------
    status
        OPTIMAL: every candidate was pruned by a bound or closed. FEASIBLE: the search had to stop, and the bound says how
        much better a plan could be. INFEASIBLE: proven that the universe holds no plan. UNKNOWN: none was found in time.
    value, bound
        The objective of the plan, and what no plan of the universe is better than, both in `unit`; the bound is below the
        value where `sense` is "minimise", above it where it is "maximise".
    evaluation
        Time, memory and energy of the plan, by code that shares no constraint with the search.
    report
        The universe, what became of its candidates, the rounding, seed, versions, and everything assumed.
    alternatives
        The best plans met that differ from every better one in at least one degree of `LAYOUT`, in order.
    robustness
        How sure the choice among the plan and its alternatives is.
    """

    status: Status
    objective: str
    unit: str
    value: float | None
    bound: float | None
    plan: Plan | None
    evaluation: Evaluation | None
    reason: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    robustness: Robustness | None = None
    report: dict[str, Any] = field(default_factory=dict)
    sense: str = "minimise"

    @property
    def recommended(self) -> Plan | None:
        """The plan of least expected regret among the best one and its alternatives, or the best one where none is known."""
        index = None if self.robustness is None else self.robustness.recommended
        return self.alternatives[index - 1].plan if index else self.plan

    @property
    def gap(self) -> float | None:
        """|value - bound| over the larger of them, never negative; None without a plan."""
        if self.value is None or self.bound is None:
            return None
        return relative_gap(self.value, self.bound)

    def to_dict(self) -> dict[str, Any]:
        """The document that `plan --json` writes."""
        document: dict[str, Any] = {
            "status": self.status,
            "objective": self.objective,
            "sense": self.sense,
            "unit": self.unit,
            "value": self.value,
            "bound": self.bound,
            "gap": self.gap,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "evaluation": None if self.evaluation is None else self.evaluation.to_dict(),
            "alternatives": [
                {
                    "value": other.value,
                    "tie": other.tie,
                    "best_share": other.best_share,
                    "expected_regret": other.expected_regret,
                    "differs": {} if self.plan is None else other.differs(self.plan),
                    "plan": other.plan.to_dict(),
                }
                for other in self.alternatives
            ],
            "robustness": None if self.robustness is None else self.robustness.to_dict(),
            "report": self.report,
        }
        if self.reason:
            document["reason"] = list(self.reason)
        return document


LAYOUT = ("dp", "tp", "pp", "cp", "ep", "zero", "dp_replicate")
"""Degrees that make two plans different layouts; others, such as vpp, make variants of one."""


def layout_of(degrees: Degrees) -> tuple[int, ...]:
    """The degrees of `LAYOUT`."""
    return tuple(getattr(degrees, name) for name in LAYOUT)


def differing_degrees(other: Plan, best: Plan) -> dict[str, int | str]:
    """The degrees of a plan that are not those of another; an `etp` that follows tp is not told."""
    mine, theirs = other.degrees, best.degrees
    names = [field.name for field in fields(mine) if field.name != "etp" or mine.etp != mine.tp]
    values = {name: getattr(mine, name) for name in names if getattr(mine, name) != getattr(theirs, name)}
    return {name: int(value) if isinstance(value, bool) else value for name, value in values.items()}


def relative_gap(value: float, bound: float) -> float:
    """|value - bound| / max(|value|, |bound|), 0 when both are 0."""
    most = max(abs(value), abs(bound))
    return abs(value - bound) / most if most else 0.0
