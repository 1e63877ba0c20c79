"""What a plan is worth: the value that is minimised, from its step time T and what it does in it.

With N devices, p stages, U the time unit, and the phases of `formulations.phases`:

(O1) step-time              V = T
(O2) throughput-per-device  V = N T: tokens over device-seconds are maximised; cost, the price of a device-hour times N T,
     has the same optimum.
(O3) energy                 E = N / p (W_idle p T + (W_compute - W_idle) C + (W_communication - W_idle) X) by (E3), C and X the
     compute and communication (H1), (H2) of one device of every stage. Divided by W_idle:
         V = N / p (p T + Y + sum over repeated layers of r + sum over stages of tails),
     Y the same for every split; a tail is the larger of two sums over the layers of the stage, as in (T4).
(O4) devices                V = (N, T): fewest devices first, then the fastest plan on so many.

A candidate has one N and p, so V is its `multiplier` times an integer that is linear in T and the layers: the `inner`
value. Every coefficient is rounded down to U like those of T, so that V in units bounds V in seconds from below.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from shardwise.formulations.energy import wall_watts, why_no_energy
from shardwise.formulations.layer_time import time_by_cause
from shardwise.formulations.passes import larger_of_stages
from shardwise.formulations.phases import COMPUTE, EXPOSED, Phases, phases, transfers

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.data.instance import Instance
    from shardwise.data.pipeline import Layout
    from shardwise.formulations.candidates import Candidate, Grid
    from shardwise.formulations.coefficients import CostTables, TimeCoefficients
    from shardwise.formulations.energy import Energy
    from shardwise.formulations.layer_costs import ShardTerms
    from shardwise.formulations.passes import ChunkCounts

ObjectiveName = Literal["step-time", "throughput-per-device", "energy", "cost", "devices"]
OBJECTIVES: tuple[ObjectiveName, ...] = ("step-time", "throughput-per-device", "energy", "cost", "devices")

PER_DEVICE = ("throughput-per-device", "cost")
SECONDS_PER_HOUR = 3600
TOKENS_PRICED = 1_000_000


class Priced(Protocol):
    """What an objective reads of an evaluation."""

    @property
    def step_time_s(self) -> float: ...
    @property
    def devices(self) -> int: ...
    @property
    def energy(self) -> Energy | None: ...


@dataclass(frozen=True, slots=True)
class Worth:
    """(O1)-(O3) of one candidate in units: V = multiplier x inner, inner = weight T + constant + what splits decide.

    full, selective, tail_floor, tail_overlap
        Per unit of the model; empty where V depends on T alone.
    least_tails
        No split has smaller tails together.
    """

    multiplier: int
    weight: int = 1
    constant: int = 0
    full: tuple[int, ...] = ()
    selective: tuple[int, ...] = ()
    tail_floor: tuple[int, ...] = ()
    tail_overlap: tuple[int, ...] = ()
    least_tails: int = 0

    @property
    def plain(self) -> bool:
        """Whether the inner value is the step time."""
        return not self.full

    def least(self, step: int) -> int:
        """The inner value of a plan that lasts `step` units is not below this."""
        return self.weight * step + self.constant + self.least_tails

    def longest(self, inner: int) -> int:
        """No plan of at most this inner value lasts longer."""
        return (inner - self.constant - self.least_tails) // self.weight

    def inner(self, step: Any, where: Layout, counts: ChunkCounts) -> Any:
        """The inner value of plans that last `step` units; the counts may have an axis of rows behind."""
        if self.plain:
            return step
        repeated = sum(
            np.tensordot(np.array(each), of.sum(axis=0), axes=(0, 0))
            for each, of in ((self.full, counts.full), (self.selective, counts.selective))
        )
        tails = larger_of_stages(
            where,
            *(np.tensordot(counts.every, np.array(each), axes=(1, 0)) for each in (self.tail_floor, self.tail_overlap)),
        )
        return self.weight * step + self.constant + repeated + tails.sum(axis=0)


@dataclass(frozen=True)
class Objective:
    """What is minimised on an instance. `unit` and `sense` are those of the value that is reported.

    price_usd_per_hour
        Of one device; needed by "cost" only.
    """

    name: ObjectiveName
    price_usd_per_hour: float | None = None

    def faults(self, instance: Instance) -> list[str]:
        """Why the objective has no value on an instance."""
        if self.name == "energy":
            reason = why_no_energy(instance.accelerator)
            return [f"objective=energy: {reason}"] if reason else []
        if self.name == "cost" and self.price(instance) is None:
            return [
                f"objective=cost needs a price: {instance.accelerator.name} has none in the catalogue; "
                "give --price (USD per device-hour)"
            ]
        return []

    def price(self, instance: Instance) -> float | None:
        """USD of a device-hour: what was given, or the catalogue's."""
        own = self.price_usd_per_hour
        return instance.accelerator.price_usd_per_hour if own is None else own

    @property
    def unit(self) -> str:
        return {
            "step-time": "s",
            "throughput-per-device": "tokens/s",
            "energy": "J/token",
            "cost": "USD per million tokens",
            "devices": "devices",
        }[self.name]

    @property
    def value_unit(self) -> str:
        """The unit of `value`: seconds for "devices" too, where plans of one number of devices are ranked by their step."""
        return "s" if self.name == "devices" else self.unit

    @property
    def sense(self) -> str:
        return "maximise" if self.name == "throughput-per-device" else "minimise"

    def value(self, instance: Instance, seconds: float) -> float:
        """What is reported for a V of so many seconds, (O1)-(O3); falling in V for throughput, else rising."""
        tokens = instance.workload.tokens_per_step
        if self.name == "throughput-per-device":
            return tokens / seconds if seconds else float("inf")
        if self.name == "cost":
            price = self.price(instance)
            assert price is not None
            return price * seconds / SECONDS_PER_HOUR * TOKENS_PRICED / tokens
        if self.name == "energy":
            return seconds * idle_watts(instance) / tokens
        return seconds

    def multiplier(self, tp: Any, cp: Any, pp: Any, dp: Any) -> Any:
        """What the inner value is multiplied by; numbers or columns."""
        if self.name in PER_DEVICE:
            return tp * cp * pp * dp
        return tp * cp * dp if self.name == "energy" else 1

    def of_rows(self, tables: CostTables, grid: Grid, terms: Callable[[int], ShardTerms]) -> tuple[Any, Any]:
        """Factor and addend: V in seconds of a row is at least factor (T + addend). `terms` has the least of each size of
        micro-batch."""
        factor = self.multiplier(grid.shape.tp, grid.shape.cp, grid.pp, grid.dp)
        if self.name != "energy":
            return factor, 0.0
        sizes, at = grid.sizes
        extra = np.array([_least_extra_s(tables, terms(int(size))) for size in sizes])[at]
        return factor * grid.pp, grid.micro_batches * extra / grid.pp

    def seconds(self, instance: Instance, evaluation: Priced) -> float:
        """V in seconds of an evaluated plan."""
        if self.name == "energy":
            assert evaluation.energy is not None
            return evaluation.energy.joules_per_step.value / idle_watts(instance)
        return evaluation.step_time_s * (evaluation.devices if self.name in PER_DEVICE else 1)

    def worth(self, tables: CostTables, candidate: Candidate, time: TimeCoefficients, unit_s: float) -> Worth:
        """(O1)-(O3) of a candidate; `time` has its seconds."""
        d = candidate.degrees
        multiplier = self.multiplier(d.tp, d.cp, d.pp, d.dp)
        if self.name != "energy":
            return Worth(multiplier)
        own = phases(tables, d, candidate.placement, candidate.schedule)
        return _energy_worth(tables, candidate, time, own, unit_s, multiplier)


