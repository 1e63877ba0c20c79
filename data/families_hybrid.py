"""Families with recurrent mixers, alone or between attention layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.data.families_experts import experts_of, latent_of, sparse_layers
from shardwise.data.family_build import Build, Kinds, head_sizes, letters, marked_layers, mtp_depth
from shardwise.data.model import LayerKind, LinearAttention, Mamba
from shardwise.data.model_parts import (
    FfnPart,
    MixerPart,
    attention,
    delta_attention,
    delta_net,
    latent_attention,
    layer,
    lightning_attention,
    linear,
    mamba1,
    mamba2,
    mlp,
    norm,
)

if TYPE_CHECKING:
    from shardwise.data.config_fields import Fields


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
    c.divisible("linear_num_value_heads", part.value_heads, "linear_num_key_heads", part.key_heads)
    interval = c.integer("full_attention_interval", default=4)
    types = c.per_layer("layer_types", layers, ("linear_attention", "full_attention")) or [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)
    ]
    routed = c.has("num_experts")
    if routed and c.raw.get("mlp_only_layers"):
        c.fault("mlp_only_layers", "must be empty (layers without experts are not supported here)")
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


def dt_rank(c: Fields, name: str, hidden: int) -> int:
    """Rank of Mamba-1's time step; configs write "auto" for the default."""
    if c.raw.get(name) == "auto":
        c.raw[name] = None
    return c.integer(name, default=-(-hidden // 16), why="hidden_size / 16")


def mamba2_of(c: Fields) -> Mamba:
    """Sizes of a Mamba-2 mixer."""
    heads_name = c.first("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    groups_name = c.first("n_groups", "mamba_n_groups")
    heads = c.integer(heads_name)
    groups = c.integer(groups_name, default=1, why="the family's default")
    c.divisible(heads_name, heads, groups_name, groups)
    width = c.integer("mamba_head_dim", "mamba_d_head", "mamba_headdim")
    return Mamba(
        2,
        heads * width,
        c.integer("ssm_state_size", "mamba_d_state", "state_size"),
        c.integer("conv_kernel", "mamba_d_conv", default=4, why="the family's default"),
        groups,
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
    depth = mtp_depth(c)
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
