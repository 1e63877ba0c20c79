"""Solve an instance: files and words in, a `Result` out."""

from __future__ import annotations

import math
import os
import platform
import time
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.data.cluster import Cluster
from shardwise.data.cluster_catalog import load_cluster
from shardwise.data.faults import InputError
from shardwise.data.instance import Instance
from shardwise.data.limits import parse_limits
from shardwise.data.model import Model
from shardwise.data.model_catalog import load_model
from shardwise.data.profile import load_profile
from shardwise.data.rules import MEGATRON_CORE, absent_faults, load_rules, tensor_faults
from shardwise.data.rules import free_chunks as without_even_chunks
from shardwise.data.workload import Training
from shardwise.formulations.bounds import least_memory_bytes
from shardwise.formulations.candidates import divisors
from shardwise.formulations.coefficients import searched_sets
from shardwise.formulations.objective import OBJECTIVES, Objective
from shardwise.formulations.room import Room
from shardwise.solver.alternatives import alternatives, meet_others
from shardwise.solver.close import Statistics, close_waves, settle
from shardwise.solver.result import Progress, Result
from shardwise.solver.robust import robustness
from shardwise.solver.search import NEAR, Search, TimeUpError
from shardwise.solver.tighten import tighten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ALTERNATIVES, MOST_ALTERNATIVES = 5, 100


