"""LoRA, QLoRA and packed documents, worked out by hand.

The model: hidden 256, 4 heads of 64 with 2 key/value heads, gated MLP of 512, vocabulary 1000, untied. A layer has q, o
2 x 256 x 256; k, v 2 x 128 x 256; gate, up, down 3 x 512 x 256: 589,824 parameters in seven matrices, and 512 in norms.
Adapters of rank 8, r (d_in + d_out) each: q, o 2 x 8 x 512; k, v 2 x 8 x 384; gate, up, down 3 x 8 x 768: 32,768.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.data.cluster import Accelerator, Cluster, Domain, Link
from shardwise.data.instance import Instance
from shardwise.data.model import Attention, LayerKind, Model
from shardwise.data.model_parts import attention, layer, linear, mlp, moe, norm
from shardwise.data.plan import Degrees, Placement, Plan, Stage
from shardwise.data.profile import load_profile
from shardwise.data.workload import Training
from shardwise.formulations import layer_costs, step_time
from shardwise.formulations.coefficients import CostTables
from shardwise.formulations.layer_costs import LayerTerms, Sharding, compute_terms, packed_keys
from shardwise.formulations.layer_time import weight_gradient_s
from shardwise.formulations.memory import KindParams, gather_buffer_bytes, kind_params_on_device, layer_activations
from shardwise.formulations.step_time import SyncRates, params_optimizer_s, params_sync_s, unit_times_s
from shardwise.solver.evaluate import evaluate, model_flops

DENSE = layer(256, attention(256, 4, 2, 64), mlp(256, 512, gated=True))
SPARSE = layer(256, attention(256, 4, 2, 64), moe(256, 4, 2, 128, shared_intermediate=256))
LORA = Training(512, 16, lora_rank=8)
ATTENTION = Training(512, 16, lora_rank=8, lora_modules="attention")
QLORA = Training(512, 16, lora_rank=8, base_precision="nf4")
PROFILE = replace(
    load_profile("megatron-core"),
    memory_reserve_bytes=0.0, memory_fragmentation=0.0, memory_activations=1.0, weight_bytes=2, gradient_bytes=4,
    reduce_bytes=4, logit_bytes=6, gathered_logits=0,
)  # fmt: skip


def instance_of(workload: Training, kind: LayerKind = DENSE, layers: int = 2, *, tied: bool = False) -> Instance:
    head = () if tied else linear("lm_head", 1000, 256, "vocab")
    model = Model(
        "toy", "toy", 256, 1000, tied, (kind,) * layers, linear("embed", 1000, 256, "vocab"), head + norm("norm", 256)
    )
    device = Accelerator("toy", "none", 4 * 10**9, 1e12, {"bf16": 1e15, "fp8": 2e15})
    cluster = Cluster("toy", Domain("node", "node", Link("l", "nvlink", 1e11, 1e-6), device, 8))
    return Instance(model, cluster, workload, profile=PROFILE)


def plan_of(degrees: Degrees, chunks: list[tuple[int, ...]]) -> Plan:
    stages = tuple(Stage(own, "none", 0) for own in chunks)
    placement = Placement((degrees.tp,), (degrees.pp,), (degrees.dp,))
    return Plan(degrees, stages, placement, 16 // degrees.dp // degrees.micro_batch)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_adapters_are_trained_and_weights_are_frozen() -> None:
    assert kind_params_on_device(DENSE, 1) == KindParams(590_336, 0)
    assert kind_params_on_device(DENSE, 1, workload=LORA) == KindParams(32_768, 0, 2 * 590_336)
    # q, o 8,192 and k, v 6,144.
    assert kind_params_on_device(DENSE, 1, workload=ATTENTION).dense == 14_336
    # 65,536 parameters are 33,808 bytes in NF4: half a byte each, 1,024 + 4 x 4 bytes of constants. Nine times that, and
    # the norms in 16 bits.
    assert kind_params_on_device(DENSE, 1, workload=QLORA).frozen == 9 * 33_808 + 1024


def test_one_factor_of_an_adapter_is_split_by_tensor_parallelism() -> None:
    # Outputs split: q 8 x (256 + 128), k and v 8 x (256 + 64), gate and up 8 x (256 + 256). Inputs split: o 8 x (128 + 256),
    # down 8 x (256 + 256). Together 3,072 + 2 x 2,560 + 2 x 4,096 + 3,072 + 4,096.
    held = kind_params_on_device(DENSE, 2, workload=LORA)
    assert held.dense == 23_552
    assert held.frozen == 2 * (589_824 // 2 + 512)


def test_each_expert_has_adapters_and_the_router_has_none() -> None:
    # Experts: 4 x 3 x 8 x (256 + 128) = 36,864, half of them here. Attention 14,336; shared expert 3 x 8 x 512.
    held = kind_params_on_device(SPARSE, 1, ep=2, workload=LORA)
    assert (held.dense, held.expert) == (14_336 + 12_288, 18_432)
    assert held.frozen_expert == 2 * 2 * 3 * 128 * 256


def test_the_states_of_one_stage_are_those_of_adapters() -> None:
    # Two layers: 65,536 trained. Frozen: 2 x 590,336, embedding 1024 x 256, head 1024 x 256 and a norm.
    plan = plan_of(Degrees(dp=2, micro_batch=2), [(2,)])
    (stage,) = evaluate(instance_of(LORA), plan).stages
    assert stage.weights == 2 * 65_536 + 2 * (2 * 590_336 + 262_144 + 262_400)
    assert stage.gradients == 4 * 65_536
    assert stage.optimizer == 12 * 65_536 / 2
    (unpacked,) = evaluate(instance_of(QLORA), plan).stages
    assert unpacked.gather_buffers == 2 * 512 * 256  # one matrix of the feed-forward part
    assert stage.weights - unpacked.weights == 2 * (2 * 589_824 - 9 * 33_808)


def test_frozen_weights_are_sharded_and_kept_gathered_in_a_pipeline() -> None:
    alone = evaluate(instance_of(LORA), plan_of(Degrees(dp=4, zero=3), [(2,)])).stages[0]
    frozen = 2 * (2 * 590_336 + 262_144 + 262_400)
    assert alone.weights == (2 * 65_536 + frozen) / 4
    # Two gathered layers, and the fp32 gradients of one.
    assert alone.gather_buffers == 2 * (2 * 32_768 + 2 * 590_336) + 4 * 32_768
    first = evaluate(instance_of(LORA), plan_of(Degrees(pp=2, dp=2, zero=3), [(1,), (1,)])).stages[0]
    assert first.weights == (2 * 32_768 + 2 * (590_336 + 262_144)) * 1.5


def test_only_inputs_of_adapters_are_kept() -> None:
    # Per token, everything trained: norm inputs and outputs 2 x 4 x 256; q, k, v and the output 768 values; statistics
    # 4 heads x 4 bytes; gate, up and their product 1,536 values: 2,048 + 1,536 + 16 + 3,072 = 6,672 bytes.
    def kept(workload: Training) -> float:
        return layer_activations(instance_of(workload), DENSE, Sharding(1, 1, False)).none / 512

    assert kept(Training(512, 16)) == pytest.approx(6672)
    # Seven adapters keep 8 values each.
    assert kept(LORA) == pytest.approx(6672 + 7 * 16)
    # Four do; the norm's output (256 values) and the product (512) enter frozen matrices.
    assert kept(ATTENTION) == pytest.approx(6672 + 4 * 16 - 2 * 768)
    # FP8 keeps inputs in one byte, 256 + 256 + 256 + 512 of them, but adapters want theirs in two.
    assert kept(replace(LORA, precision="fp8")) == pytest.approx(kept(LORA))
    assert kept(Training(512, 16, precision="fp8")) == pytest.approx(6672 - 1280)


def test_the_norm_before_a_frozen_head_keeps_its_input_only() -> None:
    plan = plan_of(Degrees(), [(2,)])
    (trained,) = evaluate(instance_of(Training(512, 16)), plan).stages
    (frozen,) = evaluate(instance_of(LORA), plan).stages
    assert trained.logits - frozen.logits == 2 * 256 * 512


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GEMM takes M N K seconds and memory a second a byte; tokens of one micro-batch are 512."""
    monkeypatch.setattr(layer_costs, "gemm_time_s", lambda _a, m, n, k, _p: float(m * n * k))
    monkeypatch.setattr(layer_costs, "grouped_gemm_time_s", lambda _a, _groups, m, n, k, _p: float(m * n * k))
    monkeypatch.setattr(layer_costs, "memory_bound_time_s", lambda _a, size, _launches: float(size))


