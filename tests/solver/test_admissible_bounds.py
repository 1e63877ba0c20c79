"""Admissible bounds never exceed what exhaustive search finds, and the candidates are those of the universe."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from universe import (
    INFINIBAND,
    NVLINK,
    Corner,
    Judged,
    admitted,
    corners,
    examples,
    instance_of,
    instances,
    llama,
    profiles,
)

from shardwise.data.profile import load_profile
from shardwise.data.workload import Training
from shardwise.formulations.bounds import grid_bounds, least_memory_bytes, memory_fits, quick_bounds_s
from shardwise.formulations.candidates import Candidate, enumerate_grids
from shardwise.formulations.dominance import dominated
from shardwise.formulations.memory import MIB
from shardwise.formulations.reach import Reach
from shardwise.formulations.splits import _by_bound
from shardwise.solver.evaluate import evaluate
from shardwise.solver.search import UNLIMITED, Search

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Degrees, Plan
    from shardwise.data.profile import Profile

ROUNDING = 1 + 1e-12


def candidate_of(corner: Corner) -> Candidate:
    return Candidate(corner.degrees, corner.placement, corner.micro_batches, corner.schedule)


def evaluated_units(instance: Instance, plan: Plan, unit_s: float) -> int:
    """The units that `evaluate` tells of an admitted plan."""
    evaluation = evaluate(instance, plan, unit_s=unit_s)
    assert evaluation.admitted
    assert evaluation.objective_units is not None
    return evaluation.objective_units


def search_of(instance: Instance) -> tuple[Search, list[Judged]]:
    """A search with a unit, and the admitted plans in that unit."""
    search = Search(instance, None, None)
    found = admitted(instance, 1.0)
    search.choose_unit(min((one.seconds for one in found), default=1.0))
    return search, [replace(one, units=evaluated_units(instance, one.plan, search.unit_s)) for one in found]


def least_seconds(found: list[Judged]) -> dict[tuple[Degrees, str], float]:
    """The fastest plan of every row: of all placements and numbers of replicas."""
    least: dict[tuple[Degrees, str], float] = {}
    for one in found:
        key = replace(one.plan.degrees, dp_replicate=1), one.plan.schedule
        least[key] = min(least.get(key, np.inf), one.seconds)
    return least


@examples(30)
@given(instances())
def test_the_candidates_are_those_of_the_universe(instance: Instance) -> None:
    search = Search(instance, None, None)
    listed = [
        Corner(candidate.degrees, candidate.placement, candidate.micro_batches, cast("Any", candidate.schedule))
        for grid in enumerate_grids(instance)
        for row in range(len(grid))
        for candidate in search.candidates(grid, row)
    ]
    assert len(set(listed)) == len(listed)
    assert set(listed) == set(corners(instance))


@examples(10)
@given(instances(), profiles())
def test_a_plan_that_a_ring_dominates_has_a_twin_that_is_as_good_and_leaner(
    instance: Instance, profile: Profile
) -> None:
    """(D1)-(D3), plan by plan, in whole units, time and energy."""
    dominated_plans(replace(instance, profile=profile))


@pytest.mark.parametrize("rules", ["megatron-core", "torchtitan"])
def test_a_ring_dominates_what_waits_for_more(rules: str) -> None:
    limits = ("cp>=2", "tp=1", "pp=1", "micro_batch<=2", "zero<=2", "dp_replicate=1", "recompute=none")
    instance = instance_of(
        llama(2, 4096), (4, 4), (NVLINK, INFINIBAND), rules=rules, limits=limits, workload=Training(4096, 8)
    )
    assert dominated_plans(instance) > 10


def dominated_plans(instance: Instance) -> int:
    """How many admitted plans are dominated, each of which is held against its twin by a ring."""
    best = Search(instance, None, None).best_case
    beaten = {
        (grid.degrees(row), grid.shape.schedule)
        for grid in enumerate_grids(instance)
        for row in np.nonzero(dominated(best, grid))[0].tolist()
    }
    if not beaten:
        return 0
    search, found = search_of(instance)
    chosen = [own for own in found if (replace(own.plan.degrees, dp_replicate=1), own.plan.schedule) in beaten]
    for own in chosen:
        twin = replace(own.plan, degrees=replace(own.plan.degrees, cp_comm_type="p2p", cp_a2a=1))
        mine, theirs = (evaluate(instance, plan, unit_s=search.unit_s) for plan in (own.plan, twin))
        assert theirs.admitted
        assert all(a <= b for a, b in zip(theirs.memory_mib, mine.memory_mib, strict=True))
        assert theirs.objective_units is not None
        assert theirs.objective_units <= own.units
        assert mine.energy is not None
        assert theirs.energy is not None
        assert theirs.energy.joules_per_step.value <= mine.energy.joules_per_step.value
    return len(chosen)


@examples(30)
@given(instances(), st.floats(0, 1))
def test_grid_bounds_are_below_the_fastest_plan_of_each_row(instance: Instance, rank: float) -> None:
    """(B1)-(B7): without an incumbent of every row, with one of every row that can be as fast."""
    search, found = search_of(instance)
    least = least_seconds(found)
    values = sorted(least.values())
    incumbents = [None, *values[:1], *values[int(rank * (len(values) - 1)) :][:1]]
    for grid in search.enumerate(prune=False):
        keys = [(grid.degrees(row), grid.shape.schedule) for row in range(len(grid))]
        rows = {row: least[key] for row, key in enumerate(keys) if key in least}
        fits, quick_s = memory_fits(search.best_case, grid), quick_bounds_s(search.best_case, grid)
        for incumbent in incumbents:
            bounds = grid_bounds(search.best_case, grid, incumbent)
            for row, seconds in rows.items():
                assert fits[row]
                if incumbent is None or seconds <= incumbent:
                    assert quick_s[row] <= seconds
                    assert bounds[row] <= seconds
        for row, seconds in rows.items():
            own = grid_bounds(search.best_case, grid, seconds)
            assert own[row] <= seconds


@examples(30)
@given(instances(), st.floats(0, 1))
def test_the_bound_of_a_placement_is_below_its_fastest_plan(instance: Instance, rank: float) -> None:
    """(B2)-(B4) with the candidate's own placement, for candidates no slower than the incumbent."""
    search, found = search_of(instance)
    if not found:
        return
    found.sort(key=lambda one: one.seconds)
    incumbent = found[int(rank * (len(found) - 1))]
    search.offer(incumbent.plan, candidate_of(incumbent.corner))
    least: dict[Corner, float] = {}
    for one in found:
        if one.seconds <= incumbent.seconds:
            least.setdefault(one.corner, one.seconds)
    for corner, seconds in least.items():
        bound = search.placed_bound_s(candidate_of(corner))
        assert bound <= seconds * ROUNDING
        assert search.units_below(bound, corner.micro_batches) <= min(
            one.units for one in found if one.corner == corner
        )


