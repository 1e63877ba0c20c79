"""The catalogue answers any name: with a model, or with an `InputError` that says what is close."""

from __future__ import annotations

import pytest

from shardwise.data.faults import InputError
from shardwise.data.model_catalog import load_model


@pytest.mark.parametrize("name", ["", ".", "/", "\0", "\0.json", "a" * 5000, "x\ud800", "../hf_configs"])
def test_a_name_of_nothing_is_an_input_error(name: str) -> None:
    with pytest.raises(InputError) as error:
        load_model(name)
    assert len(str(error.value)) < 1000


def test_close_names_include_shipped_configs_without_a_row() -> None:
    with pytest.raises(InputError, match="llama-3-3-nemotron-super-49b-v1"):
        load_model("Nemotron-Super-49B")
