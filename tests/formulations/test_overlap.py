"""(L15) by hand and against what was measured: overlap of products and the collectives of tensor parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from shardwise.data.faults import InputError
from shardwise.data.plan import Degrees, Plan
from shardwise.data.profile import load_profile
from shardwise.data.workload import Training
from shardwise.formulations.coefficients import groups_of
from shardwise.formulations.collectives import collective_time_s
from shardwise.formulations.kernels import gemm_time_s
from shardwise.formulations.layer_costs import OVERLAPPED_SHARE, LayerTerms, Sharding, sharding_of
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.evaluate import cost_tables, evaluate
from shardwise.solver.export.megatron import megatron_flags
from shardwise.solver.saved import saved_instance
from shardwise.solver.solve import build_instance, solve

if TYPE_CHECKING:
    from shardwise.data.instance import Instance

SEQ_LEN = 8192


def instance(tp_overlap: bool | None = None, rules: str = "torchtitan", precision: str = "bf16") -> Instance:
    workload = Training(SEQ_LEN, 96, precision=precision, tp_overlap=tp_overlap)  # type: ignore[arg-type]
    return build_instance("llama-3.1-8b", "dgx-h100:8", workload, rules=rules)


def step_s(own: Instance, *, zero: int = 3, sequence_parallel: bool = True) -> float:
    """Of tp = 8 on 64 devices."""
    degrees = degrees_from(own, tp=8, dp=8, micro_batch=12, zero=zero, sequence_parallel=sequence_parallel)
    return evaluate(own, plan_from_degrees(own, degrees, recompute="selective")).step_time_s


def terms(own: Instance, tp: int) -> LayerTerms:
    degrees = Degrees(tp=tp, micro_batch=1, sequence_parallel=True)
    placement = plan_from_degrees(own, degrees).placement
    return cost_tables(own).terms(sharding_of(degrees), groups_of(own, degrees, placement)).kinds[0]


@pytest.mark.parametrize("tp", [2, 8])
def test_the_first_piece_shows_and_what_its_product_is_too_short_for(tp: int) -> None:
    own, plain = instance(tp_overlap=True), instance()
    with_overlap, without = terms(own, tp), terms(plain, tp)
    profile, spans = own.profile, ((tp, own.levels[0]),)
    heads, wide, hidden = 32 // tp, 14336 // tp, 4096
    gather, scatter = (
        collective_time_s(own.accelerator, op, 2 * SEQ_LEN * hidden, spans) for op in ("all_gather", "reduce_scatter")
    )
    # a gather ahead of queries, keys and values and of both inputs of the MLP, a scatter behind their outputs
    products = (
        (gather, heads * 128 + 2 * (8 // tp) * 128, hidden),
        (scatter, hidden, heads * 128),
        (gather, 2 * wide, hidden),
        (scatter, hidden, wide),
    )
    hidden_s = longer_s = 0.0
    for collective, n, k in products:
        pieces = tp * gemm_time_s(own.accelerator, SEQ_LEN / tp, n, k, "bf16")
        longer_s += max(pieces - gemm_time_s(own.accelerator, SEQ_LEN, n, k, "bf16"), 0)
        covered = min(profile.tp_comm_exposed * collective, profile.gemm * pieces)
        hidden_s += OVERLAPPED_SHARE * (1 - 1 / tp) * covered / profile.tp_comm_exposed
    assert without.tensor_forward - with_overlap.tensor_forward == pytest.approx(hidden_s)
    assert with_overlap.gemm_forward - without.gemm_forward == pytest.approx(longer_s)
    assert with_overlap.launches - without.launches == 4 * (2 * tp - 3)
    assert 0 < with_overlap.tensor_backward < without.tensor_backward
    assert with_overlap.tensor_forward >= without.tensor_forward / tp
    assert with_overlap.gemm_frozen == pytest.approx(with_overlap.gemm_backward - without.gemm_backward)


def test_nothing_said_is_what_the_profile_was_fitted_to() -> None:
    assert step_s(instance(tp_overlap=False)) == step_s(instance())
    fitted = instance(rules="megatron-core")
    assert fitted.profile.tp_overlap
    assert step_s(instance(tp_overlap=True, rules="megatron-core"), zero=1) == step_s(fitted, zero=1)


def test_without_overlap_all_of_a_collective_shows() -> None:
    own, fitted = instance(tp_overlap=False, rules="megatron-core"), instance(rules="megatron-core")
    shown = fitted.profile.tp_comm_exposed
    assert shown < 1
    assert terms(own, 8).tensor_forward * shown == pytest.approx(terms(fitted, 8).tensor_forward)
    assert step_s(own, zero=1) > step_s(fitted, zero=1)


def test_there_is_no_overlap_without_sequence_parallelism() -> None:
    times = [step_s(instance(said), sequence_parallel=False) for said in (None, True)]
    assert times[0] == times[1]


@pytest.mark.parametrize(
    ("precision", "without_s", "with_s"), [("bf16", 2.8068, 2.555), ("fp8", 2.4198, 2.2061), ("fp8", 3.3135, 3.1388)]
)
def test_the_gain_is_about_what_torchtitan_measured(precision: str, without_s: float, with_s: float) -> None:
    # pytorch/torchtitan b5bcd76, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md: tp = 8 on 64 H100; in 8 bits by
    # tensor and by row
    predicted = step_s(instance(tp_overlap=True, precision=precision)) / step_s(instance(precision=precision))
    assert predicted == pytest.approx(with_s / without_s, abs=0.05)


def test_a_longer_collective_never_shows_less() -> None:
    """What a bound by the fastest place of every group takes for granted."""
    own = instance(tp_overlap=True)
    for exposed in (0.3, 1.0, 2.0):
        priced = replace(own, profile=replace(own.profile, tp_comm_exposed=exposed))
        tables = cost_tables(priced)
        near, far = (
            tables.terms(
                Sharding(8, 1, sequence_parallel=True),
                groups_of(priced, Degrees(tp=8), replace(plan_from_degrees(priced, Degrees(tp=8)).placement, tp=tp)),
            ).kinds[0]
            for tp in ((8, 1), (2, 4))
        )
        assert near.tensor_forward <= far.tensor_forward
        assert near.tensor_backward <= far.tensor_backward


def test_packs_without_overlap_refuse_it() -> None:
    for rules in ("deepspeed", "accelerate", "mindspeed"):
        with pytest.raises(InputError, match=f"tp_overlap=true: {rules} does not overlap"):
            instance(tp_overlap=True, rules=rules)
        assert instance(tp_overlap=False, rules=rules).workload.tp_overlap is False


def test_a_plan_keeps_what_was_said_and_its_export_says_it() -> None:
    for said in (True, False, None):
        workload = Training(4096, 64, tp_overlap=said)
        found = solve("llama-3.1-8b", "dgx-h100:1", workload, limits=["tp=4", "sequence_parallel=1"], workers=1)
        assert found.plan is not None
        again = Plan.from_json(found.plan.to_json())
        own = saved_instance(again.instance)
        assert own.workload.tp_overlap is said
        assert ("--tp-comm-overlap" in megatron_flags(own, again)) == (said is not False)


def test_overlap_is_true_or_false() -> None:
    with pytest.raises(ValueError, match="tp_overlap='on' must be true or false"):
        Training(4096, 8, tp_overlap="on")  # type: ignore[arg-type]
    assert load_profile("nanotron").tp_overlap == 1