def terms_of(workload: Training, kind: LayerKind = DENSE) -> LayerTerms:
    return compute_terms(instance_of(workload, kind), Sharding(1, 1, False)).kinds[0]


@pytest.mark.usefixtures("counted")
def test_a_frozen_matrix_has_no_weight_gradient() -> None:
    plain, lora, attention_only = (terms_of(workload) for workload in (Training(512, 16), LORA, ATTENTION))
    assert plain.gemm_forward == 512 * 589_824
    assert plain.gemm_backward == 2 * 512 * 589_824
    assert lora.gemm_forward == 512 * (589_824 + 32_768)
    assert lora.gemm_backward == 512 * (589_824 + 2 * 32_768)
    assert lora.gemm_frozen == 512 * 589_824
    assert attention_only.gemm_backward == 512 * (589_824 + 2 * 14_336)
    # A schedule that computes weight gradients apart has those of adapters alone to move.
    profile = replace(PROFILE, gemm=1.0)
    assert weight_gradient_s(plain, profile) == 512 * 589_824
    assert weight_gradient_s(lora, profile) == 512 * 32_768
    assert lora.launches - plain.launches == 7 * 4


@pytest.mark.usefixtures("counted")
def test_adapters_touch_their_outputs_and_accumulate_their_gradients() -> None:
    plain, lora = terms_of(Training(512, 16)), terms_of(LORA)
    # Outputs of the seven: q 256, k, v 128 each, o 256, gate, up 512 each, down 256: 2,048 values, five times, 2 bytes.
    touched = 5 * 2 * 512 * 2048
    assert lora.traffic_forward - plain.traffic_forward == touched
    # Six bytes a trained parameter, 589,824 against 32,768.
    assert lora.traffic_backward - plain.traffic_backward == 2 * touched + 6 * (32_768 - 589_824)


