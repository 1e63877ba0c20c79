"""Evaluate a plan: legality, time and memory by part, without CP-SAT.

The independent check of every plan that a solve returns: it walks over layers and stages one by one and shares the cost
functions with the formulations, but none of their constraints.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from shardwise.data.faults import InputError
from shardwise.data.model import Attention
from shardwise.data.rules import plan_faults
from shardwise.formulations.coefficients import CostTables, TimeCoefficients, groups_of, sharding_of
from shardwise.formulations.energy import Energy, step_energy, why_no_energy
from shardwise.formulations.layer_time import time_by_cause
from shardwise.formulations.memory import (
    MIB,
    KindParams,
    StateBytes,
    end_params_on_device,
    gather_buffer_bytes,
    head_activations_bytes,
    state_bytes,
    tied_copy,
    transfer_buffer_bytes,
)
from shardwise.formulations.schedule import in_flight
from shardwise.formulations.step_time import straggling

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan

GB = 1e9
ALIGNED_HEAD = 8


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak memory of one device of a stage, in bytes, by line."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    recompute_working: float
    transfer_buffers: float
    gather_buffers: float
    fragmentation: float
    reserve: float

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))

    def of_kind(self, kind: str) -> float:
        """(M5) What a reading of "allocated", "reserved" or "device" memory would show."""
        held = self.total - (0.0 if kind == "device" else self.reserve)
        return held - self.fragmentation if kind == "allocated" else held


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Where the step goes, in seconds, along the longest path."""

    compute: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    weight_gather: float
    host: float
    recompute: float
    transfers: float
    fill_and_drain: float
    gradient_sync: float
    optimizer: float
    overhead: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a plan costs. `objective_units` and `memory_mib` are the integers of the formulation."""

    step_time_s: float
    parts: TimeParts
    busiest_stage: int
    stages: tuple[StageMemory, ...]
    memory_mib: tuple[int, ...]
    capacity_mib: int
    faults: tuple[str, ...]
    limit_faults: tuple[str, ...]
    tokens_per_s: float
    tokens_per_s_per_device: float
    model_flops_utilization: float
    devices: int
    idle_devices: int
    memory_band: float
    energy: Energy | None
    energy_reason: str | None
    risks: tuple[str, ...]
    objective_units: int | None = None

    @property
    def legal(self) -> bool:
        return not self.faults

    @property
    def fits(self) -> bool:
        return all(mib <= self.capacity_mib for mib in self.memory_mib)

    @property
    def verdict(self) -> str:
        """ "fits", "tight" or "does not fit": where the capacity lies against the band of the prediction."""
        return verdict_of(max(self.memory_mib), self.capacity_mib, self.memory_band)

    @property
    def admitted(self) -> bool:
        """Whether the plan is in the universe: legal, fitting and within the user's limits."""
        return self.legal and self.fits and not self.limit_faults

    @property
    def worst_stage(self) -> int:
        return max(range(len(self.memory_mib)), key=lambda k: self.memory_mib[k])

    @property
    def peak_memory_bytes(self) -> float:
        return self.stages[self.worst_stage].total

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, memory in decimal GB."""
        document = asdict(self)
        document["stages"] = [
            {f"{name}_gb": value / GB for name, value in asdict(stage).items()} | {"total_gb": stage.total / GB}
            for stage in self.stages
        ]
        document["parts"] = {f"{name}_s": value for name, value in asdict(self.parts).items()}
        return document | {
            "legal": self.legal,
            "fits": self.fits,
            "verdict": self.verdict,
            "worst_stage": self.worst_stage,
            "peak_memory_gb": self.peak_memory_bytes / GB,
            "peak_memory_low_gb": self.peak_memory_bytes * (1 - self.memory_band) / GB,
            "peak_memory_high_gb": self.peak_memory_bytes * (1 + self.memory_band) / GB,
            "capacity_gb": self.capacity_mib * MIB / GB,
        }


@lru_cache(maxsize=16)
def cost_tables(instance: Instance) -> CostTables:
    """The cost tables of an instance, shared by everything that evaluates its plans."""
    return CostTables(instance)


def evaluate(instance: Instance, plan: Plan, *, unit_s: float | None = None) -> Evaluation:
    """Evaluate `plan` on `instance`.

    Parameters
    ----------
    unit_s
        With it the integer objective is computed too, in multiples of `unit_s` seconds.

    Returns
    -------
    Evaluation
        For an illegal plan too; `faults` names every broken rule.

    Raises
    ------
    InputError
        When the plan does not belong to the instance: another number of layers, or of levels of the cluster.
    """
    unusable = _unusable(instance, plan)
    if unusable:
        raise InputError(unusable)
    tables = cost_tables(instance)
    coefficients = tables.time(plan.degrees, plan.placement, plan.micro_batches, plan.schedule)
    walk = _Walk(instance, plan, coefficients)
    step_time_s, stage, last = walk.longest_path()
    stages = tuple(_stage_memory(tables, plan, k) for k in range(plan.degrees.pp))
    tokens_per_s = instance.workload.tokens_per_step / step_time_s
    devices = plan.degrees.devices
    parts = _time_parts(tables, plan, walk, stage, last)
    peak = instance.accelerator.flops_per_s[instance.workload.peak]
    return Evaluation(
        step_time_s=step_time_s,
        parts=parts,
        busiest_stage=stage,
        stages=stages,
        memory_mib=tuple(_stage_mib(tables, plan, k) for k in range(plan.degrees.pp)),
        capacity_mib=tables.capacity_mib,
        faults=tuple(broken_rules(instance, plan)),
        limit_faults=tuple(limit_faults(instance, plan)),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / devices,
        model_flops_utilization=model_flops(instance) / (step_time_s * devices * peak),
        devices=devices,
        idle_devices=instance.cluster.device_count - devices,
        memory_band=instance.profile.memory_band,
        energy=_energy(instance, devices, parts),
        energy_reason=why_no_energy(instance.accelerator),
        risks=tuple(kernel_risks(instance)),
        objective_units=None if unit_s is None else _objective_units(instance, plan, tables, unit_s),
    )


def verdict_of(load: float, capacity: float, band: float) -> str:
    """ "fits", "tight" or "does not fit": whether `capacity` lies above, inside or below the band around `load`."""
    if load * (1 + band) <= capacity:
        return "fits"
    return "tight" if load * (1 - band) <= capacity else "does not fit"


def kernel_risks(instance: Instance) -> list[str]:
    """Shapes that kernels run slower than the curves say: heads of 108 ran 30 % slower than of 144 at one hidden size
    (bigscience train/tr11-176B-ml/chronicles-prequel.md)."""
    sizes = {kind.mixer.head_dim for kind in instance.model.kinds if isinstance(kind.mixer, Attention)}
    return [
        f"head_dim={size} is not a multiple of {ALIGNED_HEAD}: attention and its projections may run a third slower"
        for size in sorted(sizes)
        if size % ALIGNED_HEAD
    ]


def _energy(instance: Instance, devices: int, parts: TimeParts) -> Energy | None:
    """Energy by phase: the longest path's work, its exposed communication, and the rest."""
    communication = (
        parts.tensor_parallel,
        parts.context_parallel,
        parts.expert_parallel,
        parts.weight_gather,
        parts.transfers,
        parts.gradient_sync,
    )
    return step_energy(
        instance.accelerator,
        devices,
        max(parts.compute + parts.recompute + parts.optimizer, 0.0),
        max(sum(communication), 0.0),
        max(parts.host + parts.fill_and_drain + parts.overhead, 0.0),
        instance.workload.tokens_per_step,
    )


