"""On how many devices a model has room, from memory alone: no step time is looked at.

(D1) Every byte of the states (M1) lies on some device, so N devices of C usable bytes, R of them in reserve, need
         N (C - R) >= P (weights + gradients + optimizer) bytes a parameter.
(D2) N has no plan where every candidate of N devices fails (B1) or has no room, (R1) or (R2). It certainly has one
     where a candidate with v = 1 has room (R1), nothing on the host, and a placement, and no layer is pinned.
(D3) Of candidates that differ in the micro-batch alone the smallest needs least: with b times the size, GPipe and 1F1B,
     interleaved or not, have at least a b-th of the micro-batches in flight, and every other line grows with b.

Numbers are looked at in windows, ascending, so that the candidates of large clusters are never all enumerated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardwise.data.limits import parse_limits
from shardwise.data.plan import Degrees
from shardwise.formulations.bounds import BestCase, least_memory
from shardwise.formulations.candidates import PlacementTable, enumerate_grids
from shardwise.formulations.memory import MIB, KindParams, StateBytes, end_units, state_bytes
from shardwise.formulations.room import Room, candidate_of
from shardwise.formulations.splits import SplitSearch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.formulations.candidates import Grid
    from shardwise.formulations.coefficients import CostTables

GROWING = ("1f1b", "gpipe", "interleaved-1f1b")
"""Schedules of (D3)."""
WINDOW_SHARE, WINDOW_LEAST = 8, 8
"""A window holds an eighth of the numbers up to it, and at least so many."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """(D1) The plain arithmetic of states: bytes of a parameter, all of them, and what one device takes.

    least_devices
        None where the reserve alone is more than a device has.
    """

    params: int
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    usable_bytes: float
    reserve_bytes: float

    @property
    def bytes_per_param(self) -> float:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def state_bytes(self) -> float:
        return self.params * self.bytes_per_param

    @property
    def least_devices(self) -> int | None:
        room = self.usable_bytes - self.reserve_bytes
        return max(ceil(self.state_bytes / room), 1) if room > 0 else None


class Count(NamedTuple):
    """A number of devices with room; `certain` where (D2) says that there is a plan. `grids` are what (B1) leaves."""

    devices: int
    certain: bool
    grids: list[Grid]


def arithmetic(tables: CostTables) -> Arithmetic:
    """(D1) of an instance."""
    instance = tables.instance
    params, held = instance.model.params, KindParams(instance.model.params, 0)
    if instance.workload.frozen:
        # One device holds no more of a tensor than several do together: padding, ceilings and copies only grow.
        held, end = end_units(instance, 1)
        held += end
        for count, kind in zip(tables.kind_counts.tolist(), tables.kind_params(1, 1, 1), strict=True):
            held += kind * count
    workload = instance.workload  # what the host takes lies on no device
    most = Degrees(offload_optimizer=workload.offload_shares[-1], offload_param=workload.offload_param)
    states: StateBytes = state_bytes(instance, held, most)
    each = (states.weights / params, states.gradients / params, states.optimizer / params)
    return Arithmetic(params, *each, tables.capacity_mib * MIB, instance.profile.memory_reserve_bytes)


class DeviceCounts:
    """(D2) of one instance. `leanest` is the least memory by (B1) that was met, with its degrees."""

    def __init__(self, tables: CostTables, check_time: Callable[[], None] = lambda: None) -> None:
        self.tables, self.check_time = tables, check_time
        self.placements = PlacementTable(tables.instance)
        self.best_case = BestCase(tables, self.placements)
        self.room = Room(SplitSearch(tables.instance, tables))
        self.leanest: tuple[float, Degrees] | None = None
        self._pinned = bool(tables.instance.limits.pinned or tables.instance.limits.together)
        self.excluded = 0
        """No plan has so many devices or fewer."""

    def ascending(self) -> Iterator[Count]:
        """The numbers of devices with room, ascending; every number in between has no plan."""
        instance = self.tables.instance
        allowed, least = instance.limits.range("devices"), arithmetic(self.tables).least_devices
        most = min(allowed.high, instance.cluster.device_count)
        first = most + 1 if least is None else max(allowed.low, least)
        self.excluded = min(first - 1, most)
        while first <= most:
            last = min(first + max(first // WINDOW_SHARE, WINDOW_LEAST) - 1, most)
            grids = list(self._fitting(first, last))
            for count in sorted({n for grid in grids for n in np.unique(grid.devices).tolist()}):
                own = [grid.rows(grid.devices == count) for grid in grids if (grid.devices == count).any()]
                certain = self._certain(own)
                if certain is not None:
                    self.excluded = count - 1
                    yield Count(count, certain, own)
            self.excluded, first = last, last + 1

    def _fitting(self, first: int, last: int) -> Iterator[Grid]:
        """(B1) of the candidates of a window."""
        instance = self.tables.instance
        limits = parse_limits([*instance.limits.text, f"devices>={first}", f"devices<={last}"])
        for grid in enumerate_grids(replace(instance, limits=limits)):
            self.check_time()
            if not self.best_case.fits_somewhere(grid.shape.sharding(1)):
                continue
            need = least_memory(self.best_case, grid)
            row = int(np.argmin(need))
            if self.leanest is None or need[row] < self.leanest[0]:
                self.leanest = float(need[row]), grid.degrees(row)
            fits = need <= self.tables.capacity_mib * MIB
            if fits.any():
                yield grid.rows(fits)

    def _certain(self, grids: list[Grid]) -> bool | None:
        """Whether one number of devices certainly has a plan; None where it has none."""
        found: bool | None = None
        for grid in grids:
            self.check_time()
            for row in leanest_rows(grid):
                candidate = candidate_of(grid, row)
                if found is False and candidate.degrees.vpp > 1:
                    break
                if self.room.holds(candidate):
                    here = candidate.degrees.vpp == 1 and not candidate.degrees.on_host
                    if here and not self._pinned and self._placed(candidate.degrees):
                        return True
                    found = False
        return found

    def _placed(self, degrees: Degrees) -> bool:
        """Whether one copy of the states has a placement."""
        return any(1 in self.placements.replicates(degrees, own) for own in self.placements.of(degrees))


def leanest_rows(grid: Grid) -> list[int]:
    """(D3) The rows that decide, those of v = 1 first."""
    order = np.lexsort((grid.micro_batch, grid.dp, grid.pp, grid.vpp))
    if grid.shape.schedule in GROWING:
        others = np.stack((grid.vpp, grid.pp, grid.dp))[:, order]
        order = order[np.concatenate(([True], (np.diff(others) != 0).any(axis=0)))]
    return [int(row) for row in order]
