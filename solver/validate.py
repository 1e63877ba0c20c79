"""Predicted against measured: every run of a table, its errors by source, and how well layouts are ranked."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.data.pipeline import SCHEDULES
from shardwise.data.profile import load_profile, profile_document
from shardwise.data.rules import load_rules, plan_faults
from shardwise.data.run_words import rules_of
from shardwise.data.runs import read_runs, shipped_runs
from shardwise.formulations.memory_table import MemoryLines, MemoryTable, memory_table
from shardwise.formulations.table import plan_table, step_times_s
from shardwise.solver.evaluate import verdict_of
from shardwise.solver.hierarchy import Timed, leave_one_source_out, timed_rows
from shardwise.solver.measured import Planned, planned_runs
from shardwise.solver.run_table import run_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pandas as pd

    from shardwise.data.runs import Run

Floats = npt.NDArray[np.float64]

TIE = 0.02
"""Times closer than this share of each other are a tie: repeats of a run differ by as much."""
LEAST_LAYOUTS = 4
GB = 1e9


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted for one row, in the form that `validate --json` writes."""

    id: str
    predicted_step_time_s: float | None
    predicted_peak_mem_gb: float | None
    predicted_fits: bool | None
    legal: bool | None
    reason: str | None
    verdict: str | None = None
    profile: str | None = None
    assumed: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"assumed": list(self.assumed)}


@dataclass(frozen=True, slots=True)
class SourceErrors:
    """Errors of one source; times and memory as shares of what was measured, None without a row."""

    source: str
    profiles: tuple[str, ...]
    rows: int
    timed: int
    not_modelled: int
    time_mape: float | None
    time_median: float | None
    time_bias: float | None
    left_out_mape: float | None
    memory_rows: int
    memory_mape: float | None
    oom_caught: int
    oom_missed: int
    ran_refused: int
    ran_admitted: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs that differ in their layout only: Kendall's tau, and what choosing by prediction would cost."""

    source: str
    model: str
    devices: str
    seq_len: str
    global_batch: str
    kernels: str
    layouts: int
    tau: float
    regret: float


@dataclass(frozen=True, slots=True)
class Validation:
    """All of it. `overall` holds the figures over all sources by name.

    left_out_s
        Seconds predicted for each run by constants that never saw its source; None where that was not asked for, or the
        run is not scored.
    """

    runs: tuple[Run, ...]
    predictions: tuple[Prediction, ...]
    left_out_s: tuple[float | None, ...]
    sources: tuple[SourceErrors, ...]
    sweeps: tuple[Sweep, ...]
    overall: dict[str, float]
    reasons: dict[str, int]
    constants: dict[str, int]

    def to_frame(self) -> pd.DataFrame:
        """One row per run, what was measured beside what is predicted: the columns of `solver.run_table.COLUMNS`."""
        return run_table(self.runs, self.predictions, self.left_out_s)