def idle_watts(instance: Instance) -> float:
    """W_idle of (O3)."""
    watts = wall_watts(instance.accelerator)
    assert watts is not None
    return watts.idle.value


def relative_watts(instance: Instance) -> tuple[float, float]:
    """(O3) What a second of compute and of communication takes beyond one of idling, in seconds of idling."""
    watts = wall_watts(instance.accelerator)
    assert watts is not None
    return watts.compute.value / watts.idle.value - 1, watts.communication.value / watts.idle.value - 1


def _least_extra_s(tables: CostTables, terms: ShardTerms) -> float:
    """(O3) Y per micro-batch from below, without stragglers, transfers and gathers."""
    compute, communication = relative_watts(tables.instance)
    total = 0.0
    counts = (*tables.kind_counts.tolist(), 1, 1)
    for count, term in zip(counts, (*terms.kinds, terms.embedding, terms.head), strict=True):
        causes = time_by_cause(term, tables.instance.profile)
        total += count * (compute * causes[COMPUTE] + communication * sum(causes[name] for name in EXPOSED))
    return total


def _energy_worth(
    tables: CostTables, candidate: Candidate, time: TimeCoefficients, own: Phases, unit_s: float, multiplier: int
) -> Worth:
    """(O3)."""
    m, pp = candidate.micro_batches, candidate.degrees.pp
    compute, communication = relative_watts(tables.instance)
    counts = (*tables.kind_counts.tolist(), 1, 1)

    def units(seconds: float) -> int:
        return floor(seconds / unit_s)

    constant = sum(
        n * units(m * (compute * c + communication * x))
        for n, c, x in zip(counts, own.compute, own.communication, strict=True)
    )
    constant += units(m * communication * transfers(time, candidate.layout, pp))
    if pp > 1:
        constant += 2 * units(communication * time.tied)
    tails = tuple(
        tuple(
            units(communication * (tail - update - waited) + compute * update)
            for tail, update, waited in zip(side, own.optimizer, own.host, strict=True)
        )
        for side in (time.tail_floor, time.tail_overlap)
    )
    return Worth(
        multiplier,
        weight=pp,
        constant=constant,
        full=tuple(units(m * compute * again) for again in time.full),
        selective=tuple(units(m * compute * again) for again in time.selective),
        tail_floor=tails[0],
        tail_overlap=tails[1],
        least_tails=sum(n * floor_units for n, floor_units in zip(counts, tails[0], strict=True)),
    )
