"""Fit the power of a device by phase to node power measured at the wall.

    python benchmarks/fit_power.py FACTS --out data/power.toml

FACTS is a folder holding `measured/power_calibration.csv`. Writes the constants of `formulations/energy.py` to --out, and
the measurements with the phases they were given to `measured_power.csv` beside it; prints the errors, also those on a
group of runs that the fit did not see.

Runs of one model on one number of devices repeat each other: each group counts once. Three groups fit two constants, the
shares of TDP drawn while computing and while communicating. Waiting, the rest of the node and the loss to the wall cannot
be told apart by these runs and stay assumptions; the bands of the fitted constants are what the fit becomes when the
assumptions, one at a time, go to the ends of theirs.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]
Table = Any  # a DataFrame; pandas' stubs give its cells types too wide to calculate with
Group = tuple[str, int]

TDP_W = 700.0  # H100-SXM, data/accelerators.toml
PRETRAINING: Group = ("GPT-3-175B", 512)
SMALL_LORA: Group = ("Llama-2-70B (LoRA)", 8)
LARGE_LORA: Group = ("Llama-2-70B (LoRA)", 512)
GROUPS = (PRETRAINING, SMALL_LORA, LARGE_LORA)

# Seconds of a step as `shardwise evaluate ... --precision fp8` gave them in version 0.1.0, before any calibration to step
# times. GPT-3: tp 4, pp 8, micro-batch 2, batch 2048, sequence 2048 on dgx-h100:64; bubble and transfers by vpp. NVIDIA's
# script for the same layout sets vpp=4; the submitter's, which is shortened, does not say.
GPT3 = {"compute": 8.0475 + 0.0037, "tensor_parallel": 1.7887, "gradient_sync": 0.2523, "host": 0.02}
GPT3_BUBBLE = {1: 1.0512, 4: 0.2704}
GPT3_TRANSFERS = {1: 0.0402, 4: 0.0804}
# LoRA: tp 4, micro-batch 1, batch 8, sequence 8192 on dgx-h100:1, as if all weights were trained.
LORA = {"compute": 3.8962, "tensor_parallel": 0.9379, "host": 0.02}
FROZEN = 2 / 3  # frozen weights have no gradients: of three matrix products two are left

NAMES = ("compute_share", "communication_share")
BOUNDS = ([0.5, 0.2], [1.0, 0.8])
FITTED_TO = "11 runs in 3 groups of power_calibration.csv (measured_power.csv); band: the ends of the assumptions"
WHY = {
    "compute_share": f"fitted to {FITTED_TO}. Bounded by TDP, the power limit of the card",
    "communication_share": f"fitted to {FITTED_TO}. Rests on the LoRA runs on 512 devices alone, where ranks wait for "
    "latency more than they move bytes; bounded by idling and by 0.8",
    "idle_share": "assumed: an H100-SXM with memory in use and no kernel running shows 119 to 145 W of 700 in nvidia-smi "
    "(Ksuriuri/index-tts-vllm issue 47, wilicc/gpu-burn issue 114). Low: H200-SXM without a process, 80.3 W of 700 "
    "(accelerators.toml). High: waiting inside a kernel that spins",
    "rest_w": "assumed, by parts of an 8-way H100 node, watts per device: 2 CPUs of 300 W 75, 4 NVSwitches 45, 8 network "
    "cards and optics 40, 2 TB of DRAM 25, drives and board 15, from nominal figures. The measured nodes are immersed and "
    "have no fans (training_results_v4.0 smc-ac-power/systems/64xSMC-H100-SXM-80GB.json). High: an air-cooled H100 node "
    "peaked at 8.4 kW with GPUs near full use (Latif et al., IEEE Access 13, 2025): 8400 / 1.06 / 8 - 700 W = 290",
    "wall_per_node": "assumed: power supplies of 94 % efficiency under load; low 96 % (80 PLUS Titanium at half load), "
    "high 91 %",
}
KEEP = {"mean NODE power": r"mean NODE power ([\d.]+) W", "ttt": r"ttt=([\d.]+) min"}


@dataclass(frozen=True)
class Assumptions:
    """What the measurements cannot tell: constants, and how the steps split into phases."""

    idle_share: float = 0.2
    rest_w: float = 200.0
    wall_per_node: float = 1.06
    tensor_parallel_exposed: float = 0.5  # NVIDIA's scripts of both models set TP_COMM_OVERLAP
    vpp: int = 4
    large_lora_samples: float = 1.0  # to the target on 512 devices, times those on 8


ENDS: dict[str, tuple[Any, Any]] = {
    "idle_share": (0.11, 0.35),
    "rest_w": (150.0, 300.0),
    "wall_per_node": (1.04, 1.1),
    "tensor_parallel_exposed": (0.0, 1.0),
    "vpp": (1, 4),
    # Reference runs needed 1.54 times the samples at batch 16 that they needed at 8 (mlcommons/logging
    # mlperf_logging/rcp_checker/training_4.0.0/rcps_llama2_70b_lora.json), if that was the batch on 512 devices.
    "large_lora_samples": (1.0, 1.54),
}
ASSUMED_BOUNDS = {"idle_share": [0.05, 0.5], "rest_w": [0.0, 1000.0], "wall_per_node": [1.0, 1.25]}


def phases(group: Group, minutes: dict[Group, float], a: Assumptions) -> Array:
    """Shares of the step that a device computes, communicates exposed, and idles."""
    exposed = a.tensor_parallel_exposed
    if group == PRETRAINING:
        communication = exposed * GPT3["tensor_parallel"] + GPT3["gradient_sync"] + GPT3_TRANSFERS[a.vpp]
        seconds = np.array([GPT3["compute"], communication, GPT3_BUBBLE[a.vpp] + GPT3["host"]])
        return np.asarray(seconds / seconds.sum())
    small = np.array([FROZEN * LORA["compute"], exposed * LORA["tensor_parallel"], LORA["host"]])
    if group == SMALL_LORA:
        return np.asarray(small / small.sum())
    # The same 8 sequences per step on 512 devices need as many steps, so step times are as times to train; each device
    # computes 8/512 of what it did, and communicates or waits in a collective for the rest.
    step_s = small.sum() * minutes[LARGE_LORA] / minutes[SMALL_LORA]
    compute_s = small[0] * SMALL_LORA[1] / LARGE_LORA[1] * a.large_lora_samples
    return np.asarray(np.array([compute_s, step_s - compute_s - LORA["host"], LORA["host"]]) / step_s)


def predicted(shares: Array, fitted: Array, a: Assumptions) -> float:
    """(E4) Wall watts of a device slot."""
    watts = TDP_W * float(shares @ np.array([*fitted, a.idle_share]))
    return a.wall_per_node * (watts + a.rest_w)


def fit(watts: dict[Group, float], minutes: dict[Group, float], a: Assumptions) -> Array:
    """Both shares, by the relative error of the groups in `watts`."""
    split = {group: phases(group, minutes, a) for group in watts}
    return np.asarray(
        least_squares(
            lambda p: [np.log(predicted(split[group], p, a) / watts[group]) for group in watts],
            [0.9, 0.5],
            bounds=BOUNDS,
            x_scale=[0.1, 0.1],
        ).x
    )


def bands(watts: dict[Group, float], minutes: dict[Group, float]) -> tuple[Array, Array, Array]:
    """The fit, and the least and the most it becomes when one assumption at a time goes to an end."""
    best = fit(watts, minutes, Assumptions())
    all_fits = [best]
    for name, ends in ENDS.items():
        all_fits += [fit(watts, minutes, replace(Assumptions(), **{name: end})) for end in ends]
    return best, np.min(all_fits, axis=0), np.max(all_fits, axis=0)


def measured(facts: Path) -> Table:
    """The runs, one row each, with watts per device slot and minutes to train."""
    rows: Table = pd.read_csv(facts / "measured" / "power_calibration.csv")
    table = pd.DataFrame(
        {
            "id": rows["id"],
            "model": rows["model"],
            "accelerator": rows["gpu"],
            "devices": rows["n_gpus"].astype(int),
            "precision": rows["precision"],
            "minutes": [float(found(KEEP["ttt"], note)) for note in rows["notes"]],
            # To a tenth of a watt per node, where the column of the source is rounded after division.
            "watts": [float(found(KEEP["mean NODE power"], note)) / 8 for note in rows["notes"]],
            "source": rows["source"],
        }
    )
    known = pd.Series([(row.model, row.devices) in GROUPS for row in table.itertuples()])
    for row in table[~known].itertuples():
        print(f"left out, its phases are not known: {row.id}")
    return table[known.to_numpy()].reset_index(drop=True)


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise SystemExit(f"no {pattern!r} in the notes {text!r}")
    return match[1]


def toml(best: Array, low: Array, high: Array) -> str:
    """The constants as `data/power.py` reads them."""
    lines = [
        "# Power by phase, written by benchmarks/fit_power.py. What each constant does: formulations/energy.py; how far to",
        "# trust it: docs/energy.md. Shares are of the TDP; watts are per device. `low` and `high` are the band of the",
        "# energy that is reported, `bounds` what the constant can be at all.",
        'measured_on = "H100-SXM"',
        "",
        "[constants]",
    ]
    for i, name in enumerate(NAMES):
        # Bands outwards, to a hundredth.
        ends = float(np.floor(low[i] * 100) / 100), float(np.ceil(high[i] * 100 - 1e-6) / 100)
        lines += entry(name, "fitted", round(float(best[i]), 3), ends, [BOUNDS[0][i], BOUNDS[1][i]])
    for name, bounds in ASSUMED_BOUNDS.items():
        lines += entry(name, "assumed", getattr(Assumptions(), name), ENDS[name], bounds)
    return "\n".join(lines) + "\n"


def entry(name: str, kind: str, value: float, ends: tuple[float, float], bounds: list[float]) -> list[str]:
    return [
        "",
        f"[constants.{name}]",
        f'kind = "{kind}"',
        f"value = {value}",
        f"low = {ends[0]}",
        f"high = {ends[1]}",
        f"bounds = {bounds}",
        f'why = "{WHY[name]}"',
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    table = measured(arguments.facts)
    by_group = table.groupby(["model", "devices"])
    watts: dict[Group, float] = by_group["watts"].mean().to_dict()
    minutes: dict[Group, float] = by_group["minutes"].median().to_dict()
    best, low, high = bands(watts, minutes)
    arguments.out.write_text(toml(best, low, high), encoding="utf-8")

    base = Assumptions()
    split = {group: phases(group, minutes, base) for group in watts}
    rows = [split[row.model, row.devices] for row in table.itertuples()]
    for i, name in enumerate(("compute", "communication", "idle")):
        table.insert(7 + i, name, [round(float(row[i]), 4) for row in rows])
    table.to_csv(arguments.out.parent / "measured_power.csv", index=False, float_format="%.10g", lineterminator="\n")

    for i, name in enumerate(NAMES):
        print(f"{name} = {best[i]:.3f}, band {low[i]:.3f} to {high[i]:.3f}")
    print("group, devices, runs, watts, compute/communication/idle, error when fitted %, error when left out %")
    for group in watts:
        others = {other: value for other, value in watts.items() if other != group}
        errors = [
            100 * (predicted(split[group], p, base) / watts[group] - 1) for p in (best, fit(others, minutes, base))
        ]
        parts = "/".join(f"{share:.3f}" for share in split[group])
        runs = len(table[(table.model == group[0]) & (table.devices == group[1])])
        print(f"{group[0]}, {group[1]}, {runs}, {watts[group]:.1f}, {parts}, {errors[0]:+.1f}, {errors[1]:+.1f}")


if __name__ == "__main__":
    main()
