"""Candidates: every legal tuple of degrees, and the placements of each.

(N1) tp ranges over the degrees that the rules' tensor checks admit; pp x vpp over the pipelines of at most L + 2
     chunks; dp over the divisors of the global batch B and micro_batch over those of B / dp; zero over the pack's
     stages; sequence parallelism is on or off for tp > 1 where tp divides the sequence length.
     The schedule is one of the pack's that the pipeline and the micro-batches can run (data/pipeline.py).
(N2) devices = tp pp dp is at most those of the cluster. All of it within the user's limits.
(N3) A placement factors each of tp, pp, dp over the levels of the cluster so that the product at each level does not
     exceed the members there (`Cluster.capacity`). A pack with linear ranks admits those that numbering the ranks along
     the devices gives. Placements that differ by an automorphism of the cluster are one.

The tie order among candidates of equal step time is the ascending order of `tie_key`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.data.pipeline import SCHEDULES, layout, schedules_of
from shardwise.data.plan import Degrees, Placement, Plan
from shardwise.data.rules import expert_faults, is_linear, pipeline_faults, tensor_faults
from shardwise.formulations.layer_costs import Sharding
from shardwise.formulations.timeline import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.data.instance import Instance
    from shardwise.data.pipeline import Layout
    from shardwise.data.plan import Stage

Column = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GridShape:
    """The part of a candidate that vectorises badly."""

    tp: int
    sequence_parallel: bool
    zero: int
    schedule: str

    def sharding(self, micro_batch: int) -> Sharding:
        """What the layers of a candidate of this shape see."""
        return Sharding(self.tp, micro_batch, self.sequence_parallel, etp=self.tp)

    def replicated(self, dp: int) -> Degrees:
        """Degrees of this shape with one stage."""
        return Degrees(tp=self.tp, dp=dp, zero=self.zero, sequence_parallel=self.sequence_parallel)


@dataclass(frozen=True)
class Grid:
    """(N1), (N2) of one `GridShape`: equally long columns, one row per candidate before placement."""

    shape: GridShape
    pp: Column
    vpp: Column
    dp: Column
    micro_batch: Column
    micro_batches: Column

    def __len__(self) -> int:
        return len(self.pp)

    def degrees(self, row: int) -> Degrees:
        return Degrees(
            tp=self.shape.tp,
            pp=int(self.pp[row]),
            dp=int(self.dp[row]),
            vpp=int(self.vpp[row]),
            micro_batch=int(self.micro_batch[row]),
            zero=self.shape.zero,
            sequence_parallel=self.shape.sequence_parallel,
        )


@dataclass(frozen=True)
class Candidate:
    """Degrees with a placement and a schedule."""

    degrees: Degrees
    placement: Placement
    micro_batches: int
    schedule: str

    @property
    def shape(self) -> Shape:
        """What the order of its passes depends on."""
        return Shape(self.schedule, self.degrees.pp, self.degrees.vpp, self.micro_batches)

    def plan(self, stages: tuple[Stage, ...]) -> Plan:
        """The candidate with its stages."""
        schedule: Any = self.schedule
        return Plan(self.degrees, stages, self.placement, self.micro_batches, schedule=schedule)

    def is_of(self, plan: Plan) -> bool:
        """Whether `plan` is one of the candidate's."""
        return (plan.degrees, plan.placement, plan.schedule) == (self.degrees, self.placement, self.schedule)

    @cached_property
    def layout(self) -> Layout:
        """Where its chunks lie."""
        return layout(self.schedule, self.degrees.pp, self.degrees.vpp)

    @cached_property
    def tie_key(self) -> tuple[int, ...]:
        """Fewer devices, then a shorter pipeline, less tensor parallelism, fewer chunks, schedules as `SCHEDULES` lists
        them, smaller micro-batches, ZeRO-1 before ZeRO-0, sequence parallelism before none, then the placement that packs
        the inner levels fullest with the faster axes."""
        d, p = self.degrees, self.placement
        packing = tuple(-factor for level in zip(p.tp, p.dp, p.pp, strict=True) for factor in level)
        return (
            d.devices, d.pp, d.tp, d.vpp, SCHEDULES.index(self.schedule), d.micro_batch, -d.zero, -int(d.sequence_parallel),
            *(-block for block in p.blocks), *packing, int(p.rank_order == "tp-pp-dp"),
        )  # fmt: skip


