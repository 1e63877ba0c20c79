"""Whole batches: each cell once and none lost, whoever is killed, interrupted, or at work beside."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest
from batch_samples import CELLS, SAMPLE, command, results, start, write_sample

import shardwise as sw
from shardwise.solver.batch import missing, wanted
from shardwise.solver.catalogue_file import parse_catalogue
from shardwise.solver.cells import failed, solve_task, tasks_of
from shardwise.solver.engines import LocalEngine
from shardwise.solver.store import FILE, Held, finished_cells, load_store

if TYPE_CHECKING:
    from shardwise.solver.batch import BatchProgress

KILLS = 3
ALIVE_S = 60
"""How long a process that should end is waited for."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the sample, solved in one go."""
    folder = tmp_path_factory.mktemp("undisturbed")
    reports: list[BatchProgress] = []
    result = sw.batch(write_sample(folder), folder / "store", on_progress=reports.append)
    assert result.finished
    assert (result.cells, result.stored, result.solved) == (CELLS, 0, CELLS)
    assert result.statuses == {"OPTIMAL": CELLS}
    assert [report.done for report in reports] == list(range(CELLS + 1))
    assert reports[-1].left_s == 0
    return folder / "store"


def test_a_second_run_solves_nothing(undisturbed: Path) -> None:
    before = load_store(undisturbed)
    assert missing(parse_catalogue(SAMPLE), undisturbed) == (CELLS, 0)
    result = sw.batch(parse_catalogue(SAMPLE), undisturbed)
    assert (result.stored, result.solved, result.finished) == (CELLS, 0, True)
    pd.testing.assert_frame_equal(load_store(undisturbed), before)


def test_a_row_says_what_the_plan_says(undisturbed: Path) -> None:
    table = load_store(undisturbed)
    for _, row in table.iterrows():
        document = sw.stored_result(undisturbed, row.cell)
        evaluation = document["evaluation"]
        assert row.value == document["value"]
        assert row.bound == document["bound"] <= row.value
        assert row.gap == document["gap"]
        assert row.step_time_s == evaluation["step_time_s"]
        assert row.tp * row.pp * row.dp * row.cp == row.devices_used == evaluation["devices"]
        assert row.peak_memory_gb == evaluation["peak_memory_gb"] <= row.capacity_gb
        own = {"step-time": row.step_time_s, "cost": row.usd_per_million_tokens, "energy": row.joules_per_token}
        assert row.value == pytest.approx(own[row.objective], rel=1e-9)
        parts = [name for name in table.columns if f"{name}" in evaluation["parts"]]
        assert len(parts) == len(evaluation["parts"])
        assert sum(row[name] for name in parts) == pytest.approx(row.step_time_s, rel=1e-6)


def test_a_cell_is_what_plan_training_answers(undisturbed: Path) -> None:
    row = load_store(undisturbed).query("cluster == 'dgx-h100:1' and objective == 'cost' and seq_len == 4096").iloc[0]
    result = sw.solve(
        "llama-3.2-1b", "dgx-h100:1", sw.Training(4096, 64), objective="cost", workers=1, top=0
    )  # fmt: skip
    assert (result.status, result.value, result.bound) == (row.status, row.value, row.bound)
    assert result.plan is not None
    assert sw.stored_result(undisturbed, row.cell)["plan"]["degrees"] == result.plan.to_dict()["degrees"]


