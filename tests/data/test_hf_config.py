"""Faults that one field hides from another, and names that are no path, are told as input errors."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from shardwise.data.faults import InputError
from shardwise.data.hf_config import model_from_config, read_hf_config
from shardwise.data.model_catalog import load_model


def test_faults_in_late_fields_are_reported_with_the_early_ones() -> None:
    file = resources.files("shardwise.data") / "hf_configs" / "deepseek-ai--DeepSeek-V3.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw |= {"hidden_size": -1, "tie_word_embeddings": "yes", "num_nextn_predict_layers": -1}
    with pytest.raises(InputError) as error:
        model_from_config(raw, "x")
    assert [fault.split("=")[0] for fault in error.value.faults] == [
        "model x: tie_word_embeddings",
        "model x: num_nextn_predict_layers",
        "model x: hidden_size",
    ]


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 300 + ".json"])
def test_a_name_too_long_for_a_path_is_an_input_error(name: str) -> None:
    with pytest.raises(InputError, match=r"neither a file|cannot be read"):
        load_model(name)
    with pytest.raises(InputError, match="cannot be read"):
        read_hf_config(Path(name))
