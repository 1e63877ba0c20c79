"""How well constants that are fitted to ranks alone rank the single-node runs of vTrain, and the runs of another size.

    python benchmarks/vtrain_ranks.py [--seconds 120] [--most-error 0.065]

(O1) Seven constants of the profile and the exponent of (J3), within the bounds of the profile, are chosen by differential
     evolution (scipy, seed 0) to minimise  mean regret + 0.2 max(0, worst regret - 10 %) + 2 max(0, error - `most-error`)
     over the sweeps of `shardwise validate`: not the times, but the very figure that is asked for.
(O2) The same on the sweeps of one hidden size; the other size shows what of it carries over.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import differential_evolution

from shardwise.data.runs import shipped_runs
from shardwise.formulations import layer_time
from shardwise.formulations.table import plan_table, step_times_s
from shardwise.solver.measured import planned_runs
from shardwise.solver.validate import LEAST_LAYOUTS, sweep_key

Floats = npt.NDArray[np.float64]

BOUNDS = {
    "gemm": (0.8, 1.6),
    "core": (0.5, 1.8),
    "elementwise": (0.3, 4.0),
    "host_launch_s": (1e-6, 2e-4),
    "tp_comm_exposed": (0.2, 2.5),
    "tp_sync_s": (1e-7, 4e-5),
    "dp_comm_floor": (0.02, 4.0),
    "HOST_JOIN": (1.5, 30.0),
}


class Runs:
    """The runs on one node, their table and their sweeps."""

    def __init__(self) -> None:
        planned = [
            p
            for p in planned_runs([run for run in shipped_runs() if run.source == "vtrain"])
            if p.timed and float(p.run.row["n_gpus"]) <= float(p.run.row["gpus_per_node"])
        ]
        self.table = plan_table([(p.units, p.plan) for p in planned if p.units and p.plan])
        assert planned[0].units is not None
        self.profile = planned[0].units.tables.instance.profile
        self.measured = np.array([p.run.measured_step_time_s for p in planned])
        self.hidden = np.array([float(p.run.row["hidden"]) for p in planned])
        rows: dict[Any, list[int]] = {}
        for index, p in enumerate(planned):
            rows.setdefault(sweep_key(p.run), []).append(index)
        self.sweeps = [
            np.array(own)
            for own in rows.values()
            if len({(planned[i].run.degrees, planned[i].run.recompute) for i in own}) >= LEAST_LAYOUTS
        ]

    def times(self, logs: Floats) -> Floats:
        chosen = dict(zip(BOUNDS, np.exp(logs).tolist(), strict=True))
        layer_time.HOST_JOIN = chosen.pop("HOST_JOIN")
        known = {name: getattr(self.profile, name) for name in dir(self.profile) if not name.startswith("_")}
        return step_times_s(self.table, SimpleNamespace(**(known | chosen)))

    def figures(self, times: Floats, hidden: float | None) -> tuple[float, float, float]:
        """Mean and worst regret, and mean error of the time, of the runs of one size or of all."""
        own = np.ones(len(times), bool) if hidden is None else self.hidden == hidden
        sweeps = [rows for rows in self.sweeps if own[rows[0]]]
        regret = [self.measured[rows][np.argmin(times[rows])] / self.measured[rows].min() - 1 for rows in sweeps]
        return float(np.mean(regret)), float(np.max(regret)), float(np.abs(times / self.measured - 1)[own].mean())


def fitted_to_ranks(runs: Runs, hidden: float | None, most_error: float, seconds: float) -> Floats:
    """(O1) The times of the best constants."""
    started = time.monotonic()

    def worth(logs: Floats) -> float:
        mean, worst, error = runs.figures(runs.times(logs), hidden)
        return mean + 0.2 * max(0.0, worst - 0.1) + 2 * max(0.0, error - most_error)

    found = differential_evolution(
        worth,
        [(np.log(low), np.log(high)) for low, high in BOUNDS.values()],
        popsize=8,
        maxiter=400,
        rng=0,
        tol=0,
        callback=lambda intermediate_result: time.monotonic() - started > seconds,
    )
    return runs.times(found.x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="for each of the three searches")
    parser.add_argument("--most-error", type=float, default=0.065)
    arguments = parser.parse_args()
    runs = Runs()
    sizes = sorted(set(runs.hidden.tolist()))

    def line(name: str, times: Floats, hidden: float | None) -> None:
        mean, worst, error = (100 * figure for figure in runs.figures(times, hidden))
        print(f"{name:44s} regret: mean {mean:4.1f} %, worst {worst:4.1f} %; time {error:4.1f} %", flush=True)

    fitted = step_times_s(runs.table, runs.profile)
    for hidden in (None, *sizes):
        line(f"profile, {'all' if hidden is None else f'hidden {hidden:.0f}'}", fitted, hidden)
    line("fitted to the ranks of all", fitted_to_ranks(runs, None, arguments.most_error, arguments.seconds), None)
    for hidden, other in zip(sizes, reversed(sizes), strict=True):
        times = fitted_to_ranks(runs, hidden, arguments.most_error, arguments.seconds)
        line(f"fitted to the ranks of hidden {hidden:.0f}", times, hidden)
        line(f"  and hidden {other:.0f} by these", times, other)


if __name__ == "__main__":
    main()
