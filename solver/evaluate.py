"""Evaluate a plan: legality, time and memory by part, without CP-SAT.

The independent check of every plan that a solve returns: it shares the cost functions with the formulations, but none of
their constraints. The step time is that of the timeline of the schedule, pass by pass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.data.faults import InputError
from shardwise.data.model import Attention, Moe
from shardwise.data.recompute import ANY
from shardwise.data.rules import plan_faults, plan_risks
from shardwise.formulations.coefficients import CostTables, TimeCoefficients, groups_of
from shardwise.formulations.energy import Energy, step_energy, why_no_energy
from shardwise.formulations.layer_costs import pieces, sharding_of
from shardwise.formulations.layer_time import time_by_cause
from shardwise.formulations.memory import (
    MIB,
    ON_HOST,
    KindParams,
    StateBytes,
    end_units,
    gather_buffer_bytes,
    head_activations_bytes,
    kind_params_on_device,
    mib_up,
    state_bytes,
    tied_copy,
    transfer_buffer_bytes,
)
from shardwise.formulations.passes import ChunkCounts, PassTimes, counts_of, pass_times, shape_of
from shardwise.formulations.phases import phases, transfers
from shardwise.formulations.schedule import in_flight, passes_per_step
from shardwise.formulations.step_time import params_optimizer_s, straggling

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan
    from shardwise.formulations.timeline import Shape, StageSpans

GB = 1e9
ALIGNED_HEAD = 8
FLASH = ("flash", "flash2")


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
class HostMemory:
    """(U1), (U2), (U5) What the host holds for one device of each stage, in bytes, and in the MiB of the verdict; `devices`
    share a node's host."""

    stages: tuple[float, ...]
    stage_mib: tuple[int, ...]
    capacity_mib: int
    devices: int

    @property
    def fits(self) -> bool:
        return max(self.stage_mib) <= self.capacity_mib

    @property
    def node_bytes(self) -> float:
        """Of a node whose devices are all of the fullest stage."""
        return max(self.stages) * self.devices

    @property
    def node_capacity_bytes(self) -> float:
        return float(self.capacity_mib * self.devices * MIB)


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Where the step goes, in seconds, on the busiest stage; `fill_and_drain` is what it waits for other stages, `transfers`
    are those between stages, and (U5) of activations to and from the host."""

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
    """What a plan costs, computed without CP-SAT. `objective_units` and `memory_mib` are the integers of the formulation.

    `stages` holds the memory of one device of each pipeline stage, line by line, in bytes; `memory_mib` their totals,
    `capacity_mib` what a device may use. `faults` names the broken rules of the framework, `limit_faults` those of the user,
    `risks` what is legal and has gone wrong elsewhere. `energy` is at the wall, with its band; where it is None
    `energy_reason` says why. `memory_band` is the share by which predictions of memory err.

    `parts` are those of the busiest stage, the one that waits least; `bubble` is the share of the step that each stage
    waits for others. `nodes` are those that the plan uses, `price_usd_per_hour` is that of one accelerator. `host` is None
    where the host holds nothing of the plan.
    """

    step_time_s: float
    parts: TimeParts
    busiest_stage: int
    bubble: tuple[float, ...]
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
    nodes: int
    tokens_per_step: int
    price_usd_per_hour: float | None
    memory_band: float
    energy: Energy | None
    energy_reason: str | None
    risks: tuple[str, ...]
    objective_units: int | None = None
    host: HostMemory | None = None

    @property
    def legal(self) -> bool:
        """Whether the framework accepts the plan."""
        return not self.faults

    @property
    def fits(self) -> bool:
        """Whether the predicted memory of every stage is within the capacity, of the host too; `verdict` looks at the band
        too."""
        return self.device_fits and (self.host is None or self.host.fits)

    @property
    def device_fits(self) -> bool:
        """Whether every stage fits its devices."""
        return all(mib <= self.capacity_mib for mib in self.memory_mib)

    @property
    def verdict(self) -> str:
        """ "fits", "tight" or "does not fit": where the capacity lies against the band of the prediction."""
        if self.host is not None and not self.host.fits:
            return "does not fit"
        return verdict_of(max(self.memory_mib), self.capacity_mib, self.memory_band)

    @property
    def admitted(self) -> bool:
        """Whether the plan is in the universe: legal, fitting and within the user's limits."""
        return self.legal and self.fits and not self.limit_faults

    @property
    def worst_stage(self) -> int:
        """The stage whose devices are the fullest."""
        return max(range(len(self.memory_mib)), key=lambda k: self.memory_mib[k])

    @property
    def peak_memory_bytes(self) -> float:
        """Of one device of the fullest stage."""
        return self.stages[self.worst_stage].total

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, memory in decimal GB."""
        document = asdict(self)
        document["stages"] = [
            {f"{name}_gb": value / GB for name, value in asdict(stage).items()} | {"total_gb": stage.total / GB}
            for stage in self.stages
        ]
        document["parts"] = {f"{name}_s": value for name, value in asdict(self.parts).items()}
        del document["host"]
        if self.host is not None:
            document["host"] = {
                "stages_gb": [value / GB for value in self.host.stages],
                "node_gb": self.host.node_bytes / GB,
                "node_capacity_gb": self.host.node_capacity_bytes / GB,
                "fits": self.host.fits,
            }
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
    timed = timed_plan(instance, plan)
    step_time_s = timed.step_time
    parts = _time_parts(tables, plan, timed)
    stages = tuple(_stage_memory(tables, plan, k) for k in range(plan.degrees.pp))
    done = share_of_batch(instance, plan)
    tokens_per_s = done * instance.workload.tokens_per_step / step_time_s
    devices = plan.degrees.devices
    peak = instance.accelerator.flops_per_s[instance.workload.peak]
    return Evaluation(
        step_time_s=step_time_s,
        parts=parts,
        busiest_stage=timed.busiest_stage,
        bubble=timed.bubble,
        stages=stages,
        memory_mib=tuple(_stage_mib(tables, plan, k) for k in range(plan.degrees.pp)),
        capacity_mib=tables.capacity_mib,
        faults=tuple(broken_rules(instance, plan)),
        limit_faults=tuple(limit_faults(instance, plan)),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / devices,
        model_flops_utilization=done * model_flops(instance) / (step_time_s * devices * peak),
        devices=devices,
        idle_devices=max(0, instance.cluster.device_count - devices),
        nodes=prod(plan.placement.blocks[1:]),
        tokens_per_step=instance.workload.tokens_per_step,
        price_usd_per_hour=instance.accelerator.price_usd_per_hour,
        memory_band=instance.profile.memory_band,
        energy=_energy(tables, plan, timed),
        energy_reason=why_no_energy(instance.accelerator),
        risks=(
            *kernel_risks(instance),
            *plan_risks(instance.rules, instance.model, instance.workload.precision, plan.degrees),
            *memory_risks(instance, stages),
        ),
        objective_units=None if unit_s is None else int(timed_plan(instance, plan, unit_s).step_time),
        host=_host_memory(tables, plan),
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
    risks = [
        f"head_dim={size} is not a multiple of {ALIGNED_HEAD}: attention and its projections may run a third slower"
        for size in sorted(sizes)
        if size % ALIGNED_HEAD
    ]
    device, chosen = instance.accelerator, instance.workload.attention
    if sizes and chosen in FLASH and device.vendor == "NVIDIA" and "bf16" not in device.flops_per_s:
        risks.append(
            f"attention={chosen}: {device.name} is older than Ampere, which FlashAttention-2 needs; attention=unfused "
            "counts the scores that it holds instead"
        )
    return risks


def memory_risks(instance: Instance, stages: tuple[StageMemory, ...]) -> list[str]:
    """That a plan that fits is within the band of the prediction of the memory of the device, whatever the user's limit."""
    band, memory_bytes = instance.profile.memory_band, instance.accelerator.memory_bytes
    worst = max(range(len(stages)), key=lambda k: stages[k].total)
    need = stages[worst].total
    if need > memory_bytes or verdict_of(need, memory_bytes, band) != "tight":
        return []
    return [
        f"memory: stage {worst} needs {need / GB:.1f} of {memory_bytes / GB:.1f} GB, {100 * need / memory_bytes:.0f} %, and the "
        f"prediction is good to {100 * band:.0f} %: it may run out; memory_gb<={memory_bytes / (1 + band) / GB:.1f} keeps clear"
    ]