def build_instance(
    model: Model | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    workload: Training,
    *,
    rules: str = "megatron-core",
    profile: str | None = None,
    limits: Iterable[str] = (),
) -> Instance:
    """Read and cross-check everything that a solve needs.

    Parameters
    ----------
    model, cluster
        Catalogue names, paths, or values of `load_model` and `load_cluster`.
    rules
        The framework that has to accept the plans: "megatron-core", "torchtitan", "deepspeed", "accelerate", "mindspeed",
        or "free" for everything that divides.
    limits
        Such as `["pp<=8", "recompute=none"]`.
    profile
        That of the rule pack without it.

    Raises
    ------
    InputError
        With every fault of every part.
    """
    faults: list[str] = []

    def read(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except InputError as error:
            faults.extend(error.faults)
            return None

    parts = {
        "model": model if isinstance(model, Model) else read(load_model, os.fspath(model)),
        "cluster": cluster if isinstance(cluster, Cluster) else read(load_cluster, os.fspath(cluster)),
        "rules": (pack := read(load_rules, rules)),
        "profile": read(load_profile, profile or (pack or MEGATRON_CORE).profile),
        "limits": read(parse_limits, limits),
    }
    if not isinstance(workload, Training):
        faults.append(f"workload={workload!r} must be a Training")
    if faults:
        raise InputError(faults)
    return Instance(workload=workload, **parts)


def solve(
    model: Model | str | os.PathLike[str] | None = None,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    workload: Training | None = None,
    *,
    instance: Instance | None = None,
    rules: str | None = None,
    profile: str | None = None,
    limits: Iterable[str] = (),
    objective: str = "step-time",
    price: float | None = None,
    deadline_s: float | None = None,
    time_limit_s: float | None = None,
    workers: int | None = None,
    seed: int = 0,
    prune: bool = True,
    free_chunks: bool = False,
    top: int = ALTERNATIVES,
    on_progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Find the best plan for an objective and prove how good it is.

    Parameters
    ----------
    model, cluster
        Catalogue names, paths, or values. Or give a ready `instance`.
    workload
        What is trained: sequence length, global batch, precision, optimizer.
    instance
        Instead of model, cluster, workload, rules, profile and limits, none of which may be given beside it.
    rules
        The framework that has to accept the plan, as in `build_instance`; megatron-core without it.
    profile
        That of the rule pack without it.
    limits
        Such as `["pp<=8", "recompute=none"]`.
    objective
        "step-time"; "throughput-per-device" (tokens a second and device, the most); "energy" (joules a token at the
        wall); "cost" (USD per million tokens); "devices" (the fewest, then the fastest plan on so many).
    price
        USD of a device-hour for "cost", where the catalogue's is not wanted or there is none.
    deadline_s
        Only plans whose step lasts no longer than this, to within the rounding that the report states (about 1e-6 of it).
    time_limit_s
        After this many seconds the best plan so far is returned with its bound.
    workers, seed
        Of CP-SAT; as many workers as there are cores, 8 at most, without a number.
    prune
        False puts every candidate into one CP-SAT model (at most 2,000).
    free_chunks
        Search any contiguous split into chunks too, where with vpp > 1 only even ones are otherwise.
    top
        So many alternatives at most: the best plans met that differ from every better one in dp, tp, pp, cp, ep, zero or
        dp_replicate; 0 for none. They are not proven to be the next best.
    on_progress
        Called with a `Progress` a few times a second.

    Returns
    -------
    Result
        The plan with its value, bound and gap, or why there is none. Value and bound do not depend on `workers` or `seed`
        where the search ends.

    Raises
    ------
    InputError
        With every fault of the input. No plan is not an error: see `Result.status`.
    """
    faults = []
    if objective not in OBJECTIVES:
        faults.append(f"objective={objective!r} must be one of {', '.join(OBJECTIVES)}")
    for name, number, most in (
        ("price", price, 1e9),
        ("deadline_s", deadline_s, 1e12),
        ("time_limit_s", time_limit_s, 1e9),
    ):
        if number is not None and not 0 < number < most:
            faults.append(f"{name}={number} must be positive")
    if workers is not None and not 0 < workers <= 4096:
        faults.append(f"workers={workers} must be between 1 and 4096")
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MOST_ALTERNATIVES:
        faults.append(f"top={top!r} must be a whole number between 0 and {MOST_ALTERNATIVES}")
    if not 0 <= seed < 2**31:
        faults.append(f"seed={seed} must be between 0 and 2^31 - 1")
    if instance is None:
        if model is None or cluster is None or workload is None:
            faults.append("give model, cluster and workload, or an instance")
        else:
            try:
                instance = build_instance(
                    model, cluster, workload, rules=rules or "megatron-core", profile=profile, limits=limits
                )
            except InputError as error:
                faults += error.faults
    else:
        parts = {"model": model, "cluster": cluster, "workload": workload, "rules": rules, "profile": profile}
        beside = [name for name, part in (*parts.items(), ("limits", tuple(limits) or None)) if part is not None]
        faults += [f"{name} cannot be given beside an instance, which has its own" for name in beside]
    goal = Objective(objective, price)  # type: ignore[arg-type]
    if instance is not None and objective in OBJECTIVES:
        faults += goal.faults(instance)
    if faults or instance is None:
        raise InputError(faults)
    if free_chunks and instance.rules.even_chunks:
        instance = replace(instance, rules=without_even_chunks(instance.rules))
    started = time.monotonic()
    deadline = None if time_limit_s is None else started + time_limit_s
    search = Search(instance, deadline, on_progress, goal)
    search.longest_s = math.inf if deadline_s is None else deadline_s
    run = Run(Statistics(), workers if workers is not None else min(8, os.cpu_count() or 1), seed, prune, top)
    if goal.name == "devices":
        search, closed = fewest_devices(search, run)
    else:
        closed = run.whole(search)
    return _result(search, run, closed, time.monotonic() - started)


@dataclass(frozen=True)
class Run:
    """How searches are run to their end."""

    statistics: Statistics
    workers: int
    seed: int
    prune: bool
    top: int

    def whole(self, search: Search) -> bool:
        """Whether every candidate was pruned by a bound or closed."""
        try:
            search.enumerate(prune=self.prune)
            return self.waiting(search)
        except TimeUpError:
            return False

    def waiting(self, search: Search) -> bool:
        """The same of the candidates that wait in a search; raises `TimeUpError`."""
        grids = [grid for _, grid in search.waiting]
        left = search.first_incumbent()
        if not self.prune:
            search.all_options(grids)
            search.unopened_bound_s = None
            closed = close_waves(search, self.statistics, self.workers, self.seed, wave=None)
        elif search.incumbent is None:
            search.tally.counts["pruned_by_split_bound"] = sum(len(own.grid) for own in search.bounded) - len(left)
            search.unopened_bound_s = None
            search.open_all(left)
            closed = close_waves(search, self.statistics, self.workers, self.seed)
        else:
            search.probe(search.within())
            search.prune(search.within())
            search.try_again()
            tighten(search)
            closed = close_waves(search, self.statistics, self.workers, self.seed)
        if closed and search.incumbent is not None:
            settle(search, self.statistics, self.seed)
        return closed


def fewest_devices(every: Search, run: Run) -> tuple[Search, bool]:
    """(O4) One search after the other, each with one number of devices more, until one has a plan: the last search, and
    whether it closed every candidate. What has no room is left out before any step is looked at."""
    search, room = every, Room(every.splits)
    try:
        every.enumerate(prune=run.prune)
        every.bound(len(every.waiting), math.inf)
        grids = [(own.rows(own.step_s <= every.longest_s * NEAR)) for own in every.bounded]
        counts = sorted({n for own in grids for n in np.unique(own.grid.devices).tolist()})
        for count in counts:
            search = every.of_devices(count, grids)
            search.keep(room.rows)
            if not run.waiting(search):
                return search, False
            if search.incumbent is not None:
                break
            every.check_time()
    except TimeUpError:
        return search, False
    return search, True


def _result(search: Search, run: Run, closed: bool, wall_s: float) -> Result:
    instance, incumbent, goal = search.instance, search.incumbent, search.objective
    report: dict[str, Any] = {
        "universe": universe(instance, search.longest_s),
        "candidates": search.tally.to_dict() | {"solved": run.statistics.candidates},
        "cp_sat": run.statistics.to_dict(),
        "unit_s": search.unit_s,
        "rounding_s": search.excess_units * search.unit_s,
        "wall_time_s": wall_s,
        "workers": run.workers,
        "seed": run.seed,
        "pruning": run.prune,
        "assumed": {"model": list(instance.model.assumed), "cluster": list(instance.cluster.assumed)},
        "versions": versions(),
    }
    if incumbent is None:
        status = "INFEASIBLE" if closed else "UNKNOWN"
        ended = "the search was interrupted" if search.deadline is None else "the time limit passed"
        reason = infeasible_reasons(search) if closed else (f"{ended} before a plan was found",)
        search.report(status, None, 0, force=True)
        nothing = (None, None, None, None)
        return Result(status, goal.name, goal.unit, *nothing, reason, report=report, sense=goal.sense)  # type: ignore[arg-type]
    bound_s = _bound_s(search, closed)
    search.report("OPTIMAL" if closed else "FEASIBLE", bound_s, 0 if closed else len(search.open), force=True)
    from shardwise.data.instance_document import instance_document  # reads pydantic, which start-up can do without

    document = incumbent.evaluation.to_dict()
    plan = replace(incumbent.plan, instance=instance_document(instance), evaluation=document)
    report["idle_devices"] = incumbent.evaluation.idle_devices
    value, bound = (goal.value(instance, seconds) for seconds in (incumbent.seconds, bound_s))
    if goal.name == "devices":
        report["step_time_bound_s"] = bound
        value = bound = float(incumbent.evaluation.devices)
    if closed and run.top:
        meet_others(search, run.top)
    others = alternatives(search, run.top)
    robust = robustness(search.tables, [incumbent.plan, *(other.plan for other in others)], goal.name, seed=run.seed)
    for index, other in enumerate(others, start=1):
        share, regret = robust.of(index)
        others[index - 1] = replace(other, best_share=share, expected_regret=regret)
    return Result(
        "OPTIMAL" if closed else "FEASIBLE",
        goal.name,
        goal.unit,
        value,
        bound,
        plan,
        incumbent.evaluation,
        alternatives=tuple(others),
        robustness=robust,
        report=report,
        sense=goal.sense,
    )


def _bound_s(search: Search, closed: bool) -> float:
    """A float lower bound on V of every plan: the weakest of what is open, less what rounding may have added."""
    incumbent = search.incumbent
    assert incumbent is not None
    worths = [search.worth(incumbent.candidate), *(option.worth for option in search.open)]
    excess = search.excess_units * max(worth.multiplier * worth.weight for worth in worths)
    value = incumbent.value
    if not closed:
        value = min([value, *(option.worth.multiplier * option.bound for option in search.open)])
    if not closed and not search.open and search.unopened_bound_s is None:
        return 0.0
    bound = (value - excess) * search.unit_s
    if not closed and search.unopened_bound_s is not None:
        bound = min(bound, search.unopened_bound_s)
    return max(0.0, min(bound, incumbent.seconds))


def universe(instance: Instance, longest_s: float = math.inf) -> dict[str, Any]:
    """The finite set of plans that "optimal" and "bound" speak of, in words and numbers."""
    rules, workload = instance.rules, instance.workload
    hosts: dict[str, Any] = {"offload_optimizer": list(workload.offload_shares)} if workload.offload_optimizer else {}
    hosts |= {"offload_param": True} if workload.offload_param else {}
    hosts |= {"offload_activations": True} if workload.offload_activations else {}
    return {
        "model": instance.model.name,
        "layers": len(instance.model.layers),
        "cluster": instance.cluster.name,
        "devices": instance.cluster.device_count,
        "rules": f"{rules.name} {rules.version}",
        "profile": instance.profile.name,
        "schedules": [name for name in rules.schedules if instance.limits.schedule in (None, name)],
        "zero_stages": list(rules.zero_stages),
        **hosts,
        "cp_comm_types": [name for name in rules.context if instance.limits.cp_comm_type in (None, name)],
        "max_vpp": rules.max_vpp,
        "max_micro_batch": rules.max_micro_batch,
        "recompute": _recompute_universe(instance),
        "stages": "any contiguous split; with vpp > 1 even chunks, the first and the last free"
        if rules.even_chunks
        else "any contiguous split",
        "placements": "rank order " + " or ".join(rules.rank_orders)
        if rules.linear_ranks
        else "any factoring over the levels",
        "limits": [*instance.limits.text, *([f"step time <= {longest_s:g} s"] if longest_s < math.inf else [])],
    }


def _recompute_universe(instance: Instance) -> str:
    """In words: how many settings, and what selective recompute may repeat where a limit says so."""
    settings = "one setting for all stages" if instance.rules.uniform_recompute else "a setting per stage"
    if instance.limits.recompute_modules is None:
        return settings
    return f"{settings}; selective repeats {' or '.join(searched_sets(instance))}"


def limit_reasons(instance: Instance) -> list[str]:
    """The limits that alone leave no plan, each with the rule or the size that it is against."""
    limits, devices = instance.limits, instance.cluster.device_count
    reasons: list[str] = []
    fixed = limits.range("tp")
    if fixed.low == fixed.high:
        reasons += tensor_faults(instance.rules, instance.model, fixed.low, False, instance.workload.seq_len)
    reasons += absent_faults(instance.rules, **{name: allowed.low for name, allowed in limits.ranges.items()})
    if not any(stage in limits.range("zero") for stage in instance.rules.zero_stages):
        stages = ", ".join(map(str, instance.rules.zero_stages))
        reasons.append(f"the limits on zero admit none of the stages {stages} ({instance.rules.name})")
    for name in ("tp", "pp", "dp", "devices"):
        low = limits.range(name).low
        if low > devices:
            reasons.append(f"{name}>={low} asks for more devices than the {devices} of cluster {instance.cluster.name}")
    nodes = len(instance.cluster.leaves)
    if limits.range("free_nodes").low >= nodes:
        reasons.append(
            f"free_nodes>={limits.range('free_nodes').low} leaves none of the {nodes} nodes of cluster {instance.cluster.name}"
        )
    for name, most in (("vpp", instance.rules.max_vpp), ("micro_batch", instance.rules.max_micro_batch)):
        if limits.range(name).low > most:
            reasons.append(
                f"{name}>={limits.range(name).low} is above the maximum of the universe, {most}; evaluate takes it"
            )
    batch = instance.workload.global_batch
    for name in ("dp", "micro_batch"):
        allowed = limits.range(name)
        if not any(value in allowed for value in divisors(batch)):
            reasons.append(f"the limits on {name} admit no divisor of global_batch={batch}")
    if limits.schedule not in (None, *instance.rules.schedules):
        reasons.append(
            f"schedule={limits.schedule} is not one of {', '.join(instance.rules.schedules)} ({instance.rules.name})"
        )
    if limits.cp_comm_type not in (None, *instance.rules.context):
        reasons.append(
            f"cp_comm_type={limits.cp_comm_type} is not one of {', '.join(instance.rules.context)} ({instance.rules.name})"
        )
    layers = len(instance.model.layers)
    if limits.range("pp").low > layers + 2:
        reasons.append(f"pp>={limits.range('pp').low} needs more than layers={layers} + 2 chunks")
    return reasons


def no_degrees(instance: Instance) -> str:
    """That limits leave no plan together, where none of them does alone."""
    return "no degrees satisfy the rules and the limits together: " + ", ".join(instance.limits.text or ("no limits",))


def infeasible_reasons(search: Search) -> tuple[str, ...]:
    """Why the universe holds no plan, the most telling reason first."""
    instance = search.instance
    limits, reasons = instance.limits, limit_reasons(instance)
    if reasons:
        return tuple(reasons)
    if search.tally.enumerated == 0:
        return (no_degrees(instance),)
    if search.longest_s < math.inf:
        return (
            f"no plan has a step of at most {search.longest_s:g} s, the deadline, within the memory and the limits",
        )
    if limits.pinned or limits.together:
        return ("no plan that fits the memory has its layers where the limits put them: " + ", ".join(limits.text),)
    return (memory_reason(search),)


def with_offload(instance: Instance) -> Instance | None:
    """The instance whose plans may leave the optimizer to the host, where that is known and the rules have it, and it is not
    asked for already."""
    if instance.workload.offload_optimizer:
        return None
    try:
        return replace(instance, workload=replace(instance.workload, offload_optimizer=1.0))
    except InputError:
        return None


def offload_cure(search: Search) -> str:
    """That a plan fits with the optimizer on the host, where one is met in the time left."""
    instance = with_offload(search.instance)
    if instance is None:
        return ""
    other = Search(instance, search.deadline, None, search.objective)
    try:
        other.enumerate()
        other.first_incumbent()
    except TimeUpError:
        return ""
    if other.incumbent is None:
        return ""
    d = other.incumbent.plan.degrees
    shape = f"tp={d.tp} pp={d.pp} dp={d.dp} micro_batch={d.micro_batch} zero={d.zero}"
    return f"with --offload-optimizer 1 it fits ({shape})"


def memory_reason(search: Search) -> str:
    """The least memory that any plan of the universe could need, against what a device has."""
    instance = search.instance
    need, degrees = least_memory_bytes(search.best_case, search.enumerate())
    capacity = instance.memory_limit_bytes
    shape = f"tp={degrees.tp} pp={degrees.pp} dp={degrees.dp} micro_batch={degrees.micro_batch} zero={degrees.zero}"
    has, cure = f"{capacity / 1e9:.1f} GB usable", "Use more devices, devices with more memory, or a shorter sequence"
    offloaded = offload_cure(search)
    cure += f"; or the host's memory: {offloaded}" if offloaded else ""
    if need > capacity:
        return (
            f"memory: no plan fits. With everything recomputed and spread evenly, the leanest degrees ({shape}) need at "
            f"least {need / 1e9:.1f} GB on some device; {instance.accelerator.name} has {has}. {cure}"
        )
    return (
        f"memory: no plan fits. {instance.accelerator.name} has {has}; spread evenly over all devices the leanest degrees "
        f"({shape}) would need {need / 1e9:.1f} GB, but whole layers, and what is in flight on the fullest stage, need more "
        f"than that under every setting. {cure}"
    )


def versions() -> dict[str, str]:
    """Versions that the result depends on."""
    names = ("shardwise", "ortools", "numpy")
    found = {name: metadata.version(name) for name in names}
    return found | {"python": platform.python_version(), "machine": platform.machine()}
