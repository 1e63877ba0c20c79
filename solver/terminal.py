"""What every command shares: exit codes, options, and how results, tables and faults are written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shardwise.data.faults import InputError

DONE, NO, BAD_INPUT, UNKNOWN = 0, 1, 2, 3
INTERRUPTED = 130
"""How typer exits on Ctrl-C outside a command."""


class Output(Console):
    """A console that falls silent when its reader leaves; what was computed keeps its exit code."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


out = Output()
err = Console(stderr=True)

JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON (- for stdout).")
]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")]


def complain(fault: str) -> None:
    """One fault on one line of stderr, whatever characters it holds."""
    err.print(f"error: {fault}", highlight=False, markup=False, soft_wrap=True)


def write(text: str, path: str) -> None:
    """To a file, or to stdout for `-`. A file is replaced whole or not at all."""
    if path == "-":
        sys.stdout.write(text + "\n")
        return
    target = Path(path).resolve()
    if target.exists() and not target.is_file():  # a device or a pipe is written to, never replaced
        target.write_text(text + "\n", encoding="utf-8")
        return
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def check_outputs(**paths: str | None) -> None:
    """Refuse outputs that cannot be written before any work is done for them."""
    faults = []
    for option, path in paths.items():
        if path in (None, "-"):
            continue
        target = Path(path or "")
        if not path or target.is_dir():
            faults.append(f"--{option} {path!r} must be a file")
        elif not target.absolute().parent.is_dir():
            faults.append(f"--{option} {path!r}: there is no folder {target.parent}")
    files = [Path(path) for path in paths.values() if path and path != "-"]
    written = [file.resolve() for file in files if file.is_file() or not file.exists()]
    if len(set(written)) < len(written):
        faults.append(f"--{' and --'.join(paths)} must not name the same file")
    if list(paths.values()).count("-") > 1:
        faults.append(f"only one of --{' and --'.join(paths)} can go to stdout")
    if faults:
        raise InputError(faults)


def write_json(document: Any, path: str | None) -> None:
    if path is not None:
        write(json.dumps(document, indent=2), path)


def show(*paths: str | None) -> Console:
    """Where tables go: nowhere when a file goes to stdout."""
    return Console(quiet=True) if "-" in paths else out
