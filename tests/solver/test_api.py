"""The public Python names: what they load, what they return, and what they say about bad input."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

import shardwise as sw
from shardwise.data.rules import is_linear
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.progress import FINAL, Watch
from shardwise.solver.saved import saved_instance
from shardwise.solver.search import TimeUpError

if TYPE_CHECKING:
    from shardwise.data.plan import RankOrder

CONTRACT = """
import shardwise as sw
result = sw.solve(model="llama-3.1-70b", cluster="dgx-h100:8", workload=sw.Training(seq_len=8192, global_batch=1024),
                  limits=["pp<=8"], objective="step-time", time_limit_s=60, on_progress=print)
result.status
result.plan.degrees.tp, result.plan.stages[0].layers, result.plan.placement, result.plan.to_json()
result.value, result.bound, result.gap, result.unit
result.report
"""


@lru_cache(maxsize=8)
def instance(model: str = "llama-3.1-8b", cluster: str = "dgx-h100:1") -> sw.Instance:
    return sw.build_instance(model, cluster, sw.Training(4096, 64))


def test_the_example_of_the_contract_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, sw.Result] = {}
    exec(CONTRACT, names)
    result = names["result"]
    assert result.status == "OPTIMAL"
    assert result.value is not None
    assert result.bound is not None
    assert result.gap is not None
    assert result.bound <= result.value
    assert 0 <= result.gap < 1e-5
    assert result.unit == "s"
    assert {"universe", "candidates", "wall_time_s", "versions", "seed"} <= set(result.report)
    printed = capsys.readouterr().out.splitlines()
    assert printed
    assert all("incumbent" in line and "bound" in line for line in printed)


def test_every_public_name_loads_and_no_other_does() -> None:
    assert all(getattr(sw, name) is not None for name in sw.__all__)
    assert set(sw.__all__) <= set(dir(sw))
    with pytest.raises(AttributeError, match="no_such_name"):
        sw.no_such_name  # noqa: B018


def loaded_after(code: str, *suspects: str) -> list[str]:
    """Which of the modules `suspects` a fresh interpreter holds after `code`."""
    ending = f"\nprint('loaded', *sorted(set({suspects!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}{ending}"], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1].split()[1:]


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import shardwise", "pandas", "ortools", "pydantic", "numpy", "rich", "typer") == []


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "training", "--help"], ["catalog", "clusters"]])
def test_commands_that_do_not_solve_do_not_load_the_solver(arguments: list[str]) -> None:
    code = f"from shardwise.solver.cli import app\ntry:\n    app({arguments!r})\n"
    code += "except SystemExit as end:\n    assert not end.code"
    assert loaded_after(code, "pandas", "ortools", "numpy") == []


def test_faults_of_all_parts_come_together() -> None:
    with pytest.raises(sw.InputError) as caught:
        sw.build_instance("no-such-model", "no-such-cluster", sw.Training(1, 1), rules="x", profile="y", limits=["z"])
    assert len(caught.value.faults) == 5
    assert all(fault in str(caught.value) for fault in caught.value.faults)


@pytest.mark.parametrize(
    ("degrees", "words"),
    [({"tp": 0}, "degrees.tp=0"), ({"zero": 4}, "degrees.zero=4"), ({"vpp": 2**30}, "degrees.vpp"), ({"dp": -1}, "degrees.dp")],
)  # fmt: skip
def test_default_degrees_name_what_is_out_of_range(degrees: dict[str, int], words: str) -> None:
    with pytest.raises(sw.InputError, match=words):
        degrees_from(instance(), **degrees)  # type: ignore[arg-type]


def test_default_degrees_use_the_devices_that_are_left() -> None:
    found = degrees_from(instance(), tp=2)
    assert (found.tp, found.dp, found.sequence_parallel) == (2, 4, True)
    assert not degrees_from(instance()).sequence_parallel
    assert not degrees_from(instance(), tp=2, sequence_parallel=False).sequence_parallel


def test_default_stages_are_even_where_they_can_be_and_larger_first_elsewhere() -> None:
    even = plan_from_degrees(instance(), sw.Degrees(pp=4, dp=2))
    assert even.chunk_layers == (8, 8, 8, 8)
    uneven = plan_from_degrees(instance(), sw.Degrees(pp=3, dp=2))
    assert uneven.chunk_layers == (11, 11, 10)
    given = plan_from_degrees(instance(), sw.Degrees(pp=2, vpp=2, dp=4), stages=[9, 8, 8, 7])
    assert [stage.chunks for stage in given.stages] == [(9, 8), (8, 7)]


@pytest.mark.parametrize("order", ["tp-dp-pp", "tp-pp-dp"])
@pytest.mark.parametrize("shape", [(8, 2, 2), (4, 2, 4), (2, 4, 4), (1, 4, 8), (4, 3, 2), (16, 1, 2), (3, 2, 5)])
def test_default_placements_pack_ranks_along_the_devices(order: RankOrder, shape: tuple[int, int, int]) -> None:
    two_levels = instance(cluster="dgx-h100:4")
    tp, pp, dp = shape
    plan = plan_from_degrees(two_levels, sw.Degrees(tp=tp, pp=pp, dp=dp), rank_order=order)
    assert is_linear(plan.placement)
    assert plan.placement.blocks[0] <= 8
    assert plan.placement.rank_order == order


def test_interrupting_keeps_the_incumbent_and_its_bound() -> None:
    watch, phases = Watch(None), []

    def stop_once_there_is_a_plan(progress: sw.Progress) -> None:
        phases.append(progress.phase)
        watch.interrupted = progress.incumbent is not None
        watch.report(progress)

    result = sw.solve(
        "llama-3.1-70b", "dgx-h100:8", sw.Training(8192, 512), workers=1, on_progress=stop_once_there_is_a_plan
    )
    assert phases[-1] in FINAL
    assert result.status == "FEASIBLE"
    assert result.plan is not None
    assert result.bound is not None
    assert result.value is not None
    assert result.bound <= result.value


@pytest.mark.parametrize("phase", ["enumerating", "bounding", "trying"])
def test_every_phase_hears_an_interrupt(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is heard where progress is told: before the first plan too, which takes most of a large search."""
    monkeypatch.setattr("shardwise.solver.search.REPORT_EVERY_S", 0.0)
    watch, phases = Watch(None), []

    def stop(progress: sw.Progress) -> None:
        phases.append(progress.phase)
        watch.interrupted = progress.phase == phase
        watch.report(progress)

    result = sw.solve("llama-3.1-8b", "dgx-h100:2", sw.Training(4096, 64), workers=1, on_progress=stop)
    assert phases[-2:] == [phase, result.status]
    assert result.status in ("UNKNOWN", "FEASIBLE")
    if result.plan is None:
        assert result.reason == ("the search was interrupted before a plan was found",)


