"""Which layouts the frameworks take: reports of people who tried, each with what a planner should have said.

docs/cases.md lists all of them, and those that are not held here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from case_inputs import bloom_like, evaluated, gpt_like, llama_like, nodes

import shardwise as sw
from shardwise.data.hf_config import model_from_config
from shardwise.data.model import Attention
from shardwise.data.rules import MEGATRON_CORE, context_faults, plan_risks, tensor_faults
from shardwise.solver.default_plan import even_split
from shardwise.solver.export.megatron import pipeline_layout


def test_78_layers_on_12_stages_need_7_on_the_largest_and_the_slack_is_spread() -> None:
    """bloom-78-on-12: bigscience-workshop/bigscience train/tr11-176B-ml/chronicles-prequel.md.

    Eleven stages of 7 and a last one of 1 wasted GPUs; 78 / 12 is 6.5, so that 7 is the largest stage whichever way.
    """
    assert even_split(78, 12) == [7] * 6 + [6] * 6

    def run(layers: int, stages: list[int] | None = None) -> sw.Evaluation:
        workload = sw.Training(2048, 2048, precision="fp16", attention="unfused")
        return evaluated(
            bloom_like(layers, 13824, 96), "jean-zay:48", workload, profile="megatron-2021", recompute="full",
            stages=stages, tp=4, pp=12, dp=8, micro_batch=2, sequence_parallel=False,
        )  # fmt: skip

    measured, spread, fuller = run(78, [7] * 11 + [1]), run(78), run(82, [7] * 11 + [5])
    assert measured.legal
    assert spread.legal
    # The imbalance is shown: the last stage waits far more than the others, in the evaluation of every stage.
    assert measured.bubble[-1] > 0.5 > 0.2 > max(measured.bubble[:-1])
    assert measured.stages[-1].weights < measured.stages[1].weights / 2
    # Spreading the slack gains nothing, the largest stage stays 7; four layers more, with the head on the light end, are
    # nearly free.
    assert spread.step_time_s == pytest.approx(measured.step_time_s, rel=0.02)
    assert fuller.step_time_s == pytest.approx(measured.step_time_s, rel=0.02)


def test_40_layers_on_16_stages_are_all_placed_and_written_out() -> None:
    """megatron-1303, https://github.com/NVIDIA/Megatron-LM/issues/1303.

    The launcher built 2 layers a stage, 32 of 40.
    """
    assert sorted(even_split(40, 16)) == [2] * 8 + [3] * 8
    result = sw.solve("gpt-3-13b", "dgx-h100:2", sw.Training(2048, 64), limits=["pp=16"], workers=1)
    assert result.plan is not None
    assert sum(result.plan.chunk_layers) == 40
    # 2 layers on every stage would be 32: the largest stage holds 3 at least, and the launcher is told so.
    assert max(stage.layers for stage in result.plan.stages) >= 3
    assert _layers_in_the_layout(result.plan) == 40


def test_80_layers_on_16_stages_of_2_chunks_are_never_64() -> None:
    """megatron-468, https://github.com/NVIDIA/Megatron-LM/issues/468.

    80 % 32 is not 0; the launcher trained 64 layers.

    Uneven chunks are legal only with a layout that names them, which an exported plan always does.
    """
    chunks = even_split(80, 32)
    assert sum(chunks) == 80
    with pytest.raises(sw.InputError, match="must add up to the model's 80 layers"):
        evaluated("llama-3.1-70b", "dgx-h100:16", sw.Training(4096, 128), pp=16, vpp=2, stages=[2] * 32)
    result = sw.solve(
        "llama-3.1-70b", "dgx-h100:16", sw.Training(4096, 128), limits=["pp=16", "vpp=2", "cp=1"], workers=1
    )
    assert result.plan is not None
    assert sum(result.plan.chunk_layers) == _layers_in_the_layout(result.plan) == 80
    # 16 stages of 5 chunks are even: one layer each.
    assert even_split(80, 80) == [1] * 80
    even = evaluated("llama-3.1-70b", "dgx-h100:16", sw.Training(4096, 128), pp=16, vpp=5)
    assert even.legal


def _layers_in_the_layout(plan: sw.Plan) -> int:
    """Decoder layers of `--pipeline-model-parallel-layout`: repeats of chunks, then of layers, written out."""
    text = re.sub(r"\(([^)]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), pipeline_layout(plan.chunk_layers))
    return re.sub(r"t\*(\d+)", lambda m: "t" * int(m[1]), text).count("t")


def test_stage_layers_that_do_not_add_up_are_refused_on_one_stage_too() -> None:
    """megatron-1778, https://github.com/NVIDIA/Megatron-LM/issues/1778.

    One of 20 layers was trained, and TFLOP/s told of 20.
    """
    with pytest.raises(sw.InputError, match="stages=1 must add up to the model's 20 layers"):
        evaluated(gpt_like(20, 1024, 16, 50257), "dgx-a100:1", sw.Training(1024, 8), pp=1, stages=[1])


def test_whether_few_key_value_heads_are_replicated_is_said_to_depend_on_the_version() -> None:
    """msswift-8219, https://github.com/modelscope/ms-swift/issues/8219.

    2 groups with tp=8: a ValueError in 0.15, runs in 0.16.
    """
    now = evaluated("qwen3.5-397b-a17b", "dgx-h200:16", sw.Training(4096, 128), tp=8)
    assert now.legal
    (risk,) = (risk for risk in now.risks if "num_key_value_heads" in risk)
    assert risk.startswith(
        "tp=8 replicates num_key_value_heads=2: Megatron-Core 0.15 and earlier refuse it, 0.16 takes it"
    )
    model = sw.load_model("qwen3.5-397b-a17b")
    assert tensor_faults(replace(MEGATRON_CORE, kv_replicas=False), model, 8, False, 4096)
    assert not [r for r in plan_risks(MEGATRON_CORE, model, "bf16", sw.Degrees(tp=2)) if "num_key_value" in r]


def test_interleaving_with_too_few_micro_batches_says_where_they_come_from() -> None:
    """nemo-14288, https://github.com/NVIDIA-NeMo/Speech/issues/14288.

    A range [PP=6, M=3] told nobody what to change.
    """
    found = evaluated("llama-3.1-70b", "dgx-h100:6", sw.Training(4096, 6), tp=4, pp=6, vpp=2, dp=2)
    (fault,) = found.faults
    assert fault.startswith("vpp=2 needs micro_batches=3 to be a multiple of pp=6")
    assert "global_batch / (micro_batch x dp)" in fault
    assert "raise global_batch, or lower micro_batch, dp or pp" in fault


def test_context_parallelism_is_limited_by_every_kind_of_layer() -> None:
    """primerl-3042, https://github.com/PrimeIntellect-ai/prime-rl/pull/3042.

    2 key/value heads, 128 Mamba heads in 8 groups.

    Ulysses over 2 and 8 ranks is legal where heads are replicated. Megatron replicates Mamba groups too, so that 16,
    illegal in prime-rl, is legal there.
    """
    model = sw.load_model("nemotron-3-ultra-550b-a55b")
    pack = replace(MEGATRON_CORE, zigzag=False, ulysses_kv="multiple")
    assert {kind.mixer.kv_heads for kind in model.kinds if isinstance(kind.mixer, Attention)} == {2}
    assert context_faults(pack, model, 1, 2, 131072, "a2a") == []
    assert context_faults(pack, model, 1, 8, 131072, "a2a") == []
    faults = context_faults(pack, model, 1, 12, 12 * 8192, "a2a")
    # Both kinds of layer speak, the attention and the Mamba layers.
    assert any("num_attention_heads=64" in fault for fault in faults)
    assert any("mamba n_groups=8" in fault for fault in faults)


@pytest.mark.parametrize(
    ("model", "tp", "legal"),
    [
        ("qwen3.5-397b-a17b", 2, True),
        ("qwen3.5-397b-a17b", 4, False),
        ("qwen3-30b-a3b", 4, True),
        ("qwen3-30b-a3b", 8, False),
        ("llama-3.1-70b", 8, True),
        ("llama-3.1-70b", 16, False),
        ("deepseek-v3", 8, True),
        ("deepseek-v3", 16, True),
    ],
)
def test_torchtitan_does_not_replicate_key_value_heads_and_latent_attention_has_none(
    model: str, tp: int, legal: bool
) -> None:
    """torchtitan-2574, https://github.com/pytorch/torchtitan/issues/2574.

    Checked since pull request 2577: tp is at most 2, 4 and 8 there; MLA is exempt.
    """
    found = evaluated(model, "dgx-h100:16", sw.Training(4096, 128), rules="torchtitan", tp=tp)
    assert found.legal is legal
    if not legal:
        assert "torchtitan does not replicate them" in found.faults[0]


# -- reports about serving whose rule the training packs have too ------------------------------------------------------


def test_every_violated_rule_is_named_not_only_the_first() -> None:
    """vllm-52435, https://github.com/vllm-project/vllm/issues/52435.

    64 heads and 256 experts on 3 GPUs: two more experts fix one rule of two.
    """
    config = {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8,
        "vocab_size": 129280,
    }  # fmt: skip
    found = evaluated(
        model_from_config(config, "experts"), nodes("H100-SXM", 3, "nvlink4"), sw.Training(4096, 6),
        rules="free", tp=3, ep=3, etp=1,
    )  # fmt: skip
    assert "tp=3 does not divide num_attention_heads=64" in found.faults
    assert "ep=3 does not divide num_experts=256" in found.faults


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "legal"),
    [
        (40, 10, 1, True), (40, 10, 2, True), (40, 10, 4, False), (40, 10, 5, True), (40, 10, 10, True),
        (52, 52, 8, False), (52, 52, 4, True), (28, 4, 8, False), (28, 4, 4, True), (40, 40, 6, False),
        (128, 128, 14, False), (96, 8, 6, False),
    ],
)  # fmt: skip
def test_tp_divides_the_heads_and_the_key_value_heads_or_replicates_them(
    heads: int, kv_heads: int, tp: int, legal: bool
) -> None:
    """vllm-5951, vllm-2652, vllm-4232, sglang-2591: issues of vllm-project/vllm and sgl-project/sglang.

    10 key/value heads go 2, 5 and 10 ways and not 4; 52 and 28 heads do not go 8 ways, 40 not 6, 128 not 14.
    """
    model = llama_like(2, heads * 64, heads, kv_heads, 128 * 3 * 5 * 7 * tp, 32000)
    faults = tensor_faults(MEGATRON_CORE, model, tp, False, 4096)
    assert (faults == []) is legal
    assert all(f"={heads}" in fault or f"={kv_heads}" in fault for fault in faults)


@pytest.mark.parametrize(("vocab", "tp"), [(151552, 6), (129280, 24)])
def test_a_vocabulary_that_tp_does_not_divide_is_padded(vocab: int, tp: int) -> None:
    """vllm-31474, sglang-31799: 151,552 % 6 and 129,280 % 24 are not 0. Training packs pad to a multiple of 128 tp."""
    model = llama_like(2, 96 * 64, 96, 96, 128 * tp, vocab)
    assert vocab % tp
    found = evaluated(model, nodes("H20", tp, "nvlink4"), sw.Training(4096 * 3, 6), tp=tp)
    assert found.legal
    plain = evaluated(model, nodes("H20", tp, "nvlink4"), sw.Training(4096 * 3, 6), tp=1)
    assert found.stages[0].logits > plain.stages[0].logits / tp


@pytest.mark.parametrize(
    ("width", "etp", "narrow"), [(320, 8, True), (320, 4, False), (320, 1, False), (768, 32, True), (768, 16, False)]
)
def test_a_width_that_8_bit_products_do_not_take_is_a_risk(width: int, etp: int, narrow: bool) -> None:
    """vllm-54178, sglang-3345: heads alone do not decide. In training a width on one device is a multiple of 16."""
    config = {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 64,
        "num_key_value_heads": 64, "intermediate_size": width, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000,
    }  # fmt: skip
    model = model_from_config(config, "experts")
    degrees = sw.Degrees(tp=etp, etp=etp)
    found = [risk for risk in plan_risks(MEGATRON_CORE, model, "fp8", degrees) if "moe_intermediate_size" in risk]
    assert bool(found) is narrow
    assert all(f"{width} / etp={etp} = {width // etp}" in risk for risk in found)
    assert plan_risks(MEGATRON_CORE, model, "bf16", degrees) == []


def test_tp_is_not_limited_to_powers_of_two() -> None:
    """sglang-31799, alpa-759: 24 and 6 devices are normal counts."""
    found = evaluated(
        llama_like(12, 96 * 64, 96, 24, 128 * 48, 32000),
        nodes("H200-SXM", 8, "nvlink4", 3),
        sw.Training(4096 * 3, 8),
        tp=24,
    )
    assert found.legal
    result = sw.solve("bloom-3b", nodes("A100-SXM-40GB", 2, "nvlink3", 3), sw.Training(2048, 12), workers=1)
    assert result.status == "OPTIMAL"
    assert result.evaluation is not None
    assert result.evaluation.devices == 6


def test_an_even_split_never_differs_by_more_than_one_layer() -> None:
    """All of the reports on stages above: floor(layers / stages) is never taken for the split."""
    for layers in (20, 30, 40, 61, 78, 80, 94):
        for chunks in (2, 3, 4, 7, 12, 16):
            split = even_split(layers, chunks)
            assert sum(split) == layers
            assert all(a >= b for a, b in pairwise(split))
            assert split[0] - split[-1] <= 1


@pytest.mark.parametrize(
    ("rules", "model", "count", "batch", "layout", "words"),
    [
        ("megatron-core", "qwen2.5-14b", 4, 64, {"tp": 16, "pp": 2}, "tp=16 does not divide num_attention_heads=40"),
        ("megatron-core", "llama-3.1-70b", 8, 64, {"tp": 16, "pp": 4}, None),
        ("megatron-core", "deepseek-v3", 32, 256, {"pp": 8, "ep": 32, "etp": 1}, None),
        ("megatron-core", "llama-3.1-70b", 8, 64, {"tp": 8, "pp": 2, "vpp": 2}, None),
        ("megatron-core", "llama-3.1-70b", 8, 64, {"tp": 8, "vpp": 2}, "vpp=2 needs pp > 1"),
        ("megatron-core", "llama-3.1-70b", 8, 60, {"tp": 8, "pp": 8, "vpp": 2}, "multiple of pp=8"),
        ("megatron-core", "qwen3-235b-a22b", 16, 96, {"pp": 4, "vpp": 24, "ep": 8, "etp": 1, "dp": 32}, "micro_batches=3"),
        ("megatron-core", "qwen3-235b-a22b", 16, 128, {"pp": 4, "vpp": 24, "ep": 8, "etp": 1, "dp": 32}, None),
        ("megatron-core", "llama-3.2-1b", 1, 512, {"micro_batch": 64}, None),
        ("megatron-core", "mixtral-8x7b", 4, 96, {"ep": 16}, "ep=16 does not divide num_experts=8"),
        ("megatron-core", "qwen3-30b-a3b", 1, 64, {"tp": 2, "sequence_parallel": False}, "needs sequence_parallel=true"),
        ("megatron-core", "llama-3.1-8b", 1, 64, {"pp": 2, "zero": 3}, "zero=3 needs pp=1"),
        ("megatron-core", "llama-3.1-8b", 2, 64, {"tp": 4, "cp": 4, "cp_comm_type": "a2a"}, "as cp_comm_type=a2a requires"),
        ("megatron-core", "deepseek-v3", 32, 256, {"cp": 2, "ep": 8, "cp_comm_type": "a2a"}, "use p2p"),
        ("megatron-core", "nemotron-h-56b", 32, 256, {"tp": 16}, "tp=16 does not divide mamba n_groups=8"),
        ("megatron-core", "nemotron-h-56b", 32, 256, {"tp": 8}, None),
        ("megatron-core", "gpt-oss-20b", 1, 64, {"cp": 2, "cp_comm_type": "p2p"}, "does not take a sliding window"),
        ("mindspeed", "qwen2.5-0.5b", 1, 64, {"pp": 2, "vpp": 2, "schedule": "dualpipe-v"}, "needs untied embeddings"),
        ("mindspeed", "llama-3.1-8b", 1, 64, {"pp": 2, "vpp": 2, "cp": 2, "schedule": "dualpipe-v"}, "needs cp=1"),
        ("torchtitan", "llama-3.1-8b", 1, 64, {"pp": 2, "vpp": 2, "schedule": "zb-v"}, None),
        ("torchtitan", "qwen3-30b-a3b", 1, 64, {"tp": 4, "etp": 4}, "etp=4 must be 1"),
        ("torchtitan", "llama-3.1-8b", 1, 64, {"zero": 1}, "zero=1 is not one of 0, 2, 3"),
        ("torchtitan", "llama-3.2-1b", 4, 64, {"pp": 8, "vpp": 3}, "makes 24 chunks, more than layers=16 + 2"),
        ("deepspeed", "llama-3.1-8b", 1, 64, {"pp": 2, "zero": 2}, "zero=2 needs pp=1"),
        ("deepspeed", "llama-3.1-8b", 1, 64, {"pp": 2, "zero": 1}, None),
        ("deepspeed", "qwen2.5-7b", 1, 64, {"cp": 8}, "tp x cp = 8 does not divide num_attention_heads=28"),
        ("deepspeed", "qwen2.5-7b", 1, 64, {"cp": 4}, None),
        ("accelerate", "llama-3.1-8b", 1, 64, {"pp": 2}, "accelerate has no pipeline parallelism"),
        ("accelerate", "llama-3.1-8b", 1, 64, {"tp": 2, "dp": 4, "dp_replicate": 4}, "zero=3 needs dp / dp_replicate > 1"),
        ("accelerate", "llama-3.1-8b", 1, 64, {"tp": 2, "dp": 4}, None),
    ],
)  # fmt: skip
def test_layouts_of_the_kinds_reported_are_taken_or_refused_with_the_rule(
    rules: str, model: str, count: int, batch: int, layout: dict[str, Any], words: str | None
) -> None:
    """What such reports ask next, of other models, sizes and frameworks: every rule from both sides."""
    found = evaluated(model, f"dgx-h100:{count}", sw.Training(4096, batch), rules=rules, **layout)
    assert found.legal is (words is None), found.faults
    assert (words or "") in "; ".join(found.faults)
