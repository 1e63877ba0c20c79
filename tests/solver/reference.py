"""Exhaustive reference: every plan of the universe, enumerated from its definition in docs/formulation.md.

Shares nothing with the candidates, bounds and formulations: it loops over everything that could be a plan and lets
`judge`, the solver's independent evaluation, say what is admitted and what it costs.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from shardwise.data.plan import Degrees, Placement, Plan, Stage
from shardwise.solver.evaluate import judge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.data.instance import Instance

MOST_PLANS = 20_000


class TooManyError(Exception):
    """The universe is larger than the reference is meant for."""


def factorings(number: int, levels: int) -> list[tuple[int, ...]]:
    """All ways to write `number` as an ordered product of `levels` factors."""
    if levels == 1:
        return [(number,)]
    return [
        (first, *rest)
        for first in range(1, number + 1)
        if number % first == 0
        for rest in factorings(number // first, levels - 1)
    ]


def numbered_along_the_devices(tp: tuple[int, ...], pp: tuple[int, ...], dp: tuple[int, ...], order: str) -> bool:
    """Whether rank r sits on the r-th used device when ranks count `order` fastest axis first.

    Decided by building the whole map: each rank's digits give its member index at every level.
    """
    factors = {"tp": tp, "pp": pp, "dp": dp}
    axes = order.split("-")
    sizes = {axis: _product(factors[axis]) for axis in axes}
    rank = 0
    for values in product(*(range(sizes[axis]) for axis in reversed(axes))):
        position = dict(zip(reversed(axes), values, strict=True))
        device, scale = 0, 1
        left = dict(position)
        for level in range(len(tp)):
            member, within = 0, 1
            for axis in axes:
                member += left[axis] % factors[axis][level] * within
                left[axis] //= factors[axis][level]
                within *= factors[axis][level]
            device += member * scale
            scale *= within
        if device != rank:
            return False
        rank += 1
    return True


def _product(numbers: tuple[int, ...]) -> int:
    out = 1
    for number in numbers:
        out *= number
    return out


def placements(instance: Instance, degrees: Degrees) -> Iterator[Placement]:
    """One placement per way of factoring; under `megatron-core` only those of its rank orders."""
    levels = len(instance.levels)
    for tp, pp, dp in product(*(factorings(n, levels) for n in (degrees.tp, degrees.pp, degrees.dp))):
        if instance.rules.name == "free":
            yield Placement(tp, pp, dp)
            continue
        for order in ("tp-dp-pp", "tp-pp-dp"):
            if numbered_along_the_devices(tp, pp, dp, order):
                yield Placement(tp, pp, dp, order)  # type: ignore[arg-type]
                break


def splits(layers: int, pp: int, vpp: int) -> Iterator[tuple[int, ...]]:
    """Layers per chunk: any split with no empty chunk in the middle; even chunks, larger first, with vpp > 1."""
    chunks = pp * vpp
    if chunks == 1:
        yield (layers,)
        return
    for sizes in product(range(layers + 1), repeat=chunks - 1):
        last = layers - sum(sizes)
        split = (*sizes, last)
        middle = split[1:-1]
        if last < 0 or 0 in middle:
            continue
        if vpp > 1 and (max(middle) - min(middle) > 1 or list(middle) != sorted(middle, reverse=True)):
            continue
        yield split


def even_splits(layers: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """`splits` with vpp > 1, without going through all products."""
    for first, last in product(range(layers + 1), repeat=2):
        middle = layers - first - last
        if middle >= chunks - 2:
            base, larger = divmod(middle, chunks - 2)
            yield (first, *(base + (i < larger) for i in range(chunks - 2)), last)


def settings(instance: Instance, chunks: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Recompute settings of the stages: one for all under `megatron-core`, one each under `free`."""

    def options(most: int) -> list[tuple[str, int]]:
        return [("none", 0), ("selective", 0), *(("full", n) for n in range(1, max(most, 1) + 1))]

    if instance.rules.name == "free":
        yield from product(*(options(max(stage)) for stage in chunks))
    else:
        for option in options(max(n for stage in chunks for n in stage)):
            yield (option,) * len(chunks)


