"""The shipped catalogue, solved twice; then killed ten times and resumed; then a store of 10,000 cells, read and plotted.

    python benchmarks/bench_catalogue.py [--store DIR] [--workers N] [--kills 10] [--catalogue FILE]

Prints seconds of this machine, and asserts what does not depend on it: the second run solves nothing, and the table of the
resumed runs is that of an undisturbed one.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

from shardwise.solver.batch import BatchProgress, batch
from shardwise.solver.engines import cores
from shardwise.solver.solve import versions
from shardwise.solver.store import TAKEN, Store, finished_cells, load_store

HERE = Path(__file__).parent
SHIPPED = HERE / "catalogue.toml"
CLOSE = 0.01
ROWS = 10_000
SMALL = """
models = ["llama-3.2-1b", "llama-3.1-8b"]
clusters = ["dgx-a100", "dgx-h100"]
nodes = [1, 2]
seq_lens = [2048, 4096]
global_batches = [64]
objectives = ["step-time", "cost", "energy"]
"""


def solved_twice(catalogue: Path, store: Path, workers: int | None) -> None:
    def report(progress: BatchProgress) -> None:
        print(f"\r{progress}\033[K", end="", file=sys.stderr, flush=True)

    first = batch(catalogue, store, workers=workers, on_progress=report)
    print(file=sys.stderr)
    table = load_store(store)
    close = (table.status == "OPTIMAL") | (table.gap <= CLOSE)
    none = table.status == "INFEASIBLE"
    print(f"{first.cells} cells, {first.stored} stored before")
    print(f"{first.solved} solved in {first.wall_s:.1f} s on {first.workers} workers")
    print(f"statuses: {first.statuses}")
    print(
        f"OPTIMAL or gap <= {100 * CLOSE:g} %: {100 * close.mean():.1f} %; proven infeasible: {100 * none.mean():.1f} %"
    )
    print(f"seconds of a core: {table.cpu_s.sum():.0f} in all, {table.cpu_s.mean():.2f} a cell")
    by_model = table.groupby("model", observed=True).cpu_s.agg(["count", "mean", "max"]).round(2)
    print(by_model.to_string())
    second = batch(catalogue, store, workers=workers)
    assert second.solved == 0
    assert second.finished
    print(f"second run: nothing to solve, {second.wall_s:.2f} s\n")


def killed_and_resumed(folder: Path, kills: int, seed: int) -> None:
    catalogue = folder / "small.toml"
    catalogue.write_text(SMALL, encoding="utf-8")
    whole = batch(catalogue, folder / "undisturbed")
    draw, store, done = random.Random(seed), folder / "killed", 0
    command = [sys.executable, "-m", "shardwise", "batch", str(catalogue), "--store", str(store), "-q"]
    for number in range(1, kills + 1):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.5, 1.5) * (2 + whole.wall_s / kills))
        ended = process.poll() is not None
        process.kill()
        process.wait()
        done = len(finished_cells(store)) if (store / "store.sqlite").exists() else 0
        print(f"kill {number}: {done} of {whole.cells} cells stored{', ended before' if ended else ''}")
    last = batch(catalogue, store)
    assert last.stored == done
    assert last.stored + last.solved == whole.cells
    resumed, undisturbed = (load_store(folder / own).drop(columns=list(TAKEN)) for own in ("killed", "undisturbed"))
    pd.testing.assert_frame_equal(resumed, undisturbed)
    print(f"killed {kills} times and resumed: the table of {whole.cells} cells is that of an undisturbed run\n")


def read_and_plotted(folder: Path, rows: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with Store(folder / "large") as store:
        for index in range(rows):
            store.finish(
                {
                    "cell": f"{index:032x}", "model": f"model-{index % 40}", "cluster": f"cluster-{index % 50}",
                    "objective": ("step-time", "cost")[index % 2], "status": "OPTIMAL", "value": 1.0 + index,
                    "usd_per_million_tokens": 1.0 + index % 97, "devices_used": 8 * (1 + index % 64),
                },
                {"plan": {"of": index}},
            )  # fmt: skip
    started = time.perf_counter(), time.process_time()
    table = load_store(folder / "large")
    opened = time.perf_counter()
    chosen = table[(table.status == "OPTIMAL") & (table.objective == "cost")]
    figure, axes = pyplot.subplots()
    for _, own in chosen.groupby("model", observed=True):
        axes.plot(own.devices_used, own.usd_per_million_tokens, ".")
    figure.savefig(folder / "plot.png")
    wall_s, cpu_s = time.perf_counter() - started[0], time.process_time() - started[1]
    print(
        f"{rows:,} cells opened in {opened - started[0]:.2f} s, filtered and plotted in {wall_s:.2f} s ({cpu_s:.2f} s of a core)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--catalogue", type=Path, default=SHIPPED)
    parser.add_argument("--store", type=Path, help="kept; a new one each time without it")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=6)
    options = parser.parse_args()
    print(f"{cores()} cores; {', '.join(f'{name} {version}' for name, version in versions().items())}\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        solved_twice(options.catalogue, options.store or folder / "catalogue", options.workers)
        if options.kills:
            killed_and_resumed(folder, options.kills, options.seed)
        read_and_plotted(folder, ROWS)


if __name__ == "__main__":
    main()
