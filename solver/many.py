"""Evaluate a table of plans: one row each, numbers or a reason in the columns added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from shardwise.data.faults import InputError
from shardwise.data.workload import Training
from shardwise.formulations.memory_table import MemoryLines, memory_table
from shardwise.formulations.table import UnitTimes, plan_table, step_times_s
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.evaluate import broken_rules, cost_tables, limit_faults
from shardwise.solver.solve import build_instance

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan
    from shardwise.data.profile import Profile

NEEDED = ("model", "cluster", "seq_len", "global_batch")
DEGREES = ("tp", "pp", "dp", "vpp", "micro_batch", "zero", "cp", "ep", "etp", "dp_replicate")
WORKLOAD = ("precision", "optimizer", "attention", "lora_modules", "base_precision")
PACKS = ("rules", "profile")
SHAPE = ("recompute", "schedule")
ADDED = {
    "step_time_s": "float64",
    "tokens_per_s_per_device": "float64",
    "peak_memory_gb": "float64",
    "legal": "boolean",
    "fits": "boolean",
    "reason": "object",
}
"""The columns added, with their types; `boolean` is the one that can be empty."""

Cells = dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Known:
    """An instance with everything that its rows share."""

    instance: Instance
    units: UnitTimes
    lines: MemoryLines


def evaluate_many(table: pd.DataFrame) -> pd.DataFrame:
    """Evaluate one plan per row.

    Parameters
    ----------
    table
        Columns model, cluster, seq_len, global_batch, and any of tp, pp, dp, vpp, micro_batch, zero, cp, ep, etp,
        cp_comm_type, dp_replicate, sequence_parallel, recompute, recompute_layers, schedule, precision, optimizer,
        attention, lora_rank, lora_modules, base_precision, mean_document_length, rules, profile. What is absent or empty
        takes the default of `shardwise evaluate`: dp the devices that are left, sequence_parallel on where tp > 1.

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
    known: dict[tuple[Any, ...], _Known | InputError] = {}
    records: list[Cells] = [{} for _ in range(len(table))]
    planned: list[tuple[int, _Known, Plan]] = []
    for index, given in enumerate(_rows(table)):
        try:
            planned.append((index, *_planned(given, known)))
        except InputError as error:
            records[index] = {"reason": "; ".join(error.faults)}
    times = _step_times_s(planned)
    for group in _by_instance(planned):
        for (index, _, _), record in zip(group, _evaluated(group, times), strict=True):
            records[index] = record
    out = table.copy()
    for name, kind in ADDED.items():
        values: Any = [record.get(name) for record in records]
        out[name] = pd.Series(values, dtype=kind).array
    return out


def _rows(table: pd.DataFrame) -> list[Cells]:
    """The cells of each row that are not empty."""
    rows: list[Cells] = [{} for _ in range(len(table))]
    for name, column in table.items():
        empty = column.isna().to_numpy()
        for row, value, missing in zip(rows, column.tolist(), empty, strict=True):
            if not missing:
                row[str(name)] = value
    return rows


def _by_instance(planned: list[tuple[int, _Known, Plan]]) -> list[list[tuple[int, _Known, Plan]]]:
    groups: dict[int, list[tuple[int, _Known, Plan]]] = {}
    for item in planned:
        groups.setdefault(id(item[1]), []).append(item)
    return list(groups.values())


def _planned(given: Cells, known: dict[tuple[Any, ...], _Known | InputError]) -> tuple[_Known, Plan]:
    missing = [f"column {name} is missing or empty" for name in NEEDED if name not in given]
    if missing:
        raise InputError(missing)
    numbers = _numbers(given)
    shared = _shared(given, numbers, known)
    degrees = degrees_from(
        shared.instance,
        **{name: numbers[name] for name in DEGREES if name in numbers},
        sequence_parallel=_truth(given, "sequence_parallel"),
        cp_comm_type=given.get("cp_comm_type"),
    )
    layers = numbers.get("recompute_layers")
    shape = {name: given[name] for name in SHAPE if name in given}
    return shared, plan_from_degrees(shared.instance, degrees, recompute_layers=layers or None, **shape)


