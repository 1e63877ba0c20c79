"""One cell of a batch: its key, its solve, and its row in the store."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardwise.data.cluster_file import write_cluster_toml
from shardwise.data.faults import InputError
from shardwise.data.instance import Instance
from shardwise.data.instance_document import model_document
from shardwise.data.limits import parse_limits
from shardwise.data.rules import free_chunks
from shardwise.data.workload import Training
from shardwise.formulations.objective import Objective
from shardwise.solver.binding import limits_of
from shardwise.solver.evaluate import GB
from shardwise.solver.solve import solve, versions
from shardwise.solver.store import CELL_DIGITS

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.solver.catalogue_file import Cell
    from shardwise.solver.result import Result

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """A cell to solve. `instance` is None where the parts do not fit each other, for the reasons in `faults`.

    instance_key
        Equal for cells of one instance, which share what is computed of it.
    """

    key: str
    instance_key: str
    cell: Cell
    instance: Instance | None
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A solved cell: its row of the store, and the document that `plan --json` would write."""

    row: dict[str, Any]
    document: dict[str, Any]


def tasks_of(cells: tuple[Cell, ...]) -> list[Task]:
    """Every cell with its instance and key; cells of one instance share it.

    The key is a digest of all that the result depends on: the instance by content, objective, price, deadline, what the
    search is told, and the versions of what computes it. The time limit is not part of it: see `wanted` in `solver.batch`.
    """
    digests: dict[int, str] = {}

    def once(value: Any, document: Callable[[Any], Any]) -> str:
        if id(value) not in digests:
            digests[id(value)] = digest(document(value))
        return digests[id(value)]

    instances: dict[str, tuple[Instance | None, tuple[str, ...]]] = {}
    computed_by = versions()
    tasks = []
    for cell in cells:
        own = cell.settings
        document = [
            once(cell.model, model_document),
            once(cell.cluster, write_cluster_toml),
            {"seq_len": cell.seq_len, "global_batch": cell.global_batch, "precision": cell.precision},
            dict(own.workload),
            own.rules.name,
            own.rules.version,
            asdict(own.profile),
            own.limits,
            own.free_chunks,
        ]
        instance_key = digest(document)
        if instance_key not in instances:
            instances[instance_key] = _instance(cell)
        instance, faults = instances[instance_key]
        searched = [cell.objective, own.price, own.deadline_s, own.solver_workers, own.seed, own.top]
        key = digest([instance_key, searched, computed_by])
        tasks.append(Task(key, instance_key, cell, instance, faults))
    return list({task.key: task for task in tasks}.values())


