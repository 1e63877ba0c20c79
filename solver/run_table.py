"""Measured runs beside what is predicted for them, as a table for pandas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from shardwise.data.runs import Run
    from shardwise.solver.validate import Prediction

LAYOUT = ("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch", "zero")
COLUMNS = {
    "id": "object",
    "source": "object",
    "model": "object",
    "params": "float64",
    "accelerator": "object",
    "devices": "Int64",
    "seq_len": "Int64",
    "global_batch": "Int64",
    "precision": "object",
    "kernels": "object",
    "framework": "object",
    "profile": "object",
    **dict.fromkeys(LAYOUT, "Int64"),
    "schedule": "object",
    "recompute": "object",
    "scored": "bool",
    "measured_step_time_s": "float64",
    "predicted_step_time_s": "float64",
    "error": "float64",
    "left_out_step_time_s": "float64",
    "left_out_error": "float64",
    "measured_memory_gb": "float64",
    "predicted_memory_gb": "float64",
    "ran_out_of_memory": "bool",
    "predicted_fits": "boolean",
    "reason": "object",
}
"""The columns with their types; `Int64` and `boolean` are those that can be empty."""


def run_table(
    runs: Sequence[Run], predictions: Sequence[Prediction], left_out_s: Sequence[float | None]
) -> pd.DataFrame:
    """One row per run, in order; the errors are of the scored rows, predicted over measured less one."""
    import pandas as pd  # slow to import, and the command line does without

    records = []
    for run, prediction, left_s in zip(runs, predictions, left_out_s, strict=True):
        guess_s, measured_s = prediction.predicted_step_time_s, run.measured_step_time_s
        scored = run.scored and guess_s is not None
        records.append(
            _what_ran(run)
            | {
                "scored": scored,
                "measured_step_time_s": measured_s,
                "predicted_step_time_s": guess_s,
                "error": guess_s / measured_s - 1 if scored and guess_s and measured_s else None,
                "left_out_step_time_s": left_s,
                "left_out_error": left_s / measured_s - 1 if left_s and measured_s else None,
                "measured_memory_gb": run.scored_memory_gb,
                "predicted_memory_gb": prediction.predicted_peak_mem_gb,
                "ran_out_of_memory": run.scored_out_of_memory,
                "predicted_fits": prediction.predicted_fits,
                "reason": prediction.reason or "",
            }
        )
    return pd.DataFrame({name: pd.Series([r.get(name) for r in records], dtype=kind) for name, kind in COLUMNS.items()})


def _what_ran(run: Run) -> dict[str, Any]:
    cells: dict[str, Any] = {
        "id": run.id,
        "source": run.source,
        "model": run.row.get("model", ""),
        "kernels": run.row.get("flash_attention", ""),
        "framework": run.row.get("framework", ""),
        "profile": run.profile,
        "schedule": run.schedule,
        "recompute": run.recompute,
    }
    if run.model is not None:
        cells["params"] = run.model.params
    if run.cluster is not None:
        cells["accelerator"] = run.cluster.accelerators[0].name
    if run.workload is not None:
        workload = run.workload
        cells |= {name: getattr(workload, name) for name in ("seq_len", "global_batch", "precision")}
    if run.degrees is not None:
        cells |= {name: getattr(run.degrees, name) for name in LAYOUT} | {"devices": run.degrees.devices}
    return cells
