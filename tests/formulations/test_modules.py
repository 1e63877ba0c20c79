"""Selective recompute of modules: what each drops and repeats, in the plan, its rules, its file and its flags."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shardwise
from shardwise.data.faults import InputError
from shardwise.data.plan import Degrees, Plan, Stage
from shardwise.data.recompute import MODULES, WITHIN, has_module, module_set, modules_of
from shardwise.data.runs import run_of, shipped_runs
from shardwise.formulations.coefficients import CostTables, searched_sets
from shardwise.formulations.layer_costs import sharding_of
from shardwise.formulations.memory import MIB
from shardwise.formulations.memory_table import MemoryLines, memory_table
from shardwise.formulations.table import UnitTimes, plan_table, step_times_s
from shardwise.solver.crossings import crossings
from shardwise.solver.default_plan import plan_from_degrees
from shardwise.solver.evaluate import evaluate
from shardwise.solver.export.megatron import to_megatron
from shardwise.solver.measured import planned_runs
from shardwise.solver.solve import build_instance

if TYPE_CHECKING:
    from shardwise.data.instance import Instance

DENSE = ("llama-3.1-8b", "dgx-h100:1", 4096, 64)
LATENT = ("moonlight-16b-a3b", "dgx-h100:1", 4096, 64)


def instance_of(case: tuple[str, str, int, int] = DENSE, **options: Any) -> Instance:
    model, cluster, seq_len, batch = case
    return build_instance(model, cluster, shardwise.Training(seq_len, batch), **options)


def plan_of(instance: Instance, modules: tuple[str, ...] = (), *, recompute: Any = "selective", **degrees: int) -> Plan:
    known = Degrees(**({"tp": 2, "dp": 4, "sequence_parallel": True} | degrees))  # type: ignore[arg-type]
    return plan_from_degrees(instance, known, recompute=recompute, recompute_modules=modules)


def test_the_mlp_of_a_dense_layer_drops_its_norm_and_all_between_its_matrices() -> None:
    """tp = 2 of h = 4096 and a width of 14336, 4096 tokens: the norm's output, gate, up and their product, 2 bytes each."""
    instance = instance_of()
    sharding = sharding_of(Degrees(tp=2, dp=4, sequence_parallel=True))
    (layer,) = CostTables(instance).activations(sharding)
    profile = instance.profile
    scale = 4096 * profile.memory_activations * (1 + profile.memory_fragmentation)
    dropped = scale * 2 * (4096 / 2 + 3 * 14336 / 2)
    assert layer.none - layer.kept("mlp") == pytest.approx(dropped)
    assert layer.needed("mlp") == pytest.approx(dropped)
    assert layer.needed("core_attn") == 0
    assert layer.none - layer.kept("core_attn+mlp") == pytest.approx(dropped + layer.none - layer.kept("core_attn"))
    assert layer.kept("layernorm") == layer.none


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("lora_rank", [None, 8])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "moonlight-16b-a3b", "qwen3-30b-a3b", "nemotron-h-56b"])
@pytest.mark.parametrize("tp", [1, 2])
def test_no_set_keeps_less_than_full_recompute_or_more_than_none(
    model: str, tp: int, lora_rank: int | None, precision: str
) -> None:
    """And experts as a whole drop no less than their parts, whatever is narrow or frozen."""
    workload = shardwise.Training(4096, 64, lora_rank=lora_rank, precision=precision)  # type: ignore[arg-type]
    instance = build_instance(model, "dgx-h100:8", workload)
    tables = CostTables(instance)
    for ep in (1, 8 // tp):
        sharding = sharding_of(Degrees(tp=tp, dp=8, ep=ep, etp=1, sequence_parallel=tp > 1))
        for layer, kind in zip(tables.activations(sharding), instance.model.kinds, strict=True):
            for index, module in enumerate(MODULES):
                assert layer.full <= layer.kept(module) <= layer.none
                assert layer.dropped[index] >= 0
                if not has_module(kind, module):
                    assert layer.kept(module) == layer.none
            for outer, inner in WITHIN.items():
                assert layer.kept(outer) <= layer.kept(module_set(inner))
            everything = module_set(module for module in MODULES if module not in WITHIN["moe"])
            left = layer.none - sum(layer.dropped[MODULES.index(module)] for module in everything.split("+"))
            assert layer.full <= left * (1 + 1e-9)


def test_repeating_modules_takes_longer_the_more_it_repeats_and_less_than_the_layer() -> None:
    instance = instance_of(LATENT)

    def step_s(*modules: str, recompute: str = "selective") -> float:
        return evaluate(instance, plan_of(instance, modules, recompute=recompute, ep=8, etp=1)).step_time_s

    none, full = step_s(recompute="none"), step_s(recompute="full")
    parts = [step_s(module) for module in MODULES]
    assert all(none < own < full for own in parts)
    pair = step_s("layernorm", "moe_act")
    assert pair > max(step_s("layernorm"), step_s("moe_act"))
    assert step_s("moe") > max(step_s("moe_act"), step_s("shared_experts"))
    # latent attention without its core, experts and norms is nearly the whole layer
    assert 0.6 < (step_s("core_attn", "mla_up_proj", "layernorm", "mlp", "moe") - none) / (full - none) < 1


@pytest.mark.parametrize("case", [DENSE, LATENT])
def test_tables_of_many_plans_say_what_an_evaluation_says(case: tuple[str, str, int, int]) -> None:
    """Sets of modules beside each other, in plans of one table."""
    instance = instance_of(case, rules="free")
    tables = CostTables(instance)
    plans = [
        plan_of(instance, modules, pp=2, dp=2)
        for modules in (("mlp",), ("core_attn",), ("core_attn", "mlp"), ("layernorm", "moe"), ("mla_up_proj",))
    ]
    plans += [plan_of(instance, recompute=mode, pp=2, dp=2) for mode in ("none", "full")]
    mixed = replace(plans[0], stages=(plans[0].stages[0], plans[1].stages[1]))
    plans.append(mixed)
    units, lines = UnitTimes(tables), MemoryLines(tables)
    times = step_times_s(plan_table([(units, plan) for plan in plans]), instance.profile)
    memory = memory_table([(lines, plan) for plan in plans])
    peaks = memory.peaks(instance.profile, np.full(len(plans), "device"))
    for plan, time, peak, mib in zip(plans, times, peaks, memory.mib, strict=True):
        own = evaluate(instance, plan)
        assert time == pytest.approx(own.step_time_s, rel=1e-12)
        assert peak == pytest.approx(own.peak_memory_bytes, rel=1e-12)
        assert tuple(mib) == own.memory_mib
        assert max(mib) * MIB >= own.peak_memory_bytes


def test_measured_runs_of_moonlight_free_what_is_predicted() -> None:
    """The rows of NVIDIA Megatron-Bridge that differ in modules alone: what each frees within 0.3 GB of the reading."""
    runs = [run for run in shipped_runs() if run.id.startswith("mbskill_moonlight_")]
    planned = {one.run.id.removeprefix("mbskill_moonlight_"): one for one in planned_runs(runs)}
    assert {"none", "core_attn", "mla_up_proj", "mla_up_proj+mlp", "moe_act", "layernorm+moe_act"} <= set(planned)

    def freed_gb(name: str) -> tuple[float, float]:
        one = planned[name]
        assert one.plan is not None
        assert one.units is not None
        base = planned["core_attn"]
        assert base.plan is not None
        instance = one.units.tables.instance
        predicted = [evaluate(instance, plan).stages[0].of_kind("allocated") / 1e9 for plan in (base.plan, one.plan)]
        measured = [own.run.measured_memory_gb or 0.0 for own in (base, one)]
        return predicted[0] - predicted[1], measured[0] - measured[1]

    for name in ("mla_up_proj", "mla_up_proj+mlp", "moe_act", "layernorm+moe_act"):
        assert planned[name].plan is not None
        predicted, measured = freed_gb(name)
        assert 0.6 < measured < 0.75
        assert abs(predicted - measured) < 0.5
    assert freed_gb("moe_act")[0] == pytest.approx(freed_gb("moe_act")[1], abs=0.1)


def test_a_row_names_its_modules() -> None:
    rows = {run.id: run.row for run in shipped_runs()}
    row = rows["mbskill_moonlight_layernorm+moe_act"]
    assert run_of(row).recompute_modules == ("layernorm", "moe_act")
    assert run_of({**row, "recompute": "selective(per-op)"}).recompute_modules == ()
    assert run_of({**row, "recompute": "selective"}).recompute_modules == ()


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (("mlp", "attention"), "recompute_modules='attention' must be among core_attn"),
        (("moe", "moe_act"), "moe repeats moe_act with it"),
        (("moe", "shared_experts", "moe_act"), "moe repeats moe_act, shared_experts with it"),
    ],
)
def test_a_stage_refuses_modules_that_do_not_go_together(modules: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        Stage((2,), "selective", 0, modules)


def test_modules_belong_to_selective_recompute_and_come_in_one_order() -> None:
    assert Stage((2,), "selective").recompute_modules == ("core_attn",)
    assert Stage((2,), "selective", 0, ("moe_act", "layernorm")) == Stage(
        (2,), "selective", 0, ("layernorm", "moe_act")
    )
    with pytest.raises(ValueError, match="needs recompute=selective"):
        Stage((2,), "none", 0, ("mlp",))
    with pytest.raises(InputError, match="recompute_modules=mlp needs recompute=selective"):
        plan_of(instance_of(), ("mlp",), recompute="none")


def test_a_plan_file_holds_the_modules_and_older_files_mean_the_core() -> None:
    instance = instance_of()
    plan = plan_of(instance, ("core_attn", "mlp"))
    document = plan.to_dict()
    assert document["stages"][0]["recompute_modules"] == ["core_attn", "mlp"]
    assert Plan.from_json(plan.to_json()) == plan
    core = plan_of(instance).to_dict()
    assert "recompute_modules" not in core["stages"][0]
    assert Plan.from_dict(core).stages[0].mode == "core_attn"
    document["stages"][0]["recompute_modules"] = ["everything"]
    with pytest.raises(InputError, match="recompute_modules='everything' must be among"):
        Plan.from_dict(document)


def test_rules_say_which_modules_a_pack_has_and_which_the_model_has() -> None:
    dense = plan_of(instance_of(), ("mlp", "mla_up_proj"))
    (fault,) = evaluate(instance_of(), dense).faults
    assert fault == "recompute_modules=mla_up_proj: no layer of llama-3.1-8b has it"
    for rules in ("torchtitan", "deepspeed", "accelerate"):
        faults = evaluate(instance_of(rules=rules), plan_of(instance_of(), ("mlp",))).faults
        assert f"recompute_modules=mlp: {rules} repeats no more than core_attn" in faults
        assert not any(
            "recompute_modules" in own for own in evaluate(instance_of(rules=rules), plan_of(instance_of())).faults
        )


def test_a_limit_holds_the_modules() -> None:
    instance = instance_of(limits=["recompute_modules=mlp"])
    assert evaluate(instance, plan_of(instance, ("mlp",))).limit_faults == ()
    (fault,) = evaluate(instance, plan_of(instance)).limit_faults
    assert fault == "recompute_modules=core_attn breaks the limit recompute_modules=mlp"
    for limits, message in (
        (["recompute_modules<=mlp"], "recompute_modules takes ="),
        (["recompute_modules=ffn"], "must be among core_attn"),
        (["recompute_modules=mlp", "recompute_modules=core_attn"], "contradict each other: core_attn, mlp"),
        (["recompute_modules=moe"], "no layer of llama-3.1-8b has it"),
    ):
        with pytest.raises(InputError, match=message):
            instance_of(limits=limits)


def test_the_launch_command_names_the_modules() -> None:
    instance = instance_of(LATENT)
    plan = plan_of(instance, ("layernorm", "moe_act"), ep=4, etp=1)
    text = to_megatron(instance, plan)
    assert "--recompute-granularity selective" in text
    assert "--recompute-modules layernorm moe_act" in text


def test_modules_with_collectives_of_their_own_repeat_those() -> None:
    instance = instance_of(LATENT)

    def calls(*modules: str, recompute: str = "selective") -> dict[str, int]:
        plan = plan_of(instance, modules, recompute=recompute, ep=8, etp=1)
        assert evaluate(instance, plan).legal
        out: dict[str, int] = {}
        for crossing in crossings(instance, plan, 0):
            out[crossing.axis] = out.get(crossing.axis, 0) + (crossing.calls or 0)
        return out

    layers, routed, micro_batches = 27, 26, 16
    core, mlp, shared, experts = (calls(module) for module in ("core_attn", "mlp", "shared_experts", "moe"))
    assert calls("layernorm", "moe_act", "mla_up_proj") == calls(recompute="none") == core
    assert calls(recompute="full")["ep"] == experts["ep"]
    each = 2 * micro_batches
    assert mlp["tp"] - core["tp"] == each * (layers - routed)
    assert shared["tp"] - core["tp"] == each * routed
    assert experts["tp"] - core["tp"] == each * routed
    assert experts["ep"] - core["ep"] == each * routed
    assert shared["ep"] == mlp["ep"] == core["ep"]


@pytest.mark.parametrize(
    ("model", "attention", "expected"),
    [
        ("llama-3.1-8b", "flash", ("core_attn", "mlp", "core_attn+mlp")),
        ("llama-3.1-8b", "unfused", ("core_attn", "core_attn+mlp")),
        (
            "qwen3-30b-a3b",
            "flash",
            ("core_attn", "moe_act", "layernorm+moe_act", "layernorm+moe", "core_attn+layernorm+moe"),
        ),
    ],
)
def test_the_search_takes_modules_in_the_order_of_their_time_for_a_byte(
    model: str, attention: Any, expected: tuple[str, ...]
) -> None:
    """(F3), and without the limit the attention core alone."""
    workload = shardwise.Training(4096, 64, attention=attention)
    chain = build_instance(model, "dgx-h100:1", workload, limits=["recompute_modules=any"])
    assert searched_sets(chain) == expected
    assert searched_sets(build_instance(model, "dgx-h100:1", workload)) == ("core_attn",)
    whole = build_instance(model, "dgx-h100:1", workload, rules="torchtitan", limits=["recompute_modules=any"])
    assert searched_sets(whole) == ("core_attn",)


def test_with_delayed_scaling_norms_and_expert_activations_are_not_repeated() -> None:
    workload = shardwise.Training(4096, 64, precision="fp8")
    barred, every = {"layernorm", "moe_act"}, ["recompute_modules=any"]
    for pack, legal in (("megatron-core", False), ("free", True)):
        instance = build_instance("qwen3-30b-a3b", "dgx-h100:1", workload, rules=pack, limits=every)
        searched = {module for own in searched_sets(instance) for module in modules_of(own)}
        assert "moe" in searched
        assert bool(searched & barred) == legal
    with pytest.raises(InputError, match="recompute_modules=moe_act: not with precision=fp8"):
        build_instance("qwen3-30b-a3b", "dgx-h100:1", workload, limits=["recompute_modules=moe_act"])


def test_the_search_finds_a_set_that_is_faster_than_the_core_and_than_blocks() -> None:
    limits = ("tp=1", "pp=1", "cp=2", "ep=8", "etp=1", "micro_batch=1", "zero=1")

    def solved(*more: str) -> Any:
        workload = shardwise.Training(16384, 64)
        return shardwise.solve(LATENT[0], LATENT[1], workload, limits=(*limits, *more), workers=1)

    core, chain = solved(), solved("recompute_modules=any")
    assert core.status == chain.status == "OPTIMAL"
    assert {stage.mode for stage in chain.plan.stages} == {"layernorm+moe_act"}
    assert chain.value < 0.995 * core.value
    assert chain.report["universe"]["recompute"].startswith(
        "one setting for all stages; selective repeats core_attn or "
    )
    named = solved("recompute_modules=layernorm+moe_act")
    assert named.plan == chain.plan
    other = solved("recompute_modules=mla_up_proj", "recompute=selective")
    assert other.status == "INFEASIBLE" or other.value > chain.value
