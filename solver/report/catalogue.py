"""The page of a store: every cell of a batch, its columns packed as JSON that a script filters, sorts and draws.

Columns of words and whole numbers are packed as levels, in the order that people expect of them, and the place of each
cell's level among them; other numbers have six significant digits, parts of a step four. A figure missing is null, a level
missing -1. Whole results are not on the page: their commands are.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardwise.data.faults import InputError
from shardwise.data.plan import Degrees
from shardwise.solver.evaluate import TimeParts
from shardwise.solver.render import words_of_degrees
from shardwise.solver.report.blocks import Block, Cell, Note, Section, cut, number, table
from shardwise.solver.report.page import rendered
from shardwise.solver.store import CELL_DIGITS, COLUMNS, DATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pandas as pd

STORED = {column.name for column in COLUMNS}
MAX_CATALOGUE_BYTES = 50_000_000
"""More cells than this holds are for pandas."""
DIGITS, PART_DIGITS = 6, 4
KEY_DIGITS = 12
"""Of a cell's key, where so many tell all cells apart."""
MAX_OPTIONS = 1000
MOST_TOLD = 10
MAX_FLOAT_LEVELS = 50
PLANNED = ("OPTIMAL", "FEASIBLE")
PARTS_OF_STEP = tuple(f"{part.name}_s" for part in fields(TimeParts))

Form = Literal["text", "count", "figure", "share"]


class Shown(NamedTuple):
    """A column of the table of cells."""

    name: str
    title: str
    form: Form


class Figure(NamedTuple):
    """What matrix and plot can show of a cell."""

    name: str
    title: str
    form: Form
    sense: Literal["minimise", "maximise"]


class Filter(NamedTuple):
    """A select: what an option is called, and which levels it lets through."""

    name: str
    title: str
    options: tuple[tuple[str, str], ...]


TABLE = (
    Shown("model", "model", "text"),
    Shown("cluster", "cluster", "text"),
    Shown("devices", "devices", "count"),
    Shown("seq_len", "sequence length", "count"),
    Shown("global_batch", "global batch", "count"),
    Shown("precision", "precision", "text"),
    Shown("objective", "objective", "text"),
    Shown("status", "status", "text"),
    Shown("value", "value", "figure"),
    Shown("unit", "unit", "text"),
    Shown("gap", "gap", "share"),
    Shown("degrees", "degrees", "text"),
    Shown("step_time_s", "step s", "figure"),
    Shown("tokens_per_s", "tokens/s", "figure"),
    Shown("tokens_per_s_per_device", "tokens/s a device", "figure"),
    Shown("model_flops_utilization", "MFU", "share"),
    Shown("usd_per_million_tokens", "USD per 10^6 tokens", "figure"),
    Shown("joules_per_token", "J a token", "figure"),
    Shown("devices_used", "devices used", "count"),
    Shown("peak_memory_gb", "worst memory GB", "figure"),
    Shown("capacity_gb", "of GB", "figure"),
    Shown("binds", "limits that bind", "text"),
    Shown("reason", "why not", "text"),
)
FIGURES = (
    Figure("usd_per_million_tokens", "USD per million tokens", "figure", "minimise"),
    Figure("tokens_per_s", "tokens per second", "figure", "maximise"),
    Figure("tokens_per_s_per_device", "tokens per second and device", "figure", "maximise"),
    Figure("model_flops_utilization", "model FLOPs utilization", "share", "maximise"),
    Figure("joules_per_token", "energy a token, J", "figure", "minimise"),
    Figure("step_time_s", "step time, s", "figure", "minimise"),
    Figure("devices_used", "devices used", "count", "minimise"),
    Figure("peak_memory_gb", "memory of the worst device, GB", "figure", "minimise"),
    Figure("gap", "gap", "share", "minimise"),
)
FILTERS = {
    "model": "model",
    "family": "cluster family",
    "accelerator": "accelerator",
    "nodes": "nodes",
    "devices": "devices",
    "seq_len": "sequence length",
    "global_batch": "global batch",
    "precision": "precision",
    "optimizer": "optimizer",
    "attention": "attention",
    "rules": "rules",
    "profile": "profile",
    "limits": "limits given",
    "deadline_s": "deadline, s",
    "objective": "objective",
    "status": "status",
    "binds": "limit that binds",
}
AXES = {
    "model": "models",
    "cluster": "clusters",
    "family": "cluster families",
    "accelerator": "accelerators",
    "nodes": "nodes",
    "devices": "devices",
    "seq_len": "sequence lengths",
    "global_batch": "global batches",
    "precision": "precisions",
    "objective": "objectives",
}
"""What rows and columns of the matrix and series of the plot can be."""
ACROSS = {
    "devices": "devices of the cluster",
    "devices_used": "devices used",
    "nodes": "nodes",
    "seq_len": "sequence length",
}
SEARCHED = ("cell", "model", "cluster", "accelerator", "precision", "objective", "status", "degrees", "schedule", "limits",
            "binds", "reason")  # fmt: skip
