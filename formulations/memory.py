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
(M3) selective recompute drops what its modules save: the attention core (or, by profile, all but the outputs of matrix
     products); the output of a norm that is not part of the projection behind it; queries, keys and values of latent
     attention; the product that enters the experts' last matrix; everything in the shared experts, the MLP with its norm,
     or the whole of the experts. Modules other than the core need what they drop for one layer while they repeat it
     (megatron/core/transformer/transformer_config.py, `recompute_modules`). Full recompute
     keeps the layer's input only, and needs one layer's activations while it recomputes, with the gradients of the
     S x S matrices where attention is not flash.
(M4) the last stage holds one micro-batch of logits over V / t, or over V where the software gathers them ahead of the loss,
     with the copies of the loss, and the final norm.
(M5) activations are scaled by what the software keeps beyond fused kernels, and by what the allocator holds on top
     (fragmentation); a fixed reserve stands for context and communicators. "Allocated" is without the last two,
     "reserved" without the reserve, "device" everything.
(M6) ZeRO-3 holds two gathered layers in 16 bits, and the fp32 gradients of one. Context parallelism by an all-gather holds
     the keys and values of one layer whole and their gradients, Ulysses what it exchanges and its gradients; the pieces
     that pass in a ring are not counted.
(M7) in a pipeline FSDP2 keeps the stage's weights gathered, in 16 bits beside the shards, and its gradients whole until
     the last backward pass (torch distributed/pipelining/stage.py `backward_maybe_with_nosync`).
(M8) under LoRA every weight of the model is frozen: 2 bytes whatever (M1) says, or 0.516 with NF4 for the projections of
     the layers (`data.workload.FROZEN_BYTES`; norms, routers, embedding and head keep 2), and no gradients and no states.
     ZeRO-3 shards, gathers and (M7) keeps them like others. A projection K -> N that is adapted has the adapter A of
     r x K and B of N x r, r (K + N) parameters (Hu et al., arXiv 2106.09685, section 4.1) that (M1) counts, one for each
     expert. Of a matrix split by outputs B is split alike and A is whole on every rank, of one split by inputs A is split
     and B whole (vLLM lora/layers without fully_sharded_loras). Megatron-Bridge peft/utils.py ParallelLinearAdapter splits
     both and gathers the r values a token between them: less memory than here, and one more collective.
(M9) under LoRA a matrix keeps its input only for an adapter: without one in the feed-forward part its layer keeps neither
     the norm's output nor the products and permuted tokens that enter frozen matrices, and the head not the final
     norm's output. Adapters work in 16 bits, so that (M2) keeps inputs in them, and keep r values each besides. NF4 needs
     one matrix (or one matrix of all local experts) in 16 bits while it is multiplied by.

(M10) a module of multi-token prediction (L13) adds its layer, the matrix 2h -> h split by t and three norms to the last
     stage, which holds a copy of the embedding in a pipeline, tied or not; with one micro-batch of logits as in (M4), and of
     its layer's activations and the 4 h values that enter its matrix and its norms.
(M11) of the optimizer states a device keeps the share that the host does not (offload, U1); of weights that the host has
     (U4) only what (M6) gathers, on a single rank too. What layers save may be on the host as well (U5).

Every line is rounded up to MiB where it enters a formulation, and capacity down, so that a plan found to fit does fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from shardwise.data.adapters import adapts, is_adapted, is_projection
from shardwise.data.model import Attention, LayerKind, LinearAttention, Mamba, Mlp, Moe, Tensor
from shardwise.data.pipeline import FOLDED
from shardwise.data.recompute import CORE, MODULES, modules_of
from shardwise.data.workload import FROZEN_BYTES, OPTIMIZER_STATE_BYTES
from shardwise.formulations.layer_costs import (
    ACTIVATION_BYTES,
    Sharding,
    busiest,
    context_parallel_bytes,
    kv_heads_here,
    padded_vocab,
    sharding_of,
    ulysses_bytes,
)
from shardwise.formulations.offload import host_bytes_per_param

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Degrees
    from shardwise.data.workload import Training

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
ON_HOST = "on-host"
"""(U5) Beside the modes of `Stage.mode`: what a layer saved is on the host."""


