"""Terms of the time of one layer, of the embedding and of the head, on one device for one micro-batch.

Nothing here but (L15) depends on a software profile: `layer_time` joins the terms with one. With `s` the sequence length, `b` the
micro-batch, `c` the context-parallel degree, `x = s b / c` tokens, `h` the hidden size, `t` the tensor-parallel degree,
`e` the expert-parallel degree and GEMM(M, N, K) the measured-curve time of `kernels.gemm_time_s`:

(L1) a weight matrix K -> N costs GEMM(x, N, K) forward, GEMM(x, K, N) for the data gradient and GEMM(N, K, x) for the
     weight gradient (Narayanan et al., arXiv 2104.04473, appendix A counts the same three products), which adds to an
     fp32 accumulator: 6 bytes a parameter more than its GEMM writes. Routed experts are grouped GEMMs over E / e experts
     and the x k tokens that balanced routing sends to a rank.
(L2) softmax attention costs `kernels.attention_time_s` over heads / t heads; causal work is counted as executed, and
     context parallelism divides it evenly (zigzag order, Liu et al., arXiv 2310.01889; Megatron context_parallel).
(L3) a recurrent mixer (Mamba, linear attention) runs in chunks of Q tokens: 2 x H P (2 N + Q) products per token
     direction, H heads of width P and state N (Dao & Gu, arXiv 2405.21060, section 6; chunk 256), and its streams
     move through memory once per pass.
(L4) element-wise work (norms, residuals, rotary, activations) moves its bytes at the achieved memory bandwidth;
     backward moves twice the bytes of forward. A norm that is not one fused kernel passes its input through fp32
     copies: 17 values read or written for each, not 2 (x.float(), square, mean, scale, cast, weight).
(L5) tensor parallelism adds, per row-parallel output, one all-reduce of 2 x h bytes forward and one backward; with
     sequence parallelism an all-gather and a reduce-scatter each way instead (Korthikanti et al., arXiv 2205.05198,
     section 4.2.2); norms and residuals then work on x / t tokens.
(L6) context parallelism by a ring sends what gathers keys and values, 2 bytes each over the group, forward, in c - 1 turns
     that attention hides in part; backward sends them again and reduce-scatters their gradients (arXiv 2310.01889, section
     3). By an all-gather attention waits for the same collectives (Llama Team, arXiv 2407.21783, section 3.3.2), and puts
     what is gathered in order: read and written. Ulysses (arXiv 2309.14509, section 3.1) waits for an all-to-all of
     queries, keys and values and one of outputs, 2 x (q + k + v + o) / t bytes on a rank, each way, and packs what it
     sends. Fewer key/value heads than c are copied for it. A hierarchy (Fang & Zhao, arXiv 2405.07719) does
     that over a of the c ranks, and is a ring of c / a groups for the a-th part of the heads that a rank then has, each rank
     with its own c / a others. Recurrent mixers pass their states on in any case.
(L7) expert parallelism sends each routed token out and back: two all-to-alls of 2 x k h / t bytes each way (Lepikhin et
     al., arXiv 2006.16668); with e = 1 tokens are gathered over t as in (L5). All
     wait for the busiest rank, which has `expert_imbalance` times the mean to exchange and to compute.
(L8) the head is the matrix h -> V / t with V padded to a multiple of 128 t (Megatron vocab_utils), and a cross entropy
     in fp32: 28 bytes a logit forward (cast, maximum, shift, exponentials, sum, division), 14 backward.
(L9) the host issues one launch per kernel and collective; the backward pass issues twice as many.
(L10) under LoRA a frozen matrix has GEMM(x, N, K) forward and GEMM(x, K, N) for the data gradient, no weight gradient and
     no accumulation; the embedding has no backward pass. An adapted one has B (A x) beside it (Hu et al., arXiv
     2106.09685, section 4.1), two trained matrices K -> r and r -> N by (L1) in 16 bits, a scaling and an addition that
     touch 5 N values a token by (L4), and four launches, as PEFT and torchtune run it; no dropout. A fused projection
     has one adapter for each matrix that it joins, a recurrent mixer one for each of its two. What adapters of
     row-parallel matrices add is part of the sum of (L5); that of the gradients of the factors that (M8) holds whole over
     t ranks, once a step, is not counted. The first layer's data gradient is.
(L11) matrices in four bits are unpacked ahead of each GEMM of both passes (Dettmers et al., arXiv 2305.14314, section 3):
     read as they are held, written in 16 bits, three launches (constants, their offset, weights).
(L12) in packed sequences a query meets keys of its own document only, and in chunked attention those of its chunk of it.
     With shares p_l of documents, or chunks, of length l the keys(S) of (K3) become  sum p_l l keys(l) / sum p_l l,  for
     causal attention (E[l^2] / E[l] + 1) / 2. Kernels that compute the whole S x S matrix and mask it (K4) gain nothing.
     Context parallelism is taken to split each document evenly, as Megatron's thd format does (Transformer Engine
     attention); where it splits the sequence instead, the busiest rank has up to c times the mean, so that the core takes
     at most c times as long as (L2) says.
(L13) a module of multi-token prediction (DeepSeek-AI, arXiv 2412.19437, section 2.2; Megatron
     core/transformer/multi_token_prediction.py) runs behind the last layer, beside the head: a lookup of the next tokens,
     two norms, the matrix 2h -> h, a layer like the last one, a norm, and the head and its loss again. It is counted as
     part of the head, with three more pairs of collectives by (L5): of the lookup, of 2h -> h and of the head.
(L14) with a capacity F an expert takes at most  C = ceil(F y k / E)  of the y k copies that a rank routes, y its tokens
     (x / t under sequence parallelism), and drops the others (Lepikhin et al., arXiv 2006.16668, section 2.2; Megatron
     core/transformer/moe/moe_utils.py, `get_capacity`). The busiest rank of (L7) then has at most E C / (y k) times the
     mean, and exactly that where every expert is padded to C, spread or not.
(L15) where matrix products and the collectives of (L5) beside them overlap, in sequence parallelism alone, each collective
     goes in t pieces beside t pieces of its product (Wang et al., ASPLOS 2023, "Overlap communication with dependent
     computation via decomposition", section 3; PyTorch `_micro_pipeline_tp`; Megatron --tp-comm-overlap). Of a collective C
     beside a product G of pieces all but  (1 - 1 / t) min(C, G)  has to show: the first piece, and what G is too short for.
     Half of that is counted as hidden (OVERLAPPED_SHARE): torchtitan's three pairs of runs of an 8B model with tp = 8, with
     and without, hid 0.4 to 0.7 of it. G is t times a piece, and what it takes longer than the product in one is added, with
     2 t - 3 launches. The gather is beside the column-parallel product, the scatter beside the row-parallel one, and in the
     backward pass beside their data gradients. Products of latent attention ahead of its heads, routed experts, the
     embedding and the head have none. C and G are those of the profile (J1). In a profile that was fitted to runs with
     overlap its `tp_comm_exposed` says what shows, and without overlap all of it does.
(L16) what a module of selective recompute repeats is its forward pass: norms that are separate by (L4); the projections
     of latent attention from its low ranks, and rotary; the activation between the matrices of experts; the MLP with its
     norm, the shared experts or all experts, each with the collectives of (L5) and (L7). A gather of tokens ahead of the
     queries' projection is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil
from operator import add, attrgetter
from typing import TYPE_CHECKING, Literal

from shardwise.data.adapters import adapts
from shardwise.data.cluster import Link
from shardwise.data.model import Attention, LayerKind, LinearAttention, Mamba, Mlp, Moe
from shardwise.data.recompute import has_module
from shardwise.data.workload import FROZEN_BYTES
from shardwise.formulations.collectives import fastest_time_s, split_spans
from shardwise.formulations.kernels import (
    attention_time_s,
    gemm_time_s,
    grouped_gemm_time_s,
    keys_per_query,
    memory_bound_time_s,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.data.instance import Instance
    from shardwise.data.plan import CpCommType, Degrees
    from shardwise.data.workload import Training

ACTIVATION_BYTES = 2
VOCAB_MULTIPLE = 128
SCAN_CHUNK = 256
BACKWARD_TRAFFIC = 2.0
ACCUMULATED_BYTES = 6
NORM_VALUES = {True: 2, False: 17}
RESIDUAL_VALUES = 3
LOSS_BYTES = (28, 14)
ATTENTION_LAUNCHES = {"flash": 1, "flash2": 1, "flash1": 1, "unfused": 4, "eager": 9}
NORM_LAUNCHES = {True: 1, False: 7}
FUSED_BLOCK, FUSED_LONGEST = 4, 4096
MIXER_LAUNCHES = 5
LATENT_LAUNCHES = 10
MLP_LAUNCHES = 4
MOE_LAUNCHES = 60
RECURRENT_LAUNCHES = 11
ADAPTER_VALUES, ADAPTER_LAUNCHES = 5, 4
COPIED_VALUES = 2
GATHER_LAUNCHES, ULYSSES_LAUNCHES = 2, 4
UNPACK_LAUNCHES = 3
REMEMBERED = 2**14
"""Parts of layers that are kept."""
OVERLAPPED_SHARE = 0.5

Spans = tuple[tuple[int, Link], ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """What the time of a layer depends on besides where its groups lie."""

    tp: int
    micro_batch: int
    sequence_parallel: bool
    cp: int = 1
    ep: int = 1
    etp: int = 1
    cp_comm_type: CpCommType = "p2p"
    cp_a2a: int = 1

    @property
    def ring(self) -> Sharding:
        """The same by a ring."""
        return replace(self, cp_comm_type="p2p", cp_a2a=1)

    @property
    def exchanged(self) -> int:
        """(L6) Neighbouring ranks of context parallelism that exchange sequence for heads."""
        return self.cp if self.cp_comm_type == "a2a" else self.cp_a2a

    @property
    def spread(self) -> bool:
        """Whether routed experts have groups of their own, by (L7), and are not split by tp like everything else."""
        return self.ep > 1 or self.etp != self.tp


def sharding_of(degrees: Degrees) -> Sharding:
    """What the layers see of the degrees."""
    d = degrees
    return Sharding(d.tp, d.micro_batch, d.sequence_parallel, d.cp, d.ep, d.etp, d.cp_comm_type, d.cp_a2a)


@dataclass(frozen=True, slots=True)
class Groups:
    """Where the groups of a layer lie, each by its alternatives: one where a placement is given, all that the cluster
    has for a bound, of which every collective takes the fastest."""

    tp: tuple[Spans, ...]
    cp: tuple[Spans, ...] = ()
    ep: tuple[Spans, ...] = ()
    etp: tuple[Spans, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerTerms:
    """Seconds per micro-batch, forward and backward, by what they wait for.

    gemm, core, traffic
        Matrix products; attention core or scan; element-wise work. `core` is what selective recompute repeats.
    tensor, context, expert
        Collectives of the axis in isolation, before any overlap.
    exchange
        Those of context parallelism that attention waits for (L6), apart from `context`.
    launches, collectives
        Kernels, and collectives of tensor parallelism, of the forward pass.
    gemm_frozen
        The part of `gemm_backward` that comes without a weight gradient (L10).
    """

    gemm_forward: float = 0.0
    gemm_backward: float = 0.0
    core_forward: float = 0.0
    core_backward: float = 0.0
    traffic_forward: float = 0.0
    traffic_backward: float = 0.0
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0
    context_forward: float = 0.0
    context_backward: float = 0.0
    expert_forward: float = 0.0
    expert_backward: float = 0.0
    launches: float = 0.0
    collectives: float = 0.0
    gemm_frozen: float = 0.0
    exchange_forward: float = 0.0
    exchange_backward: float = 0.0

    def __add__(self, other: LayerTerms) -> LayerTerms:
        return LayerTerms(*map(add, _values(self), _values(other)))


TERMS = tuple(field.name for field in fields(LayerTerms))
_values = attrgetter(*TERMS)


@dataclass(frozen=True, slots=True)
class ShardTerms:
    """Terms of every layer kind (in the order of `Model.kinds`), the embedding and the head."""

    kinds: tuple[LayerTerms, ...]
    embedding: LayerTerms
    head: LayerTerms


def padded_vocab(vocab: int, tp: int) -> int:
    """(L8) Vocabulary rows after padding to a multiple of 128 tp."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab // multiple) * multiple


