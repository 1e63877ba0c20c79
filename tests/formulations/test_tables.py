"""Tables of plans give what `evaluate` gives, plan by plan, on every axis that can be evaluated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.data.cluster_catalog import load_cluster
from shardwise.data.faults import InputError
from shardwise.data.instance import Instance
from shardwise.data.model_catalog import load_model
from shardwise.data.profile import list_profiles, load_profile
from shardwise.data.rules import FREE
from shardwise.data.workload import Training
from shardwise.formulations.coefficients import CostTables
from shardwise.formulations.memory_table import MemoryLines, memory_table
from shardwise.formulations.table import UnitTimes, plan_table, step_times_s
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.evaluate import evaluate

if TYPE_CHECKING:
    from shardwise.data.plan import Plan

MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "moonlight-16b", "nemotron-h-8b", "bloom-560m", "llama-3.2-1b")
POWERS = st.sampled_from([1, 2, 4, 8])
SCHEDULES = st.sampled_from([None, "gpipe", "zb-h1", "zb-2p", "zb-v"])

TUNINGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"lora_rank": 16},
    {"lora_rank": 8, "lora_modules": "attention", "precision": "bf16", "base_precision": "nf4"},
    {"lengths": [(300, 2), (5000, 1)]},
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Instance, list[Plan]]:
    """One instance and some plans on it."""
    workload = Training(
        4096,
        64,
        precision=draw(st.sampled_from(["bf16", "fp8"])),
        attention=draw(st.sampled_from(["flash", "unfused", "eager"])),
        fused_norm=draw(st.booleans()),
    )
    tuned: dict[str, Any] = draw(st.sampled_from(TUNINGS))
    workload = replace(workload, **tuned)
    instance = Instance(
        load_model(draw(st.sampled_from(MODELS))),
        load_cluster(draw(st.sampled_from(["dgx-h100:4", "gb200-nvl72:16"]))),
        workload,
        rules=FREE,
        profile=load_profile(draw(st.sampled_from(list_profiles()))),
    )
    plans: list[Plan] = []
    while len(plans) < 4:
        pp = draw(POWERS)
        vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
        degrees: dict[str, Any] = {
            "tp": draw(POWERS), "pp": pp, "cp": draw(st.sampled_from([1, 2])), "vpp": vpp, "ep": draw(POWERS),
            "micro_batch": draw(st.sampled_from([1, 2])), "zero": draw(st.sampled_from([0, 1, 2, 3])), "etp": 1,
            "dp_replicate": draw(st.sampled_from([1, 2])), "dp": draw(st.sampled_from([2, 4])),
        }  # fmt: skip
        schedule: Any = draw(SCHEDULES) if vpp == 1 else None
        try:
            plans.append(
                plan_from_degrees(
                    instance,
                    degrees_from(instance, **degrees),
                    recompute=draw(st.sampled_from(["none", "selective", "full"])),
                    schedule=schedule,
                )
            )
        except InputError:
            continue
    return instance, plans


@given(cases())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_tables_agree_with_evaluate(case: tuple[Instance, list[Plan]]) -> None:
    instance, plans = case
    tables = CostTables(instance)
    times = step_times_s(plan_table([(UnitTimes(tables), plan) for plan in plans]), instance.profile)
    memory = memory_table([(MemoryLines(tables), plan) for plan in plans])
    for row, plan in enumerate(plans):
        evaluation = evaluate(instance, plan)
        assert times[row] == pytest.approx(evaluation.step_time_s, rel=1e-9)
        assert tuple(memory.mib[row][: plan.degrees.pp].astype(int)) == evaluation.memory_mib
        for kind in ("allocated", "reserved", "device"):
            peak = memory.rows(np.array([row])).peaks(instance.profile, np.array([kind]))[0]
            assert peak == pytest.approx(max(stage.of_kind(kind) for stage in evaluation.stages), rel=1e-9)
        parts = evaluation.to_dict()["parts"]
        assert sum(parts.values()) == pytest.approx(evaluation.step_time_s, rel=1e-9)


def test_sync_that_crosses_more_than_eight_nodes_takes_longer_by_each_doubling() -> None:
    quiet = replace(load_profile("megatron-core"), sync_contention=0.0)
    for nodes, doublings in ((4, 0), (8, 0), (16, 1), (32, 2)):
        seconds = []
        for profile in (quiet, replace(quiet, sync_contention=0.5)):
            instance = Instance(
                load_model("llama-3.1-8b"), load_cluster(f"dgx-h100:{nodes}"), Training(4096, 64), rules=FREE,
                profile=profile,
            )  # fmt: skip
            tables = CostTables(instance)
            seconds.append(tables.sync_rates((1, nodes), 1).communication_s)
            plan = plan_from_degrees(instance, degrees_from(instance, tp=8, dp=nodes))
            table = plan_table([(UnitTimes(tables), plan)])
            assert step_times_s(table, profile)[0] == pytest.approx(evaluate(instance, plan).step_time_s, rel=1e-9)
        assert seconds[1] == pytest.approx(seconds[0] * (1 + 0.5 * doublings))


def test_more_of_an_axis_does_what_it_is_for() -> None:
    instance = Instance(
        load_model("qwen3-30b-a3b"), load_cluster("dgx-h100:4"), Training(4096, 64), rules=FREE,
        profile=load_profile("megatron-core"),
    )  # fmt: skip

    def of(**degrees: Any) -> Any:
        return evaluate(instance, plan_from_degrees(instance, degrees_from(instance, **degrees)))

    plain = of(dp=8, zero=1)
    spread = of(dp=8, ep=8, etp=1)
    assert spread.stages[0].weights < 0.2 * plain.stages[0].weights
    assert spread.parts.expert_parallel > 0
    assert of(dp=8, zero=3).stages[0].weights == pytest.approx(plain.stages[0].weights / 8)
    assert of(dp=8, zero=2).stages[0].gradients == pytest.approx(plain.stages[0].gradients / 8)
    assert of(dp=8, zero=3).parts.weight_gather > 0
    long = of(dp=4, cp=2)
    assert long.stages[0].activations == pytest.approx(plain.stages[0].activations / 2)
    assert long.parts.context_parallel > 0
    # A replica group holds a whole copy: twice the memory of the shards, all-reduced among the copies.
    assert of(dp=8, zero=3, dp_replicate=2).stages[0].weights == pytest.approx(plain.stages[0].weights / 4)