def degree_tuples(instance: Instance) -> Iterator[Degrees]:
    """Every tuple that fits the devices and divides the batch; rules and limits are left to the evaluation."""
    devices = instance.cluster.device_count
    layers, batch = len(instance.model.layers), instance.workload.global_batch
    limits = instance.limits
    for tp, pp, dp in product(range(1, devices + 1), repeat=3):
        if tp * pp * dp > devices or batch % dp:
            continue
        for micro_batch, vpp, zero, sp in product(range(1, 33), range(1, layers + 3), (0, 1), (False, True)):
            if batch // dp % micro_batch or (vpp > 1 and pp == 1) or (pp > 1 and pp * vpp > layers + 2):
                continue
            values = {"tp": tp, "pp": pp, "dp": dp, "vpp": vpp, "micro_batch": micro_batch, "zero": zero}
            values |= {"sequence_parallel": int(sp), "devices": tp * pp * dp}
            if not limits.faults(values):
                yield Degrees(tp, pp, dp, vpp, micro_batch, zero, sp)


def plans(instance: Instance) -> Iterator[Plan]:
    """Every plan that might be in the universe; raises `TooManyError` beyond `MOST_PLANS`."""
    layers, batch = len(instance.model.layers), instance.workload.global_batch
    count = 0
    for degrees in degree_tuples(instance):
        if degrees.tp > 1 and not plausible(instance, degrees):
            continue
        places = list(placements(instance, degrees))
        chunks = degrees.pp * degrees.vpp
        every = even_splits(layers, chunks) if degrees.vpp > 1 else splits(layers, degrees.pp, 1)
        for split in every:
            parts = tuple(split[k :: degrees.pp] for k in range(degrees.pp))
            for setting in settings(instance, parts):
                for placement in places:
                    count += 1
                    if count > MOST_PLANS:
                        raise TooManyError
                    stages = tuple(
                        Stage(part, mode, block)  # type: ignore[arg-type]
                        for part, (mode, block) in zip(parts, setting, strict=True)
                    )
                    yield Plan(degrees, stages, placement, batch // degrees.dp // degrees.micro_batch)


def plausible(instance: Instance, degrees: Degrees) -> bool:
    """Skip degrees whose one-stage plan breaks a rule on tensors: it breaks it with every split and placement."""
    from shardwise.data.rules import tensor_faults

    return not tensor_faults(instance.model, degrees.tp, degrees.sequence_parallel, instance.workload.seq_len)


def admitted(instance: Instance, unit_s: float) -> list[tuple[int, Plan]]:
    """(units, plan) of every plan of the universe."""
    out = []
    for plan in plans(instance):
        verdict = judge(instance, plan, unit_s)
        if verdict.admitted:
            out.append((verdict.objective_units, plan))
    return out


def tie_key(plan: Plan) -> tuple[object, ...]:
    """The documented order among plans of equal step time."""
    d, p = plan.degrees, plan.placement
    packing = tuple(-factor for level in zip(p.tp, p.dp, p.pp, strict=True) for factor in level)
    recomputed = setting = 0
    for stage in plan.stages:
        if stage.recompute == "full":
            recomputed += sum(min(n, stage.recompute_layers) for n in stage.chunks)
        if stage.recompute == "selective":
            recomputed += stage.layers
        setting += stage.recompute_layers + (stage.recompute == "selective")
    if d.pp > 1 and len({(s.recompute, s.recompute_layers) for s in plan.stages}) == 1:
        setting //= d.pp
    sizes = plan.chunk_layers
    return (
        d.devices, d.pp, d.tp, d.vpp, d.micro_batch, -d.zero, -int(d.sequence_parallel),
        tuple(-b for b in p.blocks), packing, p.rank_order == "tp-pp-dp",
        recomputed, setting, max(sizes), tuple(-n for n in sizes),
    )  # fmt: skip
