"""The command `batch`: a catalogue of cells into a store."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.data.faults import InputError
from shardwise.solver.terminal import (
    DONE,
    UNKNOWN,
    JsonOption,
    QuietOption,
    check_outputs,
    complain,
    err,
    show,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from shardwise.solver.batch import BatchProgress, BatchResult

FAILURES_SHOWN = 20


def batch_command(
    catalogue: Annotated[Path, typer.Argument(metavar="CATALOG", help="A TOML file: docs/batch.md.")],
    store: Annotated[Path, typer.Option("--store", metavar="DIR", help="Where results are kept; made if missing.")],
    engine: Annotated[str, typer.Option("--engine", help="local, or ray.")] = "local",
    workers: Annotated[
        int | None, typer.Option("--workers", help="Cores to use, all by default; with Ray, tasks in flight.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the cells, and those to solve.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Solve cells again that failed.")] = False,
    parquet: Annotated[
        str | None, typer.Option("--parquet", metavar="FILE", help="Write the store as a Parquet table at the end.")
    ] = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Solve the cells of CATALOG that the store lacks.

    Exit code 0 when every cell is in the store, failed ones included; 2 for bad input or a store that cannot be written; 3
    when cells are left, after Ctrl-C. Run it again for what is left.
    """
    from shardwise.solver.batch import batch, missing
    from shardwise.solver.catalogue_file import read_catalogue

    check_outputs(json=json_path, parquet=parquet)
    if parquet is not None:
        check_parquet(parquet)
    found = read_catalogue(catalogue)
    console = show(json_path)
    if dry_run:
        cells, left = missing(found, store, retry_failed=retry_failed)
        counts = {"cells": cells, "dropped": found.dropped, "stored": cells - left, "to_solve": left}
        write_json({"catalogue": found.name, "store": str(store), **counts}, json_path)
        line(console, f"{cells:,} cells, {found.dropped:,} dropped; {cells - left:,} stored, {left:,} to solve")
        raise typer.Exit(DONE)
    with until_interrupted() as interrupted, progress_bar(quiet) as report:
        result = batch(
            found,
            store,
            engine=engine,
            workers=workers,
            retry_failed=retry_failed,
            on_progress=report,
            interrupted=interrupted,
        )
    write_json(result.to_dict(), json_path)
    if parquet is not None:
        from shardwise.solver.store import load_store

        load_store(store).to_parquet(parquet, index=False)
    show_batch(console, result)
    if not result.finished:
        complain("interrupted; the same command solves what is left")
    raise typer.Exit(DONE if result.finished else UNKNOWN)


def check_parquet(path: str) -> None:
    """Refuse what would fail after hours of solving."""
    if path == "-":
        raise InputError("--parquet must be a file")
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise InputError("--parquet needs pyarrow: pip install 'shardwise[parquet]'") from None


@contextmanager
def until_interrupted() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the first one lets the cells at work finish, the second one leaves them."""
    pressed = False

    def note(*_: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        err.print("finishing the cells at work; Ctrl-C again leaves them", highlight=False)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[BatchProgress], None] | None]:
    """A bar with cells a second, time left and failures on a terminal, nothing elsewhere."""
    if quiet or not err.is_terminal:
        yield None
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("", total=None)

        def report(progress: BatchProgress) -> None:
            bar.update(task, total=progress.total, completed=progress.done, description=escape(in_words(progress)))

        yield report


def in_words(progress: BatchProgress) -> str:
    """What stands beside the bar."""
    words = [f"{progress.cells_per_s:.2f} cells/s", f"{progress.failed} failed"]
    if progress.left_s is not None:
        minutes, seconds = divmod(round(progress.left_s), 60)
        words.insert(0, f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left")
    if progress.elsewhere:
        words.append(f"{progress.elsewhere} with another batch")
    return ", ".join([*words, progress.cell] if progress.cell else words)


def show_batch(console: Console, result: BatchResult) -> None:
    """What a batch came to."""
    statuses = ", ".join(f"{count:,} {status}" for status, count in sorted(result.statuses.items()))
    line(console, f"{result.catalogue}: {result.cells:,} cells, {statuses or 'none solved'}")
    pace = f", {result.solved / result.wall_s:.2f} cells/s on {result.workers} workers" if result.solved else ""
    line(console, f"{result.stored:,} were stored, {result.solved:,} solved in {result.wall_s:.1f} s{pace}")
    for cell, what, reason in result.failures[:FAILURES_SHOWN]:
        line(console, f"failed: {what} ({cell[:8]}): {reason}")
    if len(result.failures) > FAILURES_SHOWN:
        line(console, f"and {len(result.failures) - FAILURES_SHOWN:,} more; the column `reason` of the store has all")


def line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
