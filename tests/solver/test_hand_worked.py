"""Three small plans whose step time and memory are worked out by hand in the comments.

The pipeline arithmetic starts from stated seconds, put in place of the measured curves: milliseconds per layer and
micro-batch, per transfer, and per parameter synchronised and updated. Memory needs no curve.

The model: hidden 256, 4 heads of 64 with 2 key/value heads, gated MLP of 512, vocabulary 1000, untied.
    a layer has q, o 2 x 256 x 256 = 131,072; k, v 2 x 128 x 256 = 65,536; gate, up, down 3 x 512 x 256 = 393,216;
    two norms 512: in all 590,336 parameters
    embedding 1024 x 256 = 262,144 (1000 rows padded to a multiple of 128 tp); head the same and a norm: 262,400
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.data.cluster import Accelerator, Cluster, Domain, Link
from shardwise.data.instance import Instance
from shardwise.data.model import LayerKind, Model
from shardwise.data.model_parts import attention, layer, linear, mlp, moe, norm
from shardwise.data.plan import Degrees, Placement, Plan, Recompute, Stage
from shardwise.data.profile import load_profile
from shardwise.data.workload import Training
from shardwise.formulations import coefficients
from shardwise.formulations.coefficients import CostTables, ShardTimes
from shardwise.formulations.layer_time import LayerTime
from shardwise.formulations.step_time import SyncRates
from shardwise.solver.evaluate import Evaluation, evaluate

MS = 1e-3
HOPS_MS = (1.5, 2.5)
SYNC_S, OPTIMIZER_S = 1e-8, 2e-9
"""Seconds per parameter."""

DENSE = layer(256, attention(256, 4, 2, 64), mlp(256, 512, gated=True))
SPARSE = layer(256, attention(256, 4, 2, 64), moe(256, 4, 2, 128, shared_intermediate=256))


def instance_of(kind: LayerKind, layers: int) -> Instance:
    """Sequences of 512, sixteen a batch, on eight devices of 4 GB; the constants that matter are stated here."""
    model = Model(
        "toy", "toy", 256, 1000, False, (kind,) * layers,
        linear("embed", 1000, 256, "vocab"), linear("lm_head", 1000, 256, "vocab") + norm("norm", 256),
    )  # fmt: skip
    device = Accelerator("toy", "none", 4 * 10**9, 1e12, {"bf16": 1e15})
    cluster = Cluster("toy", Domain("node", "node", Link("l", "nvlink", 1e11, 1e-6), device, 8))
    profile = replace(
        load_profile("megatron-core"),
        step_overhead_s=20 * MS, dp_comm_floor=0.1, dp_comm_overlap=0.8, p2p_exposed=1.0, p2p_exposed_interleaved=0.5,
        straggler=0.0, memory_reserve_bytes=2048 * 2**20, memory_fragmentation=0.05, memory_activations=1.0,
        host_launch_s=0.0, memory_quantile=1.0, weight_bytes=2, gradient_bytes=4, reduce_bytes=4, logit_bytes=6,
        gathered_logits=0,
    )  # fmt: skip
    return Instance(model, cluster, Training(512, 16), profile=profile)


def plan_of(degrees: Degrees, chunks: list[tuple[int, ...]], recompute: Recompute = "none", block: int = 0) -> Plan:
    stages = tuple(Stage(own, recompute, block) for own in chunks)
    micro_batches = 16 // degrees.dp // degrees.micro_batch
    return Plan(degrees, stages, Placement((degrees.tp,), (degrees.pp,), (degrees.dp,)), micro_batches)


ONE_STAGE = plan_of(Degrees(dp=2, micro_batch=2), [(2,)])
UNEVEN = plan_of(Degrees(pp=3, micro_batch=4), [(2,), (2,), (1,)], "full", 1)
INTERLEAVED = plan_of(Degrees(pp=2, vpp=2, dp=2, micro_batch=2, zero=0), [(1, 1), (2, 1)], "selective")


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 10 forward, 20 backward, attention core 2; embedding 1 and 2; head 3 and 6 milliseconds."""
    times = ShardTimes(
        (LayerTime(10 * MS, 20 * MS, 2 * MS, 10 * MS),), LayerTime(1 * MS, 2 * MS), LayerTime(3 * MS, 6 * MS)
    )

    def rates(_instance: Any, _spans: Any, dp: int, _zero: int, _dp_replicate: int, **_how: Any) -> SyncRates:
        assert not _how["each_pass"]
        return SyncRates(SYNC_S if dp > 1 else 0.0, OPTIMIZER_S)

    def hops(_instance: Any, degrees: Degrees, _placement: Any) -> tuple[float, ...]:
        return tuple(hop * MS for hop in (*HOPS_MS[: degrees.pp - 1], 0.0))

    monkeypatch.setattr(CostTables, "times", lambda *_: times)
    monkeypatch.setattr(coefficients, "sync_rates", rates)
    monkeypatch.setattr(coefficients, "hop_times_s", hops)