def admitted_units(instance: Instance, plan: Plan, unit_s: float) -> int | None:
    """The part of `evaluate` that decides between plans: the integer objective, or None if it is not admitted."""
    tables = cost_tables(instance)
    admitted = (
        all(_stage_mib(tables, plan, k) <= tables.capacity_mib for k in range(plan.degrees.pp))
        and not limit_faults(instance, plan)
        and not broken_rules(instance, plan)
    )
    return _objective_units(instance, plan, tables, unit_s) if admitted else None


def _objective_units(instance: Instance, plan: Plan, tables: CostTables, unit_s: float) -> int:
    coefficients = tables.time(plan.degrees, plan.placement, plan.micro_batches, plan.schedule).in_units(unit_s)
    return round(_Walk(instance, plan, coefficients).longest_path()[0])


def model_flops(instance: Instance) -> float:
    """Floating-point operations of one step without recompute: 6 per active parameter and token, 12 h s per layer
    with softmax attention, half of it for causal (Chowdhery et al., arXiv 2204.02311, appendix B)."""
    model, workload = instance.model, instance.workload
    attention = 0.0
    for kind in model.layers:
        if isinstance(kind.mixer, Attention):
            keys = min(workload.seq_len, kind.mixer.window or workload.seq_len)
            attention += 6 * kind.mixer.heads * (kind.mixer.head_dim + kind.mixer.v_head_dim) * keys / 2
    lookups = sum(t.params for t in model.embedding) if not model.tied else 0
    return (6.0 * (model.active_params - lookups) + attention) * workload.tokens_per_step


