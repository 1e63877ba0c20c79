"""The formulas of `step_time` and `memory` for many plans at once, as arrays.

One row a plan; U units are the layer kinds, the embedding and the head, in this order; P stages. What depends on a
software profile is left out of the rows, so that a table built once can be timed under many profiles: that is what a
fit does thousands of times.

(V1) unit times by (J1)-(J5), stage times by (T1)-(T7), element by element; padded units and stages count zero layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.formulations.coefficients import DRAIN_WEIGHT_GRADIENTS, groups_of, sharding_of
from shardwise.formulations.layer_costs import TERMS, LayerTerms
from shardwise.formulations.layer_time import exposed, larger, layer_time
from shardwise.formulations.memory import KindParams, end_params_on_device, tied_copy
from shardwise.formulations.step_time import exchange_time_s, hop_times_s, tied_sync_s, unit_times_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.data.plan import Degrees, Placement, Plan
    from shardwise.formulations.coefficients import CostTables

Floats = npt.NDArray[np.float64]
Profile = Any
"""A `data.profile.Profile`, or anything with its constants as numbers or as arrays of one per row, shape (R, 1)."""


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Shapes (R, U), (R, P), (R, P, U) or (R, 1); seconds without a profile."""

    terms: LayerTerms
    sync: Floats
    optimizer: Floats
    gather_forward: Floats
    gather_backward: Floats
    layers: Floats
    first_layers: Floats
    full: Floats
    first_full: Floats
    selective: Floats
    hops: Floats
    stage: Floats
    micro_batches: Floats
    pp: Floats
    vpp: Floats
    tp: Floats
    devices: Floats
    tied: Floats
    drained_weights: Floats

    def __len__(self) -> int:
        return len(self.pp)

    def rows(self, chosen: npt.NDArray[Any]) -> PlanTable:
        """The rows at an index or mask."""
        parts: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, LayerTerms):
                parts[field.name] = LayerTerms(*(getattr(value, name)[chosen] for name in TERMS))
            else:
                parts[field.name] = value[chosen]
        return PlanTable(**parts)


@dataclass(frozen=True, slots=True)
class _Units:
    """What a row's units take: everything that the split into stages does not change."""

    terms: Floats
    sync: Floats
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

    def of(self, degrees: Degrees, placement: Placement) -> _Units:
        """Terms, gradient sync, optimizer and gather of each unit."""
        d = degrees
        key = (sharding_of(d), d.pp, d.dp, d.zero, d.dp_replicate, placement)  # all but vpp
        if key not in self._known:
            self._known[key] = self._made(degrees, placement)
        return self._known[key]

    def _made(self, degrees: Degrees, placement: Placement) -> _Units:
        tables, instance = self.tables, self.tables.instance
        shard = tables.terms(sharding_of(degrees), groups_of(instance, degrees, placement))
        terms = [[getattr(unit, name) for name in TERMS] for unit in (*shard.kinds, shard.embedding, shard.head)]
        embedding = end_params_on_device(instance, degrees.tp, head=False)
        head = end_params_on_device(instance, degrees.tp, head=True, with_tied_copy=tied_copy(instance, degrees.pp))
        params = [
            *tables.kind_params(degrees.tp, degrees.ep, degrees.etp),
            KindParams(embedding, 0),
            KindParams(head, 0),
        ]
        dense, expert = tables.group_rates(degrees, placement)
        layers = len(params) - 2
        gathers = np.array(
            [unit_times_s(instance, degrees, placement, unit, end=i >= layers) for i, unit in enumerate(params)]
        )
        return _Units(
            np.array(terms),
            np.array([dense.communication_s * n.dense + expert.communication_s * n.expert for n in params]),
            np.array([dense.optimizer_s * n.dense + expert.optimizer_s * n.expert for n in params]),
            gathers[:, 0],
            gathers[:, 1],
            hop_times_s(instance, degrees, placement),
            tied_sync_s(instance, degrees, placement, embedding) if instance.model.tied else 0.0,
        )


@dataclass(frozen=True, slots=True)
class _Split:
    """Layers of each unit on each stage: all, of the first chunk, and those recomputed in full of both."""

    layers: Floats
    first_layers: Floats
    full: Floats
    first_full: Floats
    selective: Floats


def split_of(plan: Plan, kinds: tuple[int, ...], units: int) -> _Split:
    """Count the layers of every stage; `units` is the number of kinds plus two."""
    pp, vpp = plan.degrees.pp, plan.degrees.vpp
    counts = np.zeros((4, pp, units))
    selective = np.zeros((pp, 1))
    position = 0
    for chunk, layers in enumerate(plan.chunk_layers):
        k, setting = chunk % pp, plan.stages[chunk % pp]
        chosen = np.array(kinds[position : position + layers], dtype=np.int64)
        everything = np.bincount(chosen, minlength=units)
        repeated = np.bincount(chosen[: setting.recompute_layers], minlength=units)
        counts[0, k] += everything
        counts[2, k] += repeated if setting.recompute == "full" else 0
        if chunk < pp:
            counts[1, k], counts[3, k] = everything, repeated if setting.recompute == "full" else 0
        selective[k] = setting.recompute == "selective"
        position += layers
    assert vpp * pp == len(plan.chunk_layers)
    counts[0, 0, units - 2] = counts[1, 0, units - 2] = 1
    counts[0, pp - 1, units - 1] = 1
    return _Split(counts[0], counts[1], counts[2], counts[3], selective)


