"""Other plans than the best one, each of another layout.

A search drops what cannot be the best before it looks at any plan of it, so few other layouts are met on the way. After a
search that closed, the `ROWS` best of the rows that memory and shape bounds left are tried in order of their bound, of those
that differ in vpp alone the first

(A1) until `most` layouts beside the best plan's have a plan of V at most the bound of the next row, or `TRIED` candidates
     were tried (`TRIED_EACH` for each layout where that is more); a candidate is tried with plans up to the V of the last
     of those layouts, or up to `FIRST_TRY` times its bound while there are fewer.
(A2) The alternatives are the best plan met of every layout but the best plan's, in order of V, then of tie order.

Shapes whose bound was above the best plan are not looked at again, and a layout may have a better plan than the one met:
the alternatives are not proven to be the next best.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.solver.evaluate import evaluate
from shardwise.solver.result import Alternative, layout_of
from shardwise.solver.search import FIRST_TRY, Ordered, TimeUpError

if TYPE_CHECKING:
    from shardwise.data.plan import Degrees, Plan
    from shardwise.formulations.candidates import Candidate, GridShape
    from shardwise.solver.search import Search

ROWS, TRIED, TRIED_EACH = 4096, 256, 4


def meet_others(search: Search, most: int) -> None:
    """(A1); the incumbent stays."""
    incumbent = search.incumbent
    assert incumbent is not None
    own, tried = layout_of(incumbent.plan.degrees), 0
    known: set[tuple[GridShape, Degrees]] = set()
    last, met = _last(search, most), len(search.seen)
    try:
        for value_s, step_s, grid, row in search.refined(Ordered(search.bounded, ROWS)):
            if len(search.seen) > met:
                last, met = _last(search, most), len(search.seen)
            if tried >= max(TRIED, TRIED_EACH * most) or (last is not None and value_s > last * search.unit_s):
                break
            alike = grid.shape, replace(grid.degrees(row), vpp=1)
            if alike in known:
                continue
            known.add(alike)
            for candidate in search.candidates(grid, row):
                search.check_time()
                if layout_of(candidate.degrees) == own or candidate.tie_key in search.seen:
                    continue
                limit = _limit(search, candidate, step_s, last)
                search.try_candidate(candidate, search.coefficients(candidate), limit)
                tried += 1
    except TimeUpError:
        pass
    finally:
        search.incumbent = incumbent


def alternatives(search: Search, most: int) -> list[Alternative]:
    """(A2)."""
    instance, incumbent, goal = search.instance, search.incumbent, search.objective
    assert incumbent is not None
    return [
        Alternative(
            plan, goal.value(instance, goal.seconds(instance, evaluate(instance, plan))), value == incumbent.value
        )
        for value, plan in _layouts(search)[:most]
    ]


def _layouts(search: Search) -> list[tuple[int, Plan]]:
    """The best plan met of every layout but that of the incumbent, in order."""
    assert search.incumbent is not None
    found: dict[tuple[int, ...], tuple[int, Plan]] = {}
    for _, (value, plan) in sorted(search.seen.items(), key=lambda own: (own[1][0], own[0])):
        found.setdefault(layout_of(plan.degrees), (value, plan))
    found.pop(layout_of(search.incumbent.plan.degrees), None)
    return list(found.values())


def _last(search: Search, most: int) -> int | None:
    """V of the last of the `most` best layouts in units; None while there are fewer."""
    known = _layouts(search)
    return known[most - 1][0] if len(known) >= most else None


def _limit(search: Search, candidate: Candidate, step_s: float, last: int | None) -> int:
    """Units of time up to which a candidate is tried."""
    most_s = min(search.longest_s, FIRST_TRY * step_s)
    limit = math.ceil(most_s / search.unit_s)
    if last is None:
        return limit
    worth = search.worth(candidate)
    return min(limit, worth.longest(last // worth.multiplier))