def _unusable(instance: Instance, plan: Plan) -> list[str]:
    """Why the plan has no numbers on this instance."""
    faults = []
    if sum(plan.chunk_layers) != len(instance.model.layers):
        faults.append(f"plan.stages hold {sum(plan.chunk_layers)} layers, the model has {len(instance.model.layers)}")
    if len(plan.placement.blocks) != len(instance.levels):
        faults.append(
            f"plan.placement has {len(plan.placement.blocks)} levels, cluster {instance.cluster.name} "
            f"has {len(instance.levels)}"
        )
    return faults


def broken_rules(instance: Instance, plan: Plan) -> list[str]:
    """Every rule of the pack that a plan breaks, and whether its placement exists on the cluster."""
    workload, blocks = instance.workload, plan.placement.blocks
    faults = plan_faults(instance.rules, instance.model, workload.seq_len, workload.global_batch, plan)
    for level, used in enumerate(blocks):
        room = instance.cluster.capacity(blocks[:level])
        if used > room:
            members = f"placement needs {used} members of level {level} with blocks {blocks[:level]}"
            return [*faults, f"{members}, cluster {instance.cluster.name} has {room}"]
    return faults


def limit_faults(instance: Instance, plan: Plan) -> list[str]:
    """The user's limits that the plan breaks; the memory limit is part of capacity."""
    if not instance.limits.text:
        return []
    degrees = {name: int(value) for name, value in asdict(plan.degrees).items()}
    faults = instance.limits.faults(degrees | {"devices": plan.degrees.devices})
    wanted = instance.limits.recompute
    if wanted is not None and any(stage.recompute != wanted for stage in plan.stages):
        faults.append(f"recompute is not {wanted} on every stage, as the limit asks")
    elif wanted == "full" and any(stage.recompute_layers < max(stage.chunks) for stage in plan.stages):
        faults.append("recompute is not full for every layer, as the limit asks")
    return faults


