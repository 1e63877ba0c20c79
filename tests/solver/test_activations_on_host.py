"""Saved activations on the host: bytes and seconds by hand, the search against exhaustive search, what refuses them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_universe import agrees, value_of
from typer.testing import CliRunner
from universe import INFINIBAND, NVLINK, admitted, examples, instance_of, instances, llama, model_of, plans

from shardwise.data.faults import InputError
from shardwise.data.model_parts import attention, layer, mlp
from shardwise.data.plan import Degrees, Plan
from shardwise.data.workload import Training
from shardwise.formulations.bounds import grid_bounds, memory_fits, quick_bounds_s
from shardwise.formulations.candidates import enumerate_grids
from shardwise.solver.cli import app
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.evaluate import cost_tables, evaluate
from shardwise.solver.export.megatron import megatron_flags
from shardwise.solver.search import Search
from shardwise.solver.simulate import simulate
from shardwise.solver.solve import build_instance, solve

if TYPE_CHECKING:
    from shardwise.data.cluster import Domain
    from shardwise.data.instance import Instance

MIB = 2**20
DOCS = Path(__file__).parents[2] / "docs"
AWAY: tuple[dict[str, Any], ...] = (
    {"offload_activations": True},
    {"offload_activations": True, "offload_optimizer": 0.5},
)


def away(layers: int = 6, **more: Any) -> Instance:
    return instance_of(llama(layers), workload=Training(1024, 8, offload_activations=True), **more)


def plan_of(instance: Instance, layers: int, **sizes: Any) -> Plan:
    return plan_from_degrees(instance, degrees_from(instance, offload_layers=layers, **sizes))


def linked(instance: Instance, bytes_per_s: float) -> Instance:
    """With devices that read and write their host so fast."""
    device, host = replace(instance.accelerator, host_link_bytes_per_s=bytes_per_s), instance.cluster.host
    assert host is not None

    def with_device(domain: Domain) -> Domain:
        if not domain.children:
            return replace(domain, accelerator=device)
        return replace(domain, children=tuple(map(with_device, domain.children)))

    host = replace(host, bandwidth_bytes_per_s=64 * bytes_per_s)
    return replace(instance, cluster=replace(instance.cluster, root=with_device(instance.cluster.root), host=host))


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_layers_keep_nothing_but_two_of_them_in_passing(layers: int) -> None:
    instance = away()
    plain, there = (evaluate(instance, plan_of(instance, n, dp=4)) for n in (0, layers))
    each = plain.stages[0].activations / 6
    assert there.stages[0].activations == pytest.approx(each * (6 - layers))
    assert there.stages[0].recompute_working == pytest.approx(2 * each)
    assert there.stages[0].total == pytest.approx(plain.stages[0].total - (layers - 2) * each * 1.0, rel=1e-2)
    assert plain.host is None
    assert there.host is not None
    assert there.host.stages[0] == pytest.approx(layers * each)
    assert there.host.node_bytes == pytest.approx(4 * layers * each)
    peak = simulate(instance, plan_of(instance, layers, dp=4)).memory[0].peak_bytes
    assert peak == pytest.approx(there.stages[0].total)


@pytest.mark.parametrize(("link", "shows"), [(1e15, False), (1e9, True)])
def test_what_a_copy_takes_beyond_its_pass_shows(link: float, shows: bool) -> None:
    instance = linked(away(), link)
    plain, there = (evaluate(instance, plan_of(instance, n, dp=4)) for n in (0, 4))
    plan = plan_of(instance, 0, dp=4)
    time = cost_tables(instance).time(plan.degrees, plan.placement)
    copied = plain.stages[0].activations / 6 / link
    waits = sum(max(0.0, copied - own) for own in (time.forward[0], time.backward[0]))
    assert (waits > 0) == shows
    more = plan.micro_batches * 4 * waits
    assert there.step_time_s - plain.step_time_s == pytest.approx(more, abs=1e-12)
    assert there.parts.transfers == pytest.approx(more, abs=1e-12)
    assert there.parts.weight_gather == pytest.approx(0, abs=1e-12)
    assert simulate(instance, plan_of(instance, 4, dp=4)).step_time_s == pytest.approx(there.step_time_s)


# -- the search --------------------------------------------------------------------------------------------------------


@examples(20)
@given(instances(tunings=AWAY), st.booleans())
def test_exhaustive_search_and_the_solver_agree(instance: Instance, prune: bool) -> None:
    result = solve(instance=instance, workers=1, prune=prune)
    agrees(instance, result, admitted(instance, result.report["unit_s"]))


def tight(
    rules: str, sizes: tuple[int, ...], batch: int, limit: str, rank: float, mixed: bool, link: float
) -> Instance:
    """The memory is what some plan with activations on the host needs, so that few plans without fit."""
    limits = ("pp<=2", "vpp=1", "micro_batch<=2", "cp<=2", "tp<=2", limit)
    wide, narrow = layer(1024, None, mlp(1024, 4096, gated=True)), layer(1024, attention(1024, 8, 8, 128), None)
    model = model_of([narrow, wide, wide, narrow, wide, wide], 1024, 32000, tied=False) if mixed else llama(6)

    def built(memory_bytes: int) -> Instance:
        instance = instance_of(
            model, sizes, (NVLINK, INFINIBAND)[: len(sizes)], rules=rules, limits=limits, memory_bytes=memory_bytes,
            workload=Training(4096, batch, offload_activations=True),
        )  # fmt: skip
        return linked(instance, link)

    roomy = built(2**45)
    needs = sorted(max(evaluate(roomy, one).memory_mib) for one in plans(roomy) if one.degrees.offload_layers > 2)
    assert needs
    return built(needs[int(rank * (len(needs) - 1))] * MIB)


TIGHT = (
    st.sampled_from(("megatron-core", "free")),
    st.sampled_from(((1,), (2,), (4,), (2, 2))),
    st.sampled_from((1, 4, 12)),
    st.sampled_from(("recompute=none", "zero=1", "zero<=1")),
    st.sampled_from((0.0, 0.1, 0.3, 0.6)),
    st.booleans(),
    st.sampled_from((32e9, 200e9, 1e12)),
)


@examples(25)
@given(*TIGHT, st.booleans())
def test_exhaustive_search_and_the_solver_agree_where_little_fits(
    rules: str, sizes: tuple[int, ...], batch: int, limit: str, rank: float, mixed: bool, link: float, prune: bool
) -> None:
    instance = tight(rules, sizes, batch, limit, rank, mixed, link)
    result = solve(instance=instance, workers=1, prune=prune or len(sizes) > 1)
    agrees(instance, result, admitted(instance, result.report["unit_s"]))


@examples(8)
@given(*TIGHT, st.sampled_from(("energy", "devices", "throughput-per-device")))
def test_exhaustive_search_and_the_solver_agree_on_other_objectives(
    rules: str, sizes: tuple[int, ...], batch: int, limit: str, rank: float, mixed: bool, link: float, objective: str
) -> None:
    instance = tight(rules, sizes, batch, limit, rank, mixed, link)
    found = admitted(instance, 1.0)
    result = solve(instance=instance, workers=1, objective=objective)
    assert found
    assert result.plan is not None
    every = [value_of(objective, evaluate(instance, one.plan), instance) for one in found]
    best, own = min(every), value_of(objective, evaluate(instance, result.plan), instance)
    assert evaluate(instance, result.plan).admitted
    assert own <= best + abs(best) * 1e-5


@examples(10)
@given(*TIGHT)
def test_bounds_hold_for_every_plan_with_activations_on_the_host(
    rules: str, sizes: tuple[int, ...], batch: int, limit: str, rank: float, mixed: bool, link: float
) -> None:
    """(B1)-(B10): no admitted plan is in a row that memory excludes, or faster than its row's bounds; and (U6): each has a
    candidate of the search with no more layers away that is no slower."""
    instance = tight(rules, sizes, batch, limit, rank, mixed, link)
    search = Search(instance)
    least: dict[Degrees, float] = {}
    for one in admitted(instance, 1.0):
        if one.plan.degrees.offload_layers:
            key = replace(one.plan.degrees, dp_replicate=1, offload_layers=5)
            least[key] = min(least.get(key, np.inf), one.seconds)
    assert least
    held = 0
    for grid in enumerate_grids(instance):
        quick, fits = quick_bounds_s(search.best_case, grid), memory_fits(search.best_case, grid)
        bounds = grid_bounds(search.best_case, grid, np.inf)
        for row in range(len(grid)):
            seconds = least.get(grid.degrees(row))
            if seconds is None or not grid.shape.offload_layers:
                continue
            held += 1
            assert fits[row]
            assert max(quick[row], bounds[row]) <= seconds
    assert held == len(least)


@pytest.mark.parametrize("prune", [True, False])
def test_one_device_trains_with_the_fewest_layers_away_that_fit(prune: bool) -> None:
    limits = ("recompute=none", "micro_batch=1")
    roomy = away(12, sizes=(1,), limits=limits)
    needs = {n: max(evaluate(roomy, plan_of(roomy, n)).memory_mib) for n in range(12)}
    assert needs[11] < needs[5] < needs[4] < needs[0]
    for memory_mib, least in ((needs[5], 5), (needs[5] - 1, 6), (needs[11], 11), (needs[0], 0)):
        instance = away(12, sizes=(1,), limits=limits, memory_bytes=memory_mib * MIB)
        result = solve(instance=instance, workers=1, prune=prune)
        assert result.plan is not None
        assert result.plan.degrees.offload_layers == least
        agrees(instance, result, admitted(instance, result.report["unit_s"]))
    small = away(12, sizes=(1,), limits=limits, memory_bytes=(needs[11] - 1) * MIB)
    assert solve(instance=small, workers=1, prune=prune).status == "INFEASIBLE"
    without = replace(away(12, sizes=(1,), limits=limits, memory_bytes=needs[5] * MIB), workload=Training(1024, 8))
    assert solve(instance=without, workers=1, prune=prune).status == "INFEASIBLE"


def test_bounds_of_deep_models_count_neither_inputs_nor_recompute() -> None:
    """(B1): the inputs of 200 layers are more than what two layers save. (B8): no room without recompute, and none is done."""
    limits = ("recompute=none", "micro_batch=1")
    roomy = linked(away(200, sizes=(1,), limits=limits), 1e13)
    need = max(evaluate(roomy, plan_of(roomy, 199)).memory_mib)
    instance = linked(away(200, sizes=(1,), limits=limits, memory_bytes=need * MIB), 1e13)
    result = solve(instance=instance, workers=1)
    assert result.status == "OPTIMAL"
    assert result.plan is not None
    assert result.plan.degrees.offload_layers == 199
    seconds, best = evaluate(instance, result.plan).step_time_s, Search(instance).best_case
    held = [grid_bounds(best, grid, np.inf).min() for grid in enumerate_grids(instance) if grid.shape.offload_layers]
    assert 0.9 * seconds < min(held) <= seconds


@pytest.mark.parametrize("prune", [True, False])
def test_a_host_without_room_has_no_plan(prune: bool) -> None:
    limits = ("recompute=none", "micro_batch=1")
    roomy = away(12, sizes=(1,), limits=limits)
    there = evaluate(roomy, plan_of(roomy, 8))
    assert there.host is not None
    for more_mib, status in ((2, "OPTIMAL"), (-2, "INFEASIBLE")):
        host_bytes = (there.host.stages[0] + more_mib * MIB) / 0.9
        instance = away(12, sizes=(1,), limits=limits, memory_bytes=there.memory_mib[0] * MIB, host_bytes=host_bytes)
        result = solve(instance=instance, workers=1, prune=prune)
        assert result.status == status
        agrees(instance, result, admitted(instance, result.report["unit_s"]))


def test_nothing_changes_where_all_fits_without() -> None:
    instance = away()
    one, other = (solve(instance=own, workers=1) for own in (instance, replace(instance, workload=Training(1024, 8))))
    assert one.plan == other.plan
    assert one.report["universe"].pop("offload_activations") is True
    assert one.report["universe"] == other.report["universe"]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "recompute", "fault"),
    [
        ({"offload_layers": 6}, "none", "offload_layers=6 must be less than layers=6"),
        ({"offload_layers": 2, "pp": 2}, "none", "offload_layers=2 needs pp=1, not pp=2"),
        ({"offload_layers": 2}, "full", "offload_layers=2 needs recompute=none"),
        ({"offload_layers": 2}, "selective", "offload_layers=2 needs recompute=none"),
        ({"offload_layers": 5}, "none", None),
    ],
)
def test_plans_that_megatron_refuses_are_illegal(sizes: dict[str, Any], recompute: Any, fault: str | None) -> None:
    instance = away()
    plan = plan_from_degrees(instance, degrees_from(instance, **sizes), recompute=recompute)
    found = evaluate(instance, plan)
    assert [own for own in found.faults if "offload_layers" in own] == ([fault] if fault else [])


def test_other_packs_and_unknown_hosts_refuse() -> None:
    allowed = Training(1024, 8, offload_activations=True)
    for rules in ("torchtitan", "deepspeed", "accelerate", "mindspeed"):
        with pytest.raises(InputError, match=f"offload_activations=true: {rules} has no saved activations on the host"):
            instance_of(llama(), rules=rules, workload=allowed)
    instance = away()
    with pytest.raises(InputError, match=r"workload\.offload_activations=true: the host of cluster small is not known"):
        replace(instance, cluster=replace(instance.cluster, host=None))
    plain = replace(instance, workload=Training(1024, 8))
    with pytest.raises(InputError, match="which the workload's offload_activations does not allow"):
        evaluate(plain, plan_of(plain, 2))
    with pytest.raises(InputError, match="offload_layers=7 is more than the model's 6 layers"):
        evaluate(instance, plan_of(instance, 7))
    with pytest.raises(ValueError, match=r"degrees\.offload_layers=-1 must be a whole number"):
        Degrees(offload_layers=-1)
    with pytest.raises(ValueError, match=r"workload\.offload_activations=1 must be true or false"):
        Training(1024, 8, offload_activations=1)  # type: ignore[arg-type]


# -- files and commands ------------------------------------------------------------------------------------------------


def test_megatron_gets_its_flags_and_the_plan_its_document() -> None:
    instance = build_instance("llama-3.1-8b", "dgx-h100:1", Training(4096, 64, offload_activations=True))
    plan = plan_of(instance, 12, tp=2)
    flags = megatron_flags(instance, plan)
    assert [flag for flag in flags if "offload" in flag] == ["--cpu-offloading", "--cpu-offloading-num-layers 12"]
    assert Plan.from_json(plan.to_json()) == plan
    document = json.loads(plan.to_json())
    assert document["degrees"]["offload_layers"] == 12
    jsonschema.validate(document, json.loads((DOCS / "plan.schema.json").read_text()))
    assert "offload_layers" not in plan_of(instance, 0, tp=2).to_dict()["degrees"]
    assert Training(**instance.workload.to_dict()) == instance.workload


def invoked(*words: str) -> str:
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_commands_take_it(tmp_path: Path) -> None:
    common = ("llama-3.1-8b", "dgx-h100:1", "--seq-len", "8192", "--global-batch", "64")
    file, plain, page = (str(tmp_path / name) for name in ("plan.json", "plain.json", "page.html"))
    evaluated = invoked("evaluate", *common, "--tp", "4", "--offload-layers", "16", "-o", file)
    assert "offload_layers=16" in evaluated
    assert invoked("evaluate", "--plan", file) == evaluated.replace(f"plan written to {file}\n", "")
    invoked("evaluate", *common, "--tp", "4", "--offload-activations", "-o", plain)
    assert "offload_layers" in invoked("compare", plain, file)
    assert "step" in invoked("simulate", file)
    invoked("report", file, "-o", page)
    assert "first layers whose saved activations are on the host" in Path(page).read_text()
    assert "--cpu-offloading-num-layers 16" in invoked("export", file, "--to", "megatron-core")


def test_the_search_takes_it_on_the_command_line(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    said = ("llama-3.1-8b", "dgx-h100:1", "--seq-len", "65536", "--global-batch", "8", "--offload-activations", "-q")
    held = ("--fix", "tp=8", "--fix", "micro_batch=1", "--fix", "pp=1", "--limit", "recompute=none")
    shown = invoked("plan", "training", *said, *held, "--limit", "memory_gb<=40", "--top", "3", "-o", file)
    document = json.loads(Path(file).read_text())
    assert f"offload_layers={document['degrees']['offload_layers']}" in shown
    assert document["instance"]["workload"]["offload_activations"] is True
    jsonschema.validate(document, json.loads((DOCS / "plan.schema.json").read_text()))
    invoked("evaluate", "--plan", file)
