"""What the functions of all model families share: their result, attention sizes, windows, and equal layers as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.data.model import MAX_LAYERS, LayerKind, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.data.config_fields import Fields
    from shardwise.data.model_parts import (
        Norm,
    )


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


def mtp_depth(c: Fields, *other_names: str) -> int:
    """Multi-token-prediction modules of a config, none where it does not say."""
    return c.integer("num_nextn_predict_layers", *other_names, default=0, least=0, most=64)


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


def attention_biases(c: Fields, *, default: bool = False) -> tuple[bool, bool]:
    """Whether queries, keys and values have biases, and whether the output has; catalogue rows write "qkv" for the first
    alone."""
    if c.raw.get("attention_bias") == "qkv":
        return True, False
    every = c.flag("attention_bias", default=default)
    return every, every


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
    types = [*types[:layers], *(["full_attention"] * (layers - len(types)))]
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


class Kinds:
    """Layers built once per distinct set of choices, so that equal layers are one object."""

    def __init__(self) -> None:
        self._made: dict[Any, LayerKind] = {}

    def __call__(self, key: Any, make: Callable[[], LayerKind]) -> LayerKind:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
