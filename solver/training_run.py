"""Time to train of a plan: what `--tokens` adds to `plan training` and `evaluate`."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from shardwise.data.faults import InputError
from shardwise.formulations.training_run import SECONDS_PER_HOUR, Failures, RunTime, energy_mwh, run_time
from shardwise.solver.result import Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.formulations.energy import Band
    from shardwise.solver.evaluate import Evaluation

MAX_TOKENS = 10**18
MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
RANGES = {
    "price": (0, 1e9),
    "node_mtbf_hours": (1e-6, 1e9),
    "checkpoint_s": (1e-6, 1e9),
    "restart_s": (0, 1e9),
    "straggler_margin": (0, 10),
}
"""The least and the most of each number; far beyond either, times are no longer finite."""

NO_PRICE = "no price is known: the accelerator has none in the catalogue or the cluster file, and none was given"
NO_MTBF = "no node MTBF is given, so no failures are assumed"
ENDLESS = "the run is not expected to end: nodes fail faster than a checkpoint interval gets done"


@dataclass(frozen=True, slots=True)
class Terms:
    """What a run is told beside its plan, in the units of the command line; `read_terms` names every fault."""

    tokens: int
    price: float | None = None
    node_mtbf_hours: float | None = None
    checkpoint_s: float | None = None
    restart_s: float | None = None
    straggler_margin: float = 0.0

    @property
    def failures(self) -> Failures | None:
        if self.node_mtbf_hours is None or self.checkpoint_s is None or self.restart_s is None:
            return None
        return Failures(self.node_mtbf_hours * SECONDS_PER_HOUR, self.checkpoint_s, self.restart_s)


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A whole training run on a plan. What is not known is None, and its `_reason` says why.

    The formulas are (R1)-(R10) of `formulations/training_run.py`; the interval of checkpoints is that of Daly (2006).
    """

    terms: Terms
    time: RunTime
    step_time_s: float
    devices: int
    nodes: int
    price_usd_per_hour: float | None
    energy_mwh: Band | None
    energy_reason: str | None

    @property
    def steps(self) -> int:
        """Optimizer steps, the last one counted whole."""
        return self.time.steps

    @property
    def days(self) -> float:
        """Of wall time, with checkpoints, restarts and work done again where failures are assumed."""
        return self.time.days

    @property
    def device_hours(self) -> float:
        """Of the devices that the plan uses."""
        return self.time.device_hours(self.devices)

    @property
    def cost_usd(self) -> float | None:
        """Device-hours at `price_usd_per_hour`; None where there is no price."""
        return None if self.price_usd_per_hour is None else self.device_hours * self.price_usd_per_hour

    @property
    def cost_reason(self) -> str | None:
        """Why there is no cost."""
        return NO_PRICE if self.price_usd_per_hour is None else None

    @property
    def goodput(self) -> float | None:
        """Share of the wall time in which steps are done that are kept; None where no failures are assumed."""
        return None if self.time.checkpointing is None else self.time.checkpointing.goodput

    @property
    def goodput_reason(self) -> str | None:
        """Why there is no goodput."""
        return NO_MTBF if self.time.checkpointing is None else None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings; the times of a run that does not end are null."""
        checkpointing = self.time.checkpointing
        document: dict[str, Any] = {
            "tokens": self.terms.tokens,
            "steps": self.steps,
            "step_time_s": self.step_time_s,
            "straggler_margin": self.terms.straggler_margin,
            "work_time_s": self.time.work_time_s,
            "wall_time_s": self.time.wall_time_s,
            "days": self.days,
            "devices": self.devices,
            "nodes": self.nodes,
            "device_hours": self.device_hours,
            "price_usd_per_hour": self.price_usd_per_hour,
            "cost_usd": self.cost_usd,
            "cost_reason": self.cost_reason,
            "energy_mwh": None if self.energy_mwh is None else asdict(self.energy_mwh),
            "energy_reason": self.energy_reason,
            "goodput": self.goodput,
            "goodput_reason": self.goodput_reason,
            "failures": None,
        }
        if checkpointing is not None:
            document["failures"] = {
                "node_mtbf_hours": self.terms.node_mtbf_hours,
                "mtbf_hours": checkpointing.mtbf_s / SECONDS_PER_HOUR,
                "checkpoint_s": self.terms.checkpoint_s,
                "restart_s": self.terms.restart_s,
                "young_interval_s": checkpointing.young_interval_s,
                "daly_interval_s": checkpointing.daly_interval_s,
                "interval_steps": checkpointing.interval_steps,
                "interval_s": checkpointing.interval_s,
                "expected_failures": _finite(checkpointing.expected_failures),
            }
        return {name: _finite(value) for name, value in document.items()}


def training_run(
    planned: Evaluation | Result,
    *,
    tokens: float | str,
    price: float | None = None,
    node_mtbf_hours: float | None = None,
    checkpoint_s: float | None = None,
    restart_s: float | None = None,
    straggler_margin: float | None = None,
) -> TrainingRun:
    """Time, cost, energy and goodput of training on `tokens` tokens.

    Parameters
    ----------
    planned
        An evaluation, or the result of a solve that holds a plan.
    tokens
        A number, or text such as "15T", "300B" or "15e12".
    price
        US dollars per device-hour, instead of the price of the accelerator.
    node_mtbf_hours
        Mean time between failures of one node. Without it no failures are assumed; with it `checkpoint_s` and
        `restart_s`, the seconds that writing a checkpoint and a restart take, are needed too.
    straggler_margin
        The share by which stragglers slow every step, 0 without it.

    Raises
    ------
    InputError
        Naming every number that is missing or out of its range; or when the result holds no plan.
    """
    terms = read_terms(
        {
            "tokens": tokens,
            "price": price,
            "node_mtbf_hours": node_mtbf_hours,
            "checkpoint_s": checkpoint_s,
            "restart_s": restart_s,
            "straggler_margin": straggler_margin,
        }
    )
    evaluation = planned.evaluation if isinstance(planned, Result) else planned
    if evaluation is None:
        raise InputError("the result holds no plan, so there is no run to tell of")
    assert terms is not None  # tokens were given
    return run_on_terms(evaluation, terms)


def run_on_terms(evaluation: Evaluation, terms: Terms) -> TrainingRun:
    """The run of an evaluated plan."""
    step_s, margin = evaluation.step_time_s, terms.straggler_margin
    time = run_time(terms.tokens, evaluation.tokens_per_step, step_s, evaluation.nodes, margin, terms.failures)
    energy, reason = None, evaluation.energy_reason
    if evaluation.energy is not None and time.ends:
        energy = energy_mwh(evaluation.energy.joules_per_step, step_s, time.wall_time_s)
    elif evaluation.energy is not None:
        reason = ENDLESS
    price = evaluation.price_usd_per_hour if terms.price is None else terms.price
    return TrainingRun(terms, time, step_s, evaluation.devices, evaluation.nodes, price, energy, reason)


def read_terms(given: dict[str, Any], word: Callable[[str], str] = str) -> Terms | None:
    """The terms in `given`, None where it holds nothing; `word` is how the user calls a field.

    Raises
    ------
    InputError
        Naming every field that is missing, unreadable or out of its range.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    faults = []
    tokens = 0
    if "tokens" not in given:
        faults.append(f"{word('tokens')} is missing beside {', '.join(map(word, given))}")
    else:
        count = _tokens(given["tokens"])
        if count is None:
            faults.append(
                f"{word('tokens')}={given['tokens']} must be a whole number between 1 and {MAX_TOKENS:.0e}, "
                "such as 15e12, 15T or 300B"
            )
        tokens = count or 0
    for name, (least, most) in RANGES.items():
        value = given.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            faults.append(f"{word(name)}={value} must be a number between {least:g} and {most:g}")
    if "node_mtbf_hours" in given:
        faults += [
            f"{word(name)} is missing, which {word('node_mtbf_hours')}={given['node_mtbf_hours']} needs"
            for name in ("checkpoint_s", "restart_s")
            if name not in given
        ]
    if faults:
        raise InputError(faults)
    return Terms(**given | {"tokens": tokens})


def _tokens(value: Any) -> int | None:
    """`15T`, `300B`, `15e12` or a number as a whole number, None where it is none of them."""
    read = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(e\+?[0-9]{1,3})?([KMBT]?)", str(value), re.IGNORECASE)
    if isinstance(value, bool) or read is None or len(str(value)) > 40:
        return None
    number, exponent, unit = read.groups()
    count = Decimal(number + (exponent or "")) * MULTIPLES[unit.upper()]
    return int(count) if 1 <= count <= MAX_TOKENS and count == int(count) else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
