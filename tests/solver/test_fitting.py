"""Fits find the constants that made the data, stay within bounds, and name rows that contradict each other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardwise.data.faults import InputError
from shardwise.data.profile import load_profile, profile_from
from shardwise.data.runs import run_of, shipped_runs
from shardwise.formulations.table import plan_table, step_times_s
from shardwise.solver.calibrate import calibrate, to_toml
from shardwise.solver.fitting import fit_memory, fit_time
from shardwise.solver.hierarchy import bounds_of
from shardwise.solver.measured import planned_runs
from shardwise.solver.validate import memory_of

if TYPE_CHECKING:
    from shardwise.data.runs import Run
    from shardwise.solver.measured import Planned

NAMES = ("gemm", "core", "host_launch_s", "tp_comm_exposed")
TRUE = replace(load_profile("aleph-scaling"), gemm=1.25, core=1.1, host_launch_s=2e-5, tp_comm_exposed=0.7)


def planned() -> list[Planned]:
    runs = [run for run in shipped_runs() if run.source == "aleph" and run.scored]
    return planned_runs(runs)


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    rows = planned()
    table = plan_table([(p.units, p.plan) for p in rows if p.units and p.plan])
    made = step_times_s(table, TRUE) * np.exp(np.random.default_rng(3).normal(0, 0.002, len(rows)))
    made[5] *= 2  # an outlier must not move the rest
    start = replace(TRUE, gemm=1.0, core=1.0, host_launch_s=1e-5, tp_comm_exposed=1.0)
    fit = fit_time(table, made, start, bounds_of("aleph-scaling"), NAMES)
    assert fit.profile.gemm == pytest.approx(1.25, rel=0.03)
    assert fit.profile.tp_comm_exposed == pytest.approx(0.7, abs=0.06)
    others = np.delete(fit.residuals, 5)
    assert np.abs(others).mean() < 0.005
    assert fit.residuals[5] == pytest.approx(-np.log(2), abs=0.02)
    assert np.all(np.abs(fit.left_out) >= np.abs(fit.residuals))
    for name, (low, high) in bounds_of("aleph-scaling").items():
        assert low <= getattr(fit.profile, name) <= high


def test_leave_one_out_residuals_are_close_to_refits_without_the_row() -> None:
    rows = planned()[:24]
    table = plan_table([(p.units, p.plan) for p in rows if p.units and p.plan])
    measured = np.array([p.run.measured_step_time_s for p in rows], dtype=np.float64)
    prior = load_profile("aleph-scaling")
    fit = fit_time(table, measured, prior, bounds_of("aleph-scaling"), NAMES)
    for row in (0, 7, 15):
        rest = np.arange(len(rows)) != row
        without = fit_time(table.rows(rest), measured[rest], prior, bounds_of("aleph-scaling"), NAMES)
        alone = step_times_s(table.rows(~rest), without.profile)[0]
        assert fit.left_out[row] == pytest.approx(np.log(alone / measured[row]), abs=0.02)


def test_memory_fits_readings_and_verdicts() -> None:
    rows = [p for p in planned_runs([run for run in shipped_runs() if run.source == "simumax"]) if p.plan]
    table = memory_of(rows)
    kind = np.array(["reserved"] * len(rows))
    true = replace(load_profile("megatron-lm-2026"), memory_activations=1.3, memory_fragmentation=0.1)
    fit = fit_memory(
        table, kind, table.peaks(true, kind), np.zeros(len(rows), dtype=bool), load_profile("megatron-lm-2026"),
        bounds_of("megatron-lm-2026"), ("memory_activations", "memory_fragmentation"),
    )  # fmt: skip
    assert np.abs(fit.residuals).max() < 0.02
    ran_out = fit_memory(
        table, kind, np.full(len(rows), np.nan), np.ones(len(rows), dtype=bool), load_profile("megatron-lm-2026"),
        bounds_of("megatron-lm-2026"),
    )  # fmt: skip
    device = np.array(["device"] * len(rows))
    before = table.peaks(load_profile("megatron-lm-2026"), device)
    assert np.all(table.peaks(ran_out.profile, device) >= before)


def slower(run: Run, factor: float, name: str) -> Run:
    """The same run with another time."""
    seconds = (run.measured_step_time_s or 0.0) * factor
    return run_of(dict(run.row) | {"id": name, "step_time_s": str(seconds)})


def test_calibration_improves_on_its_start_and_names_what_disagrees() -> None:
    runs = [run for run in shipped_runs() if run.source == "aleph" and run.scored][:30]
    found = calibrate([*runs, slower(runs[0], 1.3, "aleph_twin")], "mine", "megatron-core")
    assert found.left_out_error < found.prior_error
    assert found.error <= found.left_out_error
    assert found.timed_rows == 31
    first, second, share = found.contradictions[0]
    assert {first, second} == {runs[0].id, "aleph_twin"}
    assert share == pytest.approx(0.3)
    profile = profile_from(found.document | {"constants": _complete(found.document)}, "mine")
    assert profile.name == "mine"
    assert "fitted" in to_toml(found.document)
    # Nothing here speaks of context or expert parallelism.
    assert not {"cp_comm_exposed", "ep_comm_exposed"} & set(found.constants)


def _complete(document: dict[str, object]) -> dict[str, object]:
    from shardwise.data.profile import profile_document

    own = document["constants"]
    assert isinstance(own, dict)
    complete: dict[str, object] = profile_document("shared")["constants"] | own
    return complete


def test_too_few_rows_are_refused_with_the_reasons() -> None:
    runs = [run_of(dict(shipped_runs()[0].row) | {"gpu": "unknown", "oom": "0", "step_time_s": "1"})]
    with pytest.raises(InputError, match=r"at least 3 are needed.*unknown"):
        calibrate(runs, "mine", "megatron-core")
