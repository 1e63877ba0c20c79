"""Candidates: every legal tuple of degrees, and the placements of each.

(N1) tp ranges over the degrees that the rules' tensor checks admit, cp over the divisors of the sequence length, with
     each algorithm of the pack that its own checks do; ep over the divisors of the number of experts and etp over 1 and
     tp, with ep etp dividing tp cp dp and both as the pack allows; pp x vpp over the pipelines of at most L + 2 chunks,
     or 1 where the pack has none; dp over the divisors of the global batch B and micro_batch over those of B / dp; zero
     over the pack's stages with the replicas and pipelines that it allows them, 2 and 3 only where cp dp > 1 or the host
     has the weights, which takes no pipeline; sequence
     parallelism is on or off for tp > 1 where tp divides the sequence length, or what cp leaves of it. The host has a
     share of the optimizer that the workload and the pack allow, or none. Activations of the first layers may be
     there where p = 1 and nothing is recomputed, of as few as fit, and none where all fits without (offload, U6). The
     schedule is one of the pack's that the
     pipeline, the micro-batches (data/pipeline.py) and the pack's own conditions can run.
(N2) devices = tp cp pp dp is at most those of the cluster. All of it within the user's limits.
(N3) A placement factors each of tp, cp, pp, dp over the levels of the cluster so that the product at each level does
     not exceed the members there (`Cluster.capacity`), with the nodes kept free that a limit asks for. A pack with
     linear ranks admits those that numbering the ranks along the devices gives. Placements that differ by an
     automorphism of the cluster are one.
(N4) With ZeRO, states are shared by all dp ranks, or by those that lie together below some level and replicated over the
     rest (HSDP): dp_replicate is 1, or the product of the dp factors from one level outwards, or what a limit asks for, of
     these what the rules' replica checks admit.

The tie order among candidates of equal step time is the ascending order of `tie_key`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.data.model import Moe
from shardwise.data.pipeline import SCHEDULES, layout, schedules_of
from shardwise.data.plan import CP_COMM_TYPES, Degrees, Placement, Plan
from shardwise.data.rules import (
    absent_faults,
    context_faults,
    depth_faults,
    expert_faults,
    expert_group_faults,
    is_linear,
    offload_faults,
    pipeline_faults,
    replica_faults,
    schedule_faults,
    sequence_faults,
    sharding_faults,
    tensor_faults,
)
from shardwise.formulations.layer_costs import Sharding
from shardwise.formulations.timeline import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.data.instance import Instance
    from shardwise.data.pipeline import Layout
    from shardwise.data.plan import CpCommType, Stage

Column = npt.NDArray[np.int64]
Algorithm = tuple["CpCommType", int]
"""Of context parallelism, with `cp_a2a`."""
Split = tuple[int, ...]
"""Numbers of tp, cp, pp and dp."""

ZERO_ORDER = (1, 0, 2, 3)
"""ZeRO stages, the one that is preferred among equals first."""


@dataclass(frozen=True)
class GridShape:
    """The part of a candidate that vectorises badly."""

    tp: int
    cp: int
    ep: int
    etp: int
    sequence_parallel: bool
    zero: int
    schedule: str
    cp_comm_type: CpCommType
    cp_a2a: int
    offload_optimizer: float = 0.0
    offload_param: bool = False
    offload_layers: int = 0
    """0, or the most; each candidate has the fewest that fit (U6)."""

    def sharding(self, micro_batch: int) -> Sharding:
        """What the layers of a candidate of this shape see."""
        return Sharding(
            self.tp, micro_batch, self.sequence_parallel, self.cp, self.ep, self.etp, self.cp_comm_type, self.cp_a2a
        )

    def degrees(self, pp: int, vpp: int, dp: int, micro_batch: int) -> Degrees:
        """Degrees of this shape."""
        return Degrees(
            tp=self.tp,
            pp=pp,
            dp=dp,
            vpp=vpp,
            micro_batch=micro_batch,
            zero=self.zero,
            sequence_parallel=self.sequence_parallel,
            cp=self.cp,
            ep=self.ep,
            etp=self.etp,
            cp_comm_type=self.cp_comm_type,
            cp_a2a=self.cp_a2a,
            offload_optimizer=self.offload_optimizer,
            offload_param=self.offload_param,
            offload_layers=self.offload_layers,
        )


@dataclass(frozen=True, eq=False)
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

    @property
    def devices(self) -> Column:
        """(N2)."""
        return self.shape.tp * self.shape.cp * self.pp * self.dp

    @cached_property
    def sizes(self) -> tuple[Column, npt.NDArray[np.intp]]:
        """Every micro-batch among the rows, and which of them each row has."""
        return np.unique(self.micro_batch, return_inverse=True)

    @cached_property
    def groups(self) -> tuple[Column, npt.NDArray[np.intp]]:
        """Every dp among the rows, and which of them each row has."""
        return np.unique(self.dp, return_inverse=True)

    def degrees(self, row: int) -> Degrees:
        return self.shape.degrees(int(self.pp[row]), int(self.vpp[row]), int(self.dp[row]), int(self.micro_batch[row]))

    def rows(self, chosen: npt.NDArray[Any]) -> Grid:
        """The rows at an index or mask."""
        columns = (self.pp, self.vpp, self.dp, self.micro_batch, self.micro_batches)
        return Grid(self.shape, *(column[chosen] for column in columns))


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
    def tie_key(self) -> tuple[float, ...]:
        """Fewer devices, then a shorter pipeline, less tensor and context parallelism, its algorithms as `CP_COMM_TYPES`
        lists them, smaller exchanges in a hierarchy, fewer chunks, schedules as `SCHEDULES` does, smaller micro-batches,
        ZeRO-1 before 0, 2 and 3, less of the optimizer and of activations on the host, sequence parallelism before none,
        experts spread less, fewer replicas, then the placement that packs the inner levels fullest with the faster axes."""
        d, p = self.degrees, self.placement
        packing = tuple(-factor for level in zip(p.tp, p.cp, p.dp, p.pp, strict=True) for factor in level)
        return (
            d.devices, d.pp, d.tp, d.cp, CP_COMM_TYPES.index(d.cp_comm_type), d.cp_a2a, d.vpp,
            SCHEDULES.index(self.schedule), d.micro_batch, ZERO_ORDER.index(d.zero), d.offload_optimizer,
            int(d.offload_param), d.offload_layers, -int(d.sequence_parallel), d.ep, d.etp, d.dp_replicate,
            *(-block for block in p.blocks), *packing, int(p.rank_order == "tp-pp-dp"),
        )  # fmt: skip


def divisors(number: int) -> list[int]:
    """Divisors of `number`, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def enumerate_grids(instance: Instance) -> Iterator[Grid]:
    """(N1), (N2): all candidates before placement, one grid per `GridShape`."""
    limits, rules = instance.limits, instance.rules
    devices = min(instance.cluster.device_count, limits.range("devices").high)
    pipelines = pipeline_table(instance, devices)
    batches = batch_table(instance, devices)
    if not len(pipelines) or not len(batches):
        return
    replicas = pipelines[:, :1] * batches[:, 0]
    schedules = [name for name in rules.schedules if limits.schedule in (None, name)]
    runs = {name: _runs(name, pipelines, batches[:, 2], instance) for name in schedules}
    for tp in tensor_degrees(instance, devices):
        for (cp, algorithms), schedule in product(context_degrees(instance, tp, devices // tp), schedules):
            if schedule_faults(rules, instance.model, schedule, cp):
                continue
            used = tp * cp * replicas
            legal = runs[schedule] & (used <= devices) & (used >= limits.range("devices").low)
            rows, columns = np.nonzero(legal)
            if len(rows):
                every = _columns(pipelines[rows], batches[columns])
                yield from _grids(instance, tp, cp, algorithms, schedule, every)


def _columns(pipelines: Column, batches: Column) -> tuple[Column, ...]:
    return (*pipelines.T, *batches.T)


def _grids(
    instance: Instance,
    tp: int,
    cp: int,
    algorithms: tuple[Algorithm, ...],
    schedule: str,
    columns: tuple[Column, ...],
) -> Iterator[Grid]:
    """The grids of one (tp, cp, schedule), whose rows are `columns` where no other degree forbids them."""
    limits, rules = instance.limits, instance.rules
    pp, _, dp, _, _ = columns
    for sequence_parallel in (True, False):
        if not limits.admits("sequence_parallel", int(sequence_parallel)):
            continue
        if _sequence_parallel_faults(instance, tp, cp, sequence_parallel):
            continue
        for (ep, etp), zero in product(expert_degrees(instance, tp, tp * cp * int(dp.max())), rules.zero_stages):
            if not limits.admits("zero", zero):
                continue
            legal = np.ones(len(pp), dtype=bool)
            if ep * etp != tp:
                legal &= tp * cp * dp % (ep * etp) == 0
            legal &= _sharded(instance, zero, tp, cp, pp, dp)
            for (share, param), away in product(offloads(instance, zero), most_offload_layers(instance, schedule)):
                chosen = legal & (pp == 1) if param or away else legal
                if zero >= 2 and not param:
                    chosen = chosen & (cp * dp > 1)
                if chosen.any():
                    rows = columns if chosen.all() else tuple(column[chosen] for column in columns)
                    for algorithm in algorithms:
                        own = (zero, schedule, *algorithm, share, param, away)
                        yield Grid(GridShape(tp, cp, ep, etp, sequence_parallel, *own), *rows)


def offloads(instance: Instance, zero: int) -> list[tuple[float, bool]]:
    """Shares of the optimizer on the host that the workload and the rules admit with a ZeRO stage, and whether the weights
    are there too."""
    workload, rules = instance.workload, instance.rules
    every = product(workload.offload_shares, (False, True) if workload.offload_param else (False,))
    return [own for own in every if not offload_faults(rules, zero, *own, workload.optimizer)]


def most_offload_layers(instance: Instance, schedule: str) -> list[int]:
    """None, and where candidates may leave the activations of some layers to the host, all but one."""
    most = len(instance.model.layers) - 1
    allowed = instance.workload.offload_activations and instance.limits.recompute in (None, "none")
    return [0, most] if allowed and schedule == "1f1b" and most else [0]


def _sequence_parallel_faults(instance: Instance, tp: int, cp: int, sequence_parallel: bool) -> list[str]:
    """The rules on sequence parallelism, on or off."""
    rules, model, seq_len = instance.rules, instance.model, instance.workload.seq_len
    return [
        *absent_faults(rules, sequence_parallel=sequence_parallel),
        *tensor_faults(rules, model, tp, sequence_parallel, seq_len),
        *sequence_faults(rules, tp, cp, sequence_parallel, seq_len),
        *expert_faults(rules, model, tp, sequence_parallel),
    ]


def _sharded(instance: Instance, zero: int, tp: int, cp: int, pp: Column, dp: Column) -> npt.NDArray[np.bool_] | bool:
    """Which rows may have a ZeRO stage; `sharding_faults` asks of pp and dp only whether they are above 1."""
    (one, replicas), (stages, both) = (
        [not sharding_faults(instance.rules, zero, tp=tp, cp=cp, pp=p, dp=d) for d in (1, 2)] for p in (1, 2)
    )
    if one == replicas == stages == both:
        return one
    return np.where(pp > 1, np.where(dp > 1, both, stages), np.where(dp > 1, replicas, one))


def _runs(schedule: str, pipelines: Column, micro_batches: Column, instance: Instance) -> npt.NDArray[np.bool_]:
    """Which pipelines (rows) run a schedule with which micro-batches (columns)."""
    rules = instance.rules
    out = np.zeros((len(pipelines), len(micro_batches)), dtype=bool)
    for row, (pp, vpp) in enumerate(pipelines.tolist()):
        if schedule not in schedules_of(pp, vpp) or depth_faults(rules, len(instance.model.layers), schedule, pp):
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
        if not tensor_faults(instance.rules, instance.model, tp, False, instance.workload.seq_len)
    ]


def context_degrees(instance: Instance, tp: int, most: int) -> list[tuple[int, tuple[Algorithm, ...]]]:
    """Context-parallel degrees up to `most` that the rules and limits admit, each with its algorithms."""
    allowed = instance.limits.range("cp")
    degrees = [cp for cp in divisors(instance.workload.seq_len) if cp <= most and cp in allowed]
    found = [(cp, context_algorithms(instance, tp, cp)) for cp in degrees]
    return [(cp, algorithms) for cp, algorithms in found if algorithms]


def context_algorithms(instance: Instance, tp: int, cp: int) -> tuple[Algorithm, ...]:
    """Algorithms of context parallelism that the rules and limits admit; that of one rank is "p2p"."""
    rules, limits, seq_len = instance.rules, instance.limits, instance.workload.seq_len
    return tuple(
        (name, ways)
        for name in (rules.context if cp > 1 else CP_COMM_TYPES[:1])
        if limits.cp_comm_type in (None, name)
        for ways in (divisors(cp)[1:-1] if name == "a2a+p2p" else [1])
        if limits.admits("cp_a2a", ways)
        and not context_faults(rules, instance.model, tp, cp, seq_len, name, ways, instance.workload.attention)
    )


def expert_degrees(instance: Instance, tp: int, most: int) -> list[tuple[int, int]]:
    """(ep, etp) with ep etp up to `most` that the rules and limits admit."""
    counts = [kind.ffn.experts for kind in instance.model.kinds if isinstance(kind.ffn, Moe)]
    spread = divisors(gcd(*counts)) if counts else [1]
    ways = sorted({1, tp}) if counts else [tp]
    return [
        (ep, etp)
        for ep, etp in product(spread, ways)
        if ep * etp <= most
        and instance.limits.admits("ep", ep)
        and instance.limits.admits("etp", etp)
        and not expert_group_faults(instance.rules, instance.model, tp, ep, etp)
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
    """(N3), (N4) of one instance, remembered per (tp, cp, pp, dp)."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.depth = len(instance.levels)
        self._capacity: dict[tuple[int, ...], int] = {}
        self._placements: dict[tuple[Split, bool], tuple[Placement, ...]] = {}

    def of(self, degrees: Degrees) -> tuple[Placement, ...]:
        """The placements that the pack admits, one per way of factoring the degrees over the levels."""
        together = degrees.pp == 1 or degrees.ep * degrees.etp == degrees.tp * degrees.cp
        key = (degrees.tp, degrees.cp, degrees.pp, degrees.dp), together
        if key not in self._placements:
            self._placements[key] = tuple(self._admitted(*key))
        return self._placements[key]

    def replicates(self, degrees: Degrees, placement: Placement) -> tuple[int, ...]:
        """(N4) The values of dp_replicate."""
        allowed = self.instance.limits.range("dp_replicate")
        found = {1}
        if degrees.zero:
            aligned = {prod(placement.dp[level:]) for level in range(1, self.depth)}
            found |= {n for n in aligned if n < degrees.dp}
            if allowed.low == allowed.high and degrees.dp % max(allowed.low, 1) == 0:
                found.add(allowed.low)
        rules = self.instance.rules
        return tuple(
            sorted(n for n in found if n in allowed and not replica_faults(rules, replace(degrees, dp_replicate=n)))
        )

    def _admitted(self, degrees: Split, together: bool) -> Iterator[Placement]:
        """`together`: experts are replicated like everything else, as the order with pp inside dp wants it."""
        rules = self.instance.rules
        for factors in self._factorings(degrees, ()):
            tp, cp, pp, dp = zip(*factors, strict=True)
            for order in rules.rank_orders:
                if order == "tp-pp-dp" and rules.linear_ranks and not together:
                    continue
                placement = Placement(tp, pp, dp, order, cp)
                if not self.instance.limits.admits("free_nodes", self.instance.free_nodes(placement.blocks)):
                    break
                if not rules.linear_ranks or is_linear(placement):
                    yield placement
                    break

    def capacity(self, block: tuple[int, ...]) -> int:
        """`Cluster.capacity`, remembered."""
        if block not in self._capacity:
            self._capacity[block] = self.instance.cluster.capacity(block)
        return self._capacity[block]

    def _factorings(self, left: Split, block: tuple[int, ...]) -> Iterator[tuple[Split, ...]]:
        """Ways to spread `left` over the levels from `len(block)` outwards, innermost first."""
        capacity = self.capacity(block)
        if len(block) == self.depth - 1:
            if prod(left) <= capacity:
                yield (left,)
            return
        for taken in self._inside(left, capacity):
            outside: Any = tuple(n // own for n, own in zip(left, taken, strict=True))
            for rest in self._factorings(outside, (*block, prod(taken))):
                yield (taken, *rest)

    def _inside(self, left: Split, capacity: int) -> Iterator[Split]:
        """The factors that one level may take of each axis."""
        ways = [[n for n in divisors(degree) if n <= capacity] for degree in left]
        for taken in product(*ways):
            if prod(taken) <= capacity and (not self.instance.rules.linear_ranks or _in_turn(left, taken)):
                yield taken


def _in_turn(left: Split, taken: Split) -> bool:
    """Whether numbered ranks can lie so: of the axes that are left over, only the fastest is in the level, or all
    before it are complete; pp and dp come last, in either order."""
    tp, cp, pp, dp = (own == degree for own, degree in zip(taken, left, strict=True))
    _, c, p, d = (own > 1 for own in taken)
    return (tp or not (c or p or d)) and (cp or not (p or d)) and (pp or dp or not (p and d))
