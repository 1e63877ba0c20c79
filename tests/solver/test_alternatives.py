"""(A1), (A2): which plans are told of beside the best one."""

from __future__ import annotations

from functools import lru_cache

import pytest
from rich.console import Console

import shardwise as sw
from shardwise.solver.evaluate import evaluate
from shardwise.solver.render import show_alternatives
from shardwise.solver.result import LAYOUT, layout_of


@lru_cache(maxsize=1)
def instance() -> sw.Instance:
    return sw.build_instance("llama-3.1-8b", "dgx-h100:2", sw.Training(4096, 64))


@lru_cache(maxsize=8)
def solved(top: int = 5) -> sw.Result:
    return sw.solve(instance=instance(), workers=1, top=top)


def plans(result: sw.Result) -> list[sw.Plan]:
    assert result.plan is not None
    return [result.plan, *(other.plan for other in result.alternatives)]


def test_alternatives_differ_from_every_better_plan_in_a_degree_of_the_layout() -> None:
    result = solved()
    assert len(result.alternatives) > 1
    layouts = [layout_of(plan.degrees) for plan in plans(result)]
    assert len(set(layouts)) == len(layouts)
    assert result.value is not None
    values = [result.value, *(other.value for other in result.alternatives)]
    assert values == sorted(values)
    for other in result.alternatives:
        assert set(other.differs(plans(result)[0])) & set(LAYOUT)
        assert other.tie == (other.value == result.value) or other.value == pytest.approx(result.value, rel=1e-5)


def test_top_says_how_many_alternatives_there_are_at_most() -> None:
    two, none = solved(top=2), solved(top=0)
    assert two.alternatives[0].plan == solved().alternatives[0].plan
    assert len(two.alternatives) == 2
    assert none.alternatives == ()
    assert none.robustness is not None
    assert none.robustness.best_share == (1.0,)
    assert none.plan == two.plan == solved().plan
    for wrong in (-1, 101, True, 2.5):
        with pytest.raises(sw.InputError, match="top="):
            sw.solve(instance=instance(), top=wrong)  # type: ignore[arg-type]


def test_others_are_met_without_a_better_plan_taking_the_optimums_place() -> None:
    search_alone, with_others = solved(top=0), solved(top=40)
    assert search_alone.plan == with_others.plan
    assert search_alone.value == with_others.value
    assert len(with_others.alternatives) > len(solved().alternatives) == 5
    assert [other.plan for other in with_others.alternatives[:1]] == [solved().alternatives[0].plan]
    for other in with_others.alternatives:
        evaluation = evaluate(instance(), other.plan)
        assert evaluation.admitted
        assert other.value == evaluation.step_time_s


def test_a_tie_is_marked_and_a_worse_plan_is_not() -> None:
    own = sw.build_instance("llama-3.1-8b", "dgx-h100:1", sw.Training(4096, 64), limits=["devices=1", "zero<=1"])
    for result in (sw.solve(instance=own, workers=1), solved()):
        for other in result.alternatives:
            assert other.tie == (other.value == pytest.approx(result.value, rel=1e-8))


def test_a_search_that_the_time_ended_tells_of_what_it_met() -> None:
    short = sw.solve("llama-3.1-70b", "dgx-h100:8", sw.Training(8192, 512), workers=1, time_limit_s=0.7)
    assert short.status in ("UNKNOWN", "FEASIBLE", "OPTIMAL")
    layouts = [layout_of(other.plan.degrees) for other in short.alternatives]
    assert len(set(layouts)) == len(layouts) <= 5


def test_alternatives_of_the_fewest_devices_are_told_in_seconds_of_a_step() -> None:
    """All have as many devices; their values were printed as numbers of devices."""
    own = sw.build_instance("qwen3-0.6b", "dgx-h100:1", sw.Training(4096, 64), limits=["micro_batch=1", "devices>=2"])
    seen: list[sw.Progress] = []
    result = sw.solve(instance=own, objective="devices", workers=1, on_progress=seen.append)
    assert result.plan is not None
    assert result.evaluation is not None
    assert result.value == 2
    assert result.alternatives
    assert {other.plan.degrees.devices for other in result.alternatives} == {2}
    assert all(other.value >= result.evaluation.step_time_s for other in result.alternatives)
    assert {told.unit for told in seen} == {"s"}
    console = Console(record=True, width=100)
    show_alternatives(console, result)
    text = console.export_text()
    assert f"{result.evaluation.step_time_s:.5g}" in text
    assert "devices" not in text.splitlines()[2]