def test_an_interrupted_watch_ends_the_search_but_not_its_last_report() -> None:
    watch = Watch(None)
    watch.interrupted = True
    watch.report(sw.Progress("FEASIBLE", 1.0, 0.5, "s", 3, 0.1))
    with pytest.raises(TimeUpError):
        watch.report(sw.Progress("pruning", 1.0, 0.5, "s", 3, 0.1))


ROW = {"model": "llama-3.1-8b", "cluster": "dgx-h100:1", "seq_len": 4096, "global_batch": 64}


def test_evaluate_many_agrees_with_evaluate() -> None:
    table = pd.DataFrame([ROW | {"tp": tp, "pp": pp, "recompute": mode} for tp, pp, mode in
                          [(2, 1, "none"), (4, 2, "selective"), (8, 1, "full"), (1, 2, "full")]], index=[7, 7, 8, 9])  # fmt: skip
    before = table.copy()
    out = sw.evaluate_many(table)
    pd.testing.assert_frame_equal(table, before)
    assert list(out.index) == [7, 7, 8, 9]
    for (_, row), found in zip(table.iterrows(), out.itertuples(), strict=True):
        degrees = degrees_from(instance(), tp=row["tp"], pp=row["pp"])
        expected = sw.evaluate(instance(), plan_from_degrees(instance(), degrees, recompute=row["recompute"]))
        assert found.step_time_s == pytest.approx(expected.step_time_s, rel=1e-12)
        assert found.peak_memory_gb == pytest.approx(expected.peak_memory_bytes / 1e9, rel=1e-12)
        assert (found.legal, found.fits) == (expected.legal, expected.fits)
        assert bool(found.reason) != expected.admitted


