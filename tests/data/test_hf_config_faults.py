"""Published configs of more families are counted whole; faults come all at once, and none follows from another."""

from __future__ import annotations

import contextlib
import json
from importlib import resources
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.faults import InputError
from shardwise.data.hf_config import model_from_config
from shardwise.data.model import Moe

FOLDER = resources.files("shardwise.data") / "hf_configs"
CONFIGS = sorted(entry.name for entry in FOLDER.iterdir() if entry.name.endswith(".json"))

# Shapes as the checkpoints' config.json write them, with the parameters of the checkpoint.
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2": (
        124_439_808,
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
    ),
    "codestral-mamba": (
        7_285_403_648,
        {"model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
         "state_size": 128, "expand": 2, "n_groups": 8, "conv_kernel": 4, "vocab_size": 32768,
         "tie_word_embeddings": False},
    ),
    "glm-4-9b": (
        9_399_951_360,
        {"model_type": "glm", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
         "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True,
         "vocab_size": 151552, "tie_word_embeddings": False},
    ),
    "qwen1.5-moe-a2.7b": (
        14_315_784_192,
        {"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
         "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
         "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
         "mlp_only_layers": [], "vocab_size": 151936, "tie_word_embeddings": False},
    ),
}  # fmt: skip


def config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_the_parameters_of_its_checkpoint(name: str) -> None:
    params, raw = PUBLISHED[name]
    assert model_from_config(raw, name).params == params


def test_experts_skip_the_layers_a_qwen_config_keeps_dense() -> None:
    raw = config("Qwen--Qwen3-30B-A3B.json") | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    layers = model_from_config(raw, "x").layers
    assert [i for i, kind in enumerate(layers) if isinstance(kind.ffn, Moe)] == list(range(3, 48, 2))


def faults(name: str, **changes: Any) -> tuple[str, ...]:
    raw = config(name)
    raw.get("text_config", raw).update(changes)
    with pytest.raises(InputError) as error:
        model_from_config(raw, "x")
    return error.value.faults


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "meta-llama--Meta-Llama-3.1-8B.json",
            {"hidden_size": -1, "vocab_size": 0, "attention_bias": "x", "mlp_bias": "x", "tie_word_embeddings": "yes"},
        ),
        (
            "deepseek-ai--DeepSeek-V3.json",
            {"hidden_size": -1, "kv_lora_rank": "a", "n_routed_experts": 0, "num_nextn_predict_layers": -1},
        ),
        ("Qwen--Qwen3.5-27B.json", {"linear_num_key_heads": 0, "layer_types": 3, "tie_word_embeddings": 4}),
        ("nvidia--Llama-3_3-Nemotron-Super-49B-v1.json", {"hidden_size": -1, "block_configs": 3}),
        ("google--gemma-4-26B-A4B.json", {"hidden_size": -1, "layer_types": []}),
        ("nvidia--Nemotron-H-56B-Base-8K.json", {"hybrid_override_pattern": "MX", "mamba_num_heads": -1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_fault_is_reported_once_and_no_fault_follows_from_another(name: str, changes: dict[str, Any]) -> None:
    found = faults(name, **changes)
    assert len(found) == len(changes)
    assert all(any(f"{field}={value!r} must be" in fault for fault in found) for field, value in changes.items())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen--Qwen3.5-27B.json", {"linear_num_key_heads": 7}, "linear_num_value_heads=48 is not a multiple of"),
        ("nvidia--Nemotron-H-56B-Base-8K.json", {"n_groups": 7}, "mamba_num_heads=256 is not a multiple of n_groups=7"),
        ("deepseek-ai--DeepSeek-V4-Flash.json", {"o_groups": 7}, "num_attention_heads=64 is not a multiple of"),
        ("XiaomiMiMo--MiMo-V2-Flash.json", {"hybrid_layer_pattern": [None] * 48}, "hybrid_layer_pattern holds None"),
        ("meta-llama--Meta-Llama-3.1-8B.json", {"attn_pattern": 3}, "attn_pattern=3 must be a string"),
        ("meta-llama--Meta-Llama-3.1-8B.json", {"model_type": 10**5000}, "model_type=a int too large to show"),
        ("meta-llama--Meta-Llama-3.1-8B.json", {"vocab_size": 10**5000}, "vocab_size=a int too large to show"),
    ],
)
def test_what_does_not_fit_together_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    assert any(message in fault for fault in faults(name, **changes))


FIELDS = sorted(
    {name for file in CONFIGS for name in config(file).get("text_config", config(file))}
    | {name for _, raw in PUBLISHED.values() for name in raw}
    | {"attn_pattern", "hybrid_layer_pattern", "layers_block_type", "attn_layer_indices", "mlp_only_layers"}
)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**12), st.just(10**5000), st.floats(), st.text(max_size=5),
    st.sampled_from(["M", "SF", "auto", "M*-Eh"]),
    st.sampled_from([None, 0, 1, "x", True, {}, [], "full_attention", "mamba"]).map(lambda item: [item] * 200),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_field_with_any_value_is_a_model_or_an_input_error(data: st.DataObject) -> None:
    sources = [*(config(name) for name in CONFIGS), *(dict(raw) for _, raw in PUBLISHED.values())]
    raw = json.loads(json.dumps(data.draw(st.sampled_from(sources))))
    target = raw.get("text_config", raw)
    for name in data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4, unique=True)):
        target[name] = data.draw(VALUES)
    with contextlib.suppress(InputError):
        assert model_from_config(raw, "x").params > 0
