"""Solve the cells of a catalogue into a store, each once, whoever else is at work on it and however often it is interrupted."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.data.faults import InputError
from shardwise.solver.catalogue_file import Catalogue, read_catalogue
from shardwise.solver.cells import failed, tasks_of
from shardwise.solver.engines import LocalEngine, cores
from shardwise.solver.store import FILE, Held, Store, finished_cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from os import PathLike

    from shardwise.solver.cells import Outcome, Task
    from shardwise.solver.engines import Engine

ENGINES = ("local", "ray")
TRIES = 2
"""A cell whose process ended is tried so often in all."""
POLL_S = 0.25
"""How often Ctrl-C, and cells that another batch is at, are looked at."""


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """One report of a running batch. `stored` were there before, `elsewhere` wait for another batch; `cell` is the last one."""

    total: int
    stored: int
    solved: int
    failed: int
    elsewhere: int
    elapsed_s: float
    cell: str = ""

    @property
    def done(self) -> int:
        return self.stored + self.solved

    @property
    def cells_per_s(self) -> float:
        return self.solved / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds that the rest takes at the pace so far."""
        return (self.total - self.done) / self.cells_per_s if self.solved else None

    def __str__(self) -> str:
        left = "-" if self.left_s is None else f"{self.left_s:.0f} s"
        counts = f"{self.done}/{self.total} cells, {self.failed} failed"
        return f"{counts}, {self.cells_per_s:.2f} cells/s, {left} left {self.cell}".rstrip()


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a batch came to. `finished` when every cell of the catalogue is in the store; `statuses` counts all of them."""

    catalogue: str
    store: str
    cells: int
    dropped: int
    stored: int
    solved: int
    statuses: dict[str, int]
    failures: tuple[tuple[str, str, str], ...]
    wall_s: float
    workers: int

    @property
    def finished(self) -> bool:
        return sum(self.statuses.values()) == self.cells

    def to_dict(self) -> dict[str, Any]:
        """The document that `batch --json` writes."""
        names = (
            "catalogue",
            "store",
            "cells",
            "dropped",
            "stored",
            "solved",
            "finished",
            "statuses",
            "wall_s",
            "workers",
        )
        document = {name: getattr(self, name) for name in names}
        document["cells_per_s"] = self.solved / self.wall_s if self.wall_s else 0.0
        document["failures"] = [{"cell": cell, "what": what, "reason": reason} for cell, what, reason in self.failures]
        return document


def batch(
    catalogue: str | PathLike[str] | Catalogue,
    store: str | PathLike[str],
    *,
    engine: str = "local",
    workers: int | None = None,
    retry_failed: bool = False,
    on_progress: Callable[[BatchProgress], None] | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> BatchResult:
    """Solve the cells of a catalogue that a store lacks.

    Parameters
    ----------
    catalogue
        A TOML file, docs/batch.md, or what `read_catalogue` made of one.
    store
        A folder, made where it is missing.
    engine
        "local", or "ray" for tasks on a Ray cluster.
    workers
        Cores to use, those that there are at most and by default; so many CP-SAT workers run at once in all processes
        together. With "ray", tasks in flight.
    retry_failed
        Solve cells again that are stored as failed.
    interrupted
        Asked a few times a second; once it is true no further cell is begun, and those at work are finished.

    Raises
    ------
    InputError
        With every fault of the catalogue, or when the store cannot be written. Cells that fail are rows of the store.
    """
    started = time.monotonic()
    if engine not in ENGINES:
        raise InputError(f"engine={engine!r} must be one of {', '.join(ENGINES)}")
    if workers is not None and not 0 < workers <= 4096:
        raise InputError(f"workers={workers} must be between 1 and 4096")
    if not isinstance(catalogue, Catalogue):
        catalogue = read_catalogue(Path(catalogue))
    tasks = tasks_of(catalogue.cells)
    with Store(Path(store)) as kept:
        run = _Run(kept, tasks, retry_failed, on_progress, interrupted)
        threads = max((task.cell.settings.solver_workers for task in tasks), default=1)
        if run.open:
            with contextlib.closing(_engine(engine, workers, threads)) as machine:
                run.through(machine)
        held, reasons = kept.held(), kept.reasons()
    keys = {task.key: str(task.cell) for task in tasks}
    return BatchResult(
        catalogue=catalogue.name,
        store=str(store),
        cells=len(tasks),
        dropped=catalogue.dropped,
        stored=run.stored,
        solved=run.solved,
        statuses=dict(Counter(held[key].status for key in keys if key in held)),
        failures=tuple((key, keys[key], reason) for key, reason in reasons.items() if key in keys),
        wall_s=time.monotonic() - started,
        workers=min(workers or cores(), cores()),
    )


def missing(catalogue: Catalogue, store: Path, *, retry_failed: bool = False) -> tuple[int, int]:
    """How many cells a catalogue has, and how many of them a batch would solve."""
    tasks = tasks_of(catalogue.cells)
    held = finished_cells(store) if (store / FILE).exists() else {}
    return len(tasks), sum(wanted(task, held.get(task.key), retry_failed) for task in tasks)


def wanted(task: Task, held: Held | None, retry_failed: bool) -> bool:
    """Whether a cell is to be solved: not stored yet, or left open by a shorter time limit, or failed and to be retried."""
    if held is None:
        return True
    if held.status == "FAILED":
        return retry_failed
    if held.status not in ("FEASIBLE", "UNKNOWN") or held.time_limit_s is None:
        return False
    limit = task.cell.settings.time_limit_s
    return limit is None or limit > held.time_limit_s


def _engine(name: str, workers: int | None, threads: int) -> Engine:
    if name == "ray":
        from shardwise.solver.ray_engine import RayEngine

        return RayEngine(workers, threads)
    most = min(workers or cores(), cores())
    if threads > most:
        raise InputError(f"solver_workers={threads} asks for more than the {most} cores of this batch")
    return LocalEngine(most // threads, threads)


class _Run:
    """The cells that are open, and what became of the others."""

    def __init__(
        self,
        store: Store,
        tasks: list[Task],
        retry_failed: bool,
        on_progress: Callable[[BatchProgress], None] | None,
        interrupted: Callable[[], bool],
    ) -> None:
        self.store, self.on_progress, self.interrupted = store, on_progress, interrupted
        held = store.held()
        self.retry = {key for key, own in held.items() if own.status == "FAILED"} if retry_failed else set()
        todo = [task for task in tasks if self.wants(task, held.get(task.key))]
        self.open: dict[str, deque[Task]] = {}
        for task in todo:
            self.open.setdefault(task.instance_key, deque()).append(task)
        self.elsewhere: list[Task] = []
        self.tries: Counter[str] = Counter()
        self.total, self.stored, self.solved, self.failed = len(tasks), len(tasks) - len(todo), 0, 0
        self.started = time.monotonic()

    def wants(self, task: Task, held: Held | None) -> bool:
        return wanted(task, held, task.key in self.retry)

    def through(self, engine: Engine) -> None:
        """Solve what is open, then wait for what other batches are at, and solve what they leave."""
        at_work = 0
        self.report()
        while True:
            stopping = self.interrupted()
            for warm in () if stopping else engine.idle():
                task = self.next(warm)
                if task is None:
                    break
                engine.submit(task)
                at_work += 1
            if at_work:
                done = engine.collect(POLL_S)
                at_work -= len(done)
                self.keep(done)
            elif stopping or not (self.open or self.elsewhere):
                return
            else:
                time.sleep(POLL_S)
                self.look_again()

    def next(self, warm: str | None) -> Task | None:
        """A cell that is claimed now, of the instance that a place knows if there is one."""
        while self.open:
            key = warm if warm in self.open else next(iter(self.open))
            own = self.open.pop(key)
            task = own.popleft()
            if own:  # to the end, so that other places begin with other instances
                self.open[key] = own
            claim = self.store.claim(task.key, lambda held, task=task: self.wants(task, held))  # type: ignore[misc]
            if claim == "mine":
                return task
            if claim == "done":
                self.stored += 1
            else:
                self.elsewhere.append(task)
        return None

    def look_again(self) -> None:
        """Cells that others were at are open again; claiming tells whether they are done."""
        for task in self.elsewhere:
            self.open.setdefault(task.instance_key, deque()).append(task)
        self.elsewhere.clear()

    def keep(self, done: Iterable[tuple[Task, Outcome | None]]) -> None:
        for task, outcome in done:
            if outcome is None:
                self.tries[task.key] += 1
                if self.tries[task.key] < TRIES:
                    self.store.release(task.key)
                    self.open.setdefault(task.instance_key, deque()).append(task)
                    continue
                outcome = failed(
                    task, (f"its process ended {TRIES} times before it was done, as one out of memory does",)
                )
            self.store.finish(outcome.row, outcome.document)
            self.retry.discard(task.key)
            self.solved += 1
            self.failed += outcome.row["status"] == "FAILED"
            self.report(str(task.cell))

    def report(self, cell: str = "") -> None:
        if self.on_progress is not None:
            self.on_progress(
                BatchProgress(
                    self.total,
                    self.stored,
                    self.solved,
                    self.failed,
                    len(self.elsewhere),
                    time.monotonic() - self.started,
                    cell,
                )
            )
