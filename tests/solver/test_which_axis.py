"""Which axis wins where: from 1B to 405B parameters, a million tokens, experts and Mamba, each with measured rows or the
argument that stands in for them."""

from __future__ import annotations

import csv
import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import shardwise as sw
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.pareto import pareto_front
from shardwise.solver.search import Search
from shardwise.solver.solve import build_instance, solve

if TYPE_CHECKING:
    from shardwise.data.plan import Degrees
    from shardwise.solver.result import Result

ROWS = Path(__file__).parents[2] / "data" / "measured" / "training_calibration.csv"
LONG = ("llama-3.1-405b", "dgx-h100:2048", 131072, 128)


@lru_cache(maxsize=32)
def best(
    model: str, cluster: str, seq_len: int, batch: int, objective: str = "step-time", limits: tuple[str, ...] = ()
) -> Result:
    result = solve(model, cluster, sw.Training(seq_len, batch), objective=objective, limits=limits, workers=1)
    assert result.status == "OPTIMAL"
    return result


def degrees(result: Result) -> Degrees:
    assert result.plan is not None
    return result.plan.degrees


@lru_cache(maxsize=1)
def measured() -> list[dict[str, str]]:
    with ROWS.open() as file:
        return [row for row in csv.DictReader(file) if row["oom"] not in ("1", "1.0")]


def test_one_billion_parameters_on_eight_devices_want_data_parallelism_alone() -> None:
    """No measured row has dp=8 (the nanotron sweep has none); of those with eight devices the two with the most replicas
    per tensor- and pipeline-parallel group are among the three fastest. 1.2 B parameters with their states are 20 GB, and
    fit one device beside the activations, so nothing is won by splitting a layer."""
    d = degrees(best("llama-3.2-1b", "dgx-h100:1", 4096, 1024))
    assert (d.tp, d.cp, d.pp, d.dp) == (1, 1, 1, 8)
    sweep = [row for row in measured() if row["id"].startswith("nanotron_8g") and row["tokens_per_s_per_gpu"]]
    fastest = max(sweep, key=lambda row: float(row["tokens_per_s_per_gpu"]))
    assert float(fastest["dp"]) == max(float(row["dp"]) for row in sweep)


def test_thirteen_billion_on_sixty_four_devices_want_little_model_parallelism() -> None:
    """Aleph Alpha's sweep (arXiv 2311.05610): its eight best layouts of 13B on 64 A100 split the model two ways at most."""
    d = degrees(best("llama-2-13b", "dgx-a100:8", 2048, 2048))
    assert d.tp * d.pp * d.cp <= 2
    sweep = [
        row
        for row in measured()
        if row["id"].startswith("aleph") and "13B" in row["model"] and float(row["n_gpus"]) == 64 and row["mfu"]
    ]
    sweep.sort(key=lambda row: -float(row["mfu"]))
    assert all(float(row["tp"]) * float(row["pp"]) <= 2 for row in sweep[:8])


def test_a_hundred_and_seventy_five_billion_on_a_thousand_want_tensor_and_pipeline_parallelism() -> None:
    """The measured rows of 175B and more parameters (Korthikanti et al., arXiv 2205.05198; BigScience) all have both."""
    d = degrees(best("gpt-3-175b", "dgx-a100:128", 2048, 1536))
    assert d.tp > 1
    assert d.pp > 1
    assert d.cp == 1
    rows = [row for row in measured() if row["id"].startswith(("kort22_t5_175B", "bs176")) and row["mfu"]]
    rows = [row for row in rows if float(row["n_params_b"]) >= 170]
    assert rows
    assert all(float(row["tp"]) > 1 and float(row["pp"]) > 1 for row in rows)


def test_a_million_tokens_want_context_parallelism() -> None:
    """Without it one sequence would lie on tp devices; tp beyond a node is slow and eight key/value heads end it. The
    measured rows with the longest sequences a device have it."""
    d = degrees(best("llama-3.1-8b", "dgx-h100:64", 1048576, 32))
    assert d.cp >= 8
    assert any(float(row["cp"] or 1) > 1 for row in measured())


def test_a_mamba_model_that_fits_a_device_wants_data_parallelism() -> None:
    """2.7 B parameters without attention fit one device; no measured row has such a model, the argument is that of 1B."""
    d = degrees(best("mamba-2-2.7b", "dgx-h100:8", 4096, 512))
    assert (d.tp, d.cp, d.pp, d.dp) == (1, 1, 1, 64)


