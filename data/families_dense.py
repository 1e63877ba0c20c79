"""Families of dense transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardwise.data.family_build import Build, Kinds, attention_biases, head_sizes, mtp_depth, windows
from shardwise.data.model import MAX_LAYERS
from shardwise.data.model_parts import (
    Norm,
    attention,
    layer,
    linear,
    mlp,
    norm,
)

if TYPE_CHECKING:
    from shardwise.data.config_fields import Fields
    from shardwise.data.model import LayerKind, Tensor


def llama_like(
    c: Fields,
    *,
    bias: bool = False,
    out_bias: bool | None = None,
    qk_norm: Literal["head", "layer"] | None = None,
    gated: bool = True,
    norm_kind: Norm = "rmsnorm",
    post_norms: bool = False,
    tied: bool = False,
    pattern: str | None = None,
    windowed: bool = True,
    mtp: bool = False,
) -> Build:
    """Llama and its relatives: pre-norm attention and a feed-forward part, one kind or one per window."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    heads = head_sizes(c, hidden)
    intermediate = c.integer("intermediate_size")
    own_bias, own_out_bias = attention_biases(c)
    has_bias = bias or own_bias
    has_out_bias = out_bias if out_bias is not None else own_out_bias
    mlp_bias = c.flag("mlp_bias", default=False)
    default = (pattern * -(-layers // len(pattern)))[:layers] if pattern else None
    every = windows(c, layers, default) if windowed else [None] * layers
    kinds = Kinds()

    def make(window: int | None) -> LayerKind:
        mixer = attention(
            hidden,
            heads.heads,
            heads.kv_heads,
            heads.head_dim,
            window=window,
            bias=has_bias,
            out_bias=has_out_bias,
            qk_norm=qk_norm,
        )
        ffn = mlp(hidden, intermediate, gated=gated, bias=mlp_bias)
        return layer(hidden, mixer, ffn, norm_kind=norm_kind, post_norms=post_norms)

    c.check()
    made = tuple(kinds(window, lambda window=window: make(window)) for window in every)  # type: ignore[misc]
    depth = mtp_depth(c) if mtp else 0
    return Build(
        hidden,
        made,
        norm_kind,
        c.flag("tie_word_embeddings", default=tied, why="the family's default"),
        mtp_depth=depth,
        mtp_layers=(made[-1],) if depth else (),
    )


def mistral(c: Fields) -> Build:
    """Every layer has the window, when there is one (Mistral 7B v0.1, Phi-3)."""
    return llama_like(c, pattern="S")


def qwen_windowed(c: Fields) -> bool:
    """Qwen has a window only where the config says that it is used."""
    return c.flag("use_sliding_window", default=False)


def qwen_pattern(c: Fields) -> str:
    """Then from layer `max_window_layers` on (transformers models/qwen2/configuration_qwen2.py)."""
    return "F" * c.integer("max_window_layers", default=28, least=0, most=MAX_LAYERS) + "S" * MAX_LAYERS


def qwen2(c: Fields) -> Build:
    return llama_like(c, bias=True, out_bias=False, windowed=qwen_windowed(c), pattern=qwen_pattern(c))


def qwen3(c: Fields) -> Build:
    return llama_like(c, qk_norm="head", windowed=qwen_windowed(c), pattern=qwen_pattern(c))


def glm(c: Fields) -> Build:
    """GLM-4 (transformers models/glm): biases, if any, on queries, keys and values only."""
    return llama_like(c, out_bias=False, windowed=False)


def glm4(c: Fields) -> Build:
    """GLM-4-0414 (transformers models/glm4): a norm after each part too."""
    return llama_like(c, out_bias=False, post_norms=True, windowed=False)


def mimo(c: Fields) -> Build:
    return llama_like(c, bias=True, out_bias=False, windowed=False, mtp=True)


def gemma1(c: Fields) -> Build:
    return llama_like(c, tied=True, windowed=False)


def gemma2(c: Fields) -> Build:
    return llama_like(c, post_norms=True, tied=True, pattern="SF")


def gemma3(c: Fields) -> Build:
    period = c.integer("sliding_window_pattern", default=6, most=MAX_LAYERS)
    return llama_like(c, post_norms=True, qk_norm="head", tied=True, pattern="S" * (period - 1) + "F")


def nemotron(c: Fields) -> Build:
    """Nemotron-4: squared ReLU, LayerNorm with bias (layernorm1p)."""
    return llama_like(c, gated=False, norm_kind="layernorm", windowed=False)


def gpt2_like(c: Fields, *, learned: bool = True, extra_positions: int = 0, embedding_norm: bool = False) -> Build:
    """GPT-2, GPT-3, Megatron GPT: LayerNorm, biases everywhere, learned positions, tied head."""
    hidden = c.integer("hidden_size", "n_embd", "n_embed")
    layers = c.layers("num_hidden_layers", "n_layer")
    heads = c.integer("num_attention_heads", "n_head")
    head_dim = c.integer("head_dim", default=max(hidden // heads, 1), why="hidden_size / num_attention_heads")
    intermediate = c.integer(
        "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden, why="four times hidden_size"
    )
    positions = c.integer("max_position_embeddings", "n_positions", default=2048, why="the family's default")
    gated = c.flag("mlp_gated", default=False)
    c.check()
    mixer = attention(hidden, heads, heads, head_dim, bias=True, out_bias=True)
    kind = layer(hidden, mixer, mlp(hidden, intermediate, gated=gated, bias=True), norm_kind="layernorm")
    return Build(
        hidden,
        (kind,) * layers,
        "layernorm",
        c.flag("tie_word_embeddings", default=True, why="the family's default"),
        positions=positions + extra_positions if learned else None,
        embedding_norm=embedding_norm,
    )


def bloom(c: Fields) -> Build:
    """BLOOM: ALiBi instead of positions, a LayerNorm after the embedding."""
    return gpt2_like(c, learned=False, embedding_norm=True)


def opt(c: Fields) -> Build:
    """OPT: its table of positions has two more rows (transformers models/opt).

    OPT 350M alone projects a narrower embedding and norms after each part; it is refused rather than miscounted.
    """
    if c.has("word_embed_proj_dim") and c.raw["word_embed_proj_dim"] != c.raw.get("hidden_size"):
        c.fault("word_embed_proj_dim", "must equal hidden_size (projected embeddings are not supported)")
    if not c.flag("do_layer_norm_before", default=True):
        c.fault("do_layer_norm_before", "must be true (norms after each part are not supported)")
    return gpt2_like(c, extra_positions=2)


def falcon(c: Fields) -> Build:
    """Falcon (transformers models/falcon): grouped heads and two norms in the newer architecture, else one key/value
    head, and one norm when attention and feed-forward run in parallel."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    heads = c.integer("num_attention_heads")
    grouped = c.flag("new_decoder_architecture", default=c.has("num_key_value_heads"))
    multi_query = c.flag("multi_query", default=True)
    kv_heads = heads
    if grouped:
        kv_heads = c.integer("num_key_value_heads", "num_kv_heads", default=heads, why="one per attention head")
    elif multi_query:
        kv_heads = 1
    parallel = c.flag("parallel_attn", default=True)
    norms = c.integer("num_ln_in_parallel_attn", default=2 if grouped or not parallel else 1, most=2)
    bias = c.flag("bias", default=False)
    intermediate = c.integer("intermediate_size", "ffn_hidden_size", default=4 * hidden, why="four times hidden_size")
    c.divisible("hidden_size", hidden, "num_attention_heads", heads)
    c.divisible("num_attention_heads", heads, "num_kv_heads", kv_heads)
    tied = c.flag("tie_word_embeddings", default=True, why="the family's default")
    c.check()
    mixer = attention(hidden, heads, kv_heads, hidden // heads, bias=bias, out_bias=bias)
    ffn = mlp(hidden, intermediate, gated=False, bias=bias)
    return Build(hidden, (layer(hidden, mixer, ffn, norm_kind="layernorm", norms=norms),) * layers, "layernorm", tied)


def palm(c: Fields) -> Build:
    """PaLM: parallel block with one norm, multi-query attention, SwiGLU, tied head (arXiv 2204.02311, section 2)."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    heads = head_sizes(c, hidden, kv_default=1)
    intermediate = c.integer("intermediate_size")
    c.check()
    mixer = attention(hidden, heads.heads, heads.kv_heads, heads.head_dim)
    kind = layer(hidden, mixer, mlp(hidden, intermediate, gated=True), norms=1)
    return Build(hidden, (kind,) * layers, tied=c.flag("tie_word_embeddings", default=True, why="the paper"))


def nemotron_nas(c: Fields) -> Build:
    """Llama-Nemotron: each layer's attention and feed-forward chosen by search, or left out (`block_configs`)."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    heads = c.integer("num_attention_heads")
    blocks = c.raw.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) < layers:
        c.fault("block_configs", f"must be a list with an entry for each of the {layers} layers")
        blocks = []
    c.check()
    kinds, made = Kinds(), []
    for index, block in enumerate(blocks[:layers]):
        inner = c.nested("block_configs") if not isinstance(block, dict) else type(c)(block, f"block_configs[{index}].")
        inner.faults, inner.assumed = c.faults, c.assumed
        attn, ffn = inner.nested("attention"), inner.nested("ffn")
        group = None if attn.flag("no_op", default=False) else attn.optional("n_heads_in_group")
        multiple = ffn.raw.get("ffn_mult")
        if ffn.flag("no_op", default=False):
            multiple = None
        elif not isinstance(multiple, int | float) or isinstance(multiple, bool) or not 0 < multiple < 1000:
            ffn.fault("ffn_mult", "must be a number between 0 and 1000")
            multiple = None
        linears = (attn.flag("replace_with_linear", default=False), ffn.flag("replace_with_linear", default=False))
        key = (group, multiple, linears)
        made.append(kinds(key, lambda key=key: _searched_layer(hidden, heads, *key)))  # type: ignore[misc]
    c.check()
    return Build(hidden, tuple(made), tied=c.flag("tie_word_embeddings", default=False))


def _searched_layer(
    hidden: int, heads: int, group: int | None, multiple: float | None, linears: tuple[bool, bool]
) -> LayerKind:
    """One layer of `nemotron_nas`; a part replaced by a matrix keeps its norm and that matrix."""
    extra: tuple[Tensor, ...] = ()
    for replaced, name in zip(linears, ("attention", "ffn"), strict=True):
        if replaced:
            extra += linear(f"{name}_linear", hidden, hidden, "none") + norm(f"{name}_norm", hidden)
    mixer = attention(hidden, heads, max(heads // group, 1), hidden // heads) if group and not linears[0] else None
    ffn = None
    if multiple is not None and not linears[1]:
        # transformers remote code of the checkpoint: two thirds of ffn_mult * hidden, rounded up to 256.
        ffn = mlp(hidden, -(-int(2 * multiple * hidden / 3) // 256) * 256, gated=True)
    return layer(hidden, mixer, ffn, extra=extra, label="" if mixer and ffn else "-partial")
