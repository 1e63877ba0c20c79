"""The cluster of a measured run: its node family, with as many nodes as it used and the network that it names."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from shardwise.data.cluster_catalog import family_cluster, load_accelerator, load_family
from shardwise.data.faults import InputError

if TYPE_CHECKING:
    from shardwise.data.cluster import Accelerator, Cluster, Link

FAMILY_OF = (
    ("gb300", "gb300-nvl72"),
    ("gb200", "gb200-nvl72"),
    ("gh200", "dgx-h200"),
    ("b300", "dgx-b300"),
    ("b200", "dgx-b200"),
    ("h200", "dgx-h200"),
    ("h800", "dgx-h800"),
    ("h100", "dgx-h100"),
    ("a800", "dgx-a800"),
    ("a100-sxm4-40", "dgx-a100-40gb"),
    ("a100", "dgx-a100"),
    ("v100", "v100-sxm"),
    ("mi355", "mi355x"),
    ("mi350", "mi355x"),
    ("mi325", "mi325x"),
    ("mi300", "mi300x"),
    ("mi2", "mi300x"),
    ("l40", "l40s"),
    ("l4", "l40s"),
    ("rtx", "l40s"),
    ("a6000", "l40s"),
    ("a40", "l40s"),
    ("a30", "l40s"),
    ("a10", "a10g"),
    ("gh200", "dgx-h200"),
    ("h20", "dgx-h200"),
    ("910b", "ascend-910b"),
    ("v5p", "tpu-v5p"),
    ("v5e", "tpu-v5e"),
    ("v6e", "tpu-v6e"),
    ("gaudi3", "gaudi3"),
    ("gaudi2", "gaudi2"),
)
"""Node family by a part of the accelerator's name, more specific ones first; it lends nodes and links to accelerators
that have no family of their own."""


@lru_cache(maxsize=4096)
def cluster_of(
    gpu: str, devices: int, per_node: int | None, interconnect: str, memory_gb: float | None = None
) -> Cluster:
    """The cluster of a run: its node family with as many nodes as the run used, and the network that it names."""
    text = gpu.lower().replace("_", "-").replace(" ", "-")
    family_name = next((family for part, family in FAMILY_OF if part in text), None)
    if family_name is None:
        raise InputError(f"gpu={gpu!r} is not an accelerator of the catalogue")
    family = load_family(family_name)
    if family_name == "dgx-a100" and ("40gb" in text.replace("-", "") or (memory_gb is not None and memory_gb <= 40)):
        family = load_family("dgx-a100-40gb")
    accelerator = _variant(gpu, family.accelerator)
    memory = int(memory_gb * 2**30) if memory_gb else accelerator.memory_bytes
    if memory_gb and abs(memory / accelerator.memory_bytes - 1) > 0.05:
        accelerator = replace(accelerator, name=f"{accelerator.name}-{memory_gb:g}GB", memory_bytes=memory)
    if "hbm2e" in text and "h100" in text:
        accelerator = replace(accelerator, memory_bandwidth_bytes_per_s=2.4e12, tdp_w=500.0)
    node = min(per_node or family.devices_per_node, family.devices_per_node)
    levels = list(family.levels)
    rate = network_bytes_per_s(interconnect, family.devices_per_node)
    if rate is not None:
        levels[-1] = replace(levels[-1], link=_with_rate(levels[-1].link, rate))
    family = replace(family, accelerator=accelerator, levels=tuple(levels))
    used = max(size for size in range(1, min(node, devices) + 1) if devices % size == 0)
    return family_cluster(family, devices // used, used)


def _variant(gpu: str, accelerator: Accelerator) -> Accelerator:
    """The accelerator itself where the catalogue has it under this name, and it is not the family's own in other words."""
    try:
        named = load_accelerator(re.sub(r"\(.*?\)", "", gpu).strip())
    except InputError:
        return accelerator
    return (
        accelerator
        if named.name.split("-")[0] == accelerator.name.split("-")[0] and "PCIe" not in named.name
        else named
    )


def network_bytes_per_s(text: str, per_node: int) -> float | None:
    """Bytes per second and device that a description of the network between nodes gives, if it does."""
    inter = text.split("inter:")[-1]
    cards = re.search(r"(\d+)\s*x\s*(?:[A-Za-z0-9-]+\s+)?(?:[A-Za-z0-9-]+\s+)*?(\d+)\s*Gb", inter)
    if cards:
        return int(cards[1]) * int(cards[2]) * 1e9 / 8 / per_node
    whole = re.search(r"(\d+)\s*Gb(?:ps|/s)?\s*(?:/node|(?:RoCE/IB )?per node)", inter) or re.search(
        r"inter (\d+) Gbps per node", text
    )
    if whole:
        return int(whole[1]) * 1e9 / 8 / per_node
    return None


def _with_rate(link: Link, bytes_per_s: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=bytes_per_s)
