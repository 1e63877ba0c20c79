"""A simulated step is the one that its schedule defines, event by event, and agrees with `evaluate` and the papers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_simulator import Event, reference

import shardwise as sw
from shardwise.data.cluster import Accelerator, Cluster, Domain, Link
from shardwise.data.instance import Instance
from shardwise.data.model import Model
from shardwise.data.model_parts import attention, layer, linear, mlp, norm
from shardwise.data.pipeline import SCHEDULES, Schedule, chunks_faults, layout
from shardwise.data.plan import Degrees, Plan, RankOrder, Recompute, Stage
from shardwise.data.rules import load_rules
from shardwise.data.workload import Training
from shardwise.formulations.schedule import BACKWARD, FORWARD
from shardwise.formulations.timeline import Shape
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.simulate import Passes, in_flight_changes, played, simulate

KIND = layer(512, attention(512, 8, 4, 64), mlp(512, 2048, gated=True))
WIDE = layer(512, attention(512, 8, 8, 64), mlp(512, 8192, gated=True))
LAYERS = 14


def toy() -> Instance:
    """Fourteen layers of two kinds on four nodes of four devices."""
    model = Model(
        "toy", "toy", 512, 1000, False, (KIND, KIND, WIDE, KIND, WIDE, KIND, KIND) * 2,
        linear("embed", 1000, 512, "vocab"), linear("lm_head", 1000, 512, "vocab") + norm("norm", 512),
    )  # fmt: skip
    device = Accelerator("toy", "none", 2**35, 2e12, {"bf16": 1e15})
    inner, outer = Link("inner", "nvlink", 4e11, 1e-6), Link("outer", "infiniband", 5e9, 4e-6)
    nodes = tuple(Domain(f"node{i}", "node", inner, device, 4) for i in range(4))
    cluster = Cluster("toy", Domain("fabric", "fabric", outer, children=nodes))
    return Instance(model, cluster, Training(1024, 64), load_rules("free"))


TOY = toy()


def found(passes: Passes, schedule: str, micro_batches: int, pp: int) -> dict[Event, tuple[float, float]]:
    """The simulated passes in the words of the reference."""
    half = micro_batches // 2 if schedule == "dualpipe" else 0
    return {
        (int(k), int(kind), int(slot), int(i) - (half if slot >= pp else 0)): (float(start), float(end))
        for k, kind, slot, i, start, end in zip(
            passes.stage, passes.kind, passes.slot, passes.micro_batch, passes.start_s, passes.end_s, strict=True
        )
    }


@st.composite
def shapes(draw: st.DrawFn, schedule: str) -> Shape:
    """Small shapes that a schedule runs."""
    pp = draw(st.sampled_from([2, 4] if schedule == "dualpipe" else [2, 3, 4, 5]))
    vpp = 2 if schedule in ("zb-v", "dualpipe-v") else 1
    if schedule == "interleaved-1f1b":
        vpp = draw(st.integers(2, 3))
    elif schedule == "gpipe":
        vpp = draw(st.integers(1, 3))
    micro = draw(st.integers(1, 12))
    if schedule == "interleaved-1f1b":
        micro = pp * draw(st.integers(1, 3))
    elif schedule == "dualpipe":
        micro = 2 * pp + 2 * draw(st.integers(0, 3))
    elif schedule == "dualpipe-v":
        micro = 2 * pp + draw(st.integers(0, 4))
    return Shape(schedule, pp, vpp, micro)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_pass_starts_and_ends_as_in_the_reference(schedule: str, data: st.DataObject) -> None:
    shape = data.draw(shapes(schedule))
    where = layout(schedule, shape.pp, shape.vpp)
    times = st.floats(0.0, 100.0, allow_subnormal=False)
    slots = len(where.stage)
    drawn = data.draw(st.lists(times, min_size=4 * slots, max_size=4 * slots))
    durations = np.array(drawn).reshape(4, slots)
    lags = np.array(data.draw(st.lists(times, min_size=shape.pp, max_size=shape.pp)))
    passes, transfers = played(shape, where, durations, lags, np.zeros(shape.pp))
    expected = reference(
        schedule,
        shape.pp,
        shape.vpp,
        shape.micro_batches,
        lambda kind, slot: float(durations[kind, slot]),
        lags.tolist(),
    )
    assert found(passes, schedule, shape.micro_batches, shape.pp) == expected
    for sender, receiver, end in zip(transfers.sender, transfers.receiver, transfers.end_s, strict=True):
        assert passes.stage[sender] != passes.stage[receiver]
        assert passes.end_s[sender] <= end <= passes.start_s[receiver]


@st.composite
def plans(draw: st.DrawFn, schedule: Schedule) -> Plan:
    """Plans of the toy with uneven chunks, empty ones among them, and any recompute."""
    shape = draw(shapes(schedule))
    count = shape.pp * shape.vpp
    cuts = sorted(draw(st.lists(st.integers(0, LAYERS), min_size=count - 1, max_size=count - 1)))
    stages = [b - a for a, b in zip([0, *cuts], [*cuts, LAYERS], strict=True)]
    degrees = degrees_from(
        TOY,
        tp=draw(st.sampled_from([1, 2])),
        pp=shape.pp,
        dp=draw(st.sampled_from([1, 2])),
        vpp=shape.vpp,
        micro_batch=draw(st.sampled_from([1, 3])),
        zero=draw(st.integers(0, 1)),
    )
    order: RankOrder = draw(st.sampled_from(["tp-dp-pp", "tp-pp-dp"]))
    plan = plan_from_degrees(TOY, degrees, stages=stages, schedule=schedule, rank_order=order)
    kinds: list[tuple[Recompute, int]] = [("none", 0), ("selective", 0), ("full", 1), ("full", 2)]
    own = tuple(Stage(stage.chunks, *draw(st.sampled_from(kinds))) for stage in plan.stages)
    return replace(plan, stages=own, micro_batches=shape.micro_batches)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_step_bubbles_and_memory_are_those_of_evaluate(schedule: Schedule, data: st.DataObject) -> None:
    plan = data.draw(plans(schedule))
    simulation = simulate(TOY, plan)
    evaluation = sw.evaluate(TOY, plan)
    assert simulation.step_time_s == pytest.approx(evaluation.step_time_s, rel=1e-9)
    assert simulation.bubble_share == pytest.approx(evaluation.bubble, abs=1e-9)
    for timeline_of_stage, stage, peak in zip(simulation.memory, evaluation.stages, evaluation.memory_mib, strict=True):
        assert timeline_of_stage.peak_bytes == pytest.approx(stage.total, rel=1e-12)
        assert timeline_of_stage.peak_bytes <= peak * 2**20
        assert (np.diff(timeline_of_stage.time_s) >= 0).all()
        assert timeline_of_stage.in_flight[0] == timeline_of_stage.in_flight[-1] == 0
        assert timeline_of_stage.held_bytes[-1] == pytest.approx(timeline_of_stage.held_bytes[0], rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_parts_of_a_stage_add_up_to_the_step(schedule: Schedule, data: st.DataObject) -> None:
    simulation = simulate(TOY, data.draw(plans(schedule)))
    busy = simulation.passes.busy_s
    for k, (tail, bubble) in enumerate(zip(simulation.tails, simulation.bubble_s, strict=True)):
        assert min(tail.gradient_sync_s, tail.optimizer_s, tail.parameter_gather_s, bubble) >= 0
        parts = tail.gradient_sync_s + tail.optimizer_s + tail.parameter_gather_s
        assert parts == pytest.approx(tail.total_s, rel=1e-9)
        whole = busy[k] + tail.total_s + bubble + simulation.overhead_s
        assert whole == pytest.approx(simulation.step_time_s, rel=1e-9)
        assert tail.start_s == simulation.passes.end_s[simulation.passes.of_stage(k)][-1]


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_transfer_is_blocking_in_the_sender_and_late_for_the_receiver(
    schedule: Schedule, data: st.DataObject
) -> None:
    plan = data.draw(plans(schedule))
    simulation = simulate(TOY, plan)
    passes, transfers = simulation.passes, simulation.transfers
    sender, receiver = transfers.sender, transfers.receiver
    assert (transfers.blocking_until_s == passes.end_s[sender]).all()
    assert (transfers.start_s >= passes.start_s[sender]).all()
    assert (transfers.end_s <= passes.start_s[receiver]).all()
    assert (passes.micro_batch[sender] == passes.micro_batch[receiver]).all()
    directions = 2 if schedule == "dualpipe" else 1
    seams = 1 if schedule in ("zb-v", "dualpipe-v") else 0  # the two chunks of the last stage
    count = len(plan.layout.stage) // directions - 1 - seams
    assert len(transfers) == 2 * plan.micro_batches * count


def test_the_parameter_gather_is_a_part_of_the_tail_where_the_optimizer_is_sharded() -> None:
    degrees = Degrees(tp=2, pp=2, dp=4, sequence_parallel=True)
    gathers = []
    for zero in (0, 1):
        simulation = simulate(TOY, plan_from_degrees(TOY, replace(degrees, zero=zero)))
        gathers.append([tail.parameter_gather_s for tail in simulation.tails])
        assert all(tail.gradient_sync_s > 0 and tail.optimizer_s > 0 for tail in simulation.tails)
    assert gathers[0] == [0.0, 0.0]
    # 16-bit weights against 32-bit gradients: about a third of what moves.
    assert all(gather > 0 for gather in gathers[1])
    for tail in simulation.tails:
        assert tail.parameter_gather_s == pytest.approx(tail.gradient_sync_s / 2, rel=0.2)


# What the papers say of even stages. Passes of one unit: F = I = W = 1 and B = 2 for a chunk, nothing between stages.


def even(schedule: str, pp: int, micro_batches: int, vpp: int = 1) -> tuple[list[float], list[int]]:
    """Bubble of every stage in units of one pass, and its chunks in flight at most."""
    shape, where = Shape(schedule, pp, vpp, micro_batches), layout(schedule, pp, vpp)
    durations = np.ones((4, len(where.stage)))
    durations[BACKWARD] = 2
    passes, _ = played(shape, where, durations, np.zeros(pp), np.zeros(pp))
    bubble = passes.spans.step(shape, np.zeros(pp)) - passes.busy_s
    return bubble.tolist(), [int(in_flight_changes(passes, k)[2].cumsum().max()) for k in range(pp)]


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("times", [2, 5])
def test_1f1b_and_gpipe_wait_for_one_micro_batch_of_every_other_stage(pp: int, times: int) -> None:
    # Narayanan et al., arXiv 2104.04473, sections 2.2.1 and 2.2.2: (p - 1)(F + B) for both, and p - k or m in flight.
    m = times * pp
    bubble, held = even("1f1b", pp, m)
    assert bubble == [3 * (pp - 1)] * pp
    assert held == [pp - k for k in range(pp)]
    bubble, held = even("gpipe", pp, m)
    assert bubble == [3 * (pp - 1)] * pp
    assert held == [m] * pp


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("vpp", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(pp: int, vpp: int) -> None:
    # arXiv 2104.04473, section 2.2.3: (p - 1)(f + b) of a chunk, 1 / v of the bubble of 1F1B.
    bubble, held = even("interleaved-1f1b", pp, 4 * pp, vpp)
    assert bubble == [3 * (pp - 1)] * pp
    # Megatron's warm-up, and the forward pass that follows it.
    assert held == [2 * (pp - k - 1) + (vpp - 1) * pp + 1 for k in range(pp)]


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("times", [2, 5])
def test_zero_bubble_schedules_wait_and_hold_as_their_papers_say(pp: int, times: int) -> None:
    m = times * pp
    # Qi et al., arXiv 2401.10241, table 1: ZB-H1 (p - 1)(F + I - W), p in flight; ZB-H2 (here ZB-2p) none, 2 p - 1.
    bubble, held = even("zb-h1", pp, m)
    assert max(bubble) == pytest.approx(pp - 1, abs=1)
    assert max(held) == pp
    bubble, held = even("zb-2p", pp, m)
    assert max(bubble) <= 1
    assert max(held) == 2 * pp - 1
    # Qi et al., arXiv 2405.15362, section 4.3: ZB-V none, p in flight, that is 2 p halves.
    bubble, held = even("zb-v", pp, m, 2)
    assert max(bubble) <= 1
    assert max(held) == pytest.approx(2 * pp, abs=1)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zero_bubble_schedules_wait_less_than_1f1b(pp: int) -> None:
    # In seconds of a whole stage: ZB-V's chunks are halves.
    plain, h1 = max(even("1f1b", pp, 4 * pp)[0]), max(even("zb-h1", pp, 4 * pp)[0])
    assert h1 == pytest.approx(plain / 3, abs=1)
    assert max(even("zb-v", pp, 4 * pp, 2)[0]) / 2 < h1


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_dualpipe_holds_one_micro_batch_more_than_there_are_stages(pp: int) -> None:
    # DeepSeek-V3, arXiv 2412.19437, table 2: p + 1 of both directions; cut in half 2 p + 1 half chunks.
    _, held = even("dualpipe", pp, 4 * pp)
    assert max(held) == pp + 1
    _, held = even("dualpipe-v", pp, 4 * pp, 2)
    assert max(held) == 2 * pp + 1


def test_one_stage_and_one_micro_batch_have_no_bubble_and_no_transfer() -> None:
    plan = replace(plan_from_degrees(TOY, Degrees(dp=2)), micro_batches=1)
    simulation = simulate(TOY, plan)
    assert simulation.bubble_s == (0.0,)
    assert len(simulation.transfers) == 0
    assert [int(kind) for kind in simulation.passes.kind] == [FORWARD, BACKWARD]


def test_a_plan_that_its_schedule_cannot_run_is_simulated_mended_and_stays_illegal() -> None:
    plan = replace(plan_from_degrees(TOY, Degrees(pp=4, vpp=2), schedule="dualpipe-v"), micro_batches=3)
    simulation = simulate(TOY, plan)
    assert simulation.micro_batches == 8
    assert not simulation.evaluation.legal
    assert not chunks_faults("dualpipe-v", 2)
    assert simulation.step_time_s == pytest.approx(simulation.evaluation.step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "vpp", "micro_batches"),
    [("dualpipe", 1, 1), ("dualpipe", 1, 5), ("dualpipe-v", 2, 3), ("interleaved-1f1b", 3, 5)],
)
def test_the_memory_of_a_mended_plan_is_that_of_the_passes_simulated(
    schedule: Schedule, vpp: int, micro_batches: int
) -> None:
    plan = plan_from_degrees(TOY, Degrees(pp=4, vpp=vpp), schedule=schedule)
    simulation = simulate(TOY, replace(plan, micro_batches=micro_batches))
    assert simulation.micro_batches > micro_batches
    assert not simulation.evaluation.legal
    for memory, lines in zip(simulation.memory, simulation.evaluation.stages, strict=True):
        assert memory.peak_bytes == pytest.approx(lines.total, rel=1e-9)


def test_a_plan_of_too_many_passes_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any) -> None:
        raise AssertionError("refused after it was evaluated")

    monkeypatch.setattr("shardwise.solver.simulate.evaluate", late)
    plan = replace(plan_from_degrees(TOY, Degrees(pp=4)), micro_batches=2**20)
    with pytest.raises(sw.InputError, match="passes, at most"):
        simulate(TOY, plan)


def test_the_summary_names_every_stage() -> None:
    simulation = simulate(TOY, plan_from_degrees(TOY, Degrees(pp=4, dp=4)))
    document = simulation.to_dict()
    assert document["step_time_s"] == simulation.step_time_s
    assert [stage["peak_in_flight"] for stage in document["stages"]] == [4, 3, 2, 1]
    assert document["passes"] == 2 * 4 * 16


def test_a_long_step_takes_one_numpy_pass_for_each_level_of_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    # Wall time differs between machines; this is what it grows with. Sixteen stages of 512 micro-batches have 16,384
    # passes on 2 (m + p - 1) levels, and nothing else in it goes pass by pass.
    calls, maximum = 0, np.maximum

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return maximum(*arguments, **named)

    monkeypatch.setattr(np, "maximum", counted)
    shape = Shape("1f1b", 16, 1, 512)
    passes, _ = played(shape, layout("1f1b", 16, 1), np.ones((4, 16)), np.zeros(16), np.zeros(16))
    assert len(passes) == 16 * 512 * 2
    assert calls <= 2 * (512 + 16 - 1) + 1