def _energy(tables: CostTables, plan: Plan, timed: TimedPlan) -> Energy | None:
    """Energy by phase, (H1)-(H3) over one device of every stage."""
    instance, d, c = tables.instance, plan.degrees, timed.coefficients
    own = phases(tables, d, plan.placement, plan.schedule)
    every, full, selective = (getattr(timed.counts, name).sum(axis=0) for name in ("every", "full", "selective"))
    m = passes_per_step(plan.schedule, timed.shape.micro_batches).micro_batches
    optimizer, waited = float(every @ own.optimizer), float(every @ own.host)
    compute = m * float(every @ own.compute + full @ c.full + selective @ c.selective) + optimizer
    exposed = m * (float(every @ own.communication) + transfers(c, plan.layout, d.pp))
    exposed += float(timed.passes.tails.sum()) - optimizer - waited
    return step_energy(
        instance.accelerator,
        d.devices,
        compute / d.pp,
        max(exposed, 0.0) / d.pp,
        max(timed.step_time - (compute + exposed) / d.pp, 0.0),
        instance.workload.tokens_per_step,
    )


def admitted_units(instance: Instance, plan: Plan, unit_s: float) -> int | None:
    """The part of `evaluate` that decides between plans: the integer objective, or None if it is not admitted."""
    tables = cost_tables(instance)
    admitted = (
        all(_stage_mib(tables, plan, k) <= tables.capacity_mib for k in range(plan.degrees.pp))
        and ((host := _host_memory(tables, plan)) is None or host.fits)
        and not limit_faults(instance, plan)
        and not broken_rules(instance, plan)
    )
    return int(timed_plan(instance, plan, unit_s).step_time) if admitted else None


