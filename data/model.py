"""The model: an ordered list of layers with their parameters, and nothing about how it runs.

A `Layer` is what a pipeline stage is made of (one `t`, `M`, `-`, ... of a launcher's layout string): a token mixer, a
feed-forward part, or both. Layers of one kind are the same object, so a model of 126 layers holds one or a few
`LayerKind` values. Shapes are those of the unsharded model; how tensor parallelism splits each tensor is said by
`Tensor.shard`, following Megatron-Core (core/tensor_parallel/layers.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

Shard = Literal["column", "row", "vocab", "heads", "kv_heads", "none"]
"""How tensor parallelism splits a tensor: output rows, input columns, vocabulary rows, per-head vectors, the
key/value rows (replicated once tp exceeds the kv heads), or not at all."""

MAX_LAYERS = 10_000
MAX_SIZE = 2**40


def check_positive(owner: str, **sizes: int | float) -> None:
    """Raise `ValueError` naming each of `sizes` that is not above zero or is absurdly large."""
    faults = [
        f"{owner}.{name}={value} must be between 1 and 2^40"
        for name, value in sizes.items()
        if not 0 < value <= MAX_SIZE
    ]
    if faults:
        raise ValueError("; ".join(faults))


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter tensor, `count` equal copies of it (experts)."""

    name: str
    shape: tuple[int, ...]
    shard: Shard = "none"
    count: int = 1
    expert: bool = False

    def __post_init__(self) -> None:
        check_positive(self.name, count=self.count, **{f"shape[{i}]": size for i, size in enumerate(self.shape)})

    @property
    def params(self) -> int:
        return prod(self.shape) * self.count


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention. `latent` is set for MLA; `window` limits the keys each query sees: the last so many, or where it is
    `chunked` those of its own piece of the sequence."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    latent: Latent | None = None
    chunked: bool = False

    @property
    def variant(self) -> str:
        if self.latent:
            name = "mla"
        elif self.kv_heads == self.heads:
            name = "mha"
        else:
            name = "mqa" if self.kv_heads == 1 else "gqa"
        return f"{name}-{'chunks' if self.chunked else 'window'}{self.window}" if self.window else name


@dataclass(frozen=True, slots=True)
class Latent:
    """Low-rank sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int | None
    kv_rank: int
    qk_nope_dim: int
    qk_rope_dim: int


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Gated delta net, Kimi delta attention or lightning attention: a recurrent state per value head."""

    rule: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 0

    @property
    def variant(self) -> str:
        return f"linear-{self.rule}"


@dataclass(frozen=True, slots=True)
class Mamba:
    """Selective state space mixer, Mamba-1 (`heads` is None) or Mamba-2."""

    version: Literal[1, 2]
    inner: int
    state: int
    conv_kernel: int
    groups: int = 1
    heads: int | None = None

    @property
    def variant(self) -> str:
        return f"mamba{self.version}"


@dataclass(frozen=True, slots=True)
class Mlp:
    """Dense feed-forward part; `gated` has two input projections (SwiGLU and relatives)."""

    intermediate: int
    gated: bool

    @property
    def variant(self) -> str:
        return "mlp"


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts: each token visits `top_k` of `experts` and every shared expert."""

    experts: int
    top_k: int
    intermediate: int
    gated: bool
    shared_intermediate: int = 0

    @property
    def variant(self) -> str:
        return "moe"


Mixer = Attention | LinearAttention | Mamba
FeedForward = Mlp | Moe


@dataclass(frozen=True)
class LayerKind:
    """What all layers of one kind share: the parts and the tensors of a layer."""

    name: str
    mixer: Mixer | None
    ffn: FeedForward | None
    tensors: tuple[Tensor, ...]

    @cached_property
    def params(self) -> int:
        return sum(tensor.params for tensor in self.tensors)

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token touches: of the routed experts, `top_k` of `experts`."""
        if not isinstance(self.ffn, Moe):
            return self.params
        routed = sum(tensor.params for tensor in self.tensors if tensor.expert)
        return self.params - routed + routed * self.ffn.top_k // self.ffn.experts


@dataclass(frozen=True)
class Model:
    """An ordered list of layers between an embedding and a head.

    `layers` repeats `LayerKind` values in the order of the network. `embedding` and `head` are the tensors outside the
    layers, before and after them; a tied head has no tensor of its own besides the final norm. `mtp` are the
    multi-token-prediction modules, not counted in `params`. `assumed` lists what the source left unsaid.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    tied: bool
    layers: tuple[LayerKind, ...]
    embedding: tuple[Tensor, ...]
    head: tuple[Tensor, ...]
    mtp: tuple[Tensor, ...] = ()
    mtp_depth: int = 0
    max_positions: int | None = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    source: str = ""
    assumed: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check_positive("model", hidden=self.hidden, vocab=self.vocab)
        if not 0 < len(self.layers) <= MAX_LAYERS:
            raise ValueError(f"model.layers={len(self.layers)} must be between 1 and {MAX_LAYERS}")

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct layer kinds, in order of first appearance."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def kind_indices(self) -> tuple[int, ...]:
        """For every layer the index of its kind in `kinds`."""
        index = {kind: i for i, kind in enumerate(self.kinds)}
        return tuple(index[kind] for kind in self.layers)

    @cached_property
    def params(self) -> int:
        """Total parameters, multi-token-prediction modules excluded."""
        outside = sum(tensor.params for tensor in (*self.embedding, *self.head))
        return outside + sum(kind.params for kind in self.layers)

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token touches (routed experts counted `top_k` times, not all)."""
        return self.params - sum(kind.params - kind.active_params for kind in self.layers)

    @cached_property
    def mtp_params(self) -> int:
        return sum(tensor.params for tensor in self.mtp)
