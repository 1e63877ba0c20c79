"""The lines of `memory` for many plans at once, as arrays; one row a plan, P stages, U units as in `table`.

(W1) the peak of a stage is that of (M1)-(M6): its states, what its layers keep for the micro-batches in flight on it,
     one layer while it is recomputed, the logits of the last stage, buffers. Interleaved stages have several moments of
     (S2); the one that holds most bytes is chosen when the row is made.
(W2) the verdict counts whole MiB, each line of each layer rounded up (F2), as the formulation does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.data.pipeline import FOLDED
from shardwise.formulations.layer_costs import sharding_of
from shardwise.formulations.memory import (
    MIB,
    activation_scale,
    end_units,
    gather_buffer_bytes,
    head_activations_bytes,
    state_bytes,
    tied_copy,
    transfer_buffer_bytes,
)
from shardwise.formulations.schedule import in_flight
from shardwise.formulations.table import by_identity, sets_of, stacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.data.plan import Degrees, Plan, Stage
    from shardwise.formulations.coefficients import CostTables
    from shardwise.formulations.layer_costs import Sharding

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MemoryTable:
    """Bytes, with the constants of each row's own profile in its facts but not in its scales.

    states (R, P); kept (R, P): activations before `memory_activations` and fragmentation; working (R, P) likewise;
    logits (R, P) before fragmentation; buffers (R, 1); mib (R, P): the verdict's MiB under the row's own profile;
    capacity (R, 1) bytes; held (R, P): whether the stage exists.
    """

    states: Floats
    kept: Floats
    working: Floats
    logits: Floats
    buffers: Floats
    mib: Floats
    capacity: Floats
    held: npt.NDArray[np.bool_]

    def rows(self, chosen: npt.NDArray[Any]) -> MemoryTable:
        """The rows at an index or mask."""
        return MemoryTable(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def peaks(self, profile: Any, kind: npt.NDArray[Any]) -> Floats:
        """Bytes of the worst device, shape (R,), of the kind asked for each row: allocated, reserved or device."""
        fragmentation = np.where(kind == "allocated", 0.0, 1.0)[:, None] * profile.memory_fragmentation
        reserve = np.where(kind == "device", 1.0, 0.0)[:, None] * profile.memory_reserve_bytes
        active = (self.kept + self.working) * profile.memory_activations + self.logits
        total = self.states + self.buffers + active * (1 + fragmentation) + reserve
        return np.asarray(np.where(self.held, total, 0.0).max(axis=1))


@dataclass(frozen=True, eq=False, slots=True)
class _Split:
    """What a split into stages takes, whatever the size of its layers: layers by chunk row, recompute mode, stage and
    kind; of each kind and end per stage; modes of each stage; vectors of micro-batches in flight."""

    layers: Floats
    counts: Floats
    modes: Floats
    vectors: Floats


@dataclass(frozen=True, eq=False, slots=True)
class _Held:
    """What degrees take besides: bytes and MiB of states by unit, bytes of a layer kept by mode and kind, buffers, the
    fixed MiB of a stage, and what repeating a layer needs by mode."""

    states: Floats
    states_mib: Floats
    by_mode: Floats
    buffers: float
    fixed_mib: float
    working: Floats
    working_mib: Floats
    logits: float
    scale: float
    capacity: float


class MemoryLines:
    """The memory of the plans of one instance, remembered by what it depends on."""

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self._stages: dict[int, tuple[Stage, ...]] = {}
        self._held: dict[tuple[Any, ...], _Held] = {}
        self._activations: dict[tuple[Any, ...], tuple[Floats, Floats, float]] = {}
        self._layers: dict[tuple[Any, ...], tuple[Floats, Floats, Floats]] = {}
        self._splits: dict[tuple[Any, ...], _Split] = {}

    def held(self, plan: Plan, modes: tuple[str, ...]) -> _Held:
        """What the degrees of a plan take."""
        d = plan.degrees
        shard = (d.cp * d.dp_shard, d.expert_dp_shard) if d.zero else (1, 1)
        offload = d.offload_optimizer, d.offload_param
        key = (sharding_of(d), shard, d.zero, d.pp > 1, plan.schedule in FOLDED, offload, modes)
        if key not in self._held:
            self._held[key] = self._of_degrees(d, key[0], plan.schedule, modes)
        return self._held[key]

    def split(self, plan: Plan, modes: tuple[str, ...]) -> _Split:
        """What the stages of a plan hold."""
        d = plan.degrees
        stages = self._same(plan.stages)
        flying = min(plan.micro_batches, 2 * d.virtual_stages + d.pp), plan.micro_batches % d.pp
        key = (stages, d.vpp, flying, plan.schedule, modes)
        if key not in self._splits:
            layers = (stages, d.vpp, plan.schedule in FOLDED, modes)
            if layers not in self._layers:
                self._layers[layers] = self._counts(plan, modes)
            vectors = _vectors(d.pp, d.vpp, plan.micro_batches, plan.schedule)
            self._splits[key] = _Split(*self._layers[layers], vectors)
        return self._splits[key]

    def _same(self, stages: tuple[Stage, ...]) -> int:
        """A number for stages that are equal and one object: hashing hundreds of them costs more than the rest."""
        self._stages[id(stages)] = stages
        return id(stages)

    def _of_degrees(self, degrees: Degrees, sharding: Sharding, schedule: str, modes: tuple[str, ...]) -> _Held:
        tables, instance = self.tables, self.tables.instance
        kinds = tables.kind_params(degrees.tp, degrees.ep, degrees.etp)
        units = [
            *kinds,
            *end_units(
                instance, degrees.tp, degrees.ep, degrees.etp, with_tied_copy=tied_copy(instance, degrees.pp, schedule)
            ),
        ]
        memory, scale = tables.memory(degrees, schedule), activation_scale(instance)
        by_mode, working, logits = self._kept(sharding, modes)
        return _Held(
            states=np.array([state_bytes(instance, unit, degrees).total for unit in units]),
            states_mib=np.array([*memory.state, memory.embedding, memory.head], dtype=np.float64),
            by_mode=by_mode,
            buffers=transfer_buffer_bytes(instance, degrees) + gather_buffer_bytes(instance, kinds, degrees),
            fixed_mib=float(memory.fixed),
            working=working / scale,
            working_mib=np.array([memory.needed(mode) for mode in modes], dtype=np.float64),
            logits=logits,
            scale=scale,
            capacity=float(instance.memory_limit_bytes),
        )

    def _kept(self, sharding: Sharding, modes: tuple[str, ...]) -> tuple[Floats, Floats, float]:
        """By mode the bytes of each kind and the most that one needs while repeated; the logits."""
        if (sharding, modes) not in self._activations:
            instance = self.tables.instance
            activations = self.tables.activations(sharding)
            by_mode = np.array([[kept.kept(mode) for kept in activations] for mode in modes])
            working = np.array([max(kept.needed(mode) for kept in activations) for mode in modes])
            logits = head_activations_bytes(instance, sharding) / (1 + instance.profile.memory_fragmentation)
            self._activations[sharding, modes] = by_mode, working, logits
        return self._activations[sharding, modes]

    def _counts(self, plan: Plan, modes: tuple[str, ...]) -> tuple[Floats, Floats, Floats]:
        """`_layers`, the layers of each kind on each stage, and the modes of its layers."""
        model = self.tables.instance.model
        layers = _layers(plan, model.kind_indices, len(model.kinds), modes)
        used = np.asarray(layers.any(axis=(0, 3)).T, dtype=np.float64)
        counts = np.zeros((plan.degrees.pp, len(model.kinds) + 2))
        counts[:, :-2] = layers.sum(axis=(0, 1))
        for stage in range(plan.degrees.pp):
            chunks = plan.layout.chunks_of(stage)
            counts[stage, -2:] = 0 in chunks, plan.degrees.virtual_stages - 1 in chunks
        return layers, counts, used


def _flying(split: _Split, by_mode: Floats) -> tuple[Floats, Floats]:
    """Bytes and MiB of what is kept for the micro-batches in flight, at the worst moment of each stage; `by_mode` has a
    row for each size of layers, (rows, modes, kinds), and so have the results, (rows, pp)."""
    used = split.layers.any(axis=(0, 2, 3))
    layers, each, vectors = split.layers[:, used], by_mode[:, used], split.vectors
    weights = np.einsum("cmpk,rmk->rpc", layers, each)
    kept = np.einsum("pvc,rpc->rpv", vectors, weights).max(axis=2)
    rounded = np.ceil(vectors[:, :, :, None, None] * (each / MIB)[:, None, None, None])
    return kept, np.einsum("rpvcmk,cmpk->rpv", rounded, layers).max(axis=2)


@lru_cache(maxsize=65536)
def _vectors(pp: int, vpp: int, micro_batches: int, schedule: str) -> Floats:
    """Micro-batches in flight, shape (stages, moments, chunks); stages with fewer moments repeat one."""
    found = [in_flight(pp, vpp, micro_batches, k, schedule) for k in range(pp)]
    most = max(len(vectors) for vectors in found)
    return np.array([[*vectors, *(vectors[:1] * (most - len(vectors)))] for vectors in found], dtype=np.float64)


def _layers(plan: Plan, kinds: tuple[int, ...], units: int, modes: tuple[str, ...]) -> Floats:
    """Layers of each kind, shape (slots a stage, modes, pp, kinds), by row, recompute mode and stage."""
    pp, cuts = plan.degrees.pp, plan.cuts
    out = np.zeros((len(plan.layout.stage) // pp, len(modes), pp, units))
    for k, setting in enumerate(plan.stages):
        repeated = setting.recompute_layers if setting.recompute == "full" else 0
        mode = "none" if setting.mode == "full" else setting.mode
        for row, chunk in enumerate(plan.layout.chunks_of(k)):
            chosen = np.array(kinds[cuts[chunk] : cuts[chunk + 1]], dtype=np.int64)
            out[row, modes.index("full"), k] += np.bincount(chosen[:repeated], minlength=units)
            out[row, modes.index(mode), k] += np.bincount(chosen[repeated:], minlength=units)
    return out


def memory_table(rows: Sequence[tuple[MemoryLines, Plan]]) -> MemoryTable:
    """The table of some plans, each with the lines of its instance."""
    modes = ("none", "full", *sets_of(plan for _, plan in rows))
    known: dict[tuple[Any, ...], _Held] = {}
    for lines, plan in rows:  # one object is told from another by its id: the plans outlive this loop
        key = (id(lines), id(plan.degrees), plan.schedule)
        if key not in known:
            known[key] = lines.held(plan, modes)
    held, held_of = by_identity([known[id(lines), id(plan.degrees), plan.schedule] for lines, plan in rows])
    splits, split_of = by_identity([lines.split(plan, modes) for lines, plan in rows])
    stages = max((len(split.modes) for split in splits), default=0)
    units = max((len(own.states) for own in held), default=0)
    kept, kept_mib = np.zeros((2, len(rows), stages))
    for index, split in enumerate(splits):
        chosen = np.flatnonzero(split_of == index)
        sizes, size_of = np.unique(held_of[chosen], return_inverse=True)
        found = _flying(split, np.array([held[size].by_mode for size in sizes]))
        for out, own in zip((kept, kept_mib), found, strict=True):
            out[chosen, : own.shape[1]] = own[size_of]

    def column(name: str) -> Floats:
        return np.array([getattr(own, name) for own in held], dtype=np.float64)[held_of].reshape(-1, 1)

    def by_unit(name: str) -> Floats:
        return stacked([getattr(own, name) for own in held], (units,))[held_of]

    counts = stacked([split.counts for split in splits], (stages, units))[split_of]
    used = stacked([split.modes for split in splits], (stages, len(modes)))[split_of]
    exists = stacked([np.ones(len(split.modes)) for split in splits], (stages,))[split_of] > 0
    ends = stacked([split.counts[:, -1] > 0 for split in splits], (stages,))[split_of]

    def working(name: str) -> Floats:
        """What the modes of a stage need at most."""
        by_mode = stacked([getattr(own, name) for own in held], (len(modes),))[held_of]
        return np.asarray((used * by_mode[:, None, :]).max(axis=2))

    mib = np.einsum("rpu,ru->rp", counts, by_unit("states_mib")) + kept_mib + column("fixed_mib")
    return MemoryTable(
        states=np.einsum("rpu,ru->rp", counts, by_unit("states")),
        kept=kept / column("scale"),
        working=working("working"),
        logits=ends * column("logits"),
        buffers=column("buffers"),
        mib=np.where(exists, mib + working("working_mib"), 0.0),
        capacity=column("capacity"),
        held=exists,
    )
