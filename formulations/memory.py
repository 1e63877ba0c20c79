"""Memory of one device, line by line, per pipeline stage.

With `x = s b / c` tokens, `t` the tensor-parallel degree, `d` the ranks over which ZeRO shards (cp x dp_shard; for experts
those that hold the same ones), `u = t` under sequence parallelism and 1 otherwise; bytes:

(M1) weights 2 per parameter, gradients 4 (fp32 accumulation), optimizer states 12 (fp32 master and two moments); the
     last divided by d under ZeRO-1, gradients too under ZeRO-2, weights too under ZeRO-3 (Rajbhandari et al., arXiv
     1910.02054, section 5; Megatron docs/distributed-optimizer). FSDP keeps fp32 weights, which are the master copy.
     A key/value projection is not split beyond its heads; norms, routers and low-rank projections are not split at all;
     experts are spread over ep and split over etp.
(M2) activations kept for the backward pass, per layer and micro-batch in flight, by what autograd saves: the input of
     the norm and of the matrix behind it for each part (split by u; 9.5 bytes instead of 4 where norms are not fused),
     and the intermediates of the part split by t; 8-bit and
     narrower products keep their inputs in one byte; unfused attention adds 5 a s per token, without a fused softmax 6
     (Korthikanti et al., arXiv 2205.05198, section 4.1, without dropout masks elsewhere).
(M3) selective recompute drops what the attention core saves, or all but the outputs of matrix products; full recompute
     keeps the layer's input only, and needs one layer's activations while it recomputes, with the gradients of the
     S x S matrices where attention is not flash.
(M4) the last stage holds one micro-batch of logits over V / t, with the fp32 copies of the loss, and the final norm.
(M5) activations are scaled by what the software keeps beyond fused kernels, and by what the allocator holds on top
     (fragmentation); a fixed reserve stands for context and communicators. "Allocated" is without the last two,
     "reserved" without the reserve, "device" everything.
(M6) ZeRO-3 holds two gathered layers in 16 bits, and the fp32 gradients of one.
(M7) in a pipeline FSDP2 keeps the stage's weights gathered, in 16 bits beside the shards, and its gradients whole until
     the last backward pass (torch distributed/pipelining/stage.py `backward_maybe_with_nosync`).

Every line is rounded up to MiB where it enters a formulation, and capacity down, so that a plan found to fit does fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from shardwise.data.model import Attention, LayerKind, LinearAttention, Mamba, Mlp, Moe, Tensor
from shardwise.data.pipeline import FOLDED
from shardwise.data.workload import OPTIMIZER_STATE_BYTES
from shardwise.formulations.layer_costs import ACTIVATION_BYTES, padded_vocab

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Degrees
    from shardwise.formulations.layer_costs import Sharding

MIB = 2**20
WEIGHT_BYTES = 2
GRADIENT_BYTES = 4
FP32_BYTES = 4
SOFTMAX_STATISTIC_BYTES = 4
NORM_KEPT_BYTES = {True: 4.0, False: 9.5}
CORE_KEPT_BYTES = {"unfused": 5.0, "eager": 6.0}
PASSING_BYTES = {"unfused": 6.0, "eager": 12.0}
"""Gradients of the S x S matrices that the backward pass holds for a moment: three of 16 bits, or of 32 bits."""
NARROW_PEAKS = ("fp8", "fp4")


@dataclass(frozen=True, slots=True)
class KindParams:
    """Parameters on one device: routed experts apart, since other ranks share them."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True, slots=True)