def row_outputs(kind: LayerKind, spread: bool) -> int:
    """(L5) Row-parallel outputs: one per mixer and feed-forward part; routed experts may go by (L7) instead."""
    routed = isinstance(kind.ffn, Moe) and spread and not kind.ffn.shared_intermediate
    return (kind.mixer is not None) + (kind.ffn is not None and not routed)


def shard_terms(instance: Instance, sharding: Sharding, groups: Groups, compute: ShardTerms) -> ShardTerms:
    """Terms of all layer kinds, embedding and head; `compute` has those of `compute_terms`."""
    common = common_terms(instance, sharding, groups, compute)
    return with_context(instance, common, context_by_kind(instance, sharding, groups))


def common_terms(instance: Instance, sharding: Sharding, groups: Groups, compute: ShardTerms) -> ShardTerms:
    """Without (L6): the same for every algorithm of context parallelism."""
    once = _tensor_parallel_time_s(instance, unspread(sharding), groups.tp)
    turns = _collectives(sharding)
    waits = tuple(_communication(instance, kind, sharding, groups, once) for kind in instance.model.kinds)
    kinds = tuple(map(add, compute.kinds, waits))
    end = LayerTerms(tensor_forward=once, tensor_backward=once, launches=turns, collectives=turns)
    start = replace(end, tensor_backward=0.0) if instance.workload.frozen else end
    head = compute.head + end
    for _ in range(instance.workload.mtp_layers):
        head += waits[instance.model.kind_indices[-1]] + end + end + end
    return ShardTerms(kinds, compute.embedding + start, head)


