"""The fewest devices: against exhaustive search, against a search that knows nothing of their bound, as a command."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner
from universe import admitted, examples, instances

import shardwise as sw
from shardwise.data.cluster_catalog import is_accelerator, list_accelerators, usual_family
from shardwise.formulations.candidates import enumerate_grids
from shardwise.formulations.device_counts import DeviceCounts, arithmetic
from shardwise.formulations.room import Room
from shardwise.formulations.splits import SplitSearch
from shardwise.solver.cli import app
from shardwise.solver.evaluate import cost_tables, evaluate
from shardwise.solver.fit import COMMON, GLOBAL_BATCH, MOST_DEVICES, SEQ_LEN, FitSearch, cluster_of, fit
from shardwise.solver.solve import solve

if TYPE_CHECKING:
    from shardwise.data.instance import Instance

WORKLOAD = sw.Training(SEQ_LEN, GLOBAL_BATCH)


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["fit", *arguments])
    return done.exit_code, done.output


@examples(40)
@given(instances())
def test_numbers_of_devices_hold_a_plan_exactly_as_exhaustive_search_says(instance: Instance) -> None:
    found = {one.plan.degrees.devices for one in admitted(instance, 1.0)}
    counts = DeviceCounts(cost_tables(instance))
    said = {count.devices: count.certain for count in counts.ascending()}
    assert found <= set(said)
    assert {devices for devices, certain in said.items() if certain} <= found
    least = arithmetic(cost_tables(instance)).least_devices
    assert not found or (least is not None and least <= min(found))


@examples(40)
@given(instances())
def test_a_candidate_without_room_has_no_plan(instance: Instance) -> None:
    found = {
        (
            one.plan.degrees.pp,
            one.plan.degrees.vpp,
            one.plan.degrees.dp,
            one.plan.degrees.micro_batch,
            one.plan.schedule,
        )
        for one in admitted(instance, 1.0)
    }
    room = Room(SplitSearch(instance, cost_tables(instance)))
    held = set()
    for grid in enumerate_grids(instance):
        for row in room.rows(grid).nonzero()[0].tolist():
            d = grid.degrees(row)
            held.add((d.pp, d.vpp, d.dp, d.micro_batch, grid.shape.schedule))
    assert found <= held


@examples(25)
@given(instances(), st.booleans())
def test_the_answer_is_a_plan_on_the_fewest_devices_of_all(instance: Instance, quick: bool) -> None:
    found = [one.plan.degrees.devices for one in admitted(instance, 1.0)]
    one = FitSearch(None, 1, 0, None).fit("here", instance, quick=quick, changes=False)
    assert one.devices == min(found, default=None)
    if one.devices is None:
        assert one.answer == "does not fit"
        assert one.reason
        return
    assert one.plan is not None
    assert evaluate(instance, one.plan).admitted
    assert one.plan.degrees.devices == one.devices == one.excluded + 1
    assert one.answer == evaluate(instance, one.plan).verdict


SAMPLE = (
    ("llama-3.1-8b", "h100"), ("llama-3.1-8b", "a10g"), ("qwen3-32b", "h200"), ("qwen3-30b-a3b", "mi300x"),
    ("llama-3.1-70b", "h100"), ("nemotron-h-56b", "b200"), ("deepseek-v2-lite", "l40s"), ("gpt-20b", "gb200"),
)  # fmt: skip


@pytest.mark.parametrize(("model", "on"), SAMPLE)
def test_one_device_fewer_is_infeasible_to_a_search_that_knows_no_room(model: str, on: str) -> None:
    (one,) = fit(model, on, quick=True)
    assert one.plan is not None
    assert one.devices is not None
    own = evaluate(one.instance, one.plan)
    assert own.admitted
    assert own.devices == one.devices
    if one.devices > 1:
        fewer = [f"devices<={one.devices - 1}"]
        result = solve(model, one.instance.cluster, one.instance.workload, limits=fewer, workers=1)
        assert result.status == "INFEASIBLE"


def test_the_plan_is_the_fastest_on_so_many_devices() -> None:
    (one,) = fit("qwen3-8b", "a100", WORKLOAD, workers=1)
    same = solve("qwen3-8b", one.instance.cluster, WORKLOAD, limits=[f"devices={one.devices}"], workers=1)
    assert one.evaluation is not None
    assert same.value == one.evaluation.step_time_s
    assert one.result is not None
    assert one.result.status == "OPTIMAL"


def test_a_tight_answer_says_how_many_devices_are_roomy() -> None:
    (one,) = fit("llama-3.1-70b", "h100", workers=1)
    assert (one.answer, one.devices) == ("tight", 16)
    assert one.roomy is not None
    assert one.roomy.devices == 20
    for devices, verdict in ((20, "fits"), (19, None)):
        limit = one.arithmetic.usable_bytes / (1 + one.instance.profile.memory_band) / 1e9
        limits = [f"devices={devices}", f"memory_gb<={limit:.6f}"]
        result = solve("llama-3.1-70b", one.instance.cluster, WORKLOAD, limits=limits, objective="devices", workers=1)
        assert (result.plan is None) == (verdict is None)
        if result.plan is not None:
            assert evaluate(one.instance, result.plan).verdict == verdict


def test_changes_are_what_fit_says_of_them() -> None:
    (one,) = fit("qwen3-8b", "a100", WORKLOAD, changes=True, workers=1)
    said = {change.what: change.devices for change in one.changes}
    longer = sw.Training(8 * SEQ_LEN, GLOBAL_BATCH)
    assert said["sequences of 32,768 tokens"] == fit("qwen3-8b", "a100", longer, quick=True)[0].devices
    none = fit("qwen3-8b", "a100", WORKLOAD, limits=["recompute=none"], quick=True)
    assert said["without recompute"] == none[0].devices
    other = sw.Training(SEQ_LEN, GLOBAL_BATCH, optimizer="sgd")
    assert said["with sgd"] == fit("qwen3-8b", "a100", other, quick=True)[0].devices


def test_the_batch_by_default_decides_nothing() -> None:
    few, many = (sw.Training(SEQ_LEN, batch) for batch in (GLOBAL_BATCH, 20160))
    assert [one.devices for one in fit("mixtral-8x7b-v0.1", workload=few, quick=True)] == [
        one.devices for one in fit("mixtral-8x7b-v0.1", workload=many, quick=True)
    ]


def test_a_model_with_fewer_positions_takes_as_many_tokens() -> None:
    (one,) = fit("gpt-3-13b", "h100", quick=True, changes=True)
    assert one.instance.workload == sw.Training(2048, GLOBAL_BATCH)
    assert not any("sequences" in change.what for change in one.changes)


def test_an_accelerator_stands_for_the_first_family_that_holds_it() -> None:
    assert usual_family("h100").name == "dgx-h100"
    assert cluster_of("H100-SXM").device_count == MOST_DEVICES
    assert cluster_of("dgx-h100").device_count == 8
    assert cluster_of("mi300x:2").device_count == 16
    without = []
    for name in list_accelerators():
        assert is_accelerator(name)
        try:
            assert 0 < cluster_of(name).device_count <= MOST_DEVICES
        except sw.InputError as error:
            without.append(name in str(error))
    assert 0 < len(without) < len(list_accelerators())
    assert all(without)
    assert {one.asked for one in fit("qwen3-0.6b", quick=True)} == set(COMMON)


def test_common_accelerators_that_do_not_run_the_precision_are_left_out() -> None:
    found = fit("qwen3-0.6b", workload=sw.Training(SEQ_LEN, GLOBAL_BATCH, "fp8"), quick=True)
    assert [one.asked for one in found] == ["h100", "h200", "b200", "mi300x", "l40s"]
    with pytest.raises(sw.InputError, match="not supported"):
        fit("qwen3-0.6b", "a100", sw.Training(SEQ_LEN, GLOBAL_BATCH, "fp8"))


def test_a_cluster_that_is_too_small_is_a_proven_no() -> None:
    code, text = invoke("llama-3.1-405b", "dgx-h100:8")
    assert code == 1
    assert "does not fit on up to 64 devices" in text
    assert "at least 88 devices" in text
    code, text = invoke("llama-3.1-8b", "h100", "--limit", "devices<=1")
    assert (code, "at least 2 devices" in text) == (1, True)
    code, text = invoke("llama-3.1-8b", "h100", "--limit", "memory_gb<=2")
    assert (code, "the reserve" in text) == (1, True)
    code, text = invoke("llama-3.1-8b", "h100", "--fix", "tp=3")
    assert (code, "tp=3 does not divide num_attention_heads=32" in " ".join(text.split())) == (1, True)


def test_exit_codes_of_what_fits_somewhere_and_what_is_not_known() -> None:
    code, text = invoke("qwen3-14b", "l40s:1", "h200", "-q")
    assert code == 0
    assert "does not fit" in " ".join(text.split())
    assert "not modelled" in text
    code, text = invoke("deepseek-v3", "b200", "--time-limit", "0.01")
    assert (code, "not known in time" in text) == (3, True)
    assert "no plan on 63 devices or fewer" in text


def test_every_fault_is_named() -> None:
    code, text = invoke(
        "nosuch", "h1000", "dgx-h100:0", "H100-PCIe", "--seq-len", "0", "--precision", "x", "--limit", "tp=x", "--rules",
        "foo", "--profile", "nope", "--time-limit", "-3", "--global-batch", "0",
    )  # fmt: skip
    assert code == 2
    for fault in (
        "workload.seq_len=0", "workload.global_batch=0", "workload.precision='x'", "time_limit_s=-3.0", "cluster='h1000'",
        "accelerator='h1000'", "model 'nosuch'", "rules='foo'", "nope", "limit 'tp=x'", "nodes=0", "H100-PCIe",
    ):  # fmt: skip
        assert text.count(fault) == 1, fault
    assert invoke("llama-3.1-8b", "h100", "--time-limit", "nan")[0] == 2
    assert invoke("gpt-3-175b", "h100", "--seq-len", "100000")[0] == 2
    assert invoke("llama-3.1-8b", "")[0] == 2
    assert invoke("llama-3.1-8b", "h100", "--json", "/nowhere/x.json")[0] == 2


def test_the_document_holds_the_answer_and_the_plan() -> None:
    code, text = invoke("llama-3.1-8b", "h100", "dgx-a100:1", "-q", "--json", "-")
    document = json.loads(text)
    assert code == 0
    assert [one["asked"] for one in document["fits"]] == ["h100", "dgx-a100:1"]
    first = document["fits"][0]
    assert (first["answer"], first["devices"], first["infeasible_up_to"], first["asked_up_to"]) == ("tight", 2, 1, 4096)
    assert first["arithmetic"]["bytes_per_param"] == 18.0
    assert sw.Plan.from_json(json.dumps(first["plan"])).degrees.devices == 2
    assert first["evaluation"]["fits"]
    assert first["status"] == "OPTIMAL"


def test_memory_is_told_line_by_line() -> None:
    code, text = invoke("llama-3.1-8b", "h100")
    assert code == 0
    (one,) = fit("llama-3.1-8b", "h100", workers=1)
    assert one.evaluation is not None
    worst = one.evaluation.stages[one.evaluation.worst_stage]
    for name in ("weights", "gradients", "optimizer", "activations", "logits", "reserve", "total"):
        assert any(name in line and f"{getattr(worst, name) / 1e9:.3f}" in line for line in text.splitlines()), name
    assert "18 bytes a parameter (weights 2, gradients 4, optimizer 12)" in text
    assert "fits, tight, on 2 devices of 4,096, and on no fewer" in text
    assert "assumed: 3,360 sequences" in text
    assert "assumed: 3,360" not in invoke("llama-3.1-8b", "h100", "--global-batch", "64")[1]


def test_a_frozen_model_needs_no_more_devices_than_hold_its_adapters_and_frozen_weights() -> None:
    """Llama-2-7B with adapters of rank 8: 13 GB of weights that are not trained, on one device."""
    workload = sw.Training(1024, 8, lora_rank=8)
    (answer,) = fit("llama-2-7b", ["h100"], workload, quick=True)
    assert answer.devices == 1
    result = solve("llama-2-7b", "dgx-h100:1", workload, objective="devices", workers=1)
    assert result.value == 1


def test_a_limit_that_no_rule_admits_is_told_with_the_rule() -> None:
    code, text = invoke("llama-3.1-8b", "dgx-h100:1", "--limit", "tp=3")
    assert (code, "tp=3 does not divide num_attention_heads=32" in text) == (1, True)


def test_the_command_takes_the_details_of_a_workload() -> None:
    """The command says of adapters, documents and experts what `sw.fit` does."""
    code, text = invoke(
        "qwen2.5-7b", "a10g", "--global-batch", "64", "--lora-rank", "8", "--qlora", "--mean-document-length", "512",
        "-q", "--json", "-",
    )  # fmt: skip
    workload = sw.Training(SEQ_LEN, 64, lora_rank=8, base_precision="nf4", lengths=((512.0, 1),))
    (one,) = fit("qwen2.5-7b", "a10g", workload, workers=1)
    (said,) = json.loads(text)["fits"]
    assert (code, said["devices"], said["evaluation"]) == (
        0, one.devices, json.loads(json.dumps(one.evaluation.to_dict() if one.evaluation else None)),
    )  # fmt: skip
    code, text = invoke(
        "mixtral-8x7b", "h100", "--pad-experts", "--mtp-layers", "1", "--lora-rank", "0", "--expert-imbalance", "0.5"
    )
    assert code == 2
    for fault in (
        "pad_experts=True needs",
        "mtp_layers=1 with lora_rank=0",
        "lora_rank=0 must",
        "expert_imbalance=0.5",
    ):
        assert fault in text, fault
