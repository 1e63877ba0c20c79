"""Models from configs and from the catalogue have the layers and parameters that were published."""

from __future__ import annotations

import contextlib
import csv
import json
from importlib import resources
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.faults import InputError
from shardwise.data.hf_config import MAX_FILE_BYTES, model_from_config, read_hf_config
from shardwise.data.model import Attention, LinearAttention, Mamba, Model, Moe
from shardwise.data.model_catalog import catalog_models, load_model, slug_of

FOLDER = resources.files("shardwise.data")
CONFIGS = sorted(e.name for e in (FOLDER / "hf_configs").iterdir() if e.name.endswith(".json"))
ROWS = list(csv.DictReader((FOLDER / "models.csv").read_text(encoding="utf-8").splitlines()))

# Rows whose own count is off, by how much, as docs/models.md explains.
OFF_BY = {
    "DeepSeek-V3.2": 851_539_712,  # the row leaves out the indexer (61 layers) and the router bias (58 layers x 256)
    "OPT 125M": 2 * 768,  # the row's exact count has 2,048 position rows, the checkpoint 2,050
    "OPT 1.3B": 2 * 2048,
}
# Rows whose published size is a rounded name; the checkpoints have the size computed here.
ROUNDED = {
    "Gemma 4 26B-A4B", "Nemotron Nano v2 12B", "Nemotron 3 Nano 30B-A3B", "Falcon-Mamba 7B", "Zamba2 7B", "Bamba 9B",
}  # fmt: skip


def config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "hf_configs" / name).read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_loads_and_its_layers_add_up(name: str) -> None:
    model = load_model(name.removesuffix(".json"))
    outside = sum(t.params for t in (*model.embedding, *model.head))
    assert model.params == outside + sum(sum(t.params for t in kind.tensors) for kind in model.layers)
    assert 0 < model.active_params <= model.params


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_every_catalogue_row_has_its_published_parameters(row: dict[str, str]) -> None:
    model = load_model(row["name"])
    stated = row["params_exact"] or row["computed_params"]
    if stated:
        assert model.params - int(stated) == OFF_BY.get(row["name"], 0)
    elif row["params_b"]:
        close = abs(model.params / (float(row["params_b"]) * 1e9) - 1) <= 0.02
        assert close != (row["name"] in ROUNDED)


@pytest.mark.parametrize("row", [r for r in ROWS if r["active_params_b"]], ids=lambda row: str(row["name"]))
def test_active_parameters_are_near_the_published_ones(row: dict[str, str]) -> None:
    # Published counts leave the embedding, or embedding and head, out, and are rounded to a billion.
    model = load_model(row["name"])
    ends = sum(t.params for t in (*model.embedding, *model.head))
    published = float(row["active_params_b"]) * 1e9
    assert model.active_params - ends - 0.65e9 <= published <= model.active_params + 0.65e9


def test_deepseek_v3_has_three_dense_layers_then_experts() -> None:
    model = load_model("deepseek-v3")
    assert [isinstance(kind.ffn, Moe) for kind in model.layers] == [False] * 3 + [True] * 58
    assert all(isinstance(kind.mixer, Attention) and kind.mixer.latent for kind in model.layers)
    assert model.mtp_depth == 1
    assert 11.0e9 < model.mtp_params < 12e9


def test_nemotron_h_follows_its_pattern() -> None:
    model = load_model("nemotron-h-56b")
    pattern = config("nvidia--Nemotron-H-56B-Base-8K.json")["hybrid_override_pattern"]
    letters = {"mamba2": "M", "mlp": "-", "gqa": "*"}
    assert "".join(letters[kind.name] for kind in model.layers) == pattern


def test_qwen3_next_has_softmax_attention_in_every_fourth_layer() -> None:
    layers = load_model("qwen3-next-80b-a3b").layers
    assert [isinstance(kind.mixer, LinearAttention) for kind in layers] == [True, True, True, False] * 12


def test_gemma_windows_five_of_six_layers() -> None:
    windows = [k.mixer.window for k in load_model("gemma-3-27b-text").layers if isinstance(k.mixer, Attention)]
    assert windows[:6] == [1024] * 5 + [None]


