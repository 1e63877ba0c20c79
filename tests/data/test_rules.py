"""Each rule of the packs: a plan it admits, one it forbids and one on the edge; the message names the values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.data.faults import InputError
from shardwise.data.model import Latent, LayerKind, LinearAttention, Mamba, Model, Tensor
from shardwise.data.model_parts import attention, delta_net, latent_attention, layer, mamba2, mlp, moe
from shardwise.data.plan import Degrees, Placement, Plan, Stage
from shardwise.data.rules import (
    FREE,
    MEGATRON_CORE,
    batch_faults,
    context_faults,
    expert_group_faults,
    interleave_faults,
    is_even,
    is_linear,
    load_rules,
    order_faults,
    pipeline_faults,
    plan_faults,
    rank_faults,
    sharding_faults,
    stage_faults,
    tensor_faults,
)
from shardwise.data.workload import Training


def model_of(kind: LayerKind, layers: int = 1) -> Model:
    return Model("m", "m", 512, 1000, True, (kind,) * layers, (Tensor("embed", (1000, 512), "vocab"),), ())


def attention_of(heads: int, kv_heads: int) -> Model:
    return model_of(layer(512, attention(512, heads, kv_heads, 64), None))


def faults_of(model: Model, tp: int) -> list[str]:
    return tensor_faults(MEGATRON_CORE, model, tp, False, 1024)


def test_packs_are_found_by_name() -> None:
    assert load_rules("megatron-core") is MEGATRON_CORE
    assert load_rules("free") is FREE
    known = "megatron-core, torchtitan, deepspeed, accelerate, mindspeed, free"
    with pytest.raises(InputError, match=f"rules='nemo' is unknown; known packs are {known}"):
        load_rules("nemo")


# -- tensor parallelism ------------------------------------------------------------------------------------------------


def test_tp_must_divide_the_attention_heads() -> None:
    model = attention_of(40, 40)
    assert faults_of(model, 8) == []
    assert faults_of(model, 40) == []
    assert faults_of(model, 16) == [
        "tp=16 does not divide num_attention_heads=40",
        "tp=16 neither divides nor is a multiple of num_key_value_heads=40",
    ]
    assert "tp=80 does not divide num_attention_heads=40" in faults_of(model, 80)


@pytest.mark.parametrize(("tp", "legal"), [(4, True), (8, True), (16, True), (6, False), (24, True), (12, False)])
def test_tp_divides_the_key_value_heads_or_is_a_multiple_of_them(tp: int, legal: bool) -> None:
    faults = faults_of(attention_of(48, 8), tp)
    assert faults == ([] if legal else [f"tp={tp} neither divides nor is a multiple of num_key_value_heads=8"])


def test_latent_attention_has_no_key_value_heads_to_divide() -> None:
    mixer = latent_attention(512, 16, Latent(None, 128, 64, 32), 64)
    assert faults_of(model_of(layer(512, mixer, None)), 16) == []
    assert faults_of(model_of(layer(512, mixer, None)), 32) == ["tp=32 does not divide num_attention_heads=16"]


def test_tp_must_divide_feed_forward_and_expert_widths() -> None:
    dense = model_of(layer(512, None, mlp(512, 13824, gated=True)))
    assert faults_of(dense, 512) == []
    assert faults_of(dense, 1024) == ["tp=1024 does not divide intermediate_size=13824"]
    sparse = model_of(layer(512, None, moe(512, 8, 2, 768, shared_intermediate=96)))
    assert faults_of(sparse, 32) == []
    assert faults_of(sparse, 64) == ["tp=64 does not divide shared_expert_intermediate_size=96"]
    assert faults_of(sparse, 512) == ["tp=512 does not divide shared_expert_intermediate_size=96"]
    assert expert_group_faults(MEGATRON_CORE, sparse, 512, 1, 512) == [
        "tp=512 does not divide moe_intermediate_size=768"
    ]
    assert expert_group_faults(MEGATRON_CORE, sparse, 512, 8, 5) == ["etp=5 does not divide moe_intermediate_size=768"]
    assert expert_group_faults(MEGATRON_CORE, sparse, 512, 3, 1) == ["ep=3 does not divide num_experts=8"]
    assert expert_group_faults(MEGATRON_CORE, dense, 1, 2, 1) == ["ep=2 needs a model with experts"]


def test_context_parallelism_splits_the_sequence_and_the_heads_of_recurrent_layers() -> None:
    dense = model_of(layer(512, attention(512, 8, 8, 64), None))
    assert context_faults(MEGATRON_CORE, dense, 8, 4, 1024) == []
    assert context_faults(MEGATRON_CORE, dense, 8, 3, 1024) == ["cp=3 needs seq_len=1024 to be a multiple of 6"]
    recurrent = model_of(layer(512, mamba2(512, Mamba(2, 1024, 128, 4, groups=8, heads=16)), None))
    assert context_faults(MEGATRON_CORE, recurrent, 2, 8, 1024) == []
    assert context_faults(MEGATRON_CORE, recurrent, 2, 16, 1024) == ["tp x cp = 32 does not divide mamba_num_heads=16"]
    ungrouped = model_of(layer(512, mamba2(512, Mamba(2, 1024, 128, 4, groups=3, heads=24)), None))
    assert context_faults(MEGATRON_CORE, ungrouped, 1, 2, 1024) == [
        "cp=2 neither divides nor is a multiple of mamba n_groups=3 / tp=1"
    ]
    linear = model_of(layer(512, delta_net(512, LinearAttention("delta", 4, 8, 64, 64, 4)), None))
    assert context_faults(MEGATRON_CORE, linear, 2, 2, 1024) == []
    assert context_faults(MEGATRON_CORE, linear, 2, 4, 1024) == ["tp x cp = 8 does not divide linear_num_key_heads=4"]


def test_weights_are_sharded_in_a_pipeline_only_where_the_pack_says_so() -> None:
    assert sharding_faults(MEGATRON_CORE, 3, tp=1, cp=1, pp=1, dp=2) == []
    (fault,) = sharding_faults(MEGATRON_CORE, 3, tp=1, cp=1, pp=2, dp=2)
    assert fault.startswith("zero=3 needs pp=1, not pp=2")
    assert sharding_faults(FREE, 3, tp=1, cp=1, pp=2, dp=2) == []


def test_experts_replicated_unlike_the_rest_need_pp_outermost() -> None:
    degrees = Degrees(tp=2, pp=2, dp=2, ep=4, etp=1)
    inside, outside = (Placement((2,), (2,), (2,), order) for order in ("tp-pp-dp", "tp-dp-pp"))
    assert order_faults(degrees, outside) == []
    assert order_faults(degrees, inside) == ["rank_order=tp-pp-dp needs ep=4 x etp=1 to be tp x cp = 2"]
    assert order_faults(replace(degrees, ep=2), inside) == []


def test_tp_must_divide_the_heads_of_linear_attention() -> None:
    model = model_of(layer(512, delta_net(512, LinearAttention("delta", 4, 8, 64, 64, 4)), None))
    assert faults_of(model, 4) == []
    assert faults_of(model, 8) == ["tp=8 does not divide linear_num_key_heads=4"]
    assert faults_of(model, 16) == [
        "tp=16 does not divide linear_num_key_heads=4",
        "tp=16 does not divide linear_num_value_heads=8",
    ]


def test_tp_must_divide_the_heads_groups_and_inner_size_of_mamba() -> None:
    model = model_of(layer(512, mamba2(512, Mamba(2, 1024, 128, 4, groups=8, heads=16)), None))
    assert faults_of(model, 8) == []
    assert faults_of(model, 16) == ["tp=16 does not divide mamba n_groups=8"]
    assert faults_of(model, 2048) == [
        "tp=2048 does not divide mamba_num_heads=16",
        "tp=2048 does not divide mamba n_groups=8",
        "tp=2048 does not divide mamba inner size=1024",
    ]


def test_sequence_parallelism_needs_tp_and_a_divisible_sequence() -> None:
    model = attention_of(12, 12)
    assert tensor_faults(MEGATRON_CORE, model, 4, True, 1024) == []
    assert tensor_faults(MEGATRON_CORE, model, 1, True, 1024) == ["sequence_parallel=true needs tp > 1"]
    assert tensor_faults(MEGATRON_CORE, model, 3, True, 1024) == [
        "tp=3 does not divide seq_len=1024, as sequence_parallel=true requires"
    ]
    assert tensor_faults(MEGATRON_CORE, model, 3, False, 1024) == []
    assert tensor_faults(MEGATRON_CORE, model, 3, True, 1023) == []


# -- pipeline, batch, interleaving -------------------------------------------------------------------------------------


def test_only_the_two_ends_of_the_pipeline_may_be_empty_so_chunks_are_at_most_layers_plus_two() -> None:
    assert pipeline_faults(MEGATRON_CORE, 6, 8, 1) == []
    assert pipeline_faults(MEGATRON_CORE, 6, 4, 2) == []
    assert pipeline_faults(MEGATRON_CORE, 6, 9, 1) == [
        "pp=9 x vpp=1 makes 9 chunks, more than layers=6 + 2: only the first and the last chunk may be without a layer"
    ]


def test_interleaving_needs_a_pipeline_and_any_number_of_chunks_is_legal() -> None:
    assert pipeline_faults(MEGATRON_CORE, 64, 2, 16) == []
    assert pipeline_faults(MEGATRON_CORE, 94, 4, 24) == []
    assert pipeline_faults(MEGATRON_CORE, 64, 1, 2) == ["vpp=2 needs pp > 1"]


def test_micro_batches_divide_the_batch() -> None:
    assert batch_faults(512, 32, 16) == []
    assert batch_faults(512, 64, 1) == []
    assert batch_faults(512, 4, 3) == ["micro_batch=4 x dp=3 does not divide global_batch=512"]
    assert batch_faults(8, 8, 1) == []
    assert batch_faults(8, 8, 2) == ["micro_batch=8 x dp=2 does not divide global_batch=8"]


def test_interleaved_micro_batches_are_a_multiple_of_the_pipeline() -> None:
    assert interleave_faults(MEGATRON_CORE, 4, 2, 4) == []
    (fault,) = interleave_faults(MEGATRON_CORE, 4, 2, 6)
    assert fault.startswith(
        "vpp=2 needs micro_batches=6 to be a multiple of pp=4; they are global_batch / (micro_batch x dp)"
    )
    assert interleave_faults(MEGATRON_CORE, 4, 1, 6) == []
    assert len(interleave_faults(MEGATRON_CORE, 4, 2, 2)) == 1


# -- placement ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "dp", "pp", "order", "linear"),
    [
        # Two nodes of four. tp fills half a node, dp the other half, pp the nodes.
        ((2, 1), (2, 1), (1, 2), "tp-dp-pp", True),
        # dp and pp change places, and so does the order.
        ((2, 1), (1, 2), (2, 1), "tp-dp-pp", False),
        ((2, 1), (1, 2), (2, 1), "tp-pp-dp", True),
        # dp over half a node and the nodes, pp over the rest of the node: no order gives that.
        ((1, 1), (2, 2), (2, 1), "tp-dp-pp", False),
        ((1, 1), (2, 2), (2, 1), "tp-pp-dp", True),
        ((2, 1), (2, 2), (1, 1), "tp-dp-pp", True),
        # tp across nodes and dp inside them.
        ((1, 2), (4, 1), (1, 1), "tp-dp-pp", False),
        ((1, 2), (4, 1), (1, 1), "tp-pp-dp", False),
        ((4, 2), (1, 1), (1, 1), "tp-dp-pp", True),
    ],
)
def test_an_axis_leaves_a_level_only_when_the_faster_ones_are_complete(
    tp: tuple[int, ...], dp: tuple[int, ...], pp: tuple[int, ...], order: str, linear: bool
) -> None:
    placement = Placement(tp, pp, dp, order)  # type: ignore[arg-type]
    assert is_linear(placement) == linear
    assert (rank_faults(MEGATRON_CORE, placement) == []) == linear
    if order == "tp-dp-pp":
        assert rank_faults(FREE, placement) == []


def test_a_rank_order_of_another_pack_is_refused() -> None:
    placement = Placement((1,), (1,), (1,), "tp-pp-dp")
    assert rank_faults(MEGATRON_CORE, placement) == []
    assert rank_faults(FREE, placement) == ["rank_order=tp-pp-dp is not one of tp-dp-pp"]


# -- stages ------------------------------------------------------------------------------------------------------------


def plan_of(
    *stages: Stage, vpp: int = 1, dp: int = 1, micro_batch: int = 1, micro_batches: int = 8, zero: int = 1
) -> Plan:
    degrees = Degrees(pp=len(stages), vpp=vpp, dp=dp, micro_batch=micro_batch, zero=zero)
    return Plan(degrees, stages, Placement((1,), (len(stages),), (dp,)), micro_batches)


def stages_of(*layers: int) -> tuple[Stage, ...]:
    return tuple(Stage((n,)) for n in layers)


SIX = model_of(layer(512, attention(512, 8, 8, 64), None), 6)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((2, 2, 2), None),
        ((0, 6, 0), None),
        ((2, 0, 4), "a chunk between the first and the last has no layer"),
        ((2, 2, 1), "stages hold 5 layers, the model has 6"),
        ((2, 2, 3), "stages hold 7 layers, the model has 6"),
        ((6,), None),
        ((6, 0), None),
    ],
)
def test_every_layer_is_on_one_stage_and_only_the_ends_may_be_empty(
    layers: tuple[int, ...], message: str | None
) -> None:
    assert stage_faults(MEGATRON_CORE, SIX, plan_of(*stages_of(*layers)), "bf16") == ([message] if message else [])


@pytest.mark.parametrize(
    ("chunks", "even"),
    [
        ((0, 2, 2, 2, 0), True),
        ((5, 2, 1, 1, 7), True),
        ((5, 1, 2, 1, 7), False),
        ((5, 1, 1, 2, 7), False),
        ((5, 3, 1, 1, 7), False),
        ((5, 7), True),
        ((5,), True),
        ((5, 3, 7), True),
    ],
)
def test_even_chunks_differ_by_one_larger_ones_first(chunks: tuple[int, ...], even: bool) -> None:
    assert is_even(chunks) == even


def test_interleaved_chunks_must_be_even() -> None:
    # Network order: first chunks of stages 0 and 1, then their second ones.
    even = plan_of(Stage((1, 1)), Stage((2, 2)), vpp=2)
    assert even.chunk_layers == (1, 2, 1, 2)
    assert stage_faults(MEGATRON_CORE, SIX, even, "bf16") == []
    uneven = plan_of(Stage((1, 2)), Stage((1, 2)), vpp=2)
    assert uneven.chunk_layers == (1, 1, 2, 2)
    assert stage_faults(FREE, SIX, uneven, "bf16") == [
        "with vpp > 1 the chunks between the first and the last must hold q + 1 or q layers each, larger ones first"
    ]


def test_megatron_takes_one_recompute_setting_and_free_takes_any() -> None:
    message = ["megatron-core takes one recompute setting for all stages"]
    mixed = plan_of(Stage((3,), "full", 1), Stage((3,)))
    assert stage_faults(MEGATRON_CORE, SIX, mixed, "bf16") == message
    assert stage_faults(FREE, SIX, mixed, "bf16") == []
    sizes = plan_of(Stage((3,), "full", 1), Stage((3,), "full", 2))
    assert stage_faults(MEGATRON_CORE, SIX, sizes, "bf16") == message
    same = plan_of(Stage((3,), "full", 2), Stage((3,), "full", 2))
    assert stage_faults(MEGATRON_CORE, SIX, same, "bf16") == []


def test_every_broken_rule_is_reported_at_once_with_its_values() -> None:
    model = model_of(layer(512, attention(512, 8, 8, 64), mlp(512, 1000, gated=True)), 6)
    degrees = Degrees(tp=3, pp=2, vpp=2, dp=3, micro_batch=4, zero=0, sequence_parallel=True)
    stages = (Stage((1, 3), "full", 1), Stage((0, 2)))
    plan = Plan(degrees, stages, Placement((3, 1), (1, 2), (1, 3)), 5)
    faults = plan_faults(replace(MEGATRON_CORE, zero_stages=(1,)), model, Training(1024, 64), plan)
    assert faults == [
        "tp=3 does not divide num_attention_heads=8",
        "tp=3 neither divides nor is a multiple of num_key_value_heads=8",
        "tp=3 does not divide intermediate_size=1000",
        "tp=3 does not divide seq_len=1024, as sequence_parallel=true requires",
        "micro_batch=4 x dp=3 does not divide global_batch=64",
        "micro_batches=5 x micro_batch=4 x dp=3 is not global_batch=64",
        "vpp=2 needs micro_batches=5 to be a multiple of pp=2; they are global_batch / (micro_batch x dp): "
        "raise global_batch, or lower micro_batch, dp or pp",
        "zero=0 is not one of 1",
        "a chunk between the first and the last has no layer",
        "with vpp > 1 the chunks between the first and the last must hold q + 1 or q layers each, larger ones first",
        "megatron-core takes one recompute setting for all stages",
    ]
