"""Build a plan from degrees alone, the way a launcher does when nothing else is said."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from shardwise.data.faults import InputError
from shardwise.data.plan import Degrees, Placement, Plan, RankOrder, Recompute, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.data.instance import Instance


def plan_from_degrees(
    instance: Instance,
    degrees: Degrees,
    *,
    stages: Sequence[int] | None = None,
    recompute: Recompute = "none",
    recompute_layers: int | None = None,
    rank_order: RankOrder = "tp-dp-pp",
) -> Plan:
    """A plan with the given degrees.

    Parameters
    ----------
    stages
        Layers of every chunk in network order, pp x vpp of them; as even as possible with larger ones first without it.
    recompute_layers
        Layers of each chunk to recompute with `recompute="full"`; all without it.

    Raises
    ------
    InputError
        When the numbers do not make a plan, with every reason.
    """
    chunks = list(stages) if stages is not None else even_split(len(instance.model.layers), degrees.virtual_stages)
    faults = []
    if len(chunks) != degrees.virtual_stages:
        faults.append(
            f"stages: {len(chunks)} numbers given, pp={degrees.pp} x vpp={degrees.vpp} asks for one per chunk"
        )
    if sum(chunks) != len(instance.model.layers) or min(chunks, default=0) < 0:
        faults.append(
            f"stages={','.join(map(str, chunks))} must add up to the model's {len(instance.model.layers)} layers"
        )
    if recompute_layers is not None and (recompute != "full" or recompute_layers < 1):
        faults.append(f"recompute_layers={recompute_layers} needs recompute=full and at least 1 layer")
    if faults:
        raise InputError(faults)
    block = 0
    if recompute == "full":
        block = recompute_layers if recompute_layers is not None else max(*chunks, 1)
    micro_batches = max(1, instance.workload.global_batch // (degrees.micro_batch * degrees.dp))
    return Plan(
        degrees,
        tuple(Stage(tuple(chunks[k :: degrees.pp]), recompute, block) for k in range(degrees.pp)),
        packed_placement(instance, degrees, rank_order),
        micro_batches,
    )


def even_split(layers: int, chunks: int) -> list[int]:
    """As even as possible, larger chunks first."""
    base, larger = divmod(layers, chunks)
    return [base + (i < larger) for i in range(chunks)]


def packed_placement(instance: Instance, degrees: Degrees, rank_order: RankOrder) -> Placement:
    """Ranks numbered along the devices: each level takes as much of the faster axes as it holds whole."""
    left = {"tp": degrees.tp, "pp": degrees.pp, "dp": degrees.dp}
    factors: dict[str, list[int]] = {axis: [] for axis in left}
    block: tuple[int, ...] = ()
    levels = len(instance.levels)
    for level in range(levels):
        room = instance.cluster.capacity(block)
        used = 1
        for axis in rank_order.split("-"):
            take = left[axis] if level == levels - 1 else _largest_factor(left[axis], room // used)
            factors[axis].append(take)
            left[axis] //= take
            used *= take
            if left[axis] > 1:
                room = 0  # a slower axis may not enter this level before a faster one is complete
        block = (*block, used)
    return Placement(tuple(factors["tp"]), tuple(factors["pp"]), tuple(factors["dp"]), rank_order)


def _largest_factor(number: int, room: int) -> int:
    """The largest divisor of `number` that is at most `room`, and at least 1."""
    return max((gcd(number, n) for n in range(1, max(room, 1) + 1) if number % n == 0), default=1)