@examples(20)
@given(instances(), profiles())
def test_the_bound_of_a_placed_candidate_is_below_every_plan_of_it(instance: Instance, profile: Profile) -> None:
    """(B2)-(B5) in seconds and in units: of every candidate and every plan, whatever the profile hides or shows. Without
    an incumbent nothing is known of the last chunk; with the slowest plan as the incumbent all others are in its reach."""
    search, found = search_of(replace(instance, profile=profile))
    slowest = max(found, key=lambda one: one.seconds, default=None)
    for incumbent in [None] if slowest is None else [None, slowest]:
        if incumbent is not None:
            search.offer(incumbent.plan, candidate_of(incumbent.corner))
        bounds = {corner: search.placed_bound_s(candidate_of(corner)) for corner in {one.corner for one in found}}
        for one in found:
            bound_s = bounds[one.corner]
            assert 0 < bound_s <= one.seconds * ROUNDING
            assert search.units_below(bound_s, one.plan.micro_batches) <= one.units


@examples(30)
@given(instances())
def test_the_split_bound_is_below_the_fastest_plan_of_each_candidate(instance: Instance) -> None:
    """(P1)-(P3): with any limit that a plan of the candidate keeps; no split without a limit means no plan. Of several
    chunks a stage only even ones are splits."""
    search, found = search_of(instance)
    least: dict[Corner, int] = {}
    for one in found:
        least[one.corner] = min(least.get(one.corner, one.units), one.units)
    for corner, units in least.items():
        if corner.degrees.vpp > 1 and not instance.rules.even_chunks:
            continue
        candidate = candidate_of(corner)
        time_units = search.coefficients(candidate)
        for limit in (UNLIMITED, units, units + 1000):
            bounds = [
                split.bound for split in itertools.islice(search.splits.ascending(candidate, time_units, limit), 50)
            ]
            assert bounds
            assert bounds[0] <= units
            assert bounds == sorted(bounds)
            assert bounds[-1] <= limit


@examples(20)
@given(instances(), st.floats(0.9, 1))
def test_layers_that_do_not_reach_the_end_have_no_split(instance: Instance, share: float) -> None:
    """(W1), (W2) against the dynamic program, with limits at, just below and further below its optimum."""
    unreached_splits(instance, share)