def sweep() -> pd.DataFrame:
    """Layouts of a 70B model at three batch sizes, so that rows share degrees, orders of passes and periods."""
    rows = [
        ROW | {"model": "llama-3.1-70b", "cluster": "dgx-h100:8", "tp": tp, "pp": pp, "vpp": vpp, "micro_batch": micro,
               "zero": zero, "recompute": mode, "global_batch": batch}
        for tp, pp, vpp, micro, zero, mode, batch in product(
            (2, 4), (1, 4, 8), (1, 2), (1, 2), (0, 1), ("none", "selective", "full"), (64, 320, 1024)
        )
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_rows_that_share_their_parts_agree_with_evaluate() -> None:
    table = sweep()
    out = sw.evaluate_many(table)
    for row, found in zip(table.to_dict("records")[::7], out.iloc[::7].itertuples(), strict=True):
        own = sw.build_instance(row["model"], row["cluster"], sw.Training(row["seq_len"], row["global_batch"]))
        degrees = degrees_from(own, **{name: row[name] for name in ("tp", "pp", "vpp", "micro_batch", "zero")})
        expected = sw.evaluate(own, plan_from_degrees(own, degrees, recompute=row["recompute"]))
        assert found.step_time_s == pytest.approx(expected.step_time_s, rel=1e-9)
        assert found.peak_memory_gb == pytest.approx(expected.peak_memory_bytes / 1e9, rel=1e-12)
        assert (found.legal, found.fits) == (expected.legal, expected.fits)
        assert bool(found.reason) != expected.admitted


def test_a_row_costs_few_function_calls() -> None:
    """What keeps `evaluate_many` fast: rows share work, 120 calls a row; 250 where only units and splits are shared."""
    table, calls = sweep(), 0
    sw.evaluate_many(table)

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        sw.evaluate_many(table)
    finally:
        sys.setprofile(before)
    assert len(table) < calls < 150 * len(table)


def test_evaluate_many_takes_adapters_and_documents() -> None:
    table = pd.DataFrame(
        [ROW, ROW | {"lora_rank": 16, "base_precision": "nf4"}, ROW | {"mean_document_length": 512}], dtype=object
    )
    out = sw.evaluate_many(table)
    tuned: tuple[dict[str, Any], ...] = ({}, {"lora_rank": 16, "base_precision": "nf4"}, {"lengths": [(512, 1)]})
    for fields, found in zip(tuned, out.itertuples(), strict=True):
        own = sw.build_instance("llama-3.1-8b", "dgx-h100:1", sw.Training(4096, 64, **fields))
        expected = sw.evaluate(own, plan_from_degrees(own, degrees_from(own)))
        assert found.step_time_s == pytest.approx(expected.step_time_s, rel=1e-12)
        assert found.peak_memory_gb == pytest.approx(expected.peak_memory_bytes / 1e9, rel=1e-12)


def test_evaluate_many_takes_what_a_workload_says_of_experts() -> None:
    mixture = {
        "model": "deepseek-v3",
        "cluster": "dgx-h800:32",
        "seq_len": 4096,
        "global_batch": 1024,
        "pp": 8,
        "ep": 32,
        "etp": 1,
    }
    tuned: tuple[dict[str, Any], ...] = (
        {},
        {"mtp_layers": 1},
        {"expert_imbalance": 1.5},
        {"expert_imbalance": 1.5, "expert_capacity": 1.25},
        {"expert_capacity": 1.25, "pad_experts": True},
        {"expert_capacity": 1.25, "pad_experts": False},
    )
    out = sw.evaluate_many(pd.DataFrame([mixture | fields for fields in tuned]))
    times = []
    for fields, found in zip(tuned, out.itertuples(), strict=True):
        own = sw.build_instance("deepseek-v3", "dgx-h800:32", sw.Training(4096, 1024, **fields))
        expected = sw.evaluate(own, plan_from_degrees(own, degrees_from(own, pp=8, ep=32, etp=1)))
        assert found.step_time_s == pytest.approx(expected.step_time_s, rel=1e-12)
        assert found.peak_memory_gb == pytest.approx(expected.peak_memory_bytes / 1e9, rel=1e-12)
        times.append(expected.step_time_s)
    plain, modules, uneven, cut, padded, dropping = times
    assert plain == dropping < cut == padded < uneven
    assert plain < modules


def test_fit_counts_what_a_workload_says_of_experts() -> None:
    plain = sw.Training(4096, 3360)
    fuller = replace(plain, mtp_layers=1, expert_capacity=2.0, pad_experts=True)
    (found,) = sw.fit("deepseek-v3", "dgx-h200:16", fuller, quick=True)
    assert found.plan is not None
    assert found.evaluation is not None
    emptier = sw.evaluate(replace(found.instance, workload=plain), found.plan)
    assert found.evaluation.stages[-1].weights > emptier.stages[-1].weights
    assert found.evaluation.stages[-1].activations > emptier.stages[-1].activations


def test_a_plan_of_adapters_is_proven_and_keeps_its_workload() -> None:
    workload = sw.Training(4096, 64, lora_rank=16, base_precision="nf4", lengths=[(300, 3), (2000, 1)])
    result = sw.solve("llama-3.1-8b", "dgx-h100:1", workload, workers=1)
    assert result.status == "OPTIMAL"
    assert result.plan is not None
    again = sw.Plan.from_json(result.plan.to_json())
    assert again.instance is not None
    own = saved_instance(again.instance)
    assert own.workload == workload
    assert sw.evaluate(own, again).step_time_s == result.value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_rank": 0}, "workload.lora_rank=0"),
        ({"mean_document_length": "long"}, "length='long'"),
        ({"expert_capacity": "all"}, "workload.expert_capacity='all' must be a number above 0"),
        ({"expert_capacity": 1.25}, "llama-3.1-8b has no experts"),
        ({"pad_experts": "some"}, "pad_experts='some' must be true or false"),
        ({"tp_overlap": "some"}, "tp_overlap='some' must be true or false"),
        ({"tp_overlap": True, "rules": "deepspeed"}, "deepspeed does not overlap"),
        ({"mtp_layers": 1.5}, "mtp_layers=1.5 must be a whole number"),
        ({"seq_len": None}, "column seq_len is missing or empty"),
        ({"model": float("nan")}, "column model is missing or empty"),
        ({"tp": float("inf")}, "tp=inf must be a whole number"),
        ({"tp": "four"}, "tp='four' must be a whole number"),
        ({"tp": 2.5, "pp": True}, "tp=2.5 must be a whole number; pp=True must be a whole number"),
        ({"seq_len": -1}, "workload.seq_len=-1"),
        ({"precision": "int3"}, "workload.precision='int3'"),
        ({"recompute": "some"}, "recompute='some'"),
        ({"recompute": "none", "recompute_layers": 3}, "recompute_layers=3 needs recompute=full"),
        ({"sequence_parallel": "perhaps"}, "sequence_parallel='perhaps' must be true or false"),
        ({"model": 5}, "model '5'"),
        ({"cluster": "dgx-h100:0"}, "nodes=0"),
        ({"rules": "none"}, "rules='none'"),
        ({"pp": 2**20, "vpp": 2**20}, "chunks"),
    ],
)
def test_a_bad_row_has_no_numbers_and_says_why(change: dict[str, object], words: str) -> None:
    out = sw.evaluate_many(pd.DataFrame([ROW, ROW | change], dtype=object))
    good, bad = out.iloc[0], out.iloc[1]
    assert good["step_time_s"] > 0
    assert good["reason"] == ""
    assert words in bad["reason"]
    for name in ("step_time_s", "tokens_per_s_per_device", "peak_memory_gb", "legal", "fits"):
        assert pd.isna(bad[name])


