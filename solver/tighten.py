"""Better bounds and plans of open candidates whose chunks are free (`--free-chunks`), before CP-SAT has them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardwise.formulations.bounds import SAFETY
from shardwise.formulations.free_chunks import FreeChunks, MeanPath
from shardwise.formulations.mean_paths import followed, longest_of
from shardwise.formulations.path_game import play
from shardwise.formulations.ways import Paths, by_ways
from shardwise.solver.search import UNLIMITED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.formulations.coefficients import TimeCoefficients
    from shardwise.formulations.cp import Option
    from shardwise.formulations.free_chunks import Ints
    from shardwise.formulations.timeline import Shape
    from shardwise.solver.search import Search

FIRST_ROUNDS = 50
"""(C5) Rounds of local search before there is a relaxation."""
PHASES: tuple[tuple[int | None, int, int], ...] = (
    (60, 30, 16),
    (180, 30, 128),
    (240, 60, 256),
    (480, 120, 512),
    (None, 600, 512),
)
"""(C2) Turns; (C5) rounds of local search after them, from each of two splits: the one that the turns lead to, and the
best so far; (C4) graphs for one limit. Where the game is over, the last of them alone is left."""
FIRST_GRAPHS = 8
"""(C4) The same before the first turn."""
MOST_STARTS = 60
"""(C4) Splits near the mean of the game whose longest paths ways are judged by."""


def tighten(search: Search) -> None:
    """(C1)-(C5) for candidates whose value is a multiple of their step time, best bound first. A bound holds for all
    candidates of the same shape and times, and is theirs at once: the time may be up at any turn."""
    alike: dict[tuple[Shape, TimeCoefficients], list[int]] = {}
    for position, option in enumerate(search.open):
        if option.candidate.degrees.vpp > 1 and not search.instance.rules.even_chunks and option.worth.plain:
            alike.setdefault((option.candidate.shape, option.time), []).append(position)
    for positions in alike.values():
        first = next((search.open[own] for own in positions if not search.beaten(search.open[own])), None)
        for bound in raised(search, first) if first is not None else ():
            for own in positions:
                search.open[own] = replace(search.open[own], bound=max(search.open[own].bound, bound))
            search.report("pruning", search.least_s(search.open), len(search.open))
            search.check_time()
    search.drop_beaten()


def raised(search: Search, option: Option) -> Iterator[int]:
    """(C1)-(C5) Bounds of one candidate, while its plans are offered; ways first, without a game, where they are few."""
    candidate = option.candidate
    free = FreeChunks(search.splits, candidate, option.time, search.longest(candidate))
    best_mean, best_length = MeanPath.nothing(candidate.degrees.virtual_stages), -math.inf
    paths, bound = Paths(best_mean), option.bound
    for raised_to, cuts in by_ways(free, paths, bound, tries=1, graphs=FIRST_GRAPHS):
        bound = raised_to
        yield _offer_cuts(search, free, cuts, bound)
    known = search.seen.get(candidate.tie_key)
    if bound >= search.longest(candidate) or known is None:
        return
    yield from _searched(search, free, np.array(known[1].cuts), bound, FIRST_ROUNDS)
    free = FreeChunks(search.splits, candidate, option.time, search.longest(candidate))
    game = play(free, np.array(search.seen[candidate.tie_key][1].cuts))
    for seed, (turns, rounds, graphs) in enumerate(PHASES):
        starts = []
        for length, mean, cuts in itertools.islice(game, turns):
            if length > best_length:
                best_mean, best_length = mean, length
                bound = max(bound, math.floor(min(length * SAFETY, free.limit + 1)))
            yield bound
            if bound > search.longest(candidate) or cuts is None:
                return
            starts.append(cuts)
        if not starts and turns is not None:
            continue
        if starts:
            split, _ = free.fastest(np.unique(starts, axis=0), UNLIMITED)
            if split is not None:
                search.try_split(candidate, split)
                yield from _searched(search, free, np.array(split.cuts), bound, rounds, seed)
        best = np.array(search.seen[candidate.tie_key][1].cuts)
        yield from _searched(search, free, best, bound, rounds, seed + 1)
        nearer = FreeChunks(search.splits, candidate, option.time, search.longest(candidate))
        paths.lead(best_mean)
        if starts and followed(free):
            paths.add(longest_of(free, np.unique(starts, axis=0)[:MOST_STARTS]))
        for raised_to, cuts in by_ways(nearer, paths, bound, graphs=graphs):
            bound = raised_to
            yield _offer_cuts(search, nearer, cuts, bound)
        if bound >= search.longest(candidate):
            return


def _searched(search: Search, free: FreeChunks, cuts: Ints, bound: int, rounds: int, seed: int = 0) -> Iterator[int]:
    """Offer the plans that local search finds; `bound` as it is, once a round."""
    for better in free.better(cuts, rounds, seed):
        if better is not None:
            search.try_split(free.candidate, better)
        yield bound


def _offer_cuts(search: Search, free: FreeChunks, cuts: Ints | None, bound: int) -> int:
    """Offer the plans of some cuts with the least settings that fit; `bound` as it is."""
    if cuts is not None:
        split, _ = free.fastest(cuts[None], UNLIMITED)
        if split is not None:
            search.try_split(free.candidate, split)
    return bound