PLAN_COMMANDS = (
    ("shardwise report ", " -o cell.html"),
    ("shardwise simulate ", " -o trace.json"),
    ("shardwise export ", " --to megatron-core"),
)
"""The first one is of use without a plan too."""
MEANT = {
    "OPTIMAL": "a plan, proven the best of its universe",
    "FEASIBLE": "a plan and a bound, not closed in time",
    "INFEASIBLE": "proven: no plan exists",
    "UNKNOWN": "neither a plan nor a proof in time",
    "FAILED": "the question itself is at fault",
}


def catalogue_page(cells: pd.DataFrame, store: str) -> str:
    """The page of the finished cells of a store.

    Parameters
    ----------
    cells
        As `load_store` returns them.
    store
        Path of the store; its last part is on the page.

    Raises
    ------
    InputError
        When the page would be larger than `MAX_CATALOGUE_BYTES`.
    """
    name = Path(store).resolve().name
    columns = packed(cells)
    data = {
        "cells": len(cells),
        "columns": columns,
        "what": {c.name: c.what.replace("`", "") for c in COLUMNS} | {"degrees": "of the plan, in words"},
        "table": TABLE,
        "figures": {figure.name: figure for figure in FIGURES},
        "searched": SEARCHED,
        "commands": _commands(name),
        "planned": PLANNED,
    }
    text = rendered(
        "catalogue",
        ("page.css", "catalogue.css"),
        ("sort.js", "catalogue.js"),
        title=f"Catalogue {name}",
        sections=(_overview(cells),),
        drawn=(("filters", "Filters"), ("matrix", "Matrix"), ("plot", "Plot"), ("cells", "Cells")),
        filters=tuple(_filters(columns)),
        axes=[
            (axis, title) for axis, title in AXES.items() if axis in ("model", "cluster") or _levels(columns, axis) > 1
        ],
        across=[(axis, title) for axis, title in ACROSS.items() if axis == "devices" or _levels(columns, axis) > 1],
        figure_options=[(own.name, own.title) for own in FIGURES if cells[own.name].notna().any()] or [FIGURES[0][:2]],
        table=TABLE,
        data=data,
    )
    if len(text.encode()) > MAX_CATALOGUE_BYTES:
        raise InputError(
            f"store {store}: the page of {len(cells):,} cells would be larger than {MAX_CATALOGUE_BYTES:,} bytes; "
            "sw.load_store reads them"
        )
    return text


