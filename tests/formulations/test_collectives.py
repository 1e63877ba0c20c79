"""Collective times against measured points, by hand, and the properties that lower bounds rely on."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.data.cluster import Accelerator, Link
from shardwise.data.efficiency import OPS, CollectiveCurve, NetworkCurve
from shardwise.data.faults import InputError
from shardwise.formulations.collectives import (
    Inner,
    Outer,
    bandwidth_time_per_byte,
    best_collective_time_s,
    collective_time_s,
    group_routes,
    p2p_time_s,
    placements,
)

GIB = 2**30
MIB = 2**20


def accelerator(name: str) -> Accelerator:
    return Accelerator(name, "any", 80 * GIB, 2e12, {"bf16": 300e12})


A100, H100, H200, B200, GB200, MI300X, L40S = map(
    accelerator, ("A100-SXM-80GB", "H100-SXM", "H200-SXM", "B200-SXM", "GB200", "MI300X", "L40S")
)
NVLINK3 = Link("nvlink3", "nvlink", 300e9, 1.9e-6)
NVLINK4 = Link("nvlink4", "nvlink", 450e9, 1.9e-6)
NVLINK5 = Link("nvlink5", "nvlink", 900e9, 1.9e-6)
XGMI = Link("xgmi", "xgmi", 448e9, 2e-6)
PCIE4 = Link("pcie4", "pcie", 31e9, 2.5e-6)
NDR = Link("ib-ndr", "infiniband", 50e9, 4e-6)
HDR = Link("ib-hdr", "infiniband", 25e9, 4e-6)
ROCE = Link("roce-400g", "roce", 50e9, 4e-6)
EFA4 = Link("efa4", "efa", 50e9, 15e-6)
SPINE = Link("spine", "infiniband", 50e9, 4e-6, oversubscription=4.0)

# Inside one domain, ai-dynamo/aiconfigurator@095f58a51c systems/data/*/comm (nccl-tests);
# MI300X: a public rccl-tests README.
DOMAIN_POINTS = [
    (H100, NVLINK4, "all_reduce", 8, 268435456, 1092.1),
    (H100, NVLINK4, "all_reduce", 8, 1024, 15.6),
    (H100, NVLINK4, "all_gather", 8, 16777216, 68.9),
    (A100, NVLINK3, "reduce_scatter", 4, 67108864, 303.3),
    (B200, NVLINK5, "alltoall", 8, 67108864, 138.9),
    (MI300X, XGMI, "all_reduce", 8, 268435456, 1540.4),
    (L40S, PCIE4, "all_reduce", 4, 16777216, 4922.3),
]
# Between nodes: xxrjun/nccl-tests-cluster@455de4f8de (H100), a public nccl-tests log of Dell H200 over BlueField-3
# RoCE, stas00/ml-engineering@744d01e18b network/README.md (B200).
NETWORK_POINTS = [
    (H100, ((10, NDR),), "all_reduce", 1073741824, 39744.4),
    (H100, ((2, NVLINK4), (10, NDR)), "all_reduce", 1073741824, 20875.4),
    (H100, ((4, NVLINK4), (10, NDR)), "all_reduce", 1073741824, 10728.4),
    (H100, ((8, NVLINK4), (10, NDR)), "all_reduce", 1073741824, 6149.2),
    (H100, ((8, NVLINK4), (10, NDR)), "all_gather", 8589934080, 26727.0),
    (H200, ((8, NVLINK4), (2, ROCE)), "all_reduce", 1073741824, 4388.6),
    (H200, ((8, NVLINK4), (2, ROCE)), "all_reduce", 4096, 43.5),
    (B200, ((8, NVLINK5), (4, EFA4)), "all_reduce", 1073741824, 5747.1),
]

TWO_LEVELS = (
    (H100, NVLINK4, NDR),
    (A100, NVLINK3, HDR),
    (B200, NVLINK5, EFA4),
    (MI300X, XGMI, ROCE),
    (L40S, PCIE4, HDR),
)
ops = st.sampled_from(OPS)
two_levels = st.sampled_from(TWO_LEVELS)
powers = st.integers(0, 6).map(lambda exponent: 2**exponent)
bytes_moved = st.floats(1, 1e11)


@pytest.mark.parametrize(("device", "link", "op", "ranks", "size", "measured_us"), DOMAIN_POINTS)
def test_collective_in_a_domain_is_within_8_percent_of_measured(
    device: Accelerator, link: Link, op: str, ranks: int, size: int, measured_us: float
) -> None:
    assert collective_time_s(device, op, size, ((ranks, link),)) * 1e6 == pytest.approx(measured_us, rel=0.08)


@pytest.mark.parametrize(("device", "spans", "op", "size", "measured_us"), NETWORK_POINTS)
def test_collective_between_nodes_is_within_15_percent_of_measured(
    device: Accelerator, spans: tuple[tuple[int, Link], ...], op: str, size: int, measured_us: float
) -> None:
    assert collective_time_s(device, op, size, spans) * 1e6 == pytest.approx(measured_us, rel=0.15)


def test_ring_across_nodes_by_hand() -> None:
    own = CollectiveCurve(8, 10e-6, 300e9, 1.0, 1.0, "", "", False, "")
    network = NetworkCurve(40e9, 15e-6, 5e-6, 1.0, 1.0, 2.0, "", "", False, "")
    routes = group_routes("all_gather", 16, Inner(8, own, own, own.alpha_s), (Outer(2, 8, network, network),))
    # Start: 10 us inside, one boundary of 15 us and 7 more hops of 5 us: 60 us.
    # S = 320 MB, phi = 15/16: 300 MB. NVLink 300e6 / 300e9 = 1000 us; eight cards 300e6 / 320e9 = 937.5 us;
    # together (1000^2 + 937.5^2)^(1/2) = 1370.7 us. (Half sizes of 1 byte add nothing that shows.)
    assert [route.time_s(320e6) * 1e6 for route in routes] == [pytest.approx(1430.7, rel=1e-4)]


def test_tree_across_nodes_by_hand() -> None:
    own = CollectiveCurve(8, 16e-6, 400e9, 1.0, 1.0, "", "", False, "")
    network = NetworkCurve(50e9, 15e-6, 5e-6, 1.0, 1.0, 2.0, "", "", False, "")
    _, tree = group_routes("all_reduce", 16, Inner(8, own, own, own.alpha_s), (Outer(2, 8, network, network),))
    # Start: 16 us + 2 hops of 15 us = 46 us. S = 400 MB: NVLink 2 x 7/8 x 400e6 / 400e9 = 1750 us; two nodes send S
    # once, over eight cards 400e6 / 400e9 = 1000 us; together (1750^2 + 1000^2)^(1/2) = 2015.6 us.
    assert tree.time_s(400e6) * 1e6 == pytest.approx(2061.6, rel=1e-4)


def test_group_of_one_rank_costs_nothing() -> None:
    for op in OPS:
        assert collective_time_s(H100, op, 1e9, ((1, NVLINK4), (1, NDR))) == 0
        assert best_collective_time_s(H100, op, 1e9, 1, ((8, NVLINK4), (4, NDR))) == 0
    assert collective_time_s(H100, "all_reduce", 0, ((8, NVLINK4),)) == 0


def test_unknown_op_is_an_input_error() -> None:
    with pytest.raises(InputError, match="op=gather is not one of all_reduce"):
        collective_time_s(H100, "gather", 1e6, ((8, NVLINK4),))


def test_ring_leaves_the_node_at_the_rate_of_all_cards_of_its_ranks() -> None:
    # 1 GiB over 4 nodes at 50 GB/s a card: twice the ranks a node, half the time, until NVLink is the limit.
    one, two, four = (collective_time_s(H100, "all_gather", 16e9, ((g, NVLINK4), (4, NDR))) for g in (1, 2, 4))
    assert one / two == pytest.approx(2 * (3 / 4) / (7 / 8), rel=0.05)
    assert two / four == pytest.approx(2 * (7 / 8) / (15 / 16), rel=0.10)


def test_tray_and_rack_of_one_nvlink_domain_are_one_level() -> None:
    nested = collective_time_s(GB200, "all_reduce", 1e9, ((4, NVLINK5), (18, NVLINK5), (2, NDR)))
    assert nested == collective_time_s(GB200, "all_reduce", 1e9, ((72, NVLINK5), (2, NDR)))


def test_oversubscribed_spine_limits_a_group_that_crosses_it() -> None:
    flat = collective_time_s(H100, "all_gather", 1e9, ((8, NVLINK4), (8, NDR)))
    spine = collective_time_s(H100, "all_gather", 1e9, ((8, NVLINK4), (2, NDR), (4, SPINE)))
    assert spine > flat


def test_pcie_between_nvlink_pairs_is_a_bottleneck_that_pairs_do_not_widen() -> None:
    # microsoft/vidur a100_pairwise_nvlink, all_reduce of 4 ranks, 512 MiB: 33.9 ms, 23.7 GB/s over a link of 31.
    pair = collective_time_s(A100, "all_reduce", 512 * MIB, ((2, NVLINK3), (2, PCIE4)))
    assert 0.5 * 33.9e-3 < pair < 2 * 33.9e-3


def test_p2p_is_slower_over_the_network_than_over_nvlink() -> None:
    assert p2p_time_s(H100, 32 * MIB, NVLINK4) < p2p_time_s(H100, 32 * MIB, NDR)
    # microsoft/vidur h100_dgx, send_recv of 2 ranks in a node, 64 MiB: 193 us.
    assert p2p_time_s(H100, 64 * MIB, NVLINK4) * 1e6 == pytest.approx(193, rel=0.08)


def test_bandwidth_time_per_byte_is_a_bucket_over_its_bytes() -> None:
    spans = ((8, NVLINK4), (4, NDR))
    assert bandwidth_time_per_byte(H100, "reduce_scatter", spans, 160e6) * 160e6 == pytest.approx(
        collective_time_s(H100, "reduce_scatter", 160e6, spans)
    )


def test_placements_are_all_factorizations_within_capacity() -> None:
    found = {tuple(f for f, _ in spans) for spans in placements(12, ((8, NVLINK4), (4, NDR)))}
    assert found == {(3, 4), (4, 3), (6, 2)}
    assert placements(7, ((4, NVLINK4), (4, NDR))) == ()
    assert best_collective_time_s(H100, "all_reduce", 1e6, 7, ((4, NVLINK4), (4, NDR))) == math.inf


@given(op=ops, levels=two_levels, inner=powers, outer=powers, size=bytes_moved, grow=st.floats(0, 1e11))
def test_time_is_positive_finite_and_nondecreasing_in_bytes(
    op: str, levels: tuple[Accelerator, Link, Link], inner: int, outer: int, size: float, grow: float
) -> None:
    assume(inner * outer > 1)
    device, link, network = levels
    spans = ((inner, link), (outer, network), (2, SPINE))
    small, large = (collective_time_s(device, op, bytes, spans) for bytes in (size, size + grow))
    assert 0 < small <= large * (1 + 1e-12)
    assert math.isfinite(large)


@given(op=ops, levels=two_levels, group=st.integers(2, 48), size=bytes_moved, data=st.data())
def test_best_time_is_never_above_that_of_any_placement(
    op: str, levels: tuple[Accelerator, Link, Link], group: int, size: float, data: st.DataObject
) -> None:
    device, link, network = levels
    tree = ((8, link), (4, network), (4, SPINE))
    legal = placements(group, tree)
    assume(legal)
    spans = data.draw(st.sampled_from(legal))
    assert best_collective_time_s(device, op, size, group, tree) <= collective_time_s(device, op, size, spans)


@given(op=ops, levels=two_levels, group=st.integers(2, 48), size=bytes_moved, grow=st.floats(0, 1e10))
def test_best_time_is_nondecreasing_in_bytes(
    op: str, levels: tuple[Accelerator, Link, Link], group: int, size: float, grow: float
) -> None:
    device, link, network = levels
    tree = ((8, link), (8, network))
    assume(placements(group, tree))
    small, large = (best_collective_time_s(device, op, bytes, group, tree) for bytes in (size, size + grow))
    assert small <= large * (1 + 1e-12)


@given(
    op=ops,
    levels=st.sampled_from(TWO_LEVELS[:3]),
    group=st.sampled_from([2, 4, 8, 16, 32, 64]),
    size=st.floats(64 * MIB, 1e11),
)
def test_packing_ranks_inwards_is_never_slower_for_large_messages_on_nvlink(
    op: str, levels: tuple[Accelerator, Link, Link], group: int, size: float
) -> None:
    device, link, network = levels
    spans = sorted(placements(group, ((8, link), (64, network))), key=lambda spans: spans[0][0])
    times = [collective_time_s(device, op, size, each) for each in spans]
    assert all(packed <= spread * (1 + 1e-9) for spread, packed in pairwise(times))


def test_packing_ranks_inwards_is_slower_where_the_inner_link_is() -> None:
    # Eight L40S over PCIe share 1.6 GB/s (measured), eight cards of 200 Gb/s have 25 each: the packed one loses.
    packed, spread = (collective_time_s(L40S, "all_reduce", 1e9, s) for s in (((8, PCIE4),), ((8, HDR),)))
    assert spread < packed
    assert best_collective_time_s(L40S, "all_reduce", 1e9, 8, ((8, PCIE4), (8, HDR))) <= spread
