"""Commands that make pages: `report` and `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from shardwise.data.faults import InputError
from shardwise.solver.terminal import DONE, JsonOption, QuietOption, check_outputs, show, write, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan
    from shardwise.solver.compare import Comparison
    from shardwise.solver.saved import Saved

NUMERIC = ("step s", "change s", "change", "devices")
"""Columns of tables that hold numbers."""
PageOption = Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="Write the page.")]


def report_command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN|STORE", help="A plan.json, the file of plan --json, STORE/CELL, or a whole store."
        ),
    ],
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The page to write (- for stdout).")],
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """One self-contained page of a plan: certificate, time, memory, timeline, placement, alternatives, assumptions.

    Of a store of `batch`: all its cells, to filter, sort, plot and open. Exit code 0 when the page is written, 2 for bad input.
    """
    check_outputs(output=output, json=json_path)
    text, document = _of_store(path) if path.is_dir() else _of_plan(path)
    write(text, output)
    write_json(document, json_path)
    if not quiet:
        size = len(text.encode())
        show(output, json_path).print(f"{escape(output)}: {size:,} bytes", highlight=False, soft_wrap=True)
    raise typer.Exit(DONE)


def compare_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="A plan.json, or the file of plan --json.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The plan to compare with it.")],
    output: PageOption = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """What differs between two plans, and what each difference costs.

    Where both are plans of one instance, a walk from A to B changes one thing at a time. Exit code 0, or 2 for bad input.
    """
    from shardwise.solver.compare import compare

    del quiet  # a second or two at most
    check_outputs(output=output, json=json_path)
    sides: list[tuple[str, Instance, Plan]] = []
    faults: list[str] = []
    for path in (a, b):
        try:
            saved, instance = _read(path)
            if saved.plan is None or instance is None:
                raise InputError(f"{path}: the file holds no plan")
            sides.append((str(path), instance, saved.plan))
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(faults)
    comparison = compare(sides[0], sides[1])
    if output is not None:
        from shardwise.solver.report import comparison_page

        write(comparison_page(comparison), output)
    write_json(comparison.to_dict(), json_path)
    show_comparison(show(output, json_path), comparison)
    raise typer.Exit(DONE)


def _of_store(path: Path) -> tuple[str, dict[str, Any]]:
    """The page of a store, and how many cells of each status are on it."""
    from shardwise.solver.report import catalogue_page
    from shardwise.solver.store import load_store

    cells = load_store(path)
    counts = cells.status.value_counts()
    statuses = {str(status): int(count) for status, count in counts.items() if count}
    return catalogue_page(cells, str(path)), {"store": str(path), "cells": len(cells), "statuses": statuses}


def _of_plan(path: Path) -> tuple[str, dict[str, Any]]:
    """The page of a plan, and what it tells beyond the plan file."""
    from shardwise.solver.report import report_page

    saved, instance = _read(path)
    text, evaluation = report_page(saved, instance)
    return text, _document(saved, instance, evaluation)


def _read(path: Path) -> tuple[Saved, Instance | None]:
    """A saved plan with its instance, every fault under the name of the file."""
    from shardwise.solver.saved import read_saved, saved_instance

    saved = read_saved(path)
    if saved.plan is None:
        return saved, None
    try:
        return saved, saved_instance(saved.plan.instance)
    except InputError as error:
        raise InputError([f"{path}: {fault}" for fault in error.faults]) from None


def _document(saved: Saved, instance: Instance | None, evaluation: Any) -> dict[str, Any]:
    """What the page tells beyond the plan file."""
    from shardwise.solver.binding import limits_of
    from shardwise.solver.crossings import crossings

    c = saved.certificate
    document: dict[str, Any] = {
        "certificate": None
        if c is None
        else {"status": c.status, "objective": c.objective, "value": c.value, "bound": c.bound, "gap": c.gap},
        "reason": list(saved.reason),
        "evaluation": None,
    }
    if saved.plan is None or instance is None:
        return document
    traffic = crossings(instance, saved.plan, evaluation.busiest_stage)
    return document | {
        "evaluation": evaluation.to_dict(),
        "crossings": [crossing.to_dict(instance.cluster.levels) for crossing in traffic],
        "limits": [
            {"name": one.name, "source": one.source, "allowed": one.allowed, "plan": one.plan, "binds": one.binds}
            for one in limits_of(instance, saved.plan, evaluation)
        ],
    }


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Everything that `compare` prints."""
    from shardwise.solver.compare import ORDER, in_words

    c = comparison
    for letter, side in (("A", c.a), ("B", c.b)):
        title = f"{letter} {side.name}: {side.instance.model.name} on {side.instance.cluster.name}"
        _line(console, f"{title}, step time {side.evaluation.step_time_s:.4f} s")
    a, b = c.a.evaluation.step_time_s, c.b.evaluation.step_time_s
    if a:
        _line(console, f"B takes {b - a:+.4f} s a step, {100 * (b / a - 1):+.2f} %")
    if not c.differences:
        _line(console, "nothing differs")
        return
    differences = _table("what differs", ("what", "A", "B"))
    for difference in c.differences:
        differences.add_row(difference.what.replace("_", " "), escape(difference.a), escape(difference.b))
    console.print(differences)
    measures = _table("what each is worth", ("quantity", "unit", "A", "B", "change"))
    group = ""
    for m in c.told:
        if group not in ("", m.group):
            measures.add_section()
        group = m.group
        measures.add_row(
            m.what, m.unit, in_words(m.a, m.unit), in_words(m.b, m.unit), in_words(m.change, m.unit, sign=True)
        )
    console.print(measures)
    if c.no_walk:
        _line(console, c.no_walk)
        return
    walk = _table("from A to B, one change at a time", ("what changes", "step s", "change s", "devices", "verdict"))
    for step in c.walk:
        verdict = f"{step.verdict}: {step.fault}" if step.fault else step.verdict
        devices = "" if step.devices is None else str(step.devices)
        times = in_words(step.step_time_s, "s"), in_words(step.delta_s, "s", sign=True)
        walk.add_row(escape(step.change), *times, devices, escape(verdict))
    console.print(walk)
    _line(console, f"order of the walk: {', '.join(ORDER)}; what depends on a changed degree follows it")


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name in NUMERIC else "left")
    return table


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
