"""Rows of measured runs: read as they are, completed from the catalogue, refused with a reason and never with a crash."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.faults import InputError
from shardwise.data.model import Moe
from shardwise.data.run_hardware import network_bytes_per_s
from shardwise.data.run_words import profile_of
from shardwise.data.runs import catalog_model, read_runs, run_of, shipped_runs

if TYPE_CHECKING:
    from pathlib import Path

ROW = {
    "id": "mine_1", "model": "Llama-3.1-8B", "layers": "", "hidden": "", "heads": "", "kv_heads": "", "ffn": "",
    "vocab": "", "seq_len": "8192.0", "moe": "", "gpu": "H100-SXM", "gpu_mem_gb": "80", "n_gpus": "16",
    "gpus_per_node": "8.0", "interconnect": "", "tp": "2.0", "pp": "1", "dp": "", "cp": "2", "ep": "1", "vpp": "1",
    "micro_batch": "1", "global_batch": "128.0", "zero_fsdp": "distributed optimizer", "seq_parallel": "", "recompute": "",
    "flash_attention": "TE", "precision": "bf16", "framework": "NeMo 24.09", "step_time_s": "3.2", "peak_mem_gb": "",
    "oom": "0", "flags": "", "notes": "", "n_params_b": "",
}  # fmt: skip


def test_the_shipped_runs_are_all_read_and_few_are_not_modelled() -> None:
    runs = shipped_runs()
    assert len(runs) == 1637
    reasons = [run.reason for run in runs if run.reason]
    assert all("the layout is not known" in reason for reason in reasons)
    assert len(reasons) <= 10


def test_a_row_is_completed_and_says_what_was_assumed() -> None:
    run = run_of(ROW)
    assert run.reason == ""
    assert run.degrees is not None
    assert run.model is not None
    assert run.cluster is not None
    assert (run.degrees.tp, run.degrees.cp, run.degrees.dp, run.degrees.zero) == (2, 2, 4, 1)
    assert run.degrees.sequence_parallel
    assert run.model.params == pytest.approx(8.03e9, rel=0.01)
    assert run.cluster.device_count == 16
    assert "architecture of llama-3.1-8b from the catalogue" in run.assumed
    assert any("recompute is not stated" in text for text in run.assumed)
    assert run.source == "mine"
    assert run.scored


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "Llama-2-70B (LoRA)"}, "LoRA: the rank is not stated"),
        ({"model": "Llama-2-70B (LoRA)", "notes": "rank=99999"}, "workload.lora_rank=99999"),
        ({"tp": "", "zero_fsdp": ""}, "the layout is not known"),
        ({"seq_len": ""}, "seq_len is empty"),
        ({"precision": "fp32"}, "32 bits"),
        ({"gpu": "Abacus 3000"}, "is not an accelerator"),
        ({"model": "Unheard-of 7T"}, "not in the catalogue"),
        ({"global_batch": "many"}, "global_batch='many'"),
        ({"model": "X", "layers": "4", "hidden": "256", "heads": "4", "moe": "some"}, "must state experts and topk"),
    ],
)
def test_a_row_that_cannot_be_modelled_says_why(change: dict[str, str], words: str) -> None:
    run = run_of(ROW | change)
    assert words in run.reason
    assert run.degrees is None or run.model is None


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"notes": "LoRA r=16 on attention"}, (16, "attention", "16bit")),
        ({"framework": "NeMo 24.09 QLoRA rank 64"}, (64, "all", "nf4")),
    ],
)
def test_a_row_of_adapters_is_modelled_where_it_states_their_rank(
    change: dict[str, str], fields: tuple[int, str, str]
) -> None:
    run = run_of(ROW | change)
    assert not run.reason
    assert run.workload is not None
    assert (run.workload.lora_rank, run.workload.lora_modules, run.workload.base_precision) == fields
    assert ("adapters on all projections" in run.assumed) == (fields[1] == "all")


def test_head_size_experts_and_ties_follow_the_model() -> None:
    qwen = run_of(ROW | {"model": "Qwen3_30B_a3B", "tp": "1", "cp": "1", "ep": "8"})
    assert qwen.model is not None
    assert qwen.degrees is not None
    assert (qwen.degrees.ep, qwen.degrees.etp) == (8, 1)
    shapes = {"layers": "24", "hidden": "2048", "heads": "32", "kv_heads": "32", "ffn": "4096", "vocab": "50257"}
    tied = run_of(ROW | shapes | {"model": "llama-1B (bench)", "n_params_b": "1.11"}).model
    untied = run_of(ROW | shapes | {"model": "llama-1B (bench)", "n_params_b": "1.21"}).model
    assert tied is not None
    assert untied is not None
    assert tied.tied
    assert not untied.tied
    gpt = run_of(ROW | {"model": "GPT-9", "layers": "4", "hidden": "1024", "heads": "16", "n_params_b": "0.1"}).model
    assert gpt is not None
    assert gpt.norm == "layernorm"
    moe = run_of(
        ROW | shapes | {"model": "Own", "moe": "experts=16,topk=2,moe_ffn=512,shared_ffn=256", "n_params_b": ""}
    ).model
    assert moe is not None
    assert moe.layers[-1].ffn == Moe(16, 2, 512, True, 256)


@pytest.mark.parametrize(
    ("text", "zero", "replicate"),
    [
        ("ZeRO-1 within group of 8 (hierarchical)", 1, 2),
        ("FSDP FULL_SHARD", 3, 1),
        ("FSDP2 (zero-3-like)", 3, 1),
        ("HSDP", 3, 2),
        ("ZeRO-2", 2, 1),
        ("none/DDP", 0, 1),
    ],
)
def test_sharding_is_read_from_words(text: str, zero: int, replicate: int) -> None:
    degrees = run_of(ROW | {"tp": "1", "cp": "1", "zero_fsdp": text}).degrees
    assert degrees is not None
    assert (degrees.zero, degrees.dp_replicate) == (zero, replicate)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVLink + Omni-Path 4x100Gb/node (Jean Zay; see hpc docs)", 6.25e9),
        ("1600 Gbps/node RoCE", 25e9),
        ("config: intra 150 GB/s, inter 800 Gbps per node (config/validation/*)", 12.5e9),
        ("NVLink4 + 8x400Gb IB (EOS)", 50e9),
        ("NVLink + InfiniBand (not stated in repo)", None),
    ],
)
def test_network_rates_are_read_from_words(text: str, expected: float | None) -> None:
    assert network_bytes_per_s(text, 8) == expected


@pytest.mark.parametrize(
    ("change", "name", "memory_gib"),
    [
        ({"gpu": "A100-SXM4-40GB", "gpu_mem_gb": ""}, "A100-SXM-40GB", 40),
        ({"gpu": "A100", "gpu_mem_gb": "40.0"}, "A100-SXM-40GB", 40),
        ({"gpu": "MI250X", "gpu_mem_gb": ""}, "MI250X", None),
        ({"gpu": "NVIDIA H100-SXM5-80GB"}, "H100-SXM", 80),
        ({"gpu": "H100-96GB(HBM2e,500W)", "gpu_mem_gb": "96"}, "H100-SXM-96GB", 96),
        ({"gpu": "NVIDIA Blackwell GPU (GB200)", "gpus_per_node": "4", "gpu_mem_gb": ""}, "GB200", None),
    ],
)
def test_accelerators_are_found_however_they_are_written(
    change: dict[str, str], name: str, memory_gib: int | None
) -> None:
    run = run_of(ROW | change)
    assert run.cluster is not None, run.reason
    (accelerator,) = run.cluster.accelerators
    assert accelerator.name == name
    assert memory_gib is None or accelerator.memory_bytes == memory_gib * 2**30


def test_odd_device_counts_are_spread_evenly_over_nodes() -> None:
    run = run_of(ROW | {"n_gpus": "12", "tp": "2", "cp": "1", "dp": "6", "global_batch": "96"})
    assert run.cluster is not None
    assert run.cluster.device_count == 12
    assert {leaf.devices for leaf in run.cluster.leaves} == {6}


def test_frameworks_have_their_generation() -> None:
    assert profile_of("Megatron-DeepSpeed, 1F1B") == "megatron-2021"
    assert profile_of("torchtitan FSDP bf16") == "torchtitan"
    assert profile_of("something new") == "megatron-core"
    assert profile_of("something new", "FSDP full shard") == "fsdp1"


def test_names_find_their_catalogue_model() -> None:
    for name, slug in (("LLAMA3_70B [SFT Performance]", "llama-3-70b"), ("GPT3-20B", "gpt-20b")):
        model = catalog_model(name)
        assert model is not None
        assert model.name == slug
    assert catalog_model("no such model") is None


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,model\na,b\n")
    with pytest.raises(InputError, match="column gpu is missing"):
        read_runs(path)
    with pytest.raises(InputError, match="not a readable CSV"):
        read_runs(tmp_path / "none.csv")


@given(st.dictionaries(st.sampled_from(sorted(ROW)), st.text(max_size=12) | st.sampled_from(["0", "-1", "1e9", "nan"])))
@settings(max_examples=200, deadline=None)
def test_no_row_is_a_crash(change: dict[str, str]) -> None:
    run = run_of(ROW | change | {"id": "x_1"})
    assert run.id == "x_1"
    assert run.reason or run.degrees is not None