def model_flops(instance: Instance) -> float:
    """Floating-point operations of one step without recompute: 6 per active parameter and token, 12 h s per layer
    with softmax attention, half of it for causal (Chowdhery et al., arXiv 2204.02311, appendix B), and with a window what it
    lets a query see. Of packed documents s is their mean length by tokens; a frozen parameter has no weight gradient and
    counts 4, those of its adapter 6; (L13) has its layer, its matrix and the head once more."""
    model, workload = instance.model, instance.workload
    attention = 0.0
    for kind in model.layers:
        if isinstance(kind.mixer, Attention):
            attention += _attention_flops(instance, kind.mixer)
    lookups = sum(t.params for t in model.embedding) if not model.tied else 0
    each = 4.0 if workload.frozen else 6.0
    matrices = each * (model.active_params - lookups) + 6.0 * _active_adapter_params(instance)
    if workload.mtp_layers:
        kind = model.layers[-1]
        assert isinstance(kind.mixer, Attention)
        matrices += 6.0 * workload.mtp_layers * (kind.active_params + 2 * model.hidden**2 + model.vocab * model.hidden)
        attention += workload.mtp_layers * _attention_flops(instance, kind.mixer)
    return (matrices + attention) * workload.tokens_per_step


def _attention_flops(instance: Instance, mixer: Attention) -> float:
    """Of the core of one layer, per token."""
    window = None if mixer.chunked else mixer.window
    keys = sum(share * _keys(length, window) for length, share in pieces(instance, mixer))
    return 6 * mixer.heads * (mixer.head_dim + mixer.v_head_dim) * keys


def _keys(length: float, window: int | None) -> float:
    """Keys that a query meets on the mean: half of the length, and with a window w of it w - w^2 / (2 length)."""
    reach = min(length, window or length)
    return reach - reach * reach / (2 * length)


def _active_adapter_params(instance: Instance) -> float:
    """Parameters of adapters that one token touches."""
    if not instance.workload.frozen:
        return 0.0
    total = 0.0
    for kind, layers in Counter(instance.model.layers).items():
        held = kind_params_on_device(kind, 1, workload=instance.workload)
        routed = kind.ffn.top_k / kind.ffn.experts if isinstance(kind.ffn, Moe) else 0.0
        total += layers * (held.dense + held.expert * routed)
    return total


def share_of_batch(instance: Instance, plan: Plan) -> float:
    """How much of the global batch the step takes: all of it, but for plans whose micro-batches do not make it up."""
    d = plan.degrees
    return shape_of(plan).micro_batches * d.micro_batch * d.dp / instance.workload.global_batch


