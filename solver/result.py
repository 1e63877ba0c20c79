"""What a solve returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from shardwise.data.plan import Plan
    from shardwise.solver.evaluate import Evaluation

Status = Literal["OPTIMAL", "FEASIBLE", "INFEASIBLE", "UNKNOWN"]


@dataclass(frozen=True, slots=True)
class Progress:
    """One report of a running solve. Value of the best plan and bound are in `unit`, that of the objective; `gap` is
    relative; `open` counts candidates neither pruned nor closed."""

    phase: str
    incumbent: float | None
    bound: float | None
    unit: str
    open: int
    elapsed_s: float

    @property
    def gap(self) -> float | None:
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
    """A plan that was met on the way, slower than the best one or equal to it."""

    plan: Plan
    value: float
    tie: bool


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a solve. `plan` is None unless the status is OPTIMAL or FEASIBLE; then `reason` says why."""

    status: Status
    objective: str
    unit: str
    value: float | None
    bound: float | None
    plan: Plan | None
    evaluation: Evaluation | None
    reason: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    report: dict[str, Any] = field(default_factory=dict)
    sense: str = "minimise"

    @property
    def gap(self) -> float | None:
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
                {"value": other.value, "tie": other.tie, "plan": other.plan.to_dict()} for other in self.alternatives
            ],
            "report": self.report,
        }
        if self.reason:
            document["reason"] = list(self.reason)
        return document


def relative_gap(value: float, bound: float) -> float:
    """|value - bound| / max(|value|, |bound|), 0 when both are 0."""
    most = max(abs(value), abs(bound))
    return abs(value - bound) / most if most else 0.0
