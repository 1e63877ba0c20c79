from __future__ import annotations

from pathlib import Path

import pytest

import shardwise as sw
from shardwise.solver.batch import missing
from shardwise.solver.catalogue_file import MAX_FILE_BYTES, parse_catalogue, read_catalogue
from shardwise.solver.cells import tasks_of

SHIPPED = Path(__file__).parents[2] / "benchmarks" / "catalogue.toml"
BASE = """
models = ["llama-3.2-1b", "llama-3.1-8b"]
clusters = ["dgx-h100", "dgx-a100:3"]
nodes = [1, 2]
seq_lens = [2048]
global_batches = [64]
objectives = ["step-time", "cost"]
"""


def test_lists_are_multiplied_and_a_cluster_that_says_its_nodes_comes_once() -> None:
    cells = parse_catalogue(BASE).cells
    assert len(cells) == 2 * 3 * 2
    assert {(cell.cluster.name, cell.nodes) for cell in cells} == {
        ("dgx-h100:1", 1),
        ("dgx-h100:2", 2),
        ("dgx-a100:3", 3),
    }
    assert [cell.objective for cell in cells[:2]] == ["step-time", "cost"]
    assert {cell.precision for cell in cells} == {"bf16"}


def test_dropped_cells_meet_every_part_of_a_condition() -> None:
    found = parse_catalogue(BASE + 'drop = ["model=llama-3.1-8b, devices<16", "cluster=dgx-a100:3, objective!=cost"]')
    left = {(cell.model.name, cell.cluster.name, cell.objective) for cell in found.cells}
    assert found.dropped == 2 + 2
    assert len(left) == 8
    assert ("llama-3.1-8b", "dgx-h100:1", "cost") not in left
    assert ("llama-3.2-1b", "dgx-h100:1", "cost") in left
    assert ("llama-3.2-1b", "dgx-a100:3", "step-time") not in left
    lean = parse_catalogue(BASE + 'drop = ["bytes_per_param<100"]')
    assert {cell.model.name for cell in lean.cells if cell.nodes == 1} == {"llama-3.2-1b"}


def test_the_last_override_that_a_cell_meets_counts() -> None:
    found = parse_catalogue(
        BASE
        + """
        time_limit_s = 10
        workload = { optimizer = "sgd" }
        [[override]]
        where = "model=llama-3.1-8b"
        time_limit_s = 20
        limits = ["tp=2"]
        [[override]]
        where = "params_b>2, nodes=2"
        time_limit_s = 30
        workload = { attention = "unfused", mtp_layers = 1, expert_capacity = 1.25, pad_experts = true }
        """
    )
    settings = {(cell.model.name, cell.cluster.name): cell.settings for cell in found.cells}
    assert settings["llama-3.2-1b", "dgx-h100:2"].time_limit_s == 10
    assert settings["llama-3.1-8b", "dgx-h100:1"].time_limit_s == 20
    both = settings["llama-3.1-8b", "dgx-h100:2"]
    assert (both.time_limit_s, both.limits) == (30, ("tp=2",))
    experts = {"mtp_layers": 1, "expert_capacity": 1.25, "pad_experts": True}
    assert dict(both.workload) == {"optimizer": "sgd", "attention": "unfused"} | experts


def test_grids_replace_lists_and_a_cell_of_two_grids_is_one() -> None:
    found = parse_catalogue(BASE + '[[grid]]\nnodes = [1]\n[[grid]]\nmodels = ["llama-3.1-8b"]\nseed = 0')
    tasks = tasks_of(found.cells)
    assert len(found.cells) == 8 + 6
    assert len(tasks) == 8 + 2
    assert missing(found, Path("/nowhere")) == (10, 10)


def test_cells_of_one_instance_share_it() -> None:
    tasks = tasks_of(parse_catalogue(BASE).cells)
    assert len({task.key for task in tasks}) == 12
    assert len({task.instance_key for task in tasks}) == 6
    assert len({id(task.instance) for task in tasks}) == 6


def test_files_are_looked_up_beside_the_catalogue(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('family = "dgx-h100"\nnodes = 5\n', encoding="utf-8")
    path = tmp_path / "catalogue.toml"
    path.write_text(BASE.replace("dgx-a100:3", "mine.toml"), encoding="utf-8")
    found = read_catalogue(path)
    assert {cell.nodes for cell in found.cells} == {1, 2, 5}
    assert found.name == "catalogue"


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(sw.InputError) as error:
        parse_catalogue('models = []\nnodes = [0]\nseq_lens = [4096.5]\ncolour = "red"\n[[override]]\nseed = -1')
    told = "\n".join(error.value.faults)
    for path in ("models=", "nodes[0]=0", "seq_lens[0]=4096.5", "colour is not a field", "where is missing", "seed=-1"):
        assert path in told
    with pytest.raises(sw.InputError) as error:
        parse_catalogue(
            """
            models = ["lama"]
            clusters = ["dgx-z900", "dgx-h100:0"]
            seq_lens = [8]
            global_batches = [8]
            objectives = ["speed"]
            drop = ["size>3", "model<a", "nodes=x", "what"]
            """
        )
    told = "\n".join(error.value.faults)
    for words in (
        "'speed' must be one of",
        "unknown variable",
        "model takes = or !=",
        "takes a number",
        "cannot be read",
    ):
        assert words in told
    with pytest.raises(sw.InputError) as error:
        parse_catalogue(
            BASE.replace("llama-3.2-1b", "lama").replace("dgx-h100", "dgx-z900")
            + 'limits = ["tq=4"]\nrules = "none"\nprofile = "nothing"\nworkload = { colour = 1 }'
        )
    told = "\n".join(error.value.faults)
    for words in ("lama", "dgx-z900", "unknown variable 'tq'", "'none'", "'nothing'", "colour is not a field"):
        assert words in told


def test_sizes_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(sw.InputError, match="more than 100,000 cells"):
        parse_catalogue(BASE.replace("[2048]", str(list(range(1, 10_001)))))
    path = tmp_path / "large.toml"
    path.write_text("#" * (MAX_FILE_BYTES + 1), encoding="utf-8")
    with pytest.raises(sw.InputError, match="larger than"):
        read_catalogue(path)
    with pytest.raises(sw.InputError, match="cannot be read"):
        read_catalogue(tmp_path / "nothing.toml")
    with pytest.raises(sw.InputError, match="not TOML"):
        parse_catalogue("models = [")
    with pytest.raises(sw.InputError, match="no cell is left"):
        parse_catalogue(BASE + 'drop = ["nodes>=1"]')


def test_the_shipped_catalogue_has_the_cells_that_it_promises() -> None:
    cells = read_catalogue(SHIPPED).cells
    assert len(tasks_of(cells)) == len(cells) >= 240
    assert len({cell.model.name for cell in cells}) == 8
    assert len({cell.family for cell in cells}) == 6
    assert len({cell.seq_len for cell in cells}) == 2
    assert len({cell.objective for cell in cells}) == 2
    assert len({cell.nodes for cell in cells}) > 2
    assert all(task.instance is not None for task in tasks_of(cells))


def test_an_override_that_no_cell_meets_is_told() -> None:
    with pytest.raises(sw.InputError, match=r"override\[0\]\.where='model=smal' is met by no cell"):
        parse_catalogue(BASE + '\n[[override]]\nwhere = "model=smal"\ntime_limit_s = 20\n')