def _unusable(instance: Instance, plan: Plan) -> list[str]:
    """Why the plan has no numbers on this instance."""
    faults = []
    if sum(plan.chunk_layers) != len(instance.model.layers):
        faults.append(f"plan.stages hold {sum(plan.chunk_layers)} layers, the model has {len(instance.model.layers)}")
    if plan.micro_batches > instance.workload.global_batch:
        faults.append(
            f"plan.micro_batches={plan.micro_batches} is more than global_batch={instance.workload.global_batch}"
        )
    share, allowed = plan.degrees.offload_optimizer, instance.workload.offload_shares
    if share not in allowed:
        faults.append(
            f"plan.degrees.offload_optimizer={share:g} is not one of {', '.join(f'{one:g}' for one in allowed)}, which the "
            "workload's offload_optimizer allows"
        )
    if plan.degrees.offload_param and not instance.workload.offload_param:
        faults.append("plan.degrees.offload_param=true, which the workload's offload_param does not allow")
    if plan.degrees.offload_layers and not instance.workload.offload_activations:
        faults.append(
            f"plan.degrees.offload_layers={plan.degrees.offload_layers}, which the workload's offload_activations does not "
            "allow"
        )
    if plan.degrees.offload_layers > len(instance.model.layers):
        faults.append(
            f"plan.degrees.offload_layers={plan.degrees.offload_layers} is more than the model's "
            f"{len(instance.model.layers)} layers"
        )
    if plan.schedule == "dualpipe" and plan.degrees.pp % 2:
        faults.append(f"schedule=dualpipe needs an even pp, not {plan.degrees.pp}")
    if len(plan.placement.blocks) != len(instance.levels):
        faults.append(
            f"plan.placement has {len(plan.placement.blocks)} levels, cluster {instance.cluster.name} "
            f"has {len(instance.levels)}"
        )
    return faults


def broken_rules(instance: Instance, plan: Plan) -> list[str]:
    """Every rule of the pack that a plan breaks, and whether its placement exists on the cluster."""
    workload, blocks = instance.workload, plan.placement.blocks
    faults = plan_faults(instance.rules, instance.model, workload, plan)
    for level, used in enumerate(blocks):
        room = instance.cluster.capacity(blocks[:level])
        if used > room:
            level_name, each = instance.cluster.levels[level], prod(blocks[:level])
            what = "devices" if each == 1 else f"groups of {each} devices"
            return [
                *faults,
                f"placement needs {used} {what} in one {level_name}, cluster {instance.cluster.name} has {room}",
            ]
    return faults


def limit_faults(instance: Instance, plan: Plan) -> list[str]:
    """The user's limits that the plan breaks; the memory limit is part of capacity."""
    if not instance.limits.text:
        return []
    used = {"devices": plan.degrees.devices, "free_nodes": instance.free_nodes(plan.placement.blocks)}
    faults = instance.limits.faults(asdict(plan.degrees) | used) + instance.limits.stage_faults(plan.layer_stages)
    schedule, wanted = instance.limits.schedule, instance.limits.recompute
    if schedule not in (None, plan.schedule):
        faults.append(f"schedule={plan.schedule} breaks the limit schedule={schedule}")
    algorithm = instance.limits.cp_comm_type
    if algorithm not in (None, plan.degrees.cp_comm_type):
        faults.append(f"cp_comm_type={plan.degrees.cp_comm_type} breaks the limit cp_comm_type={algorithm}")
    modules, sets = instance.limits.recompute_modules, {stage.mode for stage in plan.stages} - {"none", "full"}
    if modules not in (None, ANY) and not sets <= {modules}:
        faults.append(f"recompute_modules={', '.join(sorted(sets))} breaks the limit recompute_modules={modules}")
    if wanted is not None and any(stage.recompute != wanted for stage in plan.stages):
        faults.append(f"recompute is not {wanted} on every stage, as the limit asks")
    elif wanted == "full" and any(stage.recompute_layers < max(stage.chunks) for stage in plan.stages):
        faults.append("recompute is not full for every layer, as the limit asks")
    return faults


@dataclass(frozen=True, eq=False)
class TimedPlan:
    """A plan with the durations of its passes and what the timeline of its schedule makes of them, in seconds or units.

    `busy` is how long each stage works in a step, its tail (T4) left out.
    """

    shape: Shape
    coefficients: TimeCoefficients
    counts: ChunkCounts
    passes: PassTimes
    spans: StageSpans
    busy: tuple[float, ...]

    @property
    def step_time(self) -> float:
        """(T5)."""
        return (self.coefficients.overhead + self.spans.step(self.shape, self.passes.tails)).item()

    @property
    def busiest_stage(self) -> int:
        return int(np.argmax(np.array(self.busy) + self.passes.tails))

    @property
    def bubble(self) -> tuple[float, ...]:
        """Share of the step that each stage waits."""
        step = self.step_time
        working = np.array(self.busy) + self.passes.tails + self.coefficients.overhead
        return tuple(float(share) for share in np.maximum(1 - working / step, 0.0)) if step else (0.0,) * len(self.busy)


