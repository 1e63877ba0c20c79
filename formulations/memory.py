"""Memory of one device, line by line, per pipeline stage.

With `x = s b` tokens, `t` the tensor-parallel degree, `d` the data-parallel degree, `u = t` under sequence parallelism
and 1 otherwise; bytes:

(M1) weights 2 per parameter, gradients 4 (fp32 accumulation), optimizer states 12 (fp32 master and two moments),
     divided by d under ZeRO-1 (Rajbhandari et al., arXiv 1910.02054, section 5; Megatron docs/distributed-optimizer).
     A key/value projection is not split beyond its heads; norms, routers and low-rank projections are not split at all.
(M2) activations kept for the backward pass, per layer and micro-batch in flight, by what autograd saves: two inputs of
     h per part (norm and matrix, split by u), and the intermediates of the part split by t; unfused attention adds
     5 a s per token (Korthikanti et al., arXiv 2205.05198, section 4.1, without dropout masks elsewhere).
(M3) selective recompute drops what the attention core saves; full recompute keeps the layer's input only, and needs
     one layer's activations while it recomputes.
(M4) the last stage holds one micro-batch of logits, 2 + 4 bytes each over V / t, and the final norm.
(M5) a share is added to activations for fragmentation, and a fixed reserve for context and communicators.

Every line is rounded up to MiB where it enters a formulation, and capacity down, so that a plan found to fit does fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from shardwise.data.model import Attention, LayerKind, LinearAttention, Mamba, Mlp, Moe, Tensor
from shardwise.data.workload import OPTIMIZER_STATE_BYTES
from shardwise.formulations.layer_costs import ACTIVATION_BYTES, LOGIT_BYTES, padded_vocab

if TYPE_CHECKING:
    from shardwise.data.instance import Instance

MIB = 2**20
WEIGHT_BYTES = 2
GRADIENT_BYTES = 4
SOFTMAX_STATISTIC_BYTES = 4


@dataclass(frozen=True, slots=True)
class StateBytes:
    """(M1) Weights, gradients and optimizer states of some parameters on one device."""

    params: int
    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """(M2), (M3) What one layer keeps per micro-batch in flight under each recompute mode."""

    none: float
    selective: float
    full: float


def mib_up(size_bytes: float) -> int:
    """Bytes to whole MiB, upwards: a rounded line never understates memory."""
    return ceil(size_bytes / MIB)


def tensor_params_on_device(tensor: Tensor, tp: int, kv_heads: int) -> int:
    """Parameters of `tensor` on one of `tp` devices."""
    if tensor.shard == "none":
        return tensor.params
    ways = min(tp, kv_heads) if tensor.shard == "kv_heads" else tp
    return -(-tensor.params // ways)


def kind_params_on_device(kind: LayerKind, tp: int) -> int:
    """Parameters of one layer of `kind` on one of `tp` devices."""
    kv_heads = kind.mixer.kv_heads if isinstance(kind.mixer, Attention) else tp
    return sum(tensor_params_on_device(tensor, tp, kv_heads) for tensor in kind.tensors)


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


def state_bytes(instance: Instance, params: int, dp: int, zero: int) -> StateBytes:
    """(M1) of `params` parameters held by one device."""
    optimizer = OPTIMIZER_STATE_BYTES[instance.workload.optimizer] * params
    return StateBytes(
        params, WEIGHT_BYTES * params, GRADIENT_BYTES * params, optimizer / dp if zero >= 1 else optimizer
    )


def layer_activations(instance: Instance, kind: LayerKind, tp: int, micro_batch: int, sp: bool) -> ActivationBytes:
    """(M2), (M3), (M5) of one layer and one micro-batch."""
    hidden, seq_len = instance.model.hidden, instance.workload.seq_len
    split = tp if sp else 1
    values = statistics = core = 0.0
    for part in (kind.mixer, kind.ffn):
        if part is None:
            continue
        values += 2 * hidden / split
        if isinstance(part, Attention):
            heads, kv_heads = max(part.heads / tp, 1), max(part.kv_heads / tp, 1)
            if part.latent is not None:
                kv_heads = heads
                values += (part.latent.q_rank or 0) + part.latent.kv_rank + part.latent.qk_rope_dim
            values += heads * (part.head_dim + part.v_head_dim) + kv_heads * (part.head_dim + part.v_head_dim)
            core = heads * (SOFTMAX_STATISTIC_BYTES if instance.workload.attention == "flash" else 5.0 * seq_len)
            statistics += core
        elif isinstance(part, Mamba):
            values += (4 * part.inner + 4 * part.groups * part.state + (part.heads or 0)) / tp
        elif isinstance(part, LinearAttention):
            values += (2 * part.key_heads * part.key_dim * 2 + 4 * part.value_heads * part.value_dim) / tp
        elif isinstance(part, Mlp):
            values += (3 if part.gated else 2) * part.intermediate / tp
        else:
            values += _moe_values(part, hidden, tp)
    tokens = micro_batch * seq_len * (1 + instance.profile.memory_fragmentation)
    everything = ACTIVATION_BYTES * values + statistics
    kept_input = min(ACTIVATION_BYTES * hidden / split, everything)  # a layer without parts keeps nothing to begin with
    return ActivationBytes(tokens * everything, tokens * (everything - core), tokens * kept_input)


def _moe_values(part: Moe, hidden: int, tp: int) -> float:
    """Values kept per token: permuted inputs, expert intermediates, expert outputs, shared expert."""
    inputs = 3 if part.gated else 2
    return part.top_k * (2 * hidden + inputs * part.intermediate / tp) + inputs * part.shared_intermediate / tp


def head_activations_bytes(instance: Instance, tp: int, micro_batch: int) -> float:
    """(M4), (M5): logits and their fp32 copy, the final norm's input and output, for one micro-batch."""
    width = padded_vocab(instance.model.vocab, tp) / tp
    per_token = (ACTIVATION_BYTES + LOGIT_BYTES) * width + 2 * ACTIVATION_BYTES * instance.model.hidden
    return per_token * micro_batch * instance.workload.seq_len * (1 + instance.profile.memory_fragmentation)


def transfer_buffer_bytes(instance: Instance, micro_batch: int, pp: int) -> float:
    """Send and receive buffers of a pipeline stage, forward and backward."""
    if pp == 1:
        return 0.0
    return 4.0 * ACTIVATION_BYTES * micro_batch * instance.workload.seq_len * instance.model.hidden


def tied_copy(instance: Instance, pp: int) -> bool:
    """Whether the last stage holds a second copy of tied embeddings (Megatron language_module.py)."""
    return instance.model.tied and pp > 1