def evaluated(plan: Plan, layers: int, unit_s: float | None = None) -> Evaluation:
    evaluation = evaluate(instance_of(DENSE, layers), plan, unit_s=unit_s)
    assert not evaluation.faults
    return evaluation


# -- step time ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stated")
def test_the_step_of_one_stage_and_two_replicas() -> None:
    # 16 sequences / dp 2 / micro-batch 2 = 4 micro-batches.
    # One micro-batch: 2 x (10 + 20) + (1 + 2) + (3 + 6) = 72.       (T2) W_0 = 4 x 72 = 288. No fill, no drain.
    # Parameters of the device: 2 x 590,336 + 262,144 + 262,400 = 1,705,216.
    # (T4) G = 1,705,216 x 1e-8 s = 17.05216; hidden up to 0.8 x 72 = 57.6, so the floor stays: 0.1 x G = 1.705216.
    #      optimizer 1,705,216 x 2e-9 s = 3.410432.                  X_0 = 5.115648.
    # (T5) T = 20 + 288 + 5.115648.
    evaluation = evaluated(ONE_STAGE, 2)
    assert evaluation.step_time_s == pytest.approx(313.115648 * MS, rel=1e-12)
    assert evaluation.parts.gradient_sync == pytest.approx(1.705216 * MS)
    assert evaluation.parts.optimizer == pytest.approx(3.410432 * MS)
    assert evaluation.parts.fill_and_drain == pytest.approx(0, abs=1e-15)
    assert evaluation.parts.transfers == pytest.approx(0, abs=1e-15)


@pytest.mark.usefixtures("stated")
def test_the_step_of_an_uneven_pipeline_with_recompute() -> None:
    # Stages 2 | 2 | 1, the first layer of each repeated; 16 / 4 = 4 micro-batches; transfers 1.5 and 2.5, all exposed.
    # (T1) stage 0: F = 2 x 10 + 1 + 1.5 = 22.5, B = 2 x 20 + 10 + 2 = 52; stage 1: F = 20 + 2.5 = 22.5,
    #      B = 40 + 10 + 1.5 = 51.5; stage 2: F = 10 + 3 = 13, B = 20 + 10 + 6 + 2.5 = 38.5.
    # (T3) stage 0: F0 F1 F2 until 67.5;                    B0 148-200, F3 -222.5, B1 -274.5, B2 296.5-348.5, B3 -400.5
    #      stage 1: F0 22.5-45, F1 -67.5, B0 96.5-148, F2 -170.5, B1 -222, F3 222.5-245, B2 -296.5, B3 -348
    #      stage 2: F0 45-58, B0 -96.5, F1 -109.5, B1 -148, F2 170.5-183.5, B2 -222, F3 245-258, B3 -296.5
    # (T4) dp = 1: the optimizer only, 2e-9 s x parameters: stage 0 has 2 x 590,336 + 262,144 = 1,442,816: 2.885632;
    #      stage 1 1,180,672: 2.361344; stage 2 590,336 + 262,400 = 852,736: 1.705472.
    # (T5) T = 20 + max(400.5 + 2.885632, 348 + 2.361344, 296.5 + 1.705472).
    evaluation = evaluated(UNEVEN, 5)
    assert evaluation.step_time_s == pytest.approx(423.385632 * MS, rel=1e-12)
    # Stage 0 works 4 x 74.5 = 298, stage 1 296, stage 2 206, their optimizers included 300.9, 298.4 and 207.7.
    assert evaluation.busiest_stage == 0
    assert evaluation.parts.recompute == pytest.approx(4 * 10 * MS)
    assert evaluation.parts.transfers == pytest.approx(4 * 1.5 * MS)
    assert evaluation.parts.fill_and_drain == pytest.approx((400.5 - 298) * MS)
    assert evaluation.parts.gradient_sync == pytest.approx(0, abs=1e-15)
    busy = (20 + 298 + 2.885632, 20 + 296 + 2.361344, 20 + 206 + 1.705472)
    assert evaluation.bubble == pytest.approx([1 - own / 423.385632 for own in busy])


