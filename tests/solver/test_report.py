"""The page of a plan: its sections, its numbers, what it does to hostile input, and how a browser takes it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from copy import deepcopy
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
from pages import HOSTILE, Page, asks_for_nothing, driven, needs_chromium, opened
from typer.testing import CliRunner

import shardwise as sw
from shardwise.data.instance_document import instance_document
from shardwise.data.plan import Placement, Plan
from shardwise.solver.cli import app
from shardwise.solver.crossings import crossings
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.evaluate import cost_tables
from shardwise.solver.report import MAX_PAGE_BYTES, report_page
from shardwise.solver.report.blocks import MAX_LISTED
from shardwise.solver.report.timeline import MAX_STAGES
from shardwise.solver.saved import Saved, read_saved, saved_instance

if TYPE_CHECKING:
    from pathlib import Path

GB = 1e9
SECTIONS = (
    "headline", "degrees", "step-time", "memory", "timeline", "placement", "alternatives", "limits", "assumptions", "search",
)  # fmt: skip


@pytest.fixture(scope="module")
def solved() -> sw.Result:
    return sw.solve("llama-3.1-8b", "dgx-h100:2", sw.Training(4096, 64), limits=["pp=2"], workers=1)


@pytest.fixture(scope="module")
def result_file(solved: sw.Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "result.json"
    path.write_text(json.dumps(solved.to_dict()))
    return path


@pytest.fixture(scope="module")
def page(result_file: Path) -> str:
    saved = read_saved(result_file)
    assert saved.plan is not None
    return report_page(saved, saved_instance(saved.plan.instance))[0]


def written(document: Any, path: Path) -> tuple[int, str, str]:
    """Exit code, messages and page of `report` on a document."""
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    output = path.with_suffix(".html")
    done = CliRunner().invoke(app, ["report", str(path), "-o", str(output)])
    return done.exit_code, done.output + done.stderr, output.read_text() if output.exists() else ""


def large() -> tuple[sw.Instance, Plan]:
    """Llama-3.1-405B on 16,384 devices, 128 stages."""
    instance = sw.build_instance("llama-3.1-405b", "dgx-h100:2048", sw.Training(8192, 2048))
    degrees = degrees_from(instance, tp=8, pp=126, dp=16)
    return instance, plan_from_degrees(instance, degrees, recompute="full")


def test_every_section_is_there_under_a_heading(page: str) -> None:
    found = Page(page)
    assert tuple(section["id"] for section in found.all("section")) == SECTIONS
    assert len(found.all("h1")) == 1
    assert len(found.all("h2")) == len(SECTIONS)


def test_the_numbers_are_those_of_evaluate(solved: sw.Result, page: str) -> None:
    assert solved.plan is not None
    evaluation = sw.evaluate(saved_instance(solved.plan.instance), solved.plan)
    values = Page(page).values
    assert values["step_time_s"] == values["step_s"] == [evaluation.step_time_s]
    assert values["tokens_per_s"] == [evaluation.tokens_per_s]
    for name, value in asdict(evaluation.parts).items():
        assert values[f"{name}_s"] == [value]
    for name in asdict(evaluation.stages[0]):
        assert values[f"{name}_gb"] == [getattr(stage, name) / GB for stage in evaluation.stages]
    assert values["total_gb"] == [stage.total / GB for stage in evaluation.stages]
    for name, degree in solved.plan.degrees.to_dict().items():
        if name != "cp_comm_type":
            assert values[name] == [int(degree)]
    assert solved.plan.degrees.cp_comm_type in "".join(Page(page).words)
    simulation = sw.simulate(saved_instance(solved.plan.instance), solved.plan)
    assert values["bubble_s"] == list(simulation.bubble_s)


def test_the_certificate_is_that_of_the_result(solved: sw.Result, page: str) -> None:
    found = Page(page)
    assert (found.values["value"], found.values["bound"], found.values["gap"]) == (
        [solved.value], [solved.bound], [solved.gap],
    )  # fmt: skip
    assert "OPTIMAL" in "".join(found.words)
    assert solved.report["universe"]["rules"] in "".join(found.words)


def test_a_plan_file_makes_a_page_without_a_certificate(solved: sw.Result, tmp_path: Path) -> None:
    assert solved.plan is not None
    code, _, text = written(solved.plan.to_dict(), tmp_path / "plan.json")
    assert code == 0
    assert "holds no certificate" in text
    assert tuple(section["id"] for section in Page(text).all("section")) == SECTIONS


def test_a_certificate_of_another_step_time_is_said(solved: sw.Result, tmp_path: Path) -> None:
    document = solved.to_dict() | {"value": 2 * (solved.value or 0.0)}
    code, _, text = written(document, tmp_path / "edited.json")
    assert code == 0
    assert "does not match" in text


def test_a_result_without_a_plan_says_why(tmp_path: Path) -> None:
    result = sw.solve("llama-3.1-405b", "dgx-h100:1", sw.Training(8192, 64))
    code, _, text = written(result.to_dict(), tmp_path / "no.json")
    assert code == 0
    assert "INFEASIBLE" in text
    assert "no plan fits" in text


def test_an_illegal_plan_is_reported_with_its_faults(tmp_path: Path) -> None:
    instance = sw.build_instance("qwen2.5-14b", "dgx-h100:4", sw.Training(4096, 64))
    plan = plan_from_degrees(instance, degrees_from(instance, tp=16, pp=2))
    document = replace(plan, instance=instance_document(instance)).to_dict()
    code, _, text = written(document, tmp_path / "illegal.json")
    assert code == 0
    assert "tp=16 does not divide num_attention_heads=40" in text


def test_assumptions_about_the_model_are_in_a_plan_file(solved: sw.Result, page: str) -> None:
    assert solved.plan is not None
    instance = sw.build_instance("llama-3.1-70b", "dgx-h100:1", sw.Training(4096, 64))
    assert instance.model.assumed
    assert saved_instance(instance_document(instance)).model.assumed == instance.model.assumed
    assert instance.accelerator.source in "".join(Page(page).words)


def test_ties_and_slower_alternatives_are_told_apart(solved: sw.Result, tmp_path: Path) -> None:
    document = solved.to_dict()
    other = {"value": solved.value, "tie": True, "plan": document["plan"]}
    slower = {"value": 2 * (solved.value or 0.0), "tie": False, "plan": document["plan"]}
    _, _, text = written(document | {"alternatives": [other, slower]}, tmp_path / "tied.json")
    assert ">tie<" in text
    assert "+100.00 %" in text


def test_the_plan_stands_among_its_alternatives_with_its_regret_and_the_recommended_one(tmp_path: Path) -> None:
    result = sw.solve("llama-3.2-1b", "dgx-h100:1", sw.Training(2048, 16), workers=1, top=3)
    assert result.alternatives
    assert result.robustness is not None
    _, _, text = written(result.to_dict(), tmp_path / "top.json")
    assert Page(text).values["expected_regret"] == list(result.robustness.expected_regret)
    assert "recommended (*):" in text


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ("throughput-per-device", "no plan has more than"),
        ("energy", "no plan has less than"),
        ("cost", "USD per million tokens"),
        ("devices", "1 devices"),
    ],
)
def test_a_certificate_speaks_of_its_own_objective(objective: str, words: str, tmp_path: Path) -> None:
    """The value of another objective was once read as a step time, and the page said that the file was edited."""
    result = sw.solve("llama-3.2-1b", "dgx-h100:1", sw.Training(2048, 16), workers=1, objective=objective)
    _, _, text = written(result.to_dict(), tmp_path / "certified.json")
    assert words in text
    assert "does not match" not in text
    assert Page(text).values["value"] == [result.value]
    if objective != "cost":
        factors = {"value": 1.5, "bound": 1.5 if objective == "throughput-per-device" else 0.5}
        edited = {name: factor * (result.value or 0.0) for name, factor in factors.items()}
        assert "does not match" in written(result.to_dict() | edited, tmp_path / "edited.json")[2]


def test_hostile_strings_come_out_as_text(solved: sw.Result, tmp_path: Path) -> None:
    document = json.loads(json.dumps(solved.to_dict()))
    instance = document["plan"]["instance"]
    instance["model"]["name"] = instance["model"]["source"] = instance["model"]["family"] = HOSTILE
    instance["model"]["assumed"] = [HOSTILE]
    instance["cluster"] = re.sub(r'(?m)^name = ".*"', f"name = {json.dumps(HOSTILE)}", instance["cluster"], count=1)
    document["report"]["universe"][HOSTILE] = HOSTILE
    document["report"]["assumed"] = {"model": [HOSTILE], "cluster": HOSTILE}
    document["report"]["candidates"] = {HOSTILE: [HOSTILE] * 1000}
    code, said, text = written(document, tmp_path / "hostile.json")
    assert code == 0, said
    found = Page(text)
    assert len(found.all("script")) == 1
    assert not found.all("img")
    assert not [attributes for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert "{{ 7 * 7 }}" in "".join(found.words)
    assert HOSTILE in "".join(found.words)


def test_texts_and_lists_of_a_file_are_bounded(solved: sw.Result, tmp_path: Path) -> None:
    document = json.loads(json.dumps(solved.to_dict()))
    document["report"]["universe"] = {f"{'x' * 10_000}{index}": "y" * 10_000 for index in range(300)}
    document["plan"]["instance"]["model"]["assumed"] = ["z" * 1000] * 3000
    document["alternatives"] = document["alternatives"][:1] * (2 * MAX_LISTED)
    code, _, text = written(document, tmp_path / "long.json")
    assert code == 0
    assert len(text) < 1_000_000


def test_the_page_of_a_large_plan_is_small_and_says_what_it_samples() -> None:
    instance, plan = large()
    text, _ = report_page(Saved(replace(plan, instance=instance_document(instance))), instance)
    assert len(text.encode()) < MAX_PAGE_BYTES / 2
    assert f"{MAX_STAGES} of 126 stages are drawn" in text


def test_a_step_of_too_many_passes_is_reported_without_its_timeline() -> None:
    instance = sw.build_instance("llama-3.1-8b", "dgx-h100:1", sw.Training(128, 1_000_000))
    plan = plan_from_degrees(instance, degrees_from(instance, pp=8, dp=1))
    text, _ = report_page(Saved(plan), instance)
    assert "The timeline is not drawn" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"status": "SURE", "value": "fast"}, ["status='SURE'", "value='fast'"]),
        ({"bound": 1e9}, ["bound=1000000000.0 must not lie above"]),
        ({"objective": "beauty"}, ["objective='beauty' must be one of step-time"]),
        ({"objective": "throughput-per-device", "bound": 1e-9}, ["bound=1e-09 must not lie below"]),
        ({"robustness": {"recommended": 9, "best_share": "x"}}, ["robustness.recommended=9", "robustness.best_share"]),
        ({"alternatives": [{"value": 1.0}, 3]}, ["alternatives[0]", "alternatives[1]"]),
        ({"report": [], "reason": 4}, ["report must be an object", "reason must be a list"]),
        ({"plan": {"version": 1, "degrees": {"tp": 0}}}, ["degrees.tp=0", "plan.stages", "plan.placement"]),
    ],
)
def test_bad_files_are_refused_with_every_fault(
    change: dict[str, Any], words: list[str], solved: sw.Result, tmp_path: Path
) -> None:
    code, said, text = written(solved.to_dict() | change, tmp_path / "bad.json")
    assert code == 2
    assert not text
    for word in words:
        assert word in said


@pytest.mark.parametrize("text", ["", "[", "[]", "3", "[" * 100_000, "{}", '{"plan": 3}'])
def test_what_is_not_a_plan_is_refused(text: str, tmp_path: Path) -> None:
    assert written(text, tmp_path / "bad.json")[0] == 2


def test_a_missing_file_and_a_missing_folder_are_bad_input(tmp_path: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["report", str(tmp_path / "no.json"), "-o", str(tmp_path / "x.html")]).exit_code == 2
    assert runner.invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "x.html")]).exit_code == 2
    assert (
        runner.invoke(app, ["report", str(tmp_path / "a.json"), "-o", str(tmp_path / "no" / "x.html")]).exit_code == 2
    )


def test_json_tells_what_the_page_adds_to_the_plan(result_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = CliRunner().invoke(
        app, ["report", str(result_file), "-o", str(tmp_path / "x.html"), "--json", str(out), "-q"]
    )
    assert done.exit_code == 0
    document = json.loads(out.read_text())
    assert document["certificate"]["status"] == "OPTIMAL"
    assert document["evaluation"]["legal"]
    assert {entry["axis"] for entry in document["crossings"]} >= {"pp", "dp"}
    assert [entry["binds"] for entry in document["limits"] if entry["name"] == "pp"] == [True]


def test_the_page_asks_for_nothing_and_is_readable_without_colour_or_eyes(page: str) -> None:
    found = Page(page)
    assert asks_for_nothing(page)
    assert found.all("html")[0]["lang"] == "en"
    assert len(found.all("caption")) == len(found.all("table")) > 5
    assert all("scope" in head for head in found.all("th"))
    charts = [svg for svg in found.all("svg") if svg.get("role") == "img"]
    assert len(charts) == len(found.all("desc")) == 3
    assert all(svg["aria-labelledby"] for svg in charts)
    assert len(found.all("pattern")) > 4


def test_the_calls_told_take_the_time_that_evaluate_tells() -> None:
    """(X1) with the collective's own time: the bytes are those that the cost model times."""
    from shardwise.formulations.collectives import collective_time_s
    from shardwise.formulations.step_time import spans_of, straggling

    instance = sw.build_instance("llama-3.1-8b", "dgx-h100:2", sw.Training(4096, 64))
    for tp, pp, vpp in ((4, 2, 1), (8, 1, 1), (2, 4, 2)):
        plan = plan_from_degrees(instance, degrees_from(instance, tp=tp, pp=pp, vpp=vpp))
        evaluation = sw.evaluate(instance, plan)
        spent = sum(
            (c.calls or 0)
            * collective_time_s(
                instance.accelerator, c.op, c.bytes_per_call or 0.0, spans_of(c.members, instance.levels)
            )
            for c in crossings(instance, plan, evaluation.busiest_stage)
            if c.axis == "tp"
        )
        shown = spent * instance.profile.tp_comm_exposed * straggling(instance, plan.degrees.devices)
        assert shown == pytest.approx(evaluation.parts.tensor_parallel, rel=1e-9)


