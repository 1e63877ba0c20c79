"""Where the cells of a batch are solved: processes of this machine, or tasks of Ray. Neither touches the store.

An engine says which instances its idle places know already (`idle`), takes a task for one of them (`submit`), and hands back what
is done (`collect`). A task whose process ended is handed back without an outcome, and is the caller's to repeat or to fail.
This module imports no NumPy, so that a new process can be told how many threads to use before it loads any.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.solver.cells import Outcome, Task

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Done = list[tuple["Task", "Outcome | None"]]


class Engine(Protocol):
    """See the module."""

    def idle(self) -> Sequence[str | None]:
        """For every place that is free, the `instance_key` of what it solved last."""

    def submit(self, task: Task) -> None:
        """Start a task in a free place, one that knows its instance if there is one."""

    def collect(self, timeout_s: float) -> Done:
        """What was done since, at least one task unless the time passes; None for a task whose process ended."""

    def close(self) -> None:
        """Leave what is running."""


class LocalEngine:
    """So many processes, each of one place, that live across cells and keep what they have read and computed."""

    def __init__(self, processes: int, threads: int) -> None:
        self.threads = threads
        self.places = [_Place(threads) for _ in range(processes)]

    def idle(self) -> list[str | None]:
        return [place.warm for place in self.places if place.running is None]

    def submit(self, task: Task) -> None:
        free = [place for place in self.places if place.running is None]
        same = [place for place in free if place.warm == task.instance_key]
        (same or free)[0].start(task)

    def collect(self, timeout_s: float) -> Done:
        busy = [place for place in self.places if place.running is not None]
        wait([place.running[1] for place in busy if place.running], timeout_s, FIRST_COMPLETED)
        return [place.take() for place in busy if place.running and place.running[1].done()]

    def close(self) -> None:
        for place in self.places:
            place.stop()


class _Place:
    """One process; a new one where it ended."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.warm: str | None = None
        self.running: tuple[Task, Future[Outcome]] | None = None
        self.pool = self._pool()

    def _pool(self) -> ProcessPoolExecutor:
        # Spawned, not forked: a fork would share the database and the threads of whoever calls.
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=spawn, initializer=_settle_in, initargs=(self.threads,))

    def start(self, task: Task) -> None:
        try:
            future = self.pool.submit(_solve, task)
        except BrokenProcessPool:  # it ended between two cells
            self.pool = self._pool()
            future = self.pool.submit(_solve, task)
        self.running, self.warm = (task, future), task.instance_key

    def take(self) -> tuple[Task, Outcome | None]:
        assert self.running is not None
        (task, future), self.running = self.running, None
        try:
            return task, future.result()
        except BrokenProcessPool:
            self.pool, self.warm = self._pool(), None
            return task, None

    def stop(self) -> None:
        processes = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:  # the cell that it may be at is given up
            process.kill()


def _settle_in(threads: int) -> None:
    """Ready a new process: few threads, deaf to Ctrl-C, and gone when the one that started it is gone."""
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)
    if hasattr(os, "setpgrp"):
        # Ctrl-C goes to the group of the terminal. CP-SAT would take it and end its search as if its time were up.
        os.setpgrp()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()


def _follow(sentinel: int) -> None:
    wait_for([sentinel])
    os._exit(1)


def _solve(task: Task) -> Outcome:
    from shardwise.solver.cells import solve_task

    return solve_task(task)


def cores() -> int:
    """Cores that this process may use."""
    with contextlib.suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
