"""The fewest devices: against exhaustive search, against searches that know nothing of their bound, and as a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner
from universe import admitted, examples, instances

import shardwise as sw
from shardwise.formulations.candidates import enumerate_grids
from shardwise.formulations.device_counts import DeviceCounts, arithmetic
from shardwise.formulations.room import Room
from shardwise.formulations.splits import SplitSearch
from shardwise.solver.cli import app
from shardwise.solver.evaluate import cost_tables, evaluate
from shardwise.solver.fit import GLOBAL_BATCH, SEQ_LEN, FitSearch

if TYPE_CHECKING:
    from shardwise.data.instance import Instance

WORKLOAD = sw.Training(SEQ_LEN, GLOBAL_BATCH)


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["fit", *arguments])
    return done.exit_code, done.output


@examples(60)
@given(instances())
def test_numbers_of_devices_hold_a_plan_exactly_as_exhaustive_search_says(instance: Instance) -> None:
    found = {one.plan.degrees.devices for one in admitted(instance, 1.0)}
    counts = DeviceCounts(cost_tables(instance))
    said = {count.devices: count.certain for count in counts.ascending()}
    assert found <= set(said)
    assert {devices for devices, certain in said.items() if certain} <= found
    least = arithmetic(cost_tables(instance)).least_devices
    assert not found or (least is not None and least <= min(found))


@examples(40)
@given(instances())
def test_a_candidate_without_room_has_no_plan(instance: Instance) -> None:
    found = {
        (
            one.plan.degrees.pp,
            one.plan.degrees.vpp,
            one.plan.degrees.dp,
            one.plan.degrees.micro_batch,
            one.plan.schedule,
        )
        for one in admitted(instance, 1.0)
    }
    room = Room(SplitSearch(instance, cost_tables(instance)))
    held = set()
    for grid in enumerate_grids(instance):
        for row in room.rows(grid).nonzero()[0].tolist():
            d = grid.degrees(row)
            held.add((d.pp, d.vpp, d.dp, d.micro_batch, grid.shape.schedule))
    assert found <= held


@examples(25)
@given(instances(), st.booleans())
def test_the_answer_is_a_plan_on_the_fewest_devices_of_all(instance: Instance, quick: bool) -> None:
    found = [one.plan.degrees.devices for one in admitted(instance, 1.0)]
    one = FitSearch(None, 1, 0, None).fit("here", instance, quick=quick, changes=False)
    assert one.devices == min(found, default=None)
    if one.devices is None:
        assert one.answer == "does not fit"
        assert one.reason
        return
    assert one.plan is not None
    assert evaluate(instance, one.plan).admitted
    assert one.plan.degrees.devices == one.devices == one.excluded + 1
    assert one.answer == evaluate(instance, one.plan).verdict