def test_gradient_bytes_are_those_of_the_parameters_on_a_device() -> None:
    instance = sw.build_instance("llama-3.1-8b", "dgx-h100:2", sw.Training(4096, 64))
    plan = plan_from_degrees(instance, degrees_from(instance, tp=1, pp=1))
    params = sum(kind.params for kind in instance.model.layers)
    tables = cost_tables(instance)
    assert sum(tables.kind_params(1)[k].total for k in instance.model.kind_indices) == params
    told = {(c.what, c.op): c for c in crossings(instance, plan, 0)}
    gradients, weights = told["gradients", "reduce_scatter"], told["weights", "all_gather"]
    assert weights.bytes_per_step == pytest.approx(2 * instance.model.params, rel=1e-3)
    assert gradients.bytes_per_step == weights.bytes_per_step / 2 * instance.profile.reduce_bytes
    assert gradients.members == (8, 2)
    assert {c.axis for c in told.values()} == {"dp"}


def test_transfers_of_stages_inside_a_node_and_between_nodes_are_told_apart() -> None:
    instance = sw.build_instance("llama-3.1-8b", "dgx-h100:2", sw.Training(4096, 64))
    degrees = degrees_from(instance, tp=2, pp=8, dp=1)
    placed = Placement((2, 1), (4, 2), (1, 1), "tp-pp-dp")
    plan = replace(plan_from_degrees(instance, degrees), placement=placed)
    sent = [c for c in crossings(instance, plan, 0) if c.axis == "pp"]
    assert [c.members for c in sent] == [(2, 1), (1, 2)]
    assert [c.calls for c in sent] == [2 * plan.micro_batches] * 2
    assert {c.bytes_per_call for c in sent} == {2 * 4096 * instance.model.hidden / 2}


