"""One rank of a counting run: `python -m tests.torch.worker CASES RANK WORLD FOLDER`.

CASES is a JSON file with a list of cases. For each, the rank trains a tiny model for one step, counts what it
communicates and what it holds, and writes that to FOLDER/NAME.RANK.json.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.torch.configs import CONFIGS
from tests.torch.counting import CollectiveCounter
from tests.torch.ring import ring_attention
from tests.torch.tiny_models import Attention, Moe, Transformer, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable

Case = dict[str, Any]

WARM_UP = 2
"""Steps before the one that counts. What happens once in a run is over by then: FSDP2 sets itself up in the first, DDP
arranges its buckets by the order of the gradients of the first and agrees on it in the second."""


@dataclass
class Run:
    """What a set-up hands to the count: the step, the parameters, and the axis of every group."""

    step: Callable[[], None]
    parameters: list[nn.Parameter]
    axes: dict[str, str]


def batches(case: Case, sequences: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of every micro-batch."""
    vocab, shape = CONFIGS[case["config"]]["vocab_size"], (sequences, case["seq_len"])
    return [(torch.randint(vocab, shape), torch.randint(vocab, shape)) for _ in range(case["micro_batches"])]


@cache
def mesh_of(**sizes: int) -> DeviceMesh:
    """The mesh of these axes. Two meshes of one form are equal to DTensor, which may use the groups of either."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@cache
def everyone(name: str) -> DeviceMesh:
    """All ranks along one axis, in a group of their own: torch would reuse that of a mesh with one more axis of 1."""
    return DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=(name,))


def axes_of(mesh: DeviceMesh) -> dict[str, str]:
    names = mesh.mesh_dim_names or ()
    return {mesh.get_group(name).group_name: name.split("_")[0] for name in names}


def train_step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Forward and backward of every micro-batch, then the optimizer."""
    data = batches(case, case["degrees"]["micro_batch"])

    def step() -> None:
        for index, (tokens, labels) in enumerate(data):
            with ExitStack() as around:
                if case["degrees"]["tp"] > 1:
                    around.enter_context(loss_parallel())
                if case["sync"] == "last":
                    last = index + 1 == len(data)
                    if isinstance(model, FSDPModule):
                        model.set_requires_gradient_sync(last)
                    elif not last:
                        around.enter_context(model.no_sync())
                loss_of(model(tokens), labels).backward()
        if case["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case["optimizer"] == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=0.9)
    return torch.optim.AdamW(model.parameters())


def data_parallel(case: Case) -> Run:
    """DDP for ZeRO-0, with a sharded optimizer for ZeRO-1."""
    mesh = mesh_of(dp=case["degrees"]["dp"])
    config = CONFIGS[case["config"]]
    cap: Any = case["bucket_bytes"] and case["bucket_bytes"] / 2**20
    model = DistributedDataParallel(Transformer(config), process_group=mesh.get_group(), bucket_cap_mb=cap)
    if case["degrees"]["zero"] == 1:
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=mesh.get_group()
        )
    else:
        optimizer = optimizer_of(case, model)
    return Run(train_step(case, model, optimizer), list(model.parameters()), axes_of(mesh))


def shard(case: Case, model: Transformer, mesh: DeviceMesh, expert_mesh: DeviceMesh | None = None) -> None:
    """FSDP2 as its tutorial applies it: every layer, then the root with embedding, final norm and head.

    Under ZeRO-2 the weights stay gathered until the backward pass is over. The root does so always: it is needed again
    at once (`reshard_after_forward=None`, the default).
    """
    options: dict[str, Any] = {"reshard_after_forward": None if case["degrees"]["zero"] == 3 else False}
    if case["mixed"]:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        if expert_mesh is not None:
            fully_shard(layer.ffn.experts, mesh=expert_mesh, **options)
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def fully_sharded(case: Case) -> Run:
    dp, replicas = case["degrees"]["dp"], case["degrees"]["dp_replicate"]
    mesh = mesh_of(dp_replicate=replicas, dp_shard=dp // replicas) if replicas > 1 else mesh_of(dp=dp)
    model = Transformer(CONFIGS[case["config"]])
    shard(case, model, mesh)
    optimizer = optimizer_of(case, model)
    return Run(train_step(case, model, optimizer), list(model.parameters()), axes_of(mesh))


def tensor_parallel(case: Case) -> Run:
    """Tensor parallelism as torchtitan plans it, with FSDP2 around it where dp > 1."""
    mesh = mesh_of(dp=case["degrees"]["dp"], tp=case["degrees"]["tp"])
    model = Transformer(CONFIGS[case["config"]])
    parallelize(model, mesh["tp"], case["degrees"]["sequence_parallel"])
    if case["degrees"]["dp"] > 1:
        shard(case, model, mesh["dp"])
    optimizer = optimizer_of(case, model)
    return Run(train_step(case, model, optimizer), list(model.parameters()), axes_of(mesh))


def parallelize(model: Transformer, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    outside = Shard(1) if sequence_parallel else Replicate()
    enter = PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
    ends: dict[str, Any] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "lm_head": ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False),
    }
    inside: dict[str, Any] = {
        "attention": enter,
        "attention.q_proj": ColwiseParallel(),
        "attention.k_proj": ColwiseParallel(),
        "attention.v_proj": ColwiseParallel(),
        "attention.o_proj": RowwiseParallel(output_layouts=outside),
        "ffn": enter,
        "ffn.gate_proj": ColwiseParallel(),
        "ffn.up_proj": ColwiseParallel(),
        "ffn.down_proj": RowwiseParallel(output_layouts=outside),
    }
    if sequence_parallel:
        ends["final_norm"] = SequenceParallel()
        inside |= {"input_norm": SequenceParallel(), "post_norm": SequenceParallel()}
    parallelize_module(model, mesh, ends)
    for layer in model.layers:
        parallelize_module(layer, mesh, inside)


