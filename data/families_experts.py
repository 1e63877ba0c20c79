"""Families with experts: softmax attention first, then latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardwise.data.families_dense import qwen_pattern, qwen_windowed
from shardwise.data.family_build import Build, Kinds, attention_biases, head_sizes, marked_layers, mtp_depth, windows
from shardwise.data.model import MAX_LAYERS, Latent, LayerKind, Tensor
from shardwise.data.model_parts import (
    FfnPart,
    MixerPart,
    attention,
    indexer,
    latent_attention,
    layer,
    linear,
    mlp,
    moe,
    norm,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.data.config_fields import Fields


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
    if top_k > experts and not c.unsound:
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
    """Which layers have experts, by a list of all layers, or by the number of dense ones and a step; else all."""
    frequency = c.raw.get("moe_layer_freq")
    if isinstance(frequency, list):
        found = c.per_layer("moe_layer_freq", layers, (0, 1))
        return [bool(item) for item in found or [1] * layers]
    types = c.per_layer("mlp_layer_types", layers, ("dense", "sparse"))
    if types is not None:
        return [item == "sparse" for item in types]
    dense = c.integer("first_k_dense_replace", default=0, least=0, most=layers)
    # Qwen counts its steps from layer 1, DeepSeek from layer 0 (transformers models/qwen3_moe, models/deepseek_v2).
    step = c.integer("decoder_sparse_step", default=1)
    every = c.integer("moe_layer_freq", default=1)
    listed = marked_layers(c, "mlp_only_layers", layers, "-") or "M" * layers
    return [
        index >= dense and (index + 1) % step == 0 and index % every == 0 and listed[index] != "-"
        for index in range(layers)
    ]


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
    shared_gate: bool = False,
    extra: Callable[[int], tuple[Tensor, ...]] | None = None,
) -> Build:
    """Softmax attention with experts in all layers, or in all but the first few."""
    hidden, layers = c.integer("hidden_size"), c.layers()
    heads = head_sizes(c, hidden)
    sparse = sparse_layers(c, layers)
    every = windows(c, layers, pattern) if windowed else [None] * layers
    experts = experts_of(c, hidden, router_bias=router_bias, bias=expert_bias, shared_gate=shared_gate)
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
    depth = mtp_depth(c, "num_mtp_modules")
    return Build(
        hidden,
        made,
        tied=c.flag("tie_word_embeddings", default=False, why="the family's default"),
        mtp_depth=depth,
        mtp_layers=(made[-1],) if depth else (),
    )


def mixtral(c: Fields) -> Build:
    """Every layer has the window, when there is one."""
    return moe_transformer(c, windowed=True, pattern="S" * MAX_LAYERS)


def qwen3_moe(c: Fields) -> Build:
    bias, out_bias = attention_biases(c)
    return moe_transformer(
        c, bias=bias, out_bias=out_bias, qk_norm="head", windowed=qwen_windowed(c), pattern=qwen_pattern(c)
    )


def qwen2_moe(c: Fields) -> Build:
    return moe_transformer(c, bias=True, shared_gate=True, windowed=qwen_windowed(c), pattern=qwen_pattern(c))


def glm4_moe(c: Fields) -> Build:
    """GLM-4.5: query/key/value biases, router correction bias, query and key norms in the large one."""
    c.raw.setdefault("n_shared_experts", 1)
    qk_norm = c.flag("use_qk_norm", default=c.raw.get("qk_norm") is True)
    bias, _ = attention_biases(c, default=True)
    return moe_transformer(c, bias=bias, router_bias=True, qk_norm="head" if qk_norm else None)


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
        mixer = attention(
            hidden, heads.heads, heads.kv_heads, heads.head_dim, window=window, chunked=window is not None
        )
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
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if c.optional(name):
            c.fault(name, "must be 0 (embeddings of every layer and shared keys, as in E2B and E4B, are not supported)")
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
    depth = mtp_depth(c)
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
    c.divisible("num_attention_heads", heads, "o_groups", groups)
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
    depth = mtp_depth(c)
    tied = c.flag("tie_word_embeddings", default=False)
    return Build(hidden, made, tied=tied, mtp_depth=depth, mtp_layers=(made[-1],) if depth else ())
