"""A trace is what chrome://tracing and Perfetto read, and says what the simulation says."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

import shardwise as sw
from shardwise.data.pipeline import SCHEDULES, Schedule
from shardwise.data.plan import Degrees, Plan
from shardwise.data.workload import Training
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.simulate import Simulation, simulate
from shardwise.solver.solve import build_instance
from shardwise.solver.trace import MAX_PASSES, chrome_trace, kept_micro_batches, said_sampled, stage_name

if TYPE_CHECKING:
    from shardwise.data.instance import Instance

LIMIT_BYTES = 20_000_000
CHUNKS = {"interleaved-1f1b": 3, "zb-v": 2, "dualpipe-v": 2}
COMMON = {
    "ph": {"type": "string"},
    "pid": {"type": "integer", "minimum": 0},
    "tid": {"type": "integer", "minimum": 0},
    "ts": {"type": "number", "minimum": 0},
}


def event(phase: str, required: list[str], **properties: Any) -> dict[str, Any]:
    """The schema of one kind of event; a field it does not name is a fault."""
    return {
        "type": "object",
        "required": ["ph", "pid", "tid", "ts", *required],
        "properties": COMMON | {"ph": {"const": phase}} | properties,
        "additionalProperties": False,
    }


NAMED = {"name": {"type": "string", "minLength": 1}}
FLOW = NAMED | {"cat": {"type": "string"}, "id": {"type": "integer"}}
SORTED = {"process_sort_index", "thread_sort_index"}
# The fields that "Trace Event Format" gives to complete, flow, counter and metadata events. A schema stands for a viewer:
# Python's readers of the format download a binary (perfetto), bring a notebook server (HolisticTraceAnalysis) or only write.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    event(
                        "X", ["name", "dur"], **NAMED,
                        cat={"type": "string"}, dur={"type": "number", "minimum": 0}, args={"type": "object"},
                    ),
                    event("s", ["name", "cat", "id"], **FLOW),
                    event("f", ["name", "cat", "id", "bp"], **FLOW, bp={"const": "e"}),
                    event(
                        "C", ["name", "args"], **NAMED,
                        args={"type": "object", "minProperties": 1, "additionalProperties": {"type": "number"}},
                    ),
                    event(
                        "M", ["name", "args"],
                        name={"enum": ["process_name", "thread_name"]},
                        args={"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
                    ),
                    event(
                        "M", ["name", "args"],
                        name={"enum": sorted(SORTED)},
                        args={"type": "object", "required": ["sort_index"], "properties": {"sort_index": {"type": "integer"}}},
                    ),
                ]
            },
        },
    },
    "additionalProperties": False,
}  # fmt: skip


@cache
def instance_of(model: str = "llama-3.1-8b", cluster: str = "dgx-h100:2", batch: int = 32) -> Instance:
    return build_instance(model, cluster, Training(8192, batch), rules="free")


@cache
def simulation_of(schedule: Schedule, micro_batches: int = 16) -> Simulation:
    """Llama-3.1-8B on four stages of uneven chunks."""
    vpp = CHUNKS.get(schedule, 1)
    chunks = [32 // (4 * vpp)] * 4 * vpp
    chunks[-1] -= 1
    chunks[1] += 33 - sum(chunks) - 1
    instance = instance_of(batch=2 * micro_batches)
    plan = plan_from_degrees(instance, Degrees(tp=2, pp=4, dp=2, vpp=vpp), stages=chunks, schedule=schedule)
    return simulate(instance, plan)


def read(document: dict[str, Any]) -> dict[str, Any]:
    """What a viewer reads of the file; a NaN is no JSON."""
    parsed: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    return parsed


def by_phase(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in document["traceEvents"]:
        found[one["ph"]].append(one)
    return found


def nanoseconds(us: float) -> int:
    return round(us * 1000)


def check(document: dict[str, Any]) -> None:
    """No two slices of a thread overlap, and every flow goes from a slice to a later one."""
    events = by_phase(document)
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for one in events["X"]:
        threads[one["pid"], one["tid"]].append(
            (nanoseconds(one["ts"]), nanoseconds(one["ts"]) + nanoseconds(one["dur"]))
        )
    for slices in threads.values():
        slices.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(slices))
    starts = {one["id"]: one for one in events["s"]}
    ends = {one["id"]: one for one in events["f"]}
    assert len(starts) == len(events["s"]) == len(ends) == len(events["f"])
    assert starts.keys() == ends.keys()
    edges = {thread: ({a for a, _ in slices}, {b for _, b in slices}) for thread, slices in threads.items()}
    for name, start in starts.items():
        end = ends[name]
        assert start["ts"] < end["ts"]
        assert start["pid"] != end["pid"]
        assert nanoseconds(end["ts"]) in edges[end["pid"], end["tid"]][0]
        assert nanoseconds(start["ts"]) not in edges[start["pid"], start["tid"]][1]
    named = {(one["pid"], one["tid"]) for one in events["M"] if one["name"] == "thread_name"}
    assert {(one["pid"], one["tid"]) for one in document["traceEvents"]} == named


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_event_is_one_of_the_format(schedule: Schedule) -> None:
    document = read(chrome_trace(simulation_of(schedule)))
    jsonschema.validate(document, SCHEMA)
    check(document)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_trace_holds_every_pass_transfer_and_change_of_memory(schedule: Schedule) -> None:
    simulation = simulation_of(schedule)
    events = by_phase(read(chrome_trace(simulation)))
    passes = [one for one in events["X"] if one["tid"] == 0]
    assert len(passes) == len(simulation.passes)
    assert len({(one["pid"], one["name"]) for one in passes}) == len(passes)
    assert {one["args"]["micro_batch"] for one in passes} == set(range(16))
    assert len(events["s"]) == len(simulation.transfers)
    for stage, memory in enumerate(simulation.memory):
        held = [one["args"]["bytes"] for one in events["C"] if one["pid"] == stage]
        assert max(held) == round(memory.peak_bytes)
        assert held[-1] == min(held)
    busy = sum(one["dur"] for one in passes) / 1e6
    assert busy == pytest.approx(float(simulation.passes.busy_s.sum()), rel=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "gpipe", "dualpipe-v", "dualpipe"])
def test_a_synchronised_step_ends_when_the_last_stage_does(schedule: Schedule) -> None:
    simulation = simulation_of(schedule)
    events = by_phase(read(chrome_trace(simulation)))
    end = max(one["ts"] + one["dur"] for one in events["X"])
    assert end / 1e6 == pytest.approx(simulation.step_time_s, rel=1e-6)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-2p", "zb-v"])
def test_an_unsynchronised_step_is_the_longest_of_one_stage(schedule: Schedule) -> None:
    simulation = simulation_of(schedule)
    spans: dict[int, list[float]] = defaultdict(list)
    for one in by_phase(read(chrome_trace(simulation)))["X"]:
        if one["tid"] < 2:
            spans[one["pid"]] += [one["ts"], one["ts"] + one["dur"]]
    longest = max(max(times) - min(times) for times in spans.values())
    assert longest / 1e6 == pytest.approx(simulation.step_time_s, rel=1e-6)


def test_what_follows_the_passes_stands_in_its_order() -> None:
    events = by_phase(read(chrome_trace(simulation_of("1f1b"))))
    names = [one["name"] for one in events["X"] if one["pid"] == 0 and one["tid"] == 1]
    assert names[:3] == ["gradient sync", "optimizer", "parameter gather"]


def test_names_say_stage_devices_and_layers() -> None:
    plan = plan_from_degrees(instance_of(), Degrees(tp=2, pp=4, dp=2, vpp=2), schedule="interleaved-1f1b")
    assert stage_name(plan, 1) == "stage 1: devices 4-7; layers 4-7, 20-23"
    plan = plan_from_degrees(instance_of(), Degrees(tp=1, pp=2, dp=8), rank_order="tp-pp-dp")
    assert stage_name(plan, 1) == "stage 1: devices 1, 3, 5, ... (8 in all); layers 16-31"
    plan = plan_from_degrees(instance_of(), Degrees(pp=4, dp=2, vpp=2), schedule="zb-v")
    assert stage_name(plan, 3) == "stage 3: devices 6-7; layers 12-19"


def large(dp: int, vpp: int = 1) -> Plan:
    """Llama-3.1-405B with a global batch of 2,048; with 128 chunks the first and the last hold no layer."""
    stages = [0, *[1] * 126, 0] if vpp == 8 else None
    return plan_from_degrees(big(), degrees_from(big(), tp=8, pp=16, dp=dp, vpp=vpp), stages=stages)


def big() -> Instance:
    return instance_of("llama-3.1-405b", "dgx-h100:2048", 2048)


def test_the_405b_plan_is_shown_whole_below_the_limit() -> None:
    simulation = simulate(big(), large(128, vpp=8))
    document = chrome_trace(simulation)
    assert document["otherData"]["sampled"] is None
    assert said_sampled(simulation) is None
    assert len(json.dumps(document, separators=(",", ":"))) < LIMIT_BYTES
    check(read(document))


@pytest.mark.parametrize("degrees", [{"dp": 4}, {"dp": 4, "vpp": 4}])
def test_a_long_step_is_sampled_below_the_limit_and_says_so(degrees: dict[str, int]) -> None:
    simulation = simulate(big(), large(**degrees))
    limit = MAX_PASSES if "vpp" in degrees else 8000
    assert len(simulation.passes) > limit
    document = chrome_trace(simulation, limit)
    assert len(json.dumps(document, separators=(",", ":"))) < LIMIT_BYTES
    kept = document["otherData"]["sampled"]["micro_batches"]
    assert "of 512 micro-batches" in document["otherData"]["sampled"]["why"]
    document = read(document)
    check(document)
    events = by_phase(document)
    passes = [one for one in events["X"] if one["tid"] == 0]
    assert len(passes) <= limit
    assert {one["args"]["micro_batch"] for one in passes} == set(kept)
    third = len(kept) // 3 - 1
    assert set(range(third)) <= set(kept)
    assert set(range(512 - third, 512)) <= set(kept)
    assert any(third < i < 512 - third for i in kept)
    for stage, memory in enumerate(simulation.memory):
        held = [one["args"]["bytes"] for one in events["C"] if one["pid"] == stage]
        assert max(held) == round(memory.peak_bytes)


def test_the_largest_trace_without_sampling_is_below_the_limit() -> None:
    # Split schedules have the most events for a pass that is shown: every one but the weight gradients is sent.
    plan = plan_from_degrees(big(), degrees_from(big(), tp=8, pp=16, dp=4, vpp=2), schedule="zb-v")
    simulation = simulate(big(), replace(plan, micro_batches=MAX_PASSES // (16 * 2 * 3)))
    interleaved = simulate(big(), replace(large(4, vpp=4), micro_batches=MAX_PASSES // (16 * 4 * 2) // 16 * 16))
    for one in (simulation, interleaved):
        assert said_sampled(one) is None
        assert len(one.passes) > 0.9 * MAX_PASSES
        assert len(json.dumps(chrome_trace(one), separators=(",", ":"))) < LIMIT_BYTES


def test_both_directions_of_dualpipe_keep_the_same_micro_batches() -> None:
    simulation = simulation_of("dualpipe", 64)
    kept = kept_micro_batches(simulation, len(simulation.passes) // 4).tolist()
    assert kept == sorted(kept)
    assert [i for i in kept if i < 32] == [i - 32 for i in kept if i >= 32]
    assert len(kept) <= 16


def test_one_micro_batch_is_kept_however_small_the_limit() -> None:
    simulation = simulation_of("1f1b")
    assert len(kept_micro_batches(simulation, 1)) == 1
    check(read(chrome_trace(simulation, 1)))


def test_slow_links_take_further_threads_instead_of_overlapping() -> None:
    simulation = simulation_of("gpipe")
    transfers = simulation.transfers
    slow = replace(simulation, transfers=replace(transfers, end_s=transfers.blocking_until_s + 10.0))
    document = read(chrome_trace(slow))
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for one in by_phase(document)["X"]:
        slices[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for own in slices.values():
        own.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(own))
    names = {one["args"]["name"] for one in by_phase(document)["M"] if one["name"] == "thread_name"}
    assert {"send", "send 2", "send 3"} <= names


def test_the_python_names_are_there() -> None:
    assert sw.chrome_trace is chrome_trace
    assert sw.simulate is simulate
