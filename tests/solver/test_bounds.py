"""No bound is above the exhaustive minimum of what it bounds, and the candidates are exactly the legal ones."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import assume, given
from reference import TooManyError, admitted, degree_tuples, placements, plausible
from small import instances

from shardwise.data.instance import Instance
from shardwise.data.plan import Degrees, Placement
from shardwise.formulations.bounds import grid_bounds
from shardwise.formulations.candidates import enumerate_grids
from shardwise.solver.evaluate import evaluate
from shardwise.solver.search import UNLIMITED, Search

UNIT_S = 2.0**-40


def minima(instance: Instance) -> tuple[dict[Degrees, float], dict[tuple[Degrees, Placement], int]]:
    """Exhaustive minima: seconds per degrees, units per candidate."""
    seconds: dict[Degrees, float] = defaultdict(lambda: float("inf"))
    units: dict[tuple[Degrees, Placement], int] = defaultdict(lambda: UNLIMITED)
    try:
        every = admitted(instance, UNIT_S)
    except TooManyError:
        assume(False)
        raise
    for value, plan in every:
        units[plan.degrees, plan.placement] = min(units[plan.degrees, plan.placement], value)
        seconds[plan.degrees] = min(seconds[plan.degrees], evaluate(instance, plan).step_time_s)
    return seconds, units


@given(instances(most_layers=5))
def test_grid_bounds_are_admissible(instance: Instance) -> None:
    seconds, _ = minima(instance)
    search = Search(instance, None, None)
    incumbents = [None, *([min(seconds.values())] if seconds else [])]
    for grid in enumerate_grids(instance):
        for incumbent in incumbents:
            result = grid_bounds(search.best_case, grid, incumbent)
            for row in range(len(grid)):
                found = seconds.get(grid.degrees(row))
                if found is None:
                    continue
                assert result.fits[row], "a row with a plan was pruned by memory"
                # With an incumbent a bound may only speak of plans that are not slower than it.
                if incumbent is None or found <= incumbent:
                    assert result.lower_s[row] <= found


@given(instances(most_layers=5))
def test_split_and_placement_bounds_are_admissible(instance: Instance) -> None:
    _, units = minima(instance)
    assume(units)
    search = Search(instance, None, None)
    search.unit_s = UNIT_S
    for grid in enumerate_grids(instance):
        for row in range(len(grid)):
            for candidate in search.candidates(grid, row):
                found = units.get((candidate.degrees, candidate.placement))
                splits = search.splits.best(candidate, search.coefficients(candidate), UNLIMITED)
                if found is None:
                    continue
                assert splits, "a candidate with a plan was pruned by its splits"
                assert splits[0].bound <= found
                tight = search.splits.best(candidate, search.coefficients(candidate), found)
                assert tight
                assert tight[0].bound <= found


@given(instances(most_layers=4))
def test_candidates_are_exactly_the_legal_degrees_and_placements(instance: Instance) -> None:
    search = Search(instance, None, None)
    found = {
        (c.degrees, c.placement.tp, c.placement.pp, c.placement.dp)
        for grid in enumerate_grids(instance)
        for row in range(len(grid))
        for c in search.candidates(grid, row)
    }
    expected = set()
    for degrees in degree_tuples(instance):
        if not plausible(instance, degrees):
            continue
        batch = instance.workload.global_batch
        if degrees.vpp > 1 and batch // degrees.dp // degrees.micro_batch % degrees.pp:
            continue
        if degrees.vpp > instance.rules.max_vpp:
            continue
        for placement in placements(instance, degrees):
            if hosts(instance, placement):
                expected.add((degrees, placement.tp, placement.pp, placement.dp))
    assert found == expected


def hosts(instance: Instance, placement: Placement) -> bool:
    """Whether every level has the members that the placement uses, by walking the tree."""
    return all(
        used <= instance.cluster.capacity(placement.blocks[:level]) for level, used in enumerate(placement.blocks)
    )
