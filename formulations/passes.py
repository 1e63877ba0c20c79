"""Durations of the passes of a pipeline from the layers of its chunks: (T1), (T2), (T4) as sums over layer kinds.

Everything is linear in the counts of `ChunkCounts`, so one function serves seconds and integer units, one plan and many
splits of one candidate at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.data.pipeline import SPLIT
from shardwise.formulations.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from shardwise.formulations.timeline import Shape, StageSpans, runnable, stage_spans

if TYPE_CHECKING:
    from shardwise.data.pipeline import Layout
    from shardwise.data.plan import Plan
    from shardwise.formulations.coefficients import TimeCoefficients

Numbers = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ChunkCounts:
    """Layers of each unit (the kinds, the embedding, the head) in every slot, shape (slots, units) or (slots, units,
    rows): all of them, those repeated in full, and those of which modules are repeated, the units of each set of modules one
    after the other as in `TimeCoefficients.selective`."""

    every: Ints
    full: Ints
    selective: Ints


def shape_of(plan: Plan) -> Shape:
    """What the order of a plan's passes depends on, mended where it cannot run."""
    return runnable(Shape(plan.schedule, plan.degrees.pp, plan.degrees.vpp, plan.micro_batches))


def counts_of(plan: Plan, prefixes: Ints, sets: tuple[str, ...]) -> ChunkCounts:
    """The counts of a plan, whose sets of modules are among `sets`; `prefixes` counts each unit in the first 0, 1, ... L
    layers, embedding and head last."""
    settings = [plan.stages[stage] for stage in plan.layout.stage]
    block = np.array([s.recompute_layers if s.recompute == "full" else 0 for s in settings])
    selective = np.array([[s.mode == own for own in sets] for s in settings])
    return chunk_counts(plan.layout, prefixes, np.array(plan.cuts), block, selective)


def chunk_counts(
    where: Layout, prefixes: Ints, cuts: Ints, block: Ints, selective: npt.NDArray[np.bool_]
) -> ChunkCounts:
    """The counts of one split or, with an axis of rows behind all but `prefixes`, of many.

    Parameters
    ----------
    cuts
        First layer of each chunk of the network, and the number of layers.
    block, selective
        Per slot: layers repeated in full at its start, and whether each set of modules is repeated, (slots, sets).
    """
    chunk = np.array(where.chunk)
    start, end = cuts[chunk], cuts[chunk + 1]
    until = np.minimum(start + block, end)
    every, full = (np.moveaxis(prefixes[stop] - prefixes[start], -1, 1) for stop in (end, until))
    chosen = every[:, None] * selective[:, :, None]
    chosen = chosen.reshape(len(chosen), -1, *chosen.shape[3:])
    every[chunk == 0, -2] += 1
    every[chunk == chunk.max(), -1] += 1
    return ChunkCounts(every, full, chosen)


@dataclass(frozen=True, eq=False)
class PassTimes:
    """What `timeline` takes, and per stage the two tails and the transfers of one micro-batch."""

    durations: Numbers
    lags: Numbers
    tails: Numbers

    def spans(self, shape: Shape) -> StageSpans:
        """(T3)."""
        return stage_spans(shape, self.durations, self.lags)

    def step(self, shape: Shape) -> Numbers:
        """(T5) less the overhead."""
        return self.spans(shape).step(shape, self.tails)


def pass_times(time: TimeCoefficients, shape: Shape, where: Layout, counts: ChunkCounts) -> PassTimes:
    """(T1), (T2), (T4) of every slot and stage. The coefficients may have an axis of rows too, behind units and links."""
    rows = counts.every.shape[2:]

    def total(coefficients: Numbers | tuple[float, ...], of: Ints) -> Numbers:
        values = np.asarray(coefficients)
        return np.einsum("su...,u...->s...", of, values) if values.ndim == 2 else np.tensordot(of, values, axes=(1, 0))

    def by_row(values: Numbers | tuple[float, ...]) -> Numbers:
        numbers = np.asarray(values)
        return numbers if numbers.ndim == 2 or not rows else numbers[:, None]

    sends = by_row(time.sends)
    sends = np.concatenate([sends[: shape.pp], np.zeros_like(sends[:1])])
    after, hop = links_of(where, shape.pp)
    repeated = total(time.full, counts.full) + total(time.selective, counts.selective)
    backward = total(time.backward, counts.every) + repeated + sends[hop]
    durations = np.zeros((4, *backward.shape), dtype=backward.dtype)
    durations[FORWARD] = total(time.forward, counts.every) + sends[after]
    durations[BACKWARD] = backward
    if shape.schedule in SPLIT:
        durations[WEIGHT] = total(time.weight, counts.every)
        durations[INPUT] = backward - durations[WEIGHT]
    floor, overlap = total(time.tail_floor, counts.every), total(time.tail_overlap, counts.every)
    tails = larger_of_stages(where, floor, overlap)
    if shape.pp > 1:
        tails[[0, -1]] += np.asarray(time.tied, dtype=tails.dtype)
    lags = by_row(time.lags)[: shape.pp]
    return PassTimes(durations, np.broadcast_to(lags, (shape.pp, *rows)), tails)


def larger_of_stages(where: Layout, floor: Numbers, overlap: Numbers) -> Numbers:
    """(T4) Per stage, the larger of two sums over its slots; rows may lie behind the slots."""
    by_stage = (np.array(where.stage)[None, :] == np.arange(max(where.stage) + 1)[:, None]).astype(floor.dtype)
    return np.maximum(np.tensordot(by_stage, floor, axes=1), np.tensordot(by_stage, overlap, axes=1))


def links_of(where: Layout, none: int) -> tuple[Ints, Ints]:
    """The link that each slot's forward pass sends over, and its backward pass; `none` where it sends nothing."""
    hop = np.array([none if link < 0 else link for link in where.hop_before])
    after = np.array([*hop[1:], none])
    after[[run[-1] for run in where.directions]] = none
    return after, hop
