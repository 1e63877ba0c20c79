"""Random pipelines: one shape and one schedule each, layers of several kinds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from universe import ETHERNET, NVLINK, PCIE, dense, instance_of, model_of

from shardwise.data.model import Mamba
from shardwise.data.model_parts import layer, mamba2, mlp
from shardwise.data.profile import load_profile
from shardwise.data.workload import Training

if TYPE_CHECKING:
    from shardwise.data.instance import Instance

SEARCHED = ("1f1b", "eager-1f1b", "interleaved-1f1b", "gpipe", "zb-h1", "zb-2p", "zb-v", "dualpipe-v")
"""The schedules of the pack `free`, in turn."""


def instance_with(seed: int, most_stages: int = 16) -> Instance:
    """Attention, MLP-only and Mamba layers in random order on 2 to `most_stages` stages under one schedule, p to 16 p
    micro-batches, on a fast or a slow link."""
    draw = random.Random(seed)
    schedule, pp = SEARCHED[seed % len(SEARCHED)], draw.randint(2, most_stages)
    vpp = {"interleaved-1f1b": draw.randint(2, 4), "zb-v": 2, "dualpipe-v": 2, "gpipe": draw.choice((1, 2))}.get(
        schedule, 1
    )
    micro_batches = pp * draw.randint(2 if schedule == "dualpipe-v" else 1, 16)
    hidden = draw.choice((1024, 2048, 4096))
    kinds = (
        dense(hidden, width=draw.choice((2, 4, 8))),
        layer(hidden, None, mlp(hidden, draw.choice((2, 4)) * hidden, gated=True)),
        layer(hidden, mamba2(hidden, Mamba(2, 2 * hidden, 128, 4, groups=2, heads=2 * hidden // 64)), None),
    )
    layers = [draw.choice(kinds) for _ in range(draw.randint(pp * vpp, 3 * pp * vpp))]
    profile = replace(
        load_profile("megatron-core"),
        p2p_exposed=draw.choice((0.0, 0.3, 1.2)),
        p2p_exposed_interleaved=draw.choice((0.0, 0.2, 1.0)),
    )
    uniform = schedule in ("1f1b", "interleaved-1f1b") and draw.random() < 0.5
    return instance_of(
        model_of(layers, hidden, draw.choice((1000, 32000, 128256)), tied=draw.random() < 0.3),
        (pp,),
        (draw.choice((NVLINK, PCIE, ETHERNET)),),
        rules="megatron-core" if uniform else "free",
        limits=(f"pp={pp}", f"vpp={vpp}", "tp=1", "dp=1", "micro_batch=1", f"schedule={schedule}"),
        workload=Training(2048, micro_batches),
        profile=profile,
    )
