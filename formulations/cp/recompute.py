"""(G4) What is recomputed: per chunk nothing, a set of modules of all layers, or all of the first `block` layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.formulations.coefficients import searched_sets
from shardwise.formulations.cp.stages import at_position, kind_prefix
from shardwise.formulations.cp.variables import Choice, Chunks, Option, RecomputeChoice

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from shardwise.data.instance import Instance


def add_recompute(
    model: cp_model.CpModel, instance: Instance, options: tuple[Option, ...], choice: Choice, chunks: Chunks
) -> RecomputeChoice:
    """(G4): full_i = min(block_i, n_i); selective excludes full; one setting per stage, or one for all; one set of modules
    at most; none beside activations on the host, which takes one chunk."""
    sets = searched_sets(instance)
    total, size, kinds = len(instance.model.layers), len(chunks), len(instance.model.kinds)
    wanted = instance.limits.recompute
    if instance.rules.uniform_recompute:
        selective = tuple((model.new_bool_var(f"selective[{own}]"),) * size for own in sets)
        block = (model.new_int_var(0, total, "block"),) * size
    else:
        selective = tuple(tuple(model.new_bool_var(f"selective[{own}][{i}]") for i in range(size)) for own in sets)
        block = tuple(model.new_int_var(0, total, f"block[{i}]") for i in range(size))
    for *flags, layers in dict.fromkeys(zip(*selective, block, strict=True)):
        model.add_at_most_one(flags)
        for flag in flags:
            model.add(layers == 0).only_enforce_if(flag)
        if wanted is not None:
            model.add(sum(flags) == int(wanted == "selective"))
            model.add(layers >= 1) if wanted == "full" else model.add(layers == 0)
    if wanted == "full":
        for layers, size_of in zip(block, chunks.layers, strict=True):
            model.add(layers >= size_of)
    for c, option in enumerate(options):
        if option.candidate.degrees.offload_layers:  # U5
            for variable in (block[0], *(own[0] for own in selective)):
                model.add(variable == 0).only_enforce_if(choice.uses(c))
    if not instance.rules.uniform_recompute:
        _one_setting_per_stage(model, options, choice, selective, block)

    full_layers, any_full = [], []
    for i in range(size):
        layers = model.new_int_var(0, total, f"full_layers[{i}]")
        model.add_min_equality(layers, [block[i], chunks.layers[i]])
        some = model.new_bool_var(f"any_full[{i}]")
        model.add(layers >= 1).only_enforce_if(some)
        model.add(layers == 0).only_enforce_if(~some)
        full_layers.append(layers)
        any_full.append(some)
    full = [tuple(full_layers)]
    if kinds > 1:
        full = [_full_of_kind(model, instance, q, chunks, full_layers) for q in range(kinds)]
    selected = tuple(
        tuple(
            tuple(_selected(model, flag, count, q, i) for i, (flag, count) in enumerate(zip(flags, row, strict=True)))
            for q, row in enumerate(chunks.count)
        )
        for flags in selective
    )
    return RecomputeChoice(sets, selective, block, tuple(full_layers), tuple(full), selected, tuple(any_full))


def _one_setting_per_stage(
    model: cp_model.CpModel,
    options: tuple[Option, ...],
    choice: Choice,
    selective: tuple[tuple[cp_model.IntVar, ...], ...],
    block: tuple[cp_model.IntVar, ...],
) -> None:
    """The chunks of one stage share its setting; chunks that the candidate does not have have none."""
    for c, option in enumerate(options):
        chosen = choice.uses(c)
        for k in range(option.stages):
            first, *others = option.chunks_of(k)
            for i in others:
                for flags in selective:
                    model.add(flags[i] == flags[first]).only_enforce_if(chosen)
                model.add(block[i] == block[first]).only_enforce_if(chosen)
        for i in range(option.candidate.degrees.virtual_stages, len(block)):
            if not isinstance(block[i], int):
                for flags in selective:
                    model.add(flags[i] == flags[0]).only_enforce_if(chosen)
                model.add(block[i] == block[0]).only_enforce_if(chosen)


def _full_of_kind(
    model: cp_model.CpModel, instance: Instance, kind: int, chunks: Chunks, full_layers: list[cp_model.IntVar]
) -> tuple[cp_model.IntVar, ...]:
    """Layers of a kind among the first `full_layers` of each chunk."""
    total, prefix = len(instance.model.layers), kind_prefix(instance, kind)
    out = []
    for i, layers in enumerate(full_layers):
        until = model.new_int_var(0, total, f"recomputed_until[{kind}][{i}]")
        model.add(until == chunks.cut[i] + layers)
        before = at_position(model, prefix, chunks.cut[i], f"full_before[{kind}][{i}]")
        after = at_position(model, prefix, until, f"full_after[{kind}][{i}]")
        variable = model.new_int_var(0, prefix[-1], f"full[{kind}][{i}]")
        model.add(variable == after - before)
        out.append(variable)
    return tuple(out)


def _selected(
    model: cp_model.CpModel, flag: cp_model.IntVar, count: cp_model.IntVar, kind: int, chunk: int
) -> cp_model.IntVar:
    """`count` where the chunk is selective, 0 where it is not."""
    variable = model.new_int_var(0, max(count.proto.domain), f"selected[{kind}][{chunk}]")
    model.add(variable == count).only_enforce_if(flag)
    model.add(variable == 0).only_enforce_if(~flag)
    return variable
