"""What one rank holds and what it communicates in one training step of PyTorch, counted call by call.

`tests/torch` runs the step under torch 2.13 and asserts that both agree to the byte. File names are torch's own, under
torch/distributed unless said otherwise. With b the micro-batch, s the sequence length, h the hidden size, m the
micro-batches, w the bytes of an activation, and t, c, p, e the tensor-, context-, pipeline- and expert-parallel degrees;
the size of a call is the whole tensor, S in the convention of `formulations.collectives`:

(Q1) Tensor parallelism leaves a rank 1/t of the rows of a column-parallel, vocabulary or key/value matrix and of the
     columns of a row-parallel one; everything else whole (tensor/parallel/style.py). Expert parallelism leaves it 1/e of
     the experts, stacked (Lepikhin et al., arXiv 2006.16668, section 3.2).
(Q2) FSDP2 splits the first dimension, n rows, over the d = c dp / dp_replicate ranks that share one copy, in chunks of
     ceil(n/d): rank i holds max(0, min(ceil(n/d), n - i ceil(n/d))) rows, and what is gathered or scattered is padded to
     d ceil(n/d) rows (fsdp/_fully_shard/_fsdp_param.py, _fsdp_common.py `_get_dim0_padded_size`). Experts are split
     over the dp / e ranks with the same experts. A group of one rank makes no calls.
(Q3) A group is what one call to `fully_shard` leaves: every layer, its experts apart, and the root (embedding, final
     norm, head). It gathers before a pass that finds it sharded. Under ZeRO-3 (Rajbhandari et al., arXiv 1910.02054,
     section 5) layers are sharded again after every forward pass, under ZeRO-2 and at the root not; all are after every
     backward pass (fsdp/_fully_shard/_fsdp_state.py `_lazy_init`, _fsdp_param_group.py `post_backward`), but in a
     pipeline after the last only (pipelining/stage.py `backward_maybe_with_nosync`). So a layer gathers 2 m times under
     ZeRO-3 and m under ZeRO-2 without a pipeline.
(Q4) It scatters its gradients after each backward pass, or after the last where asked to
     (`set_requires_gradient_sync`), always the latter in a pipeline; with replicas each scattered shard is all-reduced
     among them at once (_fsdp_collectives.py `foreach_reduce`).
(Q5) DDP all-reduces gradients in buckets: filled in the order in which gradients appear, last layer first, closed by
     the tensor that reaches the cap, 1 MiB for the first and 25 MiB for others
     (torch/csrc/distributed/c10d/reducer.cpp `compute_bucket_assignment_by_size`; torch/nn/parallel/distributed.py);
     one cap for all where the user sets one. ZeRO-1 adds one broadcast for every tensor, from the rank that updated it
     (optim/zero_redundancy_optimizer.py `_broadcast_params_from_rank`). Inside a layer the order is that of
     `LayerKind.tensors`, backwards.
(Q6) Tensor parallelism moves w b s h: with sequence parallelism one all-gather and one reduce-scatter per mixer and
     feed-forward part in forward and again in backward, one of each for the embedding and one of each for the head;
     without it, one all-reduce per part and direction, one for the embedding (forward), one for the head (backward)
     (Korthikanti et al., arXiv 2205.05198, section 4.2; tensor/parallel/style.py).
(Q7) The loss over a vocabulary that stays split all-reduces the maximum and the sum of exponentials of every token, in
     fp32, and the label's log-probability, in w bytes, all forward (tensor/parallel/loss.py `_log_softmax`,
     `_nll_loss_forward`; Shoeybi et al., arXiv 1909.08053, section 3).
(Q8) Under sequence parallelism a norm sees 1/t of the tokens, so its gradient is a partial sum. FSDP2 all-reduces it
     before it scatters it, in the precision of the weights, or in that of the scatter where several micro-batches were
     added up first (_fsdp_param.py `_get_grad_inner_tensor`, `to_accumulated_grad_if_needed`). Without FSDP2 it stays
     partial, and DTensor all-reduces it each time that it is read: AdamW reads it three times (torch/optim/adam.py: one
     `lerp`, one `addcmul` with two operands), SGD with momentum once, clipping once more.
(Q9) Context parallelism passes keys and values, w b s/c (k + v) with k and v the widths over all key/value heads,
     around or at once: "allgather" gathers them in forward and again in backward, "alltoall" sends them c - 1 times in
     each. Their gradients go round in fp32, c times, home included (tensor/experimental/_context_parallel/_attention.py
     `_templated_ring_attention`, `_templated_ring_attention_backward`; Liu et al., arXiv 2310.01889).
(Q10) A pipeline stage sends w b s h to the next stage and back to the one before, m times each
     (Narayanan et al., arXiv 2104.04473, section 2.2; pipelining/stage.py `get_fwd_send_ops`, `get_bwd_send_ops`).
(Q11) A layer with experts exchanges its tokens four times, dispatch and combine, forward and backward: with top-k
     routing a rank holds w b s k h each time (Lepikhin et al., arXiv 2006.16668, section 3.2). Before, it exchanges how
     many tokens go to each expert, 8 bytes an expert (torchtitan distributed/expert_parallel.py `_token_dispatch`). With
     uneven routing what a rank receives differs, and so what it holds in two of the four; the sum over ranks does not.
(Q12) Clipping by the global norm all-reduces the stacked norms, 4 bytes per tensor of the rank, once over each axis
     that splits a gradient (torch/nn/utils/clip_grad.py `_get_total_norm`; tensor/_ops/_math_ops.py `_NormPartial`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from shardwise.data.model import Attention, LayerKind, Mlp, Moe
from shardwise.formulations.layer_costs import ACTIVATION_BYTES
from shardwise.formulations.memory import GRADIENT_BYTES, WEIGHT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardwise.data.model import Model, Tensor
    from shardwise.data.plan import Degrees
    from shardwise.data.workload import Training

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv", "broadcast"]
Axis = Literal["dp", "tp", "cp", "pp", "ep"]
Shape = tuple[int, ...]

FP32_BYTES = 4
COUNT_BYTES = 8
FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
GRADIENT_READS = {"adamw": 3, "sgd": 1}
"""(Q8) How often a step of the optimizer reads a gradient."""


@dataclass(frozen=True, slots=True, order=True)
class Call:
    """`calls` collectives of one kind along one axis in a step, and the bytes of their whole tensors together."""

    op: Op
    axis: Axis
    calls: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a training script decides and degrees do not say.

    held_bytes, weight_bytes, gradient_bytes, activation_bytes
        Of one value: a parameter at rest, a parameter as gathered for use, a gradient as reduced, an activation.
    sync
        Whether gradients are reduced after every micro-batch or after the last.
    rotate
        How context parallelism passes keys and values on.
    bucket_bytes
        One cap for all buckets of DDP, or its defaults.
    clip
        Whether gradients are clipped by their global norm.
    """

    held_bytes: int = FP32_BYTES
    weight_bytes: int = WEIGHT_BYTES
    gradient_bytes: int = GRADIENT_BYTES
    activation_bytes: int = ACTIVATION_BYTES
    sync: Literal["every", "last"] = "every"
    rotate: Literal["allgather", "alltoall"] = "allgather"
    bucket_bytes: int | None = None
    clip: bool = False


