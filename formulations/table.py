"""The formulas of `step_time` and `memory` for many plans at once, as arrays.

One row a plan; U units are the layer kinds, the embedding and the head, in this order; P stages. What depends on a
software profile is left out of the rows, so that a table built once can be timed under many profiles: that is what a
fit does thousands of times.

(V1) unit times by (J1)-(J5) and (T1), element by element; plans of one shape go through the timeline of their schedule
     (T3) together. Padded units count zero layers.
(V2) the longest path of a row is linear in the unit times, and stays a lower bound when they change: a fit moves along
     it, and finds it anew where it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.data.pipeline import FOLDED, layout
from shardwise.data.recompute import CORE, modules_of
from shardwise.formulations.coefficients import TimeCoefficients, groups_of
from shardwise.formulations.layer_costs import TERMS, LayerTerms, sharding_of
from shardwise.formulations.layer_time import LayerTime, exposed, layer_time, modules_time_s, weight_gradient_s
from shardwise.formulations.memory import end_units, tied_copy
from shardwise.formulations.passes import ChunkCounts, PassTimes, counts_of, links_of, pass_times, shape_of
from shardwise.formulations.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from shardwise.formulations.step_time import (
    exchange_time_s,
    hop_times_s,
    lag_time_s,
    params_crowded_s,
    params_optimizer_s,
    params_sync_s,
    tied_sync_s,
    unit_times_s,
)
from shardwise.formulations.timeline import longer_spans, longest_paths, shorter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardwise.data.pipeline import Layout
    from shardwise.data.plan import Degrees, Placement, Plan
    from shardwise.formulations.coefficients import CostTables
    from shardwise.formulations.timeline import Shape

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Item = TypeVar("Item")
Profile = Any
"""A `data.profile.Profile`, or anything with its constants as numbers or as arrays of one per row, shape (R, 1)."""


@dataclass(frozen=True, eq=False)
class _SameShape:
    """Rows of a table whose plans have one shape: their layers, shape (slots, U, rows), and how many periods (E3) each
    has more than `shape`."""

    shape: Shape
    where: Layout
    rows: Ints
    counts: ChunkCounts
    periods: Ints


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Shapes (R, U), (R, links) or (R, 1); seconds without a profile. Shape and layers of each row follow in lists.

    `sets` are the sets of modules that some row repeats; `again` has the terms of what they repeat beside the attention
    core, (R, S, U, terms).
    """

    sets: tuple[str, ...]
    again: Floats
    terms: LayerTerms
    sync: Floats
    crowded: Floats
    optimizer: Floats
    gather_forward: Floats
    gather_backward: Floats
    hops: Floats
    vpp: Floats
    tp: Floats
    devices: Floats
    tied: Floats
    shapes: tuple[Shape, ...]
    counts: tuple[ChunkCounts, ...]

    def __len__(self) -> int:
        return len(self.tp)

    def rows(self, chosen: npt.NDArray[Any]) -> PlanTable:
        """The rows at an index or mask."""
        parts: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "sets":
                parts[field.name] = value
            elif isinstance(value, LayerTerms):
                parts[field.name] = LayerTerms(*(getattr(value, name)[chosen] for name in TERMS))
            elif isinstance(value, tuple):
                parts[field.name] = tuple(value[row] for row in np.arange(len(value))[chosen])
            else:
                parts[field.name] = value[chosen]
        return PlanTable(**parts)

    @cached_property
    def same_shape(self) -> tuple[_SameShape, ...]:
        """The rows, gathered by shape."""
        return self._gathered([(shape, 0) for shape in self.shapes])

    @cached_property
    def same_order(self) -> tuple[_SameShape, ...]:
        """The rows, gathered by the shape that (E3) times: numbers of micro-batches that only add periods go together."""
        return self._gathered([shorter(shape) for shape in self.shapes])

    def _gathered(self, shapes: list[tuple[Shape, int]]) -> tuple[_SameShape, ...]:
        rows: dict[Shape, list[int]] = {}
        for row, (shape, _) in enumerate(shapes):
            rows.setdefault(shape, []).append(row)
        width = self.sync.shape[1]
        return tuple(
            _SameShape(
                shape,
                layout(shape.schedule, shape.pp, shape.vpp),
                np.array(chosen),
                _together([self.counts[row] for row in chosen], width),
                np.array([shapes[row][1] for row in chosen]),
            )
            for shape, chosen in rows.items()
        )


