"""The instance as a JSON document, saved beside a plan so that the plan can be evaluated and exported alone.

The cluster is kept in its TOML form, the model as its layer kinds and the run lengths of its layers.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

from shardwise.data.cluster_file import parse_cluster_toml, write_cluster_toml
from shardwise.data.faults import InputError
from shardwise.data.instance import Instance
from shardwise.data.limits import parse_limits
from shardwise.data.model import (
    MAX_LAYERS,
    Attention,
    Latent,
    LayerKind,
    LinearAttention,
    Mamba,
    Mlp,
    Model,
    Moe,
    Tensor,
)
from shardwise.data.profile import saved_profile
from shardwise.data.rules import load_rules
from shardwise.data.workload import Training

PARTS = {part.__name__: part for part in (Attention, LinearAttention, Mamba, Mlp, Moe)}


def instance_document(instance: Instance) -> dict[str, Any]:
    """Everything needed to build `instance` again, as plain lists, numbers and strings."""
    return {
        "model": model_document(instance.model),
        "cluster": write_cluster_toml(instance.cluster),
        "workload": instance.workload.to_dict(),
        "rules": instance.rules.name,
        "profile": asdict(instance.profile),
        "limits": list(instance.limits.text),
    }


def instance_from_document(document: Any) -> Instance:
    """The instance of a document that `instance_document` wrote.

    Raises
    ------
    InputError
        When the document is not one, naming the field.
    """
    if not isinstance(document, dict):
        raise InputError("plan.instance is missing: give the model and the cluster as well")
    try:
        return Instance(
            model=_model(document["model"]),
            cluster=parse_cluster_toml(document["cluster"], "plan.instance.cluster"),
            workload=Training(**document["workload"]),
            rules=load_rules(document["rules"]),
            profile=saved_profile(document["profile"]),
            limits=parse_limits(document["limits"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"plan.instance cannot be read: {type(error).__name__}: {error}") from None


def model_document(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "family": model.family,
        "hidden": model.hidden,
        "vocab": model.vocab,
        "tied": model.tied,
        "norm": model.norm,
        "max_positions": model.max_positions,
        "mtp_depth": model.mtp_depth,
        "source": model.source,
        "assumed": list(model.assumed),
        "kinds": [
            {
                "name": kind.name,
                "mixer": _part_document(kind.mixer),
                "ffn": _part_document(kind.ffn),
                "tensors": [asdict(tensor) for tensor in kind.tensors],
            }
            for kind in model.kinds
        ],
        "layers": [[kind, len(list(run))] for kind, run in groupby(model.kind_indices)],
        **{name: [asdict(tensor) for tensor in getattr(model, name)] for name in ("embedding", "head", "mtp")},
    }


def _part_document(part: Any) -> dict[str, Any] | None:
    return None if part is None else {"part": type(part).__name__, **asdict(part)}


def _model(document: dict[str, Any]) -> Model:
    kinds = [
        LayerKind(kind["name"], _part(kind["mixer"]), _part(kind["ffn"]), _tensors(kind["tensors"]))
        for kind in document["kinds"]
    ]
    if sum(count for _, count in document["layers"]) > MAX_LAYERS:
        raise ValueError(f"more than {MAX_LAYERS} layers")
    return Model(
        name=document["name"],
        family=document["family"],
        hidden=document["hidden"],
        vocab=document["vocab"],
        tied=document["tied"],
        norm=document["norm"],
        max_positions=document["max_positions"],
        mtp_depth=document["mtp_depth"],
        source=document["source"],
        layers=tuple(kinds[kind] for kind, count in document["layers"] for _ in range(count)),
        embedding=_tensors(document["embedding"]),
        head=_tensors(document["head"]),
        mtp=_tensors(document["mtp"]),
        assumed=tuple(document.get("assumed", ())),
    )


def _part(document: dict[str, Any] | None) -> Any:
    if document is None:
        return None
    values = dict(document)
    part = PARTS[values.pop("part")]
    if values.get("latent") is not None:
        values["latent"] = Latent(**values["latent"])
    return part(**values)


def _tensors(documents: list[dict[str, Any]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in documents)
