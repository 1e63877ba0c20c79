"""Close the open candidates with CP-SAT, and settle which of several equal optima is returned.

Among plans of equal integer step time the one returned is, in this order: of the first candidate in the tie order
(`Candidate.tie_key`); with the fewest recomputed layers, then the smallest settings; with the smallest largest chunk;
with the most layers in the earliest chunks, then the smallest settings there. The order does not depend on the number
of workers.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from itertools import takewhile
from math import floor, isfinite
from typing import TYPE_CHECKING, Any

from ortools.sat.python import cp_model

from shardwise.data.plan import Stage
from shardwise.formulations.cp import Option, build
from shardwise.solver.default_plan import even_split
from shardwise.solver.evaluate import admitted_units
from shardwise.solver.search import UNLIMITED

if TYPE_CHECKING:
    from shardwise.data.plan import Plan
    from shardwise.formulations.candidates import Candidate
    from shardwise.solver.search import Search

log = logging.getLogger(__name__)

WAVE = 24
SETTLE_DETERMINISTIC_LIMIT = 60.0


@dataclass
class Statistics:
    """What CP-SAT did, summed over its solves."""

    solves: int = 0
    variables: int = 0
    constraints: int = 0
    branches: int = 0
    conflicts: int = 0
    deterministic_time: float = 0.0
    wall_time_s: float = 0.0
    candidates: int = 0
    cut_rounds: int = 0
    cuts: int = 0
    settled: bool = True
    statuses: list[str] = field(default_factory=list)

    def add(self, solver: cp_model.CpSolver, model: cp_model.CpModel, status: str) -> None:
        response = solver.response_proto
        self.solves += 1
        self.variables = max(self.variables, len(model.proto.variables))
        self.constraints = max(self.constraints, len(model.proto.constraints))
        self.branches += response.num_branches
        self.conflicts += response.num_conflicts
        self.deterministic_time += response.deterministic_time
        self.wall_time_s += response.wall_time
        self.statuses.append(status)

    def to_dict(self) -> dict[str, Any]:
        return {
            "solves": self.solves,
            "largest_model_variables": self.variables,
            "largest_model_constraints": self.constraints,
            "branches": self.branches,
            "conflicts": self.conflicts,
            "deterministic_time": self.deterministic_time,
            "wall_time_s": self.wall_time_s,
            "candidates": self.candidates,
            "cut_rounds": self.cut_rounds,
            "cuts": self.cuts,
            "tie_order_settled": self.settled,
        }


def new_solver(search: Search, workers: int, seed: int) -> cp_model.CpSolver:
    """A solver with the time that is left."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    if search.deadline is not None:
        solver.parameters.max_time_in_seconds = max(0.0, search.deadline - time.monotonic())
    return solver


def close_waves(search: Search, statistics: Statistics, workers: int, seed: int, *, wave: int | None = WAVE) -> bool:
    """Solve the open candidates, best bound first. True when all were closed; else `search.open` keeps the rest."""
    while search.open:
        if search.incumbent is not None:
            search.open = [option for option in search.open if not search.beaten(option)]
            met = [option for option in search.open if search.met(option)]
            search.open = [option for option in search.open if option not in met]
            for option in met:
                confirm(search, statistics, option, seed)
            if not search.open:
                break
        options = tuple(search.open) if wave is None else _first_wave(search.open, wave)
        search.report("closing", search.least_s(options), len(search.open), force=True)
        statistics.candidates += len(options)
        if not close(search, statistics, options, workers, seed):
            return False
        search.open = search.open[len(options) :]
    return True


def _first_wave(options: list[Option], most: int) -> tuple[Option, ...]:
    """The first candidates, as far as their values are equal multiples of step times; else the first alone."""
    first = options[0].worth
    alike = tuple(takewhile(lambda option: option.worth.multiplier == first.multiplier, options))
    return alike[: most if first.plain else 1]


