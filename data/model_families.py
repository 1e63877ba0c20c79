"""Families of models: from the fields of a `config.json` to layers.

`FAMILIES` maps a `model_type` to the function that reads it. Each function returns a `Build`; a new family is a
function here and a line in that table. Defaults are those of the family's published code; what was assumed is listed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.data.families_dense import (
    bloom,
    falcon,
    gemma1,
    gemma2,
    gemma3,
    glm,
    glm4,
    gpt2_like,
    llama_like,
    mimo,
    mistral,
    nemotron,
    nemotron_nas,
    opt,
    palm,
    qwen2,
    qwen3,
)
from shardwise.data.families_experts import (
    deepseek,
    deepseek_v2,
    deepseek_v4,
    gemma4,
    glm4_moe,
    gpt_oss,
    llama4,
    mimo_v2,
    minimax_m2,
    minimax_m3,
    mixtral,
    qwen2_moe,
    qwen3_moe,
    step3,
)
from shardwise.data.families_hybrid import (
    bamba,
    jamba,
    kimi_linear,
    mamba_only,
    minimax_text,
    nemotron_h,
    qwen3_next,
    zamba2,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.data.config_fields import Fields
    from shardwise.data.family_build import Build

FAMILIES: dict[str, Callable[[Fields], Build]] = {
    "llama": llama_like,
    "mistral": mistral,
    "phi3": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "glm": glm,
    "glm4": glm4,
    "qwen3_vl_text": qwen3,
    "mimo": mimo,
    "gemma": gemma1,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "nemotron": nemotron,
    "nemotron-nas": nemotron_nas,
    "gpt2": gpt2_like,
    "gpt2-like": gpt2_like,
    "bloom": bloom,
    "opt": opt,
    "falcon": falcon,
    "palm": palm,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "qwen3_vl_moe_text": qwen3_moe,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "minimax_m2": minimax_m2,
    "minimax_m3": minimax_m3,
    "step3p7": step3,
    "llama4_text": llama4,
    "mimo_v2_flash": mimo_v2,
    "gemma4_text": gemma4,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek,
    "deepseek_v32": deepseek,
    "deepseek_v4": deepseek_v4,
    "kimi_k2": deepseek,
    "glm_moe_dsa": deepseek,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
    "kimi_linear": kimi_linear,
    "minimax": minimax_text,
    "minimax_text_01": minimax_text,
    "nemotron_h": nemotron_h,
    "mamba": mamba_only,
    "mamba2": mamba_only,
    "falcon_mamba": mamba_only,
    "jamba": jamba,
    "bamba": bamba,
    "zamba2": zamba2,
}

DEFAULTS: dict[str, dict[str, int]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256000},
    "gemma3_text": {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
    "qwen3": {"head_dim": 128},
}
"""What published configs leave to the family's configuration class (transformers models/*/configuration_*.py)."""
