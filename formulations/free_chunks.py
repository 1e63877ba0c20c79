"""Splits into chunks of any size (`--free-chunks`, v > 1): bounds for all of them, and good ones to try.

A split x cuts the L layers into S = p v chunks that follow each other; all but the first and the last hold a layer. All
times are in integer units and without recompute, but for what a limit asks of every layer. Bounds speak of the plans that
last no longer than a `limit`.

(C1) mean paths: the step is the longest of the paths through the schedule (E2), and each path P is a sum over chunks,
     P(x) = c_P + sum_s a_Ps F(x_s) + b_Ps B(x_s) + ...  So for weights w_P >= 0 with sum 1
     T(x) >= w(x) = sum_P w_P P(x)  for every split x, and  min_x w(x)  is a shortest way through the grid of (chunk,
     first layer): an admissible bound for any w, however it was found.
(C2) the weights: paths and splits play against each other (`path_game`). The limit is the linear relaxation, in which a
     chunk may be the mean of several.
(C3) stages: fill, drain and work of a stage (T6), and the late paths of (P2), depend on where its v chunks start and end,
     and on no other chunk. The chunks of the stages before it end where its own start, so a split is a way through p + 1
     layers of nodes (end of each run of chunks so far; where each run began), and the step is at least the largest of
     the p costs on the way (`stage_graph`). Here whole layers count: a way is a split, not a mean of splits.
(C4) the ways on which none of many paths is longer than T are counted as they grow stage by stage (`ways`). Unlike a mean
     of paths, which is one for all splits, the path that drops a way depends on what it holds. Where few are left, all of
     them go through the timeline (P4): no plan of the candidate is below  min(T + 1, the least of them).
(C5) good splits: the relaxation says what every chunk should take, and of the splits that differ least from that, in sums
     of squares, the fastest is near the best. Local search moves runs of neighbouring cuts by one layer, each split with
     settings that fit its memory (P3); where no move is left, a few random ones lead away. Generators are seeded: no run
     differs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.formulations.passes import links_of
from shardwise.formulations.splits import Split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.formulations.candidates import Candidate
    from shardwise.formulations.coefficients import TimeCoefficients
    from shardwise.formulations.splits import SplitSearch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

TERMS = ("forward", "backward", "weight", "tail_floor", "tail_overlap")
"""What a path is a weighted sum of, per chunk."""
NEIGHBOURS = 512
NEAR = 0.01
"""(C5) Moves in a round, and how much slower than the best a split may be that the search goes on from."""
BATCH = 64
"""Splits timed at once."""


@dataclass(frozen=True, eq=False)
class MeanPath:
    """(C1) A convex combination of paths: what each of `TERMS` counts in every chunk, shape (terms, chunks)."""

    weights: Floats
    constant: float

    @staticmethod
    def nothing(chunks: int) -> MeanPath:
        """No path at all, which every split is longer than."""
        return MeanPath(np.zeros((len(TERMS), chunks)), 0.0)

    @property
    def key(self) -> tuple[bytes, float]:
        """What tells it from others."""
        return self.weights.tobytes(), self.constant

    def length(self, sums: Floats) -> float:
        """Of chunks that take `sums`, in `TERMS`."""
        return float((self.weights * sums).sum() + self.constant)

    def towards(self, other: MeanPath, share: float) -> MeanPath:
        """The combination that gives `share` to `other`."""
        return MeanPath(
            (1 - share) * self.weights + share * other.weights,
            (1 - share) * self.constant + share * other.constant,
        )


class FreeChunks:
    """(C1)-(C5) of one candidate, for plans that last at most `limit` units."""

    def __init__(self, splits: SplitSearch, candidate: Candidate, time: TimeCoefficients, limit: int) -> None:
        self.splits, self.candidate, self.limit = splits, candidate, limit
        self.given, self.time = time, _repeated(time, splits)
        d, self.layers = candidate.degrees, splits.layers
        self.p, self.v, self.m, self.chunks = d.pp, d.vpp, candidate.micro_batches, d.virtual_stages
        self.sums = np.stack([splits.prefix(getattr(self.time, name)) for name in TERMS])
        self.ends = np.array([[getattr(self.time, name)[unit] for unit in (-2, -1)] for name in TERMS], np.int64)
        sends = np.array([*(int(x) for x in time.sends[: self.p]), 0], np.int64)
        self.sent = np.stack([sends[links] for links in links_of(candidate.layout, self.p)])
        self.lags = np.array([int(x) for x in time.lags[: self.p]], np.int64)
        self.stage = np.array(candidate.layout.stage)
        first, size = np.arange(self.layers + 1)[:, None], np.arange(self.layers + 1)
        work = self.m * (self.sums[0] + self.sums[1])
        after = np.minimum(first + size, self.layers)
        fits = (first + size <= self.layers) & (work[after] - work[first] + int(time.overhead) <= limit)
        self.most = int(np.flatnonzero(fits.any(axis=0)).max(initial=0))
        self.after = after[:, : self.most + 1]
        self.barred = np.where(fits[:, : self.most + 1], 0.0, np.inf)
        self.barred_between = self.barred.copy()
        self.barred_between[:, 0] = np.inf
        self.loads = (self.sums[:, self.after] - self.sums[:, first]).astype(np.float64)
        """What 0, 1, ... `most` layers from each on take, shape (terms, first, size)."""

    # -- (C1), (C2) -----------------------------------------------------------------------------------------------

    def shortest(self, path: MeanPath) -> tuple[float, Ints | None]:
        """(C1) The least length of a mean path, and the cuts that have it; infinite, and none, where no split is within
        the limit."""
        least, cuts = self._cheapest(lambda chunk: self.through(path, chunk))
        return least + self.fixed(path), cuts

    def fixed(self, path: MeanPath) -> float:
        """(C1) What a path takes whatever the split: its constant, embedding and head."""
        return float((path.weights[:, [0, -1]] * self.ends).sum()) + path.constant

    def nearest(self, sums: Floats) -> Ints | None:
        """(C5) The cuts whose chunks take nearest to what they take in `sums`; none where no split is within the limit."""
        both = self.loads[0] + self.loads[1]
        aims = sums[:2].sum(axis=0)
        aims[[0, -1]] -= self.ends[:2].sum(axis=0)
        return self._cheapest(lambda chunk: (both / aims.mean() - aims[chunk] / aims.mean()) ** 2)[1]

    def _cheapest(self, cost_of: Callable[[int], Floats]) -> tuple[float, Ints | None]:
        """The cuts with the least sum of costs, given by chunk for each first layer and size, and that sum."""
        onward = np.full(self.layers + 1, np.inf)
        onward[-1] = 0
        choices = []
        for chunk in reversed(range(self.chunks)):
            cost = self.onwards(cost_of(chunk), chunk, onward)
            choice = cost.argmin(axis=1)
            choices.append(choice)
            onward = cost[np.arange(self.layers + 1), choice]
        if not np.isfinite(onward[0]):
            return np.inf, None
        cuts = [0]
        for choice in reversed(choices):
            cuts.append(cuts[-1] + int(choice[cuts[-1]]))
        return float(onward[0]), np.array(cuts)

    def through(self, path: MeanPath, chunk: int) -> Floats:
        """What a mean path takes through each size of a chunk, by its first layer, without embedding and head."""
        out: Floats = (path.weights[:, chunk] @ self.loads.reshape(len(TERMS), -1)).reshape(self.after.shape)
        return out

    def onwards(self, costs: Floats, chunk: int, onward: Floats) -> Floats:
        """What each size of a chunk costs, with all behind it, by its first layer; infinite where it does not fit."""
        out: Floats = onward.take(self.after)
        out += costs
        out += self.bars(chunk)
        return out

    def bars(self, chunk: int) -> Floats:
        """What sizes of a chunk cost more by first layer: nothing where they are allowed and fit, without end where not."""
        return self.barred_between if 0 < chunk < self.chunks - 1 else self.barred

    def chunk_sums(self, cuts: Ints) -> Floats:
        """The `TERMS` of every chunk, embedding and head included."""
        out = np.diff(self.sums[:, cuts]).astype(np.float64)
        out[:, 0] += self.ends[:, 0]
        out[:, -1] += self.ends[:, 1]
        return out

    def ways_mean(self, path: MeanPath, spread: float) -> Floats:
        """(C2) The mean `TERMS` of every chunk over all splits, one that a mean path is longer for by `spread` counting
        less by a factor of e."""
        onward = np.full(self.layers + 1, np.inf)
        onward[-1] = 0
        shares = []
        for chunk in reversed(range(self.chunks)):
            cost = self.onwards(self.through(path, chunk), chunk, onward)
            least = cost.min(axis=1)
            least[~np.isfinite(least)] = 0
            share = np.exp((least[:, None] - cost) / spread)
            total = share.sum(axis=1)
            onward = np.where(total > 0, least - spread * np.log(np.maximum(total, 1)), np.inf)
            shares.append(share / np.maximum(total, 1)[:, None])
        reached: Floats = np.zeros(self.layers + 1)
        reached[0] = 1
        out = np.zeros((len(TERMS), self.chunks))
        for chunk, share in enumerate(reversed(shares)):
            passing = reached[:, None] * share
            out[:, chunk] = np.tensordot(self.loads, passing, 2)
            reached = np.bincount(self.after.ravel(), passing.ravel(), self.layers + 1).astype(np.float64)
        out[:, [0, -1]] += self.ends
        return out

    def steps(self, cuts: Ints) -> Ints:
        """(P4) The steps of splits without recompute, one row of cuts each."""
        plain: tuple[tuple[str, int], ...] = (("none", 0),) * self.p
        out = [np.zeros(0, np.int64)]
        for first in range(0, len(cuts), BATCH):
            batch = [Split(0, tuple(row), plain) for row in cuts[first : first + BATCH].tolist()]
            out.append(self.splits.timed(self.candidate, self.time, batch)[0])
        return np.concatenate(out)

    # -- (C5) -----------------------------------------------------------------------------------------------------

    def better(self, cuts: Ints, rounds: int, seed: int = 0) -> Iterator[Split | None]:
        """(C5) from one split on: every split that is faster than all before it, with settings; none for each of some
        rounds of moves."""
        moves, draw = _moves(self.chunks), np.random.default_rng(seed)
        here, step = cuts, 2**62
        best, least = here, self.limit + 1
        for _ in range(rounds):
            yield None
            tried = here + (moves if len(moves) <= NEIGHBOURS else draw.permutation(moves)[:NEIGHBOURS])
            split, length = self.fastest(tried, step)
            if split is None:
                here, step = here if step <= least * (1 + NEAR) else best, 2**62
                for _ in range(int(draw.integers(1, 4))):
                    near = here + moves
                    near = near[_legal(near)]
                    here = near[draw.integers(len(near))] if len(near) else here
                continue
            here, step = np.array(split.cuts), length
            if step < least:
                best, least = here, step
                yield split

    def fastest(self, cuts: Ints, below: int) -> tuple[Split | None, int]:
        """The fastest split and its step, of the first splits by simple paths among which one fits the memory and lasts
        less than `below` units; none if there is none."""
        found = self.splits.of_cuts(self.candidate, self.given, cuts[_legal(cuts)], below - 1)
        found.sort(key=lambda split: split.bound)
        for first in range(0, len(found), BATCH):
            batch = found[first : first + BATCH]
            steps, _ = self.splits.timed(self.candidate, self.given, batch)
            steps = np.maximum(steps, [split.bound for split in batch])
            if steps.min() < below:
                return batch[int(steps.argmin())], int(steps.min())
        return None, below


def _repeated(time: TimeCoefficients, splits: SplitSearch) -> TimeCoefficients:
    """With the recompute that a limit asks of every layer, of the sets of modules the least for each."""
    wanted = splits.instance.limits.recompute
    if wanted not in ("selective", "full"):
        return time
    sets = range(len(splits.tables.sets)) if wanted == "selective" else ()
    each = [min(own) for own in zip(*map(time.of_set, sets), strict=True)] if sets else list(time.full)
    again = [*each[:-2], 0, 0]
    return replace(time, backward=tuple(b + more for b, more in zip(time.backward, again, strict=True)))


def _moves(chunks: int) -> Ints:
    """(C5) Every run of cuts between chunks, one layer up or down."""
    runs = itertools.combinations(range(1, chunks + 1), 2)
    up = np.array([[first <= cut < stop for cut in range(chunks + 1)] for first, stop in runs], dtype=np.int64)
    return np.concatenate((up, -up))


def _legal(cuts: Ints) -> Mask:
    """Rows of cuts whose chunks hold a layer, the first and the last as few as none."""
    sizes = np.diff(cuts)
    return np.asarray((sizes >= 0).all(axis=1) & (sizes[:, 1:-1] >= 1).all(axis=1))
