"""What fits: reports of people whose runs ran out of memory, or did not, each with what a planner should have said.

docs/cases.md lists all of them, and those that are not held here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from case_inputs import evaluated, gpt_like, llama_like, nodes, states_bytes

import shardwise as sw
from shardwise.data.limits import parse_limits
from shardwise.data.profile import load_profile
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.evaluate import cost_tables, stage_params

GIB = 2**30
GB = 1e9


def test_every_plugin_runs_out_for_one_of_two_reasons_and_only_one_is_the_state() -> None:
    """colossal-5068, https://github.com/hpcaitech/ColossalAI/issues/5068.

    Llama-2-70B, 64.24 Gi parameters, 16-bit gradients, 32 A100 of 80 GB.

    TP4 DP8 with ZeRO-1 holds 64.2 + 24.1 = 88.3 GiB and cannot fit; TP8 PP2 DP2 holds 40.1 GiB and can. The second died
    while it loaded, which no line of ours counts yet (docs/cost-model.md).
    """
    model = sw.load_model("llama-2-70b")
    assert model.params / GIB == pytest.approx(64.24, abs=0.01)
    profile = replace(load_profile("megatron-core"), gradient_bytes=2.0)

    def run(**degrees: Any) -> sw.Evaluation:
        instance = sw.build_instance(model, "dgx-a100:4", sw.Training(1024, 16))
        instance = replace(instance, profile=profile)
        plan = plan_from_degrees(instance, degrees_from(instance, micro_batch=2, **degrees), recompute="full")
        return sw.evaluate(instance, plan)

    wide, deep = run(tp=4, dp=8), run(tp=8, pp=2, dp=2)
    # The padded vocabulary and what tp does not split are within 1 % of the reporter's arithmetic.
    assert states_bytes(wide) / GIB == pytest.approx(88.3, rel=0.01)
    assert states_bytes(deep) / GIB == pytest.approx(40.1, rel=0.01)
    assert wide.verdict == "does not fit"
    assert deep.verdict == "fits"


def test_the_ends_of_a_pipeline_of_single_layers_need_more_than_its_middle() -> None:
    """deepspeed-1378, https://github.com/deepspeedai/DeepSpeed/issues/1378.

    10,824, 8,041 and 10,981 MB allocated on first, middle, last.

    The report leaves the width out, so that only what it explains is held: the ends hold the tied embedding too, the last
    one most, and a split with empty ends is searched.
    """
    model = gpt_like(8, 2048, 16, 50257)
    workload = sw.Training(2048, 32, precision="fp16", attention="unfused")
    found = evaluated(
        model, "dgx-a100:1", workload, rules="deepspeed", profile="megatron-2021", recompute="full", pp=8, zero=0
    )
    held = [stage.of_kind("allocated") for stage in found.stages]
    assert found.legal
    assert held[-1] > held[0] > 1.25 * max(held[1:-1])
    embedding = 50304 * 2048 + 2048 * 2048  # the padded vocabulary and learned positions, 16 bytes each
    assert states_bytes(found, 0) - states_bytes(found, 1) == pytest.approx(16 * embedding, rel=0.03)
    apart = evaluated(
        gpt_like(6, 2048, 16, 50257), "dgx-a100:1", workload, rules="deepspeed", profile="megatron-2021", pp=8,
        stages=[0, 1, 1, 1, 1, 1, 1, 0],
    )  # fmt: skip
    assert apart.legal


def test_24_small_devices_are_a_lower_bound_and_32_are_enough() -> None:
    """llmfoundry-437, https://github.com/mosaicml/llm-foundry/issues/437.

    MPT-30B fully trained with Lion under FSDP, 12 bytes a parameter.

    360 GB are 23 V100 of 16 GB at least; the maintainer says 24, and 32 with a margin. Lion keeps one moment, as SGD does.
    """
    model = gpt_like(48, 7168, 64, 50432, 8192)
    assert model.params / GB == pytest.approx(30, rel=0.01)

    def planned(count: int, optimizer: str) -> sw.Result:
        cluster = nodes("V100-SXM-16GB", 8, "nvlink2", count, "ib-edr")
        workload = sw.Training(2048, 8 * count, precision="fp16", optimizer=optimizer, attention="unfused")  # type: ignore[arg-type]
        return sw.solve(model, cluster, workload, rules="accelerate", profile="fsdp1", limits=["cp=1"], workers=1)

    few, enough = planned(3, "sgd"), planned(4, "sgd")
    assert few.status == "INFEASIBLE"
    assert "memory: no plan fits" in few.reason[0]
    assert enough.status == "OPTIMAL"
    for optimizer, per_param in (("sgd", 12), ("adamw", 16)):
        cluster = nodes("V100-SXM-16GB", 8, "nvlink2", 4, "ib-edr")
        workload = sw.Training(2048, 32, precision="fp16", optimizer=optimizer, attention="unfused")  # type: ignore[arg-type]
        spread = evaluated(model, cluster, workload, rules="accelerate", profile="fsdp1", zero=3)
        assert states_bytes(spread) * 32 / model.params == pytest.approx(per_param, rel=0.01)
    with pytest.raises(sw.InputError, match=r"precision='bf16' is not supported by V100-SXM-16GB"):
        sw.solve(model, nodes("V100-SXM-16GB", 8, "nvlink2"), sw.Training(2048, 8), rules="accelerate")


def test_unfused_attention_grows_with_the_square_of_the_sequence() -> None:
    """longvita-7, https://github.com/VITA-MLLM/Long-VITA/issues/7.

    One layer of Qwen2.5-14B, tp=4: 4,026, 12,110 and 43,931 MB at 4k, 8k, 16k.

    The three points have a quadratic term of 155 bytes a pair of tokens, on 10 heads: above one fused softmax and below
    a chain of fp32 operations. At 32k the whole model ran out on 8 H20 of 96 GB.
    """
    measured = [4026, 12110, 43931]
    square = (measured[2] - 3 * measured[1] + 2 * measured[0]) / 6 * 1e6 / 4096**2
    assert square == pytest.approx(155, abs=1)
    config = llama_like(1, 5120, 40, 8, 13824, 152064)
    found = {}
    for attention in ("flash", "unfused", "eager"):
        memory = [
            evaluated(
                config, nodes("H20", 8, "nvlink4"), sw.Training(length, 2, attention=attention), recompute="full", tp=4
            ).stages[0].recompute_working
            for length in (4096, 8192, 16384)
        ]  # fmt: skip
        found[attention] = (memory[2] - 3 * memory[1] + 2 * memory[0]) / 6 / 4096**2
    assert found["flash"] == pytest.approx(0, abs=0.1)
    assert found["unfused"] < square < found["eager"]
    verdicts = {
        attention: evaluated(
            "qwen2.5-14b", nodes("H20", 8, "nvlink4"), sw.Training(32768, 8, attention=attention), tp=8  # type: ignore[arg-type]
        ).verdict
        for attention in found
    }  # fmt: skip
    assert verdicts == {"flash": "fits", "unfused": "does not fit", "eager": "does not fit"}


def test_flash_attention_is_not_taken_for_granted_on_a_v100() -> None:
    """megatron-525, https://github.com/NVIDIA/Megatron-LM/issues/525.

    GPT-2 of 774M: an estimate of 23.3 GB, out of memory at 29.6 GB on 32 GB.

    The micro-batch is not in the report; the one at which flash attention would fit with room and the scores do not is 4.
    """
    model = gpt_like(36, 1280, 20, 50257, 1024)
    assert model.params == pytest.approx(774e6, rel=0.01)

    def run(attention: str) -> sw.Evaluation:
        workload = sw.Training(1024, 64, precision="fp16", attention=attention)  # type: ignore[arg-type]
        return evaluated(model, nodes("V100-SXM-32GB", 1, "nvlink2"), workload, profile="megatron-2021", micro_batch=4)

    scores, flash = run("unfused"), run("flash")
    assert scores.verdict == "does not fit"
    assert not any("FlashAttention" in risk for risk in scores.risks)
    assert any("V100-SXM-32GB is older than Ampere" in risk for risk in flash.risks)
    assert scores.stages[0].activations - flash.stages[0].activations == pytest.approx(
        36 * 5 * 20 * 4 * 1024**2, rel=0.35
    )


def test_the_heaviest_stage_is_told_not_the_average() -> None:
    """megbridge-5077, https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5077.

    8 layers as 1, 2, 2, 3: an average is 32 % too low.
    """
    model = llama_like(8, 1024, 16, 16, 4096, 32000)
    instance = sw.build_instance(model, "dgx-h100:1", sw.Training(1024, 16))
    plan = plan_from_degrees(instance, degrees_from(instance, pp=4, dp=1), stages=[1, 2, 2, 3])
    found = sw.evaluate(instance, plan)
    held = [stage_params(cost_tables(instance), plan, k).total for k in range(4)]
    layer, vocabulary = model.layers[0].params, 32000 * 1024
    assert held == [layer + vocabulary, 2 * layer, 2 * layer, 3 * layer + vocabulary + 1024]
    assert sum(held) == model.params
    assert found.worst_stage in (0, 3)
    assert found.peak_memory_bytes == max(stage.total for stage in found.stages)
    assert len({stage.total for stage in found.stages}) >= 3
    # Mixed dense and expert layers: the dense ones are where they are.
    mixed = evaluated("deepseek-v2-lite", "dgx-h100:1", sw.Training(4096, 8), pp=2, ep=4, etp=1, stages=[13, 14])
    assert mixed.stages[0].weights != mixed.stages[1].weights


def test_vocabulary_work_is_split_by_tp_and_not_by_expert_parallelism() -> None:
    """nemorl-2668, https://github.com/NVIDIA-NeMo/RL/pull/2668.

    Qwen3.5-35B-A3B on 16 H100, EP16: TP1 out of memory, TP2 ETP1 runs.
    """

    def run(tp: int) -> sw.Evaluation:
        return evaluated("qwen3.5-35b-a3b", "dgx-h100:2", sw.Training(4096, 64), tp=tp, ep=16, etp=1)

    one, two = run(1), run(2)
    assert one.legal
    assert two.legal
    assert two.stages[0].logits == pytest.approx(one.stages[0].logits / 2, rel=0.02)
    assert not one.fits
    assert two.verdict == "fits"


def test_vocabulary_work_is_not_split_by_pipelines_or_replicas() -> None:
    """skyrl-1610, https://github.com/NovaSky-AI/SkyRL/pull/1610.

    65k tokens of a vocabulary of 128k: fp32 logits alone are 34 GB.
    """
    model = llama_like(8, 4096, 32, 8, 14336, 131072)

    def logits(**degrees: Any) -> float:
        return evaluated(model, "dgx-b200:1", sw.Training(65536, 8), recompute="full", **degrees).stages[-1].logits

    alone = logits(dp=1)
    assert alone > 4 * 65536 * 131072
    assert logits(dp=8) == logits(pp=4, dp=2) == alone
    ends = 2 * 2 * 65536 * 4096  # input and output of the final norm are whole on every device
    assert logits(tp=4, dp=1) - ends == pytest.approx((alone - ends) / 4)


def test_logits_gathered_ahead_of_the_loss_are_whole_on_every_device() -> None:
    """aleph_97359: LLaMA-13B with a vocabulary of 128k, TP2 and micro-batch 8, ran out of memory on 64 A100 of 80 GB in a
    library that gathers them; the same with micro-batch 4 ran."""
    model = llama_like(40, 5120, 40, 40, 13824, 128000)

    def run(profile: str, micro_batch: int, tp: int) -> sw.Evaluation:
        workload = sw.Training(2048, 2048, attention="unfused", fused_norm=False)
        instance = sw.build_instance(model, "dgx-a100:8", workload, rules="free", profile=profile)
        degrees = degrees_from(instance, tp=tp, micro_batch=micro_batch, sequence_parallel=False)
        return sw.evaluate(instance, plan_from_degrees(instance, degrees, recompute="full"))

    for micro_batch, fits in ((4, True), (8, False)):
        assert run("aleph-scaling", micro_batch, 2).fits == fits
        assert run("megatron-2023", micro_batch, 2).fits
    assert run("aleph-scaling", 4, 2).stages[0].logits == run("aleph-scaling", 4, 1).stages[0].logits
    assert run("megatron-2023", 4, 2).stages[0].logits < 0.6 * run("megatron-2023", 4, 1).stages[0].logits


def test_long_sequences_on_64_devices_take_context_parallelism() -> None:
    """nemorl-883, https://github.com/NVIDIA-NeMo/RL/issues/883.

    Qwen3-32B, 131,072 tokens: TP8 DP8 ran to 49,152; CP 4 or more is needed.
    """
    kept = evaluated("qwen3-32b", "dgx-h100:8", sw.Training(131072, 64), tp=8, dp=8)
    assert kept.verdict == "does not fit"
    assert kept.stages[0].logits > 4 * 131072 * 151936 / 8
    split = evaluated("qwen3-32b", "dgx-h100:8", sw.Training(131072, 64), recompute="full", tp=8, cp=4, dp=2)
    assert split.verdict == "fits"
    best = sw.solve("qwen3-32b", "dgx-h100:8", sw.Training(131072, 64), limits=["tp=8"], workers=1)
    assert best.plan is not None
    assert best.plan.degrees.cp >= 4


@pytest.mark.parametrize("experts", [1, 8])
def test_the_default_batch_of_a_16b_runs_out_and_a_smaller_one_fits(experts: int) -> None:
    """torchtitan-1789, https://github.com/pytorch/torchtitan/issues/1789.

    DeepSeek-V3-16B, 8 H100: out of memory, then 73.3 GiB, 92.7 %.
    """

    def run(micro_batch: int) -> sw.Evaluation:
        return evaluated(
            "deepseek-v2-lite", "dgx-h100:1", sw.Training(4096, 8 * micro_batch), rules="torchtitan",
            recompute="selective", micro_batch=micro_batch, ep=experts,
        )  # fmt: skip

    assert run(4).verdict == "does not fit"
    assert run(2).verdict == "fits"
    memory = [run(micro_batch).peak_memory_bytes for micro_batch in (1, 2, 3, 4)]
    assert memory == sorted(memory)


def test_a_plan_at_96_percent_of_memory_is_not_called_safe() -> None:
    """torchtitan-1789: the reporter saw nodes fail at 96 %."""
    instance = sw.build_instance("deepseek-v2-lite", "dgx-h100:1", sw.Training(4096, 32), rules="torchtitan")
    plan = plan_from_degrees(instance, degrees_from(instance, micro_batch=2), recompute="selective")
    found = sw.evaluate(instance, plan)
    assert not any(risk.startswith("memory:") for risk in found.risks)
    device = replace(instance.accelerator, memory_bytes=int(found.peak_memory_bytes / 0.96))
    leaf = replace(instance.cluster.root, accelerator=device)
    near = sw.evaluate(replace(instance, cluster=replace(instance.cluster, root=leaf)), plan)
    assert near.verdict == "tight"
    (risk,) = (risk for risk in near.risks if risk.startswith("memory:"))
    assert "96 %" in risk
    assert "it may run out; memory_gb<=" in risk
    # The limit that is advised gives a plan that keeps clear of the edge.
    limit = risk.split("memory_gb<=")[1].split(" ")[0]
    clear = sw.solve(
        instance=replace(instance, limits=parse_limits([f"memory_gb<={limit}", "tp=1", "cp=1", "pp=1"])), workers=1
    )
    assert clear.evaluation is not None
    assert clear.evaluation.verdict in ("fits", "tight")
    assert clear.evaluation.peak_memory_bytes <= float(limit) * GB


def test_adam_of_671b_does_not_fit_on_96_devices_of_80_gb() -> None:
    """verl-3019, https://github.com/verl-project/verl/pull/3019.

    Weights and fp32 gradients are 42 GB a device, with Adam 126 GB.

    It ran with the whole optimizer on the host.
    """
    model = sw.load_model("deepseek-v3")
    assert 6 * model.params / 96 / GB == pytest.approx(41.9, abs=0.1)
    assert 18 * model.params / 96 / GB == pytest.approx(125.8, abs=0.1)
    result = sw.solve(model, "dgx-h100:12", sw.Training(4096, 96), limits=["cp=1", "zero=1"], workers=1)
    assert result.status == "INFEASIBLE"
    assert result.reason[0].startswith("memory: no plan fits")
    spread = evaluated(model, "dgx-h100:12", sw.Training(4096, 96), recompute="full", tp=1, pp=12, ep=8, etp=1)
    held = sum(stage.weights + stage.gradients for stage in spread.stages) / 12
    # Experts are spread over all devices; attention, shared experts and the ends are held by 8 ranks each.
    assert held > 6 * model.params / 96
    assert spread.verdict == "does not fit"
    offloading = sw.Training(4096, 96, offload_optimizer=1.0)
    freed = evaluated(model, "dgx-h100:12", offloading, recompute="full", tp=1, pp=12, ep=8, etp=1)
    assert freed.legal
    assert freed.fits
    assert freed.host is not None
    assert freed.host.node_bytes / GB > 16 * model.params / 12 / GB
    assert [stage.weights for stage in spread.stages].count(spread.stages[0].weights) < 12
    # Its last stage holds ten layers there: an uneven split is a plan like any other.
    uneven = evaluated(
        model,
        "dgx-h100:12",
        sw.Training(4096, 96),
        recompute="full",
        pp=12,
        ep=8,
        etp=1,
        stages=[5] * 5 + [4] * 4 + [3, 7, 10],
    )
    assert uneven.legal


def test_recompute_is_not_promised_to_lower_every_line() -> None:
    """megatron-1300, https://github.com/NVIDIA/Megatron-LM/issues/1300.

    Full recompute ran out where a module outside the layers dominated.

    What recompute cannot lower is there in lines of its own, and the layer that is repeated is one of them.
    """
    kept = evaluated("llama-3.1-8b", "dgx-h100:1", sw.Training(8192, 8), tp=2, pp=2)
    repeated = evaluated("llama-3.1-8b", "dgx-h100:1", sw.Training(8192, 8), tp=2, pp=2, recompute="full")
    for k in range(2):
        before, after = kept.stages[k], repeated.stages[k]
        assert after.activations < before.activations
        assert after.recompute_working > before.recompute_working == 0
        assert states_bytes(kept, k) == states_bytes(repeated, k)
        assert after.logits == before.logits
        assert after.reserve == before.reserve > 0


def test_a_risk_is_told_where_legal_plans_are_known_to_hang() -> None:
    """torchtitan-1558, https://github.com/pytorch/torchtitan/issues/1558.

    DeepSeek-V3 on 512 devices: FSDP with TP8 ran, PP4 with EP8 hung.
    """
    both = evaluated("deepseek-v3", "dgx-h200:64", sw.Training(4096, 1024), rules="torchtitan", pp=4, ep=8)
    assert both.legal
    assert any(risk.startswith("pp=4 with ep=8: legal, but reported to hang") for risk in both.risks)
    plain = evaluated("deepseek-v3", "dgx-h200:64", sw.Training(4096, 512), rules="torchtitan", tp=8)
    assert plain.legal
    assert not any("hang" in risk for risk in plain.risks)


def test_a_frozen_model_sharded_over_sixteen_devices_fits_by_its_states() -> None:
    """lf-6074, LLaMA-Factory issue 6074: adapters for Qwen2-72B with ZeRO-3 on 16 Ascend 910B.

    145 GB over 16 is 9 GB of weights a device, so a verdict by states is "fits"; what ran out was not a state.
    """
    instance = sw.build_instance("qwen2.5-72b", "ascend-910b:2", sw.Training(1024, 16, lora_rank=8), rules="deepspeed")
    plan = plan_from_degrees(instance, degrees_from(instance, dp=16, zero=3), recompute="full")
    evaluation = sw.evaluate(instance, plan)
    assert evaluation.legal
    assert evaluation.fits
    assert evaluation.stages[0].weights / GB == pytest.approx(145 / 16, rel=0.02)


def test_frozen_weights_are_counted_whole_unless_they_are_sharded() -> None:
    """trl-4100, https://github.com/huggingface/trl/issues/4100: adapters for a 32B model on 8 H100 ran out with ZeRO-3.

    Frozen weights are 64 GB over 8 if sharded and 64 GB a device if not, beside the logits; the reference model and the
    generations of reinforcement learning are not counted.
    """
    workload = sw.Training(2048, 8, lora_rank=8)
    instance = sw.build_instance("qwen2.5-32b", "dgx-h100:1", workload, rules="deepspeed")
    sharded, whole = (
        sw.evaluate(instance, plan_from_degrees(instance, degrees_from(instance, dp=8, zero=zero), recompute="full"))
        for zero in (3, 1)
    )
    assert sharded.stages[0].weights / GB == pytest.approx(8.2, abs=0.2)
    assert whole.stages[0].weights / GB == pytest.approx(65.7, abs=1)
    assert sharded.stages[0].logits > 0
    assert sharded.stages[0].optimizer < 0.01 * whole.stages[0].weights
