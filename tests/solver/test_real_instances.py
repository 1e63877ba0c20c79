"""Real models on real clusters: proven optimal, with effort held by deterministic proxies instead of seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest

from shardwise.data.profile import load_profile
from shardwise.data.workload import Training
from shardwise.formulations.splits import SplitSearch
from shardwise.solver.close import Statistics
from shardwise.solver.evaluate import Evaluation, evaluate
from shardwise.solver.search import UNLIMITED, Search
from shardwise.solver.solve import Run, build_instance, solve

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan
    from shardwise.formulations.candidates import Candidate
    from shardwise.solver.result import Result

BLOOM = ("tp=4", "pp=12", "vpp=1", "micro_batch=2", "recompute=full")


@lru_cache(maxsize=32)
def solved(
    model: str, cluster: str, seq_len: int, batch: int, limits: tuple[str, ...] = (), workers: int = 1
) -> Result:
    return solve(model, cluster, Training(seq_len, batch), limits=limits, workers=workers)


def placements_and_effort(result: Result) -> tuple[int, int, float]:
    report = result.report
    return (
        report["candidates"]["placements_expanded"],
        report["candidates"]["solved"],
        report["cp_sat"]["deterministic_time"],
    )


@pytest.mark.parametrize(
    ("model", "cluster", "seq_len", "batch", "most_placements"),
    [
        ("llama-3.1-70b", "dgx-h100:8", 8192, 512, 2500),
        ("llama-3.1-405b", "dgx-h100:2048", 8192, 2048, 2500),
        ("gpt-3-175b", "dgx-a100:64", 2048, 1536, 2500),
        ("llama-3.1-70b", "dgx-h100:8192", 8192, 8192, 6500),
        # The splits of several candidates are within 0.1 % of each other: too close for CP-SAT to tell apart soon.
        ("llama-3.1-70b", "dgx-h200:8", 16384, 512, 2500),
    ],
)
def test_large_instances_are_closed_by_bounds_and_little_search(
    model: str, cluster: str, seq_len: int, batch: int, most_placements: int
) -> None:
    result = solved(model, cluster, seq_len, batch)
    assert result.status == "OPTIMAL"
    assert result.gap is not None
    assert result.gap < 1e-5
    placements, closed, deterministic = placements_and_effort(result)
    assert placements <= most_placements
    assert closed <= 24
    assert deterministic < 2.0


class CountedSplits(SplitSearch):
    """Counts the dynamic programs over several stages that find nothing."""

    empty = 0

    def _stage_choices(self, candidate: Candidate, *arguments: Any) -> list[Any]:
        found = super()._stage_choices(candidate, *arguments)
        self.empty += not found and candidate.degrees.pp > 1
        return found


@pytest.mark.parametrize(("model", "most_empty"), [("qwen3-30b-a3b", 20), ("nemotron-h-56b", 10), ("deepseek-v2", 40)])
def test_layers_that_do_not_reach_the_end_are_told_without_a_dynamic_program(model: str, most_empty: int) -> None:
    """(W2) tells nearly all of them: dozens of candidates with one chunk a stage are tried."""
    instance = build_instance(model, "dgx-h100:8", Training(4096, 512), limits=("vpp=1",))
    search = Search(instance)
    search.splits = counted = CountedSplits(instance, search.tables)
    assert Run(Statistics(), 1, 0, True, 0).whole(search)
    assert search.incumbent is not None
    assert search.tally.counts["pruned_by_split_bound"] > 50
    assert counted.empty <= most_empty


class CountedSearch(Search):
    """Counts the candidates that are tried, by row and limit."""

    def __init__(self, instance: Instance) -> None:
        super().__init__(instance)
        self.tries: Counter[tuple[Candidate, bool]] = Counter()

    def try_candidate(self, candidate: Candidate, time_units: Any, limit: int, most: int = 64) -> Any:
        self.tries[candidate, limit >= UNLIMITED] += 1
        return super().try_candidate(candidate, time_units, limit, most)


def test_a_search_without_a_plan_tries_no_candidate_twice_nor_one_that_fits_nowhere_in_another_place() -> None:
    instance = build_instance("llama-3.1-405b", "dgx-h200:64", Training(4096, 3360), limits=("devices<=51", "tp=2"))
    search = CountedSearch(instance)
    assert Run(Statistics(), 1, 0, True, 0).whole(search)
    assert search.incumbent is None
    assert max(search.tries.values()) == 1
    limited, unlimited = (sum(own == kind for _, own in search.tries) for kind in (False, True))
    assert 0 < unlimited < limited / 2


def test_every_candidate_is_accounted_for() -> None:
    counts = solved("llama-3.1-70b", "dgx-h100:8", 8192, 512).report["candidates"]
    rows_left = counts["enumerated"] - counts["pruned_by_memory"] - counts["pruned_by_work_bound"]
    rows_left -= counts["pruned_by_shape_bound"] + counts["pruned_by_dominance"]
    # Each row left is expanded into its placements, and each of those is pruned or closed.
    assert counts["placements_expanded"] >= rows_left
    ways = ("pruned_by_placement_bound", "pruned_by_split_bound", "pruned_by_tie_order", "solved")
    assert counts["placements_expanded"] == sum(counts.get(way, 0) for way in ways)


@pytest.mark.parametrize(
    ("cluster", "batch"), [("dgx-h100:6", 480), ("dgx-h100:12", 480), ("dgx-h100:24", 480), ("dgx-h100:42", 504)]
)
def test_node_counts_that_are_no_powers_of_two_work(cluster: str, batch: int) -> None:
    result = solved("llama-3.1-70b", cluster, 8192, batch)
    assert result.status == "OPTIMAL"
    assert result.plan is not None
    assert result.evaluation is not None
    devices = 8 * int(cluster.split(":")[1])
    assert result.plan.degrees.devices + result.evaluation.idle_devices == devices
    assert result.report["idle_devices"] == result.evaluation.idle_devices


@pytest.mark.parametrize("devices", [5, 7])
def test_part_of_a_node_works(devices: int) -> None:
    result = solved("qwen3-8b", "dgx-h100:1", 4096, 70, (f"devices<={devices}",))
    assert result.status == "OPTIMAL"
    assert result.plan is not None
    assert result.plan.degrees.devices == devices


def bloom(plan: Plan, layers: tuple[int, ...]) -> Plan:
    """`plan` with another split and every layer recomputed."""
    stages = tuple(
        replace(stage, chunks=(n,), recompute_layers=max(layers)) for stage, n in zip(plan.stages, layers, strict=True)
    )
    return replace(plan, stages=stages)


def bloom_against_megatron(limits: tuple[str, ...] = BLOOM) -> tuple[Result, Evaluation]:
    """The solver's BLOOM plan, and Megatron's split with embedding and loss accounted for as a layer each."""
    result = solved("bloom-176b", "dgx-a100:48", 2048, 2048, limits)
    assert result.plan is not None
    instance = build_instance("bloom-176b", "dgx-a100:48", Training(2048, 2048), limits=limits)
    return result, evaluate(instance, bloom(result.plan, (5, *[6] * 10, 5)))


def test_bloom_takes_layers_off_the_stage_that_holds_the_head() -> None:
    result, megatron = bloom_against_megatron()
    assert result.status == "OPTIMAL"
    assert result.plan is not None
    assert result.evaluation is not None
    layers = [stage.layers for stage in result.plan.stages]
    assert sum(layers) == 70
    assert layers[-1] < min(layers[1:-1])
    assert megatron.admitted
    assert result.evaluation.step_time_s < megatron.step_time_s
    # The faster split pays with memory on its first stage: 6 layers and the embedding instead of 5.
    assert result.evaluation.peak_memory_bytes > megatron.peak_memory_bytes


def test_bloom_moves_off_the_split_that_a_memory_limit_forbids() -> None:
    free, megatron = bloom_against_megatron()
    assert free.evaluation is not None
    between_gb = (free.evaluation.peak_memory_bytes + megatron.peak_memory_bytes) / 2e9
    tight = solved("bloom-176b", "dgx-a100:48", 2048, 2048, (*BLOOM, f"memory_gb<={between_gb:.2f}"))
    assert tight.status == "OPTIMAL"
    assert tight.plan is not None
    assert free.plan is not None
    assert tight.plan.stages[0].layers < free.plan.stages[0].layers
    assert tight.evaluation is not None
    assert free.evaluation.step_time_s <= tight.evaluation.step_time_s <= megatron.step_time_s
    assert tight.evaluation.peak_memory_bytes <= between_gb * 1e9


@pytest.mark.parametrize("case", [("llama-3.1-70b", "dgx-h100:8", 8192, 512), ("qwen3-8b", "dgx-h100:2", 4096, 64)])
def test_the_same_plan_with_one_and_two_workers(case: tuple[str, str, int, int]) -> None:
    one, two = solved(*case), solved(*case, (), 2)
    assert one.plan == two.plan
    assert one.value == two.value


def test_a_model_that_cannot_fit_is_proven_infeasible_by_memory() -> None:
    result = solved("llama-3.1-405b", "dgx-h100:1", 8192, 64)
    assert result.status == "INFEASIBLE"
    assert "memory" in result.reason[0]
    assert "85.9 GB usable" in result.reason[0]


def test_a_degree_that_no_plan_can_have_is_explained() -> None:
    result = solved("qwen2.5-14b", "dgx-h100:8", 4096, 64, ("tp=16",))
    assert result.status == "INFEASIBLE"
    assert "tp=16 does not divide num_attention_heads=40" in result.reason


def test_mixture_of_experts_and_hybrids_solve_with_the_axes_so_far() -> None:
    for model, cluster in (("qwen3-30b-a3b", "dgx-h100:8"), ("nemotron-h-56b", "dgx-h100:8")):
        result = solved(model, cluster, 4096, 512)
        assert result.status == "OPTIMAL", model


def test_a_time_limit_returns_a_bound_that_is_not_above_the_optimum() -> None:
    optimum = solved("llama-3.1-70b", "dgx-h100:8", 8192, 512)
    assert optimum.value is not None
    for seconds in (0.05, 0.3, 0.6):
        result = solve("llama-3.1-70b", "dgx-h100:8", Training(8192, 512), time_limit_s=seconds, workers=1)
        assert result.status in ("UNKNOWN", "FEASIBLE", "OPTIMAL")
        if result.bound is not None:
            assert result.bound <= optimum.value


def test_pruning_keeps_the_optimum_where_sync_contends_across_many_nodes() -> None:
    """The clusters of the exhaustive cross-check have too few nodes for (T4) to grow."""
    values = []
    for contention, prune in ((2.0, True), (2.0, False), (0.0, True)):
        profile = replace(load_profile("megatron-core"), sync_contention=contention)
        instance = build_instance(
            "llama-3.1-8b", "dgx-h100:32", Training(4096, 256),
            limits=("devices=256", "tp>=4", "tp<=8", "pp<=4", "vpp=1", "micro_batch=1", "zero<=1", "cp=1"),
        )  # fmt: skip
        result = solve(instance=replace(instance, profile=profile), prune=prune, workers=1)
        assert result.status == "OPTIMAL"
        assert result.value is not None
        values.append(result.value)
    contended, without_pruning, quiet = values
    assert contended == pytest.approx(without_pruning, rel=1e-6)
    assert contended > quiet
