"""Fit one profile to a user's own runs, and say how far it can be trusted."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.data.faults import InputError
from shardwise.data.profile import BASE, load_profile, profile_document
from shardwise.formulations.table import plan_table, step_times_s
from shardwise.solver.fitting import MEMORY_WIDTHS, TIME_WIDTHS, Fit, fit_memory, fit_time
from shardwise.solver.hierarchy import bounds_of
from shardwise.solver.measured import planned_runs
from shardwise.solver.validate import GB, memory_of, sweep_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.data.profile import Profile
    from shardwise.data.runs import Run
    from shardwise.solver.measured import Planned

Floats = npt.NDArray[np.float64]

LEAST_ROWS = 3
CONTRADICTION = 0.05
"""Repeats of one layout that differ by more than this share contradict each other."""
OUTLIER = 4.0
"""Residuals beyond this many robust standard deviations are named."""
DIGITS = 6


@dataclass(frozen=True, eq=False)
class Calibration:
    """A fitted profile as a TOML document, and its errors as shares of the measured times."""

    document: dict[str, Any]
    constants: tuple[str, ...]
    timed_rows: int
    memory_rows: int
    error: float
    left_out_error: float
    prior_error: float
    memory_error: float | None
    contradictions: tuple[tuple[str, str, float], ...]
    outliers: tuple[tuple[str, float], ...]
    not_used: tuple[tuple[str, str], ...]


def calibrate(runs: Sequence[Run], name: str, start: str) -> Calibration:
    """Fit the constants of a profile to `runs`, with those of `start` as priors.

    A constant whose term no row has (tensor-parallel collectives where tp is always 1) stays at its prior.

    Raises
    ------
    InputError
        When fewer than three rows have a step time and a layout that can be modelled.
    """
    planned = planned_runs(runs, start)
    timed = [p for p in planned if p.timed]
    if len(timed) < LEAST_ROWS:
        reasons = "; ".join(dict.fromkeys(p.reason for p in planned if p.reason))
        raise InputError(
            f"{len(timed)} rows have a step time and a layout that can be modelled; at least {LEAST_ROWS} are needed"
            + (f" ({reasons})" if reasons else "")
        )
    prior, bounds = load_profile(start), bounds_of(start)
    table = plan_table([(p.units, p.plan) for p in timed if p.units and p.plan])
    measured = np.array([p.run.measured_step_time_s for p in timed], dtype=np.float64)
    names = tuple(n for n in TIME_WIDTHS if matters(n, prior, lambda profile: step_times_s(table, profile)))
    fit = fit_time(table, measured, prior, bounds, names)
    before = np.abs(step_times_s(table, prior) / measured - 1).mean()
    memory = _fit_memory(planned, fit.profile, bounds)
    document = document_of(
        name,
        f"calibrated from {start}",
        profile_document(start)["constants"],
        {n: getattr(fit.profile, n) for n in fit.names}
        | ({n: getattr(memory.profile, n) for n in memory.names} if memory else {}),
        f"{len(timed)} runs by shardwise calibrate, around {start}",
    )
    read = memory.residuals[np.isfinite(memory.residuals)] if memory else np.zeros(0)
    return Calibration(
        document=document,
        constants=(*fit.names, *(memory.names if memory else ())),
        timed_rows=len(timed),
        memory_rows=len(read),
        error=float(np.abs(np.expm1(fit.residuals)).mean()),
        left_out_error=float(np.abs(np.expm1(fit.left_out)).mean()),
        prior_error=float(before),
        memory_error=float(np.abs(np.expm1(read)).mean()) if len(read) else None,
        contradictions=contradictions(timed),
        outliers=_outliers(timed, fit),
        not_used=tuple((p.run.id, p.reason or "its step time is flagged or missing") for p in planned if not p.timed),
    )


def contradictions(planned: Sequence[Planned]) -> tuple[tuple[str, str, float], ...]:
    """Pairs of rows with one layout, model, hardware and batch whose times differ: (id, id, share)."""
    groups: dict[tuple[Any, ...], list[Planned]] = {}
    for p in planned:
        assert p.plan is not None
        key = (*sweep_key(p.run), p.run.row.get("framework", ""), p.plan.degrees, p.plan.stages, p.plan.schedule)
        groups.setdefault(key, []).append(p)
    found = []
    for group in groups.values():
        ordered = sorted(group, key=lambda p: p.run.measured_step_time_s or 0.0)
        low, high = ordered[0].run.measured_step_time_s or 0.0, ordered[-1].run.measured_step_time_s or 0.0
        if low > 0 and high / low - 1 > CONTRADICTION:
            found.append((ordered[0].run.id, ordered[-1].run.id, high / low - 1))
    return tuple(sorted(found, key=lambda item: -item[2]))


def document_of(
    name: str,
    description: str,
    constants: Mapping[str, Mapping[str, Any]],
    fitted: Mapping[str, float],
    to: str,
) -> dict[str, Any]:
    """A profile document: `constants` with the values of `fitted`, each saying what it was fitted to.

    Entries that came from the shared profile unchanged are left out.
    """
    entries: dict[str, dict[str, Any]] = {}
    for key, entry in constants.items():
        own = {part: value for part, value in entry.items() if part != "from"}
        if key in fitted:
            entries[key] = own | {"value": float(f"{fitted[key]:.{DIGITS}g}"), "fitted": to}
        elif entry.get("from") != BASE:
            entries[key] = own
    return {"name": name, "description": description, "constants": entries}


def to_toml(document: Mapping[str, Any], comment: str = "") -> str:
    """The text of a profile file."""
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"{key} = {json.dumps(document[key])}" for key in ("name", "description")]
    lines += ["", "[constants]"]
    for key, entry in document["constants"].items():
        lines += ["", f"[constants.{key}]"]
        lines += [f"{part} = {json.dumps(value)}" for part, value in entry.items()]
    return "\n".join(lines) + "\n"


def matters(name: str, prior: Profile, times: Any) -> bool:
    """Whether moving a constant by half its width moves any predicted time by a hundredth of a per cent."""
    value = getattr(prior, name)
    moved: dict[str, Any] = {name: value + max(TIME_WIDTHS[name] * (value if value > 1 else 1) / 2, 1e-9)}
    if name == "host_launch_s":
        moved = {name: value * 2 + 1e-6}
    change = np.abs(times(replace(prior, **moved)) / times(prior) - 1)
    return bool(change.max() > 1e-4)


def _fit_memory(planned: Sequence[Planned], prior: Profile, bounds: Mapping[str, tuple[float, float]]) -> Fit | None:
    """(R2) where some row has a reading or ran out of memory."""
    rows = [p for p in planned if p.plan is not None]
    readings = np.array([p.run.scored_memory_gb or np.nan for p in rows], dtype=np.float64) * GB
    ran_out = np.array([p.run.scored_out_of_memory for p in rows])
    if not rows or not (np.isfinite(readings).any() or ran_out.any()):
        return None
    kind = np.array([p.run.memory_kind for p in rows])
    return fit_memory(memory_of(rows), kind, readings, ran_out, prior, bounds, tuple(MEMORY_WIDTHS))


def _outliers(timed: Sequence[Planned], fit: Fit) -> tuple[tuple[str, float], ...]:
    """Rows that the fit misses by far more than the others: (id, predicted / measured - 1)."""
    centre = np.median(fit.residuals)
    spread = 1.4826 * np.median(np.abs(fit.residuals - centre))
    far = np.abs(fit.residuals - centre) > OUTLIER * max(float(spread), 0.01)
    found = [(timed[int(i)].run.id, float(np.expm1(fit.residuals[i]))) for i in np.flatnonzero(far)]
    return tuple(sorted(found, key=lambda item: -abs(item[1])))
