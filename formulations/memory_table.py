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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.data.plan import Degrees, Plan, Stage
    from shardwise.formulations.coefficients import CostTables
    from shardwise.formulations.layer_costs import Sharding

Floats = npt.NDArray[np.float64]
MODES = ("none", "selective", "full")


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


@dataclass(frozen=True, slots=True)
class _Split:
    """What a split into stages takes: layers of each kind per stage, repeated stages, and what flies at the worst."""

    counts: Floats
    recomputes: Floats
    kept: Floats
    kept_mib: Floats


@dataclass(frozen=True, slots=True)
class _Held:
    """What degrees take besides: bytes and MiB of states by unit, buffers, and the fixed MiB of a stage."""

    states: Floats
    states_mib: Floats
    buffers: float
    fixed_mib: float
    working: float
    working_mib: float
    logits: float
    scale: float
    capacity: float


@dataclass(frozen=True, slots=True)
class _Lines:
    """One plan's share of a table."""

    split: _Split
    held: _Held


class MemoryLines:
    """The memory of the plans of one instance, remembered by what it depends on."""

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self._stages: dict[int, tuple[Stage, ...]] = {}
        self._in_flight: dict[tuple[Any, ...], _Split] = {}
        self._held: dict[tuple[Any, ...], _Held] = {}
        self._activations: dict[Sharding, tuple[Floats, float, float]] = {}
        self._splits: dict[tuple[Any, ...], tuple[Floats, Floats, Floats]] = {}

    def of(self, plan: Plan) -> _Lines:
        """The lines of a plan."""
        d = plan.degrees
        sharding = sharding_of(d)
        flying = min(plan.micro_batches, 2 * d.virtual_stages + d.pp), plan.micro_batches % d.pp
        split = (sharding, d.vpp, self._same(plan.stages), flying, plan.schedule)
        if split not in self._in_flight:
            self._in_flight[split] = self._flying(plan, sharding)
        shard = (d.cp * d.dp_shard, d.expert_dp_shard) if d.zero else (1, 1)
        held = (sharding, shard, d.zero, d.pp > 1, plan.schedule in FOLDED)
        if held not in self._held:
            self._held[held] = self._of_degrees(d, sharding, plan.schedule)
        return _Lines(self._in_flight[split], self._held[held])

    def _same(self, stages: tuple[Stage, ...]) -> int:
        """A number for stages that are equal and one object: hashing hundreds of them costs more than the rest."""
        self._stages[id(stages)] = stages
        return id(stages)

    def _of_degrees(self, degrees: Degrees, sharding: Sharding, schedule: str) -> _Held:
        tables, instance = self.tables, self.tables.instance
        kinds = tables.kind_params(degrees.tp, degrees.ep, degrees.etp)
        units = [
            *kinds,
            *end_units(
                instance, degrees.tp, degrees.ep, degrees.etp, with_tied_copy=tied_copy(instance, degrees.pp, schedule)
            ),
        ]
        memory, scale = tables.memory(degrees, schedule), activation_scale(instance)
        _, largest, logits = self._kept(sharding)
        return _Held(
            states=np.array([state_bytes(instance, unit, degrees).total for unit in units]),
            states_mib=np.array([*memory.state, memory.embedding, memory.head], dtype=np.float64),
            buffers=transfer_buffer_bytes(instance, degrees) + gather_buffer_bytes(instance, kinds, degrees),
            fixed_mib=float(memory.fixed),
            working=largest / scale,
            working_mib=float(memory.working),
            logits=logits,
            scale=scale,
            capacity=float(instance.memory_limit_bytes),
        )

    def _flying(self, plan: Plan, sharding: Sharding) -> _Split:
        """Bytes and MiB of what is kept for the micro-batches in flight, at the worst moment of each stage."""
        by_mode, _, _ = self._kept(sharding)
        layers, counts, recomputes = self._counts(plan)
        vectors = _vectors(plan.degrees.pp, plan.degrees.vpp, plan.micro_batches, plan.schedule)
        weights = (layers * by_mode[None, :, None, :]).sum(axis=(1, 3))
        kept = (vectors * weights.T[:, None, :]).sum(axis=2).max(axis=1)
        rounded = np.ceil(vectors[:, :, :, None, None] * (by_mode / MIB))
        by_stage = layers.transpose(2, 0, 1, 3)[:, None]
        return _Split(counts, recomputes, kept, (rounded * by_stage).sum(axis=(2, 3, 4)).max(axis=1))

    def _kept(self, sharding: Sharding) -> tuple[Floats, float, float]:
        """Bytes of each kind by recompute mode, the most that one needs while repeated, and the logits."""
        if sharding not in self._activations:
            instance = self.tables.instance
            activations = self.tables.activations(sharding)
            by_mode = np.array([[getattr(kept, mode) for kept in activations] for mode in MODES])
            logits = head_activations_bytes(instance, sharding) / (1 + instance.profile.memory_fragmentation)
            self._activations[sharding] = by_mode, max(one.working for one in activations), logits
        return self._activations[sharding]

    def _counts(self, plan: Plan) -> tuple[Floats, Floats, Floats]:
        """`_layers`, the layers of each kind on each stage, and whether a stage repeats any in full."""
        key = (plan.degrees.vpp, self._same(plan.stages), plan.schedule in FOLDED)
        if key not in self._splits:
            model = self.tables.instance.model
            layers = _layers(plan, model.kind_indices, len(model.kinds))
            repeats = layers[:, MODES.index("full")].sum(axis=(0, 2)) > 0
            counts = np.zeros((plan.degrees.pp, len(model.kinds) + 2))
            counts[:, :-2] = layers.sum(axis=(0, 1))
            for stage in range(plan.degrees.pp):
                chunks = plan.layout.chunks_of(stage)
                counts[stage, -2:] = 0 in chunks, plan.degrees.virtual_stages - 1 in chunks
            self._splits[key] = layers, counts, repeats.astype(np.float64)
        return self._splits[key]


