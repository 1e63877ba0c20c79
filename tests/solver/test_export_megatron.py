"""What is exported is what Megatron-Core's own grammar reads back."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.cluster_catalog import load_cluster
from shardwise.data.faults import InputError
from shardwise.data.instance import Instance
from shardwise.data.model_catalog import catalog_models, load_model
from shardwise.data.plan import Degrees, Placement, Plan, Recompute, Stage
from shardwise.data.rules import FREE
from shardwise.data.workload import Attention, Precision, Training
from shardwise.solver.default_plan import plan_from_degrees
from shardwise.solver.export.megatron import hybrid_pattern, megatron_flags, pipeline_layout, to_megatron
from shardwise.solver.solve import build_instance, solve


def parse(layout: str) -> list[str]:
    """The stages of a layout string, by the two expansions of pipeline_parallel_layer_layout.py."""
    assert " " not in layout
    text = layout.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    text = re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    assert set(text) <= set("Et|L")
    return text.split("|")


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(0, 30), st.integers(0, 30))
def test_a_layout_reads_back_as_the_same_stages(middle: list[int], first: int, last: int) -> None:
    chunks = [first, *middle, last]
    stages = parse(pipeline_layout(chunks))
    assert [stage.count("t") for stage in stages] == chunks
    assert stages[0].startswith("E")
    assert stages[-1].endswith("L")
    assert sum(stage.count("E") for stage in stages) == 1
    assert sum(stage.count("L") for stage in stages) == 1


def test_equal_stages_are_written_as_one_repeat() -> None:
    assert pipeline_layout([3, *[2] * 30, 0]) == "Ettt|(tt|)*30L"
    assert pipeline_layout([18, 21, 21, 20]) == "Et*18|t*21|t*21|t*20L"


@pytest.mark.parametrize(
    ("model", "cluster", "seq_len", "batch"),
    [("llama-3.1-70b", "dgx-h100:8", 8192, 512), ("llama-3.1-405b", "dgx-h100:2048", 8192, 2048)],
)
def test_exported_plans_obey_the_rules_of_megatron(model: str, cluster: str, seq_len: int, batch: int) -> None:
    instance = build_instance(model, cluster, Training(seq_len, batch))
    plan = solve(instance=instance, workers=1).plan
    assert plan is not None
    flags = {flag.partition(" ")[0]: flag.partition(" ")[2] for flag in megatron_flags(instance, plan)}
    tp, pp = int(flags["--tensor-model-parallel-size"]), int(flags["--pipeline-model-parallel-size"])
    micro_batch, global_batch = int(flags["--micro-batch-size"]), int(flags["--global-batch-size"])
    world = plan.degrees.devices
    assert world % (tp * pp) == 0
    dp = world // (tp * pp)
    assert global_batch % (micro_batch * dp) == 0
    heads, groups = int(flags["--num-attention-heads"]), int(flags["--num-query-groups"])
    assert heads % tp == 0
    assert groups % tp == 0 or tp % groups == 0
    stages = parse(flags["--pipeline-model-parallel-layout"].strip("'"))
    assert len(stages) % pp == 0
    vpp = len(stages) // pp
    assert sum(stage.count("t") for stage in stages) == int(flags["--num-layers"])
    for rank, stage in enumerate(plan.stages):
        assert tuple(stages[row * pp + rank].count("t") for row in range(vpp)) == stage.chunks
    if vpp > 1:
        assert (global_batch // (micro_batch * dp)) % pp == 0
    assert ("--sequence-parallel" in flags) <= (tp > 1)
    assert ("--overlap-param-gather" in flags) <= ("--use-distributed-optimizer" in flags)
    text = to_megatron(instance, plan)
    per_node = int(re.search(r"--nproc-per-node (\d+)", text)[1])  # type: ignore[index]
    assert per_node * int(re.search(r"--nnodes (\d+)", text)[1]) == world  # type: ignore[index]


def test_hybrid_models_use_the_hybrid_pattern() -> None:
    instance = build_instance("nemotron-h-8b", "dgx-h100:1", Training(4096, 16), limits=["pp<=2", "vpp=1"])
    plan = solve(instance=instance, workers=1).plan
    assert plan is not None
    flags = megatron_flags(instance, plan)
    pattern = hybrid_pattern(instance.model, plan)
    assert f"--hybrid-layer-pattern '{pattern}'" in flags
    assert not any("layout" in flag for flag in flags)
    segments = pattern.split("|")
    assert [len(segment) for segment in segments] == list(plan.chunk_layers)
    assert "".join(segments).count("*") == 4


def test_a_model_that_the_flags_cannot_say_is_refused() -> None:
    instance = build_instance("qwen3-next-80b-a3b", "dgx-h100:8", Training(4096, 64), limits=["pp=4", "vpp=1"])
    plan = solve(instance=instance, workers=1).plan
    assert plan is not None
    with pytest.raises(InputError, match="linear attention"):
        megatron_flags(instance, plan)


@pytest.mark.parametrize("algorithm", ["p2p", "allgather", "a2a", "a2a+p2p"])
def test_the_algorithm_of_context_parallelism_is_said(algorithm: str) -> None:
    limits = ["cp=4", f"cp_comm_type={algorithm}", "pp=1", "micro_batch=1"]
    instance = build_instance("llama-3.1-8b", "dgx-h100:1", Training(8192, 16), limits=limits)
    plan = solve(instance=instance, workers=1).plan
    assert plan is not None
    assert flags_of(instance, plan)["--cp-comm-type"] == algorithm
    assert flags_of(instance, plan).get("--hierarchical-context-parallel-sizes") == (
        "2 2" if "+" in algorithm else None
    )
    assert Plan.from_json(plan.to_json()) == plan


Flags = dict[str, str]


def flags_of(instance: Instance, plan: Plan) -> Flags:
    return {flag.partition(" ")[0]: flag.partition(" ")[2].strip("'") for flag in megatron_flags(instance, plan)}


def number(flags: Flags, name: str, default: int = 0) -> int:
    return int(flags.get(name, default))


def layers_by_stage(flags: Flags) -> list[int]:
    """Layers of every virtual stage as Megatron-Core reads them."""
    if "--hybrid-layer-pattern" in flags:
        return [len(segment) for segment in flags["--hybrid-layer-pattern"].split("|")]
    if "--pipeline-model-parallel-layout" in flags:
        stages = parse(flags["--pipeline-model-parallel-layout"])
        assert stages[0].startswith("E")
        assert stages[-1].endswith("L")
        assert "".join(stages).count("E") == "".join(stages).count("L") == 1
        return [stage.count("t") for stage in stages]
    return [number(flags, "--num-layers")]


def broken_rules(flags: Flags, world: int) -> list[str]:
    """The rules of Megatron-Core on these flags, from its own checks and by code of its own.

    arguments.py L432, L928, L1002-1028, L1332, L1432; transformer_config.py L1446-1468; moe_layer.py L186 and forward;
    num_microbatches_calculator.py L381; schedules.py L1157-1180; mamba_mixer.py L250-274.
    """
    tp, pp = number(flags, "--tensor-model-parallel-size"), number(flags, "--pipeline-model-parallel-size")
    if world % (tp * pp):
        return ["world"]
    dp, micro = world // (tp * pp), number(flags, "--micro-batch-size")
    batch, seq = number(flags, "--global-batch-size"), number(flags, "--seq-length")
    heads = number(flags, "--num-attention-heads")
    groups = number(flags, "--num-query-groups", heads)
    stages = layers_by_stage(flags)
    vpp, rest = divmod(len(stages), pp)
    micro_batches = batch // (micro * dp)
    checks = {
        "batch": batch % (micro * dp) == 0,
        "heads": heads % tp == 0,
        "groups": groups % tp == 0 or tp % groups == 0,
        "widths": all(
            number(flags, name) % tp == 0
            for name in ("--ffn-hidden-size", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size")
        ),
        "mamba": number(flags, "--mamba-num-heads") % tp == 0 and number(flags, "--mamba-num-groups") % tp == 0,
        "stages": rest == 0,
        "interleaving": vpp == 1 or (pp > 1 and micro_batches % pp == 0),
        "sequence parallel": "--sequence-parallel" not in flags or (tp > 1 and seq % tp == 0),
        "experts": "--num-experts" not in flags or tp == 1 or "--sequence-parallel" in flags,
        "one vpp flag": not {name for name in flags if "virtual" in name},
        "hybrid": "--hybrid-layer-pattern" not in flags or "--pipeline-model-parallel-layout" not in flags,
        "gather": "--overlap-param-gather" not in flags
        or {"--use-distributed-optimizer", "--overlap-grad-reduce"} <= set(flags),
        "recompute": (flags.get("--recompute-granularity") == "full")
        == ("--recompute-num-layers" in flags)
        == ("--recompute-method" in flags),
        "positions": seq <= number(flags, "--max-position-embeddings"),
    }
    return [name for name, holds in checks.items() if not holds]


def params_of(flags: Flags) -> int:
    """Parameters of the model that the flags describe, before the vocabulary is padded."""
    hidden, heads = number(flags, "--hidden-size"), number(flags, "--num-attention-heads")
    width, groups = number(flags, "--kv-channels"), number(flags, "--num-query-groups", heads)
    bias, gated = "--disable-bias-linear" not in flags, "--swiglu" in flags
    norm = hidden * (2 if flags["--normalization"] == "LayerNorm" else 1)

    def attention() -> int:
        if "--multi-latent-attention" in flags:
            key, rope = number(flags, "--qk-head-dim"), number(flags, "--qk-pos-emb-head-dim")
            value, kv_rank = number(flags, "--v-head-dim"), number(flags, "--kv-lora-rank")
            rank = number(flags, "--q-lora-rank")
            queries = hidden * rank + rank + rank * heads * (key + rope) if rank else hidden * heads * (key + rope)
            keys = hidden * (kv_rank + rope) + kv_rank + kv_rank * heads * (key + value)
            return queries + keys + heads * value * hidden
        total = (2 * heads + 2 * groups) * width * hidden
        total += (heads + 2 * groups) * width * (bias or "--add-qkv-bias" in flags) + hidden * bias
        return total + 2 * width * ("--qk-layernorm" in flags)

    def mlp(size: int) -> int:
        inputs = size * (2 if gated else 1)
        return hidden * (inputs + size) + (inputs + hidden) * bias

    def moe() -> int:
        experts, shared = number(flags, "--num-experts"), number(flags, "--moe-shared-expert-intermediate-size")
        total = experts * (mlp(number(flags, "--moe-ffn-hidden-size")) + hidden)
        total += experts * ("--moe-router-enable-expert-bias" in flags)
        return total + (mlp(shared) if shared else 0) + hidden * ("--moe-shared-expert-gate" in flags)

    def mamba() -> int:
        units, size = number(flags, "--mamba-num-heads"), number(flags, "--mamba-head-dim")
        inner, states = units * size, 2 * number(flags, "--mamba-num-groups") * number(flags, "--mamba-state-dim")
        return hidden * (2 * inner + states + units) + 5 * (inner + states) + 3 * units + inner + inner * hidden

    dense = number(flags, "--ffn-hidden-size")
    if "--hybrid-layer-pattern" in flags:
        letters = flags["--hybrid-layer-pattern"].replace("|", "")
        by_letter = {"M": mamba, "*": attention, "+": attention, "-": lambda: mlp(dense), "E": moe}
        total = sum(by_letter[letter]() + norm for letter in letters)
    else:
        count = number(flags, "--num-layers")
        # Data to Megatron-Core too: arguments.py evaluates the pattern after checking its characters.
        routed = [0] * count
        if "--moe-layer-freq" in flags:
            runs = re.findall(r"\[([01])\]\*(\d+)", flags["--moe-layer-freq"])
            routed = [int(kind) for kind, length in runs for _ in range(int(length))]
        assert len(routed) == count
        total = sum(attention() + 2 * norm + (moe() if layer else mlp(dense)) for layer in routed)
    total += number(flags, "--vocab-size") * hidden * (2 if "--untie-embeddings-and-output-weights" in flags else 1)
    if flags["--position-embedding-type"] == "learned_absolute":
        total += number(flags, "--max-position-embeddings") * hidden
    return total + norm


@given(
    st.integers(2, 8), st.integers(1, 6), st.lists(st.integers(1, 40), min_size=48, max_size=48), st.integers(0, 40),
    st.integers(0, 40),
)  # fmt: skip
def test_chunk_v_of_stage_k_is_stage_v_pp_plus_k_of_the_layout(
    pp: int, vpp: int, middle: list[int], first: int, last: int
) -> None:
    chunks = [first, *middle[: pp * vpp - 2], last]
    stages = tuple(Stage(tuple(chunks[k::pp])) for k in range(pp))
    plan = Plan(Degrees(pp=pp, vpp=vpp), stages, Placement((1,), (pp,), (1,)), pp)
    read = parse(pipeline_layout(plan.chunk_layers))
    assert len(read) == pp * vpp
    for k, stage in enumerate(plan.stages):
        assert tuple(read[v * pp + k].count("t") for v in range(vpp)) == stage.chunks


def catalog_exports() -> list[tuple[str, Instance, Plan, Flags]]:
    """Every catalogue model that can be exported, with a default plan."""
    cluster, found = load_cluster("dgx-h100:2"), []
    for entry in catalog_models():
        instance = Instance(load_model(entry.slug), cluster, Training(1024, 16))
        plan = plan_from_degrees(instance, Degrees(pp=2, dp=8))
        with suppress(InputError):
            found.append((entry.slug, instance, plan, flags_of(instance, plan)))
    return found


def test_the_flags_of_every_catalogue_model_describe_all_its_parameters() -> None:
    exports = catalog_exports()
    assert len(exports) > 80
    for name, instance, plan, flags in exports:
        assert params_of(flags) == instance.model.params, name
        assert broken_rules(flags, plan.degrees.devices) == [], name
        assert layers_by_stage(flags) == list(plan.chunk_layers), name


def test_what_no_flag_creates_is_refused_by_name() -> None:
    cluster = load_cluster("dgx-h100:2")
    for name, words in {
        "bloom-560m": "embed_norm.weight",
        "gemma-2-2b": "4 norms",
        "gpt-oss-20b": "sinks",
        "minimax-m2.5": "per head",
        "llama-4-scout": "attention in chunks of 8192",
        "jamba-1.5-mini": "no letter",
    }.items():
        instance = Instance(load_model(name), cluster, Training(1024, 16))
        with pytest.raises(InputError, match=words):
            megatron_flags(instance, plan_from_degrees(instance, Degrees(pp=2, dp=8)))


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b", "nemotron-h-8b"])
@pytest.mark.parametrize(
    ("degrees", "recompute", "layers"),
    [
        (Degrees(tp=4, pp=2, dp=2, sequence_parallel=True), "none", None),
        (Degrees(tp=2, pp=2, dp=4, vpp=2, sequence_parallel=True), "selective", None),
        (Degrees(tp=1, pp=1, dp=16, zero=0), "full", 5),
        (Degrees(tp=8, pp=2, dp=1, zero=0, sequence_parallel=True), "full", None),
    ],
)
def test_default_plans_export_to_legal_flags(
    model: str, degrees: Degrees, recompute: Recompute, layers: int | None
) -> None:
    instance = Instance(load_model(model), load_cluster("dgx-h100:2"), Training(1024, 16))
    plan = plan_from_degrees(instance, degrees, recompute=recompute, recompute_layers=layers, rank_order="tp-pp-dp")
    flags = flags_of(instance, plan)
    assert broken_rules(flags, 16) == []
    assert layers_by_stage(flags) == list(plan.chunk_layers)
    assert ("--use-distributed-optimizer" in flags) == (degrees.zero == 1)
    assert ("--overlap-grad-reduce" in flags) == (degrees.dp > 1)
    assert ("--use-tp-pp-dp-mapping" in flags) == (plan.placement.rank_order == "tp-pp-dp")
    if recompute == "full":
        assert number(flags, "--recompute-num-layers") == plan.stages[0].recompute_layers
    elif recompute == "selective":
        assert flags["--recompute-modules"] == "core_attn"


def test_plans_that_megatron_does_not_accept_are_refused() -> None:
    free = Instance(load_model("llama-3.1-8b"), load_cluster("dgx-h100:2"), Training(1024, 16), rules=FREE)
    plan = plan_from_degrees(free, Degrees(tp=2, pp=2, dp=4, sequence_parallel=True))
    mixed = replace(plan, stages=(replace(plan.stages[0], recompute="selective"), plan.stages[1]))
    with pytest.raises(InputError, match="one recompute setting"):
        megatron_flags(free, mixed)
    apart = replace(plan, placement=Placement((1, 2), (2, 1), (4, 1)))
    with pytest.raises(InputError, match="not reached by"):
        megatron_flags(free, apart)
    experts = Instance(load_model("mixtral-8x7b"), load_cluster("dgx-h100:2"), Training(1024, 16))
    with pytest.raises(InputError, match="needs sequence_parallel=true"):
        megatron_flags(experts, plan_from_degrees(experts, Degrees(tp=2, pp=2, dp=4)))


def test_adapters_have_no_flags_and_packing_is_said() -> None:
    lora, packed = (
        Instance(load_model("llama-3.1-8b"), load_cluster("dgx-h100:2"), workload)
        for workload in (Training(1024, 16, lora_rank=16), Training(1024, 16, lengths=[(100, 1)]))
    )
    plan = plan_from_degrees(lora, Degrees(tp=2, pp=2, dp=4, sequence_parallel=True))
    with pytest.raises(InputError, match="lora_rank=16: the pre-training scripts"):
        megatron_flags(lora, plan)
    assert "packed sequences" in to_megatron(packed, plan)


def test_the_text_is_one_shell_command_of_the_same_flags() -> None:
    for name in ("llama-3.1-8b", "deepseek-v3", "nemotron-h-8b"):
        instance = Instance(load_model(name), load_cluster("dgx-h100:2"), Training(1024, 16))
        plan = plan_from_degrees(instance, Degrees(tp=2, pp=2, dp=4, sequence_parallel=True))
        text = to_megatron(instance, plan)
        words = shlex.split(text.replace("\\\n", ""), comments=True)
        assert words[:2] == ["CUDA_DEVICE_MAX_CONNECTIONS=1", "torchrun"]
        script = next(word for word in words if word.endswith(".py"))
        assert script == ("pretrain_hybrid.py" if name.startswith("nemotron") else "pretrain_gpt.py")
        assert words[words.index(script) + 1 :] == shlex.split(" ".join(megatron_flags(instance, plan)))
        assert not re.search(r"/(home|work|tmp|root)/", text)


def test_a_plan_of_one_stage_needs_no_layout() -> None:
    instance = Instance(load_model("llama-3.1-8b"), load_cluster("dgx-h100:1"), Training(1024, 16))
    plan = plan_from_degrees(instance, Degrees(dp=8))
    flags = flags_of(instance, plan)
    assert "--pipeline-model-parallel-layout" not in flags
    assert flags["--num-layers"] == "32"
    assert "--nnodes 1" in to_megatron(instance, plan)
    assert "--node-rank" not in to_megatron(instance, plan)


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        ("bf16", {"--bf16"}),
        ("fp16", {"--fp16"}),
        ("fp8", {"--bf16", "--fp8-format hybrid"}),
        ("mxfp8", {"--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"}),
        ("nvfp4", {"--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4"}),
    ],
)
def test_every_precision_has_its_flags(precision: Precision, flags: set[str]) -> None:
    instance = build_instance("llama-3.1-8b", "dgx-b200:1", Training(4096, 64, precision=precision))
    found = megatron_flags(instance, plan_from_degrees(instance, Degrees(dp=8)))
    assert {flag for flag in found if re.match("--(bf|fp[0-9])", flag)} == flags


@pytest.mark.parametrize(("attention", "backend"), [("flash", "flash"), ("flash2", "flash"), ("unfused", "unfused")])
def test_attention_is_a_backend_that_there_is(attention: Attention, backend: str) -> None:
    instance = build_instance("llama-3.1-8b", "dgx-b200:1", Training(4096, 64, attention=attention))
    assert f"--attention-backend {backend}" in megatron_flags(instance, plan_from_degrees(instance, Degrees(dp=8)))


@pytest.mark.parametrize("attention", ["flash1", "eager"])
def test_attention_that_no_backend_computes_is_refused(attention: Attention) -> None:
    instance = build_instance("llama-3.1-8b", "dgx-b200:1", Training(4096, 64, attention=attention))
    with pytest.raises(InputError, match=f"workload.attention={attention}"):
        megatron_flags(instance, plan_from_degrees(instance, Degrees(dp=8)))


@pytest.mark.parametrize(
    ("model", "workload", "degrees", "fault"),
    [
        ("mixtral-8x7b", Training(4096, 64, precision="fp16"), Degrees(dp=8, ep=8, etp=1), "precision=fp16"),
        (
            "llama-3.1-8b",
            Training(4096, 64, optimizer="sgd", offload_optimizer=1.0),
            Degrees(dp=8, zero=1, offload_optimizer=1.0),
            "needs optimizer=adamw, not sgd",
        ),
        ("llama-3.1-8b", Training(4096, 64, attention="unfused"), Degrees(dp=4, cp=2), "attention=unfused needs cp=1"),
    ],
)
def test_what_the_workload_rules_out_is_refused(model: str, workload: Training, degrees: Degrees, fault: str) -> None:
    """Of a plan for other rules; its own rules refuse it before."""
    instance = build_instance(model, "dgx-h100:1", workload, rules="free")
    with pytest.raises(InputError, match=fault):
        megatron_flags(instance, plan_from_degrees(instance, degrees))


def test_delayed_scaling_does_not_recompute_norms_or_expert_activations() -> None:
    workload = Training(4096, 64, precision="fp8")
    instance = build_instance("mixtral-8x7b", "dgx-h100:1", workload, rules="free")
    for modules in (("moe_act",), ("core_attn", "moe_act")):
        plan = plan_from_degrees(instance, Degrees(dp=8, ep=8, etp=1), recompute="selective", recompute_modules=modules)
        with pytest.raises(InputError, match="recompute_modules=moe_act: not with precision=fp8"):
            megatron_flags(instance, plan)


def test_flash_attention_is_not_forced_on_latent_attention() -> None:
    instance = Instance(load_model("deepseek-v2-lite"), load_cluster("dgx-a100:1"), Training(4096, 64))
    assert "--attention-backend auto" in megatron_flags(instance, plan_from_degrees(instance, Degrees(dp=8)))
