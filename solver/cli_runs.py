"""Commands on measured runs: `validate` and `calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from shardwise.data.faults import InputError
from shardwise.solver.terminal import DONE, JsonOption, QuietOption, check_outputs, err, show, write, write_json

WIDE = 110
"""Columns of a terminal that has room for the profiles too."""

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.solver.calibrate import Calibration
    from shardwise.solver.validate import Validation


def validate_command(
    rows: Annotated[
        Path | None, typer.Option("--rows", metavar="FILE", help="A CSV of runs; those that ship without it.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", help="For every row; that of the row's framework without it.")
    ] = None,
    leave_out: Annotated[
        bool | None,
        typer.Option("--leave-out/--no-leave-out", help="Fit again without each source. Default: on without --rows."),
    ] = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Predicted against measured: errors by source, out-of-memory verdicts, and how layouts are ranked.

    With --json a list of predictions, one per row, in order.
    """
    from shardwise.data.profile import load_profile
    from shardwise.data.runs import read_runs, shipped_runs
    from shardwise.solver.validate import validate

    check_outputs(json=json_path)
    if profile is not None:
        load_profile(profile)
    runs = shipped_runs() if rows is None else read_runs(rows)
    again = rows is None and profile is None if leave_out is None else leave_out

    def report(source: str) -> None:
        if not quiet:
            err.print(f"left out {source}", highlight=False)

    result = validate(runs, profile=profile, leave_out=again, progress=report)
    write_json([prediction.to_dict() for prediction in result.predictions], json_path)
    show_validation(show(json_path), result)
    raise typer.Exit(DONE)


def calibrate_command(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="A CSV of your runs.")],
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The profile to write.")],
    start: Annotated[
        str | None, typer.Option("--from", help="Profile that the fit starts from; that of the first row's framework.")
    ] = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Fit a profile to your own runs, around an existing one, and say how far to trust it."""
    from shardwise.data.profile import load_profile
    from shardwise.data.runs import read_runs
    from shardwise.solver.calibrate import calibrate, to_toml

    del quiet  # seconds at most
    check_outputs(output=output, json=json_path)
    runs = read_runs(rows)
    if not runs:
        raise InputError(f"{rows}: there is no row")
    base = start or runs[0].profile
    load_profile(base)
    found = calibrate(runs, "stdin" if output == "-" else Path(output).stem, base)
    write(to_toml(found.document).rstrip("\n"), output)
    write_json(
        {
            "profile": found.document,
            "constants": list(found.constants),
            "timed_rows": found.timed_rows,
            "memory_rows": found.memory_rows,
            "error": found.error,
            "leave_one_out_error": found.left_out_error,
            "error_before": found.prior_error,
            "memory_error": found.memory_error,
            "contradictions": [list(item) for item in found.contradictions],
            "outliers": [list(item) for item in found.outliers],
            "not_used": [list(item) for item in found.not_used],
        },
        json_path,
    )
    show_calibration(show(output, json_path), found, base)
    raise typer.Exit(DONE)


def show_validation(console: Console, result: Validation) -> None:
    """Tables of a validation."""
    table = Table(title="Predicted against measured, by source (errors in %)", title_justify="left")
    wide = console.width >= WIDE
    table.add_column("source", no_wrap=True)
    if wide:
        table.add_column("profile", overflow="fold")
    for name in ("rows", "timed", "time", "bias", "left", "mem", "oom", "ran"):
        table.add_column(name, justify="right", no_wrap=True)
    for s in result.sources:
        ran_out, ran = s.oom_caught + s.oom_missed, s.ran_admitted + s.ran_refused
        table.add_row(
            escape(s.source), *([escape(", ".join(s.profiles))] if wide else []), str(s.rows), str(s.timed),
            _percent(s.time_mape), _percent(s.time_bias, sign=True), _percent(s.left_out_mape), _percent(s.memory_mape),
            f"{s.oom_caught}/{ran_out}" if ran_out else "", f"{s.ran_admitted}/{ran}" if ran else "",
        )  # fmt: skip
    console.print(table)
    console.print(
        "time: mean absolute error of the step time; left: the same by constants fitted without the source; "
        "mem: of peak memory; oom: rows that ran out of memory and are called so; ran: rows that ran and are called fitting.\n"
    )
    o = result.overall
    lines = [
        ("step time, mean of sources", _percent(o.get("time_mape_mean_of_sources"))),
        ("step time, over rows", _percent(o.get("time_mape_over_rows"))),
        ("step time, source left out, mean of sources", _percent(o.get("left_out_mape_mean_of_sources"))),
        ("memory, over rows with a reading", _percent(o.get("memory_mape_over_rows"))),
        ("out of memory, called so", _percent(o.get("oom_caught"))),
        ("ran, called out of memory", _percent(o.get("ran_refused"))),
        ("sweeps of four layouts or more", f"{o['sweeps']:.0f}"),
        ("Kendall tau, mean", f"{o['tau_mean']:.3f}" if "tau_mean" in o else ""),
        ("regret of the predicted best, mean", _percent(o.get("regret_mean"))),
        ("regret, worst", _percent(o.get("regret_worst"))),
        ("rows with a known layout not modelled", _percent(o["rows_not_modelled_share"])),
    ]
    overall = Table(title="Over all", title_justify="left", show_header=False)
    overall.add_column()
    overall.add_column(justify="right")
    for name, value in lines:
        if value:
            overall.add_row(name, value)
    console.print(overall)
    for reason, count in result.reasons.items():
        console.print(f"not modelled, {count} rows: {escape(reason)}", highlight=False)
    counts = ", ".join(f"{name} {count}" for name, count in result.constants.items())
    console.print(f"fitted constants that act: {escape(counts)}", highlight=False)


def show_calibration(console: Console, found: Calibration, base: str) -> None:
    """What a calibration found."""
    table = Table(title=f"Fitted around {escape(base)}", title_justify="left")
    for name in ("constant", "value", "what it is"):
        table.add_column(name, overflow="fold")
    for name in found.constants:
        entry = found.document["constants"][name]
        table.add_row(name, f"{entry['value']:.4g}", escape(entry["why"]))
    console.print(table)
    console.print(
        f"step time of {found.timed_rows} rows: {_percent(found.prior_error)} % before, {_percent(found.error)} % fitted, "
        f"{_percent(found.left_out_error)} % leaving one row out",
        highlight=False,
    )
    if found.memory_error is not None:
        console.print(f"memory of {found.memory_rows} rows: {_percent(found.memory_error)} %", highlight=False)
    for first, second, share in found.contradictions:
        console.print(f"contradict each other: {escape(first)} and {escape(second)}, {_percent(share)} % apart")
    for run, share in found.outliers:
        console.print(f"far from the fit: {escape(run)}, {_percent(share, sign=True)} %")
    for run, reason in found.not_used[:20]:
        console.print(f"not used: {escape(run)}: {escape(reason)}", highlight=False)
    if len(found.not_used) > 20:
        console.print(f"and {len(found.not_used) - 20} more")


def _percent(share: float | None, *, sign: bool = False) -> str:
    if share is None:
        return ""
    return f"{100 * share:+.1f}" if sign else f"{100 * share:.1f}"
