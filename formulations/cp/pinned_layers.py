"""(G8) Layers that the user pins to stages, or together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from shardwise.data.limits import Limits
    from shardwise.formulations.cp.variables import Choice, Chunks, Option


def add_pinned_layers(
    model: cp_model.CpModel, limits: Limits, options: tuple[Option, ...], choice: Choice, chunks: Chunks
) -> None:
    """(G8): with h_qi whether layer q lies in chunk i, cut_i <= q < cut_i+1, exactly one of them for each pinned q, the
    chosen candidate's layer lies in a chunk of a stage that it may be on, and two that go together in chunks of one stage.
    """
    layers = sorted({*limits.pinned, *(layer for pair in limits.together for layer in pair)})
    held = {layer: _chunk_of(model, chunks, layer) for layer in layers}
    for c, option in enumerate(options):
        stages = range(option.stages)
        for layer, allowed in limits.pinned.items():
            own = [held[layer][i] for k in stages if k in allowed for i in option.chunks_of(k)]
            model.add_bool_or(own).only_enforce_if(choice.uses(c))
        for one, other in limits.together:
            for k in stages:
                for i in option.chunks_of(k):
                    beside = [held[other][j] for j in option.chunks_of(k)]
                    model.add_bool_or(beside).only_enforce_if(choice.uses(c), held[one][i])


def _chunk_of(model: cp_model.CpModel, chunks: Chunks, layer: int) -> list[cp_model.IntVar]:
    """h of one layer."""
    held = [model.new_bool_var(f"holds[{layer}][{i}]") for i in range(len(chunks))]
    model.add_exactly_one(held)
    for i, literal in enumerate(held):
        model.add(chunks.cut[i] <= layer).only_enforce_if(literal)
        model.add(chunks.cut[i + 1] >= layer + 1).only_enforce_if(literal)
    return held
