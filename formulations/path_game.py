"""The best mean of paths for a candidate with free chunks, (C2): a game between paths and splits.

A mean path w is a bound of  min_x w(x)  for every split x, (C1). The best of them is the value of a game: one player mixes
paths P, the other mixes splits x, and the first gets P(x). Neither can list what it may mix, but both can answer a mixture
of the other: with a longest path for the mean of some splits, with a shortest way for a mean of some paths.

(G1) Both keep the answers so far, rows and columns of a matrix of lengths, and mix them by linear programming. An answer
     that is not among them is added, and so on (double oracle; McMahan, Gordon, Blum 2003; as a linear program, columns
     and cuts at once). Old ones that the mixture does not use are left out. The bound is the shortest way for any mean
     path, however it came about.
(G2) The optimum of a few answers jumps from turn to turn. The splits therefore also answer the middle between the mean
     path of the matrix and the best one so far (in-out separation; Ben-Ameur, Neto 2007).
(G3) A single path or split is a corner of what can be mixed, and little of that is near corners. Both therefore also answer
     with means of their own: of walks that are nearly longest (timeline, E4), of ways that are nearly shortest, each
     weighted by how much it lacks. Some turns in which each answers the mean of the other's answers so far (fictitious
     play; Brown 1951, Robinson 1951) give the matrix its first rows and columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.formulations.free_chunks import MeanPath
from shardwise.formulations.mean_paths import followed, longest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.formulations.free_chunks import FreeChunks, Ints

Floats = npt.NDArray[np.float64]
Answer = TypeVar("Answer")

FIRST_TURNS = 30
TURNS = 1000
"""(G3), (G1) Turns of fictitious play, and of the matrix after them."""
KEPT = 150
"""(G1) The newest answers that stay, used or not."""
EVERY = 5
"""(G3) Turns of fictitious play between two that the matrix starts from."""
SPREADS = np.array((1e-6, 0.05, 0.3))
FIRST_WAYS_SPREAD, WAYS_SPREAD = 15.0, 1.0
"""(G3) By how much paths may lack, and ways in the first turns and in those of the matrix: in passes of mean duration."""
BETWEEN = 0.5
"""(G2) How far from the best mean path to that of the matrix."""
CONVERGED = 2e-4
"""The bound is close enough to the value of the game."""


def play(free: FreeChunks, cuts: Ints) -> Iterator[tuple[float, MeanPath, Ints | None]]:
    """(C2) from one split on: in every turn a mean path, the length of the shortest way for it, and the cuts nearest to the
    mean of the splits, (C5); infinite, and none, where no split is within the limit."""
    if not followed(free):
        return
    sums = free.chunk_sums(cuts)
    spread = float(sums[:2].sum()) / (2 * free.chunks)
    rows: list[MeanPath] = []
    columns = [sums]
    path = best = MeanPath.nothing(free.chunks)
    bound, least = -np.inf, np.inf
    for turn in range(FIRST_TURNS):
        found, length = longest(free, sums, SPREADS * spread)
        least = min(least, length)
        rows.append(found[1])
        share = 2 / (turn + 2)
        path = path.towards(found[1], share)
        length, way = free.shortest(path)
        yield length, path, free.nearest(sums)
        if way is None:
            return
        if length > bound:
            best, bound = path, length
        sums = (1 - share) * sums + share * free.ways_mean(path, FIRST_WAYS_SPREAD * spread)
        if turn % EVERY == EVERY - 1:
            rows.append(path)
            columns.append(sums)
    for _ in range(TURNS):
        path, sums, of_rows, of_columns = mixed(rows, columns, least)
        rows, columns = kept(rows, of_rows), kept(columns, of_columns)
        found, length = longest(free, sums, SPREADS * spread)
        least = min(least, length)
        rows += found
        between, near = best.towards(path, BETWEEN), free.nearest(sums)
        for tried in (between, path):
            length, way = free.shortest(tried)
            yield length, tried, near
            if way is None:
                return
            columns.append(free.chunk_sums(way))
            if length > bound:
                best, bound = tried, length
                rows.append(best)
        columns.append(free.ways_mean(between, WAYS_SPREAD * spread))
        if bound >= least * (1 - CONVERGED):
            return


def kept(answers: list[Answer], shares: Floats) -> list[Answer]:
    """(G1) Those that are used, and the newest."""
    newest = len(answers) - KEPT
    return [answer for at, answer in enumerate(answers) if shares[at] > 0 or at >= newest]


def mixed(rows: list[MeanPath], columns: list[Floats], scale: float) -> tuple[MeanPath, Floats, Floats, Floats]:
    """(G1) The mean of the rows whose shortest column is longest, the mean of the columns whose longest row is shortest, and
    the shares in each; `scale` is about the length of both."""
    from scipy.optimize import linprog  # takes half a second, which a solve with even chunks can do without

    weights = np.stack([row.weights.ravel() for row in rows])
    constants = np.array([row.constant for row in rows])
    sums = np.stack([column.ravel() for column in columns])
    lengths = (weights @ sums.T + constants[:, None]) / scale
    n, m = lengths.shape
    solved = linprog(
        np.append(np.zeros(m), 1),
        A_ub=np.hstack((lengths, np.full((n, 1), -1.0))),
        b_ub=np.zeros(n),
        A_eq=np.append(np.ones(m), 0)[None],
        b_eq=[1],
        bounds=[(0, None)] * m + [(None, None)],
        method="highs",
    )
    of_columns = np.maximum(solved.x[:-1], 0)
    of_rows = np.maximum(-solved.ineqlin.marginals, 0)
    of_columns, of_rows = of_columns / of_columns.sum(), of_rows / of_rows.sum()
    path = MeanPath((of_rows @ weights).reshape(rows[0].weights.shape), float(of_rows @ constants))
    return path, (of_columns @ sums).reshape(columns[0].shape), of_rows, of_columns
