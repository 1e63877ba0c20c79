"""A live progress line on a terminal, nothing elsewhere; and Ctrl-C that keeps what was found."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from shardwise.solver.result import Progress

FINAL = ("OPTIMAL", "FEASIBLE", "INFEASIBLE", "UNKNOWN")


class Watch:
    """Follows a solve: `report` is its `on_progress`; `interrupted` says whether Ctrl-C was pressed."""

    def __init__(self, draw: Callable[[str], Any] | None) -> None:
        self.draw = draw
        self.interrupted = False

    def report(self, progress: Progress) -> None:
        """Draw the line, and end the search like a passed time limit after Ctrl-C, so that the incumbent is kept."""
        if self.draw is not None:
            self.draw(str(progress))
        if progress.phase in FINAL:
            return
        self.listen()  # CP-SAT leaves the signal at its default after every solve
        if self.interrupted:
            from shardwise.solver.search import TimeUpError

            raise TimeUpError

    def listen(self) -> None:
        """The first Ctrl-C is noted, the second one ends the program; only the main thread may ask for signals."""
        if not self.interrupted and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._note)

    def _note(self, *_: Any) -> None:
        self.interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def watching(console: Console, *, quiet: bool) -> Iterator[Watch]:
    """A watch over one solve, with a line redrawn on a terminal unless `quiet`."""
    before = signal.getsignal(signal.SIGINT)
    try:
        if quiet or not console.is_terminal:
            yield Watch(None)
        else:
            with console.status("reading") as status:
                yield Watch(status.update)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
