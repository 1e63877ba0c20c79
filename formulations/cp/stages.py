"""(G2), (G3) How the layers are split into chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from shardwise.data.instance import Instance
    from shardwise.formulations.cp.variables import Choice, Chunks, Option


def add_contiguous_stages(
    model: cp_model.CpModel, instance: Instance, options: tuple[Option, ...], choice: Choice, chunks: Chunks
) -> None:
    """(G2): cut_0 = 0, chunks follow each other, the chosen candidate's last chunk ends with the last layer.

    Chunks beyond its S are empty. Between the first and the last chunk none is empty. Counts per kind are differences
    of the kind's prefix counts at the cuts.
    """
    total = len(instance.model.layers)
    model.add(chunks.cut[0] == 0)
    for i, layers in enumerate(chunks.layers):
        model.add(chunks.cut[i + 1] == chunks.cut[i] + layers)
    for c, option in enumerate(options):
        used = option.candidate.degrees.virtual_stages
        model.add(chunks.cut[used] == total).only_enforce_if(choice.uses(c))
        for i in range(1, used - 1):
            model.add(chunks.layers[i] >= 1).only_enforce_if(choice.uses(c))
    if len(instance.model.kinds) > 1:
        for q, count in enumerate(chunks.count):
            prefix = kind_prefix(instance, q)
            at_cut = [at_position(model, prefix, cut, f"before[{q}][{i}]") for i, cut in enumerate(chunks.cut)]
            for i, variable in enumerate(count):
                model.add(variable == at_cut[i + 1] - at_cut[i])


def add_even_chunks(model: cp_model.CpModel, options: tuple[Option, ...], choice: Choice, chunks: Chunks) -> None:
    """(G3): for candidates with v > 1 the middle chunks never grow and differ by at most one layer."""
    for c, option in enumerate(options):
        used = option.candidate.degrees.virtual_stages
        if option.candidate.degrees.vpp == 1:
            continue
        for i in range(1, used - 2):
            model.add(chunks.layers[i] >= chunks.layers[i + 1]).only_enforce_if(choice.uses(c))
        model.add(chunks.layers[1] - chunks.layers[used - 2] <= 1).only_enforce_if(choice.uses(c))


def kind_prefix(instance: Instance, kind: int) -> list[int]:
    """How many of the first 0, 1, ... L layers are of a kind."""
    out = [0]
    for index in instance.model.kind_indices:
        out.append(out[-1] + (index == kind))
    return out


def at_position(model: cp_model.CpModel, prefix: list[int], position: cp_model.IntVar, name: str) -> cp_model.IntVar:
    """A variable equal to `prefix[position]`."""
    target = model.new_int_var(0, prefix[-1], name)
    model.add_element(position, prefix, target)
    return target