def context_parallel(case: Case) -> Run:
    """Ring attention over cp, FSDP2 over dp x cp: each rank has its part of the sequence."""
    mesh = mesh_of(dp=case["degrees"]["dp"], cp=case["degrees"]["cp"])
    whole = everyone("dp_cp")
    model = Transformer(CONFIGS[case["config"]])
    group = mesh.get_group("cp")
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = lambda q, k, v: ring_attention(q, k, v, group, case["rotate"])
    shard(case, model, whole)
    optimizer = optimizer_of(case, model)
    local = case | {"seq_len": case["seq_len"] // case["degrees"]["cp"]}
    axes = axes_of(mesh) | axes_of(whole)
    return Run(train_step(local, model, optimizer), list(model.parameters()), axes)


def pipeline(case: Case) -> Run:
    """1F1B, with FSDP2 within every stage where dp > 1."""
    mesh = mesh_of(pp=case["degrees"]["pp"], dp=case["degrees"]["dp"])
    config, group = CONFIGS[case["config"]], mesh.get_group("pp")
    stages, rank = case["degrees"]["pp"], mesh.get_local_rank("pp")
    module = Transformer(config, case["stages"][rank], first=rank == 0, last=rank == stages - 1)
    if case["degrees"]["dp"] > 1:
        shard(case, module, mesh["dp"])
    stage = PipelineStage(module, rank, stages, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, case["micro_batches"], loss_fn=loss_of)
    tokens, labels = (torch.cat(parts) for parts in zip(*batches(case, case["degrees"]["micro_batch"]), strict=True))
    optimizer = optimizer_of(case, module)

    def step() -> None:
        schedule.step(*([tokens] if rank == 0 else []), target=labels if rank == stages - 1 else None)
        optimizer.step()
        optimizer.zero_grad()

    return Run(step, list(module.parameters()), axes_of(mesh))


def expert_parallel(case: Case) -> Run:
    """Experts over ep of the dp ranks; FSDP2 shards them over what is left, everything else over dp."""
    degrees = case["degrees"]
    mesh = mesh_of(dp_expert=degrees["dp"] // degrees["ep"], ep=degrees["ep"])
    whole = everyone("dp")
    group = mesh.get_group("ep")
    model = Transformer(CONFIGS[case["config"]], ffn=lambda config: Moe(config, group, balanced=case["balanced"]))
    shard(case, model, whole, mesh["dp_expert"])
    optimizer = optimizer_of(case, model)
    axes = axes_of(mesh) | axes_of(whole)
    return Run(train_step(case, model, optimizer), list(model.parameters()), axes)


SETUPS: dict[str, Callable[[Case], Run]] = {
    "data": data_parallel,
    "fsdp": fully_sharded,
    "tensor": tensor_parallel,
    "context": context_parallel,
    "pipeline": pipeline,
    "expert": expert_parallel,
}


def local_bytes(parameter: nn.Parameter) -> int:
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return int(held.numel() * held.element_size())


def count(case: Case) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    run = SETUPS[case["setup"]](case)
    held = sum(local_bytes(parameter) for parameter in run.parameters)
    for _ in range(WARM_UP):
        run.step()
    counter = CollectiveCounter(run.axes)
    # CommDebugMode follows modules, and loses its way in a forward that comes after a backward.
    debug = CommDebugMode() if case["micro_batches"] == 1 else None
    with debug or nullcontext(), counter:
        run.step()
    return {
        "parameter_bytes": held,
        "calls": [[op, axis, calls, counter.bytes[op, axis]] for (op, axis), calls in sorted(counter.calls.items())],
        "collectives": counter.collectives,
        "debug": debug.get_total_counts() if debug else None,
    }


def main(cases: Path, rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    for case in json.loads(cases.read_text()):
        (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(count(case)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
