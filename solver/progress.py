"""A live progress line on a terminal; nothing elsewhere."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from shardwise.solver.result import Progress


@contextmanager
def progress_line(console: Console, *, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A callback for `solve` that redraws one line; None when there is no terminal to draw on."""
    if quiet or not console.is_terminal:
        yield None
        return
    with console.status("reading") as status:
        yield lambda progress: status.update(str(progress))