def test_evaluate_many_says_which_rule_and_how_much_memory() -> None:
    out = sw.evaluate_many(
        pd.DataFrame([ROW | {"tp": 3, "dp": 2}, ROW | {"model": "llama-3.1-405b", "tp": 8}, ROW | {"tp": 2**20}])
    )
    assert "tp=3 does not divide num_attention_heads=32" in out["reason"][0]
    assert "GB usable" in out["reason"][1]
    assert list(out["legal"]) == [False, True, False]
    assert not out["fits"][1]
    assert "tp=1048576 does not divide" in out["reason"][2]


def test_evaluate_many_takes_an_empty_table_and_refuses_what_is_none() -> None:
    out = sw.evaluate_many(pd.DataFrame(columns=list(ROW)))
    assert len(out) == 0
    assert out["step_time_s"].dtype == "float64"
    assert out["legal"].dtype == "boolean"
    with pytest.raises(sw.InputError, match="DataFrame"):
        sw.evaluate_many([ROW])  # type: ignore[arg-type]
    with pytest.raises(sw.InputError, match="tp more than once"):
        sw.evaluate_many(pd.DataFrame([[1, 2]], columns=["tp", "tp"]))


def test_a_plan_survives_its_json_with_the_instance() -> None:
    plan = plan_from_degrees(instance(), sw.Degrees(tp=2, pp=2, dp=2, sequence_parallel=True), recompute="full")
    again = sw.Plan.from_json(plan.to_json())
    assert again == plan
    assert sw.evaluate(instance(), again) == sw.evaluate(instance(), plan)
    with pytest.raises(sw.InputError, match="version=2"):
        sw.Plan.from_dict(plan.to_dict() | {"version": 2})
    with pytest.raises(ValueError, match="pp=2"):
        replace(plan, stages=plan.stages[:1])


