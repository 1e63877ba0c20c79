"""(Q1)-(Q5): how sure the choice among plans is, and which plans it is among."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import shardwise as sw
from shardwise.data.profile import BASE, load_profile, profile_document
from shardwise.solver.evaluate import cost_tables, evaluate
from shardwise.solver.fitting import TIME_WIDTHS
from shardwise.solver.render import show_result
from shardwise.solver.robust import (
    LEFT_OUT,
    TIED,
    Robustness,
    drawn_constants,
    robustness,
    shares_and_regrets,
    step_times_under,
)


@lru_cache(maxsize=4)
def instance(cluster: str = "dgx-h100:2") -> sw.Instance:
    return sw.build_instance("llama-3.1-8b", cluster, sw.Training(4096, 64))


@lru_cache(maxsize=8)
def solved(objective: str = "step-time", top: int = 5) -> sw.Result:
    return sw.solve(instance=instance(), objective=objective, workers=1, top=top)


def plans(result: sw.Result) -> list[sw.Plan]:
    assert result.plan is not None
    return [result.plan, *(other.plan for other in result.alternatives)]


def judged(seed: int = 0, spread: float = 1.0) -> Robustness:
    return robustness(cost_tables(instance()), plans(solved()), seed=seed, spread=spread)


def test_the_same_seed_draws_the_same_constants_and_another_seed_others() -> None:
    assert judged(seed=3) == judged(seed=3)
    assert judged(seed=3).expected_regret != judged(seed=4).expected_regret


def test_shares_sum_to_one_and_no_regret_is_negative() -> None:
    robust = judged()
    assert len(robust.best_share) == len(robust.expected_regret) == len(plans(solved())) > 1
    assert sum(robust.best_share) == pytest.approx(1.0, abs=1e-12)
    assert min(robust.expected_regret) >= 0


def test_the_optimum_wins_every_draw_when_nothing_is_spread() -> None:
    robust = judged(spread=0.0)
    assert robust.best_share == (1.0, *[0.0] * len(solved().alternatives))
    assert robust.expected_regret[0] == pytest.approx(0.0, abs=TIED)
    assert robust.recommended == 0
    for regret, other in zip(robust.expected_regret[1:], solved().alternatives, strict=True):
        assert regret == pytest.approx(other.value / (solved().value or 1.0) - 1, rel=1e-6)


def test_a_plan_that_every_constant_makes_slower_never_wins() -> None:
    best = plans(solved())[0]
    repeats = replace(best, stages=tuple(replace(s, recompute="full", recompute_layers=s.layers) for s in best.stages))
    robust = robustness(cost_tables(instance()), [best, repeats], draws=500, spread=3.0)
    assert robust.best_share == (1.0, 0.0)
    assert robust.expected_regret[0] == 0
    assert robust.expected_regret[1] > 0
    assert robust.recommended == 0


def test_times_without_spread_are_those_of_an_evaluation() -> None:
    own = plans(solved())
    constants = drawn_constants(instance().profile, 2, 0.0, 0)
    times = step_times_under(cost_tables(instance()), own, constants)
    assert times[:, 0] == pytest.approx([evaluate(instance(), plan).step_time_s for plan in own], rel=1e-9)
    assert (times[:, 0] == times[:, 1]).all()


def test_times_under_a_draw_are_those_of_a_profile_with_its_constants() -> None:
    own = plans(solved())
    constants = drawn_constants(instance().profile, 3, 1.0, 7)
    times = step_times_under(cost_tables(instance()), own, constants)
    third: dict[str, Any] = {name: float(values[2]) for name, values in constants.items()}
    changed = replace(instance().profile, **third)
    under = replace(instance(), profile=changed)
    assert times[:, 2] == pytest.approx([evaluate(under, plan).step_time_s for plan in own], rel=1e-9)


def test_drawn_constants_stay_within_bounds_which_hold_the_value() -> None:
    bounds = profile_document(BASE)["constants"]
    odd = replace(load_profile("megatron-core"), gemm=9.0, dp_comm_overlap=1.0)
    drawn = drawn_constants(odd, 1000, 5.0, 1)
    assert set(drawn) == set(TIME_WIDTHS) - {"sync_contention"}
    for name, values in drawn.items():
        low, high = bounds[name]["bounds"]
        assert min(low, getattr(odd, name)) <= values.min() <= values.max() <= max(high, getattr(odd, name))
    assert drawn["gemm"].max() == 9.0


def test_equal_plans_leave_their_draws_to_the_first() -> None:
    worth = np.array([[1.0, 2.0, 3.0], [1.0, 2.0 * (1 - TIED / 2), 4.0], [3.0, 1.0, 3.0]])
    share, regret = shares_and_regrets(worth)
    assert share == pytest.approx([2 / 3, 0, 1 / 3])
    assert regret == pytest.approx([1 / 3, (0 + 1 + 1 / 3) / 3, 2 / 3], rel=1e-4)


def test_the_recommended_plan_has_the_least_expected_regret() -> None:
    result = sw.solve("llama-3.1-70b", "dgx-h100:8", sw.Training(8192, 512), workers=1)
    robust = result.robustness
    assert robust is not None
    assert robust.recommended is not None
    assert robust.expected_regret[robust.recommended] <= min(robust.expected_regret) + TIED
    assert result.recommended == plans(result)[robust.recommended]
    assert robust.recommended != 0  # the fastest plan here rests on the constants of tensor parallelism
    out = StringIO()
    again = sw.build_instance("llama-3.1-70b", "dgx-h100:8", sw.Training(8192, 512))
    show_result(Console(file=out, width=120), again, result)
    assert f"recommended: plan {robust.recommended}, not the optimum" in out.getvalue()
    assert "not proven to be the next best" in out.getvalue()


def test_worth_by_device_counts_the_devices() -> None:
    result = solved("throughput-per-device")
    robust = result.robustness
    assert robust is not None
    none = robustness(cost_tables(instance()), plans(result), "throughput-per-device", spread=0.0)
    assert none.best_share[0] == 1.0
    for regret, other in zip(none.expected_regret[1:], result.alternatives, strict=True):
        assert regret == pytest.approx((result.value or 0.0) / other.value - 1, rel=1e-6, abs=TIED)
    assert robust == robustness(cost_tables(instance()), plans(result), "cost")


@pytest.mark.parametrize("objective", sorted(LEFT_OUT))
def test_objectives_that_are_left_out_say_why(objective: str) -> None:
    result = solved(objective)
    document = result.to_dict()
    assert document["robustness"]["reason"] == LEFT_OUT[objective]
    assert document["robustness"]["recommended"] is None
    assert result.recommended == result.plan
    assert all(other.best_share is None for other in result.alternatives)


def test_keys_of_the_result_document_do_not_depend_on_the_objective() -> None:
    documents = [solved(objective).to_dict() for objective in ("step-time", "energy")]
    for document in documents:
        assert set(document["robustness"]) == {
            "best_share", "expected_regret", "recommended", "draws", "seed", "spread", "reason",
        }  # fmt: skip
        assert document["alternatives"]
        for entry in document["alternatives"]:
            assert set(entry) == {"value", "tie", "best_share", "expected_regret", "differs", "plan"}
        json.dumps(document)


def test_the_command_line_tells_of_as_many_plans_as_asked() -> None:
    out = StringIO()
    show_result(Console(file=out, width=120), instance(), solved(top=2))
    assert "│   2" in out.getvalue()
    assert "│   3" not in out.getvalue()
    out = StringIO()
    show_result(Console(file=out, width=120), instance(), solved("energy"))
    assert f"not told how often each is the best: {LEFT_OUT['energy']}" in out.getvalue()
