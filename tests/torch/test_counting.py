"""One training step under real PyTorch, on 4 and on 8 processes, against `shardwise.formulations.traffic`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardwise.data.cluster_catalog import load_cluster
from shardwise.data.hf_config import model_from_config
from shardwise.data.instance import Instance
from shardwise.data.plan import Degrees
from shardwise.data.workload import Optimizer, Training
from shardwise.formulations.layer_costs import padded_vocab
from shardwise.formulations.memory import end_params_on_device, kind_params_on_device
from shardwise.formulations.traffic import Call, Rank, Scheme, parameter_bytes, step_calls
from tests.torch.configs import CONFIGS

if TYPE_CHECKING:
    from shardwise.data.model import Model

ROOT = Path(__file__).parents[2]
LIMIT_S = 300

FP32 = Scheme(held_bytes=4, weight_bytes=4, gradient_bytes=4, activation_bytes=4)
MIXED = Scheme(held_bytes=4, weight_bytes=2, gradient_bytes=4, activation_bytes=2)
"""bf16 weights and activations, fp32 gradients: `MixedPrecisionPolicy(torch.bfloat16, torch.float32)`."""


@dataclass(frozen=True)
class Case:
    """One run: how `worker.py` sets it up, and what the count is asked for."""

    name: str
    setup: str
    degrees: Degrees
    scheme: Scheme = FP32
    config: str = "llama"
    micro_batches: int = 1
    seq_len: int = 32
    stages: tuple[int, ...] | None = None
    optimizer: Optimizer = "adamw"
    balanced: bool = True

    @property
    def model(self) -> Model:
        return model_from_config(CONFIGS[self.config], self.config)

    @property
    def workload(self) -> Training:
        sequences = self.degrees.dp * self.degrees.micro_batch * self.micro_batches
        return Training(self.seq_len, sequences, optimizer=self.optimizer)

    @property
    def expected_calls(self) -> list[tuple[Call, ...]]:
        """By `traffic`, on every rank."""
        return [
            step_calls(
                self.model,
                self.workload,
                self.degrees,
                self.micro_batches,
                scheme=self.scheme,
                stages=self.stages,
                rank=self.rank(number),
            )
            for number in range(self.degrees.devices)
        ]

    @property
    def expected_parameter_bytes(self) -> list[int]:
        return [
            parameter_bytes(self.model, self.degrees, scheme=self.scheme, stages=self.stages, rank=self.rank(number))
            for number in range(self.degrees.devices)
        ]

    def rank(self, number: int) -> Rank:
        """Where a process stands in the mesh of its set-up; stages and data-parallel ranks come before tp ranks."""
        if self.degrees.pp > 1:
            return Rank(*divmod(number, self.degrees.dp))
        return Rank(shard=number // self.degrees.tp % (self.degrees.cp * self.degrees.dp_shard))

    def document(self) -> dict[str, Any]:
        """What the worker reads."""
        chosen = asdict(self.scheme)
        return {
            "name": self.name,
            "setup": self.setup,
            "config": self.config,
            "degrees": asdict(self.degrees),
            "micro_batches": self.micro_batches,
            "seq_len": self.seq_len,
            "stages": self.stages,
            "optimizer": self.optimizer,
            "balanced": self.balanced,
            "mixed": self.scheme.weight_bytes == 2,
            **{name: chosen[name] for name in ("sync", "rotate", "bucket_bytes", "clip")},
        }


def sharded(dp: int, **others: Any) -> Degrees:
    """Two sequences a micro-batch; FSDP2 that gathers weights again for the backward pass."""
    return Degrees(**{"dp": dp, "micro_batch": 2, "zero": 3} | others)


FOUR = [
    Case("ddp dp=4", "data", sharded(4, zero=0)),
    Case("ddp dp=4, 300 KiB buckets", "data", sharded(4, zero=0), replace(FP32, bucket_bytes=300 * 2**10)),
    Case(
        "ddp dp=4, 96 KiB buckets", "data", sharded(4, zero=0), replace(FP32, bucket_bytes=96 * 2**10), micro_batches=2
    ),
    Case("ddp dp=4, one sync", "data", sharded(4, zero=0), replace(FP32, sync="last"), micro_batches=3),
    Case("ddp dp=4, ZeRO-1", "data", sharded(4, zero=1)),
    Case("fsdp2 dp=4, fp32", "fsdp", sharded(4)),
    Case("fsdp2 dp=4", "fsdp", sharded(4), MIXED, micro_batches=2),
    Case("fsdp2 dp=4, weights kept", "fsdp", sharded(4, zero=2), MIXED, micro_batches=2),
    Case("fsdp2 dp=4, one sync, clipped", "fsdp", sharded(4), replace(MIXED, sync="last", clip=True), micro_batches=2),
    Case("fsdp2 dp=4, tied", "fsdp", sharded(4), MIXED, "llama-tied"),
    Case("fsdp2 dp=4, uneven sizes", "fsdp", sharded(4), MIXED, "llama-uneven"),
    Case(
        "hsdp dp=2x2, one sync, clipped",
        "fsdp",
        sharded(4, dp_replicate=2),
        replace(MIXED, sync="last", clip=True),
        micro_batches=2,
    ),
    Case("tp=4", "tensor", sharded(1, tp=4)),
    Case("tp=4 sp", "tensor", sharded(1, tp=4, sequence_parallel=True), micro_batches=2),
    Case("tp=4 sp, SGD", "tensor", sharded(1, tp=4, sequence_parallel=True), optimizer="sgd"),
    Case("fsdp2 dp=2 tp=2 sp, clipped", "tensor", sharded(2, tp=2, sequence_parallel=True), replace(MIXED, clip=True)),
    Case("tp=4 sp, clipped", "tensor", sharded(1, tp=4, sequence_parallel=True), replace(FP32, clip=True)),
    Case(
        "fsdp2 dp=2 tp=2 sp, one sync",
        "tensor",
        sharded(2, tp=2, sequence_parallel=True),
        replace(MIXED, sync="last"),
        micro_batches=2,
    ),
    Case("fsdp2 cp=4, gathered", "context", sharded(1, cp=4), MIXED),
    Case("fsdp2 dp=2 cp=2, ring, fp32", "context", sharded(2, cp=2), replace(FP32, rotate="alltoall"), micro_batches=2),
    Case("pp=4", "pipeline", sharded(1, pp=4), stages=(1, 1, 1, 1), micro_batches=6),
    Case("fsdp2 dp=2 pp=2", "pipeline", sharded(2, pp=2), MIXED, stages=(1, 3), micro_batches=5),
    Case("fsdp2 dp=2 pp=2, weights kept", "pipeline", sharded(2, pp=2, zero=2), stages=(2, 2), micro_batches=3),
    Case("fsdp2 dp=4 ep=4", "expert", sharded(4, ep=4), MIXED, "mixtral"),
    Case("fsdp2 dp=4 ep=2, one sync", "expert", sharded(4, ep=2), replace(MIXED, sync="last"), "mixtral", 2),
    Case("fsdp2 dp=4 ep=4, uneven routing", "expert", sharded(4, ep=4), config="mixtral", balanced=False),
]
EIGHT = [
    Case("fsdp2 dp=8", "fsdp", sharded(8), MIXED, micro_batches=2),
    Case("fsdp2 dp=8, uneven sizes", "fsdp", sharded(8), config="llama-uneven"),
    Case("hsdp dp=2x4", "fsdp", sharded(8, dp_replicate=2), MIXED),
    Case("tp=8 sp", "tensor", sharded(1, tp=8, sequence_parallel=True), config="llama-wide"),
    Case("fsdp2 dp=2 tp=4 sp", "tensor", sharded(2, tp=4, sequence_parallel=True), MIXED, micro_batches=2),
    Case("fsdp2 dp=4 tp=2", "tensor", sharded(4, tp=2), MIXED),
    Case("fsdp2 dp=2 cp=4, gathered", "context", sharded(2, cp=4), MIXED),
    Case("fsdp2 cp=8, ring", "context", sharded(1, cp=8), replace(MIXED, rotate="alltoall")),
    Case("pp=8", "pipeline", sharded(1, pp=8), FP32, "llama-deep", 9, stages=(1, 1, 1, 1, 2, 2, 1, 1)),
    Case("fsdp2 dp=2 pp=4", "pipeline", sharded(2, pp=4), MIXED, micro_batches=6, stages=(1, 1, 1, 1)),
    Case("fsdp2 dp=8 ep=8", "expert", sharded(8, ep=8), MIXED, "mixtral"),
    Case("fsdp2 dp=8 ep=4", "expert", sharded(8, ep=4), MIXED, "mixtral"),
]

Counted = dict[str, list[dict[str, Any]]]
"""By case, what every rank wrote."""


@pytest.fixture(scope="session")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """All cases, run once: one set of processes for those of each number of ranks."""
    results: Counted = {}
    for world, cases in ((4, FOUR), (8, EIGHT)):
        folder = tmp_path_factory.mktemp(f"ranks{world}")
        run(world, cases, folder)
        for case in cases:
            results[case.name] = [
                json.loads((folder / f"{case.name}.{rank}.json").read_text()) for rank in range(world)
            ]
    return results


def run(world: int, cases: list[Case], folder: Path) -> None:
    listed = folder / "cases.json"
    listed.write_text(json.dumps([case.document() for case in cases]))
    errors = [folder / f"stderr.{rank}" for rank in range(world)]
    processes = []
    for rank, path in enumerate(errors):
        with path.open("w") as stderr:
            command = [sys.executable, "-m", "tests.torch.worker", str(listed), str(rank), str(world), str(folder)]
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=stderr)
            )
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        pytest.fail("\n".join(path.read_text()[-3000:] for path in errors))


def calls_of(result: dict[str, Any]) -> tuple[Call, ...]:
    return tuple(sorted(Call(*entry) for entry in result["calls"] if entry[0] != "received"))


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


BALANCED = [case for case in FOUR + EIGHT if case.balanced]


@each(BALANCED)
def test_every_rank_makes_the_calls_that_traffic_lists(case: Case, counted: Counted) -> None:
    assert [calls_of(result) for result in counted[case.name]] == case.expected_calls


@each([case for case in FOUR + EIGHT if not case.balanced])
def test_uneven_routing_moves_as_much_over_all_ranks(case: Case, counted: Counted) -> None:
    found, expected = [calls_of(result) for result in counted[case.name]], case.expected_calls
    assert found != expected
    assert [[replace(call, bytes=0) for call in calls] for calls in found] == [
        [replace(call, bytes=0) for call in calls] for calls in expected
    ]
    for op in ("alltoall", "all_gather", "reduce_scatter"):
        assert sum(c.bytes for calls in found for c in calls if c.op == op) == sum(
            c.bytes for calls in expected for c in calls if c.op == op
        )


@each(FOUR + EIGHT)
def test_every_rank_holds_the_parameters_that_traffic_says(case: Case, counted: Counted) -> None:
    assert [result["parameter_bytes"] for result in counted[case.name]] == case.expected_parameter_bytes


@each(FOUR + EIGHT)
def test_memory_and_torch_agree_on_the_parameters_of_a_stage(case: Case, counted: Counted) -> None:
    """Over the ranks that share a copy, the shards add up to what `memory` puts on one device before ZeRO."""
    model, degrees = case.model, case.degrees
    instance = Instance(model, load_cluster("dgx-h100:1"), case.workload)
    stages = case.stages or (len(model.layers),)
    # Megatron pads the vocabulary, and so does `memory` (L8); torch does not.
    padding = (padded_vocab(model.vocab, degrees.tp) - model.vocab) // degrees.tp * model.hidden
    shared = degrees.cp * degrees.dp_shard if degrees.zero >= 2 else 1
    for stage in range(degrees.pp):
        first = sum(stages[:stage])
        params = [kind_params_on_device(kind, degrees.tp, degrees.ep) for kind in model.layers[first:][: stages[stage]]]
        dense, expert = sum(part.dense for part in params), sum(part.expert for part in params)
        for head in (False, True):
            if stage == (degrees.pp - 1 if head else 0):
                dense += end_params_on_device(instance, degrees.tp, head=head)
                dense -= padding if not head or not model.tied else 0
        held = [
            result["parameter_bytes"]
            for number, result in enumerate(counted[case.name])
            if case.rank(number).stage == stage
        ]
        # Each rank that shares a copy counts once: replicas and tp ranks beside it hold the same again.
        copies = len(held) // shared
        assert sum(held) == case.scheme.held_bytes * copies * (dense + degrees.ep * expert)


@each(FOUR + EIGHT)
def test_the_counter_sees_what_torch_s_own_debug_mode_sees(case: Case, counted: Counted) -> None:
    for result in counted[case.name]:
        assert (result["debug"] is not None) == (case.micro_batches == 1)
        if result["debug"] is not None:
            assert result["collectives"] == result["debug"]


@each([case for case in FOUR + EIGHT if case.degrees.pp > 1])
def test_what_a_stage_sends_its_neighbour_receives(case: Case, counted: Counted) -> None:
    entries = [entry for result in counted[case.name] for entry in result["calls"]]
    sent, received = ([entry[2:] for entry in entries if entry[0] == op] for op in ("sendrecv", "received"))
    assert [sum(column) for column in zip(*sent, strict=True)] == [
        sum(column) for column in zip(*received, strict=True)
    ]


def table(counted: Counted) -> str:
    """What docs/counting-check.md shows of the runs: the first rank of each. Uneven routing depends on the processor."""
    lines = ["| run | ranks | weights | micro-batches | parameter bytes | calls: bytes |", "|---|---|---|---|---|---|"]
    for case in BALANCED:
        result = counted[case.name][0]
        calls = "; ".join(f"{c.calls} {c.op} {c.axis}: {c.bytes:,}" for c in calls_of(result))
        held = f"{result['parameter_bytes']:,}"
        weights = "bf16" if case.scheme.weight_bytes == 2 else "fp32"
        lines.append(f"| {case.name} | {case.degrees.devices} | {weights} | {case.micro_batches} | {held} | {calls} |")
    return "\n".join(lines)


def test_the_page_shows_what_was_found(counted: Counted) -> None:
    page = (ROOT / "docs" / "counting-check.md").read_text(encoding="utf-8")
    assert table(counted) in page, f"docs/counting-check.md should have this table:\n{table(counted)}"
