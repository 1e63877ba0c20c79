"""The solver agrees with exhaustive search on the optimum, on infeasibility and on which of equal optima it returns."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from reference import TooManyError, admitted, tie_key
from small import instances

from shardwise.data.faults import InputError
from shardwise.data.instance import Instance
from shardwise.data.plan import Plan
from shardwise.solver.evaluate import evaluate
from shardwise.solver.result import Result
from shardwise.solver.solve import solve


def universe(instance: Instance, unit_s: float) -> list[tuple[int, Plan]]:
    try:
        return admitted(instance, unit_s)
    except TooManyError:
        assume(False)
        raise


def check(instance: Instance, result: Result) -> None:
    every = universe(instance, result.report["unit_s"])
    if not every:
        assert result.status == "INFEASIBLE"
        assert result.plan is None
        assert result.reason
        return
    assert result.status == "OPTIMAL"
    assert result.plan is not None
    assert result.evaluation is not None
    assert result.value is not None
    assert result.bound is not None
    best = min(units for units, _ in every)
    assert result.evaluation.objective_units == best
    assert result.value == evaluate(instance, result.plan).step_time_s
    # The bound holds for seconds too, for every plan of the universe.
    near = [plan for units, plan in every if units <= best + 4 * result.report["rounding_s"] / result.report["unit_s"]]
    assert result.bound <= min(evaluate(instance, plan).step_time_s for plan in near)
    equal = [plan for units, plan in every if units == best]
    assert result.plan in equal
    assert tie_key(result.plan) == min(tie_key(plan) for plan in equal)


@given(instances())
def test_pruned_search_agrees_with_exhaustive_search(instance: Instance) -> None:
    check(instance, solve(instance=instance, workers=1))


@given(instances(most_layers=4))
def test_one_model_over_all_candidates_agrees_with_exhaustive_search(instance: Instance) -> None:
    try:
        result = solve(instance=instance, workers=1, prune=False)
    except InputError as error:
        assert "candidates" in error.faults[0]
        assume(False)
        return
    check(instance, result)


@given(instances())
def test_workers_and_seed_do_not_change_the_plan(instance: Instance) -> None:
    one, two = solve(instance=instance, workers=1), solve(instance=instance, workers=2, seed=7)
    assert one.status == two.status
    assert one.plan == two.plan


def test_too_many_candidates_for_one_model_are_refused_with_the_count() -> None:
    from shardwise.data.workload import Training

    with pytest.raises(InputError, match=r"--no-prune: \d+ candidates, at most 2000"):
        solve("llama-3.1-70b", "dgx-h100:8", Training(8192, 512), prune=False)