def test_one_device_sends_nothing() -> None:
    instance = sw.build_instance("llama-3.2-1b", "dgx-h100:1", sw.Training(4096, 4))
    plan = plan_from_degrees(instance, degrees_from(instance, dp=1))
    assert crossings(instance, plan, 0) == ()
    assert "Nothing crosses a link." in report_page(Saved(plan), instance)[0]


def test_planning_loads_no_templates() -> None:
    code = "import sys, shardwise.solver.cli as cli; assert 'jinja2' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


HARNESS = """
const table = [...document.querySelectorAll("table")].find((one) => one.caption.textContent.startsWith("Step time"));
const read = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[1].dataset.value));
const head = table.tHead.rows[0].cells[1];
seen.turns = [0, 1].map(() => {
  head.querySelector("button").click();
  return [head.getAttribute("aria-sort"), read()];
});
seen.wide = document.documentElement.scrollWidth;
"""


@needs_chromium
class TestInABrowser:
    def test_the_page_as_written_logs_nothing_and_makes_its_headers_buttons(self, page: str, tmp_path: Path) -> None:
        shown, logged = opened(page, tmp_path)
        assert logged == ""
        assert len(Page(shown).all("button")) > 20

    def test_buttons_sort_by_exact_values_and_say_so(self, page: str, tmp_path: Path) -> None:
        found = driven(page, HARNESS, tmp_path)
        assert found["errors"] == []
        assert found["wide"] <= 500
        (up, rising), (down, falling) = found["turns"]
        assert (up, down) == ("ascending", "descending")
        assert rising == sorted(rising)
        assert falling == sorted(falling, reverse=True)

    def test_the_page_runs_no_script_but_its_own(self, page: str, tmp_path: Path) -> None:
        intruder = "<script>document.body.dataset.intruded = 'yes'</script></body>"
        shown, logged = opened(page.replace("</body>", intruder), tmp_path)
        assert "data-intruded" not in shown
        assert "Content Security Policy" in logged


def test_documents_are_not_changed_by_reading(result_file: Path) -> None:
    before = json.loads(result_file.read_text())
    saved = read_saved(result_file)
    assert saved.plan is not None
    assert deepcopy(before["plan"]) == saved.plan.to_dict()
