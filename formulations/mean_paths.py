"""Paths through the schedule as sums over chunks, (C1) of `free_chunks`: those that are longest for some chunk times.

A path holds passes of chunks (each a sum of `TERMS` of the chunk, and of what it sends), waits for lags and ends on a
stage, whose tail is the larger of two sums. With the counts of `timeline` as weights it is

    P(x) = c_P + sum over terms t and chunks s of  a_Pts  x_ts  <=  T(x)  for any split x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.data.pipeline import SPLIT
from shardwise.formulations.free_chunks import TERMS, MeanPath
from shardwise.formulations.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from shardwise.formulations.timeline import longest_paths, mixed_paths, preferred

if TYPE_CHECKING:
    from shardwise.formulations.free_chunks import Floats, FreeChunks, Ints
    from shardwise.formulations.timeline import Numbers

MOST_PASSES = 200_000
"""Passes of a step up to which paths are followed through all of it."""


def followed(free: FreeChunks) -> bool:
    """Whether paths are followed through the whole step."""
    return 2 * free.m * free.chunks <= MOST_PASSES


def longest(free: FreeChunks, sums: Floats, spreads: Floats) -> tuple[list[MeanPath], float]:
    """(E4) Mean paths that are nearly longest where the chunks take `sums`, one for each spread; the longest length."""
    held = _Held.of(free, sums.astype(np.float64))
    mixed = mixed_paths(free.candidate.shape, held.durations, free.lags.astype(np.float64), held.tails, spreads)
    by_floor = mixed.stages * preferred((held.floors - held.overlaps)[:, None], spreads)
    found = held.paths(mixed.passes, mixed.hops, by_floor, mixed.stages - by_floor)
    return found, max(path.length(sums) for path in found)


def longest_of(free: FreeChunks, cuts: Ints) -> list[MeanPath]:
    """(E2) The path that the step of each split is the length of, one row of cuts each."""
    sums = np.stack([free.chunk_sums(row) for row in cuts], axis=-1).astype(np.int64)
    held = _Held.of(free, sums)
    lags = np.broadcast_to(free.lags[:, None], (free.p, len(cuts)))
    paths = longest_paths(free.candidate.shape, held.durations, lags, held.tails)
    ends = (np.arange(free.p)[:, None] == paths.stage).astype(np.int64)
    by_floor = ends * (held.floors >= held.overlaps)
    return held.paths(paths.passes, paths.hops, by_floor, ends - by_floor)


@dataclass(frozen=True, eq=False)
class _Held:
    """What `timeline` takes for chunk times of shape (terms, chunks) or (terms, chunks, rows); tails by stage."""

    free: FreeChunks
    durations: Numbers
    floors: Numbers
    overlaps: Numbers
    tied: Ints

    @staticmethod
    def of(free: FreeChunks, sums: Numbers) -> _Held:
        forward, backward, weight, floor, overlap = sums
        sent = free.sent.reshape(*free.sent.shape, *[1] * (sums.ndim - 2))
        durations = np.zeros((4, *forward.shape), sums.dtype)
        durations[FORWARD], durations[BACKWARD] = forward + sent[0], backward + sent[1]
        if free.candidate.schedule in SPLIT:
            durations[WEIGHT], durations[INPUT] = weight, durations[BACKWARD] - weight
        tied = np.zeros(free.p, np.int64)
        tied[[0, -1]] = int(free.time.tied)
        own = _own(free).astype(sums.dtype)
        return _Held(free, durations, np.tensordot(own, floor, 1), np.tensordot(own, overlap, 1), tied)

    @property
    def tails(self) -> Numbers:
        tied = self.tied.reshape(-1, *[1] * (self.floors.ndim - 1))
        return np.asarray(np.maximum(self.floors, self.overlaps) + tied)

    def paths(self, passes: Numbers, hops: Numbers, by_floor: Numbers, by_overlap: Numbers) -> list[MeanPath]:
        """Of counts with an axis of rows; `by_floor` and `by_overlap` are the shares that end with each tail, by stage."""
        free, own = self.free, _own(self.free).T
        weights = np.zeros((len(TERMS), free.chunks, passes.shape[-1]))
        weights[0] = passes[FORWARD]
        weights[1] = passes[BACKWARD] + passes[INPUT]
        weights[2] = passes[WEIGHT] - passes[INPUT]
        weights[3], weights[4] = own @ by_floor, own @ by_overlap
        constants = (weights[:2] * free.sent[..., None]).sum(axis=(0, 1)) + free.lags @ hops
        constants = constants + self.tied @ (by_floor + by_overlap) + int(free.time.overhead)
        return [MeanPath(weights[..., row].copy(), float(constants[row])) for row in range(len(constants))]


def _own(free: FreeChunks) -> Ints:
    """Which chunks are a stage's, shape (stages, chunks)."""
    return np.asarray(free.stage == np.arange(free.p)[:, None], np.int64)
