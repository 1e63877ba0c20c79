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
from typing import Any

INSTANCES = [
    ("llama-3.1-70b", "dgx-h100:8", 8192, 512),
    ("llama-3.1-405b", "dgx-h100:2048", 8192, 2048),
    ("gpt-3-175b", "dgx-a100:64", 2048, 1536),
    ("llama-3.1-405b", "dgx-h100:2048", 131072, 128),
    ("nemotron-h-56b", "dgx-h100:32", 8192, 768),
    ("nemotron-3-nano-30b-a3b", "dgx-h100:4", 8192, 512),
    ("qwen3-235b-a22b", "dgx-h100:32", 4096, 2048),
    ("kimi-k2", "gb200-nvl72:144", 4096, 8192),
    ("deepseek-v3", "dgx-h800:256", 4096, 15360),
]
GROWTH = [("llama-3.1-70b", f"dgx-h100:{nodes}", 8192, max(512, nodes)) for nodes in (8, 32, 128, 512, 2048, 8192)]
ROWS = ("pruned_by_dominance", "pruned_by_memory", "pruned_by_shape_bound", "pruned_by_work_bound")
"""What drops candidates before their placements are looked at."""
SEED = 0
WORKERS = 2


def run_once(model: str, cluster: str, seq_len: int, batch: int) -> dict[str, Any]:
    """One process: its document, seconds and peak resident memory."""
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "shardwise", "plan", "training", model, cluster, "--seq-len", str(seq_len),
            "--global-batch", str(batch), "--workers", str(WORKERS), "--seed", str(SEED), "--json", str(document), "-q",
        ]  # fmt: skip
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        if status:
            raise SystemExit(f"{' '.join(command)} ended with status {status}")
        result: dict[str, Any] = json.loads(document.read_text())
    return result | {"seconds": seconds, "peak_mb": usage.ru_maxrss / 1000}


def row(model: str, cluster: str, seq_len: int, batch: int, repeat: int) -> dict[str, Any]:
    """Medians over `repeat` processes, and the tally of one (they are all the same)."""
    runs = [run_once(model, cluster, seq_len, batch) for _ in range(repeat)]
    report = runs[0]["report"]
    candidates, cp_sat = report["candidates"], report["cp_sat"]
    pruned = sum(count for name, count in candidates.items() if name in ROWS)
    return {
        "model": model,
        "cluster": cluster,
        "devices": report["universe"]["devices"],
        "seq_len": seq_len,
        "global_batch": batch,
        "status": runs[0]["status"],
        "gap": f"{runs[0]['gap']:.1e}",
        "step_time_s": round(runs[0]["value"], 4),
        "seconds": round(statistics.median(run["seconds"] for run in runs), 2),
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
    for name, instances in (("instances", INSTANCES), ("growth", GROWTH)):
        rows = []
        for instance in instances:
            rows.append(row(*instance, arguments.repeat))
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
