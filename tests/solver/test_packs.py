"""Rule packs from one end to the other: what they bring along, what is searched under them, and why there is no plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner
from universe import instance_of, llama

import shardwise as sw
from shardwise.data.profile import load_profile
from shardwise.data.rules import PACKS
from shardwise.solver.cli import app
from shardwise.solver.default_plan import degrees_from, plan_from_degrees

if TYPE_CHECKING:
    from pathlib import Path

SMALL = "llama-3.1-8b", "dgx-h100:1"
TRAINING = "--seq-len", "1024", "--global-batch", "16"


@pytest.mark.parametrize("pack", PACKS)
def test_every_pack_names_a_profile_that_is_used_where_no_other_is_asked_for(pack: str) -> None:
    assert sw.build_instance(*SMALL, sw.Training(1024, 8), rules=pack).profile == load_profile(PACKS[pack].profile)
    assert sw.build_instance(*SMALL, sw.Training(1024, 8), rules=pack, profile="fsdp1").profile.name == "fsdp1"


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b"])
def test_degrees_that_are_not_given_are_legal_in_every_pack(pack: str, model: str) -> None:
    instance = sw.build_instance(model, "dgx-h100:1", sw.Training(1024, 64), rules=pack)
    every: tuple[dict[str, Any], ...] = ({}, {"tp": 2}, {"tp": 8}, {"cp": 2})
    for given in every:
        plan = plan_from_degrees(instance, degrees_from(instance, **given))
        assert sw.evaluate(instance, plan).faults == ()


@pytest.mark.parametrize("pack", PACKS)
def test_plan_and_evaluate_take_the_pack_by_name(pack: str, tmp_path: Path) -> None:
    runner, out = CliRunner(), tmp_path / "out.json"
    chosen = "--rules", pack, "--json", str(out)
    assert runner.invoke(app, ["plan", "training", *SMALL, *TRAINING, *chosen, "--fix", "cp=1", "-q"]).exit_code == 0
    found = json.loads(out.read_text())
    assert found["status"] == "OPTIMAL"
    assert found["plan"]["instance"]["rules"] == pack
    assert found["report"]["universe"]["rules"] == f"{pack} {PACKS[pack].version}"
    assert runner.invoke(app, ["evaluate", *SMALL, *TRAINING, *chosen, "--tp", "2"]).exit_code in (0, 1)
    assert json.loads(out.read_text())["faults"] == []


def test_the_catalogue_lists_every_pack_and_what_it_says(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert CliRunner().invoke(app, ["catalog", "rules", "--json", str(out)]).exit_code == 0
    assert {row["name"]: row["version"] for row in json.loads(out.read_text())} == {
        name: pack.version for name, pack in PACKS.items()
    }
    assert CliRunner().invoke(app, ["catalog", "rules", "torchtitan", "--json", str(out)]).exit_code == 0
    rules = {row["rule"]: row["value"] for row in json.loads(out.read_text())}
    assert rules["zero_stages"] == [0, 2, 3]
    assert rules["schedules"] == ["1f1b", "interleaved-1f1b", "gpipe", "zb-v", "dualpipe-v"]


@pytest.mark.parametrize(
    ("pack", "limit", "reason"),
    [
        ("accelerate", "pp>=2", "pp=2: accelerate has no pipeline parallelism"),
        ("accelerate", "ep=4", "ep=4: accelerate has no expert parallelism"),
        ("deepspeed", "sequence_parallel=1", "sequence_parallel=1: deepspeed has no sequence parallelism"),
        ("deepspeed", "schedule=gpipe", "schedule=gpipe is not one of 1f1b (deepspeed)"),
        ("torchtitan", "zero=1", "the limits on zero admit none of the stages 0, 2, 3 (torchtitan)"),
        ("torchtitan", "tp=8", "tp=8 does not divide num_key_value_heads=4 (torchtitan does not replicate them)"),
    ],
)
def test_a_limit_that_the_pack_cannot_keep_is_the_reason(pack: str, limit: str, reason: str) -> None:
    result = sw.solve(instance=instance_of(llama(), (8,), rules=pack, limits=(limit,)), workers=1)
    assert result.status == "INFEASIBLE"
    assert result.reason[0].startswith(reason)