def context_by_kind(instance: Instance, sharding: Sharding, groups: Groups) -> tuple[LayerTerms, ...]:
    """(L6) of one layer of each kind."""
    return tuple(
        context_terms(instance, kind, sharding, groups) if sharding.cp > 1 and kind.mixer is not None else LayerTerms()
        for kind in instance.model.kinds
    )


def with_context(instance: Instance, common: ShardTerms, contexts: tuple[LayerTerms, ...]) -> ShardTerms:
    """`common_terms` and those of `context_by_kind`."""
    head = common.head
    for _ in range(instance.workload.mtp_layers):
        head += contexts[instance.model.kind_indices[-1]]
    return ShardTerms(tuple(map(add, common.kinds, contexts)), common.embedding, head)


def _communication(instance: Instance, kind: LayerKind, sharding: Sharding, groups: Groups, once: float) -> LayerTerms:
    """(L5), (L7) of one layer; `once` is the communication of one row-parallel output."""
    outputs, turns = row_outputs(kind, sharding.spread), _collectives(sharding)
    total = LayerTerms(
        tensor_forward=outputs * once,
        tensor_backward=outputs * once,
        launches=outputs * turns,
        collectives=outputs * turns,
    )
    if (
        sharding.tp > 1
        and sharding.sequence_parallel
        and instance.workload.tp_overlap
        and not instance.profile.tp_overlap
    ):
        total += _overlap(instance, kind, sharding, groups)
    if sharding.spread and isinstance(kind.ffn, Moe):
        total += _expert_exchange(instance, kind.ffn, sharding, groups)
    return total


