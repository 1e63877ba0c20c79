"""Fit all profiles at once: one shared set of constants, and each generation's own around it.

(H1) the shared constants are those of one profile fitted by (R1) to all rows, each weighted by n^(-1/2) with n the rows
     of its source, so that a table of a thousand rows does not decide alone;
(H2) each profile's own constants are fitted by (R1) with the shared ones as priors, rows weighted by n^(-1/4);
(H3) leave one source out: (H1) and (H2) without its rows. A profile that has no other source falls back on the shared
     constants; its facts (what is sharded, which kernels there are) stay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.data.profile import BASE, load_profile, profile_document
from shardwise.formulations.table import PlanTable, plan_table, step_times_s
from shardwise.solver.fitting import TIME_PRIORS, TIME_WIDTHS, fit_time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.data.profile import Profile
    from shardwise.solver.measured import Planned

Floats = npt.NDArray[np.float64]
Names = npt.NDArray[Any]

SHARED_SCALE, SHARED_WEIGHT, OWN_WEIGHT = 0.08, 4.0, 2.0


@dataclass(frozen=True, eq=False)
class Timed:
    """Rows with a scored step time, as a table."""

    table: PlanTable
    measured_s: Floats
    source: Names
    profile: Names

    def rows(self, chosen: npt.NDArray[np.bool_]) -> Timed:
        return Timed(self.table.rows(chosen), self.measured_s[chosen], self.source[chosen], self.profile[chosen])

    def weights(self, power: float, factor: float) -> Floats:
        """factor n^power for each row, n the rows of its source."""
        counts = Counter(self.source.tolist())
        return factor * np.array([counts[source] for source in self.source], dtype=np.float64) ** power


def timed_rows(planned: Sequence[Planned]) -> Timed:
    """The table of the runs whose step time is scored."""
    rows = [(p.units, p.plan, p.run) for p in planned if p.units and p.plan and p.timed]
    return Timed(
        plan_table([(units, plan) for units, plan, _ in rows]),
        np.array([run.measured_step_time_s for _, _, run in rows], dtype=np.float64),
        np.array([run.source for _, _, run in rows]),
        np.array([run.profile for _, _, run in rows]),
    )


def bounds_of(name: str) -> dict[str, tuple[float, float]]:
    """The bounds of every constant of a profile."""
    constants = profile_document(name)["constants"]
    return {key: (float(entry["bounds"][0]), float(entry["bounds"][1])) for key, entry in constants.items()}


def fact_names(name: str) -> tuple[str, ...]:
    """The time constants that a profile states as facts of its software, with no fit behind them: no fit moves them."""
    constants = profile_document(name)["constants"]
    return tuple(
        k for k, entry in constants.items() if k in TIME_WIDTHS and "fitted" not in entry and "from" not in entry
    )


def own_names(name: str) -> tuple[str, ...]:
    """The time constants that a profile fits for itself."""
    constants = profile_document(name)["constants"]
    return tuple(k for k, entry in constants.items() if k in TIME_WIDTHS and "fitted" in entry and "from" not in entry)


def fit_shared(timed: Timed, names: Sequence[str]) -> Profile:
    """(H1)."""
    weights = timed.weights(-0.5, SHARED_WEIGHT)
    constants: dict[str, Any] = dict(TIME_PRIORS)
    prior = replace(load_profile(BASE), **constants)
    found = fit_time(timed.table, timed.measured_s, prior, bounds_of(BASE), names, weights=weights, scale=SHARED_SCALE)
    return found.profile


def fit_own(timed: Timed, name: str, shared: Profile, names: Sequence[str]) -> Profile:
    """(H2): `shared` with the facts of the profile and its own constants; the facts alone without rows of its own."""
    facts = fact_names(name)
    prior = with_constants(load_profile(name), shared, [k for k in TIME_WIDTHS if k not in facts])
    own = timed.profile == name
    if not own.any() or not names:
        return prior
    rows = timed.rows(own)
    weights = timed.weights(-0.25, OWN_WEIGHT)[own]
    return fit_time(rows.table, rows.measured_s, prior, bounds_of(name), names, weights=weights).profile


def with_constants(profile: Profile, other: Profile, names: Mapping[str, Any] | Sequence[str]) -> Profile:
    """`profile` with the constants `names` of `other`."""
    constants: dict[str, Any] = {name: getattr(other, name) for name in names}
    return replace(profile, **constants)


def leave_one_source_out(timed: Timed, progress: Callable[[str], None] | None = None) -> Floats:
    """(H3) Predicted seconds of every row, by constants that never saw its source."""
    predicted = np.zeros(len(timed.measured_s))
    shared_names = own_names(BASE)
    for source in dict.fromkeys(timed.source.tolist()):
        left = timed.source == source
        rest = timed.rows(~left)
        shared = fit_shared(rest, shared_names)
        for name in dict.fromkeys(timed.profile[left].tolist()):
            profile = fit_own(rest, name, shared, own_names(name))
            chosen = left & (timed.profile == name)
            predicted[chosen] = step_times_s(timed.rows(chosen).table, profile)
        if progress:
            progress(source)
    return predicted
