"""What a stranger met: fields, columns and arguments that were passed over, and model FLOPs of windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

import shardwise as sw
from shardwise.data.cluster_catalog import load_cluster
from shardwise.data.hf_config import model_from_config
from shardwise.data.instance import Instance
from shardwise.data.limits import parse_limits
from shardwise.solver.evaluate import model_flops

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 2816, "vocab_size": 32000,
}  # fmt: skip
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}


def windows(kind: str, **fields: Any) -> list[int | None]:
    model = model_from_config({**SIZES, "model_type": kind, **fields}, "it")
    return [layer.mixer.window for layer in model.layers]


def test_gpt_oss_without_layer_types() -> None:
    assert windows("gpt_oss", sliding_window=128, **EXPERTS) == [128, None] * 4


def test_mixtral_has_its_window() -> None:
    assert windows("mixtral", sliding_window=512, **EXPERTS) == [512] * 8
    assert windows("mixtral", sliding_window=None, **EXPERTS) == [None] * 8


@pytest.mark.parametrize(("kind", "more"), [("qwen2", {}), ("qwen3", {}), ("qwen2_moe", MOE), ("qwen3_moe", MOE)])
def test_qwen_has_windows_where_it_says_so(kind: str, more: dict[str, int]) -> None:
    given = {"sliding_window": 512, "max_window_layers": 3, **more}
    assert windows(kind, use_sliding_window=True, **given) == [None] * 3 + [512] * 5
    assert windows(kind, use_sliding_window=False, **given) == [None] * 8
    assert windows(kind, **given) == [None] * 8


@pytest.mark.parametrize("field", ["hidden_size_per_layer_input", "num_kv_shared_layers"])
def test_small_gemma_4_is_refused(field: str) -> None:
    with pytest.raises(sw.InputError, match=f"{field}=4 must be 0"):
        windows("gemma4_text", layer_types=["full_attention"] * 8, sliding_window=512, **{field: 4})


@pytest.mark.parametrize("window", [1, 100, 1024, 4096, 9999])
def test_model_flops_of_a_window_count_what_a_query_sees(window: int) -> None:
    def flops(**fields: Any) -> float:
        model = model_from_config({**SIZES, "model_type": "mistral", **fields}, "it")
        return model_flops(Instance(model, load_cluster("dgx-h100:1"), sw.Training(4096, 8)))

    met = sum(min(i + 1, window) - 0.5 * (i < window) for i in range(4096)) / 4096
    whole = 12 * 8 * 1024 * 2048 * 4096 * 8
    assert flops() - flops(sliding_window=window) == pytest.approx(whole * (1 - met / 2048), rel=2e-3, abs=1)


@pytest.mark.parametrize("more", [{"limits": ["tp=4"]}, {"rules": "torchtitan"}, {"model": "llama-3.1-8b"}])
def test_solve_takes_nothing_beside_an_instance(more: dict[str, Any]) -> None:
    instance = sw.build_instance("llama-3.2-1b", "dgx-h100:1", sw.Training(2048, 8))
    with pytest.raises(sw.InputError, match=f"{next(iter(more))} cannot be given beside an instance"):
        sw.solve(instance=instance, **more)


@pytest.mark.parametrize("column", ["stages", "recompute_modules", "offload_optimizer", "rank_order"])
def test_a_column_that_no_table_has_is_told(column: str) -> None:
    row = {"model": "llama-3.2-1b", "cluster": "dgx-h100:1", "seq_len": 2048, "global_batch": 8}
    one, other = sw.evaluate_many(pd.DataFrame([{**row, column: "1"}, {**row, column: None}])).to_dict("records")
    assert pd.isna(one["legal"])
    assert one["reason"] == f"column {column} cannot be told by a table; use evaluate"
    assert other["legal"]
    assert not other["reason"]


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("modules", ["any", "mlp"])
def test_modules_are_of_selective_recompute(mode: str, modules: str) -> None:
    with pytest.raises(sw.InputError, match=f"recompute_modules needs recompute=selective, not {mode}"):
        parse_limits([f"recompute={mode}", f"recompute_modules={modules}"])


def test_a_share_of_no_rows_is_not_told(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(
        "id,model,gpu,n_gpus,seq_len,micro_batch,global_batch,framework,tp,pp,step_time_s\n"
        "a,llama-3.1-8b,H100,16,8192,1,128,Megatron-Core,4,1,7.1\n"
    )
    overall = sw.validate(str(rows)).overall
    assert "oom_caught" not in overall
    assert overall["ran_refused"] == 0
