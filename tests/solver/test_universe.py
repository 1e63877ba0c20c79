"""The solver against exhaustive search over small universes: the optimum, the plan, the bound, and infeasibility."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from universe import (
    ETHERNET,
    INFINIBAND,
    NVLINK,
    PCIE,
    Corner,
    Judged,
    admitted,
    chunks_by_stage,
    corners,
    dense,
    documented_order,
    examples,
    has_experts,
    instance_of,
    instances,
    llama,
    model_of,
    module_sets,
    splits,
)

from shardwise.data.pipeline import schedules_of
from shardwise.data.plan import CP_COMM_TYPES, Degrees, Placement, Plan, Stage
from shardwise.data.workload import Training
from shardwise.solver import close
from shardwise.solver.close import new_solver
from shardwise.solver.evaluate import evaluate
from shardwise.solver.search import Search, TimeUpError
from shardwise.solver.solve import solve

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver

    from shardwise.data.cluster import Link
    from shardwise.data.instance import Instance
    from shardwise.data.plan import RankOrder
    from shardwise.solver.evaluate import Evaluation
    from shardwise.solver.result import Result

NO_PRUNE_LIMIT = 2000
TIGHT = 1e-5
"""Relative gap between an optimum and its bound: accumulated rounding only."""


def first_of_the_best(found: list[Judged], sets: list[str]) -> Judged:
    return min(found, key=lambda one: (one.units, documented_order(one.plan, sets)))


def agrees(instance: Instance, result: Result, found: list[Judged]) -> None:
    if not found:
        assert result.status == "INFEASIBLE"
        assert result.plan is None
        assert result.reason
        return
    assert result.status == "OPTIMAL"
    assert result.plan is not None
    assert result.evaluation is not None
    assert result.bound is not None
    assert result.gap is not None
    best = first_of_the_best(found, module_sets(instance))
    assert result.evaluation.objective_units == best.units
    assert result.evaluation.admitted
    assert result.value == evaluate(instance, result.plan).step_time_s
    assert result.bound <= min(one.seconds for one in found)
    assert result.gap < TIGHT
    assert result.plan in [one.plan for one in found]
    assert result.plan == best.plan
    for other in result.alternatives:
        assert evaluate(instance, other.plan).admitted
        assert other.value >= min(one.seconds for one in found)


@examples(40)
@given(instances())
def test_exhaustive_search_and_the_solver_agree(instance: Instance) -> None:
    result = solve(instance=instance, workers=1)
    agrees(instance, result, admitted(instance, result.report["unit_s"]))


@examples(25)
@given(instances())
def test_exhaustive_search_and_one_model_without_pruning_agree(instance: Instance) -> None:
    if len(list(itertools.islice(corners(instance), NO_PRUNE_LIMIT + 1))) > NO_PRUNE_LIMIT:
        return
    result = solve(instance=instance, workers=1, prune=False)
    agrees(instance, result, admitted(instance, result.report["unit_s"]))


FEW = 40
OTHER_OBJECTIVES = ("throughput-per-device", "energy", "cost", "devices")


def value_of(objective: str, evaluation: Evaluation, instance: Instance) -> float:
    """What a plan is worth, from its evaluation alone; the smallest is the best."""
    if objective == "energy":
        assert evaluation.energy is not None
        return evaluation.energy.joules_per_token.value
    if objective == "throughput-per-device":
        return -evaluation.tokens_per_s_per_device
    if objective == "devices":
        return evaluation.devices
    hours = evaluation.devices * evaluation.step_time_s / 3600
    return 2.0 * hours * 1e6 / instance.workload.tokens_per_step


@examples(50)
@given(instances(), st.sampled_from(OTHER_OBJECTIVES), st.booleans(), st.floats(0, 1), st.booleans())
def test_exhaustive_search_and_the_solver_agree_on_every_objective(
    instance: Instance, objective: str, late: bool, rank: float, prune: bool
) -> None:
    """Value, bound and infeasibility; with a deadline between the fastest and the slowest plan, or without. One model of all
    candidates where they are few: with the energy of each it is slow to close."""
    if not prune and len(list(itertools.islice(corners(instance), FEW + 1))) > FEW:
        prune = True
    found = admitted(instance, 1.0)
    steps = sorted(one.seconds for one in found)
    deadline = steps[int(rank * (len(steps) - 1))] * (1 + 1e-3) if late and steps else None
    result = solve(instance=instance, workers=1, objective=objective, deadline_s=deadline, prune=prune)
    every = [evaluate(instance, one.plan) for one in found]
    every = [own for own in every if deadline is None or own.step_time_s <= deadline]
    if not every:
        assert result.status == "INFEASIBLE"
        return
    assert result.status == "OPTIMAL"
    assert result.plan is not None
    assert result.value is not None
    assert result.bound is not None
    assert result.gap is not None
    own = evaluate(instance, result.plan)
    assert own.admitted
    assert deadline is None or own.step_time_s <= deadline
    sign = -1 if result.sense == "maximise" else 1
    assert math.isclose(sign * result.value, value_of(objective, own, instance), rel_tol=1e-9)
    best = min(value_of(objective, other, instance) for other in every)
    assert sign * result.bound <= best + abs(best) * 1e-12
    assert result.gap < TIGHT
    assert value_of(objective, own, instance) <= best + abs(best) * TIGHT
    if objective == "devices":
        fewest = min(other.step_time_s for other in every if other.devices == own.devices)
        assert own.step_time_s <= fewest * (1 + TIGHT)
    for alternative in result.alternatives:
        assert evaluate(instance, alternative.plan).admitted


@pytest.mark.parametrize("objective", ["step-time", "devices"])
def test_rows_without_a_place_do_not_take_others_of_their_shape_along(objective: str) -> None:
    """Seven replicas have no place on two nodes of six, eight have."""
    limits = ("dp>=7", "tp=1", "pp=1", "cp=1")
    instance = instance_of(llama(), (6, 6), (NVLINK, INFINIBAND), workload=Training(1024, 56), limits=limits)
    result = solve(instance=instance, workers=1, objective=objective)
    assert result.status == "OPTIMAL"
    assert result.plan is not None
    assert result.plan.degrees.dp == 8


@pytest.mark.parametrize("rules", ["megatron-core", "megatron-core+free-chunks", "free"])
@pytest.mark.parametrize(
    "limits",
    [
        ("stage[0]=1",),
        ("stage[5]=0", "pp=2"),
        ("stage[1]=stage[4]", "pp>=2"),
        ("stage[2]>=1", "stage[3]<=1"),
        ("stage[1]=5",),
    ],
)
def test_exhaustive_search_and_the_solver_agree_on_pinned_layers(rules: str, limits: tuple[str, ...]) -> None:
    small = ("tp=1", "cp=1", "micro_batch=1", "zero<=1", "dp<=2", "vpp<=2", "recompute=none")
    instance = instance_of(llama(6), (4,), rules=rules, workload=Training(1024, 8), limits=(*small, *limits))
    for prune in (True, False):
        result = solve(instance=instance, workers=1, prune=prune)
        agrees(instance, result, admitted(instance, result.report["unit_s"]))


@pytest.mark.parametrize("rules", ["megatron-core", "free"])
@pytest.mark.parametrize(
    ("links", "expected"),
    [((NVLINK, INFINIBAND), ("p2p", 1)), ((NVLINK, ETHERNET), ("a2a+p2p", 4)), ((PCIE, ETHERNET), ("a2a+p2p", 2))],
)
def test_exhaustive_search_and_the_solver_agree_on_hierarchies(
    rules: str, links: tuple[Link, Link], expected: tuple[str, int]
) -> None:
    """Over slow links between nodes a hierarchy exchanges within them, over fast ones a ring hides what it sends."""
    model = model_of([dense(1024, kv_heads=8)] * 2, 1024, 32000, tied=False)
    limits = ("cp=8", "recompute=none", "micro_batch=1", "dp_replicate=1")
    instance = instance_of(model, (4, 4), links, rules=rules, limits=limits, workload=Training(65536, 1))
    for prune in (True, False):
        result = solve(instance=instance, workers=1, prune=prune)
        agrees(instance, result, admitted(instance, result.report["unit_s"]))
        assert result.plan is not None
        assert (result.plan.degrees.cp_comm_type, result.plan.degrees.cp_a2a) == expected


def test_nodes_that_are_kept_free_are_left_out_of_the_best_plan() -> None:
    def nodes(*limits: str) -> int:
        instance = instance_of(
            llama(), (2, 2, 2, 2), (NVLINK, INFINIBAND), workload=Training(1024, 16), limits=("zero=1", *limits)
        )
        result = solve(instance=instance, workers=1)
        assert result.evaluation is not None
        return result.evaluation.nodes

    assert nodes() == 4
    assert nodes("free_nodes>=1") <= 3
    assert nodes("free_nodes=3") == 1


@pytest.mark.parametrize("objective", ["step-time", "energy", "devices"])
def test_a_deadline_of_just_the_shortest_step_is_met(objective: str) -> None:
    instance = instance_of(
        llama(4), workload=Training(1024, 64), limits=("micro_batch=1", "pp>=2", "vpp=1", "dp=1", "cp=1")
    )
    fastest = solve(instance=instance, workers=1)
    assert fastest.value is not None
    result = solve(instance=instance, workers=1, objective=objective, deadline_s=fastest.value)
    assert result.status == "OPTIMAL"
    assert result.evaluation is not None
    assert result.evaluation.step_time_s <= fastest.value * (1 + TIGHT)
    earlier = solve(instance=instance, workers=1, objective=objective, deadline_s=fastest.value * 0.99)
    assert earlier.status == "INFEASIBLE"
    assert "deadline" in earlier.reason[0]


@examples(15)
@given(instances(), st.floats(0, 1), st.sampled_from(("step-time", "energy", "devices")))
def test_bounds_of_a_search_that_is_stopped_anywhere_are_below_every_plan(
    instance: Instance, when: float, objective: str
) -> None:
    """Stopped while rows are bounded, tried or pruned, not only by CP-SAT."""
    calls = 0
    limit = int(200**when)

    def check(search: Search) -> None:
        nonlocal calls
        calls += 1
        if calls > limit:
            raise TimeUpError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "check_time", check)
        result = solve(instance=instance, workers=1, objective=objective)
    found = admitted(instance, 1.0)
    assert result.status != "INFEASIBLE" or not found
    if result.bound is None:
        return
    every = [evaluate(instance, one.plan) for one in found]
    if objective == "step-time":
        assert result.bound <= min(own.step_time_s for own in every)
    else:
        assert result.bound <= min(value_of(objective, own, instance) for own in every) * (1 + 1e-12)
    if objective == "devices":
        fewest = min(own.devices for own in every)
        assert result.report["step_time_bound_s"] <= min(o.step_time_s for o in every if o.devices == fewest)


@examples(15)
@given(instances(), st.integers(0, 1000))
def test_the_same_plan_with_two_workers_and_any_seed(instance: Instance, seed: int) -> None:
    one, two = solve(instance=instance, workers=1), solve(instance=instance, workers=2, seed=seed)
    assert one.status == two.status
    assert one.plan == two.plan
    assert one.value == two.value
    assert one.bound == two.bound


@examples(20)
@given(instances(), st.sampled_from((1e-7, 1e-4, 1e-3)))
def test_a_bound_at_the_time_limit_is_below_every_plan(instance: Instance, limit: float) -> None:
    """CP-SAT is stopped early, so that its own bound and those of open candidates are what is reported."""

    def stopped(search: Search, workers: int, seed: int) -> CpSolver:
        solver = new_solver(search, workers, seed)
        solver.parameters.max_deterministic_time = limit
        return solver

    if len(list(itertools.islice(corners(instance), NO_PRUNE_LIMIT + 1))) > NO_PRUNE_LIMIT:
        return
    for prune in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(close, "new_solver", stopped)
            result = solve(instance=instance, workers=1, prune=prune)
        found = admitted(instance, result.report["unit_s"])
        if result.bound is not None:
            assert result.bound <= min(one.seconds for one in found)
        if result.status == "INFEASIBLE":
            assert not found


# -- the reference itself ----------------------------------------------------------------------------------------------


@examples(20)
@given(instances(), st.data())
def test_the_reference_leaves_out_only_plans_that_evaluate_rejects(instance: Instance, data: st.DataObject) -> None:
    """Degrees and placements drawn freely: those of the universe are legal, and those outside it break a rule or a limit."""
    layers, depth = len(instance.model.layers), len(instance.levels)
    inside = set(corners(instance))
    orders: tuple[RankOrder, ...] = ("tp-dp-pp", "tp-pp-dp")
    for _ in range(20):
        factors = st.lists(st.sampled_from((1, 1, 2, 3, 4)), min_size=depth, max_size=depth).map(tuple)
        placement = Placement(
            data.draw(factors),
            data.draw(factors),
            data.draw(factors),
            data.draw(st.sampled_from(orders)),
            data.draw(factors),
        )
        ranks = prod(placement.tp) * prod(placement.cp) * prod(placement.dp)
        etp = data.draw(st.sampled_from((1, prod(placement.tp))))
        cp = prod(placement.cp)
        algorithms = [(name, 1) for name in CP_COMM_TYPES[:3]]
        algorithms += [(CP_COMM_TYPES[3], n) for n in range(2, cp) if cp % n == 0]
        algorithm, near = data.draw(st.sampled_from(algorithms))
        degrees = Degrees(
            cp=cp,
            ep=data.draw(st.sampled_from([n for n in (1, 2, 4) if ranks % (n * etp) == 0])),
            etp=etp,
            tp=prod(placement.tp),
            pp=prod(placement.pp),
            dp=prod(placement.dp),
            vpp=data.draw(st.sampled_from((1, 1, 2, 3))),
            micro_batch=data.draw(st.sampled_from((1, 2, 3, 4))),
            zero=data.draw(st.integers(0, 3)),
            sequence_parallel=data.draw(st.booleans()),
            cp_comm_type=algorithm,
            cp_a2a=near,
        )
        micro_batches = max(instance.workload.global_batch // (degrees.dp * degrees.micro_batch), 1)
        possible = splits(layers, degrees.pp, degrees.vpp)
        chunks = data.draw(st.sampled_from(possible)) if possible else (layers, *(0,) * (degrees.virtual_stages - 1))
        schedule = data.draw(st.sampled_from(schedules_of(degrees.pp, degrees.vpp) or (degrees.schedule,)))
        if schedule == "dualpipe":  # evaluated, and not in the universe
            schedule = "1f1b"
        stages = tuple(Stage(own) for own in chunks_by_stage(chunks, degrees.pp, schedule))
        evaluation = evaluate(instance, Plan(degrees, stages, placement, micro_batches, schedule=schedule))
        limit_faults = [fault for fault in evaluation.limit_faults if not fault.startswith(("recompute", "layer"))]
        # Where both orders reach a placement the universe holds it once, under the first.
        twins = {Corner(degrees, replace(placement, rank_order=order), micro_batches, schedule) for order in orders}
        pointless = degrees.zero > 1 and degrees.cp * degrees.dp == 1
        split = has_experts(instance) or degrees.etp == degrees.tp
        if not evaluation.faults and not limit_faults and not pointless and split:
            assert inside & twins
        if Corner(degrees, placement, micro_batches, schedule) in inside:
            assert not evaluation.faults
            assert not limit_faults
