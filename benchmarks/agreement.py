"""Whether what is proven is what the schedule takes: random pipelines, solved and simulated event by event.

    python benchmarks/agreement.py [--instances 500] [--first 0] [--free-chunks] [--time-limit 60]

Attention, MLP-only and Mamba layers in random order, 2 to 16 stages, p to 16 p micro-batches, every schedule of the pack
`free` in turn. Prints a line for each schedule, and every instance that is not closed or does not agree; Ctrl-C
stops it early. With `--free-chunks` those of the instances that have several chunks a stage, which may be of any size then:
there a gap is promised, no optimum, and each search ends once it is proven; the last lines say how many gaps are above it,
and which.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "solver"))

from reference_simulator import simulated_step_s
from schedule_instances import SEARCHED, instance_with

from shardwise.solver.progress import FINAL
from shardwise.solver.search import TimeUpError
from shardwise.solver.solve import solve

if TYPE_CHECKING:
    from shardwise.solver.result import Progress

TIME_LIMIT_S = 60.0
PROMISED_GAP = 0.05
"""With chunks of any size."""
ROUNDING = 1e-4
"""More than what the gap of a result is above that of the last progress."""


@dataclass(frozen=True)
class Line:
    """One solved instance."""

    seed: int
    status: str
    apart: float
    gap: float
    seconds: float
    cut_rounds: int


def stop_as_promised(progress: Progress) -> None:
    """End the search, as a time limit would, with the gap that is promised."""
    if progress.phase not in FINAL and progress.gap is not None and progress.gap <= PROMISED_GAP - ROUNDING:
        raise TimeUpError


def solved(seed: int, time_limit_s: float, *, free_chunks: bool) -> Line:
    instance = instance_with(seed)
    started = time.monotonic()
    result = solve(
        instance=instance,
        workers=1,
        time_limit_s=time_limit_s,
        free_chunks=free_chunks,
        on_progress=stop_as_promised if free_chunks else None,
    )
    seconds = time.monotonic() - started
    if result.plan is None or result.value is None or result.gap is None:
        return Line(seed, result.status, 1.0, 1.0, seconds, 0)
    apart = abs(result.value / simulated_step_s(instance, result.plan) - 1)
    return Line(seed, result.status, apart, result.gap, seconds, result.report["cp_sat"]["cut_rounds"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--instances", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="seed of the first instance")
    parser.add_argument("--free-chunks", action="store_true")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds for each instance")
    options = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, OR-Tools {metadata.version('ortools')}, 1 worker")
    seeds = [
        seed
        for seed in range(options.first, options.first + options.instances)
        if not options.free_chunks or instance_with(seed).limits.range("vpp").low > 1
    ]
    lines: dict[str, list[Line]] = defaultdict(list)
    try:
        for done, seed in enumerate(seeds, 1):
            line = solved(seed, options.time_limit, free_chunks=options.free_chunks)
            lines[SEARCHED[seed % len(SEARCHED)]].append(line)
            short = line.gap > PROMISED_GAP if options.free_chunks else line.status != "OPTIMAL"
            if short or line.apart > 1e-3:
                print(f"  seed {seed}: {line.status}, gap {line.gap:.3%}, apart {line.apart:.2e}, {line.seconds:.1f} s")
            if sys.stderr.isatty():
                print(f"\r{done}/{len(seeds)}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"stopped after {sum(map(len, lines.values()))} of {len(seeds)} instances")
    print(
        f"{'schedule':<18}{'instances':>10}{'optimal':>9}{'worst gap':>11}{'apart':>9}{'median s':>10}{'worst s':>9}{'rounds':>8}"
    )
    for schedule, own in lines.items():
        print(
            f"{schedule:<18}{len(own):>10}{sum(line.status == 'OPTIMAL' for line in own):>9}"
            f"{max(line.gap for line in own):>11.2e}{max(line.apart for line in own):>9.1e}"
            f"{statistics.median(line.seconds for line in own):>10.2f}{max(line.seconds for line in own):>9.1f}"
            f"{statistics.mean(line.cut_rounds for line in own):>8.1f}"
        )
    if options.free_chunks and (own := [line for schedule in lines.values() for line in schedule]):
        wide = sorted(line.seed for line in own if line.gap > PROMISED_GAP)
        print(f"gap above {PROMISED_GAP:.0%}: {len(wide)} of {len(own)}; seeds {wide}")


if __name__ == "__main__":
    main()
