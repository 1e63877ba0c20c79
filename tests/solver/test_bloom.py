"""BLOOM's hand sweep of 2022 on 384 A100: what ran out of memory, which layout is best, how micro-batches behave.

Measured: bigscience-workshop/bigscience train/tr11-176B-ml/chronicles-prequel.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pytest

from shardwise.data.cluster_catalog import load_cluster
from shardwise.data.hf_config import model_from_config
from shardwise.data.instance import Instance
from shardwise.data.profile import load_profile
from shardwise.data.rules import FREE
from shardwise.data.workload import Training
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.evaluate import Evaluation, evaluate
from shardwise.solver.validate import TIE


@dataclass(frozen=True)
class Layout:
    tp: int
    pp: int
    dp: int
    micro_batch: int


RAN = (
    Layout(4, 12, 8, 2), Layout(4, 6, 16, 2), Layout(2, 12, 16, 2), Layout(8, 6, 8, 4), Layout(8, 8, 6, 4),
    Layout(8, 4, 12, 4), Layout(8, 12, 4, 4), Layout(8, 2, 24, 2), Layout(8, 2, 24, 1), Layout(1, 48, 8, 1),
)  # fmt: skip
RAN_OUT = (Layout(8, 1, 48, 1), Layout(2, 6, 32, 1), Layout(2, 6, 32, 2))
BEST = RAN[0]


@lru_cache(maxsize=64)
def evaluated(layout: Layout, layers: int = 72, nodes: int = 48) -> tuple[Evaluation, float]:
    """The evaluation, and seconds per sequence."""
    config = {
        "model_type": "bloom", "hidden_size": 14336, "n_layer": layers, "n_head": 64, "vocab_size": 250680,
        "tie_word_embeddings": True,
    }  # fmt: skip
    batch = 2048 if 2048 % (layout.dp * layout.micro_batch) == 0 else 2016
    instance = Instance(
        model_from_config(config, "bloom"), load_cluster(f"jean-zay:{nodes}"),
        Training(2048, batch, precision="fp16", attention="unfused"), rules=FREE, profile=load_profile("megatron-2021"),
    )  # fmt: skip
    degrees = degrees_from(
        instance, tp=layout.tp, pp=layout.pp, dp=layout.dp, micro_batch=layout.micro_batch, sequence_parallel=False
    )
    evaluation = evaluate(instance, plan_from_degrees(instance, degrees, recompute="full"))
    return evaluation, evaluation.step_time_s / batch


@pytest.mark.parametrize("layout", RAN)
def test_what_ran_is_called_fitting(layout: Layout) -> None:
    assert evaluated(layout)[0].fits


@pytest.mark.parametrize("layout", RAN_OUT)
def test_what_ran_out_of_memory_is_called_infeasible(layout: Layout) -> None:
    evaluation, _ = evaluated(layout)
    assert not evaluation.fits
    assert evaluation.verdict in ("tight", "does not fit")


def test_the_best_layout_is_in_the_top_three() -> None:
    # Times within the tie of repeated runs are not told apart; at most two layouts may be faster by more than that.
    best = evaluated(BEST)[1]
    faster = [layout for layout in RAN if evaluated(layout)[1] < best / (1 + TIE)]
    assert len(faster) <= 2


def test_very_deep_pipelines_without_tensor_parallelism_are_clearly_slower() -> None:
    assert evaluated(Layout(1, 48, 8, 1))[1] > 1.15 * evaluated(BEST)[1]


@pytest.mark.parametrize(("layers", "pp", "dp", "nodes"), [(78, 6, 8, 48), (80, 10, 4, 40)])
def test_the_best_micro_batch_is_neither_the_smallest_nor_the_largest(
    layers: int, pp: int, dp: int, nodes: int
) -> None:
    found = {m: evaluated(Layout(8, pp, dp, m), layers, nodes) for m in (1, 2, 4, 8)}
    times = {m: seconds for m, (_, seconds) in found.items()}
    assert min(times, key=lambda m: times[m]) in (2, 4)
    memory = [found[m][0].peak_memory_bytes for m in (1, 2, 4, 8)]
    assert memory == sorted(memory)
    assert all(found[m][0].fits for m in (1, 2, 4, 8))
