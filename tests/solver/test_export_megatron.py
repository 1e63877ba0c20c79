"""What is exported is what Megatron-Core's own grammar reads back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.faults import InputError
from shardwise.data.workload import Training
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
