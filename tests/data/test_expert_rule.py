"""Experts under tensor parallelism, as Megatron-Core trains them."""

from __future__ import annotations

import pytest

from shardwise.data.model_catalog import load_model
from shardwise.data.rules import FREE, MEGATRON_CORE, Rules, expert_faults


@pytest.mark.parametrize(
    ("rules", "model", "tp", "sequence_parallel", "legal"),
    [
        (MEGATRON_CORE, "mixtral-8x7b", 2, False, False),
        (MEGATRON_CORE, "mixtral-8x7b", 2, True, True),
        (MEGATRON_CORE, "mixtral-8x7b", 1, False, True),
        (MEGATRON_CORE, "llama-3.1-8b", 2, False, True),
        (FREE, "mixtral-8x7b", 2, False, True),
    ],
)
def test_experts_with_tensor_parallelism_need_sequence_parallelism(
    rules: Rules, model: str, tp: int, sequence_parallel: bool, legal: bool
) -> None:
    faults = expert_faults(rules, load_model(model), tp, sequence_parallel)
    assert faults == ([] if legal else ["tp=2 with experts needs sequence_parallel=true"])