def _together(counts: list[ChunkCounts], units: int) -> ChunkCounts:
    """Counts (slots, units) of several plans, many of them one object, as arrays (slots, units, plans); those of sets of
    modules one set after the other."""
    distinct, of = by_identity(counts)
    slots, sets = len(distinct[0].every), distinct[0].selective.shape[1] // distinct[0].every.shape[1]

    def padded(name: str, parts: int = 1) -> Ints:
        out = np.zeros((slots, parts, units, len(distinct)), dtype=np.int64)
        for row, own in enumerate(distinct):
            count = getattr(own, name).reshape(slots, parts, -1)
            out[:, :, : count.shape[2], row] = count
        return out.reshape(slots, parts * units, -1)[:, :, of]

    return ChunkCounts(padded("every"), padded("full"), padded("selective", sets))


def by_identity(items: Sequence[Item]) -> tuple[list[Item], Ints]:
    """The distinct objects, and the index of each item's among them."""
    distinct = {id(item): item for item in items}
    place = {key: index for index, key in enumerate(distinct)}
    return list(distinct.values()), np.array([place[id(item)] for item in items], dtype=np.int64)


def stacked(rows: Sequence[npt.NDArray[Any]], shape: tuple[int, ...]) -> Floats:
    """Arrays of at most `shape` as one, (rows, *shape), padded with zeros."""
    out = np.zeros((len(rows), *shape))
    for own, values in zip(out, rows, strict=True):
        own[tuple(slice(size) for size in values.shape)] = values
    return out


@dataclass(frozen=True, slots=True)
class _Units:
    """What a row's units take: everything that the split into stages does not change."""

    terms: Floats
    again: Floats
    sync: Floats
    crowded: Floats
    optimizer: Floats
    gather_forward: Floats
    gather_backward: Floats
    hops: tuple[float, ...]
    tied: float


class UnitTimes:
    """The units of the plans of one instance, remembered by degrees and placement."""

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self._known: dict[tuple[Any, ...], _Units] = {}

    def of(self, degrees: Degrees, placement: Placement, schedule: str, sets: tuple[str, ...]) -> _Units:
        """Terms, those of sets of modules, gradient sync, optimizer and gather of each unit."""
        d = degrees
        folded = schedule if schedule in FOLDED else ""
        offload = d.offload_optimizer, d.offload_param
        key = (sharding_of(d), d.pp, d.dp, d.zero, d.dp_replicate, offload, placement, folded, sets)  # all but vpp
        if key not in self._known:
            self._known[key] = self._made(degrees, placement, schedule, sets)
        return self._known[key]

    def _made(self, degrees: Degrees, placement: Placement, schedule: str, sets: tuple[str, ...]) -> _Units:
        tables, instance = self.tables, self.tables.instance
        sharding, groups = sharding_of(degrees), groups_of(instance, degrees, placement)
        shard = tables.terms(sharding, groups)
        terms = [_numbers(unit) for unit in (*shard.kinds, shard.embedding, shard.head)]
        none = [_numbers(LayerTerms())] * 2
        again = [[*map(_numbers, tables.module_terms(sharding, groups, own)), *none] for own in sets]
        apart = tied_copy(instance, degrees.pp, schedule)
        ends = end_units(instance, degrees.tp, degrees.ep, degrees.etp, with_tied_copy=apart)
        params = [*tables.kind_params(degrees.tp, degrees.ep, degrees.etp), *ends]
        dense, expert = tables.group_rates(degrees, placement, schedule)
        layers = len(params) - 2
        gathers = np.array(
            [unit_times_s(instance, degrees, placement, unit, end=i >= layers) for i, unit in enumerate(params)]
        )
        crowded = np.array([params_crowded_s(dense, expert, unit) for unit in params])
        contended = np.array([params_sync_s(dense, expert, unit) for unit in params])
        return _Units(
            np.array(terms),
            np.array(again),
            contended - instance.profile.sync_contention * crowded,
            crowded,
            np.array([params_optimizer_s(dense, expert, unit) for unit in params]),
            gathers[:, 0],
            gathers[:, 1],
            hop_times_s(instance, degrees, placement),
            tied_sync_s(instance, degrees, placement, ends[0].dense) if apart else 0.0,
        )