class _Walk:
    """(T1)-(T5) by walking the plan layer by layer; `coefficients` may be seconds or integer units."""

    def __init__(self, instance: Instance, plan: Plan, coefficients: TimeCoefficients) -> None:
        self.plan, self.c = plan, coefficients
        self.pp = plan.degrees.pp
        kinds, cuts = instance.model.kind_indices, plan.cuts
        self.chunks = [kinds[a:b] for a, b in itertools.pairwise(cuts)]

    def stage_chunks(self, stage: int) -> list[tuple[int, ...]]:
        return self.chunks[stage :: self.pp]

    def busy(self, stage: int) -> float:
        """(T2) without transfers."""
        c, setting = self.c, self.plan.stages[stage]
        total = 0.0
        for chunk in self.stage_chunks(stage):
            for position, kind in enumerate(chunk):
                total += c.busy[kind]
                if setting.recompute == "selective":
                    total += c.busy_selective[kind]
                elif setting.recompute == "full" and position < setting.recompute_layers:
                    total += c.busy_full[kind]
        if stage == 0:
            total += c.embedding_busy
        if stage == self.pp - 1:
            total += c.head_busy
        return total

    def first_forward(self, stage: int) -> float:
        """F_j of (T1)."""
        total = sum(self.c.forward[kind] for kind in self.chunks[stage])
        return total + (self.c.embedding_forward if stage == 0 else 0.0)

    def first_backward(self, stage: int) -> float:
        """B_j of (T3)."""
        c, setting = self.c, self.plan.stages[stage]
        total = 0.0
        for position, kind in enumerate(self.chunks[stage]):
            total += c.backward[kind]
            if setting.recompute == "selective":
                total += c.backward_selective[kind]
            elif setting.recompute == "full" and position < setting.recompute_layers:
                total += c.backward_full[kind]
        return total + (c.embedding_backward if stage == 0 else 0.0)

    def tail(self, stage: int) -> float:
        """X_j of (T4)."""
        c = self.c
        floor = overlap = 0.0
        for chunk in self.stage_chunks(stage):
            floor += sum(c.tail_floor[kind] for kind in chunk)
            overlap += sum(c.tail_overlap[kind] for kind in chunk)
        if stage == 0:
            floor, overlap = floor + c.embedding_tail_floor, overlap + c.embedding_tail_overlap
        if stage == self.pp - 1:
            floor, overlap = floor + c.head_tail_floor, overlap + c.head_tail_overlap
        tied = c.tied if self.pp > 1 and stage in (0, self.pp - 1) else 0.0
        return max(floor, overlap) + tied

    def longest_path(self) -> tuple[float, int, int]:
        """(T5): the step time, the stage that the path is busy on, and the stage that it ends on."""
        fill, starts = 0.0, []
        for k in range(self.pp):
            starts.append(fill)
            if k < self.pp - 1:
                fill += self.first_forward(k) + self.c.hops[k]
        best: tuple[float, int, int] | None = None
        end, busiest = -1.0, 0
        for j in reversed(range(self.pp)):
            arrival = starts[j] + self.busy(j) + self.c.transfers[j]
            if j < self.pp - 1:
                end += self.c.hops[j] + self.first_backward(j)
            if arrival >= end:
                end, busiest = arrival, j
            total = self.c.overhead + end + self.tail(j)
            if best is None or total >= best[0]:
                best = (total, busiest, j)
        assert best is not None
        return best


def _time_parts(tables: CostTables, plan: Plan, walk: _Walk, stage: int, last: int) -> TimeParts:
    """Attribute the longest path: the work of `stage`, the fill before and the drain after it, the tail of `last`."""
    d, c, m = plan.degrees, walk.c, plan.micro_batches
    instance = tables.instance
    sharding, groups = sharding_of(d), groups_of(instance, d, plan.placement)
    terms, times = tables.terms(sharding, groups), tables.times(sharding, groups)
    layers = [kind for chunk in walk.stage_chunks(stage) for kind in chunk]
    units = [(terms.kinds[kind], times.kinds[kind], c.busy[kind]) for kind in layers]
    if stage == 0:
        units.append((terms.embedding, times.embedding, c.embedding_busy))
    if stage == d.pp - 1:
        units.append((terms.head, times.head, c.head_busy))
    scale = m * straggling(instance, d.devices)
    causes = dict.fromkeys(("compute", "tensor_parallel", "context_parallel", "expert_parallel", "weight_gather"), 0.0)
    work = host = 0.0
    for own, time, busy in units:
        spent = {name: scale * value for name, value in time_by_cause(own, instance.profile).items()}
        for name, value in spent.items():
            causes[name] += value
        passes = scale * time.both_s
        host += passes - sum(spent.values())
        causes["weight_gather"] += busy - passes
        work += busy
    busy_time = walk.busy(stage)
    fill = sum(walk.first_forward(j) + c.hops[j] for j in range(stage))
    drain = sum(walk.first_backward(j) + c.hops[j] for j in range(last, stage))
    dense, expert = tables.group_rates(d, plan.placement)
    params = _stage_params(tables, plan, last)
    optimizer = dense.optimizer_s * params.dense + expert.optimizer_s * params.expert
    return TimeParts(
        **causes,
        host=host,
        recompute=busy_time - work,
        transfers=c.transfers[stage],
        fill_and_drain=fill + drain,
        gradient_sync=walk.tail(last) - optimizer,
        optimizer=optimizer,
        overhead=c.overhead,
    )


