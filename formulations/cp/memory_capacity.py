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
    """(G5): for each stage and each maximal vector of micro-batches in flight, the MiB of (F2) are within capacity; those of
    (U2) are where the host has a share of the optimizer."""
    stages = max(option.stages for option in options)
    working = [model.new_bool_var(f"working[{k}]") for k in range(stages)]
    for c, option in enumerate(options):
        chosen, memory, d = choice.uses(c), option.memory, option.candidate.degrees
        kinds = range(len(memory.state))
        for k in range(option.stages):
            if d.offload_optimizer:
                model.add(on_stage(memory.host, option, chunks, k) <= memory.host_capacity).only_enforce_if(chosen)
            rows = option.chunks_of(k)
            for i in rows:
                model.add_implication(recompute.any_full[i], working[k]).only_enforce_if(chosen)
            fixed = memory.fixed + memory.embedding * (0 in rows) + memory.head * (option.last_chunk in rows)
            states = [weighted(memory.state, chunks.count, i) for i in rows]
            for vector in in_flight(d.pp, d.vpp, option.candidate.micro_batches, k, option.candidate.schedule):
                kept = []
                for i, count in zip(rows, vector, strict=True):
                    none, selective, full = (
                        [memory.kept(q, count, mode) for q in kinds] for mode in ("none", "selective", "full")
                    )
                    kept.append(weighted(tuple(none), chunks.count, i))
                    kept.append(
                        weighted(tuple(s - n for s, n in zip(selective, none, strict=True)), recompute.selected, i)
                    )
                    kept.append(weighted(tuple(f - n for f, n in zip(full, none, strict=True)), recompute.full, i))
                total = fixed + sum(states) + sum(kept) + memory.working * working[k]
                model.add(total <= memory.capacity).only_enforce_if(chosen)