def digest(document: Any) -> str:
    """The first digits of the SHA-256 of a document as JSON, its keys in order."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:CELL_DIGITS]


def _instance(cell: Cell) -> tuple[Instance | None, tuple[str, ...]]:
    """The instance of a cell, or why there is none."""
    own = cell.settings
    try:
        workload = Training(
            seq_len=cell.seq_len,
            global_batch=cell.global_batch,
            precision=cell.precision,  # type: ignore[arg-type]
            **dict(own.workload),
        )
        rules = free_chunks(own.rules) if own.free_chunks and own.rules.even_chunks else own.rules
        limits = parse_limits(own.limits)
        return Instance(cell.model, cell.cluster, workload, rules, own.profile, limits), ()
    except InputError as error:
        return None, error.faults
    except (ValueError, TypeError) as error:
        return None, tuple(str(error).split("; "))


def solve_task(task: Task) -> Outcome:
    """Solve a cell. Whatever goes wrong is an outcome of its own, with the reason."""
    wall, cpu = time.monotonic(), time.process_time()
    own = task.cell.settings
    result, faults = None, task.faults
    if task.instance is not None:
        try:
            result = solve(
                instance=_warm(task.instance_key, task.instance),
                objective=task.cell.objective,
                price=own.price,
                deadline_s=own.deadline_s,
                time_limit_s=own.time_limit_s,
                workers=own.solver_workers,
                seed=own.seed,
                top=own.top,
            )
        except InputError as error:
            faults = error.faults
        except Exception as error:  # one cell must not stop the rest
            log.exception("cell %s", task.cell)
            faults = (f"{type(error).__name__}: {error}",)
    spent = {"wall_s": time.monotonic() - wall, "cpu_s": time.process_time() - cpu}
    if result is None:
        return failed(task, faults, **spent)
    return Outcome(_asked(task) | _answered(task, result) | spent, result.to_dict())


class _Handed:
    """The instance that a cache is asked with, told apart by its key alone."""

    def __init__(self, key: str, instance: Instance) -> None:
        self.key, self.instance = key, instance

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Handed) and self.key == other.key


def _warm(key: str, instance: Instance) -> Instance:
    """The instance that this process knows under a key already, whose cost tables are computed, or the one given."""
    return _kept(_Handed(key, instance))


@lru_cache(maxsize=4)
def _kept(handed: _Handed) -> Instance:
    return handed.instance


def failed(task: Task, faults: tuple[str, ...], wall_s: float = 0.0, cpu_s: float = 0.0) -> Outcome:
    """The outcome of a cell that could not be solved."""
    reason = "; ".join(faults)
    row = _asked(task) | {"status": "FAILED", "reason": reason, "wall_s": wall_s, "cpu_s": cpu_s}
    objective = Objective(task.cell.objective)  # type: ignore[arg-type]
    document = {
        "status": "UNKNOWN",
        "objective": objective.name,
        "sense": objective.sense,
        "unit": objective.unit,
        **dict.fromkeys(("value", "bound", "gap", "plan", "evaluation")),
        "alternatives": [],
        "reason": list(faults),
    }
    return Outcome(row, document)


def _asked(task: Task) -> dict[str, Any]:
    """Columns of the question."""
    cell, own = task.cell, task.cell.settings
    device = cell.cluster.accelerators[0]
    objective = Objective(cell.objective, own.price)  # type: ignore[arg-type]
    return {
        "cell": task.key,
        "model": cell.model.name,
        "cluster": cell.cluster.name,
        "family": cell.family,
        "nodes": cell.nodes,
        "devices": cell.cluster.device_count,
        "accelerator": device.name,
        "params": float(cell.model.params),
        "active_params": float(cell.model.active_params),
        "seq_len": cell.seq_len,
        "global_batch": cell.global_batch,
        "precision": cell.precision,
        "optimizer": dict(own.workload).get("optimizer", "adamw"),
        "attention": dict(own.workload).get("attention", "flash"),
        "rules": f"{own.rules.name} {own.rules.version}",
        "profile": own.profile.name,
        "limits": ", ".join(own.limits),
        "objective": cell.objective,
        "unit": objective.unit,
        "sense": objective.sense,
        "deadline_s": own.deadline_s,
        "price_usd_per_hour": device.price_usd_per_hour if own.price is None else own.price,
        "time_limit_s": own.time_limit_s,
        "workers": own.solver_workers,
        "seed": own.seed,
        **versions(),
    }


def _answered(task: Task, result: Result) -> dict[str, Any]:
    """Columns of the answer."""
    counts = result.report["candidates"]
    row: dict[str, Any] = {
        "status": result.status,
        "value": result.value,
        "bound": result.bound,
        "gap": result.gap,
        "reason": "; ".join(result.reason) or None,
        "candidates": counts["enumerated"],
        "solved": counts["solved"],
    }
    plan, evaluation, instance = result.plan, result.evaluation, task.instance
    if plan is None or evaluation is None or instance is None:
        return row
    price, energy = _asked(task)["price_usd_per_hour"], evaluation.energy
    per_token = evaluation.devices * evaluation.step_time_s / evaluation.tokens_per_step
    asked = task.cell.settings.top > 0
    row |= {f"{name}_s": seconds for name, seconds in asdict(evaluation.parts).items()}
    row |= plan.degrees.to_dict()
    return row | {
        "step_time_s": evaluation.step_time_s,
        "tokens_per_s": evaluation.tokens_per_s,
        "tokens_per_s_per_device": evaluation.tokens_per_s_per_device,
        "model_flops_utilization": evaluation.model_flops_utilization,
        "joules_per_token": None if energy is None else energy.joules_per_token.value,
        "watts_per_device": None if energy is None else energy.watts_per_device.value,
        "usd_per_million_tokens": None if price is None else price * per_token / 3600 * 1e6,
        "devices_used": evaluation.devices,
        "idle_devices": evaluation.idle_devices,
        "nodes_used": evaluation.nodes,
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "recompute": ", ".join(dict.fromkeys(stage.recompute for stage in plan.stages)),
        "peak_memory_gb": evaluation.peak_memory_bytes / GB,
        "capacity_gb": evaluation.capacity_mib * 2**20 / GB,
        "memory_verdict": evaluation.verdict,
        "binds": "; ".join(limit.name for limit in limits_of(instance, plan, evaluation) if limit.binds),
        "alternatives": len(result.alternatives) if asked else None,
        "ties": sum(other.tie for other in result.alternatives) if asked else None,
        "expected_regret": result.robustness.of(0)[1] if asked and result.robustness else None,
    }
