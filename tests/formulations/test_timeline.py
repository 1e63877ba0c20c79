"""The timeline: periods that are left out, longest paths, and paths as bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.pipeline import SCHEDULES, layout
from shardwise.formulations.timeline import (
    Numbers,
    Shape,
    graph,
    longest_paths,
    mixed_paths,
    pass_ends,
    stage_spans,
)


@st.composite
def shapes(draw: st.DrawFn, schedule: str) -> Shape:
    """Few stages, and micro-batches on both sides of where periods are left out."""
    pp = draw(st.sampled_from((2, 4) if schedule == "dualpipe" else (1, 2, 3, 4)))
    vpp = {"interleaved-1f1b": draw(st.integers(2, 3)), "zb-v": 2, "dualpipe-v": 2}.get(schedule, 1)
    pp = max(pp, 2) if vpp > 1 else pp
    micro_batches = draw(st.integers(1, 90))
    if schedule == "interleaved-1f1b":
        micro_batches = pp * draw(st.integers(1, 20))
    elif schedule in ("dualpipe", "dualpipe-v"):
        micro_batches = 2 * (pp + draw(st.integers(0, 40)))
    return Shape(schedule, pp, vpp, micro_batches)


def numbers(shape: Shape, seed: int, most: int) -> tuple[Numbers, Numbers, Numbers]:
    draw = np.random.default_rng(seed)
    slots = len(layout(shape.schedule, shape.pp, shape.vpp).stage)
    return (
        draw.integers(0, most + 1, size=(4, slots, 2)),
        draw.integers(0, 3, size=(shape.pp, 2)),
        draw.integers(0, 5, size=(shape.pp, 2)),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), most=st.sampled_from((1, 4, 1000)))
def test_leaving_out_periods_changes_nothing(schedule: str, data: st.DataObject, seed: int, most: int) -> None:
    """(E3) against the whole graph, to the unit."""
    shape = data.draw(shapes(schedule))
    durations, lags, _ = numbers(shape, seed, most)
    whole, spans = graph(shape), stage_spans(shape, durations, lags)
    ends = pass_ends(whole, durations, lags)
    first = durations.reshape(-1, 2)[whole.duration[whole.first]]
    assert np.array_equal(spans.end, ends[whole.last])
    assert np.array_equal(spans.start, ends[whole.first] - first)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_a_longest_path_is_the_step_and_bounds_every_other(schedule: str, data: st.DataObject, seed: int) -> None:
    """(E2) the path of some durations has their step's length, and no more than the step's under any others."""
    shape = data.draw(shapes(schedule))
    durations, lags, tails = numbers(shape, seed, 9)
    paths = longest_paths(shape, durations, lags, tails)

    def lengths(durations: Numbers, lags: Numbers, tails: Numbers) -> Numbers:
        held = (paths.passes * durations).sum(axis=(0, 1)) + (paths.hops * lags).sum(axis=0)
        return np.asarray(held + tails[paths.stage, np.arange(2)])

    assert np.array_equal(lengths(durations, lags, tails), stage_spans(shape, durations, lags).step(shape, tails))
    others = numbers(shape, seed + 1, 50)
    assert (lengths(*others) <= stage_spans(shape, *others[:2]).step(shape, others[2])).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_a_mean_of_paths_bounds_every_step_and_is_the_longest_without_spread(
    schedule: str, data: st.DataObject, seed: int
) -> None:
    """(E4) under the durations that it was mixed for and under any others."""
    shape = data.draw(shapes(schedule))
    own, others = (tuple(part.astype(float) for part in numbers(shape, seed + more, 9 + 41 * more)) for more in (0, 1))
    durations, lags, tails = (part[..., 0] for part in own)
    paths = mixed_paths(shape, durations, lags, tails, np.array([1e-6, 0.5, 30.0]))
    assert paths.stages.sum(axis=0) == pytest.approx(1)
    for durations, lags, tails in (own, others):
        held = np.tensordot(durations, paths.passes, ((0, 1), (0, 1))) + lags.T @ paths.hops
        lengths = held + tails.T @ paths.stages
        steps = stage_spans(shape, durations, lags).step(shape, tails)
        assert (lengths <= steps[:, None] * (1 + 1e-12)).all()
        if durations is own[0]:
            assert lengths[0, 0] == pytest.approx(steps[0])