@dataclass(frozen=True, slots=True)
class KindParams:
    """What is trained on one device: routed experts apart, since other ranks share them. Likewise the bytes of weights
    that are frozen."""

    dense: int
    expert: int
    frozen: int = 0
    frozen_expert: int = 0

    @property
    def total(self) -> int:
        """Trained parameters."""
        return self.dense + self.expert

    @property
    def gathered_bytes(self) -> int:
        """Everything that a pass needs, as it is sent."""
        return WEIGHT_BYTES * self.total + self.frozen + self.frozen_expert

    def __add__(self, other: KindParams) -> KindParams:
        return KindParams(
            self.dense + other.dense,
            self.expert + other.expert,
            self.frozen + other.frozen,
            self.frozen_expert + other.frozen_expert,
        )

    def __mul__(self, count: int) -> KindParams:
        return KindParams(self.dense * count, self.expert * count, self.frozen * count, self.frozen_expert * count)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """(M1) Weights, gradients and optimizer states of some parameters on one device, and (M11) what its host has of them."""

    weights: float
    gradients: float
    optimizer: float
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.host + other.host,
        )


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """(M2), (M3) What one layer keeps per micro-batch in flight when nothing is repeated and when it is repeated in full,
    what it needs then, and what each module drops, in the order of `MODULES`."""

    none: float
    full: float
    working: float
    dropped: tuple[float, ...]

    def kept(self, mode: str) -> float:
        """What it keeps in a mode of `Stage.mode`, or `ON_HOST`."""
        if mode == ON_HOST:
            return 0.0
        if mode == "none":
            return self.none
        if mode == "full":
            return self.full
        return max(self.none - sum(self.dropped[MODULES.index(module)] for module in modules_of(mode)), self.full)

    def needed(self, mode: str) -> float:
        """What it needs while it is repeated, or (U5) copied."""
        if mode == ON_HOST:
            return 2 * self.none
        if mode == "none":
            return 0.0
        if mode == "full":
            return self.working
        return sum(self.dropped[MODULES.index(module)] for module in modules_of(mode) if module != CORE)


def mib_up(size_bytes: float) -> int:
    """Bytes to whole MiB, upwards: a rounded line never understates memory."""
    return ceil(size_bytes / MIB)