def timed_plan(instance: Instance, plan: Plan, unit_s: float | None = None) -> TimedPlan:
    """(T1)-(T5) of a plan, in multiples of `unit_s` where one is given."""
    tables = cost_tables(instance)
    sets = tables.sets_with(stage.mode for stage in plan.stages)
    coefficients = tables.time(plan.degrees, plan.placement, plan.schedule, sets)
    if unit_s is not None:
        coefficients = coefficients.in_units(unit_s)
    shape = shape_of(plan)
    counts = counts_of(plan, tables.kind_prefixes, sets)
    passes = pass_times(coefficients, shape, plan.layout, counts)
    once = passes_per_step(plan.schedule, shape.micro_batches)
    worked = passes.durations[once.kinds].sum(axis=0) * once.micro_batches
    busy = tuple(worked[list(plan.layout.slots_of(k))].sum().item() for k in range(shape.pp))
    return TimedPlan(shape, coefficients, counts, passes, passes.spans(shape), busy)


def _time_parts(tables: CostTables, plan: Plan, timed: TimedPlan) -> TimeParts:
    """What the busiest stage does, by cause; what is left of the step it waits."""
    d, c, stage = plan.degrees, timed.coefficients, timed.busiest_stage
    instance = tables.instance
    sharding, groups = sharding_of(d), groups_of(instance, d, plan.placement)
    terms, times = tables.terms(sharding, groups), tables.times(sharding, groups)
    own = timed.counts.every[list(plan.layout.slots_of(stage))].sum(axis=0)
    full, selective = (
        counts[list(plan.layout.slots_of(stage))].sum(axis=0) for counts in (timed.counts.full, timed.counts.selective)
    )
    m = passes_per_step(plan.schedule, timed.shape.micro_batches).micro_batches
    scale = m * straggling(instance, d.devices)
    causes = dict.fromkeys(("compute", "tensor_parallel", "context_parallel", "expert_parallel", "weight_gather"), 0.0)
    host = work = 0.0
    waits = sum(tables.copies_s(d, plan.placement)) if d.offload_layers else 0.0
    recompute = m * float(full @ c.full + selective @ c.selective)
    for unit, (term, time) in enumerate(
        zip((*terms.kinds, terms.embedding, terms.head), (*times.kinds, times.embedding, times.head), strict=True)
    ):
        layers = int(own[unit])
        busy = layers * m * (c.forward[unit] + c.backward[unit])
        spent = {name: layers * scale * value for name, value in time_by_cause(term, instance.profile).items()}
        for name, value in spent.items():
            causes[name] += value
        passes = layers * scale * time.both_s
        host += max(passes - sum(spent.values()), 0.0)  # below 0 by rounding alone
        away = m * waits if unit == len(own) - 2 and stage == 0 else 0.0
        causes["weight_gather"] += max(busy - away - passes, 0.0)
        work += busy - away
    optimizer, tail = optimizer_s(tables, plan, stage), float(timed.passes.tails[stage])
    return TimeParts(
        **causes,
        host=host,
        recompute=recompute,
        transfers=timed.busy[stage] - work - recompute,
        fill_and_drain=timed.step_time - c.overhead - timed.busy[stage] - tail,
        gradient_sync=tail - optimizer,
        optimizer=optimizer,
        overhead=c.overhead,
    )


def optimizer_s(tables: CostTables, plan: Plan, stage: int) -> float:
    """(T4) The optimizer's part of the tail of a stage."""
    rates = tables.group_rates(plan.degrees, plan.placement, plan.schedule)
    return params_optimizer_s(*rates, stage_params(tables, plan, stage))


def stage_params(tables: CostTables, plan: Plan, stage: int) -> KindParams:
    """What one device of a stage holds."""
    instance, d = tables.instance, plan.degrees
    kind_params = tables.kind_params(d.tp, d.ep, d.etp)
    cuts, kinds, chunks = plan.cuts, instance.model.kind_indices, plan.layout.chunks_of(stage)
    held = Counter(kind for chunk in chunks for kind in kinds[cuts[chunk] : cuts[chunk + 1]])
    units = [kind_params[kind] * layers for kind, layers in held.items()]
    embedding, head = end_units(instance, d.tp, d.ep, d.etp, with_tied_copy=tied_copy(instance, d.pp, plan.schedule))
    units += [embedding] if 0 in chunks else []
    units += [head] if d.virtual_stages - 1 in chunks else []
    return sum(units, KindParams(0, 0))