def _stage_params(tables: CostTables, plan: Plan, stage: int) -> KindParams:
    """Parameters on one device of a stage."""
    instance, d = tables.instance, plan.degrees
    kind_params = tables.kind_params(d.tp, d.ep, d.etp)
    cuts, kinds = plan.cuts, instance.model.kind_indices
    dense = expert = 0
    for chunk in range(stage, d.virtual_stages, d.pp):
        for kind in kinds[cuts[chunk] : cuts[chunk + 1]]:
            dense += kind_params[kind].dense
            expert += kind_params[kind].expert
    if stage == 0:
        dense += end_params_on_device(instance, d.tp, head=False)
    if stage == d.pp - 1:
        dense += end_params_on_device(instance, d.tp, head=True, with_tied_copy=tied_copy(instance, d.pp))
    return KindParams(dense, expert)


def _kept_layers(
    tables: CostTables, plan: Plan, stage: int
) -> list[tuple[int, int, Literal["none", "selective", "full"]]]:
    """(kind, chunk row, recompute mode) of every layer of a stage."""
    instance, d, setting = tables.instance, plan.degrees, plan.stages[stage]
    cuts, out = plan.cuts, []
    for row in range(d.vpp):
        first = cuts[row * d.pp + stage]
        for position in range(setting.chunks[row]):
            mode = setting.recompute
            if mode == "full" and position >= setting.recompute_layers:
                mode = "none"
            out.append((instance.model.kind_indices[first + position], row, mode))
    return out


def _stage_memory(tables: CostTables, plan: Plan, stage: int) -> StageMemory:
    """Peak bytes of a stage, at the moment of its largest activations."""
    instance, d = tables.instance, plan.degrees
    kept = _kept_layers(tables, plan, stage)
    sharding = sharding_of(d)
    bytes_of = tables.activations(sharding)
    vectors = in_flight(d.pp, d.vpp, plan.micro_batches, stage, plan.schedule)
    activations = max(
        sum(vector[row] * getattr(bytes_of[kind], mode) for kind, row, mode in kept) for vector in vectors
    )
    states: StateBytes = state_bytes(instance, _stage_params(tables, plan, stage), d)
    recomputes = any(mode == "full" for _, _, mode in kept)
    working = max(kind.working for kind in bytes_of) if recomputes else 0.0
    logits = head_activations_bytes(instance, sharding) if stage == d.pp - 1 else 0.0
    used = 1 / (1 + instance.profile.memory_fragmentation)
    return StageMemory(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=activations * used,
        logits=logits * used,
        recompute_working=working * used,
        transfer_buffers=transfer_buffer_bytes(instance, d),
        gather_buffers=gather_buffer_bytes(tables.kind_params(d.tp, d.ep, d.etp), d),
        fragmentation=(activations + logits + working) * (1 - used),
        reserve=instance.profile.memory_reserve_bytes,
    )


def _stage_mib(tables: CostTables, plan: Plan, stage: int) -> int:
    """(F2) The same in whole MiB, each line of each layer rounded up, as the verdict takes it."""
    d, memory = plan.degrees, tables.memory(plan.degrees)
    kept = Counter(_kept_layers(tables, plan, stage))
    total = memory.fixed + sum(count * memory.state[kind] for (kind, _, _), count in kept.items())
    total += max(
        sum(count * memory.kept(kind, vector[row], mode) for (kind, row, mode), count in kept.items())
        for vector in in_flight(d.pp, d.vpp, plan.micro_batches, stage, plan.schedule)
    )
    if any(mode == "full" for _, _, mode in kept):
        total += memory.working
    if stage == 0:
        total += memory.embedding
    if stage == d.pp - 1:
        total += memory.head
    return total
