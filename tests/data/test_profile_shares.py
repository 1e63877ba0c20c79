"""Constants that bounds on the step take to be shares of a whole."""

from __future__ import annotations

import pytest

from shardwise.data.faults import InputError
from shardwise.data.profile import SHARES, profile_document, profile_from


@pytest.mark.parametrize("name", SHARES)
def test_a_share_above_one_is_refused(name: str) -> None:
    document = profile_document("megatron-core")
    document["constants"][name] = {"value": 1.0, "bounds": [0.0, 2.0]}
    assert getattr(profile_from(document, "mine"), name) == 1.0
    document["constants"][name] = {"value": 1.5, "bounds": [0.0, 2.0]}
    with pytest.raises(InputError, match=rf"constants\.{name}\.value=1\.5 is a share, at most 1"):
        profile_from(document, "mine")
