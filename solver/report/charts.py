"""Geometry of the charts: numbers in, shapes in units of the drawing out."""

from __future__ import annotations

from string import ascii_lowercase
from typing import TYPE_CHECKING

from shardwise.solver.report.blocks import Chart, Key, Line, Rect, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 960
ROW = 26
BAR = 18
LEFT = 170
RIGHT = 130
TOP = 8
NOTHING = 1e-9
"""Shares of the longest bar below this are rounding."""
LETTER_ROOM = 12.0
"""A bar this wide has room for its letter."""


def bars(name: str, title: str, values: Sequence[tuple[str, float]], unit: str) -> Chart:
    """Horizontal bars with their values beside them; negative ones are drawn as nothing."""
    most = max((value for _, value in values), default=0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / most
    rects, texts = [], []
    for row, (label, value) in enumerate(values):
        value = 0.0 if abs(value) < NOTHING * most else value
        y, length = TOP + row * ROW, max(value, 0.0) * scale
        rects.append(Rect(LEFT, y, round(length, 2), BAR, "s0"))
        texts.append(Text(LEFT - 8, y + 13, label, "end"))
        texts.append(Text(round(LEFT + length + 6, 2), y + 13, f"{value:.4g} {unit}"))
    largest = max(values, key=lambda item: item[1], default=("nothing", 0.0))
    return Chart(
        name,
        title,
        f"{len(values)} bars; the longest is {largest[0]} with {largest[1]:.4g} {unit}.",
        WIDTH,
        2 * TOP + ROW * len(values),
        tuple(rects),
        texts=tuple(texts),
    )


def stacked(
    name: str, title: str, rows: Sequence[tuple[str, Sequence[float]]], series: Sequence[str], limit: float, unit: str
) -> Chart:
    """One bar per row, stacked in the order of `series`, and a line at `limit`."""
    totals = [sum(values) for _, values in rows]
    scale = (WIDTH - LEFT - RIGHT) / max([limit, *totals])
    rects, texts = [], []
    for index, (label, values) in enumerate(rows):
        x, y = float(LEFT), TOP + ROW + index * ROW
        for order, value in enumerate(values):
            length = max(value, 0.0) * scale
            if length > 0:
                rects.append(Rect(round(x, 2), y, round(length, 2), BAR, f"s{order}"))
            if length >= LETTER_ROOM:
                texts.append(Text(round(x + length / 2, 2), y + 13, ascii_lowercase[order], "middle", "in"))
            x += length
        texts.append(Text(LEFT - 8, y + 13, label, "end"))
        texts.append(Text(round(x + 6, 2), y + 13, f"{totals[index]:.1f} {unit}", style="over"))
    at, bottom = round(LEFT + limit * scale, 2), TOP + ROW + ROW * len(rows)
    texts.append(Text(at, TOP + 12, f"capacity {limit:.1f} {unit}", "middle"))
    used = [order for order in range(len(series)) if any(values[order] > 0 for _, values in rows)]
    fullest = max(range(len(rows)), key=lambda index: totals[index])
    return Chart(
        name,
        title,
        f"A stacked bar for each of {len(rows)} stages against a capacity of {limit:.1f} {unit}; the fullest is "
        f"{rows[fullest][0]} with {totals[fullest]:.1f} {unit}.",
        WIDTH,
        bottom + TOP,
        tuple(rects),
        lines=(Line(at, TOP + 16, at, bottom, "limit"),),
        texts=tuple(texts),
        legend=tuple(Key(f"s{order}", ascii_lowercase[order], series[order]) for order in used),
    )