def kept_layers(tables: CostTables, plan: Plan, stage: int) -> list[tuple[int, int, str]]:
    """(kind, chunk row, mode of `Stage.mode` or `ON_HOST`) of every layer of a stage."""
    instance, setting = tables.instance, plan.stages[stage]
    cuts, out = plan.cuts, []
    for row, chunk in enumerate(plan.layout.chunks_of(stage)):
        for position in range(cuts[chunk + 1] - cuts[chunk]):
            if cuts[chunk] + position < plan.degrees.offload_layers:
                out.append((instance.model.kind_indices[cuts[chunk] + position], row, ON_HOST))
                continue
            repeated = setting.recompute != "full" or position < setting.recompute_layers
            mode = setting.mode if repeated else "none"
            out.append((instance.model.kind_indices[cuts[chunk] + position], row, mode))
    return out


def activation_bytes(tables: CostTables, plan: Plan, stage: int) -> tuple[float, ...]:
    """(M2), (M3) What a micro-batch in flight keeps in each chunk of a stage, fragmentation included."""
    bytes_of = tables.activations(sharding_of(plan.degrees))
    held = [0.0] * len(plan.layout.chunks_of(stage))
    for kind, row, mode in kept_layers(tables, plan, stage):
        held[row] += bytes_of[kind].kept(mode)
    return tuple(held)


def _stage_memory(tables: CostTables, plan: Plan, stage: int) -> StageMemory:
    """Peak bytes of a stage, at the moment of its largest activations."""
    instance, d = tables.instance, plan.degrees
    sharding, held = sharding_of(d), activation_bytes(tables, plan, stage)
    activations = max(
        sum(count * kept for count, kept in zip(vector, held, strict=True))
        for vector in in_flight(d.pp, d.vpp, shape_of(plan).micro_batches, stage, plan.schedule)
    )
    states: StateBytes = state_bytes(instance, stage_params(tables, plan, stage), d)
    modes = {mode for _, _, mode in kept_layers(tables, plan, stage)}
    working = max((kind.needed(mode) for kind in tables.activations(sharding) for mode in modes), default=0.0)
    has_head = d.virtual_stages - 1 in plan.layout.chunks_of(stage)
    logits = head_activations_bytes(instance, sharding) if has_head else 0.0
    used = 1 / (1 + instance.profile.memory_fragmentation)
    return StageMemory(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=activations * used,
        logits=logits * used,
        recompute_working=working * used,
        transfer_buffers=transfer_buffer_bytes(instance, d),
        gather_buffers=gather_buffer_bytes(instance, tables.kind_params(d.tp, d.ep, d.etp), d),
        fragmentation=(activations + logits + working) * (1 - used),
        reserve=instance.profile.memory_reserve_bytes,
    )


def _host_memory(tables: CostTables, plan: Plan) -> HostMemory | None:
    """(U1), (U2), (U5) of a plan; the MiB count every layer rounded up (F2)."""
    if not plan.degrees.on_host:
        return None
    instance, stages = tables.instance, range(plan.degrees.pp)
    memory = tables.memory(replace(plan.degrees, offload_layers=0), plan.schedule)
    counts = counts_of(plan, tables.kind_prefixes, tables.sets).every
    away = tables.host_activations_bytes(plan.degrees)
    states = [counts[list(plan.layout.slots_of(k))].sum(axis=0) @ np.array(memory.host) for k in stages]
    return HostMemory(
        tuple(state_bytes(instance, stage_params(tables, plan, k), plan.degrees).host + away for k in stages),
        tuple(int(own) + mib_up(away) for own in states),
        tables.host_capacity_mib,
        max(leaf.devices for leaf in instance.cluster.leaves),
    )


def _stage_mib(tables: CostTables, plan: Plan, stage: int) -> int:
    """(F2) The same in whole MiB, each line of each layer rounded up, as the verdict takes it."""
    d, memory = plan.degrees, tables.memory(replace(plan.degrees, offload_layers=0), plan.schedule)
    chunks = plan.layout.chunks_of(stage)
    kept = Counter(kept_layers(tables, plan, stage))
    total = memory.fixed + sum(count * memory.state[kind] for (kind, _, _), count in kept.items())
    total += max(
        sum(count * memory.kept(kind, vector[row], mode) for (kind, row, mode), count in kept.items())
        for vector in in_flight(d.pp, d.vpp, shape_of(plan).micro_batches, stage, plan.schedule)
    )
    total += max((memory.needed(mode) for mode in {mode for _, _, mode in kept}), default=0)
    if 0 in chunks:
        total += memory.embedding
    if d.virtual_stages - 1 in chunks:
        total += memory.head
    return total
