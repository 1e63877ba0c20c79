"""The parts that layers are made of, each with its tensors as the published checkpoints have them.

Every function returns the value type of the part and its tensors; `layer` joins a mixer and a feed-forward part with
their norms. How tensor parallelism splits each tensor follows Megatron-Core (core/tensor_parallel/layers.py and the
specs in core/models): input projections by columns, output projections by rows, norms and low-rank inputs not at all.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardwise.data.model import (
    Attention,
    FeedForward,
    Latent,
    LayerKind,
    LinearAttention,
    Mamba,
    Mixer,
    Mlp,
    Moe,
    Shard,
    Tensor,
)

Norm = Literal["rmsnorm", "layernorm"]


class MixerPart(NamedTuple):
    """A token mixer and its tensors."""

    part: Mixer
    tensors: tuple[Tensor, ...]


class FfnPart(NamedTuple):
    """A feed-forward part and its tensors."""

    part: FeedForward
    tensors: tuple[Tensor, ...]


def linear(name: str, out: int, inputs: int, shard: Shard, *, bias: bool = False) -> tuple[Tensor, ...]:
    """A weight matrix, and its bias: split with the outputs, or whole where the inputs are split."""
    weight = Tensor(f"{name}.weight", (out, inputs), shard)
    bias_shard: Shard = "none" if shard in ("row", "none") else shard
    return (weight, Tensor(f"{name}.bias", (out,), bias_shard)) if bias else (weight,)


def norm(name: str, size: int, kind: Norm = "rmsnorm") -> tuple[Tensor, ...]:
    """A norm's weight, and its bias for LayerNorm."""
    weight = Tensor(f"{name}.weight", (size,))
    return (weight, Tensor(f"{name}.bias", (size,))) if kind == "layernorm" else (weight,)


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    window: int | None = None,
    chunked: bool = False,
    bias: bool = False,
    out_bias: bool = False,
    qk_norm: Literal["head", "layer"] | None = None,
    gate: Literal["element", "head"] | None = None,
    sinks: bool = False,
    shared_kv: bool = False,
    extra: tuple[Tensor, ...] = (),
) -> MixerPart:
    """Multi-head, multi-query or grouped-query attention.

    Parameters
    ----------
    qk_norm
        Norms of queries and keys over one head's width, or over all heads of a layer.
    gate
        An output gate as wide as the heads, or one value a head.
    shared_kv
        Values are the keys: no value projection.
    """
    v_dim = v_head_dim or head_dim
    tensors = linear("q_proj", heads * head_dim, hidden, "column", bias=bias)
    tensors += linear("k_proj", kv_heads * head_dim, hidden, "kv_heads", bias=bias)
    if not shared_kv:
        tensors += linear("v_proj", kv_heads * v_dim, hidden, "kv_heads", bias=bias)
    tensors += linear("o_proj", hidden, heads * v_dim, "row", bias=out_bias)
    if gate:
        tensors += linear("gate", heads * (v_dim if gate == "element" else 1), hidden, "column")
    if qk_norm == "head":
        tensors += norm("q_norm", head_dim) + norm("k_norm", head_dim)
    elif qk_norm == "layer":
        tensors += (Tensor("q_norm.weight", (heads * head_dim,), "column"),)
        tensors += (Tensor("k_norm.weight", (kv_heads * head_dim,), "kv_heads"),)
    if sinks:
        tensors += (Tensor("sinks", (heads,), "heads"),)
    return MixerPart(Attention(heads, kv_heads, head_dim, v_dim, window, chunked=chunked), tensors + extra)


def latent_attention(
    hidden: int,
    heads: int,
    latent: Latent,
    v_head_dim: int,
    *,
    gate: bool = False,
    extra: tuple[Tensor, ...] = (),
) -> MixerPart:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    width = latent.qk_nope_dim + latent.qk_rope_dim
    tensors: tuple[Tensor, ...] = ()
    if latent.q_rank:
        tensors += linear("q_a_proj", latent.q_rank, hidden, "none") + norm("q_a_norm", latent.q_rank)
    tensors += linear("q_b_proj" if latent.q_rank else "q_proj", heads * width, latent.q_rank or hidden, "column")
    tensors += linear("kv_a_proj", latent.kv_rank + latent.qk_rope_dim, hidden, "none")
    tensors += norm("kv_a_norm", latent.kv_rank)
    tensors += linear("kv_b_proj", heads * (latent.qk_nope_dim + v_head_dim), latent.kv_rank, "column")
    tensors += linear("o_proj", hidden, heads * v_head_dim, "row")
    if gate:
        tensors += linear("gate", heads * v_head_dim, hidden, "column")
    return MixerPart(Attention(heads, heads, width, v_head_dim, latent=latent), tensors + extra)