@lru_cache(maxsize=65536)
def _vectors(pp: int, vpp: int, micro_batches: int, schedule: str) -> Floats:
    """Micro-batches in flight, shape (stages, moments, chunks); stages with fewer moments repeat one."""
    found = [in_flight(pp, vpp, micro_batches, k, schedule) for k in range(pp)]
    most = max(len(vectors) for vectors in found)
    return np.array([[*vectors, *(vectors[:1] * (most - len(vectors)))] for vectors in found], dtype=np.float64)


def _layers(plan: Plan, kinds: tuple[int, ...], units: int) -> Floats:
    """Layers of each kind, shape (slots a stage, modes, pp, kinds), by row, recompute mode and stage."""
    pp, cuts = plan.degrees.pp, plan.cuts
    out = np.zeros((len(plan.layout.stage) // pp, len(MODES), pp, units))
    for k, setting in enumerate(plan.stages):
        repeated = setting.recompute_layers if setting.recompute == "full" else 0
        mode = "selective" if setting.recompute == "selective" else "none"
        for row, chunk in enumerate(plan.layout.chunks_of(k)):
            chosen = np.array(kinds[cuts[chunk] : cuts[chunk + 1]], dtype=np.int64)
            out[row, MODES.index("full"), k] += np.bincount(chosen[:repeated], minlength=units)
            out[row, MODES.index(mode), k] += np.bincount(chosen[repeated:], minlength=units)
    return out


def memory_table(rows: Sequence[tuple[MemoryLines, Plan]]) -> MemoryTable:
    """The table of some plans, each with the lines of its instance."""
    found = [lines.of(plan) for lines, plan in rows]
    stages = max((len(line.split.kept) for line in found), default=0)
    units = max((len(line.held.states) for line in found), default=0)
    counts = np.zeros((len(found), stages, units))
    states, states_mib = np.zeros((2, len(found), units))
    recomputes, kept, kept_mib, logits = np.zeros((4, len(found), stages))
    held = np.zeros((len(found), stages), dtype=bool)
    for row, line in enumerate(found):
        split, own = line.split, line.held
        pp, width = split.counts.shape
        counts[row, :pp, :width] = split.counts
        states[row, :width], states_mib[row, :width] = own.states, own.states_mib
        recomputes[row, :pp], kept[row, :pp], kept_mib[row, :pp] = split.recomputes, split.kept, split.kept_mib
        logits[row, :pp] = own.logits * (split.counts[:, -1] > 0)
        held[row, :pp] = True

    def column(name: str) -> Floats:
        return np.array([getattr(line.held, name) for line in found], dtype=np.float64).reshape(-1, 1)

    mib = np.einsum("rpu,ru->rp", counts, states_mib) + kept_mib + column("fixed_mib")
    return MemoryTable(
        states=np.einsum("rpu,ru->rp", counts, states),
        kept=kept / column("scale"),
        working=recomputes * column("working"),
        logits=logits,
        buffers=column("buffers"),
        mib=np.where(held, mib + recomputes * column("working_mib"), 0.0),
        capacity=column("capacity"),
        held=held,
    )
