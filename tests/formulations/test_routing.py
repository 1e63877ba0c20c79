"""Uneven routing: the busiest rank of an expert-parallel group sets the pace, and holds as much more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.data.model import Moe
from shardwise.data.workload import Training
from shardwise.formulations.layer_costs import Sharding, compute_terms, routed_bytes
from shardwise.formulations.memory import layer_activations
from shardwise.solver.solve import build_instance


@pytest.mark.parametrize(("ep", "times"), [(1, 1.0), (8, 1.5)])
def test_the_busiest_rank_has_its_share_of_tokens_more_where_experts_are_spread(ep: int, times: float) -> None:
    even = build_instance("qwen3-30b-a3b", "dgx-h100:2", Training(4096, 64))
    uneven = build_instance("qwen3-30b-a3b", "dgx-h100:2", replace(even.workload, expert_imbalance=1.5))
    sharding = Sharding(1, 1, sequence_parallel=False, ep=ep, etp=1)
    kind = even.model.kinds[0]
    assert isinstance(kind.ffn, Moe)
    sent, busiest = (routed_bytes(instance, kind.ffn, sharding) for instance in (even, uneven))
    assert busiest == pytest.approx(times * sent)
    plain, loaded = (compute_terms(instance, sharding).kinds[0] for instance in (even, uneven))
    assert (loaded.gemm_forward > plain.gemm_forward) == (ep > 1)
    assert loaded.core_forward == plain.core_forward
    kept, more = (layer_activations(instance, kind, sharding) for instance in (even, uneven))
    assert (more.none > kept.none) == (ep > 1)
    assert more.full == kept.full
