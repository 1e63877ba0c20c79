"""Two plans compared: what differs, what each is worth, and the walk between them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import shardwise as sw
from shardwise.data.instance_document import instance_document
from shardwise.solver.cli import app
from shardwise.solver.compare import ORDER, Comparison, compare
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.report import comparison_page

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.data.plan import Plan

INSTANCE = sw.build_instance("llama-3.1-8b", "dgx-h100:2", sw.Training(4096, 64))


def plan(**given: Any) -> Plan:
    shape = {name: given.pop(name) for name in ("stages", "recompute", "rank_order", "schedule") if name in given}
    return plan_from_degrees(INSTANCE, degrees_from(INSTANCE, **given), **shape)


def compared(a: Plan, b: Plan, other: sw.Instance | None = None) -> Comparison:
    return compare(("a", INSTANCE, a), ("b", other or INSTANCE, b))


def test_equal_plans_have_nothing_to_tell() -> None:
    found = compared(plan(tp=2), plan(tp=2))
    assert found.differences == ()
    assert len(found.walk) == 1
    assert all(not measure.change for measure in found.measures)


def test_what_differs_is_named_once() -> None:
    found = compared(plan(tp=2, pp=2), plan(tp=4, pp=2, recompute="full"))
    what = [difference.what for difference in found.differences]
    assert what == ["tp", "dp", "micro_batches", "recompute", "placement"]


def test_adapters_are_a_difference_of_the_workload() -> None:
    other = sw.build_instance("llama-3.1-8b", "dgx-h100:2", sw.Training(4096, 64, lora_rank=8))
    told = {d.what: (d.a, d.b) for d in compared(plan(tp=2), plan(tp=2), other).differences}
    assert told["workload.lora_rank"] == ("none", "8")


def test_measures_are_those_of_evaluate() -> None:
    a, b = plan(tp=2), plan(tp=4, pp=2)
    one, two = sw.evaluate(INSTANCE, a), sw.evaluate(INSTANCE, b)
    told = {(m.group, m.what): m for m in compared(a, b).measures}
    assert (told["time", "step time"].a, told["time", "step time"].b) == (one.step_time_s, two.step_time_s)
    assert told["time", "compute"].change == two.parts.compute - one.parts.compute
    memory = told["memory", "memory of the fullest stage"]
    assert (memory.a, memory.b) == (one.peak_memory_bytes / 1e9, two.peak_memory_bytes / 1e9)
    assert one.energy is not None
    assert told["energy", "energy of a token"].a == one.energy.joules_per_token.value


def test_the_walk_ends_at_the_second_plan_and_its_steps_add_up() -> None:
    a, b = plan(tp=8, pp=2), plan(tp=2, pp=4, vpp=2, recompute="full", rank_order="tp-pp-dp")
    found = compared(a, b)
    first, last = found.walk[0].step_time_s, found.walk[-1].step_time_s
    assert first == sw.evaluate(INSTANCE, a).step_time_s
    assert last == sw.evaluate(INSTANCE, b).step_time_s
    assert sum(step.delta_s or 0.0 for step in found.walk) == pytest.approx((last or 0.0) - first, abs=1e-9)


def test_the_walk_keeps_the_stated_order() -> None:
    found = compared(plan(tp=2, micro_batch=2), plan(tp=4, pp=2, zero=0, recompute="selective"))
    names = [step.change.split()[0] for step in found.walk[1:]]
    assert names == sorted(names, key=ORDER.index)
    assert names[:2] == ["tp", "pp"]


def test_a_stop_that_is_no_plan_is_said_and_walked_over() -> None:
    a, b = plan(dp=2, dp_replicate=2), plan(dp=1, pp=2, dp_replicate=1)
    stops = {step.change: step for step in compared(a, b).walk}
    assert stops["dp 2 to 1"].verdict == "not a plan"
    assert "dp_replicate=2 does not divide dp=1" in stops["dp 2 to 1"].fault
    assert stops["dp 2 to 1"].step_time_s is None
    assert stops["dp_replicate 2 to 1"].step_time_s == sw.evaluate(INSTANCE, b).step_time_s


def test_a_stop_that_does_not_fit_or_is_illegal_has_its_time_and_its_verdict() -> None:
    stops = {step.change: step for step in compared(plan(tp=2, dp=8), plan(tp=4, dp=4)).walk}
    assert stops["tp 2 to 4"].verdict.startswith("illegal: placement needs")
    assert stops["tp 2 to 4"].step_time_s is not None


def test_limits_and_rules_do_not_stop_a_walk_and_clusters_do() -> None:
    limited = sw.build_instance("llama-3.1-8b", "dgx-h100:2", sw.Training(4096, 64), limits=["tp=4"], rules="free")
    found = compared(plan(tp=2), plan(tp=4), limited)
    assert found.walk
    assert {"limits", "rules"} <= {difference.what for difference in found.differences}
    larger = sw.build_instance("llama-3.1-8b", "dgx-h100:4", sw.Training(4096, 128))
    found = compared(plan(tp=2), plan(tp=4), larger)
    assert found.walk == ()
    assert "cluster" in found.no_walk
    assert "workload.global_batch" in found.no_walk


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_walk_ends_at_the_second_plan(data: st.DataObject) -> None:
    def drawn() -> Plan:
        tp, pp, vpp = (data.draw(st.sampled_from(options)) for options in ((1, 2, 8), (1, 2, 4), (1, 2)))
        dp = data.draw(st.sampled_from((1, 2)))
        vpp = vpp if pp > 1 else 1
        recompute = data.draw(st.sampled_from(("none", "selective", "full")))
        return plan(
            tp=tp, pp=pp, vpp=vpp, dp=dp, zero=data.draw(st.integers(0, 1)),
            micro_batch=data.draw(st.sampled_from((1, 2))), recompute=recompute,
            rank_order=data.draw(st.sampled_from(("tp-dp-pp", "tp-pp-dp"))),
        )  # fmt: skip

    a, b = drawn(), drawn()
    found = compared(a, b)
    assert found.walk[-1].step_time_s == sw.evaluate(INSTANCE, b).step_time_s
    assert (len(found.walk) == 1) == (a == b)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    paths = (tmp_path / "a.json", tmp_path / "b.json")
    for path, own in zip(paths, (plan(tp=2, pp=2), plan(tp=4)), strict=True):
        path.write_text(replace(own, instance=instance_document(INSTANCE)).to_json())
    return paths


def test_the_command_prints_writes_a_page_and_json(files: tuple[Path, Path], tmp_path: Path) -> None:
    page, document = tmp_path / "page.html", tmp_path / "out.json"
    done = CliRunner().invoke(app, ["compare", *map(str, files), "-o", str(page), "--json", str(document)])
    assert done.exit_code == 0, done.output
    assert "from A to B" in done.output
    found = json.loads(document.read_text())
    assert {"a", "b", "differences", "measures", "walk", "walk_order", "no_walk"} == set(found)
    assert found["walk"][-1]["step_time_s"] == found["b"]["evaluation"]["step_time_s"]
    text = page.read_text()
    for section in ("headline", "differences", "measures", "walk"):
        assert f'<section id="{section}"' in text


def test_bad_files_are_named_both(files: tuple[Path, Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    done = CliRunner().invoke(app, ["compare", str(bad), str(tmp_path / "none.json")])
    assert done.exit_code == 2
    assert "bad.json" in done.output + done.stderr
    assert "none.json" in done.output + done.stderr


def test_a_result_without_a_plan_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text(json.dumps({"status": "INFEASIBLE", "plan": None, "reason": ["memory"]}))
    done = CliRunner().invoke(app, ["compare", str(files[0]), str(empty)])
    assert done.exit_code == 2
    assert "holds no plan" in done.output + done.stderr


def test_names_of_files_come_out_escaped() -> None:
    found = compare(("<img src=x>", INSTANCE, plan(tp=2)), ("b", INSTANCE, plan(tp=4)))
    text = comparison_page(found)
    assert "<img" not in text
    assert "&lt;img" in text
