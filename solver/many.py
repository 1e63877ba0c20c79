"""Evaluate a table of plans: one row each, numbers or a reason in the columns added."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from shardwise.data.faults import InputError
from shardwise.data.plan import Degrees
from shardwise.data.workload import Training
from shardwise.solver.default_plan import plan_from_degrees
from shardwise.solver.evaluate import evaluate
from shardwise.solver.solve import build_instance

if TYPE_CHECKING:
    import pandas as pd

    from shardwise.data.instance import Instance

DEGREES = ("tp", "pp", "dp", "vpp", "micro_batch", "zero")
OPTIONAL = ("rules", "profile")
ADDED = ("step_time_s", "tokens_per_s_per_device", "peak_memory_gb", "legal", "fits", "reason")


def evaluate_many(table: pd.DataFrame) -> pd.DataFrame:
    """Evaluate one plan per row.

    Parameters
    ----------
    table
        Columns model, cluster, seq_len, global_batch, and any of tp, pp, dp, vpp, micro_batch, zero, sequence_parallel,
        recompute, recompute_layers, precision, rules, profile; what is absent or empty takes its default.

    Returns
    -------
    DataFrame
        The rows with step_time_s, tokens_per_s_per_device, peak_memory_gb, legal, fits and reason added. A row that
        cannot be evaluated has empty numbers and the reason.
    """
    instances: dict[tuple[Any, ...], Instance] = {}
    records = [_evaluate_row(row, instances) for row in table.to_dict(orient="records")]
    out = table.copy()
    for name in ADDED:
        out[name] = [record.get(name) for record in records]
    return out


def _evaluate_row(row: dict[Any, Any], instances: dict[tuple[Any, ...], Instance]) -> dict[str, Any]:
    given = {str(name): value for name, value in row.items() if value is not None and value == value}
    try:
        workload = Training(
            _whole(given, "seq_len"), _whole(given, "global_batch"), precision=given.get("precision", "bf16")
        )
        key = (given["model"], given["cluster"], workload, *(given.get(name) for name in OPTIONAL))
        if key not in instances:
            options = {name: given[name] for name in OPTIONAL if name in given}
            instances[key] = build_instance(given["model"], given["cluster"], workload, **options)
        instance = instances[key]
        degrees = Degrees(
            **{name: _whole(given, name) for name in DEGREES if name in given},
            sequence_parallel=bool(given.get("sequence_parallel", False)),
        )
        layers = _whole(given, "recompute_layers") if given.get("recompute_layers") else None
        plan = plan_from_degrees(instance, degrees, recompute=given.get("recompute", "none"), recompute_layers=layers)
        result = evaluate(instance, plan)
    except InputError as error:
        return {"reason": "; ".join(error.faults)}
    except KeyError as error:
        return {"reason": f"column {error.args[0]} is missing or empty"}
    except (ValueError, TypeError) as error:
        return {"reason": str(error)}
    document = dataclasses.asdict(result)
    return {
        "step_time_s": document["step_time_s"],
        "tokens_per_s_per_device": document["tokens_per_s_per_device"],
        "peak_memory_gb": result.peak_memory_bytes / 1e9,
        "legal": result.legal,
        "fits": result.fits,
        "reason": "; ".join(result.faults),
    }


def _whole(given: dict[str, Any], name: str) -> int:
    """A whole number, also where pandas made it a float."""
    value = given[name]
    if isinstance(value, bool) or float(value) != int(value):
        raise ValueError(f"{name}={value!r} must be a whole number")
    return int(value)
