"""Time of one layer, of the embedding and of the head, on one device for one micro-batch.

With `s` the sequence length, `b` the micro-batch, `x = s b` tokens, `h` the hidden size, `t` the tensor-parallel degree
and GEMM(M, N, K) the measured-curve time of `kernels.gemm_time_s`:

(L1) a weight matrix K -> N costs GEMM(x, N, K) forward, GEMM(x, K, N) for the data gradient and GEMM(N, K, x) for the
     weight gradient (Narayanan et al., arXiv 2104.04473, appendix A counts the same three products).
(L2) softmax attention costs `kernels.attention_time_s` over heads / t heads; causal work is counted as executed.
(L3) a recurrent mixer (Mamba, linear attention) runs in chunks of Q tokens: 2 x H P (2 N + Q) products per token
     direction, H heads of width P and state N (Dao & Gu, arXiv 2405.21060, section 6; chunk 256), and its streams
     move through memory once per pass.
(L4) element-wise work (norms, residuals, rotary, activations) moves its bytes at the achieved memory bandwidth;
     backward moves twice the bytes of forward.
(L5) tensor parallelism adds, per row-parallel output, one all-reduce of 2 x h bytes forward and one backward; with
     sequence parallelism an all-gather and a reduce-scatter each way instead (Korthikanti et al., arXiv 2205.05198,
     section 4.2.2); norms and residuals then work on x / t tokens.
(L6) full recompute runs the forward pass of the layer again, selective recompute the attention core only
     (arXiv 2205.05198, section 5).
(L7) the head is the matrix h -> V / t with V padded to a multiple of 128 t (Megatron vocab_utils), and a cross
     entropy that reads and writes fp32 logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardwise.data.cluster import Link
from shardwise.data.model import Attention, LayerKind, LinearAttention, Mamba, Mlp, Moe
from shardwise.formulations.collectives import collective_time_s
from shardwise.formulations.kernels import attention_time_s, gemm_time_s, grouped_gemm_time_s, memory_bound_time_s

if TYPE_CHECKING:
    from shardwise.data.instance import Instance

ACTIVATION_BYTES = 2
LOGIT_BYTES = 4
VOCAB_MULTIPLE = 128
SCAN_CHUNK = 256
BACKWARD_TRAFFIC = 2.0

Spans = tuple[tuple[int, Link], ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """What the time of a layer depends on: tensor-parallel degree, micro-batch and sequence parallelism."""

    tp: int
    micro_batch: int
    sequence_parallel: bool


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds for one micro-batch: passes, and the extra time of recomputing the attention core or the whole layer."""

    forward_s: float
    backward_s: float
    selective_s: float = 0.0
    full_s: float = 0.0

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class ShardTimes:
    """Times of every layer kind (in the order of `Model.kinds`), the embedding and the head."""

    kinds: tuple[LayerTime, ...]
    embedding: LayerTime
    head: LayerTime


@dataclass(frozen=True, slots=True)
class _Pass:
    """Forward and backward seconds of a part of a layer, with the part that selective recompute repeats."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    core_s: float = 0.0

    def __add__(self, other: _Pass) -> _Pass:
        return _Pass(self.forward_s + other.forward_s, self.backward_s + other.backward_s, self.core_s + other.core_s)


def padded_vocab(vocab: int, tp: int) -> int:
    """(L7) Vocabulary rows after padding to a multiple of 128 tp."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab // multiple) * multiple