def plan_table(rows: Sequence[tuple[UnitTimes, Plan]]) -> PlanTable:
    """The table of some plans, each with the units of its instance."""
    found = [(units.of(plan.degrees, plan.placement), units, plan) for units, plan in rows]
    splits: dict[tuple[int, int, int, int], _Split] = {}
    chosen = []
    for _, units, plan in found:
        key = (id(units), plan.degrees.pp, plan.degrees.vpp, id(plan.stages))  # the plans outlive this loop
        if key not in splits:
            instance = units.tables.instance
            splits[key] = split_of(plan, instance.model.kind_indices, len(instance.model.kinds) + 2)
        chosen.append(splits[key])
    most_units = max((len(units.sync) for units, _, _ in found), default=0)
    most_stages = max((plan.degrees.pp for _, _, plan in found), default=0)

    def by_unit(name: str) -> Floats:
        out = np.zeros((len(found), most_units))
        for row, (own, _, _) in enumerate(found):
            values = getattr(own, name)
            out[row, : len(values)] = values
        return out

    def by_stage(name: str, width: int) -> Floats:
        out = np.zeros((len(found), most_stages, width))
        for row, split in enumerate(chosen):
            values = getattr(split, name)
            out[row, : values.shape[0], : values.shape[1]] = values
        return out

    terms: Any = np.zeros((len(found), most_units, len(TERMS)))
    hops = np.zeros((len(found), most_stages))
    for row, (own, _, _) in enumerate(found):
        terms[row, : len(own.terms)] = own.terms
        hops[row, : len(own.hops)] = own.hops

    def column(values: list[float]) -> Floats:
        return np.array(values, dtype=np.float64)[:, None]

    plans = [plan for _, _, plan in found]
    return PlanTable(
        terms=LayerTerms(*(terms[:, :, index] for index in range(len(TERMS)))),
        sync=by_unit("sync"),
        optimizer=by_unit("optimizer"),
        gather_forward=by_unit("gather_forward"),
        gather_backward=by_unit("gather_backward"),
        layers=by_stage("layers", most_units),
        first_layers=by_stage("first_layers", most_units),
        full=by_stage("full", most_units),
        first_full=by_stage("first_full", most_units),
        selective=by_stage("selective", 1),
        hops=hops,
        stage=np.arange(most_stages, dtype=np.float64)[None, :].repeat(len(found), axis=0),
        micro_batches=column([plan.micro_batches for plan in plans]),
        pp=column([plan.degrees.pp for plan in plans]),
        vpp=column([plan.degrees.vpp for plan in plans]),
        tp=column([plan.degrees.tp for plan in plans]),
        devices=column([plan.degrees.devices for plan in plans]),
        tied=column([units.tied for units, _, _ in found]),
        drained_weights=column([DRAIN_WEIGHT_GRADIENTS.get(plan.schedule, 0.0) for plan in plans]),
    )


def step_times_s(table: PlanTable, profile: Profile) -> Floats:
    """(V1) The step time of every row, shape (R,)."""
    t = table
    scale = 1 + profile.straggler * np.log2(t.devices)
    time = layer_time(t.terms, profile, t.tp)
    forward = (time.forward_s + exposed(t.gather_forward, time.forward_s, profile)) * scale
    backward = (time.backward_s + exposed(t.gather_backward, time.backward_s, profile)) * scale
    full, selective = time.full_s * scale, time.selective_s * scale
    both = forward + backward

    def on_stages(counts: Floats, values: Floats) -> Floats:
        return np.asarray(np.einsum("rpu,ru->rp", counts, values))

    chosen = t.selective[:, :, 0] * on_stages(t.layers, selective)
    work = on_stages(t.layers, both) + on_stages(t.full, full) + chosen
    before = np.concatenate([np.zeros((len(t), 1)), t.hops[:, :-1]], axis=1)
    waiting = t.vpp * (t.stage > 0) * exchange_time_s(profile, before, t.vpp)
    waiting = waiting + t.vpp * (t.stage < t.pp - 1) * exchange_time_s(profile, t.hops, t.vpp)
    busy = t.micro_batches * (work + waiting)
    weights = t.drained_weights * profile.gemm * t.terms.gemm_backward / 2 * scale
    drained = np.maximum(backward - weights, -forward)
    first_forward = on_stages(t.first_layers, forward)
    first_backward = on_stages(t.first_layers, drained) + on_stages(t.first_full, full)
    first_backward = first_backward + t.selective[:, :, 0] * on_stages(t.first_layers, selective)
    held = t.stage < t.pp
    starts = np.concatenate([np.zeros((len(t), 1)), np.cumsum(first_forward + t.hops, axis=1)[:, :-1]], axis=1)
    arrivals = np.where(held, starts + busy, -np.inf)
    ends = np.empty_like(arrivals)
    end = np.full(len(t), -np.inf)
    for j in reversed(range(arrivals.shape[1])):
        following = np.where(np.isfinite(end), end + t.hops[:, j] + first_backward[:, j], -np.inf)
        end = np.maximum(arrivals[:, j], following)
        ends[:, j] = end
    optimizer = on_stages(t.layers, t.optimizer)
    sync = on_stages(t.layers, t.sync)
    hidden = np.where(t.sync > 0, profile.dp_comm_overlap * both, 0.0)
    tails = larger(profile.dp_comm_floor * sync, sync - on_stages(t.layers, hidden)) + optimizer
    edges = (t.stage == 0) | (t.stage == t.pp - 1)
    tails = tails + np.where((t.pp > 1) & edges, t.tied, 0.0)
    total = np.where(held, ends + tails, -np.inf).max(axis=1)
    overhead = profile.step_overhead_s
    return np.asarray(total + (overhead[:, 0] if isinstance(overhead, np.ndarray) else overhead))
