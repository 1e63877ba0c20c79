"""Time to train: by hand, at its limits, and the checkpoint interval against a numeric minimum."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from shardwise.formulations.energy import Band
from shardwise.formulations.training_run import (
    Failures,
    daly_interval_s,
    energy_mwh,
    expected_time_s,
    run_time,
    young_interval_s,
)

MTBF_S = st.floats(1e2, 1e7)
SHARES = st.floats(1e-5, 4.0)
"""Of the checkpoint in the mean time between failures."""


def test_a_run_without_failures_is_its_steps() -> None:
    run = run_time(1001, 10, 3600.0, nodes=4, straggler_margin=0.5, failures=None)
    assert run.steps == 101
    assert run.wall_time_s == run.work_time_s == 101 * 5400
    assert run.days == pytest.approx(101 * 1.5 / 24)
    assert run.device_hours(8) == pytest.approx(101 * 1.5 * 8)
    assert run.checkpointing is None


def test_goodput_by_hand() -> None:
    """M = 10,000 s; Young's interval is sqrt(2 x 50 x 10,000) = 1000 s, Daly's 1000 (1 + 0.05 / 3 + 0.0025 / 9) - 50."""
    run = run_time(10**6, 10, 1.0, nodes=8, straggler_margin=0.0, failures=Failures(80_000, 50, 100))
    checkpointing = run.checkpointing
    assert checkpointing is not None
    assert checkpointing.mtbf_s == 10_000
    assert checkpointing.young_interval_s == pytest.approx(1000)
    assert checkpointing.daly_interval_s == pytest.approx(966.944, abs=1e-3)
    assert checkpointing.interval_steps == checkpointing.interval_s == 967
    wall_s = 10_000 * math.exp(0.01) * (math.exp(0.1017) - 1) * 100_000 / 967
    assert run.wall_time_s == pytest.approx(wall_s)
    assert checkpointing.goodput == pytest.approx(100_000 / wall_s)
    assert checkpointing.expected_failures == pytest.approx(wall_s / 10_000)


@given(mtbf_s=MTBF_S, share=SHARES, restart=st.floats(0, 1))
def test_the_interval_of_daly_is_near_the_numeric_minimum(mtbf_s: float, share: float, restart: float) -> None:
    def time_s(interval_s: float) -> float:
        return expected_time_s(1e6, interval_s, share * mtbf_s, restart * mtbf_s, mtbf_s)

    best = minimize_scalar(
        lambda log_s: math.log(time_s(math.exp(log_s))), bounds=(math.log(mtbf_s) - 12, math.log(mtbf_s) + 1)
    )
    daly_s = daly_interval_s(share * mtbf_s, mtbf_s)
    assert daly_s == pytest.approx(math.exp(best.x), rel=0.08)
    assert time_s(daly_s) <= time_s(math.exp(best.x)) * 1.002


@given(mtbf_s=MTBF_S, share=SHARES)
def test_daly_is_never_worse_than_young(mtbf_s: float, share: float) -> None:
    checkpoint_s = share * mtbf_s
    daly_s, young_s = daly_interval_s(checkpoint_s, mtbf_s), young_interval_s(checkpoint_s, mtbf_s)
    of_daly, of_young = (expected_time_s(1.0, tau, checkpoint_s, 0.0, mtbf_s) for tau in (daly_s, young_s))
    assert of_daly <= of_young * (1 + 1e-9)


@given(
    steps=st.integers(1, 10**6),
    step_s=st.floats(1e-2, 1e3),
    nodes=st.integers(1, 10**4),
    node_mtbf_s=st.floats(1e5, 1e9),
    checkpoint_s=st.floats(1, 1e3),
    restart_s=st.floats(0, 1e3),
)
def test_failures_only_cost_time(
    steps: int, step_s: float, nodes: int, node_mtbf_s: float, checkpoint_s: float, restart_s: float
) -> None:
    run = run_time(steps, 1, step_s, nodes, 0.0, Failures(node_mtbf_s, checkpoint_s, restart_s))
    assert run.checkpointing is not None
    assert 0 <= run.checkpointing.goodput < 1
    assert run.wall_time_s > run.work_time_s
    assert 1 <= run.checkpointing.interval_steps <= steps
    more = run_time(steps, 1, step_s, nodes + 1, 0.0, Failures(node_mtbf_s, checkpoint_s, restart_s))
    assert more.checkpointing is not None
    assert more.checkpointing.mtbf_s < run.checkpointing.mtbf_s


def test_a_run_that_fails_faster_than_it_works_does_not_end() -> None:
    run = run_time(10**6, 10, 10.0, nodes=1000, straggler_margin=0.0, failures=Failures(1.0, 60.0, 60.0))
    assert run.checkpointing is not None
    assert not run.ends
    assert run.checkpointing.goodput == 0


def test_energy_keeps_its_band_over_the_wall_time() -> None:
    energy = energy_mwh(Band(3.6e6, 1.8e6, 7.2e6), step_time_s=2.0, wall_time_s=4000.0)
    assert (energy.value, energy.low, energy.high) == pytest.approx((2.0, 1.0, 4.0))


def test_every_fault_is_named() -> None:
    with pytest.raises(ValueError, match=r"node_mtbf_s=0 .*checkpoint_s=inf .*restart_s=-1"):
        Failures(0, math.inf, -1)
    with pytest.raises(ValueError, match=r"tokens=0 .*nodes=0 .*step_time_s=0 .*straggler_margin=-1"):
        run_time(0, 1, 0, 0, -1, None)
