"""Micro-batches in flight against Megatron's order of passes, written out or simulated pass by pass."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.formulations.schedule import in_flight, in_flight_once, orders

Vector = tuple[int, ...]


def passes_of(pp: int, vpp: int, micro_batches: int, stage: int) -> list[tuple[str, int]]:
    """The passes of one stage as ("F" or "B", chunk), in Megatron's order.

    `forward_backward_pipelining_with_interleaving` (core/pipeline_parallel/schedules.py): the k-th forward pass works on
    chunk (k mod pp vpp) div pp, the k-th backward pass on the chunks in reverse; a warm-up of
    2 (pp - stage - 1) + (vpp - 1) pp forward passes, all of them when that is more than there are; then one forward and
    one backward pass in turn; then the backward passes that are left. Without interleaving the warm-up is
    pp - stage - 1 passes (`forward_backward_pipelining_without_interleaving`).
    """
    total = micro_batches * vpp
    warm_up = pp - stage - 1 if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp
    warm_up = min(warm_up, total)
    forward = [("F", (k % (pp * vpp)) // pp) for k in range(total)]
    backward = [("B", vpp - 1 - (k % (pp * vpp)) // pp) for k in range(total)]
    order = forward[:warm_up]
    for k in range(total - warm_up):
        order += [forward[warm_up + k], backward[k]]
    return order + backward[total - warm_up :]


def maximal_in_flight(pp: int, vpp: int, micro_batches: int, stage: int) -> set[Vector]:
    """Vectors of micro-batches in flight at any moment of the whole step that no other moment exceeds."""
    counts, seen = [0] * vpp, set()
    for direction, chunk in passes_of(pp, vpp, micro_batches, stage):
        counts[chunk] += 1 if direction == "F" else -1
        assert counts[chunk] >= 0
        seen.add(tuple(counts))
    assert counts == [0] * vpp
    return {a for a in seen if not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for b in seen)}


def test_plain_1f1b_holds_one_micro_batch_less_on_each_later_stage() -> None:
    # pp=4, m=8. Stage 0: F F F | F B F B ... holds 4; stage 1: F F | F B ... 3; stage 2: F | F B ... 2; stage 3: F B ... 1.
    assert [in_flight(4, 1, 8, stage) for stage in range(4)] == [((4,),), ((3,),), ((2,),), ((1,),)]


def test_plain_1f1b_never_holds_more_micro_batches_than_there_are() -> None:
    # pp=4, m=2. Stages 0 and 1 warm up on both micro-batches; stage 2 holds 2, stage 3 one at a time.
    assert [in_flight(4, 1, 2, stage) for stage in range(4)] == [((2,),), ((2,),), ((2,),), ((1,),)]


def test_interleaved_order_of_two_stages_two_chunks_and_four_micro_batches() -> None:
    # Chunks are written a (the first of the stage) and b. Eight forward passes in groups of pp=2: a a b b a a b b;
    # backward passes: b b a a b b a a. Stage 0 warms up with 2 (2-0-1) + (2-1) 2 = 4 passes, stage 1 with 2.
    #
    # Stage 0, (a, b) in flight:  a a b b      (2,2)
    #   +a (3,2)  -b (3,1)   +a (4,1)  -b (4,0)   +b (4,1)  -a (3,1)   +b (3,2)  -a (2,2)
    #   then -b -b -a -a.                       Maximal: (3,2) and (4,1).
    assert set(in_flight(2, 2, 4, 0)) == {(3, 2), (4, 1)}
    # Stage 1:                    a a          (2,0)
    #   +b (2,1)  -b (2,0)   twice;  +a (3,0)  -a (2,0)   twice;  +b (2,1)  -b (2,0)   twice
    #   then -a -a.                             Maximal: (2,1) and (3,0).
    assert set(in_flight(2, 2, 4, 1)) == {(2, 1), (3, 0)}
    assert in_flight_once(2, 2, 4, 0) == (3, 2)
    assert in_flight_once(2, 2, 4, 1) == (2, 1)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(2, 6), st.integers(1, 5), st.integers(1, 6), st.data())
def test_in_flight_are_the_maximal_moments_of_the_simulated_order(
    pp: int, vpp: int, groups: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, pp - 1))
    micro_batches = groups * pp if vpp > 1 else groups
    expected = maximal_in_flight(pp, vpp, micro_batches, stage)
    found = in_flight(pp, vpp, micro_batches, stage)
    assert len(set(found)) == len(found)
    assert set(found) == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(2, 6), st.integers(1, 5), st.integers(1, 6), st.data())
def test_the_vector_after_the_warm_up_is_a_moment_of_the_order(
    pp: int, vpp: int, groups: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, pp - 1))
    micro_batches = groups * pp if vpp > 1 else groups
    counts, moments = [0] * vpp, set()
    for direction, chunk in passes_of(pp, vpp, micro_batches, stage):
        counts[chunk] += 1 if direction == "F" else -1
        moments.add(tuple(counts))
    assert in_flight_once(pp, vpp, micro_batches, stage) in moments


def test_one_stage_holds_one_micro_batch() -> None:
    assert in_flight(1, 1, 16, 0) == ((1,),)


def test_zb_v_ends_with_the_weight_gradients_of_its_second_chunk_before_those_of_its_first() -> None:
    # torch distributed/pipelining/schedules.py, `ScheduleZBVZeroBubble`, cool-down of p=3, m=5: stage k runs k input
    # gradients of both chunks (a and b), p - k of chunk a with a weight gradient of a behind each, then the weight
    # gradients of b that are left, then those of a.
    expected = [
        "Ia2 Wa2 Ia3 Wa3 Ia4 Wa4",
        "Ia2 Ib4 Ia3 Wa2 Ia4 Wa3 Wb4 Wa4",
        "Ia2 Ib3 Ia3 Ib4 Ia4 Wa2 Wb3 Wb4 Wa3 Wa4",
    ]
    for k, (order, end) in enumerate(zip(orders("zb-v", 3, 2, 5), expected, strict=True)):
        words = [f"{'FBIW'[kind]}{'a' if slot == k else 'b'}{i}" for kind, slot, i in order]
        assert words[-len(end.split()) :] == end.split()
