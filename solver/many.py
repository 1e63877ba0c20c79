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
from shardwise.solver.evaluate import broken_rules, cost_tables, share_of_batch
from shardwise.solver.solve import build_instance

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Degrees, Plan
    from shardwise.data.profile import Profile

NEEDED = ("model", "cluster", "seq_len", "global_batch")
DEGREES = ("tp", "pp", "dp", "vpp", "micro_batch", "zero", "cp", "ep", "etp", "dp_replicate", "cp_a2a")
WORKLOAD = ("precision", "optimizer", "attention", "lora_modules", "base_precision")
SIZES = ("seq_len", "lora_rank", "mtp_layers")
TRUTHS = ("pad_experts", "tp_overlap")
SHARES = ("expert_imbalance", "expert_capacity")
PACKS = ("rules", "profile")
TEXTS = ("model", "cluster", *WORKLOAD, *PACKS)
SHAPE = ("recompute", "schedule")
ELSEWHERE = (
    "stages", "recompute_modules", "rank_order", "lengths", "offload_optimizer", "offload_param", "offload_activations",
    "offload_layers",
)  # fmt: skip
"""What `evaluate` can be told and no column can."""
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
class _Costs:
    """What rows share that differ in their batch at most."""

    units: UnitTimes
    lines: MemoryLines
    degrees: dict[tuple[Any, ...], Degrees]


@dataclass(frozen=True, eq=False)
class _Known:
    """An instance with everything that its rows share. `faults` are the rules that degrees and a schedule break: stages
    are split and recomputed alike in every row, so that a plan breaks no others."""

    instance: Instance
    costs: _Costs
    faults: dict[tuple[int, str], list[str]]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row that has a plan."""

    index: int
    known: _Known
    plan: Plan


def evaluate_many(table: pd.DataFrame) -> pd.DataFrame:
    """Evaluate one plan per row.

    Parameters
    ----------
    table
        Columns model, cluster, seq_len, global_batch, and any of tp, pp, dp, vpp, micro_batch, zero, cp, ep, etp,
        cp_comm_type, cp_a2a, dp_replicate, sequence_parallel, recompute, recompute_layers, schedule, precision, optimizer,
        attention, lora_rank, lora_modules, base_precision, mean_document_length, expert_imbalance, expert_capacity,
        pad_experts, mtp_layers, tp_overlap, rules, profile. What is absent or empty takes the default of
        `shardwise evaluate`: dp the devices that are left, sequence_parallel on where tp > 1.

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
    seen = _Seen()
    records: list[Cells] = [{} for _ in range(len(table))]
    by_profile: dict[Profile, list[_Row]] = {}
    for index, given in enumerate(_rows(table)):
        try:
            row = _Row(index, *_planned(given, seen))
        except InputError as error:
            records[index] = {"reason": "; ".join(error.faults)}
        else:
            by_profile.setdefault(row.known.instance.profile, []).append(row)
    for profile, rows in by_profile.items():
        for row, record in zip(rows, _evaluated(rows, profile), strict=True):
            records[row.index] = record
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


def _planned(given: Cells, seen: _Seen) -> tuple[_Known, Plan]:
    missing = [f"column {name} is missing or empty" for name in NEEDED if name not in given]
    missing += [f"column {name} cannot be told by a table; use evaluate" for name in ELSEWHERE if name in given]
    if missing:
        raise InputError(missing)
    numbers = _numbers(given)
    known = seen.instance(given, numbers)
    found = known.costs.degrees
    own: Cells = {name: numbers[name] for name in DEGREES if name in numbers}
    together, exchange = _truth(given, "sequence_parallel"), given.get("cp_comm_type")
    key = (*own.items(), together, exchange)
    if key not in found:
        found[key] = degrees_from(known.instance, **own, sequence_parallel=together, cp_comm_type=exchange)
    layers = numbers.get("recompute_layers")
    shape = {name: given[name] for name in SHAPE if name in given}
    return known, plan_from_degrees(known.instance, found[key], recompute_layers=layers or None, **shape)