def indexer(hidden: int, query_rank: int, heads: int, head_dim: int) -> tuple[Tensor, ...]:
    """The indexer of DeepSeek sparse attention (DeepSeek-V3.2 inference/model.py, class Indexer)."""
    return (
        *linear("indexer.wq_b", heads * head_dim, query_rank, "none"),
        *linear("indexer.wk", head_dim, hidden, "none"),
        *norm("indexer.k_norm", head_dim, "layernorm"),
        *linear("indexer.weights_proj", heads, hidden, "none"),
    )


def delta_net(hidden: int, part: LinearAttention) -> MixerPart:
    """Gated delta net (Qwen3-Next, transformers models/qwen3_next)."""
    keys, values = part.key_heads * part.key_dim, part.value_heads * part.value_dim
    return MixerPart(
        part,
        (
            *linear("in_proj_qkvz", 2 * keys + 2 * values, hidden, "column"),
            *linear("in_proj_ba", 2 * part.value_heads, hidden, "column"),
            Tensor("conv1d.weight", (2 * keys + values, 1, part.conv_kernel), "column"),
            Tensor("A_log", (part.value_heads,), "heads"),
            Tensor("dt_bias", (part.value_heads,), "heads"),
            *norm("norm", part.value_dim),
            *linear("out_proj", hidden, values, "row"),
        ),
    )


def delta_attention(hidden: int, part: LinearAttention, *, full_gate: bool) -> MixerPart:
    """Kimi delta attention (Kimi Linear, arXiv 2510.26692): a delta rule with a gate per channel."""
    width = part.value_heads * part.value_dim
    projections = [item for name in ("q_proj", "k_proj", "v_proj") for item in linear(name, width, hidden, "column")]
    convolutions = [Tensor(f"{name}_conv1d.weight", (width, 1, part.conv_kernel), "column") for name in "qkv"]
    gate = (
        linear("g_proj", width, hidden, "column")
        if full_gate
        else (
            *linear("g_a_proj", part.value_dim, hidden, "none"),
            *linear("g_b_proj", width, part.value_dim, "column", bias=True),
        )
    )
    return MixerPart(
        part,
        (
            *projections,
            *convolutions,
            *linear("f_a_proj", part.value_dim, hidden, "none"),
            *linear("f_b_proj", width, part.value_dim, "column"),
            *linear("b_proj", part.value_heads, hidden, "column"),
            *gate,
            Tensor("A_log", (part.value_heads,), "heads"),
            Tensor("dt_bias", (width,), "column"),
            *norm("o_norm", part.value_dim),
            *linear("o_proj", hidden, width, "row"),
        ),
    )


def lightning_attention(hidden: int, heads: int, head_dim: int) -> MixerPart:
    """Lightning attention with an output gate (MiniMax-01, arXiv 2501.08313)."""
    width = heads * head_dim
    return MixerPart(
        LinearAttention("lightning", heads, heads, head_dim, head_dim),
        (
            *linear("qkv_proj", 3 * width, hidden, "column"),
            *linear("output_gate", width, hidden, "column"),
            Tensor("norm.weight", (width,), "column"),
            *linear("out_proj", hidden, width, "row"),
        ),
    )


def mamba2(hidden: int, part: Mamba, *, conv_bias: bool = True, bias: bool = False) -> MixerPart:
    """Mamba-2 mixer (Dao & Gu, arXiv 2405.21060; transformers models/mamba2)."""
    heads = part.heads or 1
    channels = part.inner + 2 * part.groups * part.state
    convolution: tuple[Tensor, ...] = (Tensor("conv1d.weight", (channels, 1, part.conv_kernel), "column"),)
    if conv_bias:
        convolution += (Tensor("conv1d.bias", (channels,), "column"),)
    return MixerPart(
        part,
        (
            *linear("in_proj", part.inner + channels + heads, hidden, "column", bias=bias),
            *convolution,
            *(Tensor(name, (heads,), "heads") for name in ("A_log", "D", "dt_bias")),
            Tensor("norm.weight", (part.inner,), "column"),
            *linear("out_proj", hidden, part.inner, "row", bias=bias),
        ),
    )


