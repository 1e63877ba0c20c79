"""Which tensors of a layer are frozen matrices, and which of those have an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from shardwise.data.model import Tensor
    from shardwise.data.workload import Training

FEED_FORWARD = ("gate_proj.", "up_proj.", "down_proj.", "experts.", "shared_expert", "latent_in.", "latent_out.")
"""How the names of tensors of feed-forward parts begin."""
ROUTER = "router."


def is_projection(tensor: Tensor) -> bool:
    """Whether a tensor of a layer is a matrix that adapters and quantisation apply to; routers stay as they are."""
    return len(tensor.shape) == 2 and tensor.name.endswith(".weight") and not tensor.name.startswith(ROUTER)


def adapts(workload: Training, part: Literal["mixer", "ffn"]) -> bool:
    """Whether the projections of a part have adapters."""
    return workload.frozen and (part == "mixer" or workload.lora_modules == "all")


def is_adapted(workload: Training, tensor: Tensor) -> bool:
    """Whether a tensor of a layer has an adapter."""
    part: Literal["mixer", "ffn"] = "ffn" if tensor.name.startswith(FEED_FORWARD) else "mixer"
    return is_projection(tensor) and adapts(workload, part)
