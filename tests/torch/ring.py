"""torch's own ring attention on CPU.

`torch.distributed.tensor.experimental.context_parallel` sends an attention call to its ring by the kernel that the call
would run, and its table (tensor/experimental/_context_parallel/_attention.py, `_sdpa_handler`) has the CUDA kernels
only. The ring itself takes the kernel as an argument, so here it gets the CPU one: what is sent, when, and in what
precision is torch's code, untouched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor.experimental._context_parallel import _attention as cp

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SEQUENCE = 2
"""The sequence dimension of queries, keys and values."""


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: ProcessGroup, rotate: str) -> torch.Tensor:
    """Causal attention over a sequence spread over `group`, keys and values passed on by `rotate`."""
    cp.set_rotate_method(rotate)
    out: torch.Tensor = _Ring.apply(q, k, v, group)
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        out, lse = cp._templated_ring_attention(group, SEQUENCE, _forward, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        return *cp._templated_ring_attention_backward(
            ctx.group, SEQUENCE, _backward, grad, "grad_out", q, k, v, out, lse, is_causal=True
        ), None


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> tuple[torch.Tensor, ...]:
    """The CPU kernel wants a key and a value for every query head; the CUDA kernels share them."""
    shared = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(shared, 1) for part in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=is_causal)
    return out, lse


def _backward(
    *,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, ...]:
    kv_heads, shared = key.shape[1], query.shape[1] // key.shape[1]
    k, v = (part.repeat_interleave(shared, 1) for part in (key, value))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, k, v, out, logsumexp, 0.0, is_causal
    )
    grad_k, grad_v = (part.unflatten(1, (kv_heads, shared)).sum(2) for part in grads[1:])
    return grads[0], grad_k, grad_v