@pytest.mark.usefixtures("stated")
def test_the_step_of_an_interleaved_pipeline() -> None:
    # Network order 1 2 1 1: stage 0 holds chunks of 1 and 1 layers, stage 1 of 2 and 1. 16 / 2 / 2 = 4 micro-batches.
    # Half of each transfer holds the sender, the other half is lag: 0.75 and 0.75. Attention cores repeated: + 2 a layer.
    # (T1) chunk 0: F = 10 + 1 + 0.75 = 11.75, B = 22 + 2 = 24; chunk 1: F = 20.75, B = 44.75; chunk 2: F = 10.75,
    #      B = 22.75; chunk 3: F = 10 + 3 = 13, B = 22 + 6 + 0.75 = 28.75.
    # (T3) stage 1 starts at 11.75 + 0.75 and is never idle: 4 x (20.75 + 44.75 + 13 + 28.75) = 429 until 441.5; the last
    #      backward pass of stage 0 follows: 441.5 + 0.75 + 24 = 466.25.
    # (T4) parameters: stage 0 2 x 590,336 + 262,144 = 1,442,816; stage 1 3 x 590,336 + 262,400 = 2,033,408.
    #      G_0 = 14.42816, hidden up to 0.8 x (2 x 30 + 3) = 50.4, floor 1.442816; optimizer 2.885632: X_0 = 4.328448
    #      G_1 = 20.33408, hidden up to 0.8 x (3 x 30 + 9) = 79.2, floor 2.033408; optimizer 4.066816: X_1 = 6.100224
    # (T5) T = 20 + max(466.25 + 4.328448, 441.5 + 6.100224) = 490.578448.
    evaluation = evaluated(INTERLEAVED, 5)
    assert evaluation.step_time_s == pytest.approx(490.578448 * MS, rel=1e-12)
    assert evaluation.busiest_stage == 1
    assert evaluation.parts.recompute == pytest.approx(4 * 3 * 2 * MS)


@pytest.mark.usefixtures("stated")
def test_what_one_micro_batch_cannot_hide_stays_exposed() -> None:
    # (T4) at the other side of its maximum: with dp_comm_overlap 0.1 the 72 of one micro-batch hide 7.2 of G = 17.05216:
    # X_0 = 9.85216 + 3.410432. T = 20 + 288 + 13.262592.
    instance = instance_of(DENSE, 2)
    instance = replace(instance, profile=replace(instance.profile, dp_comm_overlap=0.1))
    assert evaluate(instance, ONE_STAGE).step_time_s == pytest.approx(321.262592 * MS, rel=1e-12)


@pytest.mark.usefixtures("stated")
def test_the_integer_step_is_the_same_sum_of_rounded_terms() -> None:
    # In units of 1 ms, rounded down: transfers 1.5 -> 1 and 2.5 -> 2. Stage 0: F 22, B 52; stage 1: F 22, B 51; stage 2:
    # F 13, B 38. The timeline of the uneven pipeline above: F3 of stage 0 198-220, of stage 1 -242, B2 -293, B3 -344, and
    # B3 of stage 0 345-397. Optimizer per layer 1.180672 -> 1, embedding 0.524288 -> 0: X_0 = 2.
    assert evaluated(UNEVEN, 5, MS).objective_units == 20 + 397 + 2


# -- memory ------------------------------------------------------------------------------------------------------------

# Per token and dense layer (M2): two inputs of 256 for the attention, queries and outputs 4 x (64 + 64) = 512, keys and
# values 2 x (64 + 64) = 256, two inputs of 256 for the MLP, 3 x 512 inside it: 512 + 512 + 256 + 512 + 1536 = 3,328
# values of 2 bytes = 6,656, and flash attention's statistics 4 heads x 4 bytes = 16: 6,672. Selective drops the 16, full
# keeps the input: 256 x 2 = 512. (M5) adds 5 % of activations, logits and working memory as fragmentation.
NONE, SELECTIVE, FULL = 6672, 6656, 512


def test_the_memory_of_one_stage_and_two_replicas() -> None:
    # 2 x 512 = 1,024 tokens, one micro-batch in flight. 1,705,216 parameters (above), ZeRO-1 over 2 replicas.
    (stage,) = evaluated(ONE_STAGE, 2).stages
    assert stage.weights == 2 * 1_705_216
    assert stage.gradients == 4 * 1_705_216
    assert stage.optimizer == 12 * 1_705_216 / 2
    assert stage.activations == pytest.approx(2 * 1024 * NONE)
    # (M4) (2 + 4) bytes x 1024 words and 2 x 2 x 256 per token.
    assert stage.logits == pytest.approx((6144 + 1024) * 1024)
    assert stage.fragmentation == pytest.approx(0.05 * (2 * 1024 * NONE + 7168 * 1024))
    assert stage.recompute_working == 0
    assert stage.transfer_buffers == 0
    assert stage.reserve == 2048 * 2**20


