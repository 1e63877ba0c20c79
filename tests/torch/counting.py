"""Counts the collective calls of a rank, and their bytes, as torch dispatches them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")

FREE = {"wait_tensor", "_wrap_tensor_autograd"}
"""Ops of those namespaces that move nothing between ranks."""


class CollectiveCounter(TorchDispatchMode):
    """Calls and bytes by (op, axis); `axes` names the axis of each process group.

    torch's own `CommDebugMode` watches the same ops but neither their sizes, nor their groups, nor send and receive;
    the runs hold the two against each other. Sizes follow `shardwise.formulations.collectives`: the whole tensor, so
    the output of an all-gather and the input of anything else.
    """

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.axes = axes
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor turns the op into ops on local tensors and collectives, seen then
        if isinstance(func, torch._ops.OpOverload) and func.namespace in NAMESPACES:
            name = func._schema.name.split("::")[1]
            if name not in FREE:
                self._count(name, args, {} if kwargs is None else kwargs)
        return func(*args, **({} if kwargs is None else kwargs))

    def _count(self, name: str, args: Any, kwargs: Any) -> None:
        axis = self.axes[_group_name(args, kwargs)]
        if name == "recv_":
            op, size = "received", _size(args[0])
        elif name == "send":
            op, size = "sendrecv", _size(args[0])
        else:
            self.collectives += 1
            op, size = _collective(name, args)
        self.calls[op, axis] += 1
        self.bytes[op, axis] += size


def _collective(name: str, args: Any) -> tuple[str, int]:
    match name:
        case "all_gather_into_tensor" | "all_gather_into_tensor_out":
            return "all_gather", _size(args[0]) * args[1]
        case "_allgather_base_":
            return "all_gather", _size(args[0])
        case "reduce_scatter_tensor":
            return "reduce_scatter", _size(args[0])
        case "_reduce_scatter_base_":
            return "reduce_scatter", _size(args[1])
        case "all_reduce" | "all_reduce_" | "allreduce_":
            return "all_reduce", _size(args[0])
        case "broadcast" | "broadcast_":
            return "broadcast", _size(args[0])
        case "all_to_all_single":
            # A split that is all for one rank is a send to it: that is how torch permutes a tensor around a ring.
            splits = args[2]
            single = splits is not None and sum(size > 0 for size in splits) == 1
            return "sendrecv" if single else "alltoall", _size(args[0])
    raise NotImplementedError(f"the counter does not know what {name} moves")


def _size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_flatten(tensors)[0])


def _group_name(args: Any, kwargs: Any) -> str:
    """The name of the group: the last string that a functional collective gets, or that of the group which others get."""
    values = (*args, *kwargs.values())
    for value in values:
        if isinstance(value, torch.ScriptObject):
            try:
                return str(ProcessGroup.unbox(value).group_name)
            except RuntimeError:  # the reduce op is boxed too
                continue
    return next(value for value in reversed(values) if isinstance(value, str))
