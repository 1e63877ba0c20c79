"""The catalogues as rows of plain values, for the command line."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.data.cluster_catalog import (
    accelerator_facts,
    cluster_facts,
    list_accelerators,
    list_clusters,
    load_cluster,
)
from shardwise.data.model_catalog import catalog_models, load_model
from shardwise.data.profile import list_profiles, load_profile, profile_document
from shardwise.data.rules import PACKS, load_rules

if TYPE_CHECKING:
    from collections.abc import Callable

Rows = list[dict[str, Any]]


def models(name: str | None) -> Rows:
    """All models, or the parts of one."""
    if name is None:
        return [
            {
                "name": entry.slug,
                "family": entry.family,
                "stated size B": _billions(entry.stated_params),
                "source": entry.source,
            }
            for entry in catalog_models()
        ]
    model = load_model(name)
    rows: Rows = [
        {"what": "parameters", "value": f"{model.params:,}"},
        {"what": "active parameters", "value": f"{model.active_params:,}"},
        {"what": "hidden size", "value": model.hidden},
        {"what": "vocabulary", "value": model.vocab},
        {"what": "layers", "value": len(model.layers)},
    ]
    for index, kind in enumerate(model.kinds):
        count = model.kind_indices.count(index)
        rows.append({"what": f"layer kind {kind.name}", "value": f"{count} of {kind.params:,} parameters"})
    if model.mtp_depth:
        rows.append({"what": "multi-token prediction, not counted above", "value": f"{model.mtp_params:,} parameters"})
    rows.append({"what": "source", "value": model.source})
    return rows + [{"what": "assumed", "value": line} for line in model.assumed]


def _billions(params: float | None) -> str | None:
    return None if params is None else f"{params / 1e9:.4g}"


def accelerators(name: str | None) -> Rows:
    """All accelerators, or the facts of one with their sources."""
    if name is None:
        return [{"name": entry} for entry in list_accelerators()]
    return [fact._asdict() for fact in accelerator_facts(name)]


def clusters(name: str | None) -> Rows:
    """All node families and clusters, or the facts of one with their sources."""
    if name is None:
        return [{"name": entry} for entry in list_clusters()]
    family = name.split(":")[0]
    cluster = load_cluster(name)
    rows = [fact._asdict() for fact in cluster_facts(family)]
    return [{"name": "devices", "value": cluster.device_count, "source": "", "confidence": ""}, *rows]


def profiles(name: str | None) -> Rows:
    """All profiles, or the constants of one with their reasons."""
    if name is None:
        return [{"name": entry} for entry in list_profiles()]
    load_profile(name)
    constants: Any = profile_document(name)["constants"]
    return [
        {"constant": key, "value": entry["value"], "bounds": entry["bounds"], "why": entry["why"]}
        for key, entry in constants.items()
    ]


def rules(name: str | None) -> Rows:
    """All rule packs, or what one allows."""
    if name is None:
        return [{"name": pack.name, "version": pack.version} for pack in PACKS.values()]
    return [{"rule": key, "value": value} for key, value in asdict(load_rules(name)).items()]


SECTIONS: dict[str, Callable[[str | None], Rows]] = {
    "models": models,
    "accelerators": accelerators,
    "clusters": clusters,
    "profiles": profiles,
    "rules": rules,
}