def _step_times_s(planned: list[tuple[int, _Known, Plan]]) -> dict[int, float]:
    """Step times by row; rows of one profile go through the timelines of their schedules together."""
    profiles: dict[Profile, list[tuple[int, _Known, Plan]]] = {}
    for item in planned:
        profiles.setdefault(item[1].instance.profile, []).append(item)
    out: dict[int, float] = {}
    for profile, items in profiles.items():
        times = step_times_s(plan_table([(known.units, plan) for _, known, plan in items]), profile)
        out.update(zip((index for index, _, _ in items), times.tolist(), strict=True))
    return out


def _evaluated(group: list[tuple[int, _Known, Plan]], times: dict[int, float]) -> list[Cells]:
    """Records of the rows of one instance."""
    shared = group[0][1]
    instance = shared.instance
    plans = [plan for _, _, plan in group]
    memory = memory_table([(shared.lines, plan) for plan in plans])
    peaks = memory.peaks(instance.profile, np.full(len(plans), "device"))
    fits = memory.mib.max(axis=1) <= cost_tables(instance).capacity_mib
    worst = memory.mib.argmax(axis=1)
    tokens = instance.workload.tokens_per_step
    records = []
    for row, (index, _, plan) in enumerate(group):
        faults = broken_rules(instance, plan)
        reasons = [*faults, *limit_faults(instance, plan)]
        if not fits[row]:
            reasons.append(
                f"stage {worst[row]} needs {peaks[row] / 1e9:.1f} GB, "
                f"{instance.accelerator.name} has {instance.memory_limit_bytes / 1e9:.1f} GB usable"
            )
        records.append(
            {
                "step_time_s": times[index],
                "tokens_per_s_per_device": tokens / times[index] / plan.degrees.devices,
                "peak_memory_gb": float(peaks[row]) / 1e9,
                "legal": not faults,
                "fits": bool(fits[row]),
                "reason": "; ".join(reasons),
            }
        )
    return records


def _shared(given: Cells, numbers: dict[str, int], known: dict[tuple[Any, ...], _Known | InputError]) -> _Known:
    """The instance of a row; rows that share one share its tables too."""
    texts = {name: str(given[name]) for name in ("model", "cluster", *WORKLOAD, *PACKS) if name in given}
    sizes: Cells = {name: numbers[name] for name in ("seq_len", "global_batch", "lora_rank") if name in numbers}
    mean = given.get("mean_document_length")
    key = (*sizes.items(), str(mean), *texts.items())
    if key not in known:
        try:
            kinds: dict[str, Any] = {name: texts[name] for name in WORKLOAD if name in texts}
            workload = Training(**sizes, **kinds, lengths=None if mean is None else ((mean, 1),))
            options = {name: texts[name] for name in PACKS if name in texts}
            instance = build_instance(texts["model"], texts["cluster"], workload, **options)
            tables = cost_tables(instance)
            known[key] = _Known(instance, UnitTimes(tables), MemoryLines(tables))
        except InputError as error:
            known[key] = error
        except ValueError as error:
            known[key] = InputError(str(error).split("; "))
    found = known[key]
    if isinstance(found, InputError):
        raise InputError(found.faults)
    return found


def _numbers(given: Cells) -> dict[str, int]:
    """Every number of a row as a whole one, also where pandas made it a float."""
    found, faults = {}, []
    for name in ("seq_len", "global_batch", "lora_rank", *DEGREES, "recompute_layers"):
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


def _truth(given: Cells, name: str) -> bool | None:
    """A truth value, also as a spreadsheet writes it; None when it is not given."""
    if name not in given:
        return None
    words = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    text = str(given[name]).lower()
    if text not in words:
        raise InputError(f"{name}={given[name]!r} must be true or false")
    return words[text]