def tensor_params_on_device(tensor: Tensor, tp: int, kv_heads: int) -> int:
    """Parameters of `tensor` on one of `tp` devices."""
    if tensor.shard == "none":
        return tensor.params
    ways = min(tp, kv_heads) if tensor.shard == "kv_heads" else tp
    return -(-tensor.params // ways)


def adapter_params_on_device(tensor: Tensor, rank: int, tp: int, kv_heads: int) -> int:
    """(M8) Parameters of A and B beside `tensor` on one of `tp` devices."""
    outputs, inputs = tensor.shape
    ways = {"none": 1, "kv_heads": min(tp, kv_heads)}.get(tensor.shard, tp)
    by_inputs = tensor.shard == "row"
    a = -(-inputs // ways) if by_inputs else inputs
    b = outputs if by_inputs else -(-outputs // ways)
    return rank * (a + b) * tensor.count


def kind_params_on_device(
    kind: LayerKind, tp: int, ep: int = 1, etp: int = 0, workload: Training | None = None
) -> KindParams:
    """What one device holds of one layer of `kind`: everything trained, or (M8) as `workload` says."""
    kv_heads = kind.mixer.kv_heads if isinstance(kind.mixer, Attention) else tp
    total = KindParams(0, 0)
    for tensor in kind.tensors:
        ways, among = (etp or tp, ep) if tensor.expert else (tp, 1)
        trained, frozen = -(-tensor_params_on_device(tensor, ways, kv_heads) // among), 0
        if workload is not None and workload.lora_rank is not None:
            frozen = ceil(trained * FROZEN_BYTES[workload.base_precision if is_projection(tensor) else "16bit"])
            adapted = is_adapted(workload, tensor)
            trained = adapter_params_on_device(tensor, workload.lora_rank, ways, kv_heads) if adapted else 0
            trained = -(-trained // among)
        total += KindParams(0, trained, 0, frozen) if tensor.expert else KindParams(trained, 0, frozen)
    return total


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


def end_units(
    instance: Instance, tp: int, ep: int = 1, etp: int = 0, *, with_tied_copy: bool = False
) -> tuple[KindParams, KindParams]:
    """What one device holds of the embedding and of the head, (M10) with it."""
    counts = (
        end_params_on_device(instance, tp, head=False),
        end_params_on_device(instance, tp, head=True, with_tied_copy=with_tied_copy),
    )
    frozen = instance.workload.frozen
    embedding, head = (KindParams(0, 0, WEIGHT_BYTES * n) if frozen else KindParams(n, 0) for n in counts)
    model, modules = instance.model, instance.workload.mtp_layers
    if modules:
        matrix = -(-2 * model.hidden * model.hidden // tp) + 3 * model.hidden
        head += (kind_params_on_device(model.layers[-1], tp, ep, etp) + KindParams(matrix, 0)) * modules
    return embedding, head


def state_bytes(instance: Instance, params: KindParams, degrees: Degrees) -> StateBytes:
    """(M1), (M7), (M8), (M11) of parameters held by one device."""
    shards = (degrees.cp * degrees.dp_shard, degrees.expert_dp_shard)
    held = ((params.dense, params.frozen), (params.expert, params.frozen_expert))
    dense, expert = (
        _state(instance, count, frozen, shard, degrees) for (count, frozen), shard in zip(held, shards, strict=True)
    )
    return dense + expert


def _state(instance: Instance, params: int, frozen: int, shard: int, degrees: Degrees) -> StateBytes:
    zero, offload, whole = degrees.zero, degrees.offload_optimizer, degrees.pp > 1
    profile = instance.profile
    resident = profile.weight_bytes
    states = OPTIMIZER_STATE_BYTES[instance.workload.optimizer] - (FP32_BYTES if resident == FP32_BYTES else 0)
    split = shard if zero >= 3 else 1
    again = 1 if whole and split > 1 else 0
    owned = params / (shard if zero >= 1 else 1)
    here = 0 if degrees.offload_param else 1
    return StateBytes(
        (here * resident / split + WEIGHT_BYTES * again) * params + (here / split + again) * frozen,
        resident_gradient_bytes(instance) * params / (shard if zero >= 2 and not whole else 1),
        states * owned * (1 - offload),
        offload * host_bytes_per_param(instance) * owned + (1 - here) * (WEIGHT_BYTES * params + frozen) / split,
    )


def resident_gradient_bytes(instance: Instance) -> float:
    """(M1) Bytes of a gradient; asked to accumulate in fp32, a framework with 16-bit gradients holds both."""
    own = instance.profile.gradient_bytes
    return own + FP32_BYTES if instance.workload.fp32_gradients and own < FP32_BYTES else own


def layer_activations(instance: Instance, kind: LayerKind, sharding: Sharding) -> ActivationBytes:
    """(M2), (M3), (M5), (M9) of one layer and one micro-batch."""
    hidden, workload, tp = instance.model.hidden, instance.workload, sharding.tp
    split = tp if sharding.sequence_parallel else 1
    values = products = _adapter_values(workload, kind, sharding)
    plain = core = inputs = 0.0
    for part in (kind.mixer, kind.ffn):
        if part is None:
            continue
        plain += NORM_KEPT_BYTES[workload.fused_norm] * hidden / split
        products += hidden / split
        inputs += hidden / split
        if isinstance(part, Attention):
            heads, kv_heads = max(part.heads / tp, 1), kv_heads_here(part, sharding)
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
            kept = _moe_values(part, hidden, sharding, workload)
            values += kept
            products += kept
            inputs += kept / 3
    tokens = sharding.micro_batch * workload.seq_len / sharding.cp * activation_scale(instance)
    everything = ACTIVATION_BYTES * (values - _unneeded_values(workload, kind, hidden, sharding)) + plain
    if workload.peak in NARROW_PEAKS and not workload.frozen:
        everything -= inputs
    kept_input = min(ACTIVATION_BYTES * hidden / split, everything)  # a layer without parts keeps nothing to begin with
    if instance.profile.selective:
        core = everything - min(everything - core, ACTIVATION_BYTES * products / 2 + kept_input)
    dropped = {CORE: core, **_dropped(instance, kind, sharding)}
    passing = heads_here(kind, tp) * PASSING_BYTES.get(workload.attention, 0.0) * workload.seq_len
    return ActivationBytes(
        tokens * everything,
        tokens * kept_input,
        tokens * (everything + passing),
        tuple(tokens * dropped.get(module, 0.0) for module in MODULES),
    )


def _dropped(instance: Instance, kind: LayerKind, sharding: Sharding) -> dict[str, float]:
    """(M3), (M9) Bytes per token that modules other than the core drop: of values in 16 bits, less the byte that matrices in
    8 bits save on their inputs, and less what adapters do without."""
    workload, tp = instance.workload, sharding.tp
    normed = instance.model.hidden / (tp if sharding.sequence_parallel else 1)
    narrow = workload.peak in NARROW_PEAKS and not workload.frozen
    entering = ACTIVATION_BYTES - narrow  # of what enters a matrix
    trained = not workload.frozen or adapts(workload, "ffn")
    dropped = dict.fromkeys(MODULES[1:], 0.0)
    mixer, ffn = kind.mixer, kind.ffn
    if isinstance(mixer, Attention) and mixer.latent is not None:
        dropped["layernorm"] += entering * normed
        heads = max(mixer.heads / tp, 1)
        dropped["mla_up_proj"] = ACTIVATION_BYTES * heads * (2 * mixer.head_dim + mixer.v_head_dim)
    if isinstance(ffn, Mlp):
        width = ffn.intermediate / tp
        inputs = (normed if workload.fused_norm else 0.0) + width
        dropped["mlp"] = ACTIVATION_BYTES * (2 if ffn.gated else 1) * width + entering * inputs * trained
    elif isinstance(ffn, Moe):
        ways = sharding.etp if sharding.spread else tp
        routed, shared = _routed_copies(ffn, sharding, workload), ffn.shared_intermediate / tp
        width = routed * ffn.intermediate / ways
        between = ACTIVATION_BYTES * (2 if ffn.gated else 1)
        outputs = routed * instance.model.hidden
        dropped["layernorm"] += entering * normed * trained
        dropped["moe_act"] = entering * width * trained
        dropped["shared_experts"] = between * shared + entering * shared * trained
        # as in (M2), a third of what is kept enters matrices
        narrowed = _moe_values(ffn, instance.model.hidden, sharding, workload) / 3 if narrow else 0.0
        held = ACTIVATION_BYTES * ((outputs + width + shared) * trained + outputs) + between * (width + shared)
        dropped["moe"] = held - narrowed
    return dropped


def _adapter_values(workload: Training, kind: LayerKind, sharding: Sharding) -> float:
    """(M9) What the adapters of a layer keep per token between A and B."""
    rank = workload.lora_rank or 0
    adapted = [tensor for tensor in kind.tensors if rank and is_adapted(workload, tensor)]
    routed = _routed_copies(kind.ffn, sharding, workload) if isinstance(kind.ffn, Moe) else 0.0
    return float(sum(rank * (routed if tensor.expert else 1) for tensor in adapted))


def _unneeded_values(workload: Training, kind: LayerKind, hidden: int, sharding: Sharding) -> float:
    """(M9) Inputs of frozen matrices of a feed-forward part without adapters, per token."""
    part = kind.ffn
    if part is None or not workload.frozen or adapts(workload, "ffn"):
        return 0.0
    normed = hidden / (sharding.tp if sharding.sequence_parallel else 1)
    if isinstance(part, Mlp):
        return normed + part.intermediate / sharding.tp
    ways = sharding.etp if sharding.spread else sharding.tp
    routed = _routed_copies(part, sharding, workload) * (hidden + part.intermediate / ways)
    return normed + routed + part.shared_intermediate / sharding.tp


def heads_here(kind: LayerKind, tp: int) -> float:
    """Attention heads of one layer on one of `tp` devices."""
    return max(kind.mixer.heads / tp, 1) if isinstance(kind.mixer, Attention) else 0.0


def _moe_values(part: Moe, hidden: int, sharding: Sharding, workload: Training) -> float:
    """Values kept per token: permuted inputs, expert intermediates, expert outputs, shared expert."""
    inputs = 3 if part.gated else 2
    ways = sharding.etp if sharding.spread else sharding.tp
    routed = _routed_copies(part, sharding, workload) * (2 * hidden + inputs * part.intermediate / ways)
    return routed + inputs * part.shared_intermediate / sharding.tp


def _routed_copies(part: Moe, sharding: Sharding, workload: Training) -> float:
    """Copies of a token that the experts of the busiest device see."""
    share = sharding.tp if sharding.sequence_parallel and sharding.spread else 1
    return part.top_k / share * (sharding.etp if sharding.spread else 1) * busiest(workload, part, sharding)


def head_activations_bytes(instance: Instance, sharding: Sharding) -> float:
    """(M4), (M5), (M9), (M10): logits and the copies of the loss, the final norm's input and output, for one micro-batch."""
    width = padded_vocab(instance.model.vocab, sharding.tp) / (1 if instance.profile.gathered_logits else sharding.tp)
    norm = (1 if instance.workload.frozen else 2) * ACTIVATION_BYTES * instance.model.hidden
    per_token = instance.profile.logit_bytes * width + norm
    tokens, modules = sharding.micro_batch * instance.workload.seq_len / sharding.cp, instance.workload.mtp_layers
    held = per_token * tokens * (1 + modules) * (1 + instance.profile.memory_fragmentation)
    if modules:
        entering = 4 * ACTIVATION_BYTES * instance.model.hidden * tokens * activation_scale(instance)
        held += modules * (layer_activations(instance, instance.model.layers[-1], sharding).none + entering)
    return held


def activation_scale(instance: Instance) -> float:
    """(M5) What the activations that fused kernels keep are multiplied by."""
    return instance.profile.memory_activations * (1 + instance.profile.memory_fragmentation)


def transfer_buffer_bytes(instance: Instance, degrees: Degrees) -> float:
    """Send and receive buffers of a pipeline stage, forward and backward."""
    if degrees.pp == 1:
        return 0.0
    tokens = degrees.micro_batch * instance.workload.seq_len / degrees.cp
    return 4.0 * ACTIVATION_BYTES * tokens * instance.model.hidden


def gather_buffer_bytes(instance: Instance, kinds: tuple[KindParams, ...], degrees: Degrees) -> float:
    """(M6), and what (M9) holds of one matrix in 16 bits."""
    held = _unpacked_bytes(instance, degrees) + _context_bytes(instance, degrees)
    alone = degrees.dp_shard * degrees.cp == 1 and not degrees.offload_param
    if degrees.zero < 3 or alone or degrees.pp > 1:
        return held
    return held + max(2.0 * params.gathered_bytes + GRADIENT_BYTES * params.total for params in kinds)


def _context_bytes(instance: Instance, degrees: Degrees) -> float:
    """(M6) of context parallelism."""
    if degrees.cp_comm_type == "p2p":
        return 0.0
    sharding = sharding_of(degrees)
    softmax = [kind for kind in instance.model.kinds if isinstance(kind.mixer, Attention)]
    if degrees.cp_comm_type == "allgather":
        sizes = [context_parallel_bytes(instance, kind, sharding) for kind in softmax]
    else:
        sizes = [sum(ulysses_bytes(instance, kind, sharding)) for kind in softmax]
    return 2.0 * max(sizes, default=0.0)


def _unpacked_bytes(instance: Instance, degrees: Degrees) -> float:
    """(M9)."""
    if instance.workload.base_precision == "16bit":
        return 0.0
    sizes = [
        -(-tensor_params_on_device(tensor, degrees.etp, degrees.tp) // degrees.ep)
        if tensor.expert
        else tensor_params_on_device(tensor, degrees.tp, degrees.tp)
        for kind in instance.model.kinds
        for tensor in kind.tensors
        if is_projection(tensor)
    ]
    return float(WEIGHT_BYTES * max(sizes, default=0))


def tied_copy(instance: Instance, pp: int, schedule: str = "1f1b") -> bool:
    """Whether the last stage holds a second copy of the embedding, tied or looked up by (M10) (Megatron language_module.py); a
    folded pipeline ends on the stage where it starts."""
    return (instance.model.tied or instance.workload.mtp_layers > 0) and pp > 1 and schedule not in FOLDED
