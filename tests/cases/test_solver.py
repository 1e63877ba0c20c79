"""CP-SAT as its own reports say it has to be used: integers that are small enough, bounds from data, honest statuses.

Sources are issues of google/or-tools. docs/cases.md lists them; exhaustive checks of optimum and infeasibility are in
tests/solver/test_universe.py.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from case_inputs import llama_like, nodes

import shardwise as sw
from shardwise.data.limits import parse_limits
from shardwise.formulations.cp import formulation as cp_formulation
from shardwise.solver import close

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ortools.sat.python import cp_model

    from shardwise.formulations.cp.formulation import Formulation

EXACT = 2**53
BOOLEAN = 2**31
"""Products of coefficients and bounds stay exact in a double; rows of enforced Booleans hold 32-bit coefficients."""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Formulation]:
    """Every formulation that is handed to CP-SAT, as it is when the solve begins."""
    found: list[Formulation] = []

    def build(*arguments: Any) -> Formulation:
        found.append(cp_formulation.build(*arguments))
        return found[-1]

    monkeypatch.setattr(close, "build", build)
    return found


def solved(name: str) -> sw.Result:
    """Instances from one device to 16,384, with and without pruning, of several kinds and objectives."""
    if name == "405b":
        return sw.solve("llama-3.1-405b", "dgx-h100:2048", sw.Training(8192, 2048), workers=1)
    if name == "70b energy":
        workload = sw.Training(8192, 512)
        return sw.solve("llama-3.1-70b", "dgx-h100:8", workload, objective="energy", limits=["cp=1"], workers=1)
    if name == "moe without pruning":
        limits = ["tp=1", "cp=1", "vpp=1", "micro_batch<=2", "pp<=4"]
        return sw.solve("deepseek-v2-lite", "dgx-b200:1", sw.Training(4096, 32), limits=limits, prune=False, workers=1)
    limits = ["pp=4", "cp=1", "tp=2"]
    return sw.solve("llama-3.1-8b", "dgx-a100:2", sw.Training(4096, 64), rules="free", limits=limits, workers=1)


@pytest.mark.parametrize("name", ["405b", "70b energy", "moe without pruning", "8b, a setting per stage"])
def test_every_sum_that_cp_sat_forms_is_exact(name: str, built: list[Formulation]) -> None:
    """ortools-4352, ortools-2174, ortools-73: issues 4352, 2174 and 73.

    Bytes and FLOPs as integers overflow; memory is in MiB and time in units of the instance, and every bound comes from it.
    """
    result = solved(name)
    assert result.status == "OPTIMAL"
    assert built
    for formulation in built:
        model = formulation.model
        assert model.validate() == ""
        domains = [list(variable.domain) for variable in model.proto.variables]
        assert all(-EXACT < domain[0] <= domain[-1] < EXACT for domain in domains)
        assert max(formulation.clock.step.proto.domain) <= 2**40  # the incumbent's time in units, no sentinel
        rows = list(linear_rows(model))
        assert len(rows) > 10
        for terms, constant, only_boolean in rows:
            magnitude = abs(constant) + sum(abs(c) * max(map(abs, domains[v])) for v, c in terms)
            assert magnitude < EXACT
            assert not only_boolean or all(abs(c) < BOOLEAN for _, c in terms)
        for option in formulation.options:
            assert option.memory.capacity < 2**24  # MiB: 16 TiB a device


def linear_rows(model: cp_model.CpModel) -> Iterable[tuple[list[tuple[int, int]], int, bool]]:
    """(variable, coefficient) of every linear row and of the objective, its constant, and whether it is enforced and over
    Booleans only."""
    variables = model.proto.variables
    for constraint in model.proto.constraints:
        if not constraint.has_linear():
            continue
        terms = list(zip(constraint.linear.vars, constraint.linear.coeffs, strict=True))
        boolean = bool(terms) and all(list(variables[v].domain) == [0, 1] for v, _ in terms)
        yield terms, 0, boolean and len(constraint.enforcement_literal) > 0
    objective = model.proto.objective
    yield list(zip(objective.vars, objective.coeffs, strict=True)), int(objective.offset), False


@pytest.mark.parametrize("name", ["moe without pruning", "8b, a setting per stage"])
def test_variables_are_named_after_what_they_decide_and_no_expression_is_in_a_name(
    name: str, built: list[Formulation]
) -> None:
    """ortools-73 and issues 5293, 5297: a live variable in an f-string writes an expression, and may be costly."""
    solved(name)
    for formulation in built:
        for variable in formulation.model.proto.variables:
            assert variable.name == "" or re.fullmatch(r"[a-z][a-z0-9_]*(\[[a-z0-9_+]+\])*", variable.name), (
                variable.name
            )
        assert any(variable.name for variable in formulation.model.proto.variables)


def test_a_larger_device_does_not_make_larger_integers(built: list[Formulation]) -> None:
    """ortools-4352: a domain up to 1e14 was MODEL_INVALID. A device of 1e14 bytes is 95 million MiB."""
    cluster = nodes("B300-SXM", 8, "nvlink5")
    device = cluster.accelerators[0]
    vast = replace(cluster, root=replace(cluster.root, accelerator=replace(device, memory_bytes=10**14)))
    limits = ["tp=2", "pp=2", "cp=1", "micro_batch=1"]
    result = sw.solve(llama_like(8, 4096, 32, 8, 14336, 128256), vast, sw.Training(4096, 32), limits=limits, workers=1)
    assert result.status == "OPTIMAL"
    assert all(option.memory.capacity == 10**14 // 2**20 for formulation in built for option in formulation.options)


def test_the_number_of_workers_is_bounded_and_changes_nothing_that_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """ortools-1921, https://github.com/google/or-tools/issues/1921.

    13.6 s with one worker, 808 s with 32: all cores are no default.
    """
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    model, cluster, workload = "llama-3.1-8b", "dgx-a100:1", sw.Training(4096, 32)
    limits = ["cp=1", "micro_batch<=2"]
    default = sw.solve(model, cluster, workload, limits=limits)
    assert default.report["workers"] == 8
    one = sw.solve(model, cluster, workload, limits=limits, workers=1)
    assert (one.value, one.bound, one.plan) == (default.value, default.bound, default.plan)


def test_plans_of_equal_cost_are_settled_by_a_stated_order() -> None:
    """ortools-4783, https://github.com/google/or-tools/issues/4783.

    Seed and workers do not choose between ties; ranks that are alike are not told apart.
    """
    model, cluster = llama_like(10, 2048, 16, 16, 5632, 32000), nodes("A100-SXM-80GB", 4, "nvlink3", 2)
    limits = ["pp=4", "tp=2", "cp=1", "vpp=1"]
    results = [
        sw.solve(model, cluster, sw.Training(2048, 16), limits=limits, workers=workers, seed=seed)
        for workers, seed in ((1, 0), (1, 7), (2, 0), (3, 123))
    ]
    assert {result.status for result in results} == {"OPTIMAL"}
    assert len({(result.value, result.bound) for result in results}) == 1
    assert len({result.plan for result in results}) == 1
    assert [result.report["seed"] for result in results] == [0, 7, 0, 123]
    assert all(result.report["versions"]["ortools"] for result in results)


def test_out_of_time_is_never_called_infeasible_or_optimal() -> None:
    """ortools-4783: what a wall clock stops is a bound with a gap, or not known, and says so."""
    nothing = sw.solve("llama-3.1-70b", "dgx-h100:8", sw.Training(8192, 512), time_limit_s=1e-9, workers=1)
    assert nothing.status == "UNKNOWN"
    assert nothing.reason == ("the time limit passed before a plan was found",)
    assert (nothing.plan, nothing.value, nothing.bound, nothing.gap) == (None, None, None, None)


def test_a_solve_without_proof_is_called_feasible_with_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """ortools-4783: FEASIBLE and OPTIMAL are told apart by the proof, not by the plan."""
    model, cluster = llama_like(11, 2048, 16, 16, 5632, 32000), nodes("A100-SXM-80GB", 4, "nvlink3", 2)
    limits = ["pp=4", "tp=2", "cp=1", "vpp=1", "zero=1", "micro_batch=1"]
    proven = sw.solve(model, cluster, sw.Training(2048, 16), limits=limits, workers=1, prune=False)
    new_solver = close.new_solver

    def stopped(*arguments: Any) -> cp_model.CpSolver:
        solver = new_solver(*arguments)
        solver.parameters.max_deterministic_time = 1e-9
        return solver

    monkeypatch.setattr(close, "new_solver", stopped)
    found = sw.solve(model, cluster, sw.Training(2048, 16), limits=limits, workers=1, prune=False)
    assert proven.status == "OPTIMAL"
    assert found.status == "FEASIBLE"
    assert found.value is not None
    assert found.bound is not None
    assert proven.value is not None
    assert found.bound <= proven.value <= found.value
    assert found.gap is not None
    assert found.gap > 0


@pytest.mark.parametrize(
    ("limits", "named", "kept"),
    [
        (("tp=16",), "tp=16 does not divide", ()),
        (("pp>=40",), "pp>=40", ()),
        (("dp=7",), "dp", ()),
        (("memory_gb<=3",), "memory", ()),
        (("schedule=zb-v", "pp=2"), "schedule=zb-v", ("pp=2",)),
    ],
)
def test_a_reason_for_no_plan_names_what_the_user_set_and_without_it_there_is_one(
    limits: tuple[str, ...], named: str, kept: tuple[str, ...]
) -> None:
    """ortools-2649, ortools-5141: issues 2649 and 5141. Cores were satisfiable, or named literals that nobody had set.

    Reasons are arithmetic of their own, not cores; that they are reasons is shown by leaving the limit out.
    """
    model, cluster = llama_like(8, 3072, 24, 8, 8192, 32000), nodes("A100-SXM-80GB", 8, "nvlink3")
    arguments: Any = (model, cluster, sw.Training(2048, 16))
    refused = sw.solve(*arguments, limits=limits, workers=1)
    assert refused.status == "INFEASIBLE"
    assert any(named in reason for reason in refused.reason)
    assert sw.solve(*arguments, limits=kept, workers=1).status == "OPTIMAL"
    set_by_the_user = {limit.split("=")[0].rstrip("<>") for limit in limits} | {"memory"}
    for reason in refused.reason:
        assert any(name in reason for name in set_by_the_user)
    assert parse_limits(limits).text == limits
