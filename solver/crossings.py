"""Which groups of a plan communicate over which levels of the cluster, and how much: the calls that the cost model times.

Bytes are those of the whole tensor of a call, as `shardwise collective` takes them: the output of an all-gather, the
input of a reduce-scatter, the buffer of an all-reduce, what one rank holds for an all-to-all or sends. They are of one
device of the busiest stage (transfers: of one device of the most used link), and of one step, in which m micro-batches
pass:

(X1) tensor parallelism, for every row-parallel output (layer_costs, L5): one all-reduce, or an all-gather and a
     reduce-scatter, in each forward and each backward pass; once more where the layer, or the module, is recomputed.
(X2) context parallelism (L6): two all-gathers and one reduce-scatter a layer, one all-gather more with recompute; by
     Ulysses an all-to-all of queries, keys and values and one of outputs each way, and forward again with recompute; by a
     hierarchy both, each in its part of the group.
(X3) expert parallelism (L7): two all-to-alls each way, and with etp > 1 an all-gather and a reduce-scatter each way; and
     forward again where the layer, or its experts, are recomputed.
(X4) a pipeline sends activations over a link and gradients back, for each chunk that it joins (step_time, T2).
(X5) gradients are reduced and weights gathered over dp x cp, within dp_shard ranks and then among the replicas, those of
     experts over the ranks that hold the same ones (step_time, `sync_rates`): once a step, or with every micro-batch
     (`unit_times_s`). Calls are buckets there, and not counted.
(X6) the gradients of tied embeddings are added between the first and the last stage, with DualPipe those of both copies.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from shardwise.data.model import Attention, Moe
from shardwise.data.recompute import has_module, modules_of
from shardwise.formulations.coefficients import groups_of
from shardwise.formulations.collectives import split_spans
from shardwise.formulations.layer_costs import (
    context_parallel_bytes,
    routed_bytes,
    row_outputs,
    sharding_of,
    tensor_parallel_bytes,
    ulysses_bytes,
)
from shardwise.formulations.memory import (
    GRADIENT_BYTES,
    ON_HOST,
    WEIGHT_BYTES,
    KindParams,
    end_units,
    tied_copy,
)
from shardwise.formulations.schedule import passes_per_step
from shardwise.formulations.step_time import gathers_each_pass, group_of, hop_bytes, spans_of
from shardwise.solver.evaluate import cost_tables, kept_layers, stage_params

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.data.instance import Instance
    from shardwise.data.model import LayerKind
    from shardwise.data.plan import Plan
    from shardwise.formulations.layer_costs import Sharding, Spans


@dataclass(frozen=True, slots=True)
class Crossing:
    """One kind of call of one axis.

    members
        Of a group, per level, innermost first; a level with more than one is crossed.
    calls
        A step; None where buckets are not counted. Each is of `bytes_per_call`.
    """

    axis: str
    what: str
    op: str
    members: tuple[int, ...]
    calls: int | None
    bytes_per_step: float

    @property
    def bytes_per_call(self) -> float | None:
        return self.bytes_per_step / self.calls if self.calls else None

    def to_dict(self, levels: tuple[str, ...]) -> dict[str, Any]:
        """Plain numbers and strings, the members by the names of the levels."""
        return {
            "axis": self.axis,
            "what": self.what,
            "op": self.op,
            "members": dict(zip(levels, self.members, strict=True)),
            "calls": self.calls,
            "bytes_per_call": self.bytes_per_call,
            "bytes_per_step": self.bytes_per_step,
        }


@dataclass(frozen=True, slots=True)
class _Call:
    """`calls` of `size` bytes each; None is one sum over buckets."""

    axis: str
    what: str
    op: str
    spans: Spans
    calls: int | None
    size: float


def crossings(instance: Instance, plan: Plan, stage: int) -> tuple[Crossing, ...]:
    """(X1)-(X6) of one device of `stage`, for a plan that `evaluate` takes."""
    merged: dict[tuple[object, ...], Crossing] = {}
    for call in (*_layers(instance, plan, stage), *_pipeline(instance, plan), *_sync(instance, plan, stage)):
        members = tuple(count for count, _ in call.spans)
        if max(members, default=1) == 1 or not call.size or call.calls == 0:
            continue
        key = (call.axis, call.what, call.op, members, call.calls is None, call.size)
        calls, size = call.calls, call.size * (1 if call.calls is None else call.calls)
        if key in merged and calls is not None:
            calls, size = calls + (merged[key].calls or 0), size + merged[key].bytes_per_step
        merged[key] = Crossing(call.axis, call.what, call.op, members, calls, float(size))
    return tuple(merged.values())


def _layers(instance: Instance, plan: Plan, stage: int) -> Iterator[_Call]:
    """(X1)-(X3)."""
    d, model = plan.degrees, instance.model
    sharding, groups = sharding_of(d), groups_of(instance, d, plan.placement)
    m = passes_per_step(plan.schedule, plan.micro_batches).micro_batches
    ops = ("all_gather", "reduce_scatter") if d.sequence_parallel else ("all_reduce",)
    whole = tensor_parallel_bytes(instance, sharding)
    chunks = plan.layout.chunks_of(stage)
    first = 1 if instance.workload.frozen else 2  # a frozen embedding has no backward pass
    outputs = first * chunks.count(0) + 2 * chunks.count(d.virtual_stages - 1)  # of the embedding and the head
    for (kind_index, _, mode), layers in Counter(kept_layers(cost_tables(instance), plan, stage)).items():
        again, modules = mode == "full", () if mode == ON_HOST else modules_of(mode)
        kind = model.kinds[kind_index]
        outputs += layers * (
            row_outputs(kind, sharding.spread) * (3 if again else 2) + _outputs_again(kind, sharding, modules)
        )
        ring = groups.cp[0] if d.cp > 1 else ()
        if sharding.exchanged > 1 and isinstance(kind.mixer, Attention):
            near, ring = split_spans(ring, sharding.exchanged)
            for what, size in zip(
                ("queries, keys and values", "attention outputs"), ulysses_bytes(instance, kind, sharding), strict=True
            ):
                yield _Call("cp", what, "alltoall", near, m * layers * (3 if again else 2), size)
        if d.cp > 1 and kind.mixer is not None:
            size = context_parallel_bytes(instance, kind, sharding)
            yield _Call("cp", "keys and values", "all_gather", ring, m * layers * (3 if again else 2), size)
            yield _Call("cp", "their gradients", "reduce_scatter", ring, m * layers, size)
        if sharding.spread and isinstance(kind.ffn, Moe):
            routed = routed_bytes(instance, kind.ffn, sharding)
            ways = (3 if again or "moe" in modules else 2) * m * layers
            yield _Call("ep", "routed tokens", "alltoall", groups.ep[0], 2 * ways, routed)
            for op in ("all_gather", "reduce_scatter"):
                yield _Call("etp", "routed tokens", op, groups.etp[0], ways, routed * d.etp)
    for op in ops:
        yield _Call("tp", "activations and their gradients", op, groups.tp[0], m * outputs, whole)


def _outputs_again(kind: LayerKind, sharding: Sharding, modules: tuple[str, ...]) -> int:
    """Row-parallel outputs of a layer in the modules that are repeated (layer_costs, L16)."""
    outputs = {"mlp": 1, "shared_experts": 1, "moe": row_outputs(kind, sharding.spread) - (kind.mixer is not None)}
    return sum(outputs.get(module, 0) for module in modules if has_module(kind, module))


def _pipeline(instance: Instance, plan: Plan) -> Iterator[_Call]:
    """(X4) Of the most used link of each level."""
    d, placement = plan.degrees, plan.placement
    m = passes_per_step(plan.schedule, plan.micro_batches).micro_batches
    crossed = [placement.crossing_level(j) for j in range(d.pp - 1)]
    levels = [*crossed, max(crossed, default=0)]
    used = Counter(hop for hop in plan.layout.hop_before if hop >= 0)
    most: dict[int, int] = {}
    for hop, times in used.items():
        most[levels[hop]] = max(most.get(levels[hop], 0), times)
    for level, times in sorted(most.items()):
        spans = _pair(instance, level)
        yield _Call("pp", "activations and gradients", "send", spans, 2 * m * times, hop_bytes(instance, d))


def _sync(instance: Instance, plan: Plan, stage: int) -> Iterator[_Call]:
    """(X5), (X6)."""
    d, placement, tables = plan.degrees, plan.placement, cost_tables(instance)
    params, reduce_bytes = stage_params(tables, plan, stage), instance.profile.reduce_bytes
    dense = spans_of(group_of(placement.dp, placement.cp), instance.levels)
    around = spans_of(group_of(placement.tp, placement.cp, placement.dp), instance.levels)
    same = split_spans(around, d.ep * d.etp)[1] if sharding_of(d).spread else dense
    ends = sum(end_units(instance, d.tp, d.ep, d.etp), KindParams(0, 0)) * (d.pp == 1)
    for name, count, frozen, once, spans, replicate in (
        ("", params.dense, params.frozen, ends.gathered_bytes, dense, d.dp_replicate),
        (" of experts", params.expert, params.frozen_expert, 0, same, d.expert_dp // d.expert_dp_shard),
    ):
        reduced, gathered = count, WEIGHT_BYTES * count + (frozen if d.zero == 3 else 0)
        if gathers_each_pass(d.zero, d.pp):
            reduced = plan.micro_batches * count
            gathered = plan.micro_batches * (2 * gathered - once) if d.zero == 3 else gathered
        if d.zero == 0:
            yield _Call("dp", f"gradients{name}", "all_reduce", spans, None, reduce_bytes * count)
            continue
        inner, outer = split_spans(spans, _size(spans) // replicate)
        yield _Call("dp", f"gradients{name}", "reduce_scatter", inner, None, reduce_bytes * reduced)
        yield _Call("dp", f"weights{name}", "all_gather", inner, None, gathered)
        yield _Call("dp", f"gradients{name}, replicas", "all_reduce", outer, None, reduce_bytes * count / _size(inner))
    pair = _pair(instance, max((level for level, factor in enumerate(placement.pp) if factor > 1), default=0))
    if tied_copy(instance, d.pp, plan.schedule) and stage in (0, d.pp - 1):
        size = GRADIENT_BYTES * end_units(instance, d.tp)[0].dense
        yield _Call("pp", "gradients of tied embeddings", "all_reduce", pair, 1, size)
    if plan.schedule == "dualpipe":
        yield _Call("pp", "gradients of both copies", "all_reduce", pair, None, reduce_bytes * params.total)


def _pair(instance: Instance, level: int) -> Spans:
    """Two ranks that a level joins."""
    return tuple((2 if own == level else 1, link) for own, link in enumerate(instance.levels))


def _size(spans: Spans) -> int:
    return prod(members for members, _ in spans)
