"""What a page is made of: plain values that the templates draw. Each names the macro that draws it in `kind`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Tone = Literal["plain", "good", "bad"]
MAX_TEXT = 600
MAX_LISTED = 200
"""Longer texts are cut, longer lists and tables end in how much is left out."""


def cut(text: str, most: int = MAX_TEXT) -> str:
    """At most `most` characters of a text."""
    return text if len(text) <= most else text[: most - 1] + "…"


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph; `mark` is a word before it, so that its tone is not told by colour alone."""

    text: str
    mark: str = ""
    tone: Tone = "plain"
    kind: ClassVar[str] = "note"


@dataclass(frozen=True, slots=True)
class Cell:
    """Text, and the number that it sorts by."""

    text: str
    value: float | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one cell per column; the first cell is the row's header."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kind: ClassVar[str] = "table"


@dataclass(frozen=True, slots=True)
class Items:
    """A list of texts."""

    entries: tuple[str, ...]
    kind: ClassVar[str] = "items"


@dataclass(frozen=True, slots=True)
class Rect:
    """In units of the chart; `series` picks fill and pattern."""

    x: float
    y: float
    width: float
    height: float
    series: str


@dataclass(frozen=True, slots=True)
class Path:
    """Many rectangles of one series."""

    d: str
    series: str


@dataclass(frozen=True, slots=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    style: str


@dataclass(frozen=True, slots=True)
class Text:
    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    style: str = ""


Shape = Rect | Path | Line | Text


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a legend: the letter is in the chart too."""

    series: str
    letter: str
    name: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing. The table beside it holds its numbers; `description` says what is to be seen."""

    name: str
    title: str
    description: str
    width: int
    height: int
    rects: tuple[Rect, ...] = ()
    paths: tuple[Path, ...] = ()
    lines: tuple[Line, ...] = ()
    texts: tuple[Text, ...] = ()
    legend: tuple[Key, ...] = ()
    kind: ClassVar[str] = "chart"


@dataclass(frozen=True, slots=True)
class Domain:
    """A level of the cluster: its members, of which the first is opened."""

    title: str
    detail: str
    members: tuple[str, ...]
    more: int
    inner: Domain | None
    kind: ClassVar[str] = "domain"


Block = Note | Table | Items | Chart | Domain


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page under a heading; `name` is its anchor."""

    name: str
    title: str
    blocks: tuple[Block, ...]


def number(value: float, text: str, name: str = "") -> Cell:
    """A cell that sorts by its exact value."""
    return Cell(text, float(value), name)


def table(caption: str, columns: tuple[str, ...], rows: Sequence[tuple[Cell, ...]]) -> tuple[Block, ...]:
    """A table of at most `MAX_LISTED` rows, and a note of what is left out."""
    shown = Table(caption, columns, tuple(rows[:MAX_LISTED]))
    left = len(rows) - len(shown.rows)
    return (shown, Note(f"{left} more rows are left out.")) if left else (shown,)


def items(entries: list[str]) -> Items:
    """A list of at most `MAX_LISTED` texts, each cut."""
    left = len(entries) - MAX_LISTED
    return Items((*map(cut, entries[:MAX_LISTED]), *([f"and {left} more"] if left > 0 else [])))
