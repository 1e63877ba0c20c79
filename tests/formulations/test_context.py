"""(L6), (M6) by hand: what each algorithm of context parallelism sends, waits for and holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.data.plan import CP_COMM_TYPES, Degrees
from shardwise.data.workload import Training
from shardwise.formulations.collectives import collective_time_s
from shardwise.formulations.layer_costs import (
    Groups,
    Sharding,
    Spans,
    context_parallel_bytes,
    context_terms,
    ulysses_bytes,
)
from shardwise.formulations.memory import gather_buffer_bytes, layer_activations
from shardwise.solver.default_plan import degrees_from
from shardwise.solver.solve import build_instance

SEQ_LEN = 32_768
INSTANCE = build_instance("llama-3.1-8b", "dgx-h100:1", Training(SEQ_LEN, 8))
KIND = INSTANCE.model.kinds[0]
SPANS = ((4, INSTANCE.levels[0]),)
GROUPS = Groups((), (SPANS,))
RING = Sharding(2, 1, sequence_parallel=True, cp=4)
GATHER, ULYSSES = replace(RING, cp_comm_type="allgather"), replace(RING, cp_comm_type="a2a")


def seconds(op: str, size: float) -> float:
    return collective_time_s(INSTANCE.accelerator, op, size, SPANS)


def test_a_ring_and_a_gather_send_keys_and_values_and_only_the_ring_hides_them() -> None:
    # 8 key/value heads of 128 over tp=2: 4 x (128 + 128) values of 2 bytes for each of 32,768 tokens.
    size = 2 * SEQ_LEN * 4 * 256
    ring, gather = (context_terms(INSTANCE, KIND, way, GROUPS) for way in (RING, GATHER))
    forward, both = seconds("all_gather", size), seconds("all_gather", size) + seconds("reduce_scatter", size)
    assert (ring.context_forward, ring.context_backward) == pytest.approx((forward, both))
    assert (gather.exchange_forward, gather.exchange_backward) == pytest.approx((forward, both))
    assert ring.exchange_forward == gather.context_forward == ring.traffic_forward == 0
    assert gather.traffic_forward > 0
    assert (ring.launches, gather.launches) == (6, 2)


def test_ulysses_exchanges_queries_keys_values_and_outputs() -> None:
    # 32 heads over tp=2 and 4 of keys and values, a quarter of the tokens: (16 + 4 + 4) x 128 and 16 x 128 values.
    inputs, outputs = 2 * SEQ_LEN / 4 * 24 * 128, 2 * SEQ_LEN / 4 * 16 * 128
    assert ulysses_bytes(INSTANCE, KIND, ULYSSES) == pytest.approx((inputs, outputs))
    terms = context_terms(INSTANCE, KIND, ULYSSES, GROUPS)
    once = seconds("alltoall", inputs) + seconds("alltoall", outputs)
    assert (terms.exchange_forward, terms.exchange_backward) == pytest.approx((once, once))
    assert terms.context_forward == 0


def test_fewer_key_value_heads_than_ranks_are_copied_for_ulysses() -> None:
    # 4 heads of keys and values on a device, 8 ranks: one each, so 8 are sent and kept.
    wide, ring = replace(ULYSSES, cp=8), replace(RING, cp=8)
    assert ulysses_bytes(INSTANCE, KIND, wide)[0] == pytest.approx(2 * SEQ_LEN / 8 * (16 + 8 + 8) * 128)
    kept, less = (layer_activations(INSTANCE, KIND, way).none for way in (wide, ring))
    copies = 2 * SEQ_LEN / 8 * 4 * 256
    assert kept - less == pytest.approx(
        copies * INSTANCE.profile.memory_activations * (1 + INSTANCE.profile.memory_fragmentation)
    )
    assert layer_activations(INSTANCE, KIND, ULYSSES) == layer_activations(INSTANCE, KIND, RING)


def test_what_is_gathered_or_exchanged_is_held_with_its_gradients() -> None:
    held = [
        gather_buffer_bytes(INSTANCE, (), Degrees(tp=2, cp=4, sequence_parallel=True, cp_comm_type=name, cp_a2a=near))
        for name, near in zip(CP_COMM_TYPES, (1, 1, 1, 2), strict=True)
    ]
    exchanged = 2 * SEQ_LEN / 4 * (24 + 16) * 128
    assert held == pytest.approx([0, 2 * 2 * SEQ_LEN * 4 * 256, 2 * exchanged, 2 * exchanged])


def test_a_hierarchy_exchanges_among_neighbours_and_is_a_ring_of_what_is_left() -> None:
    # 8 ranks on two nodes, 4 neighbours of each: what Ulysses exchanges, and one head of keys and values on every rank, of
    # all tokens, in a ring of two nodes, each rank by its own card.
    instance = build_instance("llama-3.1-8b", "dgx-h100:2", Training(SEQ_LEN, 8))
    inside, outside = instance.levels[:2]
    group = Groups((), (((4, inside), (2, outside), *((1, link) for link in instance.levels[2:])),))
    own = replace(RING, cp=8, cp_comm_type="a2a+p2p", cp_a2a=4)
    inputs, outputs = 2 * SEQ_LEN / 8 * 24 * 128, 2 * SEQ_LEN / 8 * 16 * 128
    assert ulysses_bytes(instance, KIND, own) == pytest.approx((inputs, outputs))
    assert context_parallel_bytes(instance, KIND, own) == pytest.approx(2 * SEQ_LEN * 256)
    near, far = ((4, inside), (1, outside)), ((1, inside), (2, outside))

    def takes(op: str, size: float, spans: Spans) -> float:
        return collective_time_s(instance.accelerator, op, size, spans)

    terms = context_terms(instance, KIND, own, group)
    once = takes("alltoall", inputs, near) + takes("alltoall", outputs, near)
    gather, reduce = (takes(op, 2 * SEQ_LEN * 256, far) for op in ("all_gather", "reduce_scatter"))
    assert (terms.exchange_forward, terms.exchange_backward) == pytest.approx((once, once))
    assert (terms.context_forward, terms.context_backward) == pytest.approx((gather, gather + reduce))
    assert terms.launches == 4 + 2
    ring = context_terms(instance, KIND, replace(RING, cp=8), group)
    assert terms.context_forward < ring.context_forward


def test_a_hierarchy_of_one_level_is_a_ring_or_ulysses() -> None:
    ring, ulysses = (context_terms(INSTANCE, KIND, way, GROUPS) for way in (RING, ULYSSES))
    assert context_terms(INSTANCE, KIND, replace(RING, cp_comm_type="a2a+p2p", cp_a2a=1), GROUPS) == ring
    assert context_terms(INSTANCE, KIND, replace(RING, cp_comm_type="a2a+p2p", cp_a2a=4), GROUPS) == ulysses


def test_recurrent_layers_pass_their_states_on_in_any_case() -> None:
    instance = build_instance("mamba2-2.7b", "dgx-h100:1", Training(SEQ_LEN, 8))
    kind = instance.model.kinds[0]
    one, *others = (
        context_terms(instance, kind, replace(RING, tp=1, cp_comm_type=name, cp_a2a=near), GROUPS)
        for name, near in zip(CP_COMM_TYPES, (1, 1, 1, 2), strict=True)
    )
    assert one.context_forward > 0
    assert others == [one, one, one]


def test_one_rank_has_no_algorithm_and_an_unknown_one_is_refused() -> None:
    assert Degrees(tp=2, cp_comm_type="a2a") == Degrees(tp=2)
    with pytest.raises(ValueError, match=r"cp_comm_type='ring' must be one of p2p, allgather, a2a, a2a\+p2p"):
        Degrees(cp=2, cp_comm_type="ring")  # type: ignore[arg-type]


@pytest.mark.parametrize("near", [1, 3, 8, 16])
def test_a_hierarchy_has_two_levels(near: int) -> None:
    with pytest.raises(ValueError, match=f"cp_a2a={near} must divide cp=8 and be neither 1 nor cp"):
        Degrees(cp=8, cp_comm_type="a2a+p2p", cp_a2a=near)
    assert Degrees(cp=8, cp_comm_type="a2a+p2p", cp_a2a=4).cp_a2a == 4


def test_only_a_hierarchy_has_an_inner_degree() -> None:
    with pytest.raises(ValueError, match="cp_a2a=2 needs cp_comm_type=a2a"):
        Degrees(cp=4, cp_comm_type="a2a", cp_a2a=2)
    asked = degrees_from(INSTANCE, cp=8, cp_a2a=2)
    assert (asked.cp_comm_type, asked.cp_a2a) == ("a2a+p2p", 2)
    assert degrees_from(INSTANCE, cp=8).cp_comm_type == "p2p"
