"""Does a model fit, where does its memory go, and on how many devices at least.

The fewest devices come from memory alone (`formulations.device_counts`); the plan on them is the fastest that a search
over exactly so many devices proves, or the first that it meets. Every smaller number is excluded by a bound.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardwise.data.cluster import Cluster
from shardwise.data.cluster_catalog import (
    family_cluster,
    is_accelerator,
    load_accelerator,
    load_cluster,
    usual_family,
)
from shardwise.data.faults import InputError
from shardwise.data.limits import parse_limits
from shardwise.data.model_catalog import load_model
from shardwise.data.workload import OPTIMIZER_STATE_BYTES, Training
from shardwise.formulations.device_counts import Arithmetic, DeviceCounts, arithmetic, leanest_rows
from shardwise.formulations.objective import Objective
from shardwise.formulations.room import Room, candidate_of
from shardwise.solver.evaluate import cost_tables
from shardwise.solver.search import UNLIMITED, Ordered, Search, TimeUpError
from shardwise.solver.solve import build_instance, limit_reasons, no_degrees, offload_cure, solve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardwise.data.instance import Instance
    from shardwise.data.model import Model
    from shardwise.data.plan import Plan
    from shardwise.formulations.candidates import Grid
    from shardwise.solver.evaluate import Evaluation
    from shardwise.solver.result import Progress, Result

Answer = Literal["fits", "tight", "does not fit", "unknown"]

COMMON = ("a100-40gb", "a100", "h100", "h200", "b200", "mi300x", "l40s", "a10g")
"""The accelerators that are asked about most."""
MOST_DEVICES = 4096
"""Of an accelerator without a cluster."""
SEQ_LEN, GLOBAL_BATCH = 4096, 3360
"""3360 = 2^5 x 3 x 5 x 7: replicas and stages of almost any number divide it, and it keeps every pipeline full."""
GB = 1e9


@dataclass(frozen=True, slots=True)
class Change:
    """What another choice would need: the fewest devices, None where no number of them will do."""

    what: str
    devices: int | None


@dataclass(frozen=True)
class Fit:
    """Whether and how a model fits on an accelerator or a cluster.

    Attributes
    ----------
    arithmetic
        Bytes of weights, gradients and optimizer states alone, and how many devices hold them.
    devices
        The fewest that hold a plan; None where none was found.
    excluded
        No plan has so many devices or fewer.
    plan, evaluation
        One on the fewest devices.
    result
        The proof that it is the fastest on so many, where that was asked for.
    roomy
        The same for plans that leave the band of the prediction free, looked at where the answer is "tight".
    """

    asked: str
    instance: Instance
    arithmetic: Arithmetic
    devices: int | None
    excluded: int
    plan: Plan | None = None
    evaluation: Evaluation | None = None
    result: Result | None = None
    roomy: Change | None = None
    changes: tuple[Change, ...] = ()
    reason: str | None = None

    @property
    def answer(self) -> Answer:
        """ "fits", "tight" (within the band of the prediction), "does not fit" (proven) or "unknown" (not in time)."""
        if self.evaluation is not None:
            return "tight" if self.evaluation.verdict == "tight" else "fits"
        return "does not fit" if self.excluded >= self.most else "unknown"

    @property
    def most(self) -> int:
        """The most devices that were asked about."""
        return min(self.instance.cluster.device_count, self.instance.limits.range("devices").high)

    def to_dict(self) -> dict[str, Any]:
        """What `fit --json` writes of each."""
        sums, evaluation = self.arithmetic, self.evaluation
        return {
            "asked": self.asked,
            "cluster": self.instance.cluster.name,
            "accelerator": self.instance.accelerator.name,
            "answer": self.answer,
            "devices": self.devices,
            "nodes": None if evaluation is None else evaluation.nodes,
            "infeasible_up_to": self.excluded,
            "asked_up_to": self.most,
            "outside_the_band": None if self.roomy is None else asdict(self.roomy),
            "arithmetic": asdict(sums)
            | {name: getattr(sums, name) for name in ("bytes_per_param", "state_bytes", "least_devices")},
            "changes": [asdict(change) for change in self.changes],
            "reason": self.reason,
            "status": None if self.result is None else self.result.status,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "evaluation": None if evaluation is None else evaluation.to_dict(),
        }


def fit(
    model: Model | str | os.PathLike[str],
    on: Iterable[Cluster | str | os.PathLike[str]] | Cluster | str | os.PathLike[str] | None = None,
    workload: Training | None = None,
    *,
    rules: str = "megatron-core",
    profile: str | None = None,
    limits: Iterable[str] = (),
    quick: bool = False,
    changes: bool = False,
    time_limit_s: float | None = None,
    workers: int | None = None,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[Fit, ...]:
    """Find the fewest devices that a model trains on, and the fastest plan on so many.

    Parameters
    ----------
    on
        Accelerators, which stand for up to 4,096 devices in the nodes that are usual for them, or clusters; eight
        common accelerators without it, of those that run the precision.
    workload
        Without it 3,360 sequences a step of 4,096 tokens, or of as many as the model has positions for.
    quick
        Take the first plan that is met on so few devices: no proof that none is faster, no look outside the band.
    changes
        Look at other choices too: longer sequences, no recompute, another optimizer.
    time_limit_s
        For all of them together.

    Raises
    ------
    InputError
        With every fault of the input. That nothing fits is an answer, not an error.
    """
    if workload is None:
        workload = Training(usual_seq_len(model), GLOBAL_BATCH)
    every = instances(model, on, workload, rules, profile, list(limits), time_limit_s)
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    run = FitSearch(deadline, workers, seed, on_progress)
    return tuple(run.fit(asked, instance, quick=quick, changes=changes) for asked, instance in every.items())


def usual_seq_len(model: Model | str | os.PathLike[str]) -> int:
    """4,096 tokens, or as many as a model has positions for."""
    try:
        own = load_model(os.fspath(model)) if isinstance(model, str | os.PathLike) else model
    except InputError:  # told where the model is read
        return SEQ_LEN
    return min(SEQ_LEN, own.max_positions or SEQ_LEN)


def instances(
    model: Model | str | os.PathLike[str],
    on: Any,
    workload: Training,
    rules: str,
    profile: str | None,
    limits: list[str],
    time_limit_s: float | None = None,
) -> dict[str, Instance]:
    """An instance for each target, or every fault of all that was said."""
    targets = [on] if isinstance(on, str | os.PathLike | Cluster) else list(on or ())
    found: dict[str, Instance] = {}
    faults: dict[str, None] = {}
    if time_limit_s is not None and not 0 < time_limit_s < 1e9:
        faults[f"time_limit_s={time_limit_s} must be positive"] = None
    for target in targets or COMMON:
        name = target.name if isinstance(target, Cluster) else os.fspath(target)
        own = workload
        try:
            cluster = target if isinstance(target, Cluster) else cluster_of(name)
        except InputError as error:
            faults.update(dict.fromkeys(error.faults))
            cluster, own = load_cluster("dgx-h100:1"), Training(1, 1)  # the other parts are read all the same
        if not targets and isinstance(own, Training) and own.peak not in cluster.accelerators[0].flops_per_s:
            continue
        try:
            found[name] = build_instance(model, cluster, own, rules=rules, profile=profile, limits=limits)
        except InputError as error:
            faults.update(dict.fromkeys(error.faults))
    if faults:
        raise InputError(list(faults))
    if not found:
        raise InputError(f"workload.precision={workload.precision!r} runs on none of {', '.join(COMMON)}")
    return found


def cluster_of(name: str) -> Cluster:
    """The cluster that a word stands for: an accelerator's usual nodes, up to `MOST_DEVICES`, or a cluster as it is."""
    if not is_accelerator(name) or os.path.isfile(name):
        try:
            return load_cluster(name)
        except InputError as error:
            if ":" in name or name.endswith(".toml"):
                raise
            try:
                load_accelerator(name)
            except InputError as other:
                raise InputError("; ".join((*error.faults, *other.faults))) from None
            raise
    family = usual_family(name)
    return family_cluster(family, min(family.max_nodes, MOST_DEVICES // family.devices_per_node))


@dataclass(frozen=True)
class FitSearch:
    """How long and with what the searches run."""

    deadline: float | None
    workers: int | None
    seed: int
    on_progress: Callable[[Progress], None] | None

    def fit(self, asked: str, instance: Instance, *, quick: bool, changes: bool) -> Fit:
        """The answer for one instance."""
        tables = cost_tables(instance)
        counts, sums = DeviceCounts(tables, self.check_time), arithmetic(tables)
        said = Fit(asked, instance, sums, None, 0)
        try:
            for count in counts.ascending():
                own = _limited(instance, f"devices={count.devices}")
                found = (self.first(own, count.grids) if quick else None) or self.fastest(own)
                if found is not None:
                    said = replace(said, devices=count.devices, **found)
                    break
        except TimeUpError:
            return replace(said, excluded=counts.excluded, reason="the time limit passed before a plan was found")
        said = replace(said, excluded=counts.excluded)
        if said.devices is None:
            cure = offload_cure(Search(instance, self.deadline))
            return replace(said, reason=_why_not(counts, sums, said.most) + (f"; {cure}" if cure else ""))
        try:
            if said.answer == "tight" and not quick:
                said = replace(said, roomy=Change("outside the band", self.fewest(_outside_the_band(said))))
            for what, other in _others(instance) if changes else ():
                said = replace(said, changes=(*said.changes, Change(what, self.fewest(other))))
        except TimeUpError:
            pass
        return said

    def check_time(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeUpError

    def fewest(self, instance: Instance) -> int | None:
        """The fewest devices alone."""
        for count in DeviceCounts(cost_tables(instance), self.check_time).ascending():
            if count.certain or self.fastest(_limited(instance, f"devices={count.devices}")):
                return count.devices
        return None

    def fastest(self, instance: Instance) -> dict[str, Any] | None:
        """The fastest plan, as parts of a `Fit`; None where there is none."""
        left_s = None if self.deadline is None else max(self.deadline - time.monotonic(), 1e-3)
        result = solve(
            instance=instance,
            objective="devices",
            time_limit_s=left_s,
            workers=self.workers,
            seed=self.seed,
            on_progress=self.on_progress,
        )
        if result.status == "UNKNOWN":
            raise TimeUpError
        if result.plan is None:
            return None
        return {"plan": result.plan, "evaluation": result.evaluation, "result": result}

    def first(self, instance: Instance, grids: list[Grid]) -> dict[str, Any] | None:
        """The first plan of those with room and the smallest micro-batches, best bound first; None without one."""
        search = Search(instance, self.deadline, self.on_progress, Objective("devices"))
        search.waiting = deque((0.0, grid.rows(np.array(leanest_rows(grid)))) for grid in grids)
        search.bound(len(grids), inf)
        room = Room(search.splits)
        rows = (row for row in Ordered(search.bounded) if room.holds(candidate_of(row.grid, row.row)))
        search.try_rows(rows, UNLIMITED)
        best = search.incumbent
        return None if best is None else {"plan": best.plan, "evaluation": best.evaluation}


def _limited(instance: Instance, limit: str) -> Instance:
    return replace(instance, limits=parse_limits([*instance.limits.text, limit]))


def _outside_the_band(fit: Fit) -> Instance:
    """The instance where only plans are admitted that fit at the upper edge of the band; they need no fewer devices."""
    instance = _limited(fit.instance, f"devices>={fit.devices}")
    capacity = fit.arithmetic.usable_bytes * instance.profile.memory_quantile
    return _limited(instance, f"memory_gb<={capacity / (1 + instance.profile.memory_band) / GB:.6f}")


def _others(instance: Instance) -> Iterator[tuple[str, Instance]]:
    """Other choices that are cheap to look at."""
    workload, limits = instance.workload, instance.limits
    for factor in (2, 8):
        longer = factor * workload.seq_len
        with suppress(InputError, ValueError):  # longer than learned positions, or than any
            own = replace(instance, workload=replace(workload, seq_len=longer))
            yield f"sequences of {longer:,} tokens", own
    if limits.recompute is None:
        yield "without recompute", _limited(instance, "recompute=none")
    for optimizer in OPTIMIZER_STATE_BYTES:
        if optimizer != workload.optimizer:
            other: Any = optimizer
            yield f"with {optimizer}", replace(instance, workload=replace(workload, optimizer=other))


def _why_not(counts: DeviceCounts, sums: Arithmetic, most: int) -> str:
    """Why no number of devices will do."""
    name, usable = counts.tables.instance.accelerator.name, sums.usable_bytes / GB
    if sums.least_devices is None:
        return f"the reserve of the profile, {sums.reserve_bytes / GB:.1f} GB, is all of the {usable:.1f} GB of {name}"
    if sums.least_devices > most:
        return (
            f"states alone are {sums.state_bytes / GB:,.0f} GB: at least {sums.least_devices:,} devices of {usable:.1f} GB "
            f"usable, more than the {most:,} asked about"
        )
    if counts.leanest is None:
        return "; ".join(limit_reasons(counts.tables.instance) or [no_degrees(counts.tables.instance)])
    need, d = counts.leanest
    shape = f"tp={d.tp} pp={d.pp} dp={d.dp} micro_batch={d.micro_batch} zero={d.zero}"
    if need > sums.usable_bytes:
        return (
            f"with everything recomputed and spread evenly, the leanest degrees ({shape}) need at least "
            f"{need / GB:.1f} GB on some device; {name} has {usable:.1f} GB usable"
        )
    return f"no stages of whole layers fit into the {usable:.1f} GB usable of {name}, not even with {shape}"
