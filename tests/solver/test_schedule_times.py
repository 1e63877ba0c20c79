"""What is minimised is what the simulated schedule takes: on random instances, and where the textbook formula is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from reference_simulator import simulated_step_s
from schedule_instances import instance_with
from universe import PCIE, dense, instance_of, model_of, plans

from shardwise.data.model import Mamba
from shardwise.data.model_parts import layer, mamba2
from shardwise.data.workload import Training
from shardwise.solver.evaluate import evaluate, timed_plan
from shardwise.solver.solve import solve

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan


@pytest.mark.parametrize("seed", range(16))
def test_an_optimal_plan_takes_in_simulation_what_was_proven(seed: int) -> None:
    """`benchmarks/agreement.py` does the same on 500 instances of up to 16 stages."""
    instance = instance_with(seed, most_stages=6)
    result = solve(instance=instance, workers=1, time_limit_s=60)
    assert result.status == "OPTIMAL"
    assert result.plan is not None
    assert result.bound is not None
    assert result.value is not None
    assert result.value == pytest.approx(simulated_step_s(instance, result.plan), rel=1e-9)
    assert result.bound <= result.value * (1 + 1e-12)
    assert result.gap is not None
    assert result.gap < 1e-5


@pytest.mark.parametrize("seed", [2, 10, 18, 26])
def test_free_chunks_give_a_gap_of_at_most_five_percent(seed: int) -> None:
    """`benchmarks/agreement.py --free-chunks` does the same with up to 16 stages; no even plan is faster."""
    instance = instance_with(seed, most_stages=5)
    result = solve(instance=instance, workers=1, time_limit_s=60, free_chunks=True)
    even = solve(instance=instance, workers=1, time_limit_s=60)
    assert result.plan is not None
    assert result.gap is not None
    assert result.gap <= 0.05
    assert result.value is not None
    assert even.value is not None
    assert result.value <= even.value
    assert result.value == pytest.approx(simulated_step_s(instance, result.plan), rel=1e-9)
    assert "free-chunks" in result.report["universe"]["rules"]


# -- where the textbook is wrong ---------------------------------------------------------------------------------------


def textbook_s(instance: Instance, plan: Plan) -> float:
    """sum(t) + (m - 1) max(t) over the stages' times for one micro-batch, the fill a v-th of it when interleaved
    (Narayanan et al., arXiv 2104.04473, section 2.2), and the longest tail."""
    timed = timed_plan(instance, plan)
    forward, backward = timed.passes.durations[:2]
    stages = [float((forward + backward)[list(plan.layout.slots_of(k))].sum()) for k in range(plan.degrees.pp)]
    fill = (sum(stages) - max(stages)) / plan.degrees.vpp
    return plan.micro_batches * max(stages) + fill + float(timed.passes.tails.max())


def test_the_textbook_splits_a_hybrid_model_at_least_three_percent_worse() -> None:
    """Attention and Mamba layers in turn on four stages, eight micro-batches: of all splits and chunk counts, the one
    with the least textbook time against the one that is returned."""
    hidden = 2048
    heavy = dense(hidden, width=8)
    light = layer(hidden, mamba2(hidden, Mamba(2, hidden, 16, 4, groups=1, heads=hidden // 64)), None)
    limits = ("pp=4", "tp=1", "dp=1", "micro_batch=1", "zero=1", "recompute=none", "vpp<=4")
    instance = instance_of(
        model_of([heavy, light] * 12, hidden, 32000, tied=False),
        (4,),
        (PCIE,),
        limits=limits,
        workload=Training(4096, 8),
    )
    by_textbook = min(plans(instance), key=lambda plan: textbook_s(instance, plan))
    result = solve(instance=instance, workers=1)
    assert result.status == "OPTIMAL"
    assert result.value is not None
    assert evaluate(instance, by_textbook).step_time_s > 1.03 * result.value
    assert simulated_step_s(instance, by_textbook) > 1.03 * result.value
