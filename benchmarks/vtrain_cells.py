"""What the single-node runs of vTrain are made of, and how a smooth function of it ranks them.

    python benchmarks/vtrain_cells.py [--rows data/measured/training_calibration.csv]

(S1) On one node and without a pipeline a step of these rows is m (L c + e) + L s_d + r_d: m micro-batches of L layers,
     c and e set by the hidden size h, tp = t and the micro-batch b alone, s_d and r_d also by dp = d. Printed is what is left
     beyond it, and the layer time c of each cell (h, t, b).
(S2) A function of (h, t, b) in place of c, ln c a quadratic of their logarithms (10 numbers), fitted to the same cells,
     and fitted to all but the cell that it predicts. Every run is then taken at its measured time with its layers, 90 % of
     it, as long as the function says: all else is known exactly.
(S3) The regret of choosing by these times, over the sweeps of `shardwise validate`, beside that of the cost model.

This is no bound on what a cost model can do: ours, which knows kernels, ranks better than the quadratic.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.data.runs import read_runs
from shardwise.solver.validate import LEAST_LAYOUTS, sweep_key, validate

Floats = npt.NDArray[np.float64]
Cell = tuple[int, int, int]
"""Hidden size, tp and micro-batch."""

LAYERS_SHARE = 0.9
LEAST_ROWS = 5


def cell_of(run: Any) -> Cell:
    return int(float(run.row["hidden"])), run.degrees.tp, run.degrees.micro_batch


def layer_times(runs: list[Any]) -> tuple[dict[Cell, float], float]:
    """(S1) c in seconds by cell, and the largest share of a step that it leaves unexplained."""
    by_cell = defaultdict(list)
    for run in runs:
        if run.degrees.pp == 1:
            by_cell[cell_of(run)].append(run)
    found, worst = {}, 0.0
    for cell, rows in by_cell.items():
        if len(rows) < LEAST_ROWS:
            continue
        times = np.array([run.measured_step_time_s for run in rows])
        layers = np.array([float(run.row["layers"]) for run in rows])
        dp = np.array([run.degrees.dp for run in rows])
        micro_batches = np.array([float(run.row["global_batch"]) for run in rows]) / dp / cell[2]
        groups = [(dp == d).astype(float) for d in sorted(set(dp))]
        terms = np.stack([micro_batches * layers, micro_batches, *[g * layers for g in groups], *groups], axis=1)
        parts = np.linalg.lstsq(terms / times[:, None], np.ones(len(rows)), rcond=None)[0]
        found[cell] = float(parts[0])
        worst = max(worst, float(np.abs(terms @ parts / times - 1).max()))
    return found, worst


def quadratic(cells: list[Cell]) -> Floats:
    """(S2) 1, logarithms, squares and products."""
    x = np.log2(np.array(cells, dtype=np.float64))
    pairs = [x[:, i] * x[:, j] for i in range(3) for j in range(i, 3)]
    return np.stack([np.ones(len(cells)), *x.T, *pairs], axis=1)


def smooth(times: dict[Cell, float], *, left_out: bool) -> dict[Cell, float]:
    """(S2) What the fitted function says of each cell over what was measured."""
    cells, logs = list(times), np.log(list(times.values()))
    terms = quadratic(cells)
    out = {}
    for i, cell in enumerate(cells):
        seen = np.arange(len(cells)) != i if left_out else np.ones(len(cells), dtype=bool)
        parts = np.linalg.lstsq(terms[seen], logs[seen], rcond=None)[0]
        out[cell] = float(np.exp(terms[i] @ parts - logs[i]))
    return out


def regrets(runs: list[Any], guesses: Floats) -> Floats:
    """(S3) Of each sweep."""
    sweeps = defaultdict(list)
    for index, run in enumerate(runs):
        sweeps[sweep_key(run)].append(index)
    out = []
    for rows in sweeps.values():
        if len({(runs[i].degrees, runs[i].recompute) for i in rows}) >= LEAST_LAYOUTS:
            times = np.array([runs[i].measured_step_time_s for i in rows])
            out.append(times[int(np.argmin(guesses[rows]))] / times.min() - 1)
    return np.array(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=Path("data/measured/training_calibration.csv"))
    arguments = parser.parse_args()
    every = [run for run in read_runs(arguments.rows) if run.source == "vtrain" and run.measured_step_time_s]
    runs = [run for run in every if float(run.row["n_gpus"]) <= float(run.row["gpus_per_node"])]
    times, worst = layer_times(runs)
    print(f"{len(runs)} runs, {len(times)} cells; (S1) leaves at most {100 * worst:.2f} % of a step unexplained")
    print("layer, ms, by hidden size and tp, micro-batch ascending:")
    for hidden, tp in sorted({cell[:2] for cell in times}):
        row = [f"{1e3 * times[cell]:.2f}" for cell in sorted(times) if cell[:2] == (hidden, tp)]
        print(f"  {hidden:5d} tp={tp}  {'  '.join(row)}")
    measured = np.array([run.measured_step_time_s for run in runs])
    predictions = validate(runs).predictions
    rows = [("cost model", np.array([one.predicted_step_time_s for one in predictions], dtype=np.float64))]
    for name, left_out in (("quadratic, fitted to every cell", False), ("quadratic, cell left out", True)):
        ratio = smooth(times, left_out=left_out)
        of_run = np.array([ratio.get(cell_of(run), 1.0) for run in runs])
        rows.append((name, measured * (1 + LAYERS_SHARE * (of_run - 1))))
    for name, guesses in rows:
        found = regrets(runs, guesses)
        print(
            f"{name:32s} regret of {len(found)} sweeps: mean {100 * found.mean():.1f} %, worst {100 * found.max():.1f} %"
        )


if __name__ == "__main__":
    main()
