"""What `traffic` counts, worked by hand, and what it refuses to count."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.data.hf_config import model_from_config
from shardwise.data.plan import Degrees
from shardwise.data.workload import Training
from shardwise.formulations.traffic import Call, Rank, Scheme, parameter_bytes, step_calls
from tests.torch.configs import CONFIGS

LAYER = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 160 * 64 + 2 * 64
ENDS = 2 * 1024 * 64 + 64


def counted(config: str = "llama", *, micro_batches: int = 1, scheme: Scheme | None = None, **degrees: Any) -> Any:
    chosen = Degrees(**{"zero": 3, "micro_batch": 2} | degrees)
    workload = Training(32, chosen.dp * chosen.micro_batch * micro_batches)
    stages = (1,) * chosen.pp if chosen.pp > 1 else None
    return step_calls(
        model_from_config(CONFIGS[config], config), workload, chosen, micro_batches, scheme=scheme, stages=stages
    )


def test_fsdp2_gathers_layers_twice_and_the_root_once_in_16_bits() -> None:
    assert counted(dp=4) == (
        Call("all_gather", "dp", 9, 2 * (2 * 4 * LAYER + ENDS)),
        Call("reduce_scatter", "dp", 5, 4 * (4 * LAYER + ENDS)),
    )


def test_a_rank_holds_its_chunk_of_rows() -> None:
    model = model_from_config(CONFIGS["llama-uneven"], "llama-uneven")
    held = [parameter_bytes(model, Degrees(dp=8, zero=3), rank=Rank(shard=shard)) for shard in range(8)]
    assert sum(held) == 4 * model.params
    # 60 rows in chunks of 8 leave 4 for the last rank, 1001 in chunks of 126 leave 119, 150 in chunks of 19 leave 17.
    assert held[0] > held[-1]


def test_the_head_fills_the_first_bucket_and_the_cap_closes_each() -> None:
    """Of 300 KiB: the head's 256 and two matrices of the last layer are one, the next ends two layers on, then the rest."""
    calls = counted(dp=4, zero=0, scheme=Scheme(bucket_bytes=300 * 2**10))
    assert calls == (Call("all_reduce", "dp", 3, 4 * (4 * LAYER + ENDS)),)


def test_one_device_has_nothing_to_say() -> None:
    assert counted() == ()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tp": 2, "pp": 4}, "more than one of tp, cp, pp and ep"),
        ({"dp": 2, "tp": 2, "zero": 1}, "DDP"),
        ({"cp": 2, "zero": 0}, "zero=0 or 1 with cp"),
        ({"dp": 2, "config": "mixtral"}, "experts without ep"),
        ({"dp": 2, "ep": 2}, "ep without experts"),
        ({"tp": 2, "config": "llama-tied"}, "tied"),
        ({"tp": 2, "scheme": Scheme(clip=True)}, "clipping"),
        ({"pp": 4, "vpp": 2}, "vpp"),
        ({"tp": 3}, "tp=3 does not divide dimension 0 of"),
        ({"cp": 3}, "seq_len=32"),
        ({"dp": 4, "dp_replicate": 2, "tp": 2}, "replicas"),
        ({"dp": 16, "ep": 2, "config": "mixtral", "micro_batches": 2}, "do not divide 8 experts"),
    ],
)
def test_what_no_run_has_confirmed_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        counted(**arguments)


def test_the_global_batch_must_be_that_of_the_micro_batches() -> None:
    model = model_from_config(CONFIGS["llama"], "llama")
    with pytest.raises(ValueError, match="global_batch=9 is not dp=2 x micro_batch=2 x micro_batches=2"):
        step_calls(model, Training(32, 9), Degrees(dp=2, micro_batch=2, zero=3), 2)


def test_every_stage_needs_its_number_of_layers() -> None:
    model = model_from_config(CONFIGS["llama"], "llama")
    with pytest.raises(ValueError, match=r"stages=\(1, 2\) must be pp=2 numbers that add up to 4 layers"):
        parameter_bytes(model, Degrees(pp=2), stages=(1, 2))
