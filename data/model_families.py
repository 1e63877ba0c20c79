"""Families of models: from the fields of a `config.json` to layers.

`FAMILIES` maps a `model_type` to the function that reads it. Each function returns a `Build`; a new family is a
function here and a line in that table. Defaults are those of the family's published code; what was assumed is listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardwise.data.model import MAX_LAYERS, Latent, LayerKind, LinearAttention, Mamba, Tensor
from shardwise.data.model_parts import (
    FfnPart,
    MixerPart,
    Norm,
    attention,
    delta_attention,
    delta_net,
    indexer,
    latent_attention,
    layer,
    lightning_attention,
    linear,
    mamba1,
    mamba2,
    mlp,
    moe,
    norm,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.data.config_fields import Fields


@dataclass(frozen=True)
class Build:
    """What a family function returns; the reader adds embedding, head and name."""

    hidden: int
    layers: tuple[LayerKind, ...]
    norm: Norm = "rmsnorm"
    tied: bool = False
    positions: int | None = None
    embedding_norm: bool = False
    extra: tuple[Tensor, ...] = ()
    mtp_depth: int = 0
    mtp_layers: tuple[LayerKind, ...] = ()


@dataclass(frozen=True)
class Heads:
    """Sizes of softmax attention."""

    heads: int
    kv_heads: int
    head_dim: int


def head_sizes(c: Fields, hidden: int, *, kv_default: int | None = None) -> Heads:
    """Heads, key/value heads and head width; `kv_default` is the family's when the config has none."""
    heads = c.integer("num_attention_heads", "n_head")
    kv_heads = c.integer(
        "num_key_value_heads", default=kv_default or heads, why="" if kv_default else "one per attention head"
    )
    if not c.has("head_dim"):
        c.divisible("hidden_size", hidden, "num_attention_heads", heads)
    head_dim = c.integer(
        "head_dim", "attention_head_dim", default=max(hidden // heads, 1), why="hidden_size / num_attention_heads"
    )
    c.divisible("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    return Heads(heads, kv_heads, head_dim)


def window_of(c: Fields, *, used: bool) -> int | None:
    """The sliding window, if the family or the config uses it."""
    return c.optional("sliding_window") if used and c.flag("use_sliding_window", default=True) else None


def windows(c: Fields, layers: int, default: str | None = None) -> list[int | None]:
    """The window of every layer, from `layer_types`, a pattern of S and F, or none."""
    window = window_of(c, used=True)
    types = c.per_layer("layer_types", layers, ("sliding_attention", "full_attention", "chunked_attention"))
    if types is None:
        given = letters(c, "attn_pattern", "SF", layers)
        types = [{"S": "sliding_attention"}.get(letter, "full_attention") for letter in given or default or ""]
        if default and not given and window:
            c.assumed.append(f"layer_types={default[:12]}... (the family's pattern; not in the config)")
    if len(types) < layers:
        types = [*types, *(["full_attention"] * (layers - len(types)))]
    return [window if kind == "sliding_attention" else None for kind in types]


def letters(c: Fields, name: str, allowed: str, layers: int | None = None) -> str | None:
    """A string of one of the letters `allowed` per layer; None when the field is absent or at fault."""
    value = c.raw.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_LAYERS or set(value) - set(allowed):
        c.fault(name, f"must be a string of the letters {' '.join(allowed)}, one per layer")
        return None
    if layers is not None and len(value) != layers:
        c.faults.append(f"{c.where}{name} has {len(value)} letters, num_hidden_layers={layers}")
        return None
    return value


class Kinds:
    """Layers built once per distinct set of choices, so that equal layers are one object."""

    def __init__(self) -> None:
        self._made: dict[Any, LayerKind] = {}

    def __call__(self, key: Any, make: Callable[[], LayerKind]) -> LayerKind:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


# -- dense transformers ----------------------------------------------------------------------------------------------


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
    attention_bias = c.raw.get("attention_bias")
    has_bias = bias or attention_bias is True or attention_bias == "qkv"
    has_out_bias = out_bias if out_bias is not None else attention_bias is True
    mlp_bias = c.flag("mlp_bias", default=False)
    every = windows(c, layers, (pattern * layers)[:layers] if pattern else None) if windowed else [None] * layers
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
    depth = c.integer("num_nextn_predict_layers", default=0, least=0, most=64) if mtp else 0
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


def qwen2(c: Fields) -> Build:
    return llama_like(c, bias=True, out_bias=False, windowed=False)


def qwen3(c: Fields) -> Build:
    return llama_like(c, qk_norm="head", windowed=False)


def mimo(c: Fields) -> Build:
    return llama_like(c, bias=True, out_bias=False, windowed=False, mtp=True)


def gemma1(c: Fields) -> Build:
    return llama_like(c, tied=True, windowed=False)


def gemma2(c: Fields) -> Build:
    return llama_like(c, post_norms=True, tied=True, pattern="SF")


def gemma3(c: Fields) -> Build:
    return llama_like(c, post_norms=True, qk_norm="head", tied=True, pattern="SSSSSF")


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


# -- mixture of experts ----------------------------------------------------------------------------------------------


def experts_of(
    c: Fields,
    hidden: int,
    *,
    router_bias: bool = False,
    bias: bool = False,
    gated: bool = True,
    shared_gate: bool = False,
    shared: int | None = None,
) -> FfnPart:
    """The routed and shared experts of a config."""
    experts = c.integer("n_routed_experts", "num_local_experts", "num_experts")
    top_k = c.integer("num_experts_per_tok", "num_experts_per_token", "experts_per_tok", "top_k_experts")
    if top_k > experts:
        c.faults.append(f"{c.where}num_experts_per_tok={top_k} exceeds the number of experts={experts}")
    intermediate = c.integer("moe_intermediate_size", "intermediate_size")
    if shared is None:
        shared = c.optional(
            "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "share_expert_dim"
        )
        count = c.optional("n_shared_experts", "num_shared_experts")
        if shared is None and count:
            shared = count * intermediate
    return moe(
        hidden,
        experts,
        top_k,
        intermediate,
        gated=gated,
        router_bias=router_bias,
        bias=bias,
        shared_intermediate=shared or 0,
        shared_gate=shared_gate,
        latent=c.optional("moe_latent_size", "routed_expert_hidden_size") or 0,
    )


def sparse_layers(c: Fields, layers: int) -> list[bool]:
    """Which layers have experts: `first_k_dense_replace`, `moe_layer_freq`, `mlp_layer_types`, or all."""
    frequency = c.raw.get("moe_layer_freq")
    if isinstance(frequency, list):
        found = c.per_layer("moe_layer_freq", layers, (0, 1))
        return [bool(item) for item in found or [1] * layers]
    types = c.per_layer("mlp_layer_types", layers, ("dense", "sparse"))
    if types is not None:
        return [item == "sparse" for item in types]
    dense = c.integer("first_k_dense_replace", default=0, least=0, most=layers)
    return [index >= dense for index in range(layers)]


def moe_transformer(
    c: Fields,
    *,
    bias: bool = False,
    out_bias: bool = False,
    qk_norm: Literal["head", "layer"] | None = None,
    router_bias: bool = False,
    expert_bias: bool = False,
    sinks: bool = False,
    gate: Literal["element", "head"] | None = None,
    pattern: str | None = None,
    windowed: bool = False,
    shared: int | None = None,
    extra: Callable[[int], tuple[Tensor, ...]] | None = None,
) -> Build:
    """Softmax attention with experts in all layers, or in all but the first few."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    heads = head_sizes(c, hidden)
    sparse = sparse_layers(c, layers)
    every = windows(c, layers, pattern) if windowed else [None] * layers
    experts = experts_of(c, hidden, router_bias=router_bias, bias=expert_bias, shared=shared)
    intermediate = 0
    if not all(sparse):
        intermediate = c.integer("dense_intermediate_size", "intermediate_size")
    c.check()
    kinds = Kinds()

    def make(window: int | None, routed: bool) -> LayerKind:
        mixer = attention(
            hidden,
            heads.heads,
            heads.kv_heads,
            heads.head_dim,
            window=window,
            bias=bias,
            out_bias=out_bias,
            qk_norm=qk_norm,
            gate=gate,
            sinks=sinks,
            extra=extra(hidden) if extra and routed else (),
        )
        return layer(hidden, mixer, experts if routed else mlp(hidden, intermediate, gated=True))

    made = tuple(
        kinds((window, routed), lambda window=window, routed=routed: make(window, routed))  # type: ignore[misc]
        for window, routed in zip(every, sparse, strict=True)
    )
    depth = c.integer("num_nextn_predict_layers", "num_mtp_modules", default=0, least=0, most=64)
    return Build(
        hidden,
        made,
        tied=c.flag("tie_word_embeddings", default=False, why="the family's default"),
        mtp_depth=depth,
        mtp_layers=(made[-1],) if depth else (),
    )


def mixtral(c: Fields) -> Build:
    return moe_transformer(c)


def qwen3_moe(c: Fields) -> Build:
    return moe_transformer(c, qk_norm="head")


def glm4_moe(c: Fields) -> Build:
    """GLM-4.5: query/key/value biases, router correction bias, query and key norms in the large one."""
    c.raw.setdefault("n_shared_experts", 1)
    qk_norm = c.flag("use_qk_norm", default=c.raw.get("qk_norm") is True)
    return moe_transformer(c, bias=True, router_bias=True, qk_norm="head" if qk_norm else None)


def gpt_oss(c: Fields) -> Build:
    """gpt-oss: attention sinks, biases on all matrices, windows on every other layer."""
    return moe_transformer(
        c, bias=True, out_bias=True, router_bias=True, expert_bias=True, sinks=True, windowed=True, pattern="SF" * 64
    )


def minimax_m2(c: Fields) -> Build:
    return moe_transformer(c, qk_norm="layer", router_bias=c.flag("use_routing_bias", default=True))


def minimax_m3(c: Fields) -> Build:
    """MiniMax-M3: sparse attention with an indexer in the layers after the first dense ones."""

    inner = c.nested("sparse_attention_config")
    heads = inner.integer("sparse_num_index_heads", default=4)
    width = inner.integer("sparse_index_dim", default=128)

    def sparse(hidden: int) -> tuple[Tensor, ...]:
        return (
            *linear("indexer.q_proj", heads * width, hidden, "none"),
            *linear("indexer.k_proj", width, hidden, "none"),
        )

    c.assumed.append("indexer: query heads and one key of sparse_index_dim, read from hidden (not in the config)")
    return moe_transformer(c, qk_norm="head", router_bias=True, extra=sparse)


def step3(c: Fields) -> Build:
    c.assumed.append("attention output gate: one value per head (Step-3.5; not in the config)")
    return moe_transformer(c, qk_norm="head", router_bias=True, gate="head", windowed=True)


def llama4(c: Fields) -> Build:
    """Llama-4: experts in every `interleave_moe_layer_step`-th layer, chunked attention in three of four layers."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    heads = head_sizes(c, hidden)
    step = c.integer("interleave_moe_layer_step", default=1)
    chunk = c.integer("attention_chunk_size", default=8192, why="the family's default")
    expert_width, dense_width = c.integer("intermediate_size"), c.integer("intermediate_size_mlp", default=16384)
    c.assumed.append("full attention without rotary positions in every fourth layer (the family's default)")
    ffns = (
        mlp(hidden, dense_width, gated=True),
        experts_of(c, hidden, shared=expert_width),
    )
    c.check()
    kinds, made = Kinds(), []
    for index in range(layers):
        window = None if (index + 1) % 4 == 0 else chunk
        routed = (index + 1) % step == 0
        mixer = attention(hidden, heads.heads, heads.kv_heads, heads.head_dim, window=window)
        made.append(
            kinds((window, routed), lambda mixer=mixer, routed=routed: layer(hidden, mixer, ffns[routed]))  # type: ignore[misc]
        )
    return Build(hidden, tuple(made), tied=c.flag("tie_word_embeddings", default=False, why="the family's default"))


def mimo_v2(c: Fields) -> Build:
    """MiMo-V2: windowed layers with their own key/value heads and attention sinks."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    sparse = sparse_layers(c, layers)
    windowed = c.per_layer("hybrid_layer_pattern", layers, (0, 1)) or [0] * layers
    window = c.integer("sliding_window")
    ffns = (mlp(hidden, c.integer("intermediate_size"), gated=True), experts_of(c, hidden, router_bias=True))
    sizes = [
        (c.integer(f"{p}num_attention_heads"), c.integer(f"{p}num_key_value_heads"), c.integer(f"{p}head_dim"),
         c.integer(f"{p}v_head_dim"))
        for p in ("", "swa_")
    ]  # fmt: skip
    sinks = [c.flag(f"add_{name}_attention_sink_bias", default=False) for name in ("full", "swa")]
    c.check()
    mixers = [
        attention(hidden, heads, kv, width, v_head_dim=v, window=window if i else None, sinks=sinks[i])
        for i, (heads, kv, width, v) in enumerate(sizes)
    ]
    kinds = Kinds()
    made = tuple(
        kinds((w, r), lambda w=w, r=r: layer(hidden, mixers[w], ffns[r]))  # type: ignore[misc]
        for w, r in zip(windowed, sparse, strict=True)
    )
    return Build(hidden, made, tied=c.flag("tie_word_embeddings", default=False))


def gemma4(c: Fields) -> Build:
    """Gemma 4 with experts: a dense part and experts side by side, wide heads and shared keys in full layers."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    types = c.per_layer("layer_types", layers, ("sliding_attention", "full_attention")) or []
    heads, window = c.integer("num_attention_heads"), c.integer("sliding_window")
    local = (c.integer("num_key_value_heads"), c.integer("head_dim"))
    wide = (c.integer("num_global_key_value_heads", default=local[0]), c.integer("global_head_dim", default=local[1]))
    shared_kv = c.flag("attention_k_eq_v", default=False)
    dense = mlp(hidden, c.integer("intermediate_size"), gated=True)
    ffn = dense
    if c.flag("enable_moe_block", default=False):
        # The dense part runs on every token, as a shared expert does.
        routed = experts_of(c, hidden, shared=dense.part.intermediate)
        ffn = FfnPart(routed.part, (*routed.tensors, Tensor("router.scale", (hidden,)), *norm("moe_norm", hidden)))
        c.assumed.append("the dense feed-forward part beside the experts is taken as a shared expert")
    c.check()
    kinds = Kinds()

    def make(kind: str) -> LayerKind:
        full = kind == "full_attention"
        kv_heads, width = wide if full else local
        mixer = attention(
            hidden, heads, kv_heads, width, window=None if full else window, qk_norm="head",
            shared_kv=shared_kv and full,
        )  # fmt: skip
        return layer(hidden, mixer, ffn, post_norms=True)

    made = tuple(kinds(kind, lambda kind=kind: make(kind)) for kind in types)  # type: ignore[misc]
    return Build(hidden, made, tied=c.flag("tie_word_embeddings", default=True))


# -- latent attention ------------------------------------------------------------------------------------------------


def latent_of(c: Fields) -> tuple[int, Latent, int]:
    """Heads, low-rank sizes and value width of MLA."""
    latent = Latent(
        c.optional("q_lora_rank"),
        c.integer("kv_lora_rank"),
        c.integer("qk_nope_head_dim"),
        c.integer("qk_rope_head_dim"),
    )
    return c.integer("num_attention_heads"), latent, c.integer("v_head_dim")


def deepseek(c: Fields, *, router_bias: bool = True) -> Build:
    """DeepSeek-V3 and relatives: MLA, a few dense layers, then experts; V3.2 and GLM-5 add an indexer."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    heads, latent, v_dim = latent_of(c)
    sparse = sparse_layers(c, layers)
    ffns = (mlp(hidden, c.integer("intermediate_size"), gated=True), experts_of(c, hidden, router_bias=router_bias))
    types = c.per_layer("indexer_types", layers, ("full", "shared")) or ["full"] * layers
    index_heads, index_dim = c.optional("index_n_heads"), c.optional("index_head_dim")
    c.check()
    kinds = Kinds()

    def make(routed: bool, indexed: bool) -> LayerKind:
        extra = indexer(hidden, latent.q_rank or hidden, index_heads or 1, index_dim or 1) if indexed else ()
        return layer(hidden, latent_attention(hidden, heads, latent, v_dim, extra=extra), ffns[routed])

    made = tuple(
        kinds((r, i), lambda r=r, i=i: make(r, i))  # type: ignore[misc]
        for r, i in zip(sparse, (bool(index_heads) and kind == "full" for kind in types), strict=True)
    )
    depth = c.integer("num_nextn_predict_layers", default=0, least=0, most=64)
    return Build(
        hidden,
        made,
        tied=c.flag("tie_word_embeddings", default=False, why="the family's default"),
        mtp_depth=depth,
        mtp_layers=(made[-1],) if depth else (),
    )


def deepseek_v2(c: Fields) -> Build:
    return deepseek(c, router_bias=False)


def deepseek_v4(c: Fields) -> Build:
    """DeepSeek-V4: one shared key/value head, low-rank grouped output, compressed keys, hyper-connections.

    What the config does not say (compressor and hyper-connection shapes) is left out and listed.
    """
    hidden, layers = c.integer("hidden_size"), c.layers()
    heads, width = c.integer("num_attention_heads"), c.integer("head_dim")
    q_rank, o_rank = c.integer("q_lora_rank"), c.integer("o_lora_rank")
    groups, window = c.integer("o_groups"), c.integer("sliding_window")
    index_heads, index_dim = c.integer("index_n_heads"), c.integer("index_head_dim")
    ratios = c.raw.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < layers:
        c.fault("compress_ratios", f"must be a list with an entry for each of the {layers} layers")
        ratios = [0] * layers
    experts = experts_of(c, hidden, router_bias=True)
    c.assumed.append("key compressors and hyper-connections are left out of the parameters (shapes not in the config)")
    c.assumed.append(f"each query sees a window of {window} keys in time estimates; compressed keys are not counted")
    c.check()
    kinds = Kinds()

    def make(indexed: bool) -> LayerKind:
        base = attention(hidden, heads, 1, width, window=window, sinks=True, shared_kv=True)
        low_rank = (
            *linear("q_a_proj", q_rank, hidden, "none"),
            *norm("q_a_norm", q_rank),
            *linear("q_b_proj", heads * width, q_rank, "column"),
            *linear("kv_proj", width, hidden, "none"),
            *norm("kv_norm", width),
            Tensor("o_a_proj.weight", (groups * o_rank, heads * width // groups), "column"),
            *linear("o_b_proj", hidden, groups * o_rank, "row"),
            Tensor("sinks", (heads,), "heads"),
        )
        if indexed:
            low_rank += indexer(hidden, q_rank, index_heads, index_dim)
        return layer(hidden, MixerPart(base.part, low_rank), experts)

    made = tuple(kinds(r == 4, lambda r=r: make(r == 4)) for r in ratios[:layers])  # type: ignore[misc]
    depth = c.integer("num_nextn_predict_layers", default=0, least=0, most=64)
    tied = c.flag("tie_word_embeddings", default=False)
    return Build(hidden, made, tied=tied, mtp_depth=depth, mtp_layers=(made[-1],) if depth else ())


# -- recurrent and hybrid --------------------------------------------------------------------------------------------


def qwen3_next(c: Fields) -> Build:
    """Qwen3-Next and Qwen3.5: three gated delta net layers, then one of gated softmax attention."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    heads = head_sizes(c, hidden)
    part = LinearAttention(
        "gated-delta-net",
        c.integer("linear_num_key_heads"),
        c.integer("linear_num_value_heads"),
        c.integer("linear_key_head_dim"),
        c.integer("linear_value_head_dim"),
        c.integer("linear_conv_kernel_dim"),
    )
    interval = c.integer("full_attention_interval", default=4)
    types = c.per_layer("layer_types", layers, ("linear_attention", "full_attention")) or [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)
    ]
    routed = c.has("num_experts")
    ffn = experts_of(c, hidden, shared_gate=True) if routed else mlp(hidden, c.integer("intermediate_size"), gated=True)
    depth = c.integer("mtp_num_hidden_layers", default=0, least=0, most=64)
    c.check()
    softmax = attention(hidden, heads.heads, heads.kv_heads, heads.head_dim, qk_norm="head", gate="element")
    mixers = {"full_attention": softmax, "linear_attention": delta_net(hidden, part)}
    kinds = Kinds()
    made = tuple(kinds(kind, lambda kind=kind: layer(hidden, mixers[kind], ffn)) for kind in types)  # type: ignore[misc]
    return Build(
        hidden,
        made,
        tied=c.flag("tie_word_embeddings", default=False, why="the family's default"),
        mtp_depth=depth,
        mtp_layers=(layer(hidden, softmax, ffn),) if depth else (),
    )


def kimi_linear(c: Fields) -> Build:
    """Kimi Linear and K3: Kimi delta attention with MLA in every fourth layer, experts in a latent space."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    heads, latent, v_dim = latent_of(c)
    inner = c.nested("linear_attn_config")
    full_layers = inner.raw.get("full_attn_layers")
    if not isinstance(full_layers, list) or not all(isinstance(i, int) for i in full_layers):
        inner.fault("full_attn_layers", "must be a list of layer numbers, from 1")
        full_layers = []
    part = LinearAttention(
        "kimi-delta",
        inner.integer("num_heads"),
        inner.integer("num_heads"),
        inner.integer("head_dim"),
        inner.integer("head_dim"),
        inner.integer("short_conv_kernel_size"),
    )
    sparse = sparse_layers(c, layers)
    ffns = (mlp(hidden, c.integer("intermediate_size"), gated=True), experts_of(c, hidden, router_bias=True))
    gate = c.flag("mla_use_output_gate", default=False)
    full_gate = inner.flag("use_full_rank_gate", default=False)
    c.check()
    mixers = (
        delta_attention(hidden, part, full_gate=full_gate),
        latent_attention(hidden, heads, latent, v_dim, gate=gate),
    )
    kinds = Kinds()
    made = tuple(
        kinds((f, r), lambda f=f, r=r: layer(hidden, mixers[f], ffns[r]))  # type: ignore[misc]
        for f, r in zip((i + 1 in full_layers for i in range(layers)), sparse, strict=True)
    )
    return Build(hidden, made, tied=c.flag("tie_word_embeddings", default=False))


def minimax_text(c: Fields) -> Build:
    """MiniMax-Text-01: seven lightning attention layers, then one of softmax attention; experts everywhere."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    heads = head_sizes(c, hidden)
    types = c.per_layer("layer_types", layers, ("linear_attention", "full_attention"))
    ones = c.per_layer("attn_type_list", layers, (0, 1))
    if types is not None:
        pattern = "".join("F" if kind == "full_attention" else "L" for kind in types)
    elif ones is not None:
        pattern = "".join("F" if kind else "L" for kind in ones)
    else:
        pattern = letters(c, "attn_pattern", "LF", layers) or ("LLLLLLLF" * layers)[:layers]
    experts = experts_of(c, hidden)
    c.check()
    mixers = {
        "L": lightning_attention(hidden, heads.heads, heads.head_dim),
        "F": attention(hidden, heads.heads, heads.kv_heads, heads.head_dim),
    }
    kinds = Kinds()
    made = tuple(kinds(p, lambda p=p: layer(hidden, mixers[p], experts)) for p in pattern)  # type: ignore[misc]
    return Build(hidden, made, tied=c.flag("tie_word_embeddings", default=False, why="the family's default"))


BLOCK_LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E", "hybrid": "h"}


def hybrid_pattern(c: Fields, allowed: str, layers: int | None = None, derived: str | None = None) -> str:
    """One letter per layer: M Mamba, * attention, - feed-forward, E experts (Megatron's hybrid pattern), h shared.

    `derived` is the pattern that the family computes from other fields when the config has no list or string.
    """
    if c.has("layers_block_type"):
        blocks = c.raw["layers_block_type"]
        known = [name for name, letter in BLOCK_LETTERS.items() if letter in allowed]
        count = len(blocks) if layers is None and isinstance(blocks, list) else layers
        read = c.per_layer("layers_block_type", count or 1, tuple(known))
        return "".join(BLOCK_LETTERS[block] for block in read) if read else allowed[0]
    name = c.first("hybrid_override_pattern", "hybrid_layer_pattern")
    if derived is not None and not c.has(name):
        return derived
    if not c.has(name):
        c.fault(name, f"must be a string of the letters {' '.join(allowed)}, one per layer")
    return letters(c, name, allowed, layers) or allowed[0]


def marked_layers(c: Fields, name: str, layers: int, letter: str) -> str | None:
    """A pattern of M with `letter` at the layer numbers listed under `name`; None when the field is absent."""
    numbers = c.raw.get(name)
    if numbers is None:
        return None
    if not isinstance(numbers, list) or not all(type(i) is int and 0 <= i < layers for i in numbers):
        c.fault(name, f"must be a list of layer numbers from 0 to {layers - 1}")
        return None
    marked = set(numbers)
    return "".join(letter if i in marked else "M" for i in range(layers))


def dt_rank(c: Fields, name: str, hidden: int) -> int:
    """Rank of Mamba-1's time step; configs write "auto" for the default."""
    if c.raw.get(name) == "auto":
        c.raw[name] = None
    return c.integer(name, default=-(-hidden // 16), why="hidden_size / 16")


def mamba2_of(c: Fields) -> Mamba:
    """Sizes of a Mamba-2 mixer."""
    heads = c.integer("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    width = c.integer("mamba_head_dim", "mamba_d_head", "mamba_headdim")
    return Mamba(
        2,
        heads * width,
        c.integer("ssm_state_size", "mamba_d_state", "state_size"),
        c.integer("conv_kernel", "mamba_d_conv", default=4, why="the family's default"),
        c.integer("n_groups", "mamba_n_groups", default=1, why="the family's default"),
        heads,
    )


def nemotron_h(c: Fields) -> Build:
    """Nemotron-H and Nemotron 3: each layer is one mixer or one feed-forward part, by the pattern."""
    hidden = c.integer("hidden_size")
    pattern = hybrid_pattern(c, "M*-E", c.layers() if c.has("num_hidden_layers") else None)
    heads = head_sizes(c, hidden)
    mixer = mamba2(hidden, mamba2_of(c))
    parts: dict[str, tuple[MixerPart | None, FfnPart | None]] = {
        "M": (mixer, None),
        "*": (attention(hidden, heads.heads, heads.kv_heads, heads.head_dim), None),
    }
    if "-" in pattern:
        parts["-"] = (None, mlp(hidden, c.integer("intermediate_size"), gated=False))
    if "E" in pattern:
        parts["E"] = (None, experts_of(c, hidden, router_bias=True, gated=False))
    depth = c.integer("num_nextn_predict_layers", default=0, least=0, most=64)
    c.check()
    made = {letter: layer(hidden, *part) for letter, part in parts.items() if letter in pattern}
    mtp = tuple(made[letter] for letter in "*E" if letter in made) if depth else ()
    return Build(
        hidden,
        tuple(made[letter] for letter in pattern),
        tied=c.flag("tie_word_embeddings", default=False),
        mtp_depth=depth,
        mtp_layers=mtp,
    )


def mamba_only(c: Fields) -> Build:
    """Mamba-2 and Falcon-Mamba: nothing but mixers."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    state, kernel = c.integer("state_size", "ssm_state_size"), c.integer("conv_kernel", default=4)
    if c.raw.get("model_type") in ("mamba", "falcon_mamba"):
        inner = c.integer("intermediate_size", default=2 * hidden, why="twice hidden_size")
        rank = dt_rank(c, "time_step_rank", hidden)
        c.check()
        mixer = mamba1(hidden, Mamba(1, inner, state, kernel), rank)
    else:
        # Here alone the Mamba heads are the config's only heads and have no prefix.
        for short in ("num_heads", "head_dim"):
            c.raw.setdefault(f"mamba_{short}", c.raw.get(short))
        part = mamba2_of(c)
        c.check()
        mixer = mamba2(hidden, part)
    return Build(hidden, (layer(hidden, mixer, None),) * layers, tied=c.flag("tie_word_embeddings", default=True))


def jamba(c: Fields) -> Build:
    """Jamba: Mamba-1 with attention in every eighth layer, experts in every second."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    period, offset, expert_period, expert_offset = (
        c.integer(name, default=default, least=least, why="the family's default")
        for name, default, least in (
            ("attn_layer_period", 8, 1),
            ("attn_layer_offset", 4, 0),
            ("expert_layer_period", 2, 1),
            ("expert_layer_offset", 1, 0),
        )
    )
    derived = "".join("*" if index % period == offset else "M" for index in range(layers))
    pattern = hybrid_pattern(c, "M*", layers, derived)
    heads = head_sizes(c, hidden)
    state, kernel = c.integer("ssm_state_size", "mamba_d_state"), c.integer("conv_kernel", "mamba_d_conv", default=4)
    rank = dt_rank(c, "mamba_dt_rank", hidden)
    inner = c.integer("mamba_expand", "expand", default=2) * hidden
    ffns = (mlp(hidden, c.integer("intermediate_size"), gated=True), experts_of(c, hidden))
    c.check()
    mixers = {
        "M": mamba1(hidden, Mamba(1, inner, state, kernel), rank, inner_norms=True),
        "*": attention(hidden, heads.heads, heads.kv_heads, heads.head_dim),
    }
    kinds = Kinds()
    made = tuple(
        kinds((p, r), lambda p=p, r=r: layer(hidden, mixers[p], ffns[r]))  # type: ignore[misc]
        for p, r in ((letter, index % expert_period == expert_offset) for index, letter in enumerate(pattern))
    )
    return Build(hidden, made, tied=c.flag("tie_word_embeddings", default=False))


def bamba(c: Fields) -> Build:
    """Bamba: Mamba-2 or attention, each with a gated feed-forward part."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    pattern = hybrid_pattern(c, "M*", layers, marked_layers(c, "attn_layer_indices", layers, "*"))
    heads = head_sizes(c, hidden)
    ffn = mlp(hidden, c.integer("intermediate_size"), gated=True)
    part = mamba2_of(c)
    c.check()
    mixers = {
        "M": mamba2(hidden, part),
        "*": attention(hidden, heads.heads, heads.kv_heads, heads.head_dim),
    }
    kinds = Kinds()
    made = tuple(kinds(p, lambda p=p: layer(hidden, mixers[p], ffn)) for p in pattern)  # type: ignore[misc]
    return Build(hidden, made, tied=c.flag("tie_word_embeddings", default=False))


def zamba2(c: Fields) -> Build:
    """Zamba2: Mamba-2 layers, some preceded by one of two shared blocks of attention over twice the hidden size.

    A shared block is a layer of its own here. Its weights are counted the first time it appears; later ones hold only
    their adapters (rank 128) and the matrix back to the hidden size (transformers models/zamba2).
    """
    hidden, layer_count = c.integer("hidden_size"), c.layers()
    pattern = hybrid_pattern(c, "Mh", layer_count, marked_layers(c, "hybrid_layer_ids", layer_count, "h"))
    distinct = c.integer("num_mem_blocks", default=2, why="as in Zamba2 2.7B and 7B")
    if c.flag("use_shared_attention_adapter", default=False):
        c.fault("use_shared_attention_adapter", "must be false (adapters on the shared attention are not supported)")
    heads = c.integer("num_attention_heads")
    intermediate = c.integer("intermediate_size", default=4 * hidden, why="four times hidden_size")
    rank = c.integer("adapter_rank", default=128, why="the family's default")
    inner = c.integer("mamba_expand", default=2) * hidden
    width = c.integer("mamba_head_dim", "mamba_headdim", default=64)
    part = Mamba(
        2, inner, c.integer("ssm_state_size", "mamba_d_state"), c.integer("conv_kernel", "mamba_d_conv", default=4),
        c.integer("n_groups", "mamba_ngroups", default=1), max(inner // width, 1),
    )  # fmt: skip
    c.check()
    mixer = layer(hidden, mamba2(hidden, part), None)
    double = 2 * hidden
    softmax = attention(double, heads, heads, max(double // heads, 1))
    ffn = mlp(hidden, intermediate, gated=True)
    shared = tuple(t for t in softmax.tensors if t.name != "o_proj.weight")
    shared += (*linear("o_proj", hidden, double, "row"), *ffn.tensors, *norm("norm1", double), *norm("norm2", hidden))
    adapter = (
        *linear("linear", hidden, hidden, "none"),
        *linear("adapter_a", rank, hidden, "none"),
        *linear("adapter_b", 2 * intermediate, rank, "column"),
    )
    owner = LayerKind("shared-block-weights", softmax.part, ffn.part, shared + adapter)
    user = LayerKind("shared-block", softmax.part, ffn.part, adapter)
    layers: list[LayerKind] = []
    blocks = 0
    for letter in pattern:
        if letter == "h":
            layers.append(owner if blocks < distinct else user)
            blocks += 1
        layers.append(mixer)
    c.assumed.append("shared blocks are used in turn, each use a layer of its own; their weights count once")
    return Build(hidden, tuple(layers), tied=c.flag("tie_word_embeddings", default=True, why="the family's default"))


FAMILIES: dict[str, Callable[[Fields], Build]] = {
    "llama": llama_like,
    "mistral": mistral,
    "phi3": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
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