def test_a_plan_that_contradicts_itself_or_has_unknown_degrees_is_refused() -> None:
    document = plan_from_degrees(instance(), sw.Degrees(tp=2, pp=2, dp=2, sequence_parallel=True)).to_dict()
    own = document["stages"][1]
    moved = own | {"chunks": [own["chunks"][0] | {"first_layer": 0}]}
    for changed, fault in (
        ({"degrees": document["degrees"] | {"tpp": 4}}, r"degrees\.tpp is unknown"),
        ({"degrees": document["degrees"] | {"devices": 7}}, r"degrees\.devices=7 .* 8"),
        ({"kind": "serving"}, "kind='serving'"),
        ({"stages": [document["stages"][0], own | {"layers": 1}]}, r"stages\[1\]\.layers=1"),
        ({"stages": [document["stages"][0], moved]}, r"stages\[1\]\.chunks\[0\]\.first_layer=0"),
    ):
        with pytest.raises(sw.InputError, match=fault):
            sw.Plan.from_dict(document | changed)


@pytest.mark.parametrize("more", [{"limits": ["tp=4"]}, {"rules": "torchtitan"}, {"model": "llama-3.1-8b"}])
def test_solve_takes_nothing_beside_an_instance(more: dict[str, Any]) -> None:
    instance = sw.build_instance("llama-3.2-1b", "dgx-h100:1", sw.Training(2048, 8))
    with pytest.raises(sw.InputError, match=f"{next(iter(more))} cannot be given beside an instance"):
        sw.solve(instance=instance, **more)


