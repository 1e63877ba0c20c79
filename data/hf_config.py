"""Read a Hugging Face `config.json` as a `Model`."""

from __future__ import annotations

import json
import os.path
from typing import TYPE_CHECKING, Any

from shardwise.data.config_fields import Fields, shown
from shardwise.data.faults import InputError, unreadable
from shardwise.data.model import Model, Tensor
from shardwise.data.model_families import DEFAULTS, FAMILIES
from shardwise.data.model_parts import linear, norm

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.data.family_build import Build

MAX_FILE_BYTES = 10_000_000
NEEDED = "hidden_size, num_hidden_layers, num_attention_heads, intermediate_size and vocab_size"


def read_hf_config(path: Path) -> Model:
    """The model of a `config.json`, or of a folder that holds one.

    Raises
    ------
    InputError
        When the file cannot be read, is not JSON, or has fields that are missing or break a rule; all are named.
    """
    # os.path.isdir, unlike Path.is_dir, is false for a name that is too long to be a path.
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"model {file}: the file is larger than {MAX_FILE_BYTES} bytes")
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"model {file}: cannot be read: {unreadable(error)}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"model {file}: not JSON: {error}") from None
    name = file.parent.name if file.name == "config.json" else file.stem
    return model_from_config(raw, name or file.stem, source=file.name)


def model_from_config(raw: Any, name: str, *, source: str = "") -> Model:
    """The model of the content of a `config.json`; raises `InputError` as `read_hf_config` does."""
    if not isinstance(raw, dict):
        raise InputError(f"model {name}: the config must be a JSON object, not {type(raw).__name__}")
    outer, assumed = dict(raw), []
    config = outer
    if isinstance(raw.get("text_config"), dict):
        config = dict(raw["text_config"])
        config.setdefault("tie_word_embeddings", raw.get("tie_word_embeddings"))
        assumed.append("only the language model of text_config; vision and audio towers are left out")
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        said = "model_type is missing" if kind is None else f"model_type={shown(kind)} is unknown"
        raise InputError(
            f"model {name}: {said}. Known are {', '.join(sorted(FAMILIES))}. A family "
            f"like Llama needs {NEEDED}; set model_type to the family it is built like"
        )
    fields = Fields(config, f"model {name}: ")
    fields.assumed = assumed
    for field, value in DEFAULTS.get(str(kind), {}).items():
        if not fields.has(field):
            config[field] = value
            assumed.append(f"{field}={value} (the family's default; not in the config)")
    vocab = fields.integer("vocab_size")
    positions = fields.optional("max_position_embeddings", "n_positions")
    # Families stop at the first group of faults; these two are read late, so they are checked here too.
    fields.flag("tie_word_embeddings", default=False)
    fields.integer("num_nextn_predict_layers", "num_mtp_modules", default=0, least=0, most=64)
    try:
        build = family(fields)
        fields.check()
        return _model(name, str(kind), vocab, positions, build, source, tuple(assumed))
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise InputError([*dict.fromkeys(fields.faults), f"model {name}: {error}"]) from None


def _model(
    name: str, family: str, vocab: int, positions: int | None, build: Build, source: str, assumed: tuple[str, ...]
) -> Model:
    """Add embedding, head and multi-token-prediction modules."""
    hidden = build.hidden
    embedding: tuple[Tensor, ...] = (Tensor("embed_tokens.weight", (vocab, hidden), "vocab"),)
    if build.positions:
        embedding += (Tensor("position_embeddings.weight", (build.positions, hidden)),)
    if build.embedding_norm:
        embedding += norm("embed_norm", hidden, build.norm)
    head = norm("final_norm", hidden, build.norm)
    if not build.tied:
        head += linear("lm_head", vocab, hidden, "vocab")
    return Model(
        name=name,
        family=family,
        hidden=hidden,
        vocab=vocab,
        tied=build.tied,
        layers=build.layers,
        embedding=embedding + build.extra,
        head=head,
        mtp=_mtp(build) * build.mtp_depth,
        mtp_depth=build.mtp_depth,
        max_positions=positions,
        norm=build.norm,
        source=source,
        assumed=assumed,
    )


def _mtp(build: Build) -> tuple[Tensor, ...]:
    """One multi-token-prediction module: two norms, a matrix that joins them, a layer, a norm (arXiv 2412.19437)."""
    if not build.mtp_depth:
        return ()
    hidden = build.hidden
    return (
        *norm("mtp.embedding_norm", hidden, build.norm),
        *norm("mtp.hidden_norm", hidden, build.norm),
        *linear("mtp.join", hidden, 2 * hidden, "column"),
        *(tensor for kind in build.mtp_layers for tensor in kind.tensors),
        *norm("mtp.final_norm", hidden, build.norm),
    )
