"""Evaluate a table of plans: one row each, numbers or a reason in the columns added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from shardwise.data.faults import InputError
from shardwise.data.workload import Training
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.evaluate import evaluate
from shardwise.solver.solve import build_instance

if TYPE_CHECKING:
    from shardwise.data.instance import Instance

NEEDED = ("model", "cluster", "seq_len", "global_batch")
DEGREES = ("tp", "pp", "dp", "vpp", "micro_batch", "zero")
WORKLOAD = ("precision", "optimizer", "attention")
PACKS = ("rules", "profile")
ADDED = {
    "step_time_s": "float64",
    "tokens_per_s_per_device": "float64",
    "peak_memory_gb": "float64",
    "legal": "boolean",
    "fits": "boolean",
    "reason": "object",
}
"""The columns added, with their types; `boolean` is the one that can be empty."""


def evaluate_many(table: pd.DataFrame) -> pd.DataFrame:
    """Evaluate one plan per row.

    Parameters
    ----------
    table
        Columns model, cluster, seq_len, global_batch, and any of tp, pp, dp, vpp, micro_batch, zero, sequence_parallel,
        recompute, recompute_layers, precision, optimizer, attention, rules, profile. What is absent or empty takes the
        default of `shardwise evaluate`: dp the devices that are left, sequence_parallel on where tp > 1.

    Returns
    -------
    DataFrame
        The rows with step_time_s, tokens_per_s_per_device, peak_memory_gb, legal, fits and reason added. A row that
        cannot be evaluated has empty numbers and the reason; so has `reason` the rules that an illegal plan breaks.

    Raises
    ------
    InputError
        When `table` is not a DataFrame, or names a column twice.
    """
    if not isinstance(table, pd.DataFrame):
        raise InputError(f"table must be a pandas DataFrame, not {type(table).__name__}")
    if not table.columns.is_unique:
        twice = sorted({str(name) for name in table.columns[table.columns.duplicated()]})
        raise InputError(f"table has the columns {', '.join(twice)} more than once")
    instances: dict[tuple[Any, ...], Instance | InputError] = {}
    records = [_evaluate_row(row, instances) for row in table.to_dict(orient="records")]
    out = table.copy()
    for name, kind in ADDED.items():
        values: Any = [record.get(name) for record in records]
        out[name] = pd.Series(values, dtype=kind).array
    return out


def _evaluate_row(row: dict[Any, Any], instances: dict[tuple[Any, ...], Instance | InputError]) -> dict[str, Any]:
    given = {str(name): value for name, value in row.items() if not (pd.api.types.is_scalar(value) and pd.isna(value))}
    try:
        missing = [f"column {name} is missing or empty" for name in NEEDED if name not in given]
        if missing:
            raise InputError(missing)
        numbers = _numbers(given)
        instance = _instance(given, numbers, instances)
        degrees = degrees_from(
            instance,
            **{name: numbers[name] for name in DEGREES if name in numbers},
            sequence_parallel=_truth(given, "sequence_parallel"),
        )
        layers = numbers.get("recompute_layers")
        plan = plan_from_degrees(
            instance, degrees, recompute=given.get("recompute", "none"), recompute_layers=layers or None
        )
        result = evaluate(instance, plan)
    except InputError as error:
        return {"reason": "; ".join(error.faults)}
    reasons = [*result.faults, *result.limit_faults]
    if not result.fits:
        reasons.append(
            f"stage {result.worst_stage} needs {result.peak_memory_bytes / 1e9:.1f} GB, "
            f"{instance.accelerator.name} has {instance.memory_limit_bytes / 1e9:.1f} GB usable"
        )
    return {
        "step_time_s": result.step_time_s,
        "tokens_per_s_per_device": result.tokens_per_s_per_device,
        "peak_memory_gb": result.peak_memory_bytes / 1e9,
        "legal": result.legal,
        "fits": result.fits,
        "reason": "; ".join(reasons),
    }


def _instance(
    given: dict[str, Any], numbers: dict[str, int], instances: dict[tuple[Any, ...], Instance | InputError]
) -> Instance:
    """The instance of a row; rows that share one share its cost tables too."""
    texts = {name: str(given[name]) for name in ("model", "cluster", *WORKLOAD, *PACKS) if name in given}
    key = (numbers["seq_len"], numbers["global_batch"], *sorted(texts.items()))
    if key not in instances:
        try:
            kinds: dict[str, Any] = {name: texts[name] for name in WORKLOAD if name in texts}
            workload = Training(numbers["seq_len"], numbers["global_batch"], **kinds)
            options = {name: texts[name] for name in PACKS if name in texts}
            instances[key] = build_instance(texts["model"], texts["cluster"], workload, **options)
        except InputError as error:
            instances[key] = error
        except ValueError as error:
            instances[key] = InputError(str(error).split("; "))
    found = instances[key]
    if isinstance(found, InputError):
        raise InputError(found.faults)
    return found


def _numbers(given: dict[str, Any]) -> dict[str, int]:
    """Every number of a row as a whole one, also where pandas made it a float."""
    found, faults = {}, []
    for name in ("seq_len", "global_batch", *DEGREES, "recompute_layers"):
        if name not in given:
            continue
        value = given[name]
        try:
            whole = int(value)
            if isinstance(value, bool) or whole != float(value):
                raise ValueError
            found[name] = whole
        except (ValueError, TypeError, OverflowError):
            faults.append(f"{name}={value!r} must be a whole number")
    if faults:
        raise InputError(faults)
    return found


def _truth(given: dict[str, Any], name: str) -> bool | None:
    """A truth value, also as a spreadsheet writes it; None when it is not given."""
    if name not in given:
        return None
    words = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    text = str(given[name]).lower()
    if text not in words:
        raise InputError(f"{name}={given[name]!r} must be true or false")
    return words[text]
