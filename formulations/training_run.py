"""Time to train: steps, days, device-hours, cost and energy of a whole run, and its goodput under failures.

A run trains on D tokens, B a step, on n devices of m nodes; a step takes t seconds and E joules, stragglers slow it by the
share r. A node fails every M_node seconds on average, at exponential times; a checkpoint takes d seconds, a restart R.

(R1) steps are S = ceil(D / B);
(R2) a step of the run takes t_r = t (1 + r), so the work is W = S t_r;
(R3) some node of the run fails every M = M_node / m seconds;
(R4) with a checkpoint after every tau seconds of work the run is expected to take
     T(tau) = M e^(R / M) (e^((tau + d) / M) - 1) W / tau: failures strike work, checkpoints and restarts alike, and what
     was done since the last checkpoint is done again (J. Daly, A higher order estimate of the optimum checkpoint interval
     for restart dumps, Future Generation Computer Systems 22, 2006, section 3);
(R5) to first order T is least at tau = sqrt(2 d M) (J. Young, A first order approximation to the optimum checkpoint
     interval, Communications of the ACM 17, 1974);
(R6) to higher order at tau = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d where d < 2 M, at M otherwise (Daly
     2006);
(R7) checkpoints are written between steps: the interval is k t_r, k the whole number nearest to (R6) / t_r, 1 to S;
(R8) goodput is W / T, and T / M failures are expected. Without an M_node no failures are assumed: T = W;
(R9) device-hours are n T, cost is their number times the price of one;
(R10) energy is E T / t, with the band of E: checkpoints, restarts and waiting draw the mean watts of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.formulations.energy import Band

SECONDS_PER_HOUR = 3600.0
HOURS_PER_DAY = 24.0
JOULES_PER_MWH = 3.6e9


@dataclass(frozen=True, slots=True)
class Failures:
    """How often a node fails, and what a checkpoint and a restart take."""

    node_mtbf_s: float
    checkpoint_s: float
    restart_s: float

    def __post_init__(self) -> None:
        faults = [
            f"{name}={value} must be positive and finite"
            for name, value in (("node_mtbf_s", self.node_mtbf_s), ("checkpoint_s", self.checkpoint_s))
            if not 0 < value < math.inf
        ]
        if not 0 <= self.restart_s < math.inf:
            faults.append(f"restart_s={self.restart_s} must be zero or more, and finite")
        if faults:
            raise ValueError("; ".join(faults))

    def mtbf_s(self, nodes: int) -> float:
        """(R3)."""
        return self.node_mtbf_s / nodes


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """When a run writes checkpoints, and what failures leave of its time (R3)-(R8)."""

    mtbf_s: float
    young_interval_s: float
    daly_interval_s: float
    interval_steps: int
    interval_s: float
    wall_time_s: float
    goodput: float

    @property
    def expected_failures(self) -> float:
        """(R8)."""
        return self.wall_time_s / self.mtbf_s


@dataclass(frozen=True, slots=True)
class RunTime:
    """How long a run takes: `work_time_s` without failures, `wall_time_s` with those of `checkpointing`."""

    steps: int
    work_time_s: float
    wall_time_s: float
    checkpointing: Checkpointing | None

    @property
    def days(self) -> float:
        return self.wall_time_s / SECONDS_PER_HOUR / HOURS_PER_DAY

    @property
    def ends(self) -> bool:
        """Whether the expected time is a number at all: failures may come faster than work gets done."""
        return self.wall_time_s < math.inf

    def device_hours(self, devices: int) -> float:
        """(R9)."""
        return devices * self.wall_time_s / SECONDS_PER_HOUR


def run_time(
    tokens: int,
    tokens_per_step: int,
    step_time_s: float,
    nodes: int,
    straggler_margin: float,
    failures: Failures | None,
) -> RunTime:
    """(R1)-(R8) of a run on `nodes` nodes."""
    faults = [
        f"{name}={value} must be at least 1"
        for name, value in (("tokens", tokens), ("tokens_per_step", tokens_per_step), ("nodes", nodes))
        if value < 1
    ]
    if not 0 < step_time_s < math.inf:
        faults.append(f"step_time_s={step_time_s} must be positive and finite")
    if not 0 <= straggler_margin < math.inf:
        faults.append(f"straggler_margin={straggler_margin} must be zero or more, and finite")
    if faults:
        raise ValueError("; ".join(faults))
    steps = -(-tokens // tokens_per_step)
    slowed_s = step_time_s * (1 + straggler_margin)
    work_s = steps * slowed_s
    if failures is None:
        return RunTime(steps, work_s, work_s, None)
    checkpointing = checkpoints(steps, slowed_s, failures, failures.mtbf_s(nodes))
    return RunTime(steps, work_s, checkpointing.wall_time_s, checkpointing)


def checkpoints(steps: int, step_time_s: float, failures: Failures, mtbf_s: float) -> Checkpointing:
    """(R4)-(R8) of a run in which some node fails every `mtbf_s` seconds."""
    daly_s = daly_interval_s(failures.checkpoint_s, mtbf_s)
    between = min(max(round(daly_s / step_time_s), 1), steps)
    interval_s, work_s = between * step_time_s, steps * step_time_s
    wall_s = expected_time_s(work_s, interval_s, failures.checkpoint_s, failures.restart_s, mtbf_s)
    young_s = young_interval_s(failures.checkpoint_s, mtbf_s)
    return Checkpointing(mtbf_s, young_s, daly_s, between, interval_s, wall_s, work_s / wall_s)


def expected_time_s(work_s: float, interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """(R4), infinite where it is beyond all numbers."""
    try:
        per_interval_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + checkpoint_s) / mtbf_s)
    except OverflowError:
        return math.inf
    return per_interval_s * (work_s / interval_s)


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """(R5)."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """(R6)."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    share = checkpoint_s / (2 * mtbf_s)
    return young_interval_s(checkpoint_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - checkpoint_s


def energy_mwh(joules_per_step: Band, step_time_s: float, wall_time_s: float) -> Band:
    """(R10)."""
    return joules_per_step * (wall_time_s / step_time_s / JOULES_PER_MWH)