def close(search: Search, statistics: Statistics, options: tuple[Option, ...], workers: int, seed: int) -> bool:
    """The best plan of `options` by step time, then tie order, if it beats the incumbent.

    CP-SAT knows some paths through each schedule only. Where the plan that it returns takes longer than it says, the
    longest path of that plan becomes a cut, and it is solved again.
    """
    for option in options:
        seen = search.seen.get(option.candidate.tie_key)
        search.cut_off(even_plan(search, option.candidate) if seen is None else seen[1])
    while True:
        found = _solve(search, statistics, options, workers, seed)
        if found is None:
            return False
        plan, claimed = found
        if plan is None or accept(search, plan, options) <= claimed:
            return True
        add_cut(search, statistics, plan)
        search.report("closing", search.least_s(options), len(search.open))


def add_cut(search: Search, statistics: Statistics, plan: Plan) -> None:
    """Cut off a plan that takes longer than CP-SAT said, for another round."""
    if not search.cut_off(plan):
        raise RuntimeError("a plan breaks the cut that its own longest path made")
    statistics.cut_rounds += 1
    statistics.cuts = len(search.cuts)


def confirm(search: Search, statistics: Statistics, option: Option, seed: int) -> None:
    """The incumbent takes as long as the bound of its candidate, which leaves nothing to search: CP-SAT has to admit that
    plan at that time, by constraints that the bound knows nothing of."""
    incumbent = search.incumbent
    assert incumbent is not None
    search.cut_off(incumbent.plan)
    formulation = build(search.instance, (option,), incumbent.units, tuple(search.cuts))
    formulation.fix(incumbent.plan)
    formulation.model.minimize(formulation.value.variable)
    solver = new_solver(search, 1, seed)
    status = solver.solve(formulation.model)
    statistics.add(solver, formulation.model, solver.status_name(status))
    statistics.candidates += 1
    if status == cp_model.INFEASIBLE:
        raise RuntimeError("the formulation does not admit the plan that the bound was met by")


def even_plan(search: Search, candidate: Candidate) -> Plan:
    """Chunks of a candidate as even as they can be: where its longest path is likely to run."""
    d = candidate.degrees
    sizes = even_split(len(search.instance.model.layers), d.virtual_stages)
    stages = (Stage(tuple(sizes[i] for i in candidate.layout.chunks_of(k))) for k in range(d.pp))
    return candidate.plan(tuple(stages))


def _solve(
    search: Search, statistics: Statistics, options: tuple[Option, ...], workers: int, seed: int
) -> tuple[Plan | None, int] | None:
    """One CP-SAT solve: a plan and the V that it claims, no plan if none beats the incumbent; None out of time."""
    incumbent = search.incumbent
    most = search.most_units(option.candidate for option in options)
    formulation = build(search.instance, options, most, tuple(search.cuts))
    value = formulation.value
    for c, option in enumerate(options):
        longest = search.longest(option.candidate)
        formulation.model.add(formulation.clock.step <= longest).only_enforce_if(formulation.choice.uses(c))
    rank = {id(option): i for i, option in enumerate(sorted(options, key=lambda option: option.candidate.tie_key))}
    ranks = [rank[id(option)] for option in options]
    if incumbent is not None:
        for c, option in enumerate(options):
            later = int(option.candidate.tie_key > incumbent.candidate.tie_key)
            formulation.model.add(value.variable <= (incumbent.value - later) // value.factor).only_enforce_if(
                formulation.choice.uses(c)
            )
        formulation.add_hint(incumbent.plan, incumbent.units)
    order = cp_model.LinearExpr.weighted_sum(formulation.choice.literals, ranks)
    formulation.model.minimize(value.variable * len(options) + order)
    solver = new_solver(search, workers, seed)
    status = solver.solve(formulation.model)
    statistics.add(solver, formulation.model, solver.status_name(status))
    log.debug("closed %d candidates: %s", len(options), solver.status_name(status))
    if status == cp_model.MODEL_INVALID:
        raise RuntimeError(f"the formulation is invalid: {formulation.model.validate()}")
    if status == cp_model.INFEASIBLE:
        return None, 0
    if status == cp_model.OPTIMAL:
        return formulation.plan(solver.value), solver.value(value.variable) * value.factor
    if status == cp_model.FEASIBLE:
        accept(search, formulation.plan(solver.value), options)
    if isfinite(solver.best_objective_bound):
        search.raise_bounds(options, floor(solver.best_objective_bound / len(options)) * value.factor)
    return None


