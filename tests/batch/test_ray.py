"""Cells on a Ray cluster of two nodes, one of which is killed in the midst."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from batch_samples import results

import shardwise as sw
from shardwise.solver.catalogue_file import parse_catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.solver.batch import BatchProgress

ROOT = Path(__file__).parents[2]
CELLS = """
models = ["llama-3.2-1b"]
clusters = ["dgx-h100"]
nodes = [1]
seq_lens = [2048, 4096]
global_batches = [32, 64]
objectives = ["step-time", "cost"]
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A head without cores and two nodes of one core each; and the nodes."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of Ray and of what it leaves open
        from ray.cluster_utils import Cluster

        ray: Any = importlib.import_module("ray")

        small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
        own: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        nodes = [own.add_node(num_cpus=1, object_store_memory=80 * 2**20) for _ in range(2)]
        own.wait_for_nodes()
        ray.init(address=own.address, log_to_driver=False)
        try:
            yield own, nodes
        finally:
            ray.shutdown()
            own.shutdown()


def test_with_a_node_killed_in_the_midst_the_table_is_the_local_one(cluster: tuple[Any, Any], tmp_path: Path) -> None:
    own, nodes = cluster
    catalogue = parse_catalogue(CELLS)
    killed: list[int] = []

    def kill(progress: BatchProgress) -> None:
        if progress.solved >= 2 and not killed:
            own.remove_node(nodes[0], allow_graceful=False)
            killed.append(progress.solved)

    result = sw.batch(catalogue, tmp_path / "ray", engine="ray", on_progress=kill)
    assert killed
    assert killed[0] < result.cells
    assert result.finished
    assert (result.solved, result.statuses) == (8, {"OPTIMAL": 8})
    assert sw.batch(catalogue, tmp_path / "local").solved == 8
    pd.testing.assert_frame_equal(results(tmp_path / "ray"), results(tmp_path / "local"))
