"""The trace of the 405B plan, read by Holistic Trace Analysis (github.com/facebookresearch/HolisticTraceAnalysis), the
field's library for Chrome traces; `make test-trace` installs it, `make test` skips this folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from shardwise.data.workload import Training
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.simulate import simulate
from shardwise.solver.solve import build_instance
from shardwise.solver.trace import chrome_trace

if TYPE_CHECKING:
    from pathlib import Path

parser: Any = pytest.importorskip("hta.common.trace_parser", reason="HTA is not installed: run make test-trace")


@pytest.mark.filterwarnings("ignore")  # those of HTA with the newest pandas
def test_the_trace_of_the_405b_plan_is_parsed_whole(tmp_path: Path) -> None:
    instance = build_instance("llama-3.1-405b", "dgx-h100:2048", Training(8192, 2048))
    degrees = degrees_from(instance, tp=16, pp=8, vpp=8, dp=128)
    simulation = simulate(instance, plan_from_degrees(instance, degrees))
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(chrome_trace(simulation)))
    assert file.stat().st_size < 20e6
    _, frame, _ = parser.parse_trace_dataframe(str(file), parser.ParserConfig.get_default_cfg())
    passes = frame[frame["dur"] > 0]
    assert len(passes) >= len(simulation.passes) == 2 * 8 * 8 * 16
    assert sorted(passes["pid"].unique().tolist()) == list(range(8))
    assert passes["ts"].add(passes["dur"]).max() <= simulation.step_time_s * 1e6 + 1
