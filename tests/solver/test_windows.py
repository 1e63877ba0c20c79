"""Sliding windows as config files state them, and the model FLOPs that they leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import shardwise as sw
from shardwise.data.cluster_catalog import load_cluster
from shardwise.data.hf_config import model_from_config
from shardwise.data.instance import Instance
from shardwise.data.model import Attention
from shardwise.solver.evaluate import model_flops

SIZES = {
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 2816, "vocab_size": 32000,
}  # fmt: skip
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}


def windows(kind: str, **fields: Any) -> list[int | None]:
    model = model_from_config({**SIZES, "model_type": kind, **fields}, "it")
    return [layer.mixer.window for layer in model.layers if isinstance(layer.mixer, Attention)]


def test_gpt_oss_without_layer_types() -> None:
    assert windows("gpt_oss", sliding_window=128, **EXPERTS) == [128, None] * 4


def test_mixtral_has_its_window() -> None:
    assert windows("mixtral", sliding_window=512, **EXPERTS) == [512] * 8
    assert windows("mixtral", sliding_window=None, **EXPERTS) == [None] * 8


@pytest.mark.parametrize(("kind", "more"), [("qwen2", {}), ("qwen3", {}), ("qwen2_moe", MOE), ("qwen3_moe", MOE)])
def test_qwen_has_windows_where_it_says_so(kind: str, more: dict[str, int]) -> None:
    given = {"sliding_window": 512, "max_window_layers": 3, **more}
    assert windows(kind, use_sliding_window=True, **given) == [None] * 3 + [512] * 5
    assert windows(kind, use_sliding_window=False, **given) == [None] * 8
    assert windows(kind, **given) == [None] * 8


@pytest.mark.parametrize("field", ["hidden_size_per_layer_input", "num_kv_shared_layers"])
def test_small_gemma_4_is_refused(field: str) -> None:
    with pytest.raises(sw.InputError, match=f"{field}=4 must be 0"):
        windows("gemma4_text", layer_types=["full_attention"] * 8, sliding_window=512, **{field: 4})


@pytest.mark.parametrize("window", [1, 100, 1024, 4096, 9999])
def test_model_flops_of_a_window_count_what_a_query_sees(window: int) -> None:
    def flops(**fields: Any) -> float:
        model = model_from_config({**SIZES, "model_type": "mistral", **fields}, "it")
        return model_flops(Instance(model, load_cluster("dgx-h100:1"), sw.Training(4096, 8)))

    met = sum(min(i + 1, window) - 0.5 * (i < window) for i in range(4096)) / 4096
    whole = 12 * 8 * 1024 * 2048 * 4096 * 8
    assert flops() - flops(sliding_window=window) == pytest.approx(whole * (1 - met / 2048), rel=2e-3, abs=1)


def test_biases_of_attention_are_those_of_the_config() -> None:
    def params(kind: str, **fields: Any) -> int:
        return model_from_config({**SIZES, **MOE, "model_type": kind, **fields}, "it").params

    out, qkv = 1024, 8 * 128 + 2 * 2 * 128
    assert params("qwen3_moe", attention_bias=True) - params("qwen3_moe") == 8 * (qkv + out)
    glm = {"n_routed_experts": 8, "first_k_dense_replace": 0}
    assert params("glm4_moe", **glm) - params("glm4_moe", attention_bias=False, **glm) == 8 * qkv
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    linear = {f"linear_{name}": 4 for name in names}
    with pytest.raises(sw.InputError, match="mlp_only_layers"):
        params("qwen3_next", mlp_only_layers=[1], **linear)


def test_model_flops_of_chunks_count_half_a_chunk() -> None:
    config = {**SIZES, "model_type": "mistral", "num_hidden_layers": 1}
    model = model_from_config(config, "it")

    def flops(window: int | None, *, chunked: bool = False) -> float:
        (kind,) = model.layers
        assert isinstance(kind.mixer, Attention)
        part = replace(kind.mixer, window=window, chunked=chunked)
        own = replace(model, layers=(replace(kind, mixer=part),))
        return model_flops(Instance(own, load_cluster("dgx-h100:1"), sw.Training(4096, 8)))

    assert flops(None) - flops(512, chunked=True) == pytest.approx(12 * 1024 * (2048 - 256) * 4096 * 8)
    assert flops(512, chunked=True) < flops(512)
