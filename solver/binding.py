"""Limits that a plan sits on the edge of: of the user, the cluster, the rules and the model.

A limit that binds is one that a better plan may lie behind; what lies there is for a search with the limit moved.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shardwise.data.limits import MAX_VALUE, variable_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan
    from shardwise.solver.evaluate import Evaluation

GB = 1e9


@dataclass(frozen=True, slots=True)
class Limit:
    """`allowed` and `plan` in words; `source` is who set the limit."""

    name: str
    source: str
    allowed: str
    plan: str
    binds: bool


def limits_of(instance: Instance, plan: Plan, evaluation: Evaluation) -> tuple[Limit, ...]:
    """Every limit that can be told from the plan alone, those that bind first."""
    found = [*_users(instance, plan), *_others(instance, plan, evaluation)]
    return tuple(sorted(found, key=lambda limit: not limit.binds))


def _users(instance: Instance, plan: Plan) -> Iterator[Limit]:
    limits, values = (
        instance.limits,
        asdict(plan.degrees)
        | {
            "devices": plan.degrees.devices,
            "free_nodes": instance.free_nodes(plan.placement.blocks),
        },
    )
    for name, allowed in limits.ranges.items():
        if name not in values:
            continue
        value = int(values[name])
        stated = ", ".join(text for text in limits.text if variable_of(text) == name)
        edges = [edge for edge in (allowed.low, allowed.high) if 0 < edge < MAX_VALUE]
        yield Limit(name, "user", stated, str(value), value in edges or value not in allowed)
    stages = plan.layer_stages
    for layer, allowed in limits.pinned.items():
        stated = ", ".join(text for text in limits.text if variable_of(text) == f"stage[{layer}]")
        yield Limit(f"stage[{layer}]", "user", stated, str(stages[layer]), stages[layer] in (allowed.low, allowed.high))
    for one, other in limits.together:
        yield Limit(f"stage[{one}]", "user", f"stage[{one}]=stage[{other}]", str(stages[one]), True)
    for name, wanted, own in (
        ("schedule", limits.schedule, {plan.schedule}),
        ("cp_comm_type", limits.cp_comm_type, {plan.degrees.cp_comm_type}),
        ("recompute", limits.recompute, {stage.recompute for stage in plan.stages}),
    ):
        if wanted is not None:
            yield Limit(name, "user", f"{name}={wanted}", ", ".join(sorted(own)), True)


def _others(instance: Instance, plan: Plan, evaluation: Evaluation) -> Iterator[Limit]:
    d, rules, batch = plan.degrees, instance.rules, instance.workload.global_batch
    worst = evaluation.stages[evaluation.worst_stage]
    layers = max(plan.stages[evaluation.worst_stage].layers, 1)
    layer = (worst.weights + worst.gradients + worst.optimizer + worst.activations) / layers
    capacity = evaluation.capacity_mib * 2**20
    limited = instance.memory_limit_bytes < instance.accelerator.memory_bytes
    own = "user" if limited else "cluster"
    yield Limit(
        "memory of a device",
        own,
        f"{capacity / GB:.1f} GB",
        f"{worst.total / GB:.1f} GB on stage {evaluation.worst_stage}; a layer takes about {layer / GB:.1f} GB",
        worst.total + layer > capacity,
    )
    devices = instance.cluster.device_count
    yield Limit("devices", "cluster", str(devices), f"{d.devices} used", d.devices >= devices)
    yield Limit("dp x micro_batch", "workload", f"divides {batch}", str(d.dp * d.micro_batch), plan.micro_batches == 1)
    least = min(plan.chunk_layers)
    yield Limit(
        "layers of a chunk", "model", "at least 1, the ends may be empty", f"{least} in the smallest", least <= 1
    )
    yield Limit("vpp", "rules", f"at most {rules.max_vpp}", str(d.vpp), d.vpp >= rules.max_vpp)
    yield Limit(
        "micro_batch",
        "rules",
        f"at most {rules.max_micro_batch}",
        str(d.micro_batch),
        d.micro_batch >= rules.max_micro_batch,
    )
    stages = ", ".join(map(str, rules.zero_stages))
    yield Limit("zero", "rules", f"searched: {stages}", str(d.zero), d.zero >= max(rules.zero_stages))
