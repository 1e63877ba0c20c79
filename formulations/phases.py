"""How long the devices of a plan compute and communicate in a step: what energy is made of.

With m micro-batches, n_u layers of unit u (the kinds, the embedding, the head) and p stages, summed over one device of
every stage:

(H1) compute        m sum_u n_u c_u + what is recomputed + the optimizer, c_u the kernels of both passes of u;
(H2) communication  m (sum_u n_u x_u + what stages wait for in transfers) + the gradient sync that shows, x_u the
     exposed collectives of both passes and of sharded weights;
(H3) idle           p T less both: the host, its part of the optimizer (U3) too, the pipeline, the overhead of a step. The
     copies of (U3) are communication.

Everything but recompute and the sync that shows (T4) is the same for every split of the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.formulations.coefficients import groups_of
from shardwise.formulations.layer_costs import sharding_of
from shardwise.formulations.layer_time import time_by_cause
from shardwise.formulations.memory import end_units, tied_copy
from shardwise.formulations.passes import links_of
from shardwise.formulations.step_time import straggling

if TYPE_CHECKING:
    from shardwise.data.pipeline import Layout
    from shardwise.data.plan import Degrees, Placement
    from shardwise.formulations.coefficients import CostTables, TimeCoefficients

COMPUTE = "compute"
EXPOSED = ("tensor_parallel", "context_parallel", "expert_parallel")


@dataclass(frozen=True, slots=True)
class Phases:
    """(H1), (H2) Seconds per unit: compute and communication of one micro-batch, the optimizer of a step on the device and
    what it waits for its host."""

    compute: tuple[float, ...]
    communication: tuple[float, ...]
    optimizer: tuple[float, ...]
    host: tuple[float, ...]


def phases(tables: CostTables, degrees: Degrees, placement: Placement, schedule: str) -> Phases:
    """The phases of every unit of a candidate."""
    instance = tables.instance
    sharding, groups = sharding_of(degrees), groups_of(instance, degrees, placement)
    terms, times = tables.terms(sharding, groups), tables.times(sharding, groups)
    time, scale = tables.time(degrees, placement, schedule), straggling(instance, degrees.devices)
    apart = tied_copy(instance, degrees.pp, schedule)
    held = tables.kind_params(degrees.tp, degrees.ep, degrees.etp)
    dense, expert = tables.group_rates(degrees, placement, schedule)
    compute, communication, optimizer, host = [], [], [], []
    units = zip(
        (*terms.kinds, terms.embedding, terms.head),
        (*times.kinds, times.embedding, times.head),
        (*held, *end_units(instance, degrees.tp, degrees.ep, degrees.etp, with_tied_copy=apart)),
        strict=True,
    )
    for unit, (term, own, params) in enumerate(units):
        causes = time_by_cause(term, instance.profile)
        gathers = time.forward[unit] + time.backward[unit] - scale * own.both_s
        compute.append(scale * causes[COMPUTE])
        communication.append(scale * sum(causes[name] for name in EXPOSED) + gathers)
        optimizer.append(dense.optimizer_s * params.dense + expert.optimizer_s * params.expert)
        host.append(dense.host_s * params.dense + expert.host_s * params.expert)
    return Phases(tuple(compute), tuple(communication), tuple(optimizer), tuple(host))


def transfers(time: TimeCoefficients, where: Layout, pp: int) -> float:
    """(H2) What all stages together wait for in the transfers of one micro-batch, in the unit of `time`."""
    sends = np.array([*time.sends[:pp], 0])
    return float(sum(sends[link].sum() for link in links_of(where, pp)))