@pytest.mark.parametrize("column", ["stages", "recompute_modules", "offload_optimizer", "rank_order"])
def test_a_column_that_no_table_has_is_told(column: str) -> None:
    row = {"model": "llama-3.2-1b", "cluster": "dgx-h100:1", "seq_len": 2048, "global_batch": 8}
    one, other = sw.evaluate_many(pd.DataFrame([{**row, column: "1"}, {**row, column: None}])).to_dict("records")
    assert pd.isna(one["legal"])
    assert one["reason"] == f"column {column} cannot be told by a table; use evaluate"
    assert other["legal"]
    assert not other["reason"]


def test_the_rates_of_a_batch_that_does_not_divide_are_those_of_what_is_done() -> None:
    """64 sequences in micro-batches of 3 on 8 devices: 48 are done, so the rate is that of a batch of 48."""

    def rates(global_batch: int) -> tuple[float, float, float]:
        instance = sw.build_instance("llama-3.2-1b", "dgx-h100:1", sw.Training(2048, global_batch))
        plan = plan_from_degrees(instance, degrees_from(instance, dp=8, micro_batch=3))
        evaluation = sw.evaluate(instance, plan)
        return evaluation.step_time_s, evaluation.tokens_per_s, evaluation.model_flops_utilization

    assert rates(64) == pytest.approx(rates(48))
    rows = pd.DataFrame(
        [
            {
                "model": "llama-3.2-1b",
                "cluster": "dgx-h100:1",
                "seq_len": 2048,
                "global_batch": n,
                "dp": 8,
                "micro_batch": 3,
            }
            for n in (64, 48)
        ]
    )
    uneven, even = sw.evaluate_many(rows).to_dict("records")
    assert (uneven["legal"], even["legal"]) == (False, True)
    assert uneven["tokens_per_s_per_device"] == pytest.approx(even["tokens_per_s_per_device"])


def test_a_plan_of_more_micro_batches_than_the_batch_is_refused_before_it_is_timed() -> None:
    instance = sw.build_instance("llama-3.2-1b", "dgx-h100:1", sw.Training(2048, 64))
    plan = replace(plan_from_degrees(instance, degrees_from(instance, dp=8)), micro_batches=2**20)
    with pytest.raises(sw.InputError, match=r"plan\.micro_batches=1048576 is more than global_batch=64"):
        sw.evaluate(instance, plan)


def test_what_the_model_has_no_use_for_is_told() -> None:
    instance = sw.build_instance("llama-3.2-1b", "dgx-h100:1", sw.Training(2048, 64))
    plan = plan_from_degrees(instance, degrees_from(instance, dp=4, tp=2, etp=4))
    assert "etp=4 needs a model with experts" in sw.evaluate(instance, plan).faults
    with pytest.raises(sw.InputError, match="recompute_layers=99 is more than the 16 layers of the largest chunk"):
        plan_from_degrees(instance, degrees_from(instance, dp=8), recompute="full", recompute_layers=99)


def test_imbalance_without_experts_and_limits_in_one_text_are_told() -> None:
    with pytest.raises(sw.InputError, match=r"expert_imbalance=2: llama-3\.2-1b has no experts"):
        sw.build_instance("llama-3.2-1b", "dgx-h100:1", sw.Training(2048, 64, expert_imbalance=2))
    with pytest.raises(sw.InputError, match="limits='pp<=8' must be a list of texts"):
        sw.build_instance("llama-3.2-1b", "dgx-h100:1", sw.Training(2048, 64), limits="pp<=8")
