"""Where the packs differ: the same plan put to each of them, and every rule of its own at its edge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.data.model import Latent, Model, Tensor
from shardwise.data.model_parts import attention, latent_attention, layer, mlp, moe
from shardwise.data.pipeline import FOLDED
from shardwise.data.plan import Degrees, Placement, Plan, Stage
from shardwise.data.rules import PACKS, Rules, context_algorithm, is_linear, load_rules, plan_faults
from shardwise.data.workload import Training

BATCH = 64


def model_of(heads: int = 8, kv_heads: int = 8, *, layers: int = 8, experts: int = 0, tied: bool = False) -> Model:
    ffn = moe(512, experts, 2, 1024) if experts else mlp(512, 2048, gated=True)
    kind = layer(512, attention(512, heads, kv_heads, 64), ffn)
    return Model("m", "m", 512, 1000, tied, (kind,) * layers, (Tensor("embed", (1000, 512), "vocab"),), ())


def plan_of(
    rules: Rules, model: Model, *, layers: tuple[int, ...] = (), schedule: str = "", order: str = "", **given: Any
) -> Plan:
    """A plan on one level of devices, with ZeRO as the pack has it where `given` does not say."""
    shared = given.get("cp", 1) * given.get("dp", 1) > 1
    given.setdefault("zero", 1 if 1 in rules.zero_stages else 3 if shared else 0)
    given["sequence_parallel"] = bool(given.get("sequence_parallel"))
    given.setdefault("cp_comm_type", rules.context[0])
    degrees = Degrees(**given)
    pp, chunks = degrees.pp, layers or (len(model.layers) // degrees.virtual_stages,) * degrees.virtual_stages
    stages = tuple(
        Stage((chunks[k], chunks[2 * pp - 1 - k]) if schedule in FOLDED else chunks[k::pp]) for k in range(pp)
    )
    rank_order: Any = order or "tp-dp-pp"
    placement = Placement((degrees.tp,), (pp,), (degrees.dp,), rank_order, (degrees.cp,))
    named: Any = schedule or degrees.schedule
    return Plan(degrees, stages, placement, BATCH // degrees.dp // degrees.micro_batch, schedule=named)


def faults_of(
    pack: str, model: Model | None = None, seq_len: int = 1024, workload: dict[str, Any] | None = None, **given: Any
) -> list[str]:
    rules, model = load_rules(pack), model or model_of()
    return plan_faults(rules, model, Training(seq_len, BATCH, **(workload or {})), plan_of(rules, model, **given))


# -- the same question to every pack -----------------------------------------------------------------------------------

EVERY = frozenset(PACKS)
MEGATRONS = frozenset({"megatron-core", "mindspeed"})

QUESTIONS: dict[str, tuple[frozenset[str], dict[str, Any]]] = {
    "nothing is split": (EVERY, {}),
    "tp divides the kv heads": (EVERY, {"model": model_of(8, 4), "tp": 4}),
    "tp is twice the kv heads": (MEGATRONS | {"free"}, {"model": model_of(8, 2), "tp": 4}),
    "sequence parallelism": (MEGATRONS | {"torchtitan", "free"}, {"tp": 4, "sequence_parallel": 1}),
    "experts over tp and dp, whole": (
        EVERY - {"accelerate"},
        {"model": model_of(experts=8), "tp": 2, "dp": 4, "ep": 8, "etp": 1, "sequence_parallel": 0},
    ),
    "experts over dp": (EVERY - {"accelerate"}, {"model": model_of(experts=8), "dp": 4, "ep": 4}),
    "experts over more than a group of replicas": (
        frozenset(),
        {"model": model_of(experts=8), "dp": 4, "ep": 4, "dp_replicate": 2},
    ),
    "sequence a multiple of 2 cp": (EVERY, {"cp": 4}),
    "sequence a multiple of cp alone": (
        frozenset({"mindspeed", "deepspeed", "free"}),
        {"seq_len": 1004, "cp": 4, "cp_comm_type": "a2a"},
    ),
    "keys and values in a ring": (EVERY - {"deepspeed"}, {"cp": 4, "cp_comm_type": "p2p"}),
    "keys and values gathered": (EVERY - {"deepspeed"}, {"cp": 4, "cp_comm_type": "allgather"}),
    "the sequence exchanged for heads": (
        MEGATRONS | {"deepspeed", "free"},
        {"model": model_of(8, 8), "cp": 4, "cp_comm_type": "a2a"},
    ),
    "fewer kv heads than are exchanged for": (
        frozenset({"mindspeed", "deepspeed", "free"}),
        {"model": model_of(8, 2), "cp": 4, "cp_comm_type": "a2a"},
    ),
    "the sequence exchanged for heads within a ring": (
        MEGATRONS | {"free"},
        {"model": model_of(8, 2), "cp": 4, "cp_comm_type": "a2a+p2p", "cp_a2a": 2},
    ),
    "fewer kv heads than are exchanged for within a ring": (
        frozenset({"mindspeed", "free"}),
        {"model": model_of(8, 2), "cp": 8, "cp_comm_type": "a2a+p2p", "cp_a2a": 4},
    ),
    "a ring of exchanges on a sequence that is no multiple of 2 cp": (
        frozenset(),
        {"seq_len": 1004, "cp": 4, "cp_comm_type": "a2a+p2p", "cp_a2a": 2},
    ),
    "sequence a multiple of tp and of 2 cp": (
        MEGATRONS | {"free"},
        {"seq_len": 1032, "tp": 4, "cp": 2, "sequence_parallel": 1},
    ),
    "sequence a multiple of tp and of 2 cp, but not of tp cp": (
        frozenset(),
        {"seq_len": 1036, "tp": 4, "cp": 2, "sequence_parallel": 1},
    ),
    "a ring without fused attention": (
        frozenset({"free"}),
        {"cp": 4, "cp_comm_type": "p2p", "workload": {"attention": "unfused"}},
    ),
    "Ulysses without fused attention": (
        frozenset({"mindspeed", "deepspeed", "free"}),
        {"model": model_of(8, 8), "cp": 4, "cp_comm_type": "a2a", "workload": {"attention": "unfused"}},
    ),
    "experts in fp16": (
        EVERY - MEGATRONS - {"accelerate"},
        {"model": model_of(experts=8), "dp": 4, "ep": 4, "workload": {"precision": "fp16"}},
    ),
    "fp16": (EVERY, {"workload": {"precision": "fp16"}}),
    "Adam on the host": (MEGATRONS | {"deepspeed", "free"}, {"dp": 4, "zero": 1, "offload_optimizer": 1.0}),
    "SGD on the host": (
        frozenset({"deepspeed", "free"}),
        {"dp": 4, "zero": 1, "offload_optimizer": 1.0, "workload": {"optimizer": "sgd"}},
    ),
    "pipeline": (EVERY - {"accelerate"}, {"pp": 2, "dp": 2}),
    "uneven stages": (EVERY - {"accelerate"}, {"pp": 2, "layers": (3, 5)}),
    "interleaving": (MEGATRONS | {"torchtitan", "free"}, {"pp": 2, "vpp": 2}),
    "ZeRO-1 in a pipeline": (EVERY - {"torchtitan", "accelerate"}, {"pp": 2, "dp": 2, "zero": 1}),
    "ZeRO-2 in a pipeline": (frozenset({"torchtitan", "free"}), {"pp": 2, "dp": 2, "zero": 2}),
    "ZeRO-3 in a pipeline": (frozenset({"torchtitan", "free"}), {"pp": 2, "dp": 2, "zero": 3}),
    "ZeRO-3": (EVERY, {"dp": 4, "zero": 3}),
    "ZeRO-1": (EVERY - {"torchtitan", "accelerate"}, {"dp": 4, "zero": 1}),
    "plain replicas": (EVERY - {"torchtitan"}, {"dp": 4, "zero": 0}),
    "plain replicas beside tp": (EVERY - {"torchtitan", "accelerate"}, {"tp": 2, "dp": 4, "zero": 0}),
    "groups of replicas that shard within": (EVERY - {"deepspeed"}, {"dp": 4, "dp_replicate": 2, "zero": 3}),
    "pp inside dp": (MEGATRONS, {"order": "tp-pp-dp"}),
    "GPipe": (frozenset({"torchtitan", "free"}), {"pp": 2, "schedule": "gpipe"}),
    "ZB-V": (frozenset({"torchtitan", "free"}), {"pp": 2, "vpp": 2, "schedule": "zb-v"}),
    "DualPipe-V": (frozenset({"torchtitan", "mindspeed", "free"}), {"pp": 2, "vpp": 2, "schedule": "dualpipe-v"}),
    "ZB-H1": (frozenset({"free"}), {"pp": 2, "schedule": "zb-h1"}),
}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_pack_gives_its_own_answer(pack: str, question: str) -> None:
    legal_in, given = QUESTIONS[question]
    if question == "experts over tp and dp, whole" and pack in MEGATRONS:
        given = given | {"sequence_parallel": 1}
    assert (faults_of(pack, **given) == []) == (pack in legal_in)


@pytest.mark.parametrize("pack", PACKS)
def test_only_free_lets_ranks_lie_as_they_like(pack: str) -> None:
    rules, model = load_rules(pack), model_of()
    plan = plan_of(rules, model, tp=2, dp=2)
    spread = replace(plan, placement=Placement((1, 2), (1, 1), (2, 1)))
    assert not is_linear(spread.placement)
    assert (plan_faults(rules, model, Training(1024, BATCH), spread) == []) == (pack == "free")


# -- torchtitan --------------------------------------------------------------------------------------------------------


def test_torchtitan_does_not_replicate_key_value_heads() -> None:
    assert faults_of("torchtitan", model_of(8, 2), tp=2) == []
    assert faults_of("torchtitan", model_of(8, 2), tp=4) == [
        "tp=4 does not divide num_key_value_heads=2 (torchtitan does not replicate them)"
    ]
    latent = layer(512, latent_attention(512, 8, Latent(None, 128, 64, 32), 64), mlp(512, 2048, gated=True))
    assert faults_of("torchtitan", replace(model_of(), layers=(latent,) * 8), tp=8) == []


def test_torchtitan_splits_what_context_parallelism_leaves_of_the_sequence() -> None:
    both: dict[str, Any] = {"tp": 4, "cp": 2, "sequence_parallel": 1}
    assert faults_of("torchtitan", seq_len=1040, **both) == []
    assert faults_of("torchtitan", seq_len=1032, **both) == ["tp=4 with cp=2 needs seq_len=1032 to be a multiple of 16"]
    assert faults_of("torchtitan", seq_len=1032, tp=4, cp=2) == []
    assert faults_of("torchtitan", seq_len=1028, tp=4, sequence_parallel=1) == []


def test_torchtitan_shards_over_all_replicas() -> None:
    assert faults_of("torchtitan", dp=2, zero=2) == []
    assert faults_of("torchtitan", tp=2, zero=0) == []
    assert faults_of("torchtitan", cp=2, zero=3) == []
    assert faults_of("torchtitan", dp=2, zero=0) == [
        "zero=0 needs dp=1 and cp=1, not dp=2 and cp=1: torchtitan shards over all of them"
    ]
    assert faults_of("torchtitan", dp=2, zero=1) == ["zero=1 is not one of 0, 2, 3"]
    assert faults_of("torchtitan", dp=4, dp_replicate=2) == []
    assert faults_of("torchtitan", dp=4, dp_replicate=4) == [
        "zero=3 needs dp / dp_replicate > 1 or cp > 1, not dp=4 and cp=1"
    ]
    assert faults_of("torchtitan", cp=2, dp=4, dp_replicate=4) == []


def test_torchtitan_keeps_experts_whole_within_a_group_of_replicas() -> None:
    model = model_of(experts=8)
    assert faults_of("torchtitan", model, tp=2, dp=4, dp_replicate=2, ep=4, etp=1) == []
    assert faults_of("torchtitan", model, tp=2, dp=4, dp_replicate=2, ep=8, etp=1) == [
        "dp_replicate=2 does not divide tp x cp x dp / (ep x etp) = 1, the ranks that hold the same experts"
    ]
    assert faults_of("torchtitan", model, tp=2, dp=4, ep=4) == ["etp=2 must be 1: torchtitan keeps experts whole"]


@pytest.mark.parametrize(
    ("schedule", "vpp"),
    [("1f1b", 1), ("gpipe", 1), ("gpipe", 2), ("interleaved-1f1b", 2), ("zb-v", 2), ("dualpipe-v", 2)],
)
def test_torchtitan_runs_the_schedules_of_torch(schedule: str, vpp: int) -> None:
    assert faults_of("torchtitan", pp=2, vpp=vpp, dp=2, schedule=schedule) == []


def test_torchtitan_stages_are_at_most_the_layers_and_two() -> None:
    assert faults_of("torchtitan", pp=10, layers=(0, *(1,) * 8, 0)) == []
    assert any("more than layers=8 + 2" in fault for fault in faults_of("torchtitan", pp=11, layers=(0,) * 11))


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def test_deepspeed_shards_optimizer_states_only_in_a_pipeline() -> None:
    assert faults_of("deepspeed", pp=2, dp=2, zero=1) == []
    assert faults_of("deepspeed", dp=2, zero=2) == []
    for zero in (2, 3):
        assert faults_of("deepspeed", pp=2, dp=2, zero=zero) == [
            f"zero={zero} needs pp=1, not pp=2: deepspeed shards optimizer states only in a pipeline"
        ]


def test_the_batch_of_deepspeed_is_micro_batch_x_accumulation_x_dp() -> None:
    rules, model = load_rules("deepspeed"), model_of()
    plan = plan_of(rules, model, dp=4, micro_batch=2)
    assert plan_faults(rules, model, Training(1024, 64), plan) == []
    assert plan_faults(rules, model, Training(1024, 72), plan) == [
        "micro_batches=8 x micro_batch=2 x dp=4 is not global_batch=72"
    ]


def test_ulysses_of_deepspeed_splits_the_sequence_and_the_heads() -> None:
    assert faults_of("deepspeed", model_of(12, 4), seq_len=1002, cp=2) == []
    assert faults_of("deepspeed", model_of(12, 4), seq_len=1002, cp=4) == [
        "cp=4 needs seq_len=1002 to be a multiple of 4"
    ]
    assert faults_of("deepspeed", model_of(8, 2), cp=4) == []
    assert faults_of("deepspeed", model_of(8, 8), tp=2, cp=4) == []
    assert faults_of("deepspeed", model_of(8, 8), tp=2, cp=8) == ["tp x cp = 16 does not divide num_attention_heads=8"]
    assert faults_of("deepspeed", model_of(12, 4), seq_len=1026, cp=6) == [
        "cp=6 neither divides nor is a multiple of num_key_value_heads=4 / tp=1"
    ]


def test_deepspeed_spreads_experts_evenly() -> None:
    assert faults_of("deepspeed", model_of(experts=8), dp=4, ep=4) == []
    assert "ep=3 does not divide num_experts=8" in faults_of("deepspeed", model_of(experts=8), dp=3, ep=3)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"pp": 2, "vpp": 2}, "vpp=2: deepspeed has no interleaved chunks"),
        ({"tp": 2, "sequence_parallel": 1}, "sequence_parallel=1: deepspeed has no sequence parallelism beside tensor"),
        ({"dp": 4, "dp_replicate": 2}, "dp_replicate=2: deepspeed has no groups of replicas that shard within"),
    ],
)
def test_deepspeed_has_not(given: dict[str, Any], fault: str) -> None:
    assert faults_of("deepspeed", **given)[0].startswith(fault)


# -- accelerate --------------------------------------------------------------------------------------------------------


def test_accelerate_has_neither_a_pipeline_nor_expert_parallelism() -> None:
    assert faults_of("accelerate", tp=2, cp=2, dp=2) == []
    assert faults_of("accelerate", pp=2) == ["pp=2: accelerate has no pipeline parallelism"]
    assert faults_of("accelerate", model_of(experts=8), dp=2, ep=2) == ["ep=2: accelerate has no expert parallelism"]
    assert faults_of("accelerate", model_of(experts=8), tp=2, dp=2, etp=1) == [
        "etp=1 must be tp=2: accelerate splits experts like everything else"
    ]


def test_accelerate_shards_beside_tensor_and_context_parallelism() -> None:
    assert faults_of("accelerate", dp=4, zero=0) == []
    assert faults_of("accelerate", tp=2, zero=0) == []
    assert faults_of("accelerate", tp=2, dp=4, zero=0) == [
        "zero=0 with tp=2 and cp=1 needs dp=1 and cp=1, not dp=4: accelerate shards beside them"
    ]
    assert faults_of("accelerate", tp=2, dp=4, dp_replicate=2, zero=3) == []
    assert faults_of("accelerate", tp=2, dp=4, dp_replicate=4, zero=3) == [
        "zero=3 needs dp / dp_replicate > 1 or cp > 1, not dp=4 and cp=1"
    ]
    assert faults_of("accelerate", cp=2, zero=3) == []
    assert faults_of("accelerate", cp=2, dp=4, dp_replicate=4, zero=3) == [
        "cp=2 with dp_replicate=4 needs dp / dp_replicate > 1, not dp=4"
    ]
    assert faults_of("accelerate", zero=3) == ["zero=3 needs dp / dp_replicate > 1 or cp > 1, not dp=1 and cp=1"]


# -- MindSpeed ---------------------------------------------------------------------------------------------------------


def test_mindspeed_takes_a_ring_or_ulysses() -> None:
    assert faults_of("mindspeed", model_of(12, 12), seq_len=1000, cp=5) == []  # a ring; 5 does not divide the heads
    assert faults_of("mindspeed", seq_len=1004, cp=4, cp_comm_type="a2a") == []  # 8 does not divide the sequence
    assert faults_of("mindspeed", seq_len=1004, tp=2, cp=4, cp_comm_type="a2a") == []
    assert faults_of("mindspeed", seq_len=1004, tp=4, cp=4) == ["cp=4 needs seq_len=1004 to be a multiple of 8"]
    assert faults_of("mindspeed", seq_len=1004, tp=4, cp=4, cp_comm_type="a2a") == [
        "tp x cp = 16 does not divide num_attention_heads=8"
    ]
    assert faults_of("mindspeed", tp=4, cp=4, cp_comm_type="a2a+p2p", cp_a2a=2) == []
    assert faults_of("mindspeed", tp=4, cp=8, cp_comm_type="a2a+p2p", cp_a2a=4) == [
        "tp x cp_a2a = 16 does not divide num_attention_heads=8"
    ]


# -- Megatron-Core -----------------------------------------------------------------------------------------------------


def test_a_ring_of_megatron_takes_no_sliding_window_and_nothing_else_latent_attention() -> None:
    windowed = layer(512, attention(512, 8, 8, 64, window=256), mlp(512, 2048, gated=True))
    sliding = replace(model_of(), layers=(windowed,) * 8)
    assert faults_of("megatron-core", sliding, cp=2) == [
        "cp_comm_type=p2p does not take a sliding window of 256: use allgather or a2a"
    ]
    assert faults_of("megatron-core", sliding, cp=2, cp_comm_type="a2a") == []
    assert faults_of("megatron-core", sliding, cp=4, cp_comm_type="a2a+p2p", cp_a2a=2) == [
        "cp_comm_type=a2a+p2p does not take a sliding window of 256: use allgather or a2a"
    ]
    assert faults_of("free", sliding, cp=2) == []
    narrow = layer(512, latent_attention(512, 8, Latent(None, 128, 64, 32), 64), mlp(512, 2048, gated=True))
    latent = replace(model_of(), layers=(narrow,) * 8)
    assert faults_of("megatron-core", latent, cp=2) == []
    assert faults_of("megatron-core", latent, cp=4, cp_comm_type="a2a+p2p", cp_a2a=2) == []
    assert faults_of("megatron-core", model_of(8, 2), cp=8, cp_comm_type="a2a+p2p", cp_a2a=4) == [
        "cp_a2a=4 does not divide num_key_value_heads=2 / tp=1, as cp_comm_type=a2a+p2p requires"
    ]
    assert faults_of("megatron-core", latent, cp=2, cp_comm_type="allgather") == [
        "cp_comm_type=allgather does not take keys of 96 with values of 64: use p2p"
    ]


def test_a_plan_without_an_algorithm_has_the_first_that_takes_the_model() -> None:
    windowed = layer(512, attention(512, 8, 8, 64, window=256), mlp(512, 2048, gated=True))
    sliding = replace(model_of(), layers=(windowed,) * 8)
    for pack, model, expected in (
        ("megatron-core", model_of(), "p2p"),
        ("megatron-core", sliding, "allgather"),
        ("deepspeed", model_of(), "a2a"),
        ("deepspeed", sliding, "a2a"),
    ):
        assert context_algorithm(load_rules(pack), model, 1, 2, 1024) == expected


def test_dualpipe_v_of_mindspeed_wants_untied_embeddings_whole_sequences_and_a_layer_for_every_chunk() -> None:
    dualpipe: dict[str, Any] = {"pp": 2, "vpp": 2, "schedule": "dualpipe-v"}
    assert faults_of("mindspeed", model_of(layers=4), **dualpipe) == []
    assert faults_of("mindspeed", model_of(layers=3), layers=(0, 1, 1, 1), **dualpipe) == [
        "schedule=dualpipe-v needs layers=3 to be at least 2 x pp=2"
    ]
    assert faults_of("mindspeed", model_of(tied=True), **dualpipe) == ["schedule=dualpipe-v needs untied embeddings"]
    assert faults_of("mindspeed", **dualpipe, cp=2) == ["schedule=dualpipe-v needs cp=1, not cp=2"]
    assert faults_of("mindspeed", **dualpipe, dp=16) == []
    assert faults_of("mindspeed", **dualpipe, dp=32) == [
        "schedule=dualpipe-v needs micro_batches=2 to be at least 2 x pp=2"
    ]
    for pack in ("torchtitan", "free"):
        assert faults_of(pack, model_of(layers=3, tied=True), layers=(0, 1, 1, 1), cp=2, **dualpipe) == []
