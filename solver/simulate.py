"""Simulate a plan: when every pass, transfer and sync of a step starts and ends, and what every stage holds meanwhile.

The passes are those of the timeline (timeline, E1, E2), played whole: no period is left out. What is around them:

(Y1) a transfer starts with its exposed part at the end of the sender's pass (step_time, T2) and lasts for L after it.
(Y2) after its last pass stage k is busy for X_k (step_time, T4): the exposed gradient sync, the optimizer, the exposed
     parameter gather, in this order. The overhead of the step comes last.
(Y3) bubble_k = T - overhead - X_k - the sum of the passes of k.
(Y4) a stage holds its fixed lines, and for every micro-batch in flight what a chunk keeps of it: from the start of the
     forward pass to the end of the backward pass, with a split one to that of the weight gradient. The largest sum is
     the peak that `evaluate` tells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.data.faults import InputError
from shardwise.formulations.schedule import FORWARD, INPUT, UNSYNCHRONISED, passes_per_step
from shardwise.formulations.timeline import Numbers, Shape, StageSpans, graph, pass_ends
from shardwise.solver.evaluate import activation_bytes, cost_tables, evaluate, optimizer_s, stage_params, timed_plan

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.pipeline import Layout
    from shardwise.data.plan import Plan
    from shardwise.formulations.coefficients import CostTables
    from shardwise.solver.evaluate import Evaluation, TimedPlan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_PASSES = 4_000_000
"""More passes than this take minutes and gigabytes; the step time of such a plan is for `evaluate`."""
GB = 1e9


@dataclass(frozen=True, eq=False)
class Passes:
    """Every pass of a step, stage by stage in the order they run: one entry each per array.

    kind
        `schedule.FORWARD`, `BACKWARD`, `INPUT` or `WEIGHT`.
    slot, chunk
        Where the pass lies in the layout, and the chunk of the network it works on.
    micro_batch
        DualPipe feeds the second half of them to its second copy of the network.
    first
        Per stage: where its passes start, and the number of passes behind them.
    """

    stage: Ints
    kind: Ints
    slot: Ints
    chunk: Ints
    micro_batch: Ints
    start_s: Numbers
    end_s: Numbers
    first: Ints

    def __len__(self) -> int:
        return len(self.stage)

    def of_stage(self, stage: int) -> slice:
        return slice(int(self.first[stage]), int(self.first[stage + 1]))

    @property
    def spans(self) -> StageSpans:
        """Start of the first and end of the last pass of every stage."""
        return StageSpans(self.start_s[self.first[:-1]], self.end_s[self.first[1:] - 1])

    @property
    def busy_s(self) -> Numbers:
        """Sum of the passes of every stage."""
        return np.add.reduceat(self.end_s - self.start_s, self.first[:-1])


@dataclass(frozen=True, eq=False)
class Transfers:
    """(Y1) Every transfer between stages: the passes that send and receive, the link, and when.

    The sender's pass goes on until `blocking_until_s`; from there to `end_s` only the receiver waits.
    """

    sender: Ints
    receiver: Ints
    link: Ints
    start_s: Numbers
    blocking_until_s: Numbers
    end_s: Numbers

    def __len__(self) -> int:
        return len(self.sender)


@dataclass(frozen=True, slots=True)
class Tail:
    """(Y2) What a stage does after its last pass, in seconds; `total_s` is X of the stage."""

    start_s: float
    gradient_sync_s: float
    optimizer_s: float
    parameter_gather_s: float
    total_s: float


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """(Y4) What one device of a stage holds from each change on; the first entry is the start of the step.

    passes
        The pass behind each change but the first.
    """

    time_s: Numbers
    held_bytes: Floats
    in_flight: Ints
    passes: Ints

    @property
    def peak_bytes(self) -> float:
        return float(self.held_bytes.max())

    @property
    def peak_time_s(self) -> float:
        return float(self.time_s[int(self.held_bytes.argmax())])

    @property
    def peak_in_flight(self) -> int:
        """Micro-batches in flight at most, one for each chunk that keeps something of it."""
        return int(self.in_flight.max())


@dataclass(frozen=True, eq=False)
class Simulation:
    """A step of a plan, event by event (`docs/simulate.md`). Times are seconds from the start of the first pass.

    Attributes
    ----------
    passes, transfers
        Every forward and backward pass, and every transfer between stages, as NumPy arrays with one entry each.
    tails, memory
        What each stage does after its last pass, and what one of its devices holds over time, in bytes; one per stage.
    micro_batches
        Those simulated: more than the plan's where its schedule cannot run with so few.
    bubble_s
        (Y3) Per stage.
    """

    plan: Plan
    evaluation: Evaluation
    micro_batches: int
    passes: Passes
    transfers: Transfers
    tails: tuple[Tail, ...]
    memory: tuple[MemoryTimeline, ...]
    step_time_s: float
    overhead_s: float
    bubble_s: tuple[float, ...]

    @property
    def synchronised(self) -> bool:
        """Whether every stage starts the next step at once."""
        return self.plan.schedule not in UNSYNCHRONISED

    @property
    def bubble_share(self) -> tuple[float, ...]:
        """The bubbles as shares of the step."""
        return tuple(bubble / self.step_time_s if self.step_time_s else 0.0 for bubble in self.bubble_s)

    def to_dict(self) -> dict[str, Any]:
        """The summary: plain numbers and strings, memory in decimal GB."""
        spans, busy = self.passes.spans, self.passes.busy_s
        return {
            "schedule": self.plan.schedule,
            "micro_batches": self.micro_batches,
            "step_time_s": self.step_time_s,
            "overhead_s": self.overhead_s,
            "passes": len(self.passes),
            "transfers": len(self.transfers),
            "legal": self.evaluation.legal,
            "fits": self.evaluation.fits,
            "faults": list(self.evaluation.faults),
            "limit_faults": list(self.evaluation.limit_faults),
            "stages": [
                {
                    "start_s": float(spans.start[k]),
                    "end_s": float(spans.end[k]),
                    "busy_s": float(busy[k]),
                    "gradient_sync_s": tail.gradient_sync_s,
                    "optimizer_s": tail.optimizer_s,
                    "parameter_gather_s": tail.parameter_gather_s,
                    "bubble_s": self.bubble_s[k],
                    "bubble_share": self.bubble_share[k],
                    "peak_memory_gb": self.memory[k].peak_bytes / GB,
                    "peak_memory_at_s": self.memory[k].peak_time_s,
                    "peak_in_flight": self.memory[k].peak_in_flight,
                }
                for k, tail in enumerate(self.tails)
            ],
        }


def simulate(instance: Instance, plan: Plan) -> Simulation:
    """Simulate one step of `plan` on `instance`.

    Returns
    -------
    Simulation
        For an illegal plan too; `evaluation.faults` names every broken rule.

    Raises
    ------
    InputError
        When the plan does not belong to the instance, or has more passes than can be played.
    """
    where, degrees = plan.layout, plan.degrees
    once = passes_per_step(plan.schedule, plan.micro_batches)
    count = len(where.stage) * len(once.kinds) * once.micro_batches
    if count > MAX_PASSES:
        raise InputError(
            f"micro_batches={plan.micro_batches} make up to {count} passes, at most {MAX_PASSES} are simulated"
        )
    evaluation = evaluate(instance, plan)
    tables, timed = cost_tables(instance), timed_plan(instance, plan)
    shape = timed.shape
    passes, transfers = played(shape, where, timed.passes.durations, timed.passes.lags, timed.coefficients.sends)
    spans = passes.spans
    tails = tuple(_tail(tables, plan, timed, k, float(spans.end[k])) for k in range(degrees.pp))
    total = np.array([tail.total_s for tail in tails])
    overhead = float(timed.coefficients.overhead)
    step = float(spans.step(shape, total))
    return Simulation(
        plan=plan,
        evaluation=evaluation,
        micro_batches=shape.micro_batches,
        passes=passes,
        transfers=transfers,
        tails=tails,
        memory=tuple(_memory(tables, plan, evaluation, passes, k) for k in range(degrees.pp)),
        step_time_s=step + overhead,
        overhead_s=overhead,
        bubble_s=tuple(np.maximum(step - total - passes.busy_s, 0.0).tolist()),
    )


def played(
    shape: Shape, where: Layout, durations: Numbers, lags: Numbers, sends: tuple[float, ...] | Numbers
) -> tuple[Passes, Transfers]:
    """(Y1) The passes and transfers of a step; arguments as in `timeline.pass_ends`, and `sends` the exposed part of
    each link."""
    whole, slots = graph(shape), len(where.stage)
    ends = np.append(pass_ends(whole, durations, lags), 0)
    arrival = ends[whole.source] + np.append(lags, 0)[whole.hop]
    starts = np.maximum(ends[whole.before], arrival)
    kind, slot = np.divmod(whole.duration, slots)
    micro = np.empty(len(whole), dtype=np.int64)
    present = whole.index >= 0
    micro[whole.index[present]] = np.nonzero(present)[2]
    if shape.schedule == "dualpipe":
        micro += (slot >= shape.pp) * (shape.micro_batches // 2)
    stage = np.array(where.stage)[slot]
    order = np.argsort(stage, kind="stable")  # a stage's passes are on rising levels
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    passes = Passes(
        stage[order],
        kind[order],
        slot[order],
        np.array(where.chunk)[slot][order],
        micro[order],
        starts[order],
        ends[:-1][order],
        np.searchsorted(stage[order], np.arange(shape.pp + 1)),
    )
    crossing = order[whole.hop[order] < shape.pp]
    link, sender = whole.hop[crossing], rank[whole.source[crossing]]
    sent = passes.end_s[sender]
    exposed = np.minimum(np.asarray(sends)[link], sent - passes.start_s[sender])
    return passes, Transfers(sender, rank[crossing], link, sent - exposed, sent, sent + lags[link])


def in_flight_changes(passes: Passes, stage: int) -> tuple[Ints, Ints, Ints]:
    """(Y4) The passes of a stage that change what is in flight, the slot each works on, and +1 or -1."""
    own = passes.of_stage(stage)
    changing = np.flatnonzero(passes.kind[own] != INPUT) + own.start
    change = np.where(passes.kind[changing] == FORWARD, 1, -1)
    return changing, passes.slot[changing], change


def _memory(tables: CostTables, plan: Plan, evaluation: Evaluation, passes: Passes, stage: int) -> MemoryTimeline:
    """(Y4) of one stage."""
    changing, slot, change = in_flight_changes(passes, stage)
    count = np.zeros(len(changing) + 1, dtype=np.int64)
    count[1:] = change.cumsum()
    activations = np.zeros(len(changing) + 1)
    for own, kept in zip(plan.layout.slots_of(stage), activation_bytes(tables, plan, stage), strict=True):
        activations[1:] += np.where(slot == own, change, 0).cumsum() * kept
    lines = evaluation.stages[stage]
    fragmented = 1 + tables.instance.profile.memory_fragmentation
    steady = lines.total - lines.activations * fragmented
    rising = passes.kind[changing] == FORWARD
    times = np.where(rising, passes.start_s[changing], passes.end_s[changing])
    return MemoryTimeline(np.append(0.0, times), steady + activations, count, changing)


def _tail(tables: CostTables, plan: Plan, timed: TimedPlan, stage: int, start_s: float) -> Tail:
    """(Y2) The exposed sync is shared between gradients and parameters in proportion to what each takes unhidden; that
    of tied embeddings belongs to the gradients."""
    total = float(timed.passes.tails[stage])
    params, optimizer = stage_params(tables, plan, stage), optimizer_s(tables, plan, stage)
    dense, expert = tables.group_rates(plan.degrees, plan.placement, plan.schedule)
    sync = dense.communication_s * params.dense + expert.communication_s * params.expert
    ends = plan.degrees.pp > 1 and stage in (0, plan.degrees.pp - 1)
    gather = 0.0
    if sync > 0:
        exposed = max(total - optimizer - (timed.coefficients.tied if ends else 0.0), 0.0)
        rates = _gather_rates(tables, plan)
        gather = exposed * (rates[0] * params.dense + rates[1] * params.expert) / sync
    return Tail(start_s, max(total - optimizer - gather, 0.0), optimizer, gather, total)


def _gather_rates(tables: CostTables, plan: Plan) -> tuple[float, float]:
    """(T4) Seconds per parameter, dense and expert, of the parameter gather within the sync at the end of a step.

    Without a pipeline ZeRO-2 has it there and ZeRO-3 has not, so it is what they differ by (`step_time.sync_rates`).
    """
    d = plan.degrees
    if d.zero == 0 or (d.zero == 3 and d.pp == 1):
        return 0.0, 0.0
    (dense, expert), (less, expert_less) = (
        tables.group_rates(replace(d, zero=zero, pp=1), plan.placement) for zero in (2, 3)
    )
    return dense.communication_s - less.communication_s, expert.communication_s - expert_less.communication_s