def module_terms(instance: Instance, kind: LayerKind, sharding: Sharding, groups: Groups, module: str) -> LayerTerms:
    """(L16) The forward pass of a module other than the attention core; nothing where the layer has none."""
    if not has_module(kind, module):
        return LayerTerms()
    tokens, hidden = _tokens(instance, sharding), instance.model.hidden
    local_tokens = tokens / sharding.tp if sharding.sequence_parallel else tokens
    fused = instance.workload.fused_norm
    norm = _traffic(instance, NORM_VALUES[fused] * local_tokens * hidden) + LayerTerms(launches=NORM_LAUNCHES[fused])
    mixer, ffn = kind.mixer, kind.ffn
    if module == "layernorm":
        latent = isinstance(mixer, Attention) and mixer.latent is not None
        return norm + norm if latent and isinstance(ffn, Moe) else norm
    if module == "mla_up_proj":
        assert isinstance(mixer, Attention)
        return _latent_up(instance, mixer, sharding, tokens)
    once, turns = _tensor_parallel_time_s(instance, unspread(sharding), groups.tp), _collectives(sharding)
    output = LayerTerms(tensor_forward=once, launches=turns, collectives=turns)
    if isinstance(ffn, Mlp):
        return (
            _mlp(instance, ffn.intermediate, ffn.gated, unspread(sharding)) + output + (norm if fused else LayerTerms())
        )
    assert isinstance(ffn, Moe)
    if module == "shared_experts":
        return _mlp(instance, ffn.shared_intermediate, ffn.gated, unspread(sharding)) + output
    if module == "moe_act":
        routed, width = _routed_tokens(instance, ffn, sharding, tokens)
        return _traffic(instance, (3 if ffn.gated else 2) * routed * width) + LayerTerms(launches=1)
    total = _moe(instance, ffn, sharding)
    if sharding.spread:
        total += _expert_exchange(instance, ffn, sharding, groups)
    return total + output if not sharding.spread or ffn.shared_intermediate else total


def compute_terms(instance: Instance, sharding: Sharding) -> ShardTerms:
    """(L1)-(L4), (L8), (L9) without communication, the same for every algorithm of context parallelism."""
    kinds = tuple(_layer(instance, kind, sharding) for kind in instance.model.kinds)
    own = unspread(sharding)
    head = _output(instance, own)
    for _ in range(instance.workload.mtp_layers):
        head += _prediction(instance, own) + kinds[instance.model.kind_indices[-1]] + _output(instance, own)
    return ShardTerms(kinds, _embedding(instance, own), head)


def unspread(sharding: Sharding) -> Sharding:
    """What everything but routed experts sees: much of a layer is the same for all their groups."""
    return replace(sharding, ep=1, etp=sharding.tp)


@lru_cache(maxsize=REMEMBERED)
def _tensor_parallel_time_s(instance: Instance, sharding: Sharding, places: tuple[Spans, ...]) -> float:
    """(L5) Communication of one row-parallel output, the same forward and backward."""
    if sharding.tp == 1:
        return 0.0
    size, ops = tensor_parallel_bytes(instance, sharding), ("all_gather", "reduce_scatter")
    once = sum(
        _fastest_s(instance, op, size, places) for op in (ops if sharding.sequence_parallel else ("all_reduce",))
    )
    shown = instance.profile.tp_comm_exposed
    if instance.profile.tp_overlap and instance.workload.tp_overlap is False and 0 < shown < 1:
        return once / shown  # (L15)
    return once


def _overlap(instance: Instance, kind: LayerKind, sharding: Sharding, groups: Groups) -> LayerTerms:
    """(L15) of one layer: what does not show of its collectives, and what the pieces of its products take longer."""
    profile, tp, accelerator = instance.profile, sharding.tp, instance.accelerator
    size, tokens = tensor_parallel_bytes(instance, sharding), _tokens(instance, sharding)
    gather, scatter = (_fastest_s(instance, op, size, groups.tp) for op in ("all_gather", "reduce_scatter"))
    total = LayerTerms()
    for column, n, k in _overlapped(instance, kind, tp):
        passes = []
        for collective, out, into in ((gather, n, k), (scatter, k, n)) if column else ((scatter, n, k), (gather, k, n)):
            whole = gemm_time_s(accelerator, tokens, out, into, instance.workload.peak)
            pieces = tp * gemm_time_s(accelerator, tokens / tp, out, into, instance.workload.peak)
            covered = min(profile.tp_comm_exposed * collective, profile.gemm * pieces)
            share = OVERLAPPED_SHARE * (1 - 1 / tp)
            hidden = share * covered / profile.tp_comm_exposed if profile.tp_comm_exposed else 0.0
            passes.append((max(pieces - whole, 0.0), hidden))
        (longer, hidden), (longer_back, hidden_back) = passes
        total += LayerTerms(
            gemm_forward=longer,
            gemm_backward=longer_back,
            gemm_frozen=longer_back,
            tensor_forward=-hidden,
            tensor_backward=-hidden_back,
            launches=2 * tp - 3,
        )
    return total