def test_commands_read_a_cell_of_a_store(undisturbed: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from shardwise.solver.cli import app

    cell = load_store(undisturbed).cell[0]
    for words in (
        ("export", "--to", "megatron-core"),
        ("evaluate", "--plan"),
        ("report", "-o", str(tmp_path / "x.html")),
    ):
        name, *rest = words
        done = CliRunner().invoke(app, [name, *rest, f"{undisturbed}/{cell[:12]}"])
        assert done.exit_code == 0, done.output
    refused = CliRunner().invoke(app, ["export", "--to", "megatron-core", f"{undisturbed}/{'f' * 32}"])
    assert refused.exit_code == 2


def children(pid: int) -> list[int]:
    if not Path(f"/proc/{pid}/task").is_dir():  # ended, or no Linux
        return []
    return [
        int(text) for task in Path(f"/proc/{pid}/task").iterdir() for text in (task / "children").read_text().split()
    ]


def test_killed_at_random_moments_it_resumes_to_the_same_table(undisturbed: Path, tmp_path: Path) -> None:
    draw = random.Random(6)
    catalogue, store, finished = write_sample(tmp_path), tmp_path / "store", 0
    for _ in range(KILLS):
        process = start(catalogue, store)
        least = finished + draw.randint(1, 3)
        while len(held(store)) < least:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        workers = children(process.pid)
        process.kill()
        process.communicate()
        finished = len(results(store))
        assert least <= finished <= CELLS
        until = time.monotonic() + ALIVE_S
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < until, "a process outlives the batch that started it"
            time.sleep(0.05)
        if finished > CELLS - 3:
            break
    last = start(catalogue, store, "--json", "-")
    said = json.loads(last.communicate()[0])
    assert last.returncode == 0
    assert said["stored"] == finished
    assert said["stored"] + said["solved"] == CELLS
    pd.testing.assert_frame_equal(results(store), results(undisturbed))


def held(store: Path) -> dict[str, Held]:
    if not (store / FILE).exists():
        return {}
    try:
        return finished_cells(store)
    except sw.InputError:  # being made
        return {}


def test_two_batches_at_once_solve_each_cell_once(undisturbed: Path, tmp_path: Path) -> None:
    catalogue, store = write_sample(tmp_path), tmp_path / "store"
    both = [start(catalogue, store, "--workers", "1", "--json", "-") for _ in range(2)]
    said = [json.loads(process.communicate()[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(one["solved"] for one in said) == CELLS
    assert all(one["finished"] and one["stored"] + one["solved"] == CELLS for one in said)
    pd.testing.assert_frame_equal(results(store), results(undisturbed))


def test_ctrl_c_finishes_the_cells_at_work_and_exits_3(tmp_path: Path) -> None:
    catalogue, store = write_sample(tmp_path), tmp_path / "store"
    process = start(catalogue, store, "--workers", "1", "--json", "-", start_new_session=True)
    while not held(store):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate()
    document = json.loads(said)
    if document["finished"]:  # the machine was quicker than the signal
        assert process.returncode == 0
        return
    assert process.returncode == 3
    assert "the same command solves what is left" in errors
    assert document["solved"] == len(load_store(store)) > 0
    assert set(load_store(store).status) == {"OPTIMAL"}


def test_a_full_disk_ends_a_batch_with_2_and_leaves_the_store_readable(tmp_path: Path) -> None:
    catalogue, store = write_sample(tmp_path), tmp_path / "store"
    limit = 90_000
    done = subprocess.run(
        command(catalogue, store),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert str(store) in done.stderr
    assert "finished cells are kept" in done.stderr
    kept = load_store(store)
    assert 0 < len(kept) < CELLS
    again = sw.batch(catalogue, store)
    assert (again.stored, again.solved) == (len(kept), CELLS - len(kept))


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = tmp_path / "file" / "store"
    done = subprocess.run(command(write_sample(tmp_path), store), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"store {store}: cannot be written" in done.stderr.replace("\n", "")


def test_a_failing_cell_is_recorded_and_does_not_stop_the_rest(tmp_path: Path) -> None:
    text = """
    models = ["llama-3.2-1b", "llama-3.1-70b"]
    clusters = ["dgx-a100:1"]
    seq_lens = [2048]
    global_batches = [8]
    precisions = ["fp8", "bf16"]
    """
    result = sw.batch(parse_catalogue(text), tmp_path)
    assert result.finished
    assert result.statuses == {"FAILED": 2, "INFEASIBLE": 1, "OPTIMAL": 1}
    table = load_store(tmp_path).set_index(["model", "precision"])
    assert "'fp8' is not supported by A100-SXM-80GB" in table.reason["llama-3.2-1b", "fp8"]
    assert "memory: no plan fits" in table.reason["llama-3.1-70b", "bf16"]
    assert pd.isna(table.reason["llama-3.2-1b", "bf16"])
    assert sorted(cell for cell, _, _ in result.failures) == sorted(table[table.status == "FAILED"].cell)
    assert sw.batch(parse_catalogue(text), tmp_path).solved == 0
    assert sw.batch(parse_catalogue(text), tmp_path, retry_failed=True).solved == 2


def test_a_longer_time_limit_solves_again_what_was_left_open() -> None:
    (task,) = tasks_of(parse_catalogue(ONE).cells)
    assert wanted(task, None, False)
    assert wanted(task, Held("FEASIBLE", 9.0), False)
    assert wanted(task, Held("UNKNOWN", 9.0), False)
    assert not wanted(task, Held("FEASIBLE", 10.0), False)
    assert not wanted(task, Held("UNKNOWN", None), False)
    assert not wanted(task, Held("OPTIMAL", 9.0), False)
    assert not wanted(task, Held("FAILED", 9.0), False)
    assert wanted(task, Held("FAILED", 10.0), True)


ONE = """
models = ["llama-3.2-1b"]
clusters = ["dgx-h100:1"]
seq_lens = [2048]
global_batches = [8]
time_limit_s = 10
"""


def test_a_cell_is_known_by_all_that_its_result_depends_on() -> None:
    def key(text: str) -> str:
        (task,) = tasks_of(parse_catalogue(text).cells)
        return task.key

    keys = [key(ONE)]
    for line in (
        'objectives = ["cost"]', 'precisions = ["fp8"]', 'limits = ["tp<=4"]', 'rules = "free"', "seed = 1", "price = 2.5",
        "deadline_s = 9.0", "solver_workers = 2", "top = 3", "free_chunks = true", 'workload = { optimizer = "sgd" }',
        'profile = "torchtitan"',
    ):  # fmt: skip
        keys.append(key(ONE + line))
    keys.append(key(ONE.replace("[8]", "[16]")))
    keys.append(key(ONE.replace("2048", "4096")))
    keys.append(key(ONE.replace("dgx-h100:1", "dgx-h100:2")))
    keys.append(key(ONE.replace("1b", "3b")))
    assert len(set(keys)) == len(keys)
    assert key(ONE.replace("= 10", "= 20")) == key(ONE + "top = 0") == keys[0]


def test_a_crash_in_one_cell_is_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("shardwise.solver.cells.solve", broken)
    (task,) = tasks_of(parse_catalogue(ONE).cells)
    outcome = solve_task(task)
    assert (outcome.row["status"], outcome.row["reason"]) == ("FAILED", "ZeroDivisionError: by nothing")
    assert outcome.document["reason"] == ["ZeroDivisionError: by nothing"]
    assert failed(task, ("a", "b")).row["reason"] == "a; b"


def test_a_process_that_is_killed_gives_its_task_back_and_is_replaced() -> None:
    (task,) = tasks_of(parse_catalogue(ONE).cells)
    engine = LocalEngine(1, 1)
    try:
        assert engine.idle() == [None]
        engine.submit(task)
        assert engine.idle() == []
        for process in (engine.places[0].pool._processes or {}).values():
            process.kill()
        assert engine.collect(ALIVE_S) == [(task, None)]
        assert engine.idle() == [None]
        engine.submit(task)
        ((again, outcome),) = engine.collect(ALIVE_S)
        assert again is task
        assert outcome is not None
        assert outcome.row["status"] == "OPTIMAL"
        assert engine.idle() == [task.instance_key]
    finally:
        engine.close()


def test_workers_and_solver_workers_fit_the_cores(tmp_path: Path) -> None:
    with pytest.raises(sw.InputError, match="solver_workers=4000 asks for more than"):
        sw.batch(parse_catalogue(ONE + "solver_workers = 4000"), tmp_path)
    with pytest.raises(sw.InputError, match="engine='slurm' must be one of local, ray"):
        sw.batch(parse_catalogue(ONE), tmp_path, engine="slurm")
    with pytest.raises(sw.InputError, match="workers=0"):
        sw.batch(parse_catalogue(ONE), tmp_path, workers=0)
