"""(L13), (M10): what a module of multi-token prediction adds, and where."""

from __future__ import annotations

import pytest

from shardwise.data.faults import InputError
from shardwise.data.workload import Training
from shardwise.formulations.layer_costs import Sharding, compute_terms
from shardwise.formulations.memory import end_units, kind_params_on_device, tied_copy
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.evaluate import evaluate, model_flops
from shardwise.solver.export.megatron import pipeline_layout
from shardwise.solver.solve import build_instance

PLAIN, TRAINED = (
    build_instance("deepseek-v3", "dgx-h800:32", Training(4096, 1024, mtp_layers=modules)) for modules in (0, 1)
)


def test_a_module_is_a_layer_a_matrix_and_the_head_again_beside_the_head() -> None:
    sharding = Sharding(1, 1, sequence_parallel=False, ep=32)
    plain, trained = (compute_terms(instance, sharding) for instance in (PLAIN, TRAINED))
    assert trained.kinds == plain.kinds
    assert trained.embedding == plain.embedding
    least = 2 * plain.head.gemm_forward + plain.kinds[-1].gemm_forward
    assert least < trained.head.gemm_forward < 1.1 * least


def test_its_parameters_are_those_of_the_model_card() -> None:
    (_, plain), (_, trained) = (end_units(instance, 1) for instance in (PLAIN, TRAINED))
    hidden = PLAIN.model.hidden
    module = kind_params_on_device(PLAIN.model.layers[-1], 1).total + 2 * hidden**2 + 3 * hidden
    assert trained.total - plain.total == module
    # DeepSeek-V3's card: 11.5 B of the module's own; the embedding and the head it shares are not counted again.
    assert module == pytest.approx(11.5e9, rel=0.02)
    assert tied_copy(TRAINED, 2)
    assert not tied_copy(PLAIN, 2)


def test_only_the_last_stage_holds_it_and_it_takes_time_and_flops() -> None:
    plain, trained = (
        evaluate(
            instance,
            plan_from_degrees(instance, degrees_from(instance, pp=8, dp=32, ep=32, etp=1), recompute="full"),
        )
        for instance in (PLAIN, TRAINED)
    )
    assert trained.memory_mib[:-1] == plain.memory_mib[:-1]
    assert trained.memory_mib[-1] > plain.memory_mib[-1]
    assert trained.step_time_s > plain.step_time_s
    assert 1.02 < model_flops(TRAINED) / model_flops(PLAIN) < 1.1


def test_what_cannot_train_it_says_so() -> None:
    with pytest.raises(InputError, match=r"llama-3.1-8b has 0 multi-token-prediction modules"):
        build_instance("llama-3.1-8b", "dgx-h100:1", Training(4096, 8, mtp_layers=1))
    with pytest.raises(InputError, match="torchtitan trains no multi-token prediction"):
        build_instance("deepseek-v3", "dgx-h800:32", Training(4096, 1024, mtp_layers=1), rules="torchtitan")


def test_the_layout_ends_with_the_module_and_the_loss() -> None:
    assert pipeline_layout([3, 2, 2], 1) == "Ettt|tt|ttmL"