def mamba1(hidden: int, part: Mamba, dt_rank: int, *, inner_norms: bool = False) -> MixerPart:
    """Mamba-1 mixer (Gu & Dao, arXiv 2312.00752); Jamba norms dt, B and C."""
    tensors = (
        *linear("in_proj", 2 * part.inner, hidden, "column"),
        Tensor("conv1d.weight", (part.inner, 1, part.conv_kernel), "column"),
        Tensor("conv1d.bias", (part.inner,), "column"),
        *linear("x_proj", dt_rank + 2 * part.state, part.inner, "row"),
        *linear("dt_proj", part.inner, dt_rank, "column", bias=True),
        Tensor("A_log", (part.inner, part.state), "column"),
        Tensor("D", (part.inner,), "column"),
        *linear("out_proj", hidden, part.inner, "row"),
    )
    if inner_norms:
        tensors += norm("dt_norm", dt_rank) + norm("b_norm", part.state) + norm("c_norm", part.state)
    return MixerPart(part, tensors)


def mlp(hidden: int, intermediate: int, *, gated: bool, bias: bool = False, prefix: str = "") -> FfnPart:
    """Dense feed-forward part."""
    tensors = linear(f"{prefix}gate_proj", intermediate, hidden, "column", bias=bias) if gated else ()
    tensors += linear(f"{prefix}up_proj", intermediate, hidden, "column", bias=bias)
    tensors += linear(f"{prefix}down_proj", hidden, intermediate, "row", bias=bias)
    return FfnPart(Mlp(intermediate, gated), tensors)


def moe(
    hidden: int,
    experts: int,
    top_k: int,
    intermediate: int,
    *,
    gated: bool = True,
    router_bias: bool = False,
    bias: bool = False,
    shared_intermediate: int = 0,
    shared_gate: bool = False,
    latent: int = 0,
    extra: tuple[Tensor, ...] = (),
) -> FfnPart:
    """Mixture of experts; `latent` is the width that experts work on when it is not the hidden size."""
    width = latent or hidden
    tensors = linear("router", experts, hidden, "none", bias=router_bias)
    if latent:
        tensors += linear("latent_in", latent, hidden, "none") + linear("latent_out", hidden, latent, "none")
    shapes: list[tuple[str, tuple[int, int], Shard]] = [("gate_proj", (intermediate, width), "column")] if gated else []
    shapes += [("up_proj", (intermediate, width), "column"), ("down_proj", (width, intermediate), "row")]
    for name, shape, shard in shapes:
        tensors += (Tensor(f"experts.{name}.weight", shape, shard, experts, expert=True),)
        if bias:
            bias_shard: Shard = "none" if shard == "row" else shard
            tensors += (Tensor(f"experts.{name}.bias", shape[:1], bias_shard, experts, expert=True),)
    if shared_intermediate:
        tensors += mlp(hidden, shared_intermediate, gated=gated, prefix="shared_expert.").tensors
        if shared_gate:
            tensors += linear("shared_expert_gate", 1, hidden, "none")
    return FfnPart(Moe(experts, top_k, intermediate, gated, shared_intermediate), tensors + extra)


def layer(
    hidden: int,
    mixer: MixerPart | None,
    ffn: FfnPart | None,
    *,
    norm_kind: Norm = "rmsnorm",
    post_norms: bool = False,
    norms: int | None = None,
    extra: tuple[Tensor, ...] = (),
    label: str = "",
) -> LayerKind:
    """One layer: a norm before each part (or `norms` in all), and one after each with `post_norms`."""
    parts = [part for part in (mixer, ffn) if part is not None]
    count = (len(parts) if norms is None else norms) * (2 if post_norms else 1)
    tensors = tuple(item for part in parts for item in part.tensors)
    for index in range(count):
        tensors += norm(f"norm{index + 1}", hidden, norm_kind)
    name = "+".join(part.part.variant for part in parts) or "identity"
    return LayerKind(name + label, mixer.part if mixer else None, ffn.part if ffn else None, tensors + extra)
