"""Fit every profile in `data/profiles/` to the measured runs that ship with the package.

    python benchmarks/fit_profiles.py [--rows data/measured/training_calibration.csv] [--out data/profiles] [--only NAME]

First the shared constants, then each generation's own around them (`solver/hierarchy.py`). Of a generation's own
constants those are kept whose removal raises its leave-one-sweep-out error; the rest stay at the shared value. Memory
constants are fitted where a generation has readings or runs that ran out of memory. Facts and bounds in the files stay.
`--only` fits one generation around the shared constants as they stand.
Prints in-sample and leave-one-source-out errors. Deterministic; some minutes.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.data import profile as profiles_module
from shardwise.data.profile import BASE, list_profiles, load_profile, profile_document, profile_from
from shardwise.data.runs import read_runs
from shardwise.formulations.table import step_times_s
from shardwise.solver.calibrate import document_of, matters, to_toml
from shardwise.solver.fitting import MEMORY_WIDTHS, TIME_PRIORS, TIME_WIDTHS, fit_memory, fit_time
from shardwise.solver.hierarchy import (
    OWN_WEIGHT,
    Timed,
    bounds_of,
    fact_names,
    fit_shared,
    timed_rows,
    with_constants,
)
from shardwise.solver.measured import Planned, planned_runs
from shardwise.solver.validate import GB, memory_of, sweep_key

if TYPE_CHECKING:
    from shardwise.data.profile import Profile

ASSUMED = ("cp_comm_exposed", "ep_comm_exposed", "p2p_exposed_interleaved", "step_overhead_s", "sync_contention")
"""Bounded assumptions: fitting them to all sources does not lower the leave-one-source-out error. A generation may
still have its own."""
MOVED = 0.05
"""A memory constant stays at the shared value when it moves by less than this share of its width."""
CAUGHT, QUANTILES = 0.97, range(100, 106)
"""Runs out of memory that a profile calls so, and the percents of a prediction that are tried for it."""
FOLDS = 8
WORSE = 1e-4
"""A constant goes when the leave-one-sweep-out error without it is not higher by this much."""


def folds_of(planned: list[Planned]) -> np.ndarray[Any, Any]:
    """A fold for every row: sweeps stay together."""
    keys: list[tuple[str, ...]] = [sweep_key(p.run)[:6] for p in planned]
    if len(set(keys)) == 1:  # one sweep: leave single rows out
        keys = [(p.run.id,) for p in planned]
    order = {key: index % FOLDS for index, key in enumerate(dict.fromkeys(keys))}
    return np.array([order[key] for key in keys])


def own_fit(rows: Timed, weights: Any, prior: Profile, name: str, names: list[str]) -> Profile:
    return fit_time(rows.table, rows.measured_s, prior, bounds_of(name), names, weights=weights).profile


def held_out_error(rows: Timed, folds: Any, weights: Any, prior: Profile, name: str, names: list[str]) -> float:
    """Weighted mean absolute log error of rows whose sweep the fit did not see."""
    errors = np.zeros(len(rows.measured_s))
    for fold in np.unique(folds):
        out = folds == fold
        found = prior if out.all() else own_fit(rows.rows(~out), weights[~out], prior, name, names)
        errors[out] = np.abs(np.log(step_times_s(rows.rows(out).table, found) / rows.measured_s[out]))
    return float(np.sum(errors * weights)) / float(np.sum(weights))


def chosen_names(rows: Timed, folds: Any, weights: Any, prior: Profile, name: str, candidates: list[str]) -> list[str]:
    """Backward elimination by the leave-one-sweep-out error, from the candidates that move a row."""
    candidates = [one for one in candidates if matters(one, prior, lambda own: step_times_s(rows.table, own))]
    everything = own_fit(rows, weights, prior, name, candidates)
    kept = list(candidates)

    def shift(constant: str) -> float:
        moved: float = abs(getattr(everything, constant) - getattr(prior, constant))
        return moved / TIME_WIDTHS[constant]

    error = held_out_error(rows, folds, weights, prior, name, kept)
    for constant in sorted(candidates, key=shift):
        fewer = [other for other in kept if other != constant]
        without = held_out_error(rows, folds, weights, prior, name, fewer)
        if without <= error + WORSE:
            kept, error = fewer, min(error, without)
    return kept


def memory_constants(planned: list[Planned], prior: Profile, name: str) -> dict[str, float]:
    """Memory constants of one profile, where rows speak of them."""
    rows = [p for p in planned if p.plan is not None and p.run.profile == name]
    readings = np.array([p.run.scored_memory_gb or np.nan for p in rows], dtype=np.float64) * GB
    ran_out = np.array([p.run.scored_out_of_memory for p in rows])
    kind = np.array([p.run.memory_kind for p in rows])
    table = memory_of(rows)
    refused = table.peaks(prior, np.full(len(rows), "device")) > table.capacity[:, 0]
    if not np.isfinite(readings).any() and not ran_out.any() and not refused.any():
        return {}
    names = MEMORY_WIDTHS if np.isfinite(readings).any() or ran_out.any() else ("memory_activations",)
    fit = fit_memory(table, kind, readings, ran_out, prior, bounds_of(name), tuple(names))
    found = {
        constant: getattr(fit.profile, constant)
        for constant, width in MEMORY_WIDTHS.items()
        if abs(getattr(fit.profile, constant) - getattr(prior, constant)) > MOVED * width
    }
    load = table.peaks(fit.profile, np.full(len(rows), "device"))[ran_out] / table.capacity[ran_out, 0]
    quantile = least_quantile(load)
    if quantile > 1:
        found["memory_quantile"] = quantile
    read = fit.residuals[np.isfinite(fit.residuals)]
    if len(read) >= 10:
        spread = 1.4826 * float(np.median(np.abs(read - np.median(read))))
        found["memory_band"] = min(max(1.96 * spread + abs(float(np.median(read))), 0.03), 0.5)
    return found


def least_quantile(load: np.ndarray[Any, Any]) -> float:
    """The least whole percent from 1 up that calls enough of the runs that ran out so; `load` is device memory predicted
    over that of the device. 1 where none does, or there are no such runs."""
    for percent in QUANTILES if len(load) else ():
        if np.mean(load * percent / 100 > 1) >= CAUGHT:
            return percent / 100
    return 1.0


def shared_document(timed: Timed) -> dict[str, Any]:
    """The shared profile fitted to all rows."""
    names = [name for name in TIME_WIDTHS if name not in ASSUMED]
    document = profile_document(BASE)
    for name in ASSUMED:
        document["constants"][name]["value"] = TIME_PRIORS[name]
    shared = fit_shared(timed, names)
    constants = {name: getattr(shared, name) for name in names}
    for entry in document["constants"].values():
        entry.pop("fitted", None)
    sources = len(dict.fromkeys(timed.source.tolist()))
    to = f"{len(timed.measured_s)} runs of {sources} sources, benchmarks/fit_profiles.py"
    print(BASE, {name: float(f"{value:.3g}") for name, value in constants.items()})
    return document_of(BASE, document["description"], document["constants"], constants, to)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=Path("data/measured/training_calibration.csv"))
    parser.add_argument("--out", type=Path, default=Path("data/profiles"))
    parser.add_argument("--only", metavar="NAME", choices=list_profiles())
    arguments = parser.parse_args()
    planned = planned_runs(read_runs(arguments.rows))
    timed_planned = [p for p in planned if p.timed]
    timed = timed_rows(planned)
    document = profile_document(BASE) if arguments.only else shared_document(timed)
    if not arguments.only:
        (arguments.out / f"{BASE}.toml").write_text(to_toml(document, HEADER), encoding="utf-8")
    shared = profile_from(document, BASE)
    for name in [arguments.only] if arguments.only else list_profiles():
        own = timed.profile == name
        rows = timed.rows(own)
        facts = fact_names(name)
        free = [constant for constant in TIME_WIDTHS if constant not in facts]
        prior = with_constants(load_profile(name), shared, (*free, *MEMORY_WIDTHS, "memory_quantile", "memory_band"))
        found: dict[str, float] = {}
        if own.any():
            weights = timed.weights(-0.25, OWN_WEIGHT)[own]
            folds = folds_of([p for p in timed_planned if p.run.profile == name])
            names = chosen_names(rows, folds, weights, prior, name, free)
            fitted = own_fit(rows, weights, prior, name, names)
            found = {constant: getattr(fitted, constant) for constant in names}
        memory = memory_constants(planned, prior, name)
        existing = profile_document(name)
        entries = {
            key: {part: value for part, value in entry.items() if part != "fitted"}
            for key, entry in existing["constants"].items()
            if "fitted" not in entry or entry.get("from") == BASE
        }
        shared_entries = {key: entry | {"from": BASE} for key, entry in document["constants"].items()}
        entries = {key: entries.get(key, shared_entries[key]) for key in shared_entries}
        sources_text = ", ".join(dict.fromkeys(rows.source.tolist()))
        text = f"{len(rows.measured_s)} runs ({sources_text}), benchmarks/fit_profiles.py"
        own_document = document_of(name, existing["description"], entries, found | memory, text)
        (arguments.out / f"{name}.toml").write_text(to_toml(own_document), encoding="utf-8")
        print(name, {key: float(f"{value:.3g}") for key, value in (found | memory).items()}, flush=True)
    profiles_module.load_profile.cache_clear()
    assert replace(shared) == shared


HEADER = """Constants that every profile starts from; a profile states only those in which its software differs.
`fitted` names what a value was fitted to; a constant without it is a bounded assumption or a fact with its source.
Written by benchmarks/fit_profiles.py: bounds, reasons and values that are not fitted may be edited."""


if __name__ == "__main__":
    main()