def _numbers(terms: LayerTerms) -> list[float]:
    return [getattr(terms, name) for name in TERMS]


def plan_table(rows: Sequence[tuple[UnitTimes, Plan]]) -> PlanTable:
    """The table of some plans, each with the units of its instance."""
    known: dict[tuple[Any, ...], _Units] = {}
    splits: dict[tuple[int, int], ChunkCounts] = {}
    sets = sets_of(plan for _, plan in rows)
    of_rows, counts, shapes = [], [], []
    for units, plan in rows:  # one object is told from another by its id: the plans outlive this loop
        key = (id(units), id(plan.degrees), id(plan.placement), plan.schedule)
        if key not in known:
            known[key] = units.of(plan.degrees, plan.placement, plan.schedule, sets)
        of_rows.append(known[key])
        split = (id(units), id(plan.stages))
        if split not in splits:
            splits[split] = counts_of(plan, units.tables.kind_prefixes, sets)
        counts.append(splits[split])
        shapes.append(shape_of(plan))
    own, of = by_identity(of_rows)
    most_units = max((len(units.sync) for units in own), default=0)
    most_stages = max((plan.degrees.pp for _, plan in rows), default=0)

    def by_unit(name: str) -> Floats:
        return stacked([getattr(units, name) for units in own], (most_units,))[of]

    terms: Any = stacked([units.terms for units in own], (most_units, len(TERMS)))[of]

    def column(values: list[float]) -> Floats:
        return np.array(values, dtype=np.float64)[:, None]

    by_link = stacked([np.array(units.hops) for units in own], (most_stages,))[of]
    plans = [plan for _, plan in rows]
    return PlanTable(
        sets=sets,
        again=stacked([units.again for units in own], (len(sets), most_units, len(TERMS)))[of],
        terms=LayerTerms(*(terms[:, :, index] for index in range(len(TERMS)))),
        sync=by_unit("sync"),
        crowded=by_unit("crowded"),
        optimizer=by_unit("optimizer"),
        gather_forward=by_unit("gather_forward"),
        gather_backward=by_unit("gather_backward"),
        hops=by_link,
        vpp=column([plan.degrees.vpp for plan in plans]),
        tp=column([plan.degrees.tp for plan in plans]),
        devices=column([plan.degrees.devices for plan in plans]),
        tied=column([units.tied for units in own])[of],
        shapes=tuple(shapes),
        counts=tuple(counts),
    )


def sets_of(plans: Iterable[Plan]) -> tuple[str, ...]:
    """The sets of modules that some plan repeats, the attention core first."""
    stages = {id(plan.stages): plan.stages for plan in plans}
    modes = {stage.mode for own in stages.values() for stage in own} - {"none", "full", CORE}
    return CORE, *sorted(modes)


def step_times_s(table: PlanTable, profile: Profile) -> Floats:
    """(V1) The step time of every row, shape (R,)."""
    units = _unit_coefficients(table, profile)
    out = np.empty(len(table))
    for same in table.same_order:
        times = _pass_times(same, units, table)
        out[same.rows] = longer_spans(same.shape, same.periods, times.durations, times.lags).step(
            same.shape, times.tails
        )
    return np.asarray(out + _overhead(profile))


def _unit_coefficients(table: PlanTable, profile: Profile) -> TimeCoefficients:
    """(T1), (T2), (T4) per unit and link, shape (R, U) and (R, links)."""
    t = table
    scale = 1 + profile.straggler * np.log2(t.devices)
    time = layer_time(t.terms, profile, t.tp)
    forward = (time.forward_s + exposed(t.gather_forward, time.forward_s, profile)) * scale
    backward = (time.backward_s + exposed(t.gather_backward, time.backward_s, profile)) * scale
    sync = t.sync + profile.sync_contention * t.crowded
    hidden = np.where(sync > 0, profile.dp_comm_overlap * (forward + backward), 0.0)
    return TimeCoefficients(
        forward=forward,
        backward=backward,
        weight=np.minimum(weight_gradient_s(t.terms, profile) * scale, backward),
        selective=np.concatenate([own * scale for own in _again(t, time, profile)], axis=1),
        full=time.full_s * scale,
        tail_floor=profile.dp_comm_floor * sync + t.optimizer,
        tail_overlap=sync - hidden + t.optimizer,
        sends=exchange_time_s(profile, t.hops, t.vpp),
        lags=lag_time_s(profile, t.hops, t.vpp),
        tied=0.0,
        overhead=0.0,
    )


