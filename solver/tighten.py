"""Better bounds and plans of open candidates whose chunks are free (`--free-chunks`), before CP-SAT has them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardwise.formulations.bounds import SAFETY
from shardwise.formulations.free_chunks import FreeChunks, MeanPath
from shardwise.formulations.path_game import play
from shardwise.formulations.stage_graph import by_ways
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
PHASES: tuple[tuple[int | None, int], ...] = ((240, 120), (240, 120), (480, 120), (None, 600))
"""(C2) Turns, and (C5) rounds of local search after them, from each of two splits: the one that the turns lead to, and the
best so far. Then (C4). Where the game is over, the last of them alone is left."""


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
    """(C1)-(C5) Bounds of one candidate, while its plans are offered; all ways first, where they are few."""
    candidate = option.candidate
    free = FreeChunks(search.splits, candidate, option.time, search.longest(candidate))
    path = MeanPath.nothing(candidate.degrees.virtual_stages)
    bound, cuts = by_ways(free, path, option.bound, 1)
    yield _offer_cuts(search, free, cuts, bound)
    known = search.seen.get(candidate.tie_key)
    if bound >= search.longest(candidate) or known is None:
        return
    yield from _searched(search, free, np.array(known[1].cuts), bound, FIRST_ROUNDS)
    free = FreeChunks(search.splits, candidate, option.time, search.longest(candidate))
    game = play(free, np.array(search.seen[candidate.tie_key][1].cuts))
    for seed, (turns, rounds) in enumerate(PHASES):
        starts = []
        for length, mean, cuts in itertools.islice(game, turns):
            if length > bound:
                path, bound = mean, math.floor(min(length * SAFETY, free.limit + 1))
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
        bound, cuts = by_ways(nearer, path, bound)
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
