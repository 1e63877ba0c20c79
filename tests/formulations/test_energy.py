"""Energy of a step: by hand, by its limits, and against the measured nodes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.cluster_catalog import list_accelerators, load_accelerator
from shardwise.data.efficiency import read_table
from shardwise.data.faults import InputError
from shardwise.data.power import Power, PowerConstant, load_power
from shardwise.formulations.energy import Band, Energy, device_watts, step_energy, wall_watts, why_no_energy

if TYPE_CHECKING:
    from shardwise.data.cluster import Accelerator

H100 = load_accelerator("h100")


def constant(value: float, low: float, high: float) -> PowerConstant:
    return PowerConstant(value, low, high, False, "hand-worked")


ROUND = Power(
    measured_on="H100-SXM",
    compute_share=constant(0.9, 0.8, 1.0),
    communication_share=constant(0.5, 0.4, 0.6),
    idle_share=constant(0.2, 0.1, 0.3),
    rest_w=constant(200, 100, 300),
    wall_per_node=constant(1.1, 1.0, 1.2),
)


def energy(
    accelerator: Accelerator,
    compute_s: float,
    communication_s: float,
    idle_s: float,
    devices: int = 8,
    power: Power | None = None,
) -> Energy:
    found = step_energy(accelerator, devices, compute_s, communication_s, idle_s, 1000, power)
    assert found is not None
    return found


def with_tdp() -> list[Accelerator]:
    """Every complete accelerator of the catalogue that has a TDP."""
    return [accelerator for accelerator in complete() if accelerator.tdp_w is not None]


def complete() -> list[Accelerator]:
    found = []
    for name in list_accelerators():
        try:
            found.append(load_accelerator(name))
        except InputError:
            continue  # a number that a plan needs is unknown
    return found


def test_a_step_by_hand() -> None:
    # 6 s compute, 3 s communication, 1 s idle of 700 W: 6 x 630 + 3 x 350 + 1 x 140 = 4970 J per device.
    found = energy(H100, 6, 3, 1, power=ROUND)
    assert found.device_joules_per_step.value == pytest.approx(8 * 4970)
    assert found.device_watts.value == pytest.approx(497)
    # At the wall 1.1 x (4970 J + 10 s x 200 W) = 7667 J per slot.
    assert found.joules_per_step.value == pytest.approx(8 * 7667)
    assert found.joules_per_token.value == pytest.approx(8 * 7.667)
    assert found.watts_per_device.value == pytest.approx(766.7)


def test_the_band_by_hand() -> None:
    # Low: 6 x 560 + 3 x 280 + 70 = 4270 J, and 1.0 x (4270 + 1000). High: 6 x 700 + 3 x 420 + 210, and 1.2 x (5670 + 3000).
    found = energy(H100, 6, 3, 1, power=ROUND)
    assert (found.device_watts.low, found.device_watts.high) == pytest.approx((427, 567))
    assert (found.watts_per_device.low, found.watts_per_device.high) == pytest.approx((527, 1040.4))


def test_energy_is_linear_in_the_phases() -> None:
    watts = wall_watts(H100, ROUND)
    assert watts is not None
    assert watts.compute.value == pytest.approx(1.1 * 830)
    assert watts.joules(6, 3, 1).value == pytest.approx(7667)


def test_a_known_idle_power_is_the_least_that_a_device_draws() -> None:
    warm = replace(H100, idle_w=200.0)
    watts = device_watts(warm, ROUND)
    assert watts is not None
    assert watts.idle == Band(200, 200, 210)
    assert watts.communication == Band(350, 280, 420)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0.001, 100), st.floats(0.001, 100), st.sampled_from(with_tdp()))
def test_more_waiting_takes_more_joules_at_fewer_watts(
    compute_s: float, communication_s: float, idle_s: float, more_s: float, accelerator: Accelerator
) -> None:
    short = energy(accelerator, compute_s, communication_s, idle_s)
    longer = energy(accelerator, compute_s, communication_s, idle_s + more_s)
    assert longer.joules_per_step.value > short.joules_per_step.value
    assert longer.watts_per_device.value <= short.watts_per_device.value * (1 + 1e-12)


@given(st.floats(0.001, 100), st.floats(0, 1), st.sampled_from(with_tdp()))
def test_hidden_communication_costs_less_than_exposed_but_draws_more(
    compute_s: float, share: float, accelerator: Accelerator
) -> None:
    hidden = energy(accelerator, compute_s, 0, 0)
    exposed = energy(accelerator, compute_s, share * compute_s, 0)
    assert exposed.joules_per_step.value >= hidden.joules_per_step.value
    assert exposed.watts_per_device.value <= hidden.watts_per_device.value * (1 + 1e-12)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0.001, 100), st.sampled_from(with_tdp()))
def test_watts_stay_between_idling_and_the_power_limit(
    compute_s: float, communication_s: float, idle_s: float, accelerator: Accelerator
) -> None:
    found = energy(accelerator, compute_s, communication_s, idle_s)
    assert accelerator.tdp_w is not None
    slack = 1 + 1e-9
    assert found.device_watts.high <= accelerator.tdp_w * slack
    assert found.device_watts.value * slack >= max(
        load_power().idle_share.value * accelerator.tdp_w, accelerator.idle_w or 0
    )
    assert found.watts_per_device.value > found.device_watts.value
    for band in (found.joules_per_step, found.joules_per_token, found.watts_per_device, found.device_watts):
        assert band.low <= band.value <= band.high


def test_every_accelerator_of_the_catalogue_has_energy_or_a_reason() -> None:
    assert len(with_tdp()) >= 25
    for accelerator in complete():
        found = step_energy(accelerator, 1, 1.0, 0.5, 0.1, 4096)
        reason = why_no_energy(accelerator)
        if accelerator.tdp_w is None:
            assert found is None
            assert reason is not None
            assert f"accelerator {accelerator.name} has no tdp_W" in reason
        else:
            assert found is not None
            assert reason is None
            assert bool(found.notes) is (accelerator.name != "H100-SXM")


def test_an_accelerator_without_tdp_has_no_energy() -> None:
    unknown = replace(H100, name="new", tdp_w=None)
    assert step_energy(unknown, 8, 1, 0, 0, 1000) is None
    assert device_watts(unknown) is None
    assert wall_watts(unknown) is None


def test_what_is_fitted_and_what_is_assumed_is_said() -> None:
    found = energy(H100, 1, 0, 0)
    assert found.fitted == ("compute_share", "communication_share")
    assert found.assumed == ("idle_share", "rest_w", "wall_per_node")


def test_the_measured_nodes_are_met_within_three_percent_and_by_the_band() -> None:
    for row in read_table("measured_power.csv"):
        compute, communication, idle = (float(row[name]) for name in ("compute", "communication", "idle"))
        found = energy(
            load_accelerator(row["accelerator"]), compute, communication, idle, int(row["devices"])
        ).watts_per_device
        measured = float(row["watts"])
        assert abs(found.value / measured - 1) < 0.03, row["id"]
        assert found.low < measured < found.high


def test_an_air_cooled_node_under_full_load_is_in_the_band() -> None:
    # Latif et al., IEEE Access 13 (2025): at most 8.4 kW with the GPUs of an 8-way H100 node near full use.
    full = energy(H100, 1, 0, 0).watts_per_device
    assert full.low < 8400 / 8 < full.high


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 1.0, 0.0, 0.0, 1), ["devices=0"]),
        ((1, -1.0, math.nan, math.inf, 0), ["compute_s=-1.0", "communication_s=nan", "idle_s=inf", "tokens=0"]),
        ((1, 0.0, 0.0, 0.0, 1), ["must be positive"]),
    ],
)
def test_bad_steps_are_refused_with_every_fault(
    arguments: tuple[int, float, float, float, int], named: list[str]
) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is checked below, fault by fault)
        step_energy(H100, *arguments)
    assert all(fault in str(error.value) for fault in named)


def test_a_band_ascends() -> None:
    with pytest.raises(ValueError, match="must ascend"):
        Band(1, 2, 3)
