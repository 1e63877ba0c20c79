"""Tiny models as Hugging Face configs: the one description that shardwise and `tiny_models.py` both build from."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

LLAMA: Config = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, Config] = {
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "llama-deep": LLAMA | {"num_hidden_layers": 10, "hidden_size": 32, "intermediate_size": 96},
    # Eight ranks can split the key/value heads of this one.
    "llama-wide": LLAMA | {"num_attention_heads": 16, "num_key_value_heads": 8},
    # Neither four nor eight ranks divide these sizes, so shards are padded and some ranks hold less.
    "llama-uneven": LLAMA
    | {
        "hidden_size": 60,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 150,
        "vocab_size": 1001,
    },
    "mixtral": LLAMA
    | {
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