def test_equal_layers_are_one_kind() -> None:
    model = load_model("llama-3.1-405b")
    assert len(model.kinds) == 1
    assert model.kind_indices == (0,) * 126


def test_jamba_counts_mamba_and_experts() -> None:
    layers = load_model("jamba-1.5-mini").layers
    assert sum(isinstance(kind.mixer, Mamba) for kind in layers) == 28
    assert sum(isinstance(kind.ffn, Moe) for kind in layers) == 16


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-70b",
        "Llama-3.1 70B",
        "meta-llama/Meta-Llama-3.1-70B",
        "meta-llama--Meta-Llama-3.1-70B",
        "LLAMA_3.1_70b",
    ],
)
def test_a_model_goes_by_many_names(name: str) -> None:
    assert load_model(name).params == 70_553_706_496


def test_all_catalogue_slugs_load() -> None:
    assert len(catalog_models()) == 119
    assert len({entry.slug for entry in catalog_models()}) == 119
    assert all(slug_of(entry.name) == entry.slug for entry in catalog_models())


def test_unknown_model_says_what_is_close() -> None:
    with pytest.raises(InputError, match=r"llama-3.1-70b"):
        load_model("llama-3.1-71b")


def test_unknown_type_says_which_fields_are_needed() -> None:
    with pytest.raises(InputError, match="hidden_size, num_hidden_layers"):
        model_from_config({"model_type": "nothing-like-it"}, "x")


def test_assumptions_are_listed() -> None:
    raw = config("meta-llama--Meta-Llama-3.1-8B.json")
    model = model_from_config(raw, "x")
    assert "head_dim=128 (hidden_size / num_attention_heads; not in the config)" in model.assumed
    assert any("off the shapes" in line for line in load_model("llama-3.2-1b").assumed)


def test_every_fault_is_reported_with_field_value_and_rule() -> None:
    raw = config("meta-llama--Meta-Llama-3.1-8B.json") | {
        "hidden_size": -1,
        "num_hidden_layers": 10**9,
        "vocab_size": "many",
        "num_attention_heads": 0,
    }
    with pytest.raises(InputError) as error:
        model_from_config(raw, "x")
    text = "\n".join(error.value.faults)
    for field, value in (
        ("hidden_size", "-1"),
        ("num_hidden_layers", "1000000000"),
        ("vocab_size", "'many'"),
        ("num_attention_heads", "0"),
    ):
        assert f"{field}={value} must be a whole number from 1 to" in text


def test_heads_that_do_not_divide_are_refused() -> None:
    raw = config("meta-llama--Meta-Llama-3.1-8B.json") | {"hidden_size": 4097}
    with pytest.raises(InputError, match="hidden_size=4097 is not a multiple of num_attention_heads=32"):
        model_from_config(raw, "x")


@pytest.mark.parametrize("content", ["{", "[]", "3", '"x"', "\x00", "{" * 100_000])
def test_broken_files_are_input_errors(content: str, tmp_path: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(InputError, match=r"config|JSON"):
        read_hf_config(file)


def test_missing_and_oversized_files_are_input_errors(tmp_path: Any) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_model(str(tmp_path / "config.json"))
    big = tmp_path / "config.json"
    big.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(InputError, match="larger than"):
        read_hf_config(big)


values = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**12), st.floats(allow_nan=True), st.text(max_size=5),
    st.lists(st.integers(-1, 3), max_size=4), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_mutated_config_is_a_model_or_an_input_error(data: st.DataObject) -> None:
    raw = config(data.draw(st.sampled_from(CONFIGS)))
    target = raw.get("text_config", raw)
    for name in data.draw(st.lists(st.sampled_from(sorted(target)), max_size=4, unique=True)):
        if data.draw(st.booleans()):
            target.pop(name)
        else:
            target[name] = data.draw(values)
    model: Model | None = None
    with contextlib.suppress(InputError):
        model = model_from_config(raw, "x")
    assert model is None or model.params > 0
