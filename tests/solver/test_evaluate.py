"""`evaluate` names everything that is wrong with a plan at once, and says by one MiB whether it fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.data.cluster import Accelerator, Cluster, Domain, Link
from shardwise.data.faults import InputError
from shardwise.data.instance import Instance
from shardwise.data.limits import parse_limits
from shardwise.data.model import Model
from shardwise.data.model_parts import attention, layer, linear, mlp, norm
from shardwise.data.plan import Degrees, Placement, Plan, Recompute, Stage
from shardwise.data.rules import load_rules
from shardwise.data.workload import Training
from shardwise.solver.evaluate import admitted_units, evaluate

MIB = 2**20
KIND = layer(512, attention(512, 8, 4, 64), mlp(512, 2048, gated=True))
MODEL = Model(
    "toy", "toy", 512, 1000, False, (KIND,) * 6,
    linear("embed", 1000, 512, "vocab"), linear("lm_head", 1000, 512, "vocab") + norm("norm", 512),
)  # fmt: skip


def instance_of(
    nodes: tuple[int, ...] = (4, 4), *, rules: str = "megatron-core", limits: tuple[str, ...] = (), memory: int = 2**35
) -> Instance:
    """Six dense layers, batches of 16 sequences of 1,024, nodes of the given sizes."""
    device = Accelerator("toy", "none", memory, 2e12, {"bf16": 1e15})
    inner, outer = Link("inner", "nvlink", 4e11, 1e-6), Link("outer", "infiniband", 5e10, 4e-6)
    children = tuple(Domain(f"node{i}", "node", inner, device, n) for i, n in enumerate(nodes))
    cluster = Cluster("toy", Domain("fabric", "fabric", outer, children=children))
    return Instance(MODEL, cluster, Training(1024, 16), load_rules(rules), limits=parse_limits(limits))


def plan_of(
    layers: tuple[int, ...] = (3, 3),
    tp: tuple[int, int] = (2, 1),
    dp: tuple[int, int] = (2, 1),
    pp: tuple[int, int] = (1, 2),
    *,
    micro_batch: int = 2,
    recompute: Recompute = "none",
    block: int = 0,
) -> Plan:
    degrees = Degrees(tp=tp[0] * tp[1], dp=dp[0] * dp[1], pp=pp[0] * pp[1], micro_batch=micro_batch)
    stages = tuple(Stage((n,), recompute, block) for n in layers)
    return Plan(degrees, stages, Placement(tp, pp, dp), max(16 // degrees.dp // micro_batch, 1))


def test_a_legal_plan_that_fits_is_admitted() -> None:
    evaluation = evaluate(instance_of(), plan_of())
    assert evaluation.faults == ()
    assert evaluation.limit_faults == ()
    assert evaluation.legal
    assert evaluation.fits
    assert evaluation.admitted
    assert evaluation.devices == 8
    assert evaluation.idle_devices == 0


def test_every_broken_rule_and_limit_is_named_with_its_values_at_once() -> None:
    instance = instance_of((4, 4), limits=("tp<=2", "dp>=4", "devices<=6", "recompute=full", "micro_batch=1"))
    plan = plan_of((0, 0, 6), (3, 1), (1, 1), (1, 3), micro_batch=3)
    evaluation = evaluate(instance, plan)
    assert evaluation.faults == (
        "tp=3 does not divide num_attention_heads=8",
        "tp=3 neither divides nor is a multiple of num_key_value_heads=4",
        "tp=3 does not divide intermediate_size=2048",
        "micro_batch=3 x dp=1 does not divide global_batch=16",
        "micro_batches=5 x micro_batch=3 x dp=1 is not global_batch=16",
        "a chunk between the first and the last has no layer",
        "placement needs 3 groups of 3 devices in one fabric, cluster toy has 2",
    )
    assert evaluation.limit_faults == (
        "tp=3 breaks the limit tp<=2",
        "dp=1 breaks the limit dp>=4",
        "devices=9 breaks the limit devices<=6",
        "micro_batch=3 breaks the limit micro_batch=1",
        "recompute is not full on every stage, as the limit asks",
    )
    assert not evaluation.legal
    assert not evaluation.admitted
    # It has a time and a memory all the same.
    assert evaluation.step_time_s > 0
    assert len(evaluation.memory_mib) == 3


def test_a_limit_alone_makes_a_legal_plan_not_admitted() -> None:
    evaluation = evaluate(instance_of(limits=("pp=1",)), plan_of())
    assert evaluation.legal
    assert evaluation.limit_faults == ("pp=2 breaks the limit pp=1",)
    assert not evaluation.admitted


@pytest.mark.parametrize(
    ("block", "fault"), [(3, None), (4, None), (2, "recompute is not full for every layer, as the limit asks")]
)
def test_full_recompute_as_a_limit_means_every_layer_of_every_stage(block: int, fault: str | None) -> None:
    evaluation = evaluate(instance_of(limits=("recompute=full",)), plan_of((3, 3), recompute="full", block=block))
    assert evaluation.limit_faults == ((fault,) if fault else ())


@pytest.mark.parametrize(
    ("nodes", "placement", "message"),
    [
        ((4, 4), ((2, 1), (2, 1), (1, 2)), None),
        # Seven devices: one node has room for three ranks only.
        ((4, 3), ((2, 1), (2, 1), (1, 2)), "placement needs 2 groups of 4 devices in one fabric, cluster toy has 1"),
        ((4, 3), ((1, 1), (2, 1), (1, 2)), None),
        # A node of four cannot hold eight.
        ((4, 4), ((8, 1), (1, 1), (1, 1)), "placement needs 8 devices in one node, cluster toy has 4"),
        ((4, 4), ((4, 2), (1, 1), (1, 1)), None),
        # Three nodes are not there.
        ((4, 4), ((1, 1), (1, 1), (1, 3)), "placement needs 3 devices in one fabric, cluster toy has 2"),
    ],
)
def test_a_placement_must_exist_on_the_cluster(
    nodes: tuple[int, ...],
    placement: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    message: str | None,
) -> None:
    tp, dp, pp = placement
    layers = {1: (6,), 2: (3, 3), 3: (2, 2, 2)}[pp[0] * pp[1]]
    faults = evaluate(instance_of(nodes, rules="free"), plan_of(layers, tp, dp, pp)).faults
    assert tuple(fault for fault in faults if "placement" in fault) == ((message,) if message else ())


def test_a_placement_that_no_rank_order_reaches_is_illegal_for_megatron_only() -> None:
    # tp across the nodes, dp inside them.
    plan = plan_of((6,), (1, 2), (4, 1), (1, 1))
    assert evaluate(instance_of(rules="free"), plan).faults == ()
    assert evaluate(instance_of(), plan).faults == (
        "placement tp=(1, 2), pp=(1, 1), dp=(4, 1) is not reached by rank order tp-dp-pp",
    )


def test_a_plan_for_another_model_or_cluster_is_refused_with_both_reasons() -> None:
    plan = replace(plan_of((3, 2)), placement=Placement((2,), (2,), (2,)))
    with pytest.raises(InputError) as caught:
        evaluate(instance_of(), plan)
    assert caught.value.faults == (
        "plan.stages hold 5 layers, the model has 6",
        "plan.placement has 1 levels, cluster toy has 2",
    )


def test_a_plan_fits_exactly_at_the_memory_of_its_fullest_stage() -> None:
    plan = plan_of()
    need = max(evaluate(instance_of(), plan).memory_mib)
    assert evaluate(instance_of(memory=need * MIB), plan).fits
    assert evaluate(instance_of(memory=need * MIB), plan).admitted
    short = evaluate(instance_of(memory=need * MIB - 1), plan)
    assert not short.fits
    assert not short.admitted
    assert short.legal
    # The same by the user's limit, in decimal GB.
    for megabytes, fits in ((need, True), (need - 1, False)):
        limit = f"memory_gb<={megabytes * MIB / 1e9:.9f}1"
        assert evaluate(instance_of(limits=(limit,)), plan).fits == fits


def test_the_whole_mebibytes_are_not_below_the_bytes() -> None:
    evaluation = evaluate(instance_of(), plan_of((2, 4), recompute="full", block=2))
    for stage, mib in zip(evaluation.stages, evaluation.memory_mib, strict=True):
        assert stage.total <= mib * MIB <= stage.total + 24 * MIB
    assert evaluation.worst_stage == max((0, 1), key=lambda k: evaluation.memory_mib[k])


@pytest.mark.parametrize("layers", [(3, 3), (0, 6), (5, 1)])
def test_the_parts_add_up_to_the_step(layers: tuple[int, int]) -> None:
    evaluation = evaluate(instance_of(), plan_of(layers, recompute="full", block=1))
    parts = evaluation.parts
    total = sum(getattr(parts, name) for name in type(parts).__slots__)
    assert total == pytest.approx(evaluation.step_time_s, rel=1e-12)


@pytest.mark.parametrize("layers", [(3, 3), (0, 6), (5, 1)])
def test_the_short_verdict_is_that_of_the_evaluation(layers: tuple[int, int]) -> None:
    for limits in ((), ("pp=1",), ("memory_gb<=2",)):
        instance, plan = instance_of(limits=limits), plan_of(layers)
        units, evaluation = admitted_units(instance, plan, 2.0**-30), evaluate(instance, plan, unit_s=2.0**-30)
        assert units == (evaluation.objective_units if evaluation.admitted else None)
