"""The catalogue of models: rows of `models.csv`, each with its source, and the `config.json` files in `hf_configs/`.

A row without a config file is turned into the fields of one and read by the same families. What a row leaves out is
filled with the defaults below, each listed as assumed.
"""

from __future__ import annotations

import csv
import difflib
import json
import os.path
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.data.faults import InputError
from shardwise.data.hf_config import model_from_config, read_hf_config

if TYPE_CHECKING:
    from shardwise.data.model import Model

LONGEST_NAME = 200
"""Longer names are cut in errors."""

SIZE_TOLERANCE = 0.05
"""A stated size further off than this from the shapes is reported: shapes are trusted, stated sizes are not."""

RENAMED = {
    "num_experts": "num_local_experts",
    "experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "ssm_conv_kernel": "conv_kernel",
    "ssm_num_heads": "mamba_num_heads",
    "ssm_head_dim": "mamba_head_dim",
    "ssm_groups": "n_groups",
}
"""Columns of `models.csv` whose field in a `config.json` has another name."""

FILLED: dict[str, dict[str, Any]] = {
    "nemotron": {"vocab_size": 256000},
    "nemotron_h": {"vocab_size": 131072},
    "jamba": {"mlp_gated": True},
    "zamba2": {
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "ssm_state_size": 64,
        "mamba_head_dim": 64,
        "hybrid_layer_pattern": "".join("h" if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "M" for i in range(54)),
    },
    "gpt2-like": {"vocab_size": 51200, "num_key_value_heads": None},
}
"""What rows of a family lack: Nemotron-4 and Nemotron-H tokenizers, Zamba2 defaults (transformers 5.24.0), and for the
rows of no family GPT shapes with the padded GPT-2 vocabulary."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One row, without building the model."""

    name: str
    slug: str
    family: str
    stated_params: float | None
    source: str
    note: str


def slug_of(name: str) -> str:
    """A name as it is typed: lower case, dashes for everything that is not a letter, digit or dot."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _plain(name: str) -> str:
    """For comparing names: letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


@lru_cache(maxsize=1)
def _rows() -> tuple[dict[str, str], ...]:
    text = (resources.files("shardwise.data") / "models.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def _stated(row: dict[str, str]) -> float | None:
    if row["params_exact"]:
        return float(row["params_exact"])
    return float(row["params_b"]) * 1e9 if row["params_b"] else None


def catalog_models() -> tuple[CatalogEntry, ...]:
    """All catalogue models, in the order of the file."""
    return tuple(
        CatalogEntry(row["name"], slug_of(row["name"]), row["family"], _stated(row), row["source"], row["note"])
        for row in _rows()
    )


@lru_cache(maxsize=1)
def _names() -> dict[str, dict[str, str]]:
    """Rows by every name they go by, in plain letters: the row's name, and that of its config file."""
    found: dict[str, dict[str, str]] = {}
    for row in _rows():
        short = re.sub(r"\s*\(.*\)$", "", row["name"])
        config = Path(row["hf_config_file"]).stem
        for name in (row["name"], short, config, config.split("--")[-1]):
            if name:
                found.setdefault(_plain(name), row)
    return found


@lru_cache(maxsize=1)
def _configs() -> dict[str, str]:
    """Config files by their names in plain letters, with and without the owner."""
    folder = resources.files("shardwise.data") / "hf_configs"
    stems = sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))
    return {_plain(name): stem for stem in stems for name in (stem.split("--")[-1], stem)}


def load_model(name: str) -> Model:
    """A model by catalogue name, Hugging Face name, or path of a `config.json` or of a folder that holds one.

    The result is a list of layers with the shape of every tensor. `params` counts them, `source` says where the row or file
    is from, `assumed` lists what was left unsaid and what was taken instead (`docs/models.md`).

    Raises
    ------
    InputError
        When there is no such model, with close names, or when its file is at fault.
    """
    path = Path(name)
    if name.endswith(".json") or os.path.isfile(path / "config.json"):
        return read_hf_config(path)
    plain = _plain(name)
    row = _names().get(plain)
    if row is not None:
        return _model_of(row["name"])
    if plain in _configs():
        return _shipped(_configs()[plain])
    if os.path.isdir(path):
        raise InputError(f"model {name!r}: the folder holds no config.json")
    names = {entry.slug: None for entry in catalog_models()}
    names |= {slug_of(stem.split("--")[-1]): None for stem in _configs().values()}
    name = name[:LONGEST_NAME]
    close = difflib.get_close_matches(slug_of(name), names, n=4, cutoff=0.4)
    hint = f". Did you mean {', '.join(close)}?" if close else "."
    raise InputError(
        f"model {name!r} is neither a file nor in the catalogue{hint} `shardwise catalog models` lists all"
    )


@lru_cache(maxsize=64)
def _shipped(stem: str) -> Model:
    text = (resources.files("shardwise.data") / "hf_configs" / f"{stem}.json").read_text(encoding="utf-8")
    return model_from_config(json.loads(text), stem, source=f"{stem}.json")


@lru_cache(maxsize=64)
def _model_of(name: str) -> Model:
    row = next(row for row in _rows() if row["name"] == name)
    if row["hf_config_file"]:
        model = _shipped(Path(row["hf_config_file"]).stem)
    else:
        config, assumed = _config_of(row)
        model = model_from_config(config, name)
        model = replace(model, assumed=(*assumed, *model.assumed))
    stated = _stated(row)
    if stated and abs(model.params - stated) > SIZE_TOLERANCE * stated:
        off = f"stated size {stated / 1e9:g}B is {100 * (stated / model.params - 1):+.1f} % off the shapes"
        model = replace(model, assumed=(*model.assumed, f"{off} ({model.params / 1e9:.2f}B)"))
    return replace(model, name=slug_of(name), source=row["source"])


def _config_of(row: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a `config.json` for a row, and what was filled in."""
    config: dict[str, Any] = {}
    for column, text in row.items():
        if text and column not in ("name", "family", "note", "source"):
            config[RENAMED.get(column, column)] = _value(text)
    config["model_type"] = row["model_type"] or "gpt2-like"
    if isinstance(config.get("moe_layer_freq"), str):
        del config["moe_layer_freq"]
    if "sliding_window" in config and "attn_pattern" not in config:
        del config["sliding_window"]
    assumed = [] if row["model_type"] else ["GPT shapes with biases and learned positions (the row has no model_type)"]
    for field, value in FILLED.get(config["model_type"], {}).items():
        if field not in config and value is not None:
            config[field] = value
            assumed.append(f"{field}={value} (the family's; not in the catalogue row)")
    return config, assumed


def _value(text: str) -> Any:
    """A cell as the number, truth value or text that it holds."""
    if text in ("True", "False"):
        return text == "True"
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number