def packed(cells: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Every column of `COLUMNS`, and the degrees in words, as the script reads them."""
    found: dict[str, dict[str, Any]] = {}
    for column in COLUMNS:
        values = _values(cells, column.name)
        if column.name == "cell":
            found["cell"] = {"texts": _short(values)}
        elif column.name == "cluster":
            families, sizes = (cells[name].astype(str).map(_natural) for name in ("family", "nodes"))
            place = dict(zip(values, zip(families, sizes, strict=True), strict=True))
            found["cluster"] = _coded(values, place.__getitem__)
        elif column.dtype == "float64":
            digits = PART_DIGITS if column.name in PARTS_OF_STEP else DIGITS
            numbers = [None if value is None else _rounded(value, digits) for value in values]
            found[column.name] = _coded(numbers) if len(set(numbers)) <= MAX_FLOAT_LEVELS else {"numbers": numbers}
        else:
            found[column.name] = _coded(values)
    found["degrees"] = _coded(_degrees(cells))
    return found


def _values(cells: pd.DataFrame, name: str) -> list[Any]:
    """A column as values of JSON: what is missing or not finite is None, and a date its text."""
    series = cells[name]
    values = series.astype(object).where(series.notna(), None).tolist()
    if series.dtype == DATE:
        return [value and value.isoformat() for value in values]
    return [None if value in (inf, -inf) else value for value in values]


def _rounded(value: float, digits: int) -> float | int:
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def _coded(values: Sequence[Any], order: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Levels in order, and the code of each cell; one code alone where all cells have the same."""
    levels = sorted({value for value in values if value is not None}, key=order or _natural)
    code: dict[Any, int] = {level: index for index, level in enumerate(levels)} | {None: -1}
    codes = [code[value] for value in values]
    texts = [cut(level) if isinstance(level, str) else level for level in levels]
    return {"levels": texts, "codes": codes[0] if len(set(codes)) == 1 else codes}


def _natural(value: Any) -> Any:
    """Numbers in words sort as numbers: 8b before 70b."""
    if not isinstance(value, str):
        return value
    parts = re.split(r"([0-9]+)", value)
    return [
        (len(part.lstrip("0")), part.lstrip("0")) if odd % 2 else part.casefold() for odd, part in enumerate(parts)
    ], value


def _short(keys: Sequence[Any]) -> list[str]:
    """As few digits of the keys as tell them apart."""
    digits = KEY_DIGITS
    while digits < CELL_DIGITS and len({key[:digits] for key in keys}) < len(keys):
        digits += 1
    return [key[:digits] for key in keys]


def _degrees(cells: pd.DataFrame) -> list[str | None]:
    """The degrees of every plan in words, as commands print them."""
    names = [degree.name for degree in fields(Degrees) if degree.name in STORED]
    rows = zip(*(_values(cells, name) for name in names), strict=True)
    plans = (dict(zip(names, row, strict=True)) for row in rows)
    return [None if None in own.values() else words_of_degrees(Degrees(**own)) for own in plans]


def _levels(columns: dict[str, dict[str, Any]], name: str) -> int:
    return len(columns[name].get("levels", ()))


def _filters(columns: dict[str, dict[str, Any]]) -> Iterator[Filter]:
    """A select for each column that tells cells apart. An option's value is the codes that it lets through."""
    for name, title in FILTERS.items():
        levels, codes = columns[name].get("levels", []), columns[name].get("codes", [])
        options = [(_text(level), str(code)) for code, level in enumerate(levels)]
        if name == "binds":
            options = _parts(levels)
        elif name == "status":
            planned = [str(code) for code, level in enumerate(levels) if level in PLANNED]
            if 0 < len(planned) < len(levels):
                options = [("with a plan", " ".join(planned)), *options]
        missing = [("not known", "-1")] if isinstance(codes, list) and -1 in codes else []
        if len(levels) + len(missing) > 1:
            yield Filter(name, title, (*options[:MAX_OPTIONS], *missing))


def _parts(levels: Sequence[str]) -> list[tuple[str, str]]:
    """Each limit of a list separated by semicolons, with the lists that hold it."""
    held: dict[str, list[str]] = {}
    for code, level in enumerate(levels):
        for part in level.split("; "):
            held.setdefault(part or "none", []).append(str(code))
    return [(part, " ".join(codes)) for part, codes in sorted(held.items())]


def _text(level: Any) -> str:
    return f"{level:,}" if isinstance(level, int) else cut(str(level) or "none", 80)


def _commands(store: str) -> list[tuple[str, str]]:
    """Command lines around the key of a cell, to run beside the store."""
    quoted = shlex.quote(f"{store}/")
    head, close = (quoted[:-1], "'") if quoted.endswith("'") else (quoted, "")
    return [
        *((f"{command}{head}", f"{close}{rest}") for command, rest in PLAN_COMMANDS),
        (f"sw.stored_result({store!r}, '", "')"),
    ]


def _overview(cells: pd.DataFrame) -> Section:
    """What the store holds, before any filter."""
    if not len(cells):
        return Section("headline", "Result", (Note("The store holds no finished cell yet."),))
    told = (
        f"{len(cells):,} cells: {_counted(cells, 'model', 'model')} on {_counted(cells, 'cluster', 'cluster')}, "
        f"{_counted(cells, 'objective', 'objective')}, finished from {cells.finished_at.min():%Y-%m-%d %H:%M} to "
        f"{cells.finished_at.max():%Y-%m-%d %H:%M} UTC in {cells.cpu_s.sum() / 3600:,.2f} core hours, written by shardwise "
        f"{', '.join(sorted(map(str, cells.shardwise.dropna().unique())))}."
    )
    statuses = Counter(map(str, cells.status))
    rows = [
        (Cell(status), number(statuses[status], f"{statuses[status]:,}", f"status_{status}"), Cell(meant))
        for status, meant in MEANT.items()
        if statuses[status]
    ]
    blocks: list[Block] = [Note(told), *table("Cells by status", ("status", "cells", "what it says"), rows)]
    binding = Counter(part for text in cells.binds.dropna() for part in text.split("; ") if part)
    reasons = Counter(f"{row.status}: {row.reason}" for row in cells[cells.reason.notna()].itertuples())
    for caption, column, counts in (
        ("Limits that bind, by plans on their edge", "limit", binding),
        ("Why cells have no plan", "reason", reasons),
    ):
        if counts:
            counted = [(Cell(cut(text)), number(count, f"{count:,}")) for text, count in counts.most_common(MOST_TOLD)]
            blocks += table(caption, (column, "cells"), counted)
            if len(counts) > MOST_TOLD:
                blocks.append(Note(f"{len(counts) - MOST_TOLD:,} that are rarer are left out."))
    return Section("headline", "Result", tuple(blocks))


def _counted(cells: pd.DataFrame, name: str, word: str) -> str:
    count = cells[name].nunique()
    return f"{count:,} {word}{'' if count == 1 else 's'}"