def _again(table: PlanTable, time: LayerTime, profile: Profile) -> Iterator[Any]:
    """(J4) of each set of modules."""
    for index, own in enumerate(table.sets):
        core = time.selective_s if CORE in modules_of(own) else 0.0
        if own == CORE:
            yield core
            continue
        terms: Any = table.again[:, index]
        more = modules_time_s(LayerTerms(*(terms[:, :, term] for term in range(len(TERMS)))), profile, table.tp)
        yield core + more


def _pass_times(same: _SameShape, units: TimeCoefficients, table: PlanTable) -> PassTimes:
    parts: dict[str, Any] = {name: getattr(units, name)[same.rows].T for name in TimeCoefficients.__slots__[:-2]}
    own = TimeCoefficients(**parts, tied=table.tied[same.rows, 0], overhead=0.0)
    return pass_times(own, same.shape, same.where, same.counts)


def _overhead(profile: Profile) -> Any:
    overhead = profile.step_overhead_s
    return overhead[:, 0] if isinstance(overhead, np.ndarray) else overhead


PASSES = ("forward", "backward", "weight", "selective", "full")


@dataclass(frozen=True, eq=False)
class PathTable:
    """(V2) The longest path of every row, which some profile has: how often it meets each unit and link.

    `passes` has an array (R, U) for each of `PASSES`; sends and lags are (R, links), tail (R, U) the layers of the stage
    that it ends on, tied (R,).
    """

    table: PlanTable
    passes: dict[str, Ints]
    sends: Ints
    lags: Ints
    tail: Ints
    tied: Floats


def path_table(table: PlanTable, profile: Profile) -> PathTable:
    """(V2) of `table` under `profile`."""
    units = _unit_coefficients(table, profile)
    passes = {name: np.zeros(getattr(units, name).shape, dtype=np.int64) for name in PASSES}
    tail = np.zeros(table.sync.shape, dtype=np.int64)
    sends, lags = np.zeros((2, *table.hops.shape), dtype=np.int64)
    tied = np.zeros(len(table))
    for same in table.same_shape:
        shape, counts, rows, links = same.shape, same.counts, same.rows, same.shape.pp
        times = _pass_times(same, units, table)
        paths = longest_paths(shape, times.durations, times.lags, times.tails)
        backward = paths.passes[BACKWARD] + paths.passes[INPUT]
        apart = paths.passes[WEIGHT] - paths.passes[INPUT]
        for name, often, of in (
            ("forward", paths.passes[FORWARD], counts.every),
            ("backward", backward, counts.every),
            ("weight", apart, counts.every),
            ("selective", backward, counts.selective),
            ("full", backward, counts.full),
        ):
            passes[name][rows] = np.einsum("sr,sur->ru", often, of)
        for link, often in zip(links_of(same.where, links), (paths.passes[FORWARD], backward), strict=True):
            sent = np.zeros((links + 1, len(rows)), dtype=np.int64)
            np.add.at(sent, link, often)
            sends[rows, :links] += sent[:links].T
        lags[rows, :links] = paths.hops.T
        on_stage = np.array(same.where.stage)[:, None] == paths.stage
        tail[rows] = np.einsum("sr,sur->ru", on_stage.astype(np.int64), counts.every)
        ends = (paths.stage == 0) | (paths.stage == shape.pp - 1)
        tied[rows] = np.where(ends & (shape.pp > 1), table.tied[rows, 0], 0.0)
    return PathTable(table, passes, sends, lags, tail, tied)


def path_times_s(paths: PathTable, profile: Profile) -> Floats:
    """(V2) The length of each path under `profile`: no more than its step time, and that exactly where the path is
    the longest."""
    units = _unit_coefficients(paths.table, profile)

    def total(often: Ints, each: Floats) -> Floats:
        return np.asarray(np.einsum("ru,ru->r", often, each))

    out = sum(total(often, getattr(units, name)) for name, often in paths.passes.items())
    out = out + total(paths.sends, units.sends) + total(paths.lags, units.lags) + paths.tied
    tails = np.maximum(total(paths.tail, units.tail_floor), total(paths.tail, units.tail_overlap))
    return np.asarray(out + tails + _overhead(profile))
