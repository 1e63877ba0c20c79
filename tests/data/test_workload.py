"""The workload: adapters, packed documents, and everything that is wrong with them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from shardwise.data.document_lengths import read_lengths
from shardwise.data.faults import InputError
from shardwise.data.workload import FROZEN_BYTES, MAX_LENGTHS, Training

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_rank": 0}, "workload.lora_rank=0 must be a whole number between 1 and 16384"),
        ({"lora_rank": True}, "workload.lora_rank=True"),
        ({"lora_rank": 8, "lora_modules": "mlp"}, "workload.lora_modules='mlp' must be one of attention, all"),
        ({"lora_modules": "attention"}, "workload.lora_modules='attention' needs workload.lora_rank"),
        ({"base_precision": "nf4"}, "workload.base_precision='nf4' needs workload.lora_rank"),
        ({"lora_rank": 8, "base_precision": "int3"}, "workload.base_precision='int3'"),
        (
            {"lora_rank": 8, "base_precision": "nf4", "precision": "fp8"},
            "workload.precision='fp8' must be bf16 or fp16",
        ),
        ({"lengths": []}, "workload.lengths must be a list of 1 to"),
        ({"lengths": "long"}, "workload.lengths must be a list of 1 to"),
        ({"lengths": ((1, 1),) * (MAX_LENGTHS + 1)}, "workload.lengths must be a list of 1 to"),
        ({"lengths": [(512,)]}, "workload.lengths[0]=(512,) must be a pair"),
        ({"lengths": [(512, 1), (0, 1)]}, "workload.lengths[1]: length=0 must be a number from 1"),
        ({"lengths": [(512, -1)]}, "workload.lengths[0]: share=-1"),
        ({"lengths": [(512, float("nan"))]}, "share=nan"),
        ({"expert_imbalance": 0.5}, "workload.expert_imbalance=0.5 must be a number from 1 (balanced)"),
        ({"expert_imbalance": float("inf")}, "workload.expert_imbalance=inf"),
        ({"expert_capacity": 0}, "workload.expert_capacity=0 must be a number above 0, at most 1000"),
        ({"expert_capacity": float("nan")}, "workload.expert_capacity=nan"),
        ({"expert_capacity": 1, "pad_experts": 1}, "workload.pad_experts=1 must be true or false"),
        ({"pad_experts": True}, "workload.pad_experts=True needs workload.expert_capacity"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Training(1024, 8, **fields)


def test_a_document_has_the_fields_that_are_used_and_reads_back() -> None:
    plain = Training(1024, 8)
    assert not {"lora_rank", "lora_modules", "base_precision", "lengths"} & set(plain.to_dict())
    tuned = Training(1024, 8, lora_rank=8, lora_modules="attention", lengths=[(100, 3), [700, 1]])  # type: ignore[list-item]
    dropping = Training(1024, 8, expert_capacity=1.25, pad_experts=True)
    assert dropping.to_dict().keys() - plain.to_dict().keys() == {"expert_capacity", "pad_experts"}
    for workload in (plain, tuned, dropping):
        assert Training(**workload.to_dict()) == workload
    assert hash(tuned) != hash(plain)


def test_tokens_of_documents_add_up_and_long_ones_are_cut() -> None:
    assert Training(1000, 8).documents == ()
    assert Training(1000, 8, lengths=[(100, 3), (700, 1)]).documents == ((100.0, 0.3), (700.0, 0.7))
    assert Training(1000, 8, lengths=[(2500, 7)]).documents == ((500.0, 0.2), (1000.0, 0.8))


def test_nf4_with_double_quantisation_takes_4_127_bits() -> None:
    assert FROZEN_BYTES["nf4"] * 8 == pytest.approx(4.127, abs=1e-3)


def test_a_csv_of_lengths_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("length,count,source\n100,3,a\n700, 1,b\n")
    assert read_lengths(path) == ((100, 3), (700, 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("length\n100\n", ["column count is missing"]),
        ("length,count\n", ["0 lengths, between 1 and"]),
        ("length,count\n100,3\nx,0\n", ["line 3: length='x' must be", "line 3: count='0' must be"]),
        ("length,count\n100\n", ["line 2: count=None"]),
        ("length,count\n" + "1,1\n" * (MAX_LENGTHS + 1), ["10001 lengths"]),
        ("length,count\n" + "-1,1\n" * 50, ["line 2: length='-1'", "30 more like these"]),
        ("length,count\n" + "9" * 1_000_001, ["larger than 1000000 bytes"]),
        (
            "length,count\n99999999999,1\n",
            ["line 2: length='99999999999' must be a whole number between 1 and 67108864"],
        ),
    ],
)
def test_every_fault_of_a_csv_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_lengths(path)
    told = "\n".join(caught.value.faults)
    assert all(word in told for word in words), told


def test_a_file_that_is_no_csv_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00length")
    for name in ("binary", "absent"):
        with pytest.raises(InputError, match="not a readable CSV"):
            read_lengths(tmp_path / name)
