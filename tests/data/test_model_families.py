"""Configs as their authors publish them, of families that the shipped files do not cover, have their published size."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.data.faults import InputError
from shardwise.data.hf_config import model_from_config

HYBRID_IDS = [6, 12, 18, 24, 30, 36, 42, 47, 51]
JAMBA_MINI: dict[str, Any] = {
    "model_type": "jamba", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2,
    "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1,
    "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": "auto", "mamba_expand": 2, "vocab_size": 65536,
    "tie_word_embeddings": False,
}  # fmt: skip
BAMBA: dict[str, Any] = {
    "model_type": "bamba", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_n_groups": 1, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip
ZAMBA2: dict[str, Any] = {
    "model_type": "zamba2", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 54,
    "num_attention_heads": 32, "num_mem_blocks": 2, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_ngroups": 1,
    "mamba_headdim": 64, "vocab_size": 32000, "hybrid_layer_ids": HYBRID_IDS,
}  # fmt: skip
FALCON_7B: dict[str, Any] = {
    "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "bias": False, "vocab_size": 65024,
}  # fmt: skip
FALCON_40B: dict[str, Any] = {
    "model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
    "num_kv_heads": 8, "new_decoder_architecture": True, "parallel_attn": True, "bias": False, "vocab_size": 65024,
}  # fmt: skip
BLOOM: dict[str, Any] = {
    "model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "model_type": "mamba", "hidden_size": 2560, "intermediate_size": 5120, "num_hidden_layers": 64, "state_size": 16,
    "conv_kernel": 4, "time_step_rank": 160, "vocab_size": 50280,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "head_dim": 64,
    "state_size": 128, "conv_kernel": 4, "n_groups": 1, "vocab_size": 50288, "tie_word_embeddings": True,
}  # fmt: skip
MINIMAX_TEXT: dict[str, Any] = {
    "model_type": "minimax_text_01", "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32,
    "num_experts_per_tok": 2, "attn_type_list": ([0] * 7 + [1]) * 10, "vocab_size": 200064,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "params"),
    [
        (JAMBA_MINI, 51_570_323_328),
        (BAMBA, 9_780_235_392),
        (ZAMBA2, 2_662_214_560),
        (FALCON_7B, 6_921_720_704),
        (FALCON_40B, 41_303_293_952),
        (BLOOM, 559_214_592),
        (MAMBA, 2_768_345_600),
        (MAMBA2, 2_702_599_680),
        (MINIMAX_TEXT, 456_089_655_296),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_a_config_in_its_published_form_has_its_size(raw: dict[str, Any], params: int) -> None:
    assert model_from_config(raw, "x").params == params


def test_zamba2_reads_its_layers_from_block_types_too() -> None:
    types = ["hybrid" if index in HYBRID_IDS else "mamba" for index in range(54)]
    raw = {key: value for key, value in ZAMBA2.items() if key != "hybrid_layer_ids"} | {"layers_block_type": types}
    assert model_from_config(raw, "x").layers == model_from_config(ZAMBA2, "x").layers


def test_gemma3_gets_what_its_published_text_config_leaves_out() -> None:
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024,
    }  # fmt: skip
    model = model_from_config({"model_type": "gemma3", "text_config": text}, "x")
    # The catalogue's exact count, with 262,208 instead of 262,144 vocabulary rows.
    assert model.params == 3_880_099_328 + 64 * 2560
    assert "head_dim=256 (the family's default; not in the config)" in model.assumed


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512}, "word_embed_proj_dim=512 must equal"),
        (ZAMBA2 | {"use_shared_attention_adapter": True}, "use_shared_attention_adapter=True must be false"),
        (BAMBA | {"attn_layer_indices": [99]}, r"attn_layer_indices=\[99\] must be a list of layer numbers"),
        (BAMBA | {"layers_block_type": [[1]] * 32}, "layers_block_type holds"),
        (BAMBA | {"layers_block_type": [None] * 32}, "layers_block_type holds None"),
        (MINIMAX_TEXT | {"attn_type_list": None, "attn_pattern": "X"}, "attn_pattern='X' must be a string"),
        (FALCON_7B | {"model_type": "llama", "attn_pattern": 5}, "attn_pattern=5 must be a string"),
    ],
)
def test_what_is_not_understood_is_refused_and_not_miscounted(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_from_config(raw, "x")
