"""Whole-process time, memory and what happened to the candidates, for real instances and from 64 to 65,536 devices.

    python benchmarks/scale.py [--repeat 3] [--out benchmarks/results]

Each line is a fresh process of the command line, so that start-up counts. Prints the medians with machine, versions and
seed; writes a dated CSV file, never edited afterwards, and the plot of how time grows.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple


class Case(NamedTuple):
    """What is planned; `options` are more words of the command."""

    model: str
    cluster: str
    seq_len: int
    batch: int
    options: str = ""


INSTANCES = [
    Case("llama-3.1-70b", "dgx-h100:8", 8192, 512),
    Case("llama-3.1-405b", "dgx-h100:2048", 8192, 2048),
    Case("gpt-3-175b", "dgx-a100:64", 2048, 1536),
    Case("llama-3.1-405b", "dgx-h100:2048", 131072, 128),
    Case("nemotron-h-56b", "dgx-h100:32", 8192, 768),
    Case("nemotron-3-nano-30b-a3b", "dgx-h100:4", 8192, 512),
    Case("qwen3-235b-a22b", "dgx-h100:32", 4096, 2048),
    Case("kimi-k2", "gb200-nvl72:144", 4096, 8192),
    Case("deepseek-v3", "dgx-h800:256", 4096, 15360),
    Case("deepseek-v3", "dgx-h800:256", 4096, 15360, "--mtp-layers 1"),
]
GROWTH = [Case("llama-3.1-70b", f"dgx-h100:{nodes}", 8192, max(512, nodes)) for nodes in (8, 32, 128, 512, 2048, 8192)]
ROWS = ("pruned_by_dominance", "pruned_by_memory", "pruned_by_shape_bound", "pruned_by_work_bound")
"""What drops candidates before their placements are looked at."""
SEED = 0
WORKERS = 2


def run_once(case: Case) -> dict[str, Any]:
    """One process: its document, seconds by the clock and of the processor, and peak resident memory."""
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "shardwise", "plan", "training", case.model, case.cluster, "--seq-len", str(case.seq_len),
            "--global-batch", str(case.batch), *case.options.split(), "--workers", str(WORKERS), "--seed", str(SEED),
            "--json", str(document), "-q",
        ]  # fmt: skip
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        if status:
            raise SystemExit(f"{' '.join(command)} ended with status {status}")
        result: dict[str, Any] = json.loads(document.read_text())
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return result | {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": usage.ru_maxrss / 1000}


def row(case: Case, repeat: int) -> dict[str, Any]:
    """Medians over `repeat` processes, and the tally of one (they are all the same)."""
    runs = [run_once(case) for _ in range(repeat)]
    report = runs[0]["report"]
    candidates, cp_sat = report["candidates"], report["cp_sat"]
    pruned = sum(count for name, count in candidates.items() if name in ROWS)
    return {
        "model": case.model,
        "cluster": case.cluster,
        "devices": report["universe"]["devices"],
        "seq_len": case.seq_len,
        "global_batch": case.batch,
        "options": case.options,
        "status": runs[0]["status"],
        "gap": f"{runs[0]['gap']:.1e}",
        "step_time_s": round(runs[0]["value"], 4),
        "seconds": round(statistics.median(run["seconds"] for run in runs), 2),
        "cpu_seconds": round(statistics.median(run["cpu_seconds"] for run in runs), 2),
        "candidates_per_s": round(candidates["enumerated"] / report["wall_time_s"]),
        "pruned_before_placement": round(pruned / candidates["enumerated"], 5),
        "peak_mb": round(statistics.median(run["peak_mb"] for run in runs)),
        **{name: value for name, value in candidates.items()},
        **{f"cp_{name}": value for name, value in cp_sat.items() if isinstance(value, int | float)},
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds against devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.loglog([r["devices"] for r in rows], [r["seconds"] for r in rows], "o-", base=2)
    axes.set_xlabel("devices")
    axes.set_ylabel("whole process, s")
    axes.set_title("Llama-3.1-70B on DGX H100, proven optimal")
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, seed {SEED}, {WORKERS} workers"
    )
    tables = {}
    for name, cases in (("instances", INSTANCES), ("growth", GROWTH)):
        rows = []
        for case in cases:
            rows.append(row(case, arguments.repeat))
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
        tables[name] = rows
    today = datetime.date.today().isoformat()
    for name, rows in tables.items():
        columns = list(dict.fromkeys(key for r in rows for key in r))
        with (arguments.out / f"{today}-{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    plot(tables["growth"], arguments.out / f"{today}-growth.png")


if __name__ == "__main__":
    main()
