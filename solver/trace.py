"""A simulation as a Chrome trace: what chrome://tracing and ui.perfetto.dev open.

The format is the JSON object form of "Trace Event Format" (Duca and Sinclair, Google, 2016): one process per pipeline
stage, threads for its compute, its transfers and what follows its last pass. Times are microseconds, kept to the
nanosecond: starts and ends are rounded, never lengths, so that events which touch do not overlap. A long step is
sampled by micro-batch; what is shown stays where it is.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.formulations.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, passes_per_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardwise.data.plan import Plan
    from shardwise.solver.simulate import Passes, Simulation

Ints = npt.NDArray[np.int64]
Event = dict[str, Any]

MAX_PASSES = 24_000
"""More passes than this are sampled; each makes up to five events of some 120 bytes, and a trace stays below 20 MB."""
NANOSECONDS = 1e9
COMPUTE, AFTER, SEND = 0, 1, 2
"""Threads of a stage; transfers that run at the same time take further ones from `SEND` on."""
LETTERS = {FORWARD: "F", BACKWARD: "B", INPUT: "I", WEIGHT: "W"}
NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradient", WEIGHT: "weight gradient"}
SHOWN_RANGES = 3


def chrome_trace(simulation: Simulation, max_passes: int = MAX_PASSES) -> dict[str, Any]:
    """The trace as a JSON document.

    Parameters
    ----------
    max_passes
        More passes are sampled: `otherData.sampled` then names the micro-batches kept, and is null otherwise.
    """
    kept = kept_micro_batches(simulation, max_passes)
    every = len(kept) == simulation.micro_batches
    shown = np.isin(simulation.passes.micro_batch, kept)
    # A flow binds to the last slice that began before it in the file.
    events = [*_passes(simulation.passes, shown), *_transfers(simulation, shown)]
    for stage in range(simulation.plan.degrees.pp):
        events += _after(simulation, stage)
        events += _memory(simulation, stage, shown)
    lanes = {(event["pid"], event["tid"]) for event in events}
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "generator": "shardwise simulate",
            "schedule": simulation.plan.schedule,
            "step_time_s": simulation.step_time_s,
            "micro_batches": simulation.micro_batches,
            "sampled": None if every else {"micro_batches": kept.tolist(), "why": said_sampled(simulation, max_passes)},
        },
        "traceEvents": [*_names(simulation.plan, sorted(lanes)), *events],
    }


def kept_micro_batches(simulation: Simulation, max_passes: int = MAX_PASSES) -> Ints:
    """Micro-batches in the trace: all, or of those that there is room for a third from the start of the step, a third
    from its end, and the others evenly between. DualPipe's two directions keep the same ones."""
    plan, total = simulation.plan, simulation.micro_batches
    once = passes_per_step(plan.schedule, total).micro_batches
    room = max(max_passes * once // max(len(simulation.passes), 1), 1)
    if room >= once:
        return np.arange(total)
    edge = room // 3
    between = np.linspace(edge, once - 1 - edge, room - 2 * edge).round().astype(np.int64)
    kept = np.unique([*range(edge), *between.tolist(), *range(once - edge, once)])
    return np.concatenate([kept + start for start in range(0, total, once)])


def said_sampled(simulation: Simulation, max_passes: int = MAX_PASSES) -> str | None:
    """The sampling in words, or None where every pass is shown."""
    kept = kept_micro_batches(simulation, max_passes)
    if len(kept) == simulation.micro_batches:
        return None
    return (
        f"{len(kept)} of {simulation.micro_batches} micro-batches are shown, the first, the last and some evenly between; "
        "gaps in compute are not all idle, and memory is told at the passes shown and at its peak"
    )


def _passes(passes: Passes, shown: npt.NDArray[np.bool_]) -> Iterator[Event]:
    starts, ends = _nanoseconds(passes.start_s), _nanoseconds(passes.end_s)
    for op in np.flatnonzero(shown).tolist():
        kind, chunk, i = int(passes.kind[op]), int(passes.chunk[op]), int(passes.micro_batch[op])
        yield _complete(
            f"{LETTERS[kind]} chunk {chunk} micro-batch {i}", NAMES[kind], int(passes.stage[op]), COMPUTE,
            starts[op], ends[op], {"kind": NAMES[kind], "chunk": chunk, "micro_batch": i},
        )  # fmt: skip


def _transfers(simulation: Simulation, shown: npt.NDArray[np.bool_]) -> Iterator[Event]:
    """(Y1) A slice on the sender's stage, and a flow from its pass to the receiver's."""
    passes, transfers = simulation.passes, simulation.transfers
    starts, ends = _nanoseconds(passes.start_s), _nanoseconds(passes.end_s)
    begun, over = _nanoseconds(transfers.start_s), _nanoseconds(transfers.end_s)
    blocking = transfers.blocking_until_s - transfers.start_s
    own = np.flatnonzero(shown[transfers.sender])
    own = own[np.lexsort((transfers.start_s[own], passes.stage[transfers.sender[own]]))]
    lanes = _lanes(own, passes.stage[transfers.sender], begun, over)
    for t, lane in zip(own.tolist(), lanes, strict=True):
        sender, receiver = int(transfers.sender[t]), int(transfers.receiver[t])
        source, target = int(passes.stage[sender]), int(passes.stage[receiver])
        i, chunk = int(passes.micro_batch[sender]), int(passes.chunk[sender])
        what = "activations" if passes.kind[sender] == FORWARD else "gradients"
        yield _complete(
            f"{what} to stage {target} micro-batch {i}", "transfer", source, SEND + lane, begun[t], over[t],
            {"chunk": chunk, "micro_batch": i, "link": int(transfers.link[t]), "blocking_us": _us(blocking[t] * NANOSECONDS)},
        )  # fmt: skip
        # A flow binds to the slice that its time lies in, so it leaves between the ends of the pass.
        leaves = max(starts[sender], min(max(begun[t], starts[sender] + 1), ends[sender] - 1))
        flow = {"name": what, "cat": "transfer", "id": t}
        yield {"ph": "s", **flow, "pid": source, "tid": COMPUTE, "ts": _us(leaves)}
        yield {"ph": "f", "bp": "e", **flow, "pid": target, "tid": COMPUTE, "ts": _us(starts[receiver])}


def _lanes(own: Ints, stage: Ints, begun: list[int], over: list[int]) -> Iterator[int]:
    """The first lane of its stage that is free for each transfer, these sorted by stage and start."""
    for _, run in groupby(own.tolist(), key=lambda t: int(stage[t])):
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        lanes = 0
        for t in run:
            while busy and busy[0][0] <= begun[t]:
                heappush(free, heappop(busy)[1])
            if not free:
                heappush(free, lanes)
                lanes += 1
            lane = heappop(free)
            heappush(busy, (over[t], lane))
            yield lane


def _after(simulation: Simulation, stage: int) -> Iterator[Event]:
    """(Y2) What follows the last pass. The overhead waits for every stage where the schedule does."""
    tail = simulation.tails[stage]
    edges = np.cumsum([tail.start_s, tail.gradient_sync_s, tail.optimizer_s, tail.parameter_gather_s])
    parts = list(zip(("gradient sync", "optimizer", "parameter gather"), edges, edges[1:], strict=False))
    if simulation.overhead_s:
        over = max(t.start_s + t.total_s for t in simulation.tails) if simulation.synchronised else edges[-1]
        parts.append(("step overhead", max(over, edges[-1]), max(over, edges[-1]) + simulation.overhead_s))
    for name, start, end in parts:
        begun, over_ns = _nanoseconds(np.array([start, end]))
        if over_ns > begun:
            yield _complete(name, "after the passes", stage, AFTER, begun, over_ns, {"kind": name})


def _memory(simulation: Simulation, stage: int, shown: npt.NDArray[np.bool_]) -> Iterator[Event]:
    """(Y4) At every change that a shown pass makes, of those at one time the last, and at the peak."""
    memory = simulation.memory[stage]
    keep = np.append(True, shown[memory.passes])
    keep &= np.append(np.diff(_nanoseconds(memory.time_s)) > 0, True)
    keep[memory.held_bytes.argmax()] = True
    times = _nanoseconds(memory.time_s[keep])
    for ts, held in zip(times, memory.held_bytes[keep].tolist(), strict=True):
        yield {
            "ph": "C", "name": "memory", "pid": stage, "tid": COMPUTE, "ts": _us(ts), "args": {"bytes": round(held)},
        }  # fmt: skip


def _names(plan: Plan, lanes: Iterable[tuple[int, int]]) -> Iterator[Event]:
    """Names and order of processes and threads."""
    for stage in range(plan.degrees.pp):
        yield _metadata("process_name", stage, COMPUTE, {"name": stage_name(plan, stage)})
        yield _metadata("process_sort_index", stage, COMPUTE, {"sort_index": stage})
    for stage, thread in lanes:
        further = f" {thread - SEND + 1}" if thread > SEND else ""
        name = {COMPUTE: "compute", AFTER: "gradients + optimizer"}.get(thread, f"send{further}")
        yield _metadata("thread_name", stage, thread, {"name": name})
        yield _metadata("thread_sort_index", stage, thread, {"sort_index": thread})


def stage_name(plan: Plan, stage: int) -> str:
    """The stage with its devices, by rank, and its layers."""
    d = plan.degrees
    size = d.tp * d.cp
    if plan.placement.rank_order == "tp-dp-pp":
        devices = [range(stage * size * d.dp, (stage + 1) * size * d.dp)]
    else:
        devices = [range((i * d.pp + stage) * size, (i * d.pp + stage + 1) * size) for i in range(d.dp)]
    cuts = plan.cuts
    layers: list[range] = []
    for chunk in plan.layout.chunks_of(stage):
        own = range(cuts[chunk], cuts[chunk + 1])
        if layers and own and layers[-1].stop == own.start:
            layers[-1] = range(layers[-1].start, own.stop)
        elif own:
            layers.append(own)
    return f"stage {stage}: devices {_ranges(devices, SHOWN_RANGES)}; layers {_ranges(layers, len(layers))}"


def _ranges(ranges: list[range], most: int) -> str:
    words = [str(r.start) if len(r) == 1 else f"{r.start}-{r.stop - 1}" for r in ranges[:most]]
    more = f", ... ({sum(map(len, ranges))} in all)" if len(ranges) > most else ""
    return (", ".join(words) or "none") + more


def _complete(name: str, category: str, pid: int, tid: int, begun: int, over: int, args: dict[str, Any]) -> Event:
    return {
        "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": _us(begun), "dur": _us(over - begun),
        "args": args,
    }  # fmt: skip


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _nanoseconds(seconds: npt.NDArray[Any]) -> list[int]:
    """Whole nanoseconds; rounding keeps the order of times."""
    rounded: list[int] = np.rint(np.asarray(seconds, dtype=np.float64) * NANOSECONDS).astype(np.int64).tolist()
    return rounded


def _us(nanoseconds: float) -> float:
    return round(float(nanoseconds) / 1e3, 3)
