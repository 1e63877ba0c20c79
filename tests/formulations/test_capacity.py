"""(L14): what a capacity of experts takes from the busiest rank, and what padding adds to all."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.faults import InputError
from shardwise.data.model import Moe
from shardwise.data.workload import Training
from shardwise.formulations.layer_costs import Sharding, busiest, compute_terms, routed_bytes
from shardwise.formulations.memory import layer_activations
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.export.megatron import megatron_flags, to_megatron
from shardwise.solver.solve import build_instance

if TYPE_CHECKING:
    from shardwise.data.instance import Instance

MODEL, CLUSTER = "qwen3-30b-a3b", "dgx-h100:2"
PLAIN = build_instance(MODEL, CLUSTER, Training(4096, 64))
PART = next(kind.ffn for kind in PLAIN.model.kinds if isinstance(kind.ffn, Moe))


def instance(**fields: float | bool) -> Instance:
    return build_instance(MODEL, CLUSTER, replace(PLAIN.workload, **fields))  # type: ignore[arg-type]


@given(
    st.floats(0.05, 16),
    st.floats(1, 8),
    st.booleans(),
    st.sampled_from((64, 1000, 4096)),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((1, 2, 8)),
)
def test_no_rank_has_more_than_the_capacity_and_padding_fills_it(
    factor: float, imbalance: float, padded: bool, seq_len: int, tp: int, ep: int
) -> None:
    workload = Training(seq_len, 8, expert_capacity=factor, pad_experts=padded, expert_imbalance=imbalance)
    sharding = Sharding(tp, 1, sequence_parallel=tp > 1, ep=ep)
    routed = seq_len // tp * PART.top_k
    held = ceil(routed / PART.experts * factor)  # by one expert, of the copies of one rank
    load = busiest(workload, PART, sharding)
    uncapped = busiest(replace(workload, expert_capacity=None, pad_experts=False), PART, sharding)
    assert load <= PART.experts * held / routed
    assert load == pytest.approx(
        PART.experts * held / routed if padded else min(uncapped, PART.experts * held / routed)
    )
    assert load >= min(uncapped, factor) * (1 - 1e-9)


def test_4096_tokens_by_hand() -> None:
    # 4,096 tokens to 8 of 128 experts are 256 copies each; F = 1.25 takes 320, F = 1.001 takes 257.
    spread, whole = (Sharding(1, 1, sequence_parallel=False, ep=ep, etp=1) for ep in (8, 1))
    loads = {"expert_capacity": 1.25, "expert_imbalance": 1.5}
    assert busiest(instance(**loads).workload, PART, spread) == 1.25
    assert busiest(instance(expert_capacity=1.25).workload, PART, spread) == 1.0
    assert busiest(instance(expert_capacity=1.25, pad_experts=True).workload, PART, whole) == 1.25
    assert busiest(instance(expert_capacity=1.001, pad_experts=True).workload, PART, spread) == 257 / 256
    # Half the mean drops half of all tokens, however evenly they are routed.
    assert busiest(instance(expert_capacity=0.5).workload, PART, whole) == 0.5


@pytest.mark.parametrize("ep", [1, 8])
def test_padding_takes_time_bytes_and_memory_in_proportion(ep: int) -> None:
    sharding = Sharding(1, 1, sequence_parallel=False, ep=ep, etp=1)
    kind = PLAIN.model.kinds[0]
    padded, uneven = instance(expert_capacity=2.0, pad_experts=True), instance(expert_imbalance=2.0)
    assert routed_bytes(padded, PART, sharding) == 2 * routed_bytes(PLAIN, PART, sharding)
    slow, fast = (compute_terms(one, sharding).kinds[0] for one in (padded, PLAIN))
    assert slow.gemm_forward > fast.gemm_forward
    assert slow.traffic_forward > fast.traffic_forward
    assert slow.core_forward == fast.core_forward
    kept, more = (layer_activations(one, kind, sharding).none for one in (PLAIN, padded))
    routed = PART.top_k * (2 * PLAIN.model.hidden + 3 * PART.intermediate) * 2 * 4096
    scale = PLAIN.profile.memory_activations * (1 + PLAIN.profile.memory_fragmentation)
    assert more - kept == pytest.approx(routed * scale)
    if ep > 1:  # where every rank is as full as the busiest one
        assert compute_terms(padded, sharding).kinds == compute_terms(uneven, sharding).kinds


def test_packs_say_what_they_drop() -> None:
    with pytest.raises(InputError, match=r"expert_capacity=1.25: torchtitan drops no tokens"):
        build_instance(MODEL, CLUSTER, Training(4096, 64, expert_capacity=1.25), rules="torchtitan")
    with pytest.raises(InputError, match="deepspeed pads every expert"):
        build_instance(MODEL, CLUSTER, Training(4096, 64, expert_capacity=1.25), rules="deepspeed")
    build_instance(MODEL, CLUSTER, Training(4096, 64, expert_capacity=1.25, pad_experts=True), rules="deepspeed")
    with pytest.raises(InputError, match=r"llama-3\.1-8b has no experts"):
        build_instance("llama-3.1-8b", CLUSTER, Training(4096, 64, expert_capacity=1.25))
    with pytest.raises(InputError, match="more than num_experts=128 / top_k=8, which is every token"):
        instance(expert_capacity=17)


def test_megatron_is_told() -> None:
    padded = instance(expert_capacity=1.25, pad_experts=True)
    plan = plan_from_degrees(padded, degrees_from(padded, ep=8, etp=1))
    flags = megatron_flags(padded, plan)
    assert "--moe-expert-capacity-factor 1.25" in flags
    assert "--moe-pad-expert-input-to-capacity" in flags
    assert "--moe-token-dispatcher-type alltoall" in flags
    assert "routed evenly" not in to_megatron(padded, plan)
    dropping = megatron_flags(instance(expert_capacity=1.25), plan)
    assert set(flags) - set(dropping) == {"--moe-pad-expert-input-to-capacity"}
    assert not any("capacity" in flag for flag in megatron_flags(PLAIN, plan))
