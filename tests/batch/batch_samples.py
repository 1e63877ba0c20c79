"""What the tests of batches share: a catalogue of twelve small cells, and ways to run it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

from shardwise.solver.store import TAKEN, load_store

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

CELLS = 12
SAMPLE = """
models = ["llama-3.2-1b"]
clusters = ["dgx-a100", "dgx-h100"]
nodes = [1]
seq_lens = [2048, 4096]
global_batches = [64]
objectives = ["step-time", "cost", "energy"]
"""


def write_sample(folder: Path, text: str = SAMPLE) -> Path:
    path = folder / "sample.toml"
    path.write_text(text, encoding="utf-8")
    return path


def command(catalogue: Path, store: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "shardwise", "batch", str(catalogue), "--store", str(store), "-q", *options]


def start(catalogue: Path, store: Path, *options: str, **how: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(catalogue, store, *options), **(pipes | how))


def results(store: Path) -> pd.DataFrame:
    """The table of a store without what tells of the run."""
    return load_store(store).drop(columns=list(TAKEN))