class LayerCosts:
    """The layer times of one instance, remembered per sharding and per tensor-parallel placement."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._compute: dict[Sharding, tuple[tuple[_Pass, ...], _Pass, _Pass]] = {}
        self._times: dict[tuple[Sharding, Spans], ShardTimes] = {}

    @cached_property
    def row_outputs(self) -> tuple[int, ...]:
        """Row-parallel outputs of each layer kind: one per mixer and one per feed-forward part."""
        return tuple((kind.mixer is not None) + (kind.ffn is not None) for kind in self.instance.model.kinds)

    def times(self, sharding: Sharding, tp_spans: Spans) -> ShardTimes:
        """Times of all layer kinds, embedding and head, with the tensor-parallel group placed as `tp_spans`."""
        key = (sharding, tp_spans)
        found = self._times.get(key)
        if found is None:
            forward_comm, backward_comm = tensor_parallel_time_s(self.instance, sharding, tp_spans)
            found = self._combine(sharding, forward_comm, backward_comm)
            self._times[key] = found
        return found

    def _combine(self, sharding: Sharding, forward_comm: float, backward_comm: float) -> ShardTimes:
        kinds, embedding, head = self.compute(sharding)
        overhead = self.instance.profile.layer_overhead_s
        repeat = 1 - self.instance.profile.recompute_overlap
        layers = []
        for outputs, part in zip(self.row_outputs, kinds, strict=True):
            forward = part.forward_s + outputs * forward_comm + overhead
            layers.append(
                LayerTime(
                    forward,
                    part.backward_s + outputs * backward_comm + overhead,
                    part.core_s * repeat,
                    forward * repeat,
                )
            )
        return ShardTimes(
            tuple(layers),
            LayerTime(embedding.forward_s + forward_comm, embedding.backward_s + backward_comm),
            LayerTime(head.forward_s + forward_comm, head.backward_s + backward_comm),
        )

    def compute(self, sharding: Sharding) -> tuple[tuple[_Pass, ...], _Pass, _Pass]:
        """Device time without communication: each kind, the embedding, the head."""
        found = self._compute.get(sharding)
        if found is None:
            kinds = tuple(_layer(self.instance, kind, sharding) for kind in self.instance.model.kinds)
            found = (kinds, _embedding(self.instance, sharding), _head(self.instance, sharding))
            self._compute[sharding] = found
        return found


def tensor_parallel_time_s(instance: Instance, sharding: Sharding, spans: Spans) -> tuple[float, float]:
    """(L5) Exposed communication of one row-parallel output, forward and backward."""
    if sharding.tp == 1:
        return 0.0, 0.0
    size = ACTIVATION_BYTES * sharding.micro_batch * instance.workload.seq_len * instance.model.hidden
    accelerator = instance.accelerator
    if sharding.sequence_parallel:
        once = sum(collective_time_s(accelerator, op, size, spans) for op in ("all_gather", "reduce_scatter"))
    else:
        once = collective_time_s(accelerator, "all_reduce", size, spans)
    exposed = once * instance.profile.tp_comm_exposed
    return exposed, exposed


def _matrix(instance: Instance, tokens: int, n: int, k: int) -> _Pass:
    """(L1) Forward, data-gradient and weight-gradient products of a k -> n matrix."""
    accelerator, precision = instance.accelerator, instance.workload.precision
    forward = gemm_time_s(accelerator, tokens, n, k, precision)
    data = gemm_time_s(accelerator, tokens, k, n, precision)
    weight = gemm_time_s(accelerator, n, k, tokens, precision)
    return _Pass(forward, data + weight)


def _expert_matrix(instance: Instance, experts: int, tokens: int, n: int, k: int) -> _Pass:
    """(L1) over all experts: `tokens` routed tokens spread evenly over `experts` equal matrices."""
    accelerator, precision = instance.accelerator, instance.workload.precision
    forward = grouped_gemm_time_s(accelerator, experts, tokens, n, k, precision)
    data = grouped_gemm_time_s(accelerator, experts, tokens, k, n, precision)
    return _Pass(forward, data + forward)


def _traffic(instance: Instance, values: float) -> _Pass:
    """(L4) Element-wise work that touches `values` activations in the forward pass."""
    size = values * ACTIVATION_BYTES
    accelerator = instance.accelerator
    return _Pass(memory_bound_time_s(accelerator, size), memory_bound_time_s(accelerator, BACKWARD_TRAFFIC * size))


def _layer(instance: Instance, kind: LayerKind, sharding: Sharding) -> _Pass:
    """(L1)-(L4) of one layer: its mixer, its feed-forward part, and a norm and a residual for each."""
    tokens = sharding.micro_batch * instance.workload.seq_len
    local_tokens = tokens / sharding.tp if sharding.sequence_parallel else tokens
    hidden = instance.model.hidden
    total = _Pass()
    for part in (kind.mixer, kind.ffn):
        if part is None:
            continue
        total += _traffic(instance, 5 * local_tokens * hidden)  # norm reads and writes, residual reads two, writes one
        if isinstance(part, Attention):
            total += _attention(instance, part, sharding, tokens)
        elif isinstance(part, LinearAttention | Mamba):
            total += _recurrent(instance, part, sharding, tokens)
        elif isinstance(part, Mlp):
            total += _mlp(instance, part.intermediate, part.gated, sharding, tokens)
        else:
            total += _moe(instance, part, sharding, tokens)
    return total


def _attention(instance: Instance, part: Attention, sharding: Sharding, tokens: int) -> _Pass:
    """(L1), (L2): projections and core of softmax attention; key/value heads are replicated once tp exceeds them."""
    tp, hidden = sharding.tp, instance.model.hidden
    heads = max(part.heads // tp, 1)
    kv_heads = max(part.kv_heads // tp, 1)
    q_width, out_width = heads * part.head_dim, heads * part.v_head_dim
    if part.latent is None:
        kv_width = kv_heads * (part.head_dim + part.v_head_dim)
        total = _matrix(instance, tokens, q_width + kv_width, hidden)
        rotary = q_width + kv_heads * part.head_dim
    else:
        latent = part.latent
        kv_heads = heads
        total = _matrix(instance, tokens, latent.kv_rank + latent.qk_rope_dim, hidden)
        total += _matrix(instance, tokens, heads * (latent.qk_nope_dim + part.v_head_dim), latent.kv_rank)
        if latent.q_rank:
            total += _matrix(instance, tokens, latent.q_rank, hidden)
        total += _matrix(instance, tokens, q_width, latent.q_rank or hidden)
        rotary = 2 * q_width
    total += _matrix(instance, tokens, hidden, out_width)
    total += _traffic(instance, 2 * tokens * rotary)
    core = [
        attention_time_s(
            instance.accelerator,
            sharding.micro_batch,
            instance.workload.seq_len,
            heads,
            kv_heads,
            part.head_dim,
            part.v_head_dim,
            window=part.window,
            direction=direction,
            flash=instance.workload.attention == "flash",
            precision="bf16" if instance.workload.precision == "fp8" else instance.workload.precision,
        )
        for direction in ("forward", "backward")
    ]
    return total + _Pass(core[0], core[1], core[0])


def _recurrent(instance: Instance, part: LinearAttention | Mamba, sharding: Sharding, tokens: int) -> _Pass:
    """(L1), (L3): projections and chunked scan of a recurrent mixer."""
    tp, hidden = sharding.tp, instance.model.hidden
    if isinstance(part, Mamba):
        inner, state = max(part.inner // tp, 1), part.state
        width = 2 * inner + 2 * part.groups * state // tp + (part.heads or 0) // tp
    else:
        inner = max(part.value_heads * part.value_dim // tp, 1)
        state = part.key_dim
        width = 2 * inner + 2 * part.key_heads * part.key_dim // tp + 2 * part.value_heads // tp
    total = _matrix(instance, tokens, width, hidden) + _matrix(instance, tokens, hidden, inner)
    total += _traffic(instance, 2 * tokens * (width + 2 * inner))
    precision = "bf16" if instance.workload.precision == "fp8" else instance.workload.precision
    scan = gemm_time_s(instance.accelerator, tokens, inner, 2 * state + SCAN_CHUNK, precision)
    return total + _Pass(scan, 2 * scan)


def _mlp(instance: Instance, intermediate: int, gated: bool, sharding: Sharding, tokens: int) -> _Pass:
    """(L1), (L4): a dense feed-forward part; the activation reads its inputs and writes one output."""
    width = max(intermediate // sharding.tp, 1)
    inputs = 2 if gated else 1
    return (
        _matrix(instance, tokens, inputs * width, instance.model.hidden)
        + _matrix(instance, tokens, instance.model.hidden, width)
        + _traffic(instance, (inputs + 1) * tokens * width)
    )


def _moe(instance: Instance, part: Moe, sharding: Sharding, tokens: int) -> _Pass:
    """(L1), (L4): router, permutation, experts with balanced routing, shared expert."""
    hidden, width = instance.model.hidden, max(part.intermediate // sharding.tp, 1)
    routed = tokens * part.top_k
    inputs = 2 if part.gated else 1
    total = _matrix(instance, tokens, part.experts, hidden)
    total += _traffic(instance, 4 * routed * hidden)  # permute and unpermute: read and write each
    total += _expert_matrix(instance, part.experts, routed, inputs * width, hidden)
    total += _expert_matrix(instance, part.experts, routed, hidden, width)
    total += _traffic(instance, (inputs + 1) * routed * width)
    if part.shared_intermediate:
        total += _mlp(instance, part.shared_intermediate, part.gated, sharding, tokens)
    return total


def _embedding(instance: Instance, sharding: Sharding) -> _Pass:
    """Lookup of one row per token: read and write."""
    return _traffic(instance, 2 * sharding.micro_batch * instance.workload.seq_len * instance.model.hidden)


def _head(instance: Instance, sharding: Sharding) -> _Pass:
    """(L7) Final norm, output matrix and cross entropy."""
    tokens = sharding.micro_batch * instance.workload.seq_len
    width = padded_vocab(instance.model.vocab, sharding.tp) // sharding.tp
    logits = 3 * tokens * width * LOGIT_BYTES / ACTIVATION_BYTES  # cast, exponentiate, normalise
    return (
        _matrix(instance, tokens, width, instance.model.hidden)
        + _traffic(instance, 2 * tokens * instance.model.hidden)
        + _traffic(instance, logits)
    )
