"""Build a plan from degrees alone, the way a launcher does when nothing else is said."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from shardwise.data.faults import InputError
from shardwise.data.model import MAX_LAYERS, Moe
from shardwise.data.pipeline import FOLDED, Schedule
from shardwise.data.plan import AXES, CpCommType, Degrees, Placement, Plan, RankOrder, Recompute, Stage
from shardwise.data.rules import context_algorithm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.data.instance import Instance

MAX_CHUNKS = MAX_LAYERS + 2
"""More chunks than any model can fill with the ends left empty; a plan of more is refused before it is built."""


def degrees_from(
    instance: Instance,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    vpp: int = 1,
    micro_batch: int = 1,
    zero: int | None = None,
    sequence_parallel: bool | None = None,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    dp_replicate: int = 1,
    cp_comm_type: CpCommType | None = None,
    cp_a2a: int = 1,
    offload_optimizer: float | None = None,
    offload_param: bool | None = None,
    offload_layers: int = 0,
) -> Degrees:
    """Degrees with what is not given filled in, as the rule pack has it.

    Parameters
    ----------
    dp
        Without it, as many replicas as the cluster holds.
    zero
        Without it, 1; in a pack without that stage FSDP (3) where there are ranks to shard over, 0 elsewhere.
    sequence_parallel
        Without it, on where there is tensor parallelism, in a pack that has it.
    etp
        Without it, 1 in a pack that keeps experts whole, tp in others.
    cp_comm_type
        Without it, "a2a+p2p" with a `cp_a2a` above 1, else the first of the pack's algorithms that takes the model and the
        sequence.
    offload_optimizer
        Without it, the share that the workload names; none where it leaves that to the plan.
    offload_param
        Without it, as the workload allows.

    Raises
    ------
    InputError
        When a number is out of its range, with every reason.
    """
    rules = instance.rules
    try:
        if dp is None:
            dp = max(1, instance.cluster.device_count // max(1, tp * pp * cp))
        if zero is None:
            zero = 1 if 1 in rules.zero_stages else 3 if cp * dp > 1 else 0
        if sequence_parallel is None:
            sequence_parallel = tp > 1 and "sequence_parallel" not in rules.without
        if etp is None:
            whole = rules.expert_split == "1" and any(isinstance(kind.ffn, Moe) for kind in instance.model.kinds)
            etp = 1 if whole else 0
        if cp_comm_type is None and cp_a2a > 1:
            cp_comm_type = "a2a+p2p"
        elif cp_comm_type is None:
            cp_comm_type = context_algorithm(rules, instance.model, max(tp, 1), max(cp, 1), instance.workload.seq_len)
        if offload_optimizer is None:
            allowed = instance.workload.offload_optimizer
            offload_optimizer = 0.0 if allowed == "auto" else float(allowed)
        return Degrees(
            tp, pp, dp, vpp, micro_batch, zero, sequence_parallel, cp, ep, etp, dp_replicate, cp_comm_type, cp_a2a,
            offload_optimizer, instance.workload.offload_param if offload_param is None else offload_param, offload_layers,
        )  # fmt: skip
    except ValueError as error:
        raise InputError(str(error).split("; ")) from None


def plan_from_degrees(
    instance: Instance,
    degrees: Degrees,
    *,
    stages: Sequence[int] | None = None,
    recompute: Recompute = "none",
    recompute_layers: int | None = None,
    recompute_modules: Sequence[str] = (),
    rank_order: RankOrder = "tp-dp-pp",
    schedule: Schedule | None = None,
) -> Plan:
    """A plan with the given degrees.

    Parameters
    ----------
    stages
        Layers of every chunk in network order, pp x vpp of them; as even as possible with larger ones first without it.
    recompute_layers
        Layers of each chunk to recompute with `recompute="full"`; all without it.
    recompute_modules
        What `recompute="selective"` repeats, of `data.recompute.MODULES`; the attention core without it.

    Raises
    ------
    InputError
        When the numbers do not make a plan, with every reason.
    """
    layers = len(instance.model.layers)
    if degrees.virtual_stages > MAX_CHUNKS:
        raise InputError(
            f"pp={degrees.pp} x vpp={degrees.vpp} makes {degrees.virtual_stages} chunks of layers={layers}, "
            f"at most {MAX_CHUNKS} can be evaluated"
        )
    chunks = tuple(stages) if stages is not None else _even(layers, degrees.virtual_stages)
    faults = []
    if len(chunks) != degrees.virtual_stages:
        faults.append(
            f"stages: {len(chunks)} numbers given, pp={degrees.pp} x vpp={degrees.vpp} asks for one per chunk"
        )
    if min(chunks, default=0) < 0:
        faults.append(f"stages={','.join(map(str, chunks))} must not be negative")
    if sum(chunks) != layers:
        faults.append(f"stages={','.join(map(str, chunks))} must add up to the model's {layers} layers")
    if recompute_layers is not None and (recompute != "full" or recompute_layers < 1):
        faults.append(f"recompute_layers={recompute_layers} needs recompute=full and at least 1 layer")
    elif recompute_layers is not None and recompute_layers > max(*chunks, 1):
        faults.append(
            f"recompute_layers={recompute_layers} is more than the {max(chunks, default=0)} layers of the largest chunk"
        )
    if recompute_modules and recompute != "selective":
        faults.append(f"recompute_modules={','.join(recompute_modules)} needs recompute=selective")
    if faults:
        raise InputError(faults)
    block = 0
    if recompute == "full":
        block = recompute_layers if recompute_layers is not None else max(*chunks, 1)
    micro_batches = max(1, instance.workload.global_batch // (degrees.micro_batch * degrees.dp))
    try:
        return Plan(
            degrees,
            _stages_of(chunks, degrees.pp, recompute, block, tuple(recompute_modules), folded=schedule in FOLDED),
            packed_placement(instance, degrees, rank_order),
            micro_batches,
            schedule=schedule or degrees.schedule,
        )
    except ValueError as error:
        raise InputError(str(error).split("; ")) from None


@lru_cache(maxsize=16384)
def _stages_of(
    chunks: tuple[int, ...], pp: int, recompute: Recompute, block: int, modules: tuple[str, ...], *, folded: bool
) -> tuple[Stage, ...]:
    rows = [chunks[row * pp : (row + 1) * pp] for row in range(len(chunks) // pp)]
    if folded and len(rows) == 2:
        rows[1] = rows[1][::-1]
    return tuple(Stage(own, recompute, block, modules) for own in zip(*rows, strict=True))


def even_split(layers: int, chunks: int) -> list[int]:
    """As even as possible, larger chunks first; where two of them are empty, the first and the last."""
    return list(_even(layers, chunks))


@lru_cache(maxsize=16384)
def _even(layers: int, chunks: int) -> tuple[int, ...]:
    base, larger = divmod(layers, chunks)
    if larger and larger == chunks - 2 and base == 0:  # only the two ends may be empty
        return (0, *[1] * larger, 0)
    return tuple(base + (i < larger) for i in range(chunks))


def packed_placement(instance: Instance, degrees: Degrees, rank_order: RankOrder) -> Placement:
    """Ranks numbered along the devices: each level takes as much of the faster axes as it holds whole."""
    return _packed(instance, degrees.tp, degrees.cp, degrees.pp, degrees.dp, rank_order)


@lru_cache(maxsize=16384)
def _packed(instance: Instance, tp: int, cp: int, pp: int, dp: int, rank_order: RankOrder) -> Placement:
    left = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
    factors: dict[str, list[int]] = {axis: [] for axis in left}
    axes = rank_order.split("-")
    if sorted(axes) != sorted(AXES):
        raise InputError(f"rank_order={rank_order!r} must be tp-dp-pp or tp-pp-dp")
    axes.insert(1, "cp")
    block: tuple[int, ...] = ()
    levels = len(instance.levels)
    for level in range(levels):
        room = instance.cluster.capacity(block)
        used = 1
        for axis in axes:
            take = left[axis] if level == levels - 1 else _largest_factor(left[axis], room // used)
            factors[axis].append(take)
            left[axis] //= take
            used *= take
            if left[axis] > 1:
                room = 0  # a slower axis may not enter this level before a faster one is complete
        block = (*block, used)
    placed = {axis: tuple(found) for axis, found in factors.items()}
    return Placement(placed["tp"], placed["pp"], placed["dp"], rank_order, placed["cp"])


def _largest_factor(number: int, room: int) -> int:
    """The largest divisor of `number` that is at most `room`, and at least 1."""
    return max((n for n in range(1, min(number, room) + 1) if number % n == 0), default=1)