class StateBytes:
    """(M1) Weights, gradients and optimizer states of some parameters on one device."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """(M2), (M3) What one layer keeps per micro-batch in flight under each recompute mode, and needs while repeated."""

    none: float
    selective: float
    full: float
    working: float


def mib_up(size_bytes: float) -> int:
    """Bytes to whole MiB, upwards: a rounded line never understates memory."""
    return ceil(size_bytes / MIB)


def tensor_params_on_device(tensor: Tensor, tp: int, kv_heads: int) -> int:
    """Parameters of `tensor` on one of `tp` devices."""
    if tensor.shard == "none":
        return tensor.params
    ways = min(tp, kv_heads) if tensor.shard == "kv_heads" else tp
    return -(-tensor.params // ways)


def kind_params_on_device(kind: LayerKind, tp: int, ep: int = 1, etp: int = 0) -> KindParams:
    """Parameters of one layer of `kind` on one device."""
    kv_heads = kind.mixer.kv_heads if isinstance(kind.mixer, Attention) else tp
    dense = expert = 0
    for tensor in kind.tensors:
        if tensor.expert:
            expert += -(-tensor_params_on_device(tensor, etp or tp, kv_heads) // ep)
        else:
            dense += tensor_params_on_device(tensor, tp, kv_heads)
    return KindParams(dense, expert)


def end_params_on_device(instance: Instance, tp: int, *, head: bool, with_tied_copy: bool = False) -> int:
    """Parameters of the embedding (or head) on one of `tp` devices, the vocabulary padded as in (L7)."""
    model = instance.model
    tensors = model.head if head else model.embedding
    padded = padded_vocab(model.vocab, tp)
    total = 0
    for tensor in tensors:
        if tensor.shard == "vocab":
            total += -(-tensor.params // model.vocab) * padded // tp
        else:
            total += tensor.params
    return total + (padded // tp * model.hidden if with_tied_copy else 0)


def state_bytes(instance: Instance, params: KindParams, degrees: Degrees) -> StateBytes:
    """(M1), (M7) of parameters held by one device."""
    shards = (degrees.cp * degrees.dp_shard, degrees.expert_dp_shard)
    dense, expert = (
        _state(instance, count, shard, degrees.zero, whole=degrees.pp > 1)
        for count, shard in zip((params.dense, params.expert), shards, strict=True)
    )
    return dense + expert


def _state(instance: Instance, params: int, shard: int, zero: int, *, whole: bool) -> StateBytes:
    profile = instance.profile
    resident = profile.weight_bytes
    states = OPTIMIZER_STATE_BYTES[instance.workload.optimizer] - (FP32_BYTES if resident == FP32_BYTES else 0)
    gathered = WEIGHT_BYTES if whole and zero >= 3 and shard > 1 else 0
    return StateBytes(
        (resident / (shard if zero >= 3 else 1) + gathered) * params,
        resident_gradient_bytes(instance) * params / (shard if zero >= 2 and not whole else 1),
        states * params / (shard if zero >= 1 else 1),
    )


def resident_gradient_bytes(instance: Instance) -> float:
    """(M1) Bytes of a gradient; asked to accumulate in fp32, a framework with 16-bit gradients holds both."""
    own = instance.profile.gradient_bytes
    return own + FP32_BYTES if instance.workload.fp32_gradients and own < FP32_BYTES else own


def layer_activations(instance: Instance, kind: LayerKind, sharding: Sharding) -> ActivationBytes:
    """(M2), (M3), (M5) of one layer and one micro-batch."""
    hidden, workload, tp = instance.model.hidden, instance.workload, sharding.tp
    split = tp if sharding.sequence_parallel else 1
    values = plain = core = products = inputs = 0.0
    for part in (kind.mixer, kind.ffn):
        if part is None:
            continue
        plain += NORM_KEPT_BYTES[workload.fused_norm] * hidden / split
        products += hidden / split
        inputs += hidden / split
        if isinstance(part, Attention):
            heads, kv_heads = max(part.heads / tp, 1), max(part.kv_heads / tp, 1)
            if part.latent is not None:
                kv_heads = heads
                values += (part.latent.q_rank or 0) + part.latent.kv_rank + part.latent.qk_rope_dim
            values += heads * (part.head_dim + part.v_head_dim) + kv_heads * (part.head_dim + part.v_head_dim)
            products += heads * (part.head_dim + part.v_head_dim) + kv_heads * (part.head_dim + part.v_head_dim)
            inputs += heads * part.v_head_dim
            core = heads * CORE_KEPT_BYTES.get(workload.attention, 0.0) * workload.seq_len
            core = core or heads * SOFTMAX_STATISTIC_BYTES
            plain += core
        elif isinstance(part, Mamba):
            values += (4 * part.inner + 4 * part.groups * part.state + (part.heads or 0)) / tp
            products += 2 * part.inner / tp
        elif isinstance(part, LinearAttention):
            values += (2 * part.key_heads * part.key_dim * 2 + 4 * part.value_heads * part.value_dim) / tp
            products += 2 * part.value_heads * part.value_dim / tp
        elif isinstance(part, Mlp):
            values += (3 if part.gated else 2) * part.intermediate / tp
            products += (2 if part.gated else 1) * part.intermediate / tp
            inputs += part.intermediate / tp
        else:
            kept = _moe_values(part, hidden, sharding)
            values += kept
            products += kept
            inputs += kept / 3
    tokens = sharding.micro_batch * workload.seq_len / sharding.cp * activation_scale(instance)
    everything = ACTIVATION_BYTES * values + plain
    if workload.peak in NARROW_PEAKS:
        everything -= inputs
    kept_input = min(ACTIVATION_BYTES * hidden / split, everything)  # a layer without parts keeps nothing to begin with
    selective = everything - core
    if instance.profile.selective:
        selective = min(selective, ACTIVATION_BYTES * products / 2 + kept_input)
    passing = heads_here(kind, tp) * PASSING_BYTES.get(workload.attention, 0.0) * workload.seq_len
    return ActivationBytes(
        tokens * everything, tokens * selective, tokens * kept_input, tokens * (everything + passing)
    )


def heads_here(kind: LayerKind, tp: int) -> float:
    """Attention heads of one layer on one of `tp` devices."""
    return max(kind.mixer.heads / tp, 1) if isinstance(kind.mixer, Attention) else 0.0


def _moe_values(part: Moe, hidden: int, sharding: Sharding) -> float:
    """Values kept per token: permuted inputs, expert intermediates, expert outputs, shared expert."""
    inputs = 3 if part.gated else 2
    share = sharding.tp if sharding.sequence_parallel and sharding.spread else 1
    ways, gathered = (sharding.etp, sharding.etp) if sharding.spread else (sharding.tp, 1)
    routed = part.top_k / share * gathered * (2 * hidden + inputs * part.intermediate / ways)
    return routed + inputs * part.shared_intermediate / sharding.tp


def head_activations_bytes(instance: Instance, sharding: Sharding) -> float:
    """(M4), (M5): logits and their fp32 copy, the final norm's input and output, for one micro-batch."""
    width = padded_vocab(instance.model.vocab, sharding.tp) / sharding.tp
    per_token = instance.profile.logit_bytes * width + 2 * ACTIVATION_BYTES * instance.model.hidden
    tokens = sharding.micro_batch * instance.workload.seq_len / sharding.cp
    return per_token * tokens * (1 + instance.profile.memory_fragmentation)


def activation_scale(instance: Instance) -> float:
    """(M5) What the activations that fused kernels keep are multiplied by."""
    return instance.profile.memory_activations * (1 + instance.profile.memory_fragmentation)


def transfer_buffer_bytes(instance: Instance, degrees: Degrees) -> float:
    """Send and receive buffers of a pipeline stage, forward and backward."""
    if degrees.pp == 1:
        return 0.0
    tokens = degrees.micro_batch * instance.workload.seq_len / degrees.cp
    return 4.0 * ACTIVATION_BYTES * tokens * instance.model.hidden


def gather_buffer_bytes(kinds: tuple[KindParams, ...], degrees: Degrees) -> float:
    """(M6)."""
    if degrees.zero < 3 or degrees.dp_shard * degrees.cp == 1 or degrees.pp > 1:
        return 0.0
    largest = max(params.total for params in kinds)
    return largest * (2.0 * WEIGHT_BYTES + GRADIENT_BYTES)


def tied_copy(instance: Instance, pp: int, schedule: str = "1f1b") -> bool:
    """Whether the last stage holds a second copy of tied embeddings (Megatron language_module.py); a folded pipeline
    ends on the stage where it starts."""
    return instance.model.tied and pp > 1 and schedule not in FOLDED