def _overlapped(instance: Instance, kind: LayerKind, tp: int) -> Iterator[tuple[bool, float, float]]:
    """(L15) Products k -> n on one device with a collective beside them: whether column-parallel, n, k."""
    hidden, mixer, ffn = instance.model.hidden, kind.mixer, kind.ffn
    if isinstance(mixer, Attention):
        heads, kv_heads = max(mixer.heads // tp, 1), max(mixer.kv_heads // tp, 1)
        if mixer.latent is None:
            yield True, heads * mixer.head_dim + kv_heads * (mixer.head_dim + mixer.v_head_dim), hidden
        yield False, hidden, heads * mixer.v_head_dim
    elif mixer is not None:
        inner, _, width = _recurrent_widths(mixer, tp)
        yield True, width, hidden
        yield False, hidden, inner
    wide, gated = 0, False
    if isinstance(ffn, Mlp):
        wide, gated = ffn.intermediate, ffn.gated
    elif ffn is not None:
        wide, gated = ffn.shared_intermediate, ffn.gated
    if wide:
        own = max(wide // tp, 1)
        yield True, own * (2 if gated else 1), hidden
        yield False, hidden, own


def _fastest_s(instance: Instance, op: str, size: float, alternatives: tuple[Spans, ...]) -> float:
    """The collective in the fastest of the places that its group may have."""
    return fastest_time_s(instance.accelerator, op, size, alternatives)


def tensor_parallel_bytes(instance: Instance, sharding: Sharding) -> float:
    """(L5) The tensor of one row-parallel output, whole."""
    return ACTIVATION_BYTES * _tokens(instance, sharding) * instance.model.hidden


def _collectives(sharding: Sharding) -> int:
    """Collective launches per row-parallel output."""
    if sharding.tp == 1:
        return 0
    return 2 if sharding.sequence_parallel else 1


def _tokens(instance: Instance, sharding: Sharding) -> float:
    """x: tokens of a micro-batch on one rank."""
    return sharding.micro_batch * instance.workload.seq_len / sharding.cp


def context_terms(instance: Instance, kind: LayerKind, sharding: Sharding, groups: Groups) -> LayerTerms:
    """(L6)."""
    softmax = isinstance(kind.mixer, Attention)
    if softmax and sharding.exchanged > 1:
        return _exchange_terms(instance, kind, sharding, groups)
    size = context_parallel_bytes(instance, kind, sharding)
    gather = _fastest_s(instance, "all_gather", size, groups.cp)
    reduce = _fastest_s(instance, "reduce_scatter", size, groups.cp)
    if softmax and sharding.cp_comm_type == "allgather":
        ordered = _traffic(instance, COPIED_VALUES * size / ACTIVATION_BYTES)
        return ordered + LayerTerms(
            exchange_forward=gather, exchange_backward=gather + reduce, launches=GATHER_LAUNCHES
        )
    return LayerTerms(context_forward=gather, context_backward=gather + reduce, launches=2.0 * (sharding.cp - 1))


def _exchange_terms(instance: Instance, kind: LayerKind, sharding: Sharding, groups: Groups) -> LayerTerms:
    """(L6) of an exchange of sequence for heads, and of the ring among several groups that do."""
    split = [split_spans(spans, sharding.exchanged) for spans in groups.cp]
    near, far = tuple(own for own, _ in split), tuple(others for _, others in split)
    sizes = ulysses_bytes(instance, kind, sharding)
    once = sum(_fastest_s(instance, "alltoall", size, near) for size in sizes)
    total = _traffic(instance, COPIED_VALUES * sum(sizes) / ACTIVATION_BYTES)
    total += LayerTerms(exchange_forward=once, exchange_backward=once, launches=ULYSSES_LAUNCHES)
    turns = sharding.cp // sharding.exchanged - 1
    if not turns:
        return total
    size = context_parallel_bytes(instance, kind, sharding)
    gather, reduce = (_fastest_s(instance, op, size, far) for op in ("all_gather", "reduce_scatter"))
    return total + LayerTerms(context_forward=gather, context_backward=gather + reduce, launches=2.0 * turns)


def ulysses_bytes(instance: Instance, kind: LayerKind, sharding: Sharding) -> tuple[float, float]:
    """(L6) What one rank exchanges of one layer: queries, keys and values; outputs."""
    mixer = kind.mixer
    assert isinstance(mixer, Attention)
    heads, each = mixer.heads / sharding.tp, ACTIVATION_BYTES * _tokens(instance, sharding)
    kv_heads = heads if mixer.latent is not None else kv_heads_here(mixer, sharding)
    keys_and_values = kv_heads * (mixer.head_dim + mixer.v_head_dim)
    return each * (heads * mixer.head_dim + keys_and_values), each * heads * mixer.v_head_dim


def kv_heads_here(mixer: Attention, sharding: Sharding) -> float:
    """Key/value heads of one layer on one device, those included that Ulysses copies so that each rank has one."""
    return max(mixer.kv_heads / sharding.tp, sharding.exchanged)


def context_parallel_bytes(instance: Instance, kind: LayerKind, sharding: Sharding) -> float:
    """(L6) Keys and values of one layer, gathered, of the heads that a rank has in a ring; of a recurrent mixer the states
    that are passed on."""
    mixer = kind.mixer
    if isinstance(mixer, Attention):
        heads = mixer.heads / sharding.tp if mixer.latent is not None else kv_heads_here(mixer, sharding)
        width = heads / sharding.exchanged * (mixer.head_dim + mixer.v_head_dim)
        return ACTIVATION_BYTES * _tokens(instance, sharding) * sharding.cp * width
    assert mixer is not None
    return ACTIVATION_BYTES * sharding.micro_batch * sharding.cp * _state_values(mixer) / sharding.tp


def _state_values(mixer: LinearAttention | Mamba) -> float:
    """Values of the recurrent state that one rank of a context-parallel group passes on."""
    if isinstance(mixer, Mamba):
        return mixer.inner * mixer.state
    return mixer.value_heads * mixer.key_dim * mixer.value_dim


def _expert_exchange(instance: Instance, part: Moe, sharding: Sharding, groups: Groups) -> LayerTerms:
    """(L7) Dispatch and combine, each way."""
    routed = routed_bytes(instance, part, sharding)
    once = 2 * _fastest_s(instance, "alltoall", routed, groups.ep)
    if sharding.etp > 1:
        size = routed * sharding.etp
        once += sum(_fastest_s(instance, op, size, groups.etp) for op in ("all_gather", "reduce_scatter"))
    return LayerTerms(expert_forward=once, expert_backward=once, launches=2.0)


def routed_bytes(instance: Instance, part: Moe, sharding: Sharding) -> float:
    """(L7) What the busiest rank exchanges with the experts of one layer."""
    share = sharding.tp if sharding.sequence_parallel else 1
    sent = ACTIVATION_BYTES * _tokens(instance, sharding) / share * part.top_k * instance.model.hidden
    return sent * busiest(instance.workload, part, sharding)


def busiest(workload: Training, part: Moe, sharding: Sharding) -> float:
    """(L7), (L14) Tokens of the busiest rank of an expert-parallel group over the mean, dropped ones and padding counted."""
    load = workload.expert_imbalance if sharding.ep > 1 else 1.0
    if workload.expert_capacity is None:
        return load
    tokens = sharding.micro_batch * workload.seq_len / sharding.cp
    routed = tokens / (sharding.tp if sharding.sequence_parallel else 1) * part.top_k
    full = part.experts * ceil(routed / part.experts * workload.expert_capacity) / routed
    return full if workload.pad_experts else min(load, full)


def _linear(
    instance: Instance, tokens: float, widths: tuple[int, ...], k: int, part: Literal["mixer", "ffn"]
) -> LayerTerms:
    """(L1), (L10), (L11) of a projection of a layer: matrices from k to each of `widths`, joined in one product."""
    workload, n = instance.workload, sum(widths)
    if workload.lora_rank is None:
        return _matrix(instance, tokens, n, k)
    total = _frozen_matrix(instance, tokens, n, k) + _unpacked(instance, n * k)
    if adapts(workload, part):
        rank, precision = workload.lora_rank, sixteen_bit(workload.precision)
        for width in widths:
            total += _matrix(instance, tokens, rank, k, precision) + _matrix(instance, tokens, width, rank, precision)
        total += _added(instance, tokens, widths)
    return total


def _expert_linear(instance: Instance, experts: int, tokens: float, widths: tuple[int, ...], k: int) -> LayerTerms:
    """The same over all experts."""
    workload, n = instance.workload, sum(widths)
    if workload.lora_rank is None:
        return _expert_matrix(instance, experts, tokens, n, k)
    trained = _expert_matrix(instance, experts, tokens, n, k)
    data = trained.gemm_backward - trained.gemm_forward
    total = LayerTerms(trained.gemm_forward, data, gemm_frozen=data) + _unpacked(instance, experts * n * k)
    if adapts(workload, "ffn"):
        rank, precision = workload.lora_rank, sixteen_bit(workload.precision)
        for width in widths:
            total += _expert_matrix(instance, experts, tokens, rank, k, precision)
            total += _expert_matrix(instance, experts, tokens, width, rank, precision)
        total += _added(instance, tokens, widths)
    return total


def _frozen_matrix(instance: Instance, tokens: float, n: float, k: float, precision: str | None = None) -> LayerTerms:
    """(L10) Forward and data-gradient products of a k -> n matrix."""
    accelerator, precision = instance.accelerator, precision or instance.workload.peak
    data = gemm_time_s(accelerator, tokens, k, n, precision)
    return LayerTerms(gemm_time_s(accelerator, tokens, n, k, precision), data, gemm_frozen=data)


def _unpacked(instance: Instance, params: float) -> LayerTerms:
    """(L11)."""
    held = instance.workload.base_precision
    if held == "16bit":
        return LayerTerms()
    size = (FROZEN_BYTES[held] + FROZEN_BYTES["16bit"]) * params
    once = memory_bound_time_s(instance.accelerator, size, 0)
    return LayerTerms(traffic_forward=once, traffic_backward=once, launches=UNPACK_LAUNCHES)


def _added(instance: Instance, tokens: float, widths: tuple[int, ...]) -> LayerTerms:
    """(L10) What scaling and adding the outputs of adapters touches."""
    launches = LayerTerms(launches=ADAPTER_LAUNCHES * len(widths))
    return _traffic(instance, ADAPTER_VALUES * tokens * sum(widths)) + launches


def _matrix(instance: Instance, tokens: float, n: float, k: float, precision: str | None = None) -> LayerTerms:
    """(L1) Forward, data-gradient and weight-gradient products of a k -> n matrix."""
    accelerator, precision = instance.accelerator, precision or instance.workload.peak
    forward = gemm_time_s(accelerator, tokens, n, k, precision)
    data = gemm_time_s(accelerator, tokens, k, n, precision)
    weight = gemm_time_s(accelerator, n, k, tokens, precision)
    added = memory_bound_time_s(accelerator, ACCUMULATED_BYTES * n * k, 0)
    return LayerTerms(forward, data + weight, traffic_backward=added)


def _expert_matrix(
    instance: Instance, experts: int, tokens: float, n: float, k: float, precision: str | None = None
) -> LayerTerms:
    """(L1) over all experts: `tokens` routed tokens spread evenly over `experts` equal matrices."""
    accelerator, precision = instance.accelerator, precision or instance.workload.peak
    forward = grouped_gemm_time_s(accelerator, experts, tokens, n, k, precision)
    data = grouped_gemm_time_s(accelerator, experts, tokens, k, n, precision)
    added = memory_bound_time_s(accelerator, ACCUMULATED_BYTES * experts * n * k, 0)
    return LayerTerms(forward, data + forward, traffic_backward=added)


def _traffic(instance: Instance, values: float) -> LayerTerms:
    """(L4) Element-wise work that touches `values` activations in the forward pass."""
    size = values * ACTIVATION_BYTES
    accelerator = instance.accelerator
    return LayerTerms(
        traffic_forward=memory_bound_time_s(accelerator, size, 0),
        traffic_backward=memory_bound_time_s(accelerator, BACKWARD_TRAFFIC * size, 0),
    )


def _layer(instance: Instance, kind: LayerKind, sharding: Sharding) -> LayerTerms:
    """(L1)-(L4) of one layer: its mixer, its feed-forward part, and a norm and a residual for each."""
    total = _dense_parts(instance, kind, unspread(sharding))
    return total + _moe(instance, kind.ffn, sharding) if isinstance(kind.ffn, Moe) else total


@lru_cache(maxsize=REMEMBERED)
def _dense_parts(instance: Instance, kind: LayerKind, sharding: Sharding) -> LayerTerms:
    """All of a layer but its routed experts."""
    tokens = _tokens(instance, sharding)
    fused = instance.workload.fused_norm
    local_tokens = tokens / sharding.tp if sharding.sequence_parallel else tokens
    hidden = instance.model.hidden
    total = LayerTerms()
    for part in (kind.mixer, kind.ffn):
        if part is None:
            continue
        total += _traffic(instance, (NORM_VALUES[fused] + RESIDUAL_VALUES) * local_tokens * hidden)
        total += LayerTerms(launches=NORM_LAUNCHES[fused] + 1)
        if isinstance(part, Attention):
            total += _attention(instance, part, sharding, tokens)
        elif isinstance(part, LinearAttention | Mamba):
            total += _recurrent(instance, part, sharding, tokens)
        elif isinstance(part, Mlp):
            total += _mlp(instance, part.intermediate, part.gated, sharding)
    return total


def _attention(instance: Instance, part: Attention, sharding: Sharding, tokens: float) -> LayerTerms:
    """(L1), (L2): projections and core of softmax attention; key/value heads are replicated once tp exceeds them."""
    tp, hidden = sharding.tp, instance.model.hidden
    heads = max(part.heads // tp, 1)
    kv_heads = max(part.kv_heads // tp, 1)
    q_width, out_width = heads * part.head_dim, heads * part.v_head_dim
    if part.latent is None:
        kv_widths = kv_heads * part.head_dim, kv_heads * part.v_head_dim
        total = _linear(instance, tokens, (q_width, *kv_widths), hidden, "mixer")
        total += _traffic(instance, 2 * tokens * (q_width + kv_heads * part.head_dim))
    else:
        latent = part.latent
        kv_heads = heads
        total = _linear(instance, tokens, (latent.kv_rank + latent.qk_rope_dim,), hidden, "mixer")
        if latent.q_rank:
            total += _linear(instance, tokens, (latent.q_rank,), hidden, "mixer")
        total += _latent_up(instance, part, sharding, tokens)
    total += _linear(instance, tokens, (hidden,), out_width, "mixer")
    kernel = softmax_kernel(instance, sharding, heads)
    core = [
        attention_time_s(
            instance.accelerator,
            sharding.micro_batch / sharding.cp,
            instance.workload.seq_len,
            heads,
            kv_heads,
            part.head_dim,
            part.v_head_dim,
            window=part.window,
            keys=packed_keys(instance, part),
            direction=direction,
            kernel=kernel,
            precision=sixteen_bit(instance.workload.precision),
        )
        for direction in ("forward", "backward")
    ]
    launches = MIXER_LAUNCHES + ATTENTION_LAUNCHES[kernel]
    return total + LayerTerms(core_forward=core[0], core_backward=core[1], launches=launches)


def _latent_up(instance: Instance, part: Attention, sharding: Sharding, tokens: float) -> LayerTerms:
    """(L1) The projections of latent attention from its low ranks to heads, and rotary."""
    latent, heads = part.latent, max(part.heads // sharding.tp, 1)
    assert latent is not None
    q_width, kv_width = heads * part.head_dim, heads * (latent.qk_nope_dim + part.v_head_dim)
    return (
        _linear(instance, tokens, (kv_width,), latent.kv_rank, "mixer")
        + _linear(instance, tokens, (q_width,), latent.q_rank or instance.model.hidden, "mixer")
        + _traffic(instance, 4 * tokens * q_width)
        + LayerTerms(launches=LATENT_LAUNCHES)
    )


@lru_cache(maxsize=64)
def packed_keys(instance: Instance, part: Attention) -> float | None:
    """(L12) Keys that a query meets in its own document or chunk; None where there is one for the whole sequence."""
    if not instance.workload.documents and not part.chunked:
        return None
    window = None if part.chunked else part.window
    return sum(share * keys_per_query(length, causal=True, window=window) for length, share in pieces(instance, part))


def pieces(instance: Instance, part: Attention) -> list[tuple[float, float]]:
    """(L12) The lengths that causal attention of a layer runs over, each with its share of the tokens."""
    workload = instance.workload
    whole = workload.documents or ((workload.seq_len, 1.0),)
    if not part.chunked or not part.window:
        return list(whole)
    out = []
    for length, share in whole:
        rest = length % part.window
        out += [(part.window, share * (1 - rest / length)), (rest, share * rest / length)]
    return [(length, share) for length, share in out if share]


def softmax_kernel(instance: Instance, sharding: Sharding, heads: int) -> str:
    """The attention kernel that runs: the fused softmax takes sequences of up to 4,096 tokens, in blocks of four
    matrices, and framework operations stand in for it elsewhere (Megatron fused_softmax.py, is_kernel_available)."""
    kernel = instance.workload.attention
    blocks = sharding.micro_batch * heads
    if kernel == "unfused" and (blocks % FUSED_BLOCK or instance.workload.seq_len > FUSED_LONGEST):
        return "eager"
    return kernel


def _recurrent(instance: Instance, part: LinearAttention | Mamba, sharding: Sharding, tokens: float) -> LayerTerms:
    """(L1), (L3): projections and chunked scan of a recurrent mixer."""
    hidden = instance.model.hidden
    inner, state, width = _recurrent_widths(part, sharding.tp)
    total = _linear(instance, tokens, (width,), hidden, "mixer") + _linear(instance, tokens, (hidden,), inner, "mixer")
    total += _traffic(instance, 2 * tokens * (width + 2 * inner))
    precision = sixteen_bit(instance.workload.precision)
    scan = gemm_time_s(instance.accelerator, tokens, inner, 2 * state + SCAN_CHUNK, precision)
    return total + LayerTerms(core_forward=scan, core_backward=2 * scan, launches=RECURRENT_LAUNCHES)


def _recurrent_widths(part: LinearAttention | Mamba, tp: int) -> tuple[int, int, int]:
    """Inner width, state and width of the input projection of a recurrent mixer on one device."""
    if isinstance(part, Mamba):
        inner, state = max(part.inner // tp, 1), part.state
        return inner, state, 2 * inner + 2 * part.groups * state // tp + (part.heads or 0) // tp
    inner = max(part.value_heads * part.value_dim // tp, 1)
    return inner, part.key_dim, 2 * inner + 2 * part.key_heads * part.key_dim // tp + 2 * part.value_heads // tp


@lru_cache(maxsize=REMEMBERED)
def _mlp(instance: Instance, intermediate: int, gated: bool, sharding: Sharding) -> LayerTerms:
    """(L1), (L4): a dense feed-forward part; the activation reads its inputs and writes one output."""
    tokens = _tokens(instance, sharding)
    width = max(intermediate // sharding.tp, 1)
    inputs = 2 if gated else 1
    return (
        _linear(instance, tokens, (width,) * inputs, instance.model.hidden, "ffn")
        + _linear(instance, tokens, (instance.model.hidden,), width, "ffn")
        + _traffic(instance, (inputs + 1) * tokens * width)
        + LayerTerms(launches=MLP_LAUNCHES)
    )


def _moe(instance: Instance, part: Moe, sharding: Sharding) -> LayerTerms:
    """(L1), (L4): router, permutation, the experts of the busiest rank, shared expert."""
    tokens = _tokens(instance, sharding)
    hidden, share = instance.model.hidden, sharding.tp if sharding.sequence_parallel and sharding.spread else 1
    routed, width = _routed_tokens(instance, part, sharding, tokens)
    experts = max(part.experts // sharding.ep, 1)
    inputs = 2 if part.gated else 1
    router = _frozen_matrix if instance.workload.frozen else _matrix
    total = router(instance, tokens / share, part.experts, hidden) + LayerTerms(launches=MOE_LAUNCHES)
    total += _traffic(instance, 4 * routed * hidden)  # permute and unpermute: read and write each
    total += _expert_linear(instance, experts, routed, (width,) * inputs, hidden)
    total += _expert_linear(instance, experts, routed, (hidden,), width)
    total += _traffic(instance, (inputs + 1) * routed * width)
    if part.shared_intermediate:
        total += _mlp(instance, part.shared_intermediate, part.gated, unspread(sharding))
    return total


def _routed_tokens(instance: Instance, part: Moe, sharding: Sharding, tokens: float) -> tuple[float, int]:
    """Copies of tokens that the experts of the busiest device see, and the width of each expert there."""
    ways, copies = (sharding.etp, sharding.etp) if sharding.spread else (sharding.tp, 1)
    share = sharding.tp if sharding.sequence_parallel and sharding.spread else 1
    routed = tokens / share * part.top_k * copies * busiest(instance.workload, part, sharding)
    return routed, max(part.intermediate // ways, 1)


def _embedding(instance: Instance, sharding: Sharding) -> LayerTerms:
    """Lookup of one row per token: read and write."""
    moved = _traffic(instance, 2 * _tokens(instance, sharding) * instance.model.hidden) + LayerTerms(launches=2)
    return replace(moved, traffic_backward=0.0) if instance.workload.frozen else moved


@lru_cache(maxsize=REMEMBERED)
def _prediction(instance: Instance, sharding: Sharding) -> LayerTerms:
    """(L13) of one module ahead of its layer, without communication."""
    tokens, hidden = _tokens(instance, sharding), instance.model.hidden
    local_tokens, fused = tokens / sharding.tp if sharding.sequence_parallel else tokens, instance.workload.fused_norm
    norms = _traffic(instance, 2 * NORM_VALUES[fused] * local_tokens * hidden)
    return (
        _embedding(instance, sharding)
        + norms
        + LayerTerms(launches=2 * NORM_LAUNCHES[fused] + 2)
        + _matrix(instance, tokens, max(hidden // sharding.tp, 1), 2 * hidden)
    )


@lru_cache(maxsize=REMEMBERED)
def _output(instance: Instance, sharding: Sharding) -> LayerTerms:
    """(L8) Final norm, output matrix and cross entropy."""
    tokens = _tokens(instance, sharding)
    width = padded_vocab(instance.model.vocab, sharding.tp) // sharding.tp
    forward, backward = (memory_bound_time_s(instance.accelerator, size * tokens * width, 0) for size in LOSS_BYTES)
    product = _frozen_matrix if instance.workload.frozen else _matrix
    return (
        product(instance, tokens, width, instance.model.hidden, sixteen_bit(instance.workload.precision))
        + _traffic(instance, NORM_VALUES[instance.workload.fused_norm] * tokens * instance.model.hidden)
        + LayerTerms(traffic_forward=forward, traffic_backward=backward, launches=8)
    )


def sixteen_bit(precision: str) -> str:
    """The precision of what stays in 16 bits when matrix products do not: attention, scans, the head."""
    return precision if precision == "fp16" else "bf16"
