"""The power constants: each explained and within its bounds, and bad ones refused with every fault."""

from __future__ import annotations

import copy
import tomllib
from importlib import resources
from typing import Any

import pytest

from shardwise.data.cluster_catalog import load_accelerator
from shardwise.data.efficiency import read_table
from shardwise.data.faults import InputError
from shardwise.data.power import CONSTANTS, SHARES, PowerConstant, load_power, power_from

DOCUMENT = tomllib.loads((resources.files("shardwise.data") / "power.toml").read_text(encoding="utf-8"))


def document(**changes: Any) -> dict[str, Any]:
    """The document of the package with `compute_share__low=0.1` for constants.compute_share.low."""
    changed = copy.deepcopy(DOCUMENT)
    for path, value in changes.items():
        constant, _, key = path.partition("__")
        changed["constants"][constant][key] = value
    return changed


def faults(changed: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(InputError) as error:
        power_from(changed, "mine.toml")
    return error.value.faults


def test_two_constants_are_fitted_and_the_others_say_that_they_are_assumed() -> None:
    power = load_power()
    assert power.names(fitted=True) == ("compute_share", "communication_share")
    assert set(power.names(fitted=True)) | set(power.names(fitted=False)) == set(CONSTANTS)
    for name in power.names(fitted=False):
        assert getattr(power, name).why.startswith("assumed")


def test_every_constant_of_the_file_is_used_and_has_a_band() -> None:
    assert set(DOCUMENT["constants"]) == set(CONSTANTS)
    power = load_power()
    for name in CONSTANTS:
        constant = getattr(power, name)
        assert constant.low < constant.high
        assert constant.low <= constant.value <= constant.high


def test_no_phase_draws_more_than_the_tdp_nor_less_than_a_lighter_one() -> None:
    idle, communication, compute = (getattr(load_power(), name) for name in SHARES)
    assert idle.value < communication.value < compute.value
    assert compute.high <= 1


def test_the_accelerator_that_was_measured_is_in_the_catalogue() -> None:
    assert load_accelerator(load_power().measured_on).tdp_w == 700


def test_measured_rows_carry_source_and_phases_that_add_up() -> None:
    rows = read_table("measured_power.csv")
    assert len(rows) == 11
    for row in rows:
        assert row["source"]
        assert row["accelerator"] == load_power().measured_on
        assert sum(float(row[phase]) for phase in ("compute", "communication", "idle")) == pytest.approx(1, abs=2e-4)


def test_all_faults_of_a_file_are_told_at_once() -> None:
    changed = document(rest_w__value="much", compute_share__high=1.2, idle_share__kind="guessed", wall_per_node__why="")
    changed["constants"]["extra"] = {"value": 1}
    del changed["constants"]["communication_share"], changed["measured_on"]
    told = "\n".join(faults(changed))
    assert "unknown constant extra" in told
    assert "measured_on=None" in told
    assert "[constants.communication_share] is missing" in told
    assert "constants.rest_w.value='much' must be a number" in told
    assert "constants.compute_share.low=0.82, value=0.971, high=1.2 must ascend within the bounds [0.5, 1.0]" in told
    assert "constants.idle_share.kind='guessed' must be fitted or assumed" in told
    assert "constants.wall_per_node.why is missing" in told


@pytest.mark.parametrize("value", [True, None, float("nan"), float("inf"), -1, [1]])
def test_what_is_no_finite_number_in_the_bounds_is_refused(value: object) -> None:
    assert len(faults(document(rest_w__value=value))) == 1


@pytest.mark.parametrize("bounds", [None, [0], [0, "1"], [-1, 1000], 5])
def test_bounds_are_two_numbers(bounds: object) -> None:
    assert any("bounds=" in fault for fault in faults(document(rest_w__bounds=bounds)))


def test_a_phase_that_draws_less_than_a_lighter_one_is_refused() -> None:
    changed = document(
        idle_share__value=0.5,
        idle_share__high=0.5,
        communication_share__value=0.45,
        communication_share__high=0.52,
    )
    (fault,) = faults(changed)
    assert fault == "mine.toml: constants.idle_share.value=0.5 must be at most that of communication_share, 0.45"


@pytest.mark.parametrize("constants", [None, [], 3])
def test_a_file_without_constants_is_refused(constants: object) -> None:
    assert faults({"constants": constants}) == ("mine.toml: the table [constants] is missing",)


def test_a_constant_cannot_be_built_outside_its_band() -> None:
    with pytest.raises(ValueError, match="must be zero or more and ascend"):
        PowerConstant(0.5, 0.6, 0.7, False, "why")
