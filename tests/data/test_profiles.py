"""Profiles: few constants, all within their bounds, each with a reason; files that are off are told so at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardwise.data.faults import InputError
from shardwise.data.profile import BASE, CONSTANTS, SHARES, list_profiles, load_profile, profile_document, profile_from
from shardwise.solver.validate import fitted_count

if TYPE_CHECKING:
    from pathlib import Path

MOST_FITTED = 15


@pytest.mark.parametrize("name", [BASE, *list_profiles()])
def test_every_constant_is_within_its_bounds_and_says_why(name: str) -> None:
    profile = load_profile(name)
    constants = profile_document(name)["constants"]
    assert set(constants) == set(CONSTANTS)
    for key, entry in constants.items():
        assert entry["bounds"][0] <= getattr(profile, key) <= entry["bounds"][1]
        assert len(entry["why"]) > 10
    assert len(profile_document(name)["description"]) > 20


@pytest.mark.parametrize("name", list_profiles())
def test_no_profile_has_more_than_fifteen_fitted_constants(name: str) -> None:
    assert fitted_count(name) <= MOST_FITTED


def test_a_constant_that_a_profile_does_not_state_is_the_shared_one() -> None:
    document = profile_document("megatron-core")
    shared = load_profile(BASE)
    taken = [key for key, entry in document["constants"].items() if entry.get("from") == BASE]
    assert taken
    assert all(getattr(load_profile("megatron-core"), key) == getattr(shared, key) for key in taken)


def test_every_fault_of_a_profile_file_is_told() -> None:
    document = profile_document("megatron-core")
    broken = {key: dict(entry) for key, entry in document["constants"].items()}
    broken["gemm"]["value"] = 99.0
    broken["core"] = {"value": "fast", "bounds": [0, 1]}
    broken["logit_bytes"].pop("bounds")
    broken["flux"] = {"value": 1, "bounds": [0, 1]}
    with pytest.raises(InputError) as caught:
        profile_from(document | {"constants": broken}, "mine")
    text = "; ".join(caught.value.faults)
    for words in (
        "gemm.value=99.0 is outside",
        "core.value='fast'",
        "logit_bytes.bounds=None",
        "unknown constant flux",
    ):
        assert words in text


def test_a_profile_file_starts_from_the_shared_constants(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[constants.gemm]\nvalue = 1.2\nbounds = [0.8, 1.6]\nwhy = "mine"\n')
    profile = load_profile(str(path))
    assert (profile.name, profile.gemm) == ("mine", 1.2)
    assert profile.straggler == load_profile(BASE).straggler


@pytest.mark.parametrize("name", SHARES)
def test_a_share_above_one_is_refused(name: str) -> None:
    document = profile_document("megatron-core")
    document["constants"][name] = {"value": 1.0, "bounds": [0.0, 2.0]}
    assert getattr(profile_from(document, "mine"), name) == 1.0
    document["constants"][name] = {"value": 1.5, "bounds": [0.0, 2.0]}
    with pytest.raises(InputError, match=rf"constants\.{name}\.value=1\.5 is a share, at most 1"):
        profile_from(document, "mine")