def test_the_memory_of_an_uneven_pipeline_with_recompute() -> None:
    # 4 x 512 = 2,048 tokens; 3, 2 and 1 micro-batches in flight; dp = 1, so nothing of the optimizer is shared out.
    evaluation = evaluated(UNEVEN, 5)
    first, middle, last = evaluation.stages
    assert first.weights + first.gradients + first.optimizer == 18 * 1_442_816
    assert first.activations == pytest.approx(3 * 2048 * (FULL + NONE))
    assert middle.activations == pytest.approx(2 * 2048 * (FULL + NONE))
    assert last.activations == pytest.approx(1 * 2048 * FULL)
    assert [stage.recompute_working for stage in evaluation.stages] == pytest.approx([2048 * NONE] * 3)
    # Send and receive, forward and backward: 4 x 2 bytes x 2,048 x 256 = 4 MiB.
    assert [stage.transfer_buffers for stage in evaluation.stages] == [4 * 2**20] * 3
    assert [stage.logits > 0 for stage in evaluation.stages] == [False, False, True]
    # In MiB, each line rounded up. fixed 2048 + 4 = 2052. A layer's states 18 x 590,336 = 10,626,048 bytes: 11;
    # embedding 18 x 262,144 = 4,718,592: 5 (4.5); head 18 x 262,400: 5, logits 7168 x 2048 x 1.05 = 15,414,067: 15 (14.7).
    # None keeps 14,347,469 bytes a micro-batch (13.68): 3 of them 43,042,406: 42 (41.05), 2: 28 (27.4), 1: 14.
    # Full keeps 1,101,005 (1.05): 3: 4 (3.15), 2: 3 (2.1), 1: 2. Working 14.
    #   first   2052 + 2 x 11 + 5 + 4 + 42 + 14 = 2139
    #   middle  2052 + 2 x 11 + 3 + 28 + 14     = 2119
    #   last    2052 + 11 + 5 + 15 + 2 + 14     = 2099
    assert evaluation.memory_mib == (2139, 2119, 2099)
    # 4e9 bytes are 3814.7 MiB, rounded down.
    assert evaluation.capacity_mib == 3814
    assert evaluation.fits


def test_the_memory_of_an_interleaved_pipeline() -> None:
    # 1,024 tokens. Stage 0 holds (3, 2) or (4, 1) micro-batches of chunks of 1 and 1 layers (test_schedule.py): 5 layers.
    # Stage 1 holds (2, 1) or (3, 0) of chunks of 2 and 1 layers: max(2 x 2 + 1, 3 x 2) = 6.
    first, last = evaluated(INTERLEAVED, 5).stages
    assert first.activations == pytest.approx(5 * 1024 * SELECTIVE)
    assert last.activations == pytest.approx(6 * 1024 * SELECTIVE)
    # ZeRO-0: every replica holds all optimizer states.
    assert first.optimizer == 12 * 1_442_816
    assert last.optimizer == 12 * 2_033_408
    assert last.recompute_working == 0


def test_the_memory_of_experts_under_tensor_and_sequence_parallelism() -> None:
    # Two layers of attention and 4 experts of 128, top 2, shared expert of 256; tp = 2, dp = 2, micro-batch 2.
    # Parameters per device: q, o 2 x 32,768; k, v 2 x 16,384; router 4 x 256, whole; experts 4 x 3 x 128 x 256 / 2
    # = 196,608; shared 3 x 256 x 256 / 2 = 98,304; norms 512, whole: 394,752 a layer.
    # 1000 words padded to 1024, half each: 512 x 256 = 131,072, twice, and the final norm 256.
    # 2 x 394,752 + 262,400 = 1,051,904.
    degrees = Degrees(tp=2, dp=2, micro_batch=2, sequence_parallel=True)
    evaluation = evaluate(instance_of(SPARSE, 2), plan_of(degrees, [(2,)]))
    assert not evaluation.faults
    (stage,) = evaluation.stages
    assert stage.weights == 2 * 1_051_904
    assert stage.gradients == 4 * 1_051_904
    assert stage.optimizer == 6 * 1_051_904
    # Per token: inputs of the attention 2 x 256 / 2; 2 heads x 128; 1 key/value head x 128; inputs of the experts
    # 2 x 256 / 2; two experts, each the routed input and output 2 x 256 and 3 x 128 / 2 inside; shared 3 x 256 / 2:
    # 256 + 256 + 128 + 256 + 2 x 704 + 384 = 2,688 values = 5,376 bytes, statistics 2 heads x 4 bytes.
    assert stage.activations == pytest.approx(2 * 1024 * 5384)
    # 512 words a device: 6 x 512 + 4 x 256 = 4,096 bytes per token.
    assert stage.logits == pytest.approx(4096 * 1024)