@pytest.mark.usefixtures("counted")
def test_four_bits_are_unpacked_ahead_of_both_passes() -> None:
    lora, qlora = terms_of(LORA), terms_of(QLORA)
    unpacked = 9 * 33_808 + 2 * 589_824
    assert qlora.traffic_forward - lora.traffic_forward == pytest.approx(unpacked)
    assert qlora.traffic_backward - lora.traffic_backward == pytest.approx(unpacked)
    assert qlora.launches - lora.launches == 4 * 3
    assert qlora.gemm_forward == lora.gemm_forward


@pytest.mark.usefixtures("counted")
def test_experts_are_frozen_and_adapted_alike() -> None:
    lora = terms_of(LORA, SPARSE)
    # 1,024 routed tokens meet 3 x 256 x 128, 512 the attention, the router and the shared expert.
    dense = 512 * (196_608 + 1024 + 3 * 256 * 256)
    assert lora.gemm_frozen == dense + 1024 * 98_304
    adapters = 512 * (14_336 + 12_288) + 1024 * 3 * 8 * 384
    assert lora.gemm_backward == lora.gemm_frozen + 2 * adapters


@pytest.mark.usefixtures("counted")
def test_the_embedding_and_the_head_are_frozen() -> None:
    plain, lora = (compute_terms(instance_of(each), Sharding(1, 1, False)) for each in (Training(512, 16), LORA))
    assert lora.embedding.traffic_forward == plain.embedding.traffic_forward > 0
    assert lora.embedding.traffic_backward == 0
    assert lora.head.gemm_backward == plain.head.gemm_backward / 2 == 512 * 1024 * 256


def test_adapters_alone_are_synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    params = KindParams(32_768, 100, 1_180_672, 50)
    rates, expert = SyncRates(2.0, 3.0, 0.5), SyncRates(20.0, 30.0, 5.0)
    assert params_sync_s(rates, expert, params) == 2 * 32_768 + 20 * 100 + 0.5 * 1_180_672 + 5 * 50
    assert params_optimizer_s(rates, expert, params) == 3 * 32_768 + 30 * 100
    monkeypatch.setattr(step_time, "collective_time_s", lambda _a, _op, size, _spans: float(size))
    degrees, placement = Degrees(dp=4, zero=3), Placement((1,), (1,), (4,))
    forward, backward = unit_times_s(instance_of(LORA), degrees, placement, KindParams(32_768, 0, 1_180_672))
    assert forward == 2 * 32_768 + 1_180_672
    assert backward == forward + 4 * 32_768


def test_zero_3_gathers_frozen_weights_once_a_step_in_a_pipeline() -> None:
    tables = CostTables(instance_of(LORA))
    assert tables.sync_rates((4,), 3).frozen_s > 0
    assert tables.sync_rates((4,), 3, each_pass=True).frozen_s == 0
    assert all(tables.sync_rates((4,), zero).frozen_s == 0 for zero in (0, 1, 2))