@dataclass(frozen=True, slots=True)
class Rank:
    """Where a rank stands: its pipeline stage, and its place among the ranks that share one copy of the parameters."""

    stage: int = 0
    shard: int = 0


@dataclass(frozen=True, slots=True)
class _Group:
    """(Q3) Parameters that are gathered together, by their shapes on one rank before FSDP2, over `ranks` ranks."""

    shapes: tuple[Shape, ...]
    ranks: int
    partial_norms: tuple[Shape, ...]
    root: bool

    @property
    def padded(self) -> int:
        """(Q2)."""
        return sum(_chunk(shape, self.ranks) * self.ranks * prod(shape[1:]) for shape in self.shapes)


def parameter_bytes(
    model: Model,
    degrees: Degrees,
    *,
    scheme: Scheme | None = None,
    stages: tuple[int, ...] | None = None,
    rank: Rank | None = None,
) -> int:
    """(Q1), (Q2) Parameter bytes at rest on one rank; `stages` are the layers of every pipeline stage."""
    scheme, rank = scheme or Scheme(), rank or Rank()
    groups = _groups(model, degrees, _stages(model, degrees, stages), rank.stage)
    if degrees.zero < 2:
        return scheme.held_bytes * sum(prod(shape) for group in groups for shape in group.shapes)
    # The ranks with the same experts are the first to differ in `shard`: that of a rank among them is shard // ep.
    return scheme.held_bytes * sum(
        _rows(shape, group.ranks, rank.shard * group.ranks // (degrees.cp * degrees.dp_shard)) * prod(shape[1:])
        for group in groups
        for shape in group.shapes
    )


def step_calls(
    model: Model,
    workload: Training,
    degrees: Degrees,
    micro_batches: int,
    *,
    scheme: Scheme | None = None,
    stages: tuple[int, ...] | None = None,
    rank: Rank | None = None,
) -> tuple[Call, ...]:
    """(Q3)-(Q12) The collective calls of one training step on one rank, one entry per kind and axis.

    `degrees.zero` says which framework class shares the parameters: 3 and 2 FSDP2, 1 DDP with a sharded optimizer, 0
    DDP.

    Raises
    ------
    ValueError
        Where the parts do not fit each other, or where nothing has been counted against torch.
    """
    scheme, rank = scheme or Scheme(), rank or Rank()
    stages = _stages(model, degrees, stages)
    _check(model, workload, degrees, micro_batches, scheme)
    groups = _groups(model, degrees, stages, rank.stage)
    first = sum(stages[: rank.stage])
    layers = model.layers[first : first + stages[rank.stage]]
    micro = _MicroBatch(model, workload, degrees, scheme)
    calls = [
        *(
            _replicated(_in_order(model, degrees), degrees, micro_batches, scheme)
            if degrees.zero < 2
            else _fully_sharded(groups, degrees, micro_batches, scheme, rank.stage)
        ),
        *(_times(micro_batches, micro.tensor_parallel(layers)) if degrees.tp > 1 else ()),
        *(_times(micro_batches, micro.context_parallel(layers)) if degrees.cp > 1 else ()),
        *(_times(micro_batches, micro.pipeline(rank.stage)) if degrees.pp > 1 else ()),
        *(_times(micro_batches, micro.expert_parallel(layers)) if degrees.ep > 1 else ()),
        *_norm_gradients(groups, workload, degrees, micro_batches, scheme),
        *(_clipping(groups, degrees) if scheme.clip else ()),
    ]
    count: Counter[tuple[Op, Axis]] = Counter()
    size: Counter[tuple[Op, Axis]] = Counter()
    for call in calls:
        count[call.op, call.axis] += call.calls
        size[call.op, call.axis] += call.bytes
    return tuple(sorted(Call(op, axis, n, size[op, axis]) for (op, axis), n in count.items() if n))


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """(Q6), (Q7), (Q9)-(Q11): what the passes of one micro-batch communicate."""

    model: Model
    workload: Training
    degrees: Degrees
    scheme: Scheme

    @property
    def tokens(self) -> int:
        return self.degrees.micro_batch * self.workload.seq_len // self.degrees.cp

    @property
    def activation(self) -> int:
        """w b s h, or one rank's part of it under context parallelism."""
        return self.scheme.activation_bytes * self.tokens * self.model.hidden

    def tensor_parallel(self, layers: tuple[LayerKind, ...]) -> Iterator[Call]:
        """(Q6), (Q7)."""
        parts = sum((kind.mixer is not None) + (kind.ffn is not None) for kind in layers)
        moved = 2 * parts + 2
        ops: tuple[Op, ...] = ("all_gather", "reduce_scatter") if self.degrees.sequence_parallel else ("all_reduce",)
        for op in ops:
            yield Call(op, "tp", moved, moved * self.activation)
        yield Call("all_reduce", "tp", 3, self.tokens * (2 * FP32_BYTES + self.scheme.activation_bytes))

    def context_parallel(self, layers: tuple[LayerKind, ...]) -> Iterator[Call]:
        """(Q9)."""
        ways = self.degrees.cp
        for kind in layers:
            mixer = kind.mixer
            assert isinstance(mixer, Attention)
            values = self.tokens * mixer.kv_heads * (mixer.head_dim + mixer.v_head_dim)
            size = self.scheme.activation_bytes * values
            if self.scheme.rotate == "allgather":
                yield Call("all_gather", "cp", 2, 2 * ways * size)
            else:
                yield Call("sendrecv", "cp", 2 * (ways - 1), 2 * (ways - 1) * size)
            yield Call("sendrecv", "cp", ways, ways * FP32_BYTES * values)

    def pipeline(self, stage: int) -> Iterator[Call]:
        """(Q10)."""
        neighbours = (stage > 0) + (stage + 1 < self.degrees.pp)
        yield Call("sendrecv", "pp", neighbours, neighbours * self.activation)

    def expert_parallel(self, layers: tuple[LayerKind, ...]) -> Iterator[Call]:
        """(Q11)."""
        for kind in layers:
            if isinstance(kind.ffn, Moe):
                yield Call("alltoall", "ep", 4, 4 * kind.ffn.top_k * self.activation)
                yield Call("alltoall", "ep", 1, COUNT_BYTES * kind.ffn.experts)


def _times(count: int, calls: Iterable[Call]) -> Iterator[Call]:
    return (Call(call.op, call.axis, count * call.calls, count * call.bytes) for call in calls)


def _fully_sharded(
    groups: tuple[_Group, ...], degrees: Degrees, micro_batches: int, scheme: Scheme, stage: int
) -> Iterator[Call]:
    """(Q3), (Q4)."""
    reduced = 1 if degrees.pp > 1 or scheme.sync == "last" else micro_batches
    for group in groups:
        if group.ranks > 1:
            gathered = _gathers(degrees, micro_batches, stage, kept=group.root or degrees.zero == 2)
            yield Call("all_gather", "dp", gathered, gathered * scheme.weight_bytes * group.padded)
            yield Call("reduce_scatter", "dp", reduced, reduced * scheme.gradient_bytes * group.padded)
            if degrees.dp_replicate > 1:
                shard = scheme.gradient_bytes * group.padded // group.ranks
                yield Call("all_reduce", "dp", reduced, reduced * shard)


def _gathers(degrees: Degrees, micro_batches: int, stage: int, *, kept: bool) -> int:
    """(Q3) How often a group is found sharded; `kept` ones stay gathered after a forward pass."""
    gathered, times, backward = False, 0, 0
    for forward in _passes(degrees.pp, micro_batches, stage):
        times += not gathered
        if forward:
            gathered = kept
        else:
            backward += 1
            gathered = degrees.pp > 1 and backward < micro_batches
    return times


def _passes(pp: int, micro_batches: int, stage: int) -> Iterator[bool]:
    """The passes of a 1F1B stage, forward or not (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    ahead = min(pp - stage, micro_batches)
    yield from (True,) * ahead
    for _ in range(micro_batches - ahead):
        yield False
        yield True
    yield from (False,) * ahead


def _replicated(shapes: tuple[Shape, ...], degrees: Degrees, micro_batches: int, scheme: Scheme) -> Iterator[Call]:
    """(Q5) of tensors in the order of the network."""
    if degrees.dp == 1:
        return
    cap = scheme.bucket_bytes or FIRST_BUCKET_BYTES
    filled, reduced = 0, 1 if scheme.sync == "last" else micro_batches
    for shape in reversed(shapes):
        filled += scheme.gradient_bytes * prod(shape)
        if filled >= cap:
            yield Call("all_reduce", "dp", reduced, reduced * filled)
            filled, cap = 0, scheme.bucket_bytes or BUCKET_BYTES
    if filled:
        yield Call("all_reduce", "dp", reduced, reduced * filled)
    if degrees.zero == 1:
        yield Call("broadcast", "dp", len(shapes), scheme.held_bytes * sum(map(prod, shapes)))


def _norm_gradients(
    groups: tuple[_Group, ...], workload: Training, degrees: Degrees, micro_batches: int, scheme: Scheme
) -> Iterator[Call]:
    """(Q8)."""
    if degrees.cp * degrees.dp == 1:
        times, value = GRADIENT_READS[workload.optimizer] + scheme.clip, scheme.held_bytes
    elif scheme.sync == "last" and micro_batches > 1:
        times, value = 1, scheme.gradient_bytes
    else:
        times, value = micro_batches, scheme.weight_bytes
    for group in groups:
        for shape in group.partial_norms:
            yield Call("all_reduce", "tp", times, times * value * prod(shape))


def _clipping(groups: tuple[_Group, ...], degrees: Degrees) -> Iterator[Call]:
    """(Q12) DDP holds whole gradients, and so has nothing to add up."""
    size = FP32_BYTES * len(_shapes(groups))
    if degrees.zero >= 2 and degrees.cp * degrees.dp_shard > 1:
        yield Call("all_reduce", "dp", 1, size)
    if degrees.tp > 1:
        yield Call("all_reduce", "tp", 1, size)


def _groups(model: Model, degrees: Degrees, stages: tuple[int, ...], stage: int) -> tuple[_Group, ...]:
    """(Q3) The groups of one stage: the root, and for every layer what is not experts and what is."""
    shared = degrees.cp * degrees.dp_shard
    first = sum(stages[:stage])

    def group(tensors: Iterable[Tensor], ranks: int, *, root: bool = False) -> _Group:
        listed = tuple(tensors)
        norms = tuple(tensor.shape for tensor in listed if _is_norm(tensor, model.hidden))
        partial = norms if degrees.tp > 1 and degrees.sequence_parallel else ()
        return _Group(tuple(_local_shape(tensor, degrees) for tensor in listed), ranks, partial, root)

    ends = (model.embedding if stage == 0 else ()) + (model.head if stage + 1 == len(stages) else ())
    groups = [group(ends, shared, root=True)]
    for kind in model.layers[first : first + stages[stage]]:
        groups.append(group((tensor for tensor in kind.tensors if not tensor.expert), shared))
        groups.append(group((tensor for tensor in kind.tensors if tensor.expert), degrees.expert_dp))
    return tuple(one for one in groups if one.shapes)


def _in_order(model: Model, degrees: Degrees) -> tuple[Shape, ...]:
    """The tensors of a whole model in the order of the network."""
    layers = (tensor for kind in model.layers for tensor in kind.tensors)
    return tuple(_local_shape(tensor, degrees) for tensor in (*model.embedding, *layers, *model.head))


def _shapes(groups: tuple[_Group, ...]) -> tuple[Shape, ...]:
    return tuple(shape for group in groups for shape in group.shapes)


def _local_shape(tensor: Tensor, degrees: Degrees) -> Shape:
    """(Q1)."""
    shape = list(tensor.shape)
    if tensor.shard != "none":
        split = 1 if tensor.shard == "row" else 0
        if shape[split] % degrees.tp:
            raise ValueError(f"tp={degrees.tp} does not divide dimension {split} of {tensor.name} {tensor.shape}")
        shape[split] //= degrees.tp
    if not tensor.expert:
        return tuple(shape)
    if tensor.count % (degrees.ep * degrees.expert_dp):
        raise ValueError(
            f"ep={degrees.ep} x {degrees.expert_dp} ranks with the same experts do not divide {tensor.count} experts"
        )
    return (tensor.count // degrees.ep, *shape)


def _chunk(shape: Shape, ranks: int) -> int:
    """(Q2)."""
    return -(-shape[0] // ranks)


def _rows(shape: Shape, ranks: int, shard: int) -> int:
    """(Q2)."""
    chunk = _chunk(shape, ranks)
    return max(0, min(chunk, shape[0] - shard * chunk))


def _stages(model: Model, degrees: Degrees, stages: tuple[int, ...] | None) -> tuple[int, ...]:
    if stages is None and degrees.pp == 1:
        stages = (len(model.layers),)
    if stages is None or len(stages) != degrees.pp or sum(stages) != len(model.layers):
        raise ValueError(f"stages={stages} must be pp={degrees.pp} numbers that add up to {len(model.layers)} layers")
    return stages


def _check(model: Model, workload: Training, degrees: Degrees, micro_batches: int, scheme: Scheme) -> None:
    """Refuse what does not fit, and what no run of torch has confirmed."""
    tp, cp, pp, ep = degrees.tp, degrees.cp, degrees.pp, degrees.ep
    faults = []
    if workload.global_batch != degrees.dp * degrees.micro_batch * micro_batches:
        faults.append(
            f"global_batch={workload.global_batch} is not dp={degrees.dp} x micro_batch={degrees.micro_batch} x "
            f"micro_batches={micro_batches}"
        )
    if workload.seq_len % cp or (degrees.sequence_parallel and workload.seq_len % tp):
        faults.append(f"seq_len={workload.seq_len} is not split evenly by cp={cp}, tp={tp}")
    experts = any(isinstance(kind.ffn, Moe) for kind in model.layers)
    uncounted = {
        "more than one of tp, cp, pp and ep": sum(ways > 1 for ways in (tp, cp, pp, ep)) > 1,
        "vpp above 1": degrees.vpp > 1,
        "adapters (lora_rank)": workload.frozen,
        "multi-token prediction (mtp_layers)": workload.mtp_layers > 0,
        "a capacity of experts (expert_capacity)": workload.expert_capacity is not None,
        "DDP (zero=0 or 1) with another axis or with replicas": degrees.zero < 2
        and degrees.dp > 1
        and (degrees.devices > degrees.dp or ep > 1 or degrees.dp_replicate > 1),
        "zero=0 or 1 with cp": degrees.zero < 2 and cp > 1,
        "replicas (dp_replicate) with another axis": degrees.dp_replicate > 1 and max(tp, cp, pp, ep) > 1,
        "experts without ep, or shared experts": experts and (ep == 1 or not all(map(_routed_only, model.layers))),
        "ep without experts": ep > 1 and not experts,
        "tp or pp of tied embeddings": model.tied and max(tp, pp) > 1,
        "tp of anything but attention, dense feed-forward parts and norms": tp > 1 and not _plain(model),
        "cp of anything but attention": cp > 1 and not all(map(_attends, model.layers)),
        # clip_grad_norm_ refuses to add norms of different meshes, or of DTensors and plain tensors.
        "clipping over pp, ep, or tp without sequence parallelism": scheme.clip
        and (max(pp, ep) > 1 or (tp > 1 and not degrees.sequence_parallel)),
    }
    faults += [f"not counted yet: {what}" for what, there in uncounted.items() if there]
    if faults:
        raise ValueError("; ".join(faults))


def _attends(kind: LayerKind) -> bool:
    return isinstance(kind.mixer, Attention) and kind.mixer.latent is None


def _routed_only(kind: LayerKind) -> bool:
    return not isinstance(kind.ffn, Moe) or not kind.ffn.shared_intermediate


def _plain(model: Model) -> bool:
    """Matrices that split and norms of the hidden size, and nothing else: no biases, no norms of heads, no positions."""
    tensors = (*model.embedding, *model.head, *(tensor for kind in model.kinds for tensor in kind.tensors))
    return all(_attends(kind) and isinstance(kind.ffn, Mlp) for kind in model.kinds) and all(
        tensor.shard != "none" if len(tensor.shape) > 1 else _is_norm(tensor, model.hidden) for tensor in tensors
    )


def _is_norm(tensor: Tensor, hidden: int) -> bool:
    return "norm" in tensor.name and tensor.shape == (hidden,)
