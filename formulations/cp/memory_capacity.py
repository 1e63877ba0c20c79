"""(G5) Every stage of the chosen candidate fits its device, at every moment of the schedule, and its device's share of the
host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.formulations.cp.variables import Choice, Chunks, Option, RecomputeChoice, on_stage, weighted
from shardwise.formulations.schedule import in_flight

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def add_memory_capacity(
    model: cp_model.CpModel,
    options: tuple[Option, ...],
    choice: Choice,
    chunks: Chunks,
    recompute: RecomputeChoice,
) -> None:
    """(G5): for each stage and each maximal vector of micro-batches in flight, the MiB of (F2) are within capacity, those
    of one layer that is repeated among them; those of (U2) are where the host has a share of the optimizer."""
    stages = max(option.stages for option in options)
    most = max(option.memory.needed(mode) for option in options for mode in ("full", *recompute.sets))
    working = [model.new_int_var(0, most, f"working[{k}]") for k in range(stages)]
    occupied = [model.new_bool_var(f"occupied[{i}]") for i in range(len(chunks))]
    for layers, some in zip(chunks.layers, occupied, strict=True):
        model.add(layers == 0).only_enforce_if(~some)
    for c, option in enumerate(options):
        chosen, memory, d = choice.uses(c), option.memory, option.candidate.degrees
        kinds = range(len(memory.state))
        for k in range(option.stages):
            if d.on_host:
                model.add(on_stage(memory.host, option, chunks, k) <= memory.host_capacity).only_enforce_if(chosen)
            rows = option.chunks_of(k)
            for i in rows:
                model.add(working[k] >= memory.working).only_enforce_if(chosen, recompute.any_full[i])
                for own, flags in zip(recompute.sets, recompute.selective, strict=True):
                    if memory.needed(own):
                        model.add(working[k] >= memory.needed(own)).only_enforce_if(chosen, flags[i], occupied[i])
            fixed = memory.fixed + memory.embedding * (0 in rows) + memory.head * (option.last_chunk in rows)
            states = [weighted(memory.state, chunks.count, i) for i in rows]
            for vector in in_flight(d.pp, d.vpp, option.candidate.micro_batches, k, option.candidate.schedule):
                kept = []
                for i, count in zip(rows, vector, strict=True):
                    none = [memory.kept(q, count, "none") for q in kinds]
                    kept.append(weighted(tuple(none), chunks.count, i))
                    modes = (*zip(recompute.sets, recompute.selected, strict=True), ("full", recompute.full))
                    for mode, repeated in modes:
                        less = tuple(memory.kept(q, count, mode) - n for q, n in zip(kinds, none, strict=True))
                        kept.append(weighted(less, repeated, i))
                total = fixed + sum(states) + sum(kept) + working[k]
                model.add(total <= memory.capacity).only_enforce_if(chosen)