def divisors(number: int) -> list[int]:
    """Divisors of `number`, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def enumerate_grids(instance: Instance) -> Iterator[Grid]:
    """(N1), (N2): all candidates before placement, one grid per `GridShape`."""
    limits, rules, workload = instance.limits, instance.rules, instance.workload
    devices = min(instance.cluster.device_count, limits.range("devices").high)
    pipelines = pipeline_table(instance, devices)
    batches = batch_table(instance, devices)
    if not len(pipelines) or not len(batches):
        return
    pp = pipelines[:, :1]
    dp, micro_batch, micro_batches = batches.T
    schedules = [name for name in rules.schedules if limits.schedule in (None, name)]
    runs = {name: _runs(name, pipelines, micro_batches, instance) for name in schedules}
    for tp, schedule in product(tensor_degrees(instance, devices), schedules):
        used = tp * pp * dp
        legal = runs[schedule] & (used <= devices) & (used >= limits.range("devices").low)
        rows, columns = np.nonzero(legal)
        if not len(rows):
            continue
        for sequence_parallel in (True, False):
            if not limits.admits("sequence_parallel", int(sequence_parallel)):
                continue
            if tensor_faults(instance.model, tp, sequence_parallel, workload.seq_len):
                continue
            if expert_faults(rules, instance.model, tp, sequence_parallel):
                continue
            for zero in rules.zero_stages:
                if limits.admits("zero", zero):
                    yield Grid(
                        GridShape(tp, sequence_parallel, zero, schedule),
                        pipelines[rows, 0],
                        pipelines[rows, 1],
                        dp[columns],
                        micro_batch[columns],
                        micro_batches[columns],
                    )


def _runs(schedule: str, pipelines: Column, micro_batches: Column, instance: Instance) -> npt.NDArray[np.bool_]:
    """Which pipelines (rows) run a schedule with which micro-batches (columns)."""
    rules = instance.rules
    out = np.zeros((len(pipelines), len(micro_batches)), dtype=bool)
    for row, (pp, vpp) in enumerate(pipelines.tolist()):
        if schedule not in schedules_of(pp, vpp):
            continue
        out[row] = True
        if schedule == "interleaved-1f1b" and rules.interleave_group_is_pp:
            out[row] = micro_batches % pp == 0
        elif schedule == "dualpipe-v":
            out[row] = micro_batches >= 2 * pp
    return out


def tensor_degrees(instance: Instance, devices: int) -> list[int]:
    """Tensor-parallel degrees that the rules and limits admit."""
    allowed = instance.limits.range("tp")
    most = min(devices, allowed.high, _largest_split(instance))
    return [
        tp
        for tp in range(max(allowed.low, 1), most + 1)
        if instance.limits.admits("etp", tp) and not tensor_faults(instance.model, tp, False, instance.workload.seq_len)
    ]


def _largest_split(instance: Instance) -> int:
    """No tp above the largest sharded dimension divides it."""
    return max(max(tensor.shape) for kind in instance.model.kinds for tensor in kind.tensors)


def pipeline_table(instance: Instance, devices: int) -> Column:
    """Rows (pp, vpp)."""
    layers, rules, limits = len(instance.model.layers), instance.rules, instance.limits
    rows = [
        (pp, vpp)
        for pp in range(1, min(devices, layers + 2) + 1)
        if limits.admits("pp", pp)
        for vpp in range(1, rules.max_vpp + 1)
        if limits.admits("vpp", vpp) and not pipeline_faults(rules, layers, pp, vpp)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def batch_table(instance: Instance, devices: int) -> Column:
    """Rows (dp, micro_batch, micro_batches)."""
    batch, limits = instance.workload.global_batch, instance.limits
    rows = [
        (dp, micro_batch, batch // dp // micro_batch)
        for dp in divisors(batch)
        if dp <= devices and limits.admits("dp", dp)
        for micro_batch in divisors(batch // dp)
        if micro_batch <= instance.rules.max_micro_batch and limits.admits("micro_batch", micro_batch)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


class PlacementTable:
    """(N3) of one instance, remembered per (tp, pp, dp)."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.depth = len(instance.levels)
        self._capacity: dict[tuple[int, ...], int] = {}
        self._placements: dict[tuple[int, int, int], tuple[Placement, ...]] = {}

    def of(self, degrees: Degrees) -> tuple[Placement, ...]:
        """The placements that the pack admits, one per way of factoring the degrees over the levels."""
        key = (degrees.tp, degrees.pp, degrees.dp)
        if key not in self._placements:
            self._placements[key] = tuple(self._admitted(key))
        return self._placements[key]

    def _admitted(self, degrees: tuple[int, int, int]) -> Iterator[Placement]:
        rules = self.instance.rules
        for factors in self._factorings(degrees, ()):
            tp, pp, dp = zip(*factors, strict=True)
            for order in rules.rank_orders:
                placement = Placement(tp, pp, dp, order)
                if not rules.linear_ranks or is_linear(placement):
                    yield placement
                    break

    def capacity(self, block: tuple[int, ...]) -> int:
        """`Cluster.capacity`, remembered."""
        if block not in self._capacity:
            self._capacity[block] = self.instance.cluster.capacity(block)
        return self._capacity[block]

    def _factorings(
        self, left: tuple[int, int, int], block: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, int, int], ...]]:
        """Ways to spread `left` over the levels from `len(block)` outwards, innermost first."""
        capacity = self.capacity(block)
        if len(block) == self.depth - 1:
            if left[0] * left[1] * left[2] <= capacity:
                yield (left,)
            return
        tp, pp, dp = left
        for a in divisors(tp):
            for b in divisors(pp):
                for c in divisors(dp):
                    used = a * b * c
                    if used > capacity:
                        break
                    for rest in self._factorings((tp // a, pp // b, dp // c), (*block, used)):
                        yield ((a, b, c), *rest)