def accept(search: Search, plan: Plan, options: tuple[Option, ...]) -> int:
    """Offer a CP-SAT plan, which the independent evaluation must admit; its V in units, without end where it takes longer
    than is allowed, which CP-SAT may not know."""
    option = next(option for option in options if option.candidate.is_of(plan))
    inner = search.offer(plan, option.candidate)
    if inner is not None:
        return option.worth.multiplier * inner
    if admitted_units(search.instance, plan, search.unit_s) is None:
        raise RuntimeError("the formulation returned a plan that the evaluation does not admit")
    return UNLIMITED


def settle(search: Search, statistics: Statistics, seed: int) -> None:
    """Replace the incumbent by the first plan in the documented order among those of its candidate and step time."""
    incumbent = search.incumbent
    assert incumbent is not None
    if search.settle_by_splits():
        return
    if not search.worth(incumbent.candidate).plain:
        statistics.settled = False
        return
    recomputed: int | None = None
    largest: int | None = None
    for step in ("recompute", "largest", "lexicographic"):
        while True:
            found = _settled(search, statistics, seed, step, recomputed, largest)
            if found is None:
                statistics.settled = False
                return
            plan, value = found
            units = admitted_units(search.instance, plan, search.unit_s)
            if units is None:
                raise RuntimeError("the settled plan is not admitted by the evaluation")
            if units <= incumbent.units:
                break
            add_cut(search, statistics, plan)
        if step == "recompute":
            recomputed = value
        elif step == "largest":
            largest = value
        else:
            search.incumbent = None
            search.offer(plan, incumbent.candidate)


def _settled(
    search: Search, statistics: Statistics, seed: int, step: str, recomputed: int | None, largest: int | None
) -> tuple[Plan, int] | None:
    """The plan that is best by the order of one step, and its value; None where CP-SAT does not prove it in time."""
    incumbent = search.incumbent
    assert incumbent is not None
    candidate = incumbent.candidate
    memory = search.tables.memory(candidate.degrees, candidate.schedule)
    option = Option(candidate, search.coefficients(candidate), memory, 0, search.worth(candidate))
    formulation = build(search.instance, (option,), incumbent.units, tuple(search.cuts))
    model, chunks, recompute = formulation.model, formulation.chunks, formulation.recompute
    layers = len(search.instance.model.layers)
    fully = sum(recompute.full_layers)
    partly = sum(variable for own in recompute.selected for row in own for variable in row)
    flags = (flag for own in reversed(recompute.selective) for flag in own)
    settings = dict.fromkeys((*recompute.block, *flags))
    amount = (fully + partly) * (layers + 1) * len(settings) + sum(settings)
    most = model.new_int_var(0, layers, "largest_chunk")
    model.add_max_equality(most, chunks.layers)
    if recomputed is not None:
        model.add(amount == recomputed)
    if largest is not None:
        model.add(most == largest)
    solver = new_solver(search, 1, seed)
    solver.parameters.max_deterministic_time = SETTLE_DETERMINISTIC_LIMIT
    if step == "recompute":
        formulation.add_hint(incumbent.plan, incumbent.units)
        model.minimize(amount)
    elif step == "largest":
        formulation.add_hint(incumbent.plan, incumbent.units)
        model.minimize(most)
    else:
        # Depth-first search in a fixed order finds the lexicographically first solution first; presolve could replace
        # the variables that the order speaks of.
        solver.parameters.search_branching = cp_model.FIXED_SEARCH
        solver.parameters.cp_model_presolve = False
        solver.parameters.stop_after_first_solution = True
        model.add_decision_strategy(chunks.layers, cp_model.CHOOSE_FIRST, cp_model.SELECT_MAX_VALUE)
        model.add_decision_strategy(list(settings), cp_model.CHOOSE_FIRST, cp_model.SELECT_MIN_VALUE)
    status = solver.solve(model)
    statistics.add(solver, model, solver.status_name(status))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE) or (step != "lexicographic" and status != cp_model.OPTIMAL):
        return None
    value = 0 if step == "lexicographic" else round(solver.objective_value)
    return formulation.plan(solver.value), value