@pytest.mark.parametrize(
    "limits", [("micro_batch=1",), ("pp>=3", "micro_batch<=2"), ("memory_gb<=12", "pp>=2", "micro_batch=1")]
)
def test_layers_do_not_reach_the_end_where_a_stage_is_too_slow_or_too_full(limits: tuple[str, ...]) -> None:
    limits = (*limits, "vpp=1", "zero=1", "cp=1")
    instance = instance_of(llama(7, 4096), (8,), limits=limits, workload=Training(4096, 16))
    assert unreached_splits(instance, 0.97) > 20


def unreached_splits(instance: Instance, share: float) -> int:
    """How many dynamic programs (W2) makes needless, each of which is solved to see that it finds nothing."""
    search = Search(instance, None, None)
    search.choose_unit(1e-2)
    settings = [*((mode, 0) for mode in ("none", *search.tables.sets)), ("full", 1), ("full", 2)]
    return sum(
        needless_programs(search, candidate_of(corner), mode, block, share)
        for corner in corners(instance)
        if corner.degrees.vpp == 1 and instance.rules.uniform_recompute
        for mode, block in settings
    )


def needless_programs(search: Search, candidate: Candidate, mode: str, block: int, share: float) -> int:
    splits, time = search.splits, search.coefficients(candidate)
    memory = search.tables.memory(candidate.degrees, candidate.schedule)

    def best(limit: int) -> int | None:
        choices = splits._stage_choices(candidate, time, memory, limit, (mode,), block)
        return next((split.bound for split in _by_bound(choices, limit)), None)

    least = best(UNLIMITED) or UNLIMITED
    unreached = [
        limit
        for limit in {least, least - 1, int(least * share), int(least * share**2)}
        if not Reach(splits, candidate, time, memory, limit).all_layers(mode, block)
    ]
    assert all(best(limit) is None for limit in unreached)
    return len(unreached)


@examples(30)
@given(instances())
def test_trying_a_candidate_gives_its_optimum_or_a_bound_below(instance: Instance) -> None:
    """With one chunk a stage, or even ones and one recompute setting, splits are exact once all are tried; all others bound
    from below."""
    search, found = search_of(instance)
    least: dict[Corner, int] = {}
    for one in found:
        least[one.corner] = min(least.get(one.corner, one.units), one.units)
    for corner in corners(instance):
        candidate = candidate_of(corner)
        option = search.try_candidate(candidate, search.coefficients(candidate), UNLIMITED, UNLIMITED)
        exact = corner.degrees.vpp == 1 or (instance.rules.uniform_recompute and instance.rules.even_chunks)
        if corner not in least:
            assert option is None or not exact
            continue
        assert option is not None
        assert option.bound <= least[corner]
        if exact:
            assert option.bound == least[corner]


@examples(15)
@given(instances())
def test_integer_and_float_step_times_differ_by_the_stated_rounding(instance: Instance) -> None:
    search, found = search_of(instance)
    for one in found:
        over = one.units * search.unit_s - one.seconds
        assert over <= search.excess_units * search.unit_s + one.seconds * (ROUNDING - 1)
        assert -over <= search.rounding_units(one.plan.micro_batches) * search.unit_s


def test_the_memory_bound_keeps_a_row_at_exactly_its_least_need_and_drops_it_below() -> None:
    """(B1) on one stage with everything repeated is the need itself, less working memory and rounding."""
    limits = ("tp=1", "pp=1", "dp=1", "micro_batch=1", "zero=1", "recompute=full")

    def fits(memory_bytes: int) -> bool:
        instance = instance_of(llama(), (1,), limits=limits, memory_bytes=memory_bytes)
        (grid,) = enumerate_grids(instance)
        return bool(memory_fits(Search(instance, None, None).best_case, grid)[0])

    instance = instance_of(llama(), (1,), limits=limits)
    search = Search(instance, None, None)
    (grid,) = enumerate_grids(instance)
    need, _ = least_memory_bytes(search.best_case, [grid])
    # The capacity is taken down to whole MiB.
    edge = math.ceil(need / MIB) * MIB
    assert fits(edge)
    assert not fits(edge - 1)
    (plan, *_) = admitted(instance, 1.0)
    assert need <= evaluate(instance, plan.plan).peak_memory_bytes


def test_replicas_that_have_no_place_are_bounded_by_infinity_also_where_nothing_of_their_traffic_shows() -> None:
    """(B5) Three replicas do not spread over two nodes of two; with a floor of 0 that was 0 x infinity."""
    profile = replace(load_profile("megatron-core"), dp_comm_floor=0.0)
    instance = instance_of(
        llama(), (2, 2), (NVLINK, INFINIBAND), workload=Training(1024, 3), limits=("tp=1", "pp=1", "dp=3", "cp=1"),
        profile=profile,
    )  # fmt: skip
    search = Search(instance, None, None)
    for grid in enumerate_grids(instance):
        assert np.isinf(grid_bounds(search.best_case, grid, None)).all()
