"""Measured runs as instances and plans, and as the arrays that predictions are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.data.faults import InputError
from shardwise.data.instance import Instance
from shardwise.data.profile import load_profile
from shardwise.data.rules import FREE
from shardwise.formulations.coefficients import CostTables
from shardwise.formulations.table import UnitTimes
from shardwise.solver.default_plan import even_split, plan_from_degrees

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.data.plan import Plan
    from shardwise.data.runs import Run


@dataclass(frozen=True, eq=False)
class Planned:
    """A run with the plan it followed and the units of its instance; without a plan, `reason` says why."""

    run: Run
    units: UnitTimes | None = None
    plan: Plan | None = None
    reason: str = ""

    @property
    def timed(self) -> bool:
        """Whether it has a plan and a step time that is a measurement of it."""
        return self.plan is not None and self.run.scored


def planned_runs(runs: Iterable[Run], profile: str | None = None) -> list[Planned]:
    """Every run with its plan, in order; runs of one instance share its tables.

    Parameters
    ----------
    profile
        A profile for all of them; that of each run's framework without it.
    """
    known: dict[tuple[Any, ...], UnitTimes] = {}
    return [_planned(replace(run, profile=profile) if profile else run, known) for run in runs]


def _planned(run: Run, known: dict[tuple[Any, ...], UnitTimes]) -> Planned:
    if run.reason:
        return Planned(run, reason=run.reason)
    assert run.model is not None
    assert run.cluster is not None
    assert run.workload is not None
    assert run.degrees is not None
    try:
        key = (id(run.model), id(run.cluster), replace(run.workload, global_batch=1), run.profile)
        if key not in known:
            instance = Instance(run.model, run.cluster, run.workload, rules=FREE, profile=load_profile(run.profile))
            known[key] = UnitTimes(CostTables(instance))
        units = known[key]
        return Planned(run, units, plan_of(run, units.tables.instance))
    except (InputError, ValueError) as error:
        faults = error.faults if isinstance(error, InputError) else [str(error)]
        return Planned(run, reason="; ".join(faults))


def plan_of(run: Run, instance: Instance) -> Plan:
    """The plan that a run followed: even stages, ends one layer shorter where only that divides, packed ranks."""
    degrees = run.degrees
    assert degrees is not None
    assert run.workload is not None
    layers, chunks = len(instance.model.layers), degrees.virtual_stages
    stages = even_split(layers, chunks)
    if layers % chunks and (layers + 2) % chunks == 0:
        stages = [(layers + 2) // chunks] * chunks
        stages[0] -= 1
        stages[-1] -= 1
    block = None
    if run.recompute == "full" and run.recompute_share < 1:
        block = max(round(max(stages) * run.recompute_share), 1)
    recompute: Any = run.recompute
    plan = plan_from_degrees(
        instance,
        degrees,
        stages=stages,
        recompute=recompute,
        recompute_layers=block,
        recompute_modules=run.recompute_modules,
    )
    micro_batches = run.workload.global_batch / (degrees.micro_batch * degrees.dp)
    if micro_batches < 1:
        raise InputError(
            f"micro_batch={degrees.micro_batch} x dp={degrees.dp} is more than global_batch={run.workload.global_batch}"
        )
    schedule: Any = run.schedule or degrees.schedule
    return replace(plan, micro_batches=max(round(micro_batches), 1), schedule=schedule)
