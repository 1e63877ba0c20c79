"""The published runs, predicted: the errors that are claimed, kept true."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardwise.data.faults import InputError
from shardwise.data.runs import run_of, shipped_runs
from shardwise.solver.evaluate import verdict_of
from shardwise.solver.run_table import COLUMNS
from shardwise.solver.validate import Validation, kendall_tau, validate

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.solver.validate import SourceErrors

MOST_ERROR = 0.12
FEW_ROWS = 5


@lru_cache(maxsize=1)
def shipped() -> Validation:
    return validate(shipped_runs(), leave_out=True)


def of_source(name: str) -> SourceErrors:
    return next(source for source in shipped().sources if source.source == name)


def test_step_times_are_within_what_is_claimed() -> None:
    overall = shipped().overall
    assert overall["time_mape_mean_of_sources"] <= 0.065
    assert overall["time_mape_over_rows"] <= 0.07
    assert overall["rows_not_modelled_share"] <= 0.03
    for source in shipped().sources:
        if source.timed >= FEW_ROWS:
            assert source.time_mape is not None
            assert source.time_mape <= MOST_ERROR, source.source


def test_a_source_that_was_not_fitted_is_predicted_within_what_is_claimed() -> None:
    assert shipped().overall["left_out_mape_mean_of_sources"] <= 0.20
    assert all(source.left_out_mape is not None for source in shipped().sources if source.timed)


def test_layouts_are_ranked() -> None:
    assert shipped().overall["tau_mean"] >= 0.85
    assert shipped().overall["regret_mean"] <= 0.03


def test_memory_is_within_what_is_claimed() -> None:
    overall = shipped().overall
    assert overall["memory_mape_over_rows"] <= 0.06
    assert overall["oom_caught"] >= 0.97
    assert overall["ran_refused"] <= 0.02
    aleph = of_source("aleph")
    assert aleph.oom_caught / (aleph.oom_caught + aleph.oom_missed) >= 0.95
    assert aleph.ran_refused / (aleph.ran_refused + aleph.ran_admitted) <= 0.05


def test_there_is_one_prediction_per_row_in_order() -> None:
    predictions = shipped().predictions
    assert [p.id for p in predictions] == [run.id for run in shipped_runs()]
    for p in predictions:
        if p.predicted_step_time_s is None:
            assert p.reason
            assert (p.predicted_peak_mem_gb, p.predicted_fits, p.legal) == (None, None, None)
        else:
            assert p.predicted_step_time_s > 0
            assert p.predicted_peak_mem_gb is not None
            assert p.predicted_peak_mem_gb > 0
            assert p.verdict in ("fits", "tight", "does not fit")
            assert p.legal is not False or p.reason


def test_tau_counts_pairs_that_are_apart() -> None:
    measured = np.array([1.0, 1.01, 2.0, 3.0])
    # 1.0 and 1.01 tie; of the other five pairs all agree, then one does not.
    assert kendall_tau(measured, np.array([5.0, 4.0, 6.0, 7.0])) == 1.0
    assert kendall_tau(measured, np.array([5.0, 4.0, 7.0, 6.0])) == pytest.approx(3 / 5)
    assert kendall_tau(np.array([1.0, 1.001]), np.array([1.0, 2.0])) is None


@pytest.mark.parametrize(("load", "verdict"), [(0.9, "fits"), (0.95, "tight"), (1.05, "tight"), (1.2, "does not fit")])
def test_the_verdict_between_the_edges_of_the_band_is_tight(load: float, verdict: str) -> None:
    assert verdict_of(load, 1.0, 0.1) == verdict


def test_rows_of_anyone_are_predicted_or_refused() -> None:
    rows = [dict(run.row) for run in shipped_runs()[:3]]
    rows[1] |= {"id": "mine_2", "gpu": "unknown"}
    rows[2] |= {"id": "mine_3", "tp": "3"}
    result = validate([run_of(row) for row in rows])
    assert [p.id for p in result.predictions] == [rows[0]["id"], "mine_2", "mine_3"]
    assert result.predictions[1].reason
    assert result.predictions[1].predicted_step_time_s is None
    assert result.predictions[2].legal is False
    assert "tp=3" in (result.predictions[2].reason or "")


def test_every_shipped_run_is_legal_in_its_framework() -> None:
    """They ran, or ran out of memory: a rule that refuses one of them is wrong, or read from another version."""
    assert {p.id: p.reason for p in shipped().predictions if p.legal is False} == {}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"framework": "torchtitan", "model": "qwen2.5-3b", "tp": "4", "dp": "2"}, "torchtitan does not replicate"),
        ({"framework": "megatron-core", "model": "qwen2.5-3b", "tp": "4", "dp": "2"}, None),
        ({"framework": "DeepSpeed 0.19", "zero_fsdp": "ZeRO-2", "pp": "2", "dp": "4"}, "zero=2 needs pp=1"),
        ({"tp": "2"}, "tp x cp x pp x dp = 16 is not n_gpus=8"),
        ({"pp": "4", "vpp": "2", "dp": "2", "global_batch": "12"}, None),
        ({"pp": "4", "vpp": "2", "dp": "2", "global_batch": "6"}, "micro_batches=3 to be at least pp=4"),
        ({"seq_len": "4100", "cp": "4", "dp": "2"}, "cp=4 needs seq_len=4100 to be a multiple of 8"),
    ],
)
def test_a_row_is_legal_by_the_rules_of_the_framework_that_it_names(changed: dict[str, str], words: str | None) -> None:
    row = {
        "id": "x_1", "model": "llama-3.1-8b", "gpu": "H100-SXM", "n_gpus": "8", "gpus_per_node": "8", "seq_len": "4096",
        "tp": "1", "pp": "1", "dp": "8", "micro_batch": "1", "global_batch": "64", "zero_fsdp": "ZeRO-1",
        "seq_parallel": "no", "recompute": "full", "framework": "Megatron-LM",
    }  # fmt: skip
    if changed.get("framework") == "torchtitan":
        changed = {**changed, "zero_fsdp": "FSDP"}
    (found,) = validate([run_of(row | changed)]).predictions
    assert found.legal is (words is None), found.reason
    assert (words or "") in (found.reason or "")


def test_the_table_of_runs_holds_the_figures_of_the_validation() -> None:
    found, table = shipped(), shipped().to_frame()
    assert list(table.columns) == list(COLUMNS)
    assert table.id.tolist() == [prediction.id for prediction in found.predictions]
    scored = table[table.scored]
    assert len(scored) == found.overall["rows_timed"]
    assert scored.error.abs().mean() == pytest.approx(found.overall["time_mape_over_rows"])
    assert scored.left_out_error.abs().mean() == pytest.approx(found.overall["left_out_mape_over_rows"])
    assert table[~table.scored][["error", "left_out_error"]].isna().all(axis=None)
    by_source = scored.left_out_error.abs().groupby(scored.source).mean()
    assert by_source["aleph"] == pytest.approx(of_source("aleph").left_out_mape)
    lost = table[table.ran_out_of_memory]
    assert (~lost.predicted_fits).mean() == pytest.approx(found.overall["oom_caught"])


def test_the_table_of_runs_keeps_a_row_that_cannot_be_modelled(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "id,model,gpu,n_gpus,seq_len,micro_batch,global_batch,framework,tp,pp,step_time_s\n"
        "a_1,llama-3.1-8b,H100-SXM,8,8192,1,128,Megatron-LM,2,1,13.0\n"
        "a_2,llama-3.1-8b,H100-SXM,8,8192,1,128,Megatron-LM,,,13.0\n"
    )
    table = validate(path).to_frame().set_index("id")
    assert table[["error", "left_out_error"]][~table.scored].isna().to_numpy().all()
    assert table.error["a_1"] == pytest.approx(table.predicted_step_time_s["a_1"] / 13.0 - 1)
    assert table.left_out_error.isna().all()
    assert "the layout is not known" in table.reason["a_2"]
    assert table.loc["a_2", ["tp", "predicted_step_time_s", "predicted_fits", "devices"]].isna().all()


def test_a_profile_or_file_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="no-such"):
        validate("no-such.csv")
    with pytest.raises(InputError, match="no-such"):
        validate([], profile="no-such")


def test_a_share_of_no_rows_is_not_told(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(
        "id,model,gpu,n_gpus,seq_len,micro_batch,global_batch,framework,tp,pp,step_time_s\n"
        "a,llama-3.1-8b,H100,16,8192,1,128,Megatron-Core,4,1,7.1\n"
    )
    overall = validate(str(rows)).overall
    assert "oom_caught" not in overall
    assert overall["ran_refused"] == 0