def _evaluated(rows: list[_Row], profile: Profile) -> list[Cells]:
    """Records of the rows of one profile, whose timelines and memory are computed together."""
    times = step_times_s(plan_table([(row.known.costs.units, row.plan) for row in rows]), profile).tolist()
    memory = memory_table([(row.known.costs.lines, row.plan) for row in rows])
    peaks = memory.peaks(profile, np.full(len(rows), "device")).tolist()
    most, worst = memory.mib.max(axis=1).tolist(), memory.mib.argmax(axis=1).tolist()
    records = []
    for row, time, peak, mib, stage in zip(rows, times, peaks, most, worst, strict=True):
        instance, plan = row.known.instance, row.plan
        faults = _faults(row)
        fits = mib <= row.known.costs.units.tables.capacity_mib
        reasons = list(faults)
        if not fits:
            reasons.append(
                f"stage {stage} needs {peak / 1e9:.1f} GB, "
                f"{instance.accelerator.name} has {instance.memory_limit_bytes / 1e9:.1f} GB usable"
            )
        records.append(
            {
                "step_time_s": time,
                "tokens_per_s_per_device": share_of_batch(instance, plan)
                * instance.workload.tokens_per_step
                / time
                / plan.degrees.devices,
                "peak_memory_gb": peak / 1e9,
                "legal": not faults,
                "fits": fits,
                "reason": "; ".join(reasons),
            }
        )
    return records


def _faults(row: _Row) -> list[str]:
    """The rules that a row's plan breaks."""
    known, plan = row.known, row.plan
    key = (id(plan.degrees), plan.schedule)  # held by `_Costs.degrees`
    if key not in known.faults:
        known.faults[key] = broken_rules(known.instance, plan)
    return known.faults[key]


class _Seen:
    """The instances met so far."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Known | InputError] = {}
        self._costs: dict[tuple[Any, ...], _Costs] = {}

    def instance(self, given: Cells, numbers: dict[str, int]) -> _Known:
        """The instance of a row; rows that share one share its tables too.

        Raises
        ------
        InputError
            Where there is none, with every reason.
        """
        texts = {name: str(given[name]) for name in TEXTS if name in given}
        sizes: Cells = {name: numbers[name] for name in SIZES if name in numbers}
        sizes |= {name: given[name] for name in SHARES if name in given}
        sizes |= {name: _truth(given, name) for name in TRUTHS if name in given}
        batch, mean = numbers["global_batch"], given.get("mean_document_length")
        alike = (*sizes.items(), str(mean), *texts.items())
        key = (batch, *alike)
        if key not in self._known:
            try:
                kinds: dict[str, Any] = {name: texts[name] for name in WORKLOAD if name in texts}
                lengths = None if mean is None else ((mean, 1),)
                workload = Training(global_batch=batch, **sizes, **kinds, lengths=lengths)
                options = {name: texts[name] for name in PACKS if name in texts}
                instance = build_instance(texts["model"], texts["cluster"], workload, **options)
                if alike not in self._costs:
                    tables = cost_tables(instance)
                    self._costs[alike] = _Costs(UnitTimes(tables), MemoryLines(tables), {})
                self._known[key] = _Known(instance, self._costs[alike], {})
            except InputError as error:
                self._known[key] = error
            except ValueError as error:
                self._known[key] = InputError(str(error).split("; "))
        found = self._known[key]
        if isinstance(found, InputError):
            raise InputError(found.faults)
        return found


def _numbers(given: Cells) -> dict[str, int]:
    """Every number of a row as a whole one, also where pandas made it a float."""
    found, faults = {}, []
    for name in ("global_batch", *SIZES, *DEGREES, "recompute_layers"):
        if name not in given:
            continue
        value = given[name]
        if type(value) is int:  # a bool is not
            found[name] = value
            continue
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