def test_a_mixture_of_experts_wants_expert_parallelism() -> None:
    """30 B parameters do not fit one device, 3 B of them are active: spreading experts moves less than splitting layers.
    Every measured row with 128 experts or more spreads them."""
    d = degrees(best("qwen3-30b-a3b", "dgx-h100:8", 4096, 512))
    assert d.ep > 1
    assert d.tp == 1
    many = [row for row in measured() if "experts" in row["moe"] and any(n in row["moe"] for n in ("128", "256"))]
    assert all(float(row["ep"] or 1) > 1 for row in many)


def test_long_sequences_of_a_large_model_want_context_parallelism_three_times_over() -> None:
    """Llama-3.1-405B at 131,072 tokens on 16,384 devices: no plan without context parallelism, with tensor parallelism in
    the node, is within three times the best one. The bound of the second search is enough to tell."""
    result = best(*LONG)
    assert degrees(result).cp > 1
    assert result.value is not None
    model, cluster, seq_len, batch = LONG
    without = Search(build_instance(model, cluster, sw.Training(seq_len, batch), limits=["cp=1", "tp<=8"]))
    without.enumerate()
    without.bound(len(without.waiting), math.inf)
    assert min(own.step_s.min() for own in without.bounded) >= 3 * result.value


def test_the_published_layout_of_the_long_405b_run_is_legal_and_fits() -> None:
    """Dubey et al., arXiv 2407.21783, table 4: tp 8, cp 16, pp 16, dp 8; here with a layer of each chunk repeated."""
    model, cluster, seq_len, batch = LONG
    instance = build_instance(model, cluster, sw.Training(seq_len, batch))
    layout = degrees_from(instance, tp=8, cp=16, pp=16, dp=8, vpp=4)
    plan = plan_from_degrees(instance, layout, recompute="full", recompute_layers=1)
    evaluation = sw.evaluate(instance, plan)
    assert evaluation.legal
    assert evaluation.fits


@pytest.mark.parametrize(
    ("model", "cluster", "seq_len", "batch", "expert"),
    [
        ("qwen3-235b-a22b", "dgx-h100:32", 4096, 2048, True),
        ("nemotron-h-56b", "dgx-h100:32", 8192, 768, False),
        ("nemotron-3-nano-30b-a3b", "dgx-h100:4", 8192, 512, True),
    ],
)
def test_mixtures_of_experts_and_hybrids_are_closed(
    model: str, cluster: str, seq_len: int, batch: int, expert: bool
) -> None:
    result = best(model, cluster, seq_len, batch)
    assert (degrees(result).ep > 1) == expert
    assert result.report["candidates"]["placements_expanded"] <= 8000


def test_the_plan_of_least_energy_on_the_same_devices_is_not_the_fastest() -> None:
    case = ("llama-3.1-8b", "dgx-h100:2", 8192, 128)
    fastest, leanest = best(*case), best(*case, "energy", ("devices=16",))
    instance = build_instance(*case[:2], sw.Training(*case[2:]))
    assert degrees(fastest).devices == degrees(leanest).devices == 16
    assert fastest.plan is not None
    assert leanest.plan is not None
    quick, lean = (sw.evaluate(instance, plan) for plan in (fastest.plan, leanest.plan))
    assert quick.energy is not None
    assert lean.energy is not None
    assert lean.energy.joules_per_token.value < quick.energy.joules_per_token.value
    assert quick.step_time_s < lean.step_time_s


def test_points_of_the_front_do_not_dominate_each_other_and_carry_bounds() -> None:
    instance = build_instance("llama-3.1-8b", "dgx-h100:1", sw.Training(8192, 64))
    front = pareto_front(instance, "energy", workers=1)
    assert front.complete
    assert len(front.points) >= 2
    assert front.fastest.value is not None
    assert front.points[0].step_time_s <= front.fastest.value * (1 + 1e-5)
    for faster, slower in zip(front.points, front.points[1:], strict=False):
        assert faster.step_time_s < slower.step_time_s
        assert faster.value > slower.value
    for point in front.points:
        assert point.result.bound is not None
        assert point.result.bound <= point.value
        assert point.result.evaluation is not None
        assert point.result.evaluation.step_time_s <= point.deadline_s
