"""The command on one collective: a table, a plot in text, and the measured points beside the model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from shardwise.solver.terminal import DONE, JsonOption, QuietOption, check_outputs, show, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from shardwise.solver.collective import Comparison, Row

MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
HEIGHT = 14
OCTAVE = 5
"""Columns of the plot for a doubling of the size."""


def collective_command(
    op: Annotated[
        str, typer.Argument(metavar="OP", help="all-reduce, all-gather, reduce-scatter, all-to-all or send (p2p).")
    ],
    size: Annotated[int, typer.Option("--bytes", help="The full tensor of the op.")],
    cluster: Annotated[str, typer.Option("--cluster", help="name[:nodes] of the catalogue, or a TOML file.")],
    group: Annotated[
        int | None, typer.Option("--group", help="Ranks, in every placement. Without it, sizes that fill the levels.")
    ] = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Time of a collective by algorithm, message size, group size and level, beside what was measured.

    With --json a list of rows, of more sizes than the table shows.
    """
    from shardwise.solver.collective import collective_rows

    del quiet  # nothing here takes long enough to report
    check_outputs(json=json_path)
    rows = collective_rows(op, size, cluster, group)
    write_json([row.to_dict() for row in rows], json_path)
    show_collective(show(json_path), rows, size)
    raise typer.Exit(DONE)


def show_collective(console: Console, rows: Sequence[Row], size: int) -> None:
    """The size asked for, the sweep, the plot, and where the numbers come from."""
    groups = dict.fromkeys((row.group.ranks, row.group.placement) for row in rows)
    marks = {key: MARKS[index % len(MARKS)] for index, key in enumerate(groups)}
    first = rows[0]
    _line(console, f"{first.op} on {first.cluster} ({first.group.accelerator.name})")
    asked = [row for row in rows if row.bytes == size]
    fastest = {(row.group.ranks, row.group.placement, row.bytes): row for row in rows if row.fastest}
    console.print(_asked(asked, marks, size))
    console.print(_sweep(fastest, marks, size))
    for line in _plot(fastest, marks):
        console.print(line, highlight=False, markup=False, no_wrap=True, crop=True)
    for row in asked:
        for comparison in row.measured:
            _line(console, f"measured, {row.group.ranks} ranks ({row.group.placement}): {_compared(comparison)}")
    curves: dict[str, list[str]] = {}
    for row in asked:
        for curve in row.curves:
            curves.setdefault(curve, []).append(str(row.group.ranks))
    for curve, ranks in curves.items():
        _line(console, f"curve of {', '.join(dict.fromkeys(ranks))}: {curve}")


def _asked(rows: Sequence[Row], marks: dict[tuple[int, str], str], size: int) -> Table:
    table = Table(
        title=f"{_size(size)}, by group and algorithm (* the fastest); bandwidths in GB/s", title_justify="left"
    )
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("placement", overflow="fold")
    table.add_column("algorithm", no_wrap=True)
    for name in ("time", "alg", "bus", "error %"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        group = row.group
        table.add_row(
            f"{marks[group.ranks, group.placement]} {group.ranks:>3}", escape(group.placement),
            row.algorithm + ("*" if row.fastest else ""), _time(row.time_s), f"{row.algorithm_bytes_per_s / 1e9:.4g}",
            f"{row.bus_bytes_per_s / 1e9:.4g}", f"{100 * row.measured[0].error:+.1f}" if row.measured else "",
        )  # fmt: skip
    return table


def _sweep(rows: dict[tuple[int, str, int], Row], marks: dict[tuple[int, str], str], size: int) -> Table:
    """Every second size, the one asked for among them."""
    sizes = sorted({row.bytes for row in rows.values()})
    shown = [one for index, one in enumerate(sizes) if (index - sizes.index(size)) % 2 == 0]
    table = Table(title="time of the fastest, by size", title_justify="left")
    table.add_column("", no_wrap=True)
    for one in shown:
        table.add_column(_size(one), justify="right", overflow="fold")
    for key, mark in marks.items():
        table.add_row(mark, *(_time(rows[*key, one].time_s) for one in shown))
    return table


def _plot(rows: dict[tuple[int, str, int], Row], marks: dict[tuple[int, str], str]) -> list[str]:
    """Time against size, both logarithmic; where two groups fall together the later one is drawn."""
    sizes = sorted({row.bytes for row in rows.values()})
    times = [row.time_s for row in rows.values()]
    low, high = math.log(min(times)), math.log(max(times))
    tick = (high - low) / (HEIGHT - 1) or 1.0
    columns = {one: round(OCTAVE * math.log2(one / sizes[0])) for one in sizes}
    grid = [[" "] * (columns[sizes[-1]] + 1) for _ in range(HEIGHT)]
    for (ranks, placement, one), row in rows.items():
        level = round((math.log(row.time_s) - low) / tick)
        grid[HEIGHT - 1 - level][columns[one]] = marks[ranks, placement]
    lines = []
    for index, cells in enumerate(grid):
        label = _time(math.exp(high - index * tick)) if index % 3 == 0 or index == HEIGHT - 1 else ""
        lines.append(f"{label:>9} |{''.join(cells)}".rstrip())
    below = [" "] * (columns[sizes[-1]] + 12)
    for one in sizes[::3]:
        below[columns[one] : columns[one] + len(_size(one))] = _size(one)
    return ["time against size, by group", *lines, " " * 11 + "".join(below).rstrip()]


def _compared(comparison: Comparison) -> str:
    unseen = f"; not in the fit: {comparison.left_out}" if comparison.left_out else ""
    return (
        f"{_time(comparison.time_s)} at {_size(comparison.bytes)}, the model says {_time(comparison.model_time_s)} "
        f"({100 * comparison.error:+.1f} %); {comparison.source}{unseen}"
    )


def _size(size: int) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size % 1024**power == 0:
            return f"{size // 1024**power} {unit}"
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size} B"


def _time(seconds: float) -> str:
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.4g} s"


def _line(console: Console, text: str) -> None:
    """A line that the terminal wraps, so that a file or a pipe gets it whole."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
