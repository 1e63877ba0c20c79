"""Algorithms of context parallelism that another one makes pointless, told before any plan is bounded; likewise shares of
the optimizer on the host that a smaller one makes pointless.

(D1) Of two candidates that differ in `cp_comm_type` and `cp_a2a` alone and lie alike, let the one by a ring have passes of every
     layer kind that are no longer, and no more exposed communication in them. It has less element-wise work. Every
     stage of the same split then keeps no more memory, as (M6) and copied key/value heads count for the others alone,
     is no later at any pass, and what a shorter pass hides less of the gradient sync, `dp_comm_overlap` times the
     difference, its end gains back at least once. So the step is no longer, and its compute, its communication and with
     them its energy are no more. Where copies of activations (U5) make up for a shorter pass nothing is said.
(D2) A pass takes (D^q + H^q)^(1/q), D the device's time and H the host's (layer_time, J3), so with D_ring <= D_other
     the ring's is no longer where H_ring^q - H_other^q <= D_other^q - D_ring^q. The right side grows with all that D
     has in common: it is enough to ask at the fastest place of every other group, for every place of this one. The
     difference of the two passes is least there, or is that of D where much else is to be done.
(D3) Whole units (F1) round what is hidden the other way. Passes that differ have to do so by `MARGIN_S` beyond what
     overlap takes, more than all rounding of any step that lasts less than 1,000 s.
(D4) Let p = 1, and the layers fit with a smaller share on the host and nothing repeated. Of a candidate's plans none is then
     faster than that one: it has the same passes, nothing to repeat, and an optimizer that takes no longer where the host
     is slower than the device (U3); the host holds less. Energy is not looked at: a device that waits takes less power.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardwise.data.model import Attention
from shardwise.formulations.bounds import context_alone
from shardwise.formulations.candidates import context_algorithms, offloads
from shardwise.formulations.layer_costs import Groups, context_terms
from shardwise.formulations.layer_time import layer_time
from shardwise.formulations.step_time import offload_is_slower, spans_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardwise.data.plan import Degrees
    from shardwise.formulations.bounds import BestCase, Pair
    from shardwise.formulations.candidates import Grid
    from shardwise.formulations.coefficients import CostTables
    from shardwise.formulations.layer_costs import Sharding

MARGIN_S = 1e-6


def needless_offload(best: BestCase, grid: Grid) -> npt.NDArray[np.bool_]:
    """(D4) Which rows of a grid have one with less on the host that is at least as fast, and before it in the tie order."""
    shape, tables = grid.shape, best.tables
    instance, out = tables.instance, np.zeros(len(grid), dtype=bool)
    if not shape.offload_optimizer or shape.offload_param or instance.limits.recompute not in (None, "none"):
        return out
    if not offload_is_slower(instance):
        return out
    smaller = [
        share for share, param in offloads(instance, shape.zero) if share < shape.offload_optimizer and not param
    ]
    for row in np.nonzero(grid.pp == 1)[0].tolist():
        degrees = grid.degrees(row)
        out[row] = any(
            _fits_plainly(tables, replace(degrees, offload_optimizer=share, offload_layers=0)) for share in smaller
        )
    return out


def _fits_plainly(tables: CostTables, degrees: Degrees) -> bool:
    """Whether all layers fit on one stage with nothing repeated, which has one micro-batch in flight."""
    memory = tables.memory(degrees, "1f1b")
    return memory.of_all_layers(tables.kind_counts.tolist()) <= memory.capacity


def dominated(best: BestCase, grid: Grid) -> npt.NDArray[np.bool_]:
    """(D1) Which rows of a grid have one by a ring that is at least as good, before it in the tie order, and legal."""
    shape, instance = grid.shape, best.tables.instance
    if (
        shape.cp_comm_type == "p2p"
        or shape.offload_layers
        or ("p2p", 1) not in context_algorithms(instance, shape.tp, shape.cp)
    ):
        return np.zeros(len(grid), dtype=bool)
    sizes, at = grid.sizes
    return np.array([ring_wins(best, shape.sharding(int(size))) for size in sizes], dtype=bool)[at]


def ring_wins(best: BestCase, sharding: Sharding) -> bool:
    """(D2), (D3) for every layer kind and place of the group."""
    if sharding not in best.ring_wins:
        best.ring_wins[sharding] = best.fits_somewhere(sharding) and _ring_wins(best, sharding)
    return best.ring_wins[sharding]


def _ring_wins(best: BestCase, sharding: Sharding) -> bool:
    profile = best.tables.instance.profile
    pairs = _exchanges(best, context_alone(sharding))
    if pairs is None:
        return False
    kinds = best.common(sharding).kinds
    for index, own, other in pairs:
        one, two = (layer_time(kinds[index] + context, profile, sharding.tp) for context in (own, other))
        gains = two.forward_s - one.forward_s, two.backward_s - one.backward_s
        if (1 - profile.dp_comm_overlap) * min(gains) < MARGIN_S:
            return False
    return True


def _exchanges(best: BestCase, sharding: Sharding) -> tuple[Pair, ...] | None:
    """What the ring and the other algorithm do, for every kind of layer with attention and every place of the group,
    remembered; None where the ring has not less of it exposed."""
    if sharding in best.exchanges:
        return best.exchanges[sharding]
    instance, profile = best.tables.instance, best.tables.instance.profile
    best.exchanges[sharding] = None
    pairs: list[Pair] = []
    for factors in best.group_factors(sharding.cp):
        groups = Groups((), (spans_of(factors, instance.levels),))
        for index, kind in enumerate(instance.model.kinds):
            if not isinstance(kind.mixer, Attention):
                continue
            own, other = (context_terms(instance, kind, way, groups) for way in (sharding.ring, sharding))
            gains = (
                other.exchange_forward - profile.cp_comm_exposed * (own.context_forward - other.context_forward),
                other.exchange_backward - profile.cp_comm_exposed * (own.context_backward - other.context_backward),
            )
            if (1 - profile.dp_comm_overlap) * min(gains) < MARGIN_S:
                return None
            pairs.append((index, own, other))
    best.exchanges[sharding] = tuple(pairs)
    return best.exchanges[sharding]
