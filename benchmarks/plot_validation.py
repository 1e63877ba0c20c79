"""Plots of predicted against measured, for docs/cost-model.md.

    python benchmarks/plot_validation.py [--rows FILE.csv] [--out docs/img]

Three figures: step time of every scored run by source; mean error by source, fitted and with the source left out; peak
memory of every reading. Text is in the figures' own words, numbers come from `shardwise validate` alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import matplotlib.pyplot as plt

from shardwise.data.runs import read_runs, shipped_runs
from shardwise.solver.validate import Validation, validate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.data.runs import Run

matplotlib.use("Agg")


def identity(axes: Any, low: float, high: float) -> None:
    """Perfect prediction, and ten per cent to either side."""
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="black", alpha=0.08)


def plot_times(runs: Sequence[Run], result: Validation, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 5.6), dpi=130)
    sources = list(dict.fromkeys(run.source for run in runs))
    colours = plt.get_cmap("tab20")
    for index, source in enumerate(sources):
        points = [
            (run.measured_step_time_s or 0.0, p.predicted_step_time_s)
            for run, p in zip(runs, result.predictions, strict=True)
            if run.source == source and run.scored and p.predicted_step_time_s
        ]
        if points:
            axes.scatter(
                [x for x, _ in points], [y for _, y in points], s=9, alpha=0.7, label=source, color=colours(index % 20)
            )
    identity(axes, 0.05, 400)
    axes.set(xscale="log", yscale="log", xlabel="measured step time, s", ylabel="predicted step time, s")
    axes.legend(fontsize=7, ncol=2)
    axes.set_title("Step time, shaded: within 10 %", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def plot_errors(result: Validation, path: Path) -> None:
    chosen = [s for s in result.sources if s.time_mape is not None]
    chosen.sort(key=lambda s: s.left_out_mape or 0.0)
    figure, axes = plt.subplots(figsize=(6.4, 4.6), dpi=130)
    rows = range(len(chosen))
    axes.barh([r + 0.2 for r in rows], [100 * (s.left_out_mape or 0.0) for s in chosen], 0.4, label="source left out")
    axes.barh([r - 0.2 for r in rows], [100 * (s.time_mape or 0.0) for s in chosen], 0.4, label="fitted")
    axes.set_yticks(list(rows), [f"{s.source} ({s.timed})" for s in chosen], fontsize=8)
    axes.set_xlabel("mean absolute error of the step time, %")
    axes.legend(fontsize=8)
    axes.set_title("Errors by source (runs)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def plot_memory(runs: Sequence[Run], result: Validation, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 4.6), dpi=130)
    for source in dict.fromkeys(run.source for run in runs):
        points = [
            (run.measured_memory_gb, p.predicted_peak_mem_gb)
            for run, p in zip(runs, result.predictions, strict=True)
            if run.source == source and run.measured_memory_gb and p.predicted_peak_mem_gb
        ]
        if points:
            axes.scatter([x for x, _ in points], [y for _, y in points], s=14, alpha=0.7, label=source)
    identity(axes, 5, 95)
    axes.set(xlabel="measured peak memory, GB", ylabel="predicted peak memory, GB")
    axes.legend(fontsize=8)
    axes.set_title("Peak memory of the worst device, shaded: within 10 %", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    arguments = parser.parse_args()
    runs = list(shipped_runs() if arguments.rows is None else read_runs(arguments.rows))
    result = validate(runs, leave_out=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    plot_times(runs, result, arguments.out / "step-time.png")
    plot_errors(result, arguments.out / "errors.png")
    plot_memory(runs, result, arguments.out / "memory.png")


if __name__ == "__main__":
    main()
