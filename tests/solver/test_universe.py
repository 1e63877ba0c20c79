"""The solver against exhaustive search over small universes: the optimum, the plan, the bound, and infeasibility."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.plan import Degrees, Plan, Stage
from shardwise.solver.evaluate import evaluate
from shardwise.solver.solve import solve

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.solver.result import Result

if TYPE_CHECKING:
    from universe import (
        Corner, Judged, admitted, corners, device_count, documented_order, examples, holds, instances, legal_degrees,
        placements, splits,
    )  # fmt: skip
else:
    from tests.solver.universe import (
        Corner, Judged, admitted, corners, device_count, documented_order, examples, holds, instances, legal_degrees,
        placements, splits,
    )  # fmt: skip

NO_PRUNE_LIMIT = 2000
TIGHT = 1e-5
"""Relative gap between an optimum and its bound: accumulated rounding only."""


def first_of_the_best(found: list[Judged]) -> Judged:
    return min(found, key=lambda one: (one.units, documented_order(one.plan)))


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
    best = first_of_the_best(found)
    assert result.evaluation.objective_units == best.units
    assert result.evaluation.admitted
    assert result.value == evaluate(instance, result.plan).step_time_s
    assert result.bound <= min(one.seconds for one in found)
    assert result.gap < TIGHT
    assert result.plan in [one.plan for one in found]
    assert result.plan == best.plan
    for other in result.alternatives:
        assert any(one.plan == other.plan for one in found)
        assert other.value >= result.bound


@examples(60)
@given(instances())
def test_exhaustive_search_and_the_solver_agree(instance: Instance) -> None:
    result = solve(instance=instance, workers=1)
    agrees(instance, result, admitted(instance, result.report["unit_s"]))


@examples(45)
@given(instances())
def test_exhaustive_search_and_one_model_without_pruning_agree(instance: Instance) -> None:
    if len(list(itertools.islice(corners(instance), NO_PRUNE_LIMIT + 1))) > NO_PRUNE_LIMIT:
        return
    result = solve(instance=instance, workers=1, prune=False)
    agrees(instance, result, admitted(instance, result.report["unit_s"]))


@examples(15)
@given(instances(), st.integers(0, 1000))
def test_the_same_plan_with_two_workers_and_any_seed(instance: Instance, seed: int) -> None:
    one, two = solve(instance=instance, workers=1), solve(instance=instance, workers=2, seed=seed)
    assert one.status == two.status
    assert one.plan == two.plan
    assert one.value == two.value
    assert one.bound == two.bound


# -- the reference itself ----------------------------------------------------------------------------------------------


@examples(20)
@given(instances(), st.data())
def test_the_reference_leaves_out_only_plans_that_evaluate_rejects(instance: Instance, data: st.DataObject) -> None:
    """Degrees, splits and settings drawn freely: what the universe lacks breaks a rule or a limit, and names it."""
    devices, batch = device_count(instance.cluster.root), instance.workload.global_batch
    depth = len(instance.levels)
    layers = len(instance.model.layers)
    ours = set(corners(instance))
    for _ in range(20):
        factors = [data.draw(st.lists(st.sampled_from((1, 1, 2, 3, 4)), min_size=depth, max_size=depth)) for _ in range(3)]
        order = data.draw(st.sampled_from(("tp-dp-pp", "tp-pp-dp")))
        tp, pp, dp = (tuple(axis) for axis in factors)
        sizes = [1, 1, 1]
        for i, axis in enumerate((tp, pp, dp)):
            for factor in axis:
                sizes[i] *= factor
        vpp = data.draw(st.sampled_from((1, 1, 2, 3)))
        degrees = Degrees(
            *sizes, vpp, data.draw(st.sampled_from((1, 2, 3, 4))), data.draw(st.integers(0, 1)), data.draw(st.booleans())
        )
        if degrees.pp > 8:
            continue
        from shardwise.data.plan import Placement

        placement = Placement(tp, pp, dp, order)
        micro_batches = max(batch // (degrees.dp * degrees.micro_batch), 1)
        chunks = [0] * degrees.virtual_stages
        for layer in range(layers):
            chunks[layer * len(chunks) // layers] += 1
        stages = tuple(Stage(tuple(chunks[k :: degrees.pp])) for k in range(degrees.pp))
        plan = Plan(degrees, stages, placement, micro_batches)
        evaluation = evaluate(instance, plan)
        degree_limits = [fault for fault in evaluation.limit_faults if not fault.startswith("recompute")]
        legal = not evaluation.faults and not degree_limits
        corner = Corner(degrees, placement, micro_batches)
        same = any(
            other.degrees == degrees
            and (other.placement.tp, other.placement.pp, other.placement.dp) == (tp, pp, dp)
            and other.micro_batches == micro_batches
            for other in ours
        )
        inside = same and tuple(chunks) in splits(layers, degrees.pp, degrees.vpp)
        if corner in ours and inside:
            assert legal, evaluation.faults
        if legal:
            assert inside
            assert holds(instance.cluster.root, placement.blocks)
        assert degrees.devices <= devices or evaluation.faults