def test_tied_embeddings_that_are_frozen_have_nothing_to_add() -> None:
    degrees = Degrees(pp=2)
    placement = Placement((1,), (2,), (1,))
    assert CostTables(instance_of(Training(512, 16), tied=True)).time(degrees, placement).tied > 0
    assert CostTables(instance_of(LORA, tied=True)).time(degrees, placement).tied == 0


def test_model_flops_count_no_weight_gradients_of_frozen_matrices() -> None:
    attention_flops = 2 * 6 * 4 * 128 * 512 / 2
    trained = 2 * 590_336 + 1000 * 256 + 256
    assert model_flops(instance_of(Training(512, 16))) == (6 * trained + attention_flops) * 512 * 16
    assert model_flops(instance_of(LORA)) == (4 * trained + 6 * 65_536 + attention_flops) * 512 * 16


def test_a_step_of_adapters_is_shorter_and_smaller() -> None:
    plan = plan_of(Degrees(pp=2, dp=2, micro_batch=2), [(1,), (1,)])
    full, lora, qlora = (evaluate(instance_of(each), plan) for each in (Training(512, 16), LORA, QLORA))
    assert lora.parts.optimizer < 0.1 * full.parts.optimizer
    assert lora.parts.gradient_sync < 0.1 * full.parts.gradient_sync
    assert qlora.step_time_s > lora.step_time_s
    assert full.peak_memory_bytes > lora.peak_memory_bytes


def test_the_buffer_of_unpacked_experts_holds_all_of_a_device() -> None:
    instance = instance_of(QLORA, SPARSE)
    # Four experts of 128 x 256, or two of them, against the output matrix of the attention, 256 x 256.
    assert gather_buffer_bytes(instance, (), Degrees(etp=1)) == 2 * 4 * 128 * 256
    assert gather_buffer_bytes(instance, (), Degrees(dp=4, ep=4, etp=1)) == 2 * 256 * 256


# -- packed documents --------------------------------------------------------------------------------------------------

PACKED = Training(1000, 16, lengths=[(100, 3), (700, 1)])


def test_a_query_meets_keys_of_its_own_document() -> None:
    # E[l^2] / E[l] = (3 x 100^2 + 700^2) / (300 + 700) = 520, half of it and one.
    plain, windowed = Attention(8, 8, 64, 64), Attention(8, 8, 64, 64, 256)
    assert packed_keys(instance_of(PACKED), plain) == pytest.approx(260.5)
    # A window of 256 leaves documents of 100 alone: 0.3 x 50.5 + 0.7 x (256 - 256 x 255 / 1,400).
    assert packed_keys(instance_of(PACKED), windowed) == pytest.approx(0.3 * 50.5 + 0.7 * (256 - 256 * 255 / 1400))
    assert packed_keys(instance_of(Training(1000, 16)), plain) is None
    assert packed_keys(instance_of(Training(1000, 16)), windowed) is None


def test_a_query_of_chunked_attention_meets_keys_of_its_own_chunk() -> None:
    chunked = Attention(8, 8, 64, 64, 256, chunked=True)
    # Three chunks of 256 and one of 232; documents of 100 are whole, one of 700 makes two chunks and 188.
    assert packed_keys(instance_of(Training(1000, 16)), chunked) == pytest.approx(0.768 * 128.5 + 0.232 * 116.5)
    packed = 0.3 * 50.5 + 0.7 * (512 * 128.5 + 188 * 94.5) / 700
    assert packed_keys(instance_of(PACKED), chunked) == pytest.approx(packed)
    assert packed_keys(instance_of(Training(200, 16)), chunked) == pytest.approx(100.5)


def test_packing_shortens_attention_cores_and_nothing_else() -> None:
    plain, packed = terms_of(Training(1000, 16)), terms_of(PACKED)
    assert packed.core_forward < plain.core_forward
    assert replace(packed, core_forward=0.0, core_backward=0.0) == replace(plain, core_forward=0.0, core_backward=0.0)
    whole = terms_of(replace(PACKED, lengths=[(1000, 1)]))
    assert whole.core_forward == pytest.approx(plain.core_forward)


def test_kernels_that_compute_the_whole_matrix_gain_nothing() -> None:
    changes: dict[str, Any] = {"attention": "unfused"}
    assert terms_of(replace(PACKED, **changes)) == terms_of(Training(1000, 16, **changes))


def test_model_flops_count_keys_of_documents() -> None:
    plain, packed = instance_of(Training(1000, 16)), instance_of(PACKED)
    per_key = 2 * 6 * 4 * 128 / 2
    assert model_flops(plain) - model_flops(packed) == pytest.approx(per_key * 480 * 16_000)