def validate(
    rows: Sequence[Run] | str | PathLike[str] | None = None,
    *,
    profile: str | None = None,
    leave_out: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Validation:
    """Predict every run and compare.

    Parameters
    ----------
    rows
        The path of a CSV of runs, or runs; those that ship with the package without it.
    profile
        Use this profile for every row, and not the one of the row's framework.
    leave_out
        Fit again without each source and report that error too: half a minute for a thousand rows.

    Raises
    ------
    InputError
        When the file cannot be read as a table of runs, or there is no such profile.
    """
    if rows is None:
        rows = shipped_runs()
    elif isinstance(rows, (str, PathLike)):
        rows = read_runs(fspath(rows))
    if profile is not None:
        load_profile(profile)
    planned = planned_runs(rows, profile)
    predictions = predict(planned)
    timed = timed_rows(planned)
    left_out = leave_one_source_out(timed, progress) if leave_out and len(timed.measured_s) else None
    left_s = iter(() if left_out is None else left_out.tolist())
    sources = _by_source(planned, predictions, timed, left_out)
    sweeps = _sweeps(planned, predictions)
    return Validation(
        tuple(p.run for p in planned),
        tuple(predictions),
        tuple(next(left_s, None) if p.timed else None for p in planned),
        tuple(sources),
        tuple(sweeps),
        _overall(planned, predictions, sources, sweeps, timed, left_out),
        dict(Counter(p.reason for p in planned if p.reason).most_common()),
        {name: fitted_count(name) for name in dict.fromkeys(p.run.profile for p in planned)},
    )


def predict(planned: Sequence[Planned]) -> list[Prediction]:
    """One prediction per row, in order; nulls and a reason where it cannot be modelled."""
    modelled = [index for index, p in enumerate(planned) if p.plan is not None]
    times, peaks, loads = _figures([planned[index] for index in modelled])
    out = [
        Prediction(p.run.id, None, None, None, None, p.reason, profile=p.run.profile, assumed=p.run.assumed)
        for p in planned
    ]
    for row, index in enumerate(modelled):
        p = planned[index]
        assert p.units is not None
        faults = run_faults(p)
        constants = p.units.tables.instance.profile
        load = loads[row] * constants.memory_quantile
        out[index] = Prediction(
            p.run.id,
            float(times[row]),
            float(peaks[row]) / GB,
            bool(load <= 1),
            not faults,
            "; ".join(faults) or None,
            verdict_of(float(load), 1.0, constants.memory_band),
            p.run.profile,
            p.run.assumed,
        )
    return out


def _figures(planned: Sequence[Planned]) -> tuple[Floats, Floats, Floats]:
    """Seconds, bytes of the kind that each source reports, and device bytes over capacity."""
    times, peaks, loads = (np.zeros(len(planned)) for _ in range(3))
    by_profile: dict[str, list[int]] = {}
    for index, p in enumerate(planned):
        by_profile.setdefault(p.run.profile, []).append(index)
    for rows in by_profile.values():
        chosen = [planned[index] for index in rows]
        units = [p.units for p in chosen if p.units]
        plans = [p.plan for p in chosen if p.plan]
        constants = units[0].tables.instance.profile
        times[rows] = step_times_s(plan_table(list(zip(units, plans, strict=True))), constants)
        memory = memory_of(chosen)
        peaks[rows] = memory.peaks(constants, np.array([p.run.memory_kind for p in chosen]))
        device = memory.peaks(constants, np.full(len(rows), "device"))
        loads[rows] = device / memory.capacity[:, 0]
    return times, peaks, loads


def memory_of(planned: Sequence[Planned]) -> MemoryTable:
    """The memory table of runs that have a plan."""
    lines: dict[int, MemoryLines] = {}
    rows = []
    for p in planned:
        assert p.units is not None
        assert p.plan is not None
        rows.append((lines.setdefault(id(p.units), MemoryLines(p.units.tables)), p.plan))
    return memory_table(rows)


def run_faults(p: Planned) -> list[str]:
    """Why the framework that the row names could not have run this layout; forks of it have schedules and groups of
    micro-batches of their own."""
    assert p.units is not None
    assert p.plan is not None
    assert p.run.workload is not None
    model, workload, d = p.units.tables.instance.model, p.run.workload, p.plan.degrees
    pack = load_rules(rules_of(p.run.row["framework"]))
    pack = replace(pack, evaluated_schedules=SCHEDULES, interleave_group_is_pp=False)
    faults = plan_faults(pack, model, workload, p.plan)
    if d.devices != p.run.devices:
        faults.append(f"tp x cp x pp x dp = {d.devices} is not n_gpus={p.run.devices}")
    return faults


def fitted_count(name: str) -> int:
    """Fitted constants that act in a profile: its own, and the shared ones that it does not replace."""
    constants = profile_document(name)["constants"]
    return sum("fitted" in entry for entry in constants.values())


def _by_source(
    planned: Sequence[Planned], predictions: Sequence[Prediction], timed: Timed, left_out: Floats | None
) -> list[SourceErrors]:
    out = []
    for source in dict.fromkeys(p.run.source for p in planned):
        rows = [(p, q) for p, q in zip(planned, predictions, strict=True) if p.run.source == source]
        errors = _time_errors(rows)
        memory = _memory_errors(rows)
        tally = _verdicts(rows)
        left = None
        if left_out is not None and (timed.source == source).any():
            own = timed.source == source
            left = float(np.abs(left_out[own] / timed.measured_s[own] - 1).mean())
        out.append(
            SourceErrors(
                source=source,
                profiles=tuple(dict.fromkeys(p.run.profile for p, _ in rows)),
                rows=len(rows),
                timed=len(errors),
                not_modelled=sum(p.plan is None for p, _ in rows),
                time_mape=_mean(np.abs(errors)),
                time_median=float(np.median(np.abs(errors))) if len(errors) else None,
                time_bias=_mean(errors),
                left_out_mape=left,
                memory_rows=len(memory),
                memory_mape=_mean(np.abs(memory)),
                **tally,
            )
        )
    return out


def _time_errors(rows: Iterable[tuple[Planned, Prediction]]) -> Floats:
    found = [
        q.predicted_step_time_s / p.run.measured_step_time_s - 1
        for p, q in rows
        if p.run.scored and q.predicted_step_time_s is not None and p.run.measured_step_time_s is not None
    ]
    return np.array(found, dtype=np.float64)


def _memory_errors(rows: Iterable[tuple[Planned, Prediction]]) -> Floats:
    found = [
        q.predicted_peak_mem_gb / p.run.scored_memory_gb - 1
        for p, q in rows
        if p.run.scored_memory_gb and q.predicted_peak_mem_gb is not None
    ]
    return np.array(found, dtype=np.float64)


def _verdicts(rows: Iterable[tuple[Planned, Prediction]]) -> dict[str, int]:
    """The confusion table; a row without a verdict counts as a miss."""
    tally = {"oom_caught": 0, "oom_missed": 0, "ran_refused": 0, "ran_admitted": 0}
    for p, q in rows:
        if p.run.out_of_memory:
            if p.run.scored_out_of_memory:
                tally["oom_caught" if q.predicted_fits is False else "oom_missed"] += 1
        elif p.run.measured_step_time_s is not None or p.run.measured_memory_gb is not None:
            tally["ran_refused" if q.predicted_fits is False else "ran_admitted"] += 1
    return tally


def sweep_key(run: Run) -> tuple[str, ...]:
    """What the runs of one sweep share: all but the layout."""
    names = ("model", "gpu", "n_gpus", "seq_len", "global_batch", "flash_attention", "precision")
    return (run.source, *(run.row.get(name, "") for name in names))


def _sweeps(planned: Sequence[Planned], predictions: Sequence[Prediction]) -> list[Sweep]:
    groups: dict[tuple[str, ...], list[tuple[Planned, float, float]]] = {}
    for p, q in zip(planned, predictions, strict=True):
        measured, predicted = p.run.measured_step_time_s, q.predicted_step_time_s
        if p.run.scored and measured is not None and predicted is not None:
            groups.setdefault(sweep_key(p.run), []).append((p, measured, predicted))
    out = []
    for key, rows in groups.items():
        layouts = {(p.run.degrees, p.plan.schedule if p.plan else "", p.run.recompute) for p, _, _ in rows}
        if len(layouts) < LEAST_LAYOUTS:
            continue
        times, guesses = (np.array([row[column] for row in rows], dtype=np.float64) for column in (1, 2))
        tau = kendall_tau(times, guesses)
        if tau is None:
            continue
        regret = float(times[int(np.argmin(guesses))] / times.min() - 1)
        out.append(Sweep(key[0], key[1], key[3], key[4], key[5], key[6], len(layouts), tau, regret))
    return out


def kendall_tau(measured: Floats, predicted: Floats) -> float | None:
    """Concordant less discordant pairs over both; pairs measured within `TIE` of each other do not count."""
    first, second = np.triu_indices(len(measured), 1)
    apart = np.abs(measured[first] / measured[second] - 1) >= TIE
    signs = np.sign(measured[first] - measured[second]) * np.sign(predicted[first] - predicted[second])
    signs = signs[apart]
    counted = np.abs(signs).sum()
    return float(signs.sum() / counted) if counted else None


def _overall(
    planned: Sequence[Planned],
    predictions: Sequence[Prediction],
    sources: Sequence[SourceErrors],
    sweeps: Sequence[Sweep],
    timed: Timed,
    left_out: Floats | None,
) -> dict[str, float]:
    rows = list(zip(planned, predictions, strict=True))
    errors, memory, tally = _time_errors(rows), _memory_errors(rows), _verdicts(rows)
    layouts_known = [p for p in planned if not p.reason.endswith("the layout is not known")]
    out: dict[str, float | None] = {
        "rows": len(planned),
        "rows_timed": len(errors),
        "rows_not_modelled": sum(p.plan is None for p in planned),
        "rows_not_modelled_share": sum(p.plan is None for p in layouts_known) / max(len(layouts_known), 1),
        "time_mape_mean_of_sources": _mean(np.array([s.time_mape for s in sources if s.time_mape is not None])),
        "time_mape_over_rows": _mean(np.abs(errors)),
        "memory_mape_over_rows": _mean(np.abs(memory)),
        "oom_caught": _share(tally["oom_caught"], tally["oom_missed"]),
        "ran_refused": _share(tally["ran_refused"], tally["ran_admitted"]),
        "sweeps": len(sweeps),
        "tau_mean": _mean(np.array([s.tau for s in sweeps])),
        "regret_mean": _mean(np.array([s.regret for s in sweeps])),
        "regret_worst": max((s.regret for s in sweeps), default=None),
    }
    if left_out is not None:
        out["left_out_mape_mean_of_sources"] = _mean(
            np.array([s.left_out_mape for s in sources if s.left_out_mape is not None])
        )
        out["left_out_mape_over_rows"] = _mean(np.abs(left_out / timed.measured_s - 1))
    return {name: float(value) for name, value in out.items() if value is not None}


def _share(some: int, others: int) -> float | None:
    return some / (some + others) if some + others else None


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None
