"""Times of one collective by algorithm, size and group, and the measured points beside them."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import shardwise as sw
from shardwise.data.cluster import Accelerator, Cluster, Domain, Link
from shardwise.data.cluster_catalog import load_cluster
from shardwise.data.efficiency import OPS, collective_curve, network_curve, read_table
from shardwise.data.measured_collectives import MeasuredCollective
from shardwise.formulations.collectives import bus_factor, collective_time_s
from shardwise.solver.cli import app
from shardwise.solver.collective import (
    MAX_BYTES,
    NEAR,
    WORDS,
    Group,
    Row,
    collective_rows,
    group_rows,
    message_sizes,
    placements,
)

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20
CLUSTERS = ("dgx-h100:4", "gb200-nvl72:36", "mi300x:2", "l40s:2", "dgx-h800:2", "tpu-v5e:2", "a10g:4")
NVLINK4 = Link("nvlink4", "nvlink", 450e9, 1.9e-6)
PCIE5 = Link("pcie5", "pcie", 63e9, 2.5e-6)
NDR = Link("ib-ndr", "infiniband", 50e9, 4e-6)
H100 = load_cluster("dgx-h100:1").accelerators[0]


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["collective", *arguments])
    return done.exit_code, done.output


def row_of(rows: tuple[Row, ...], ranks: int, algorithm: str, size: int) -> Row:
    found = [row for row in rows if (row.group.ranks, row.algorithm, row.bytes) == (ranks, algorithm, size)]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("op", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"])
def test_the_fastest_row_is_the_time_of_the_formulation(cluster: str, op: str) -> None:
    read = load_cluster(cluster)
    rows = collective_rows(op, 3_000_000, cluster)
    for (group, size), found in groupby(rows, lambda row: (row.group, row.bytes)):
        algorithms = list(found)
        spans = tuple(zip(group.members, (links[0] for links in read.links), strict=True))
        time_s = collective_time_s(read.accelerators[0], WORDS[op], size, spans)
        fastest = [row for row in algorithms if row.fastest]
        assert [row.time_s for row in fastest] == [time_s]
        assert all(row.time_s >= time_s for row in algorithms)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CLUSTERS), st.sampled_from(OPS), st.integers(1, 10**10), st.integers(1, 10**10), st.integers(2, 64)
)
def test_time_does_not_fall_as_the_message_grows(cluster: str, op: str, size: int, more: int, ranks: int) -> None:
    read = load_cluster(cluster)
    links = tuple(links[0] for links in read.links)
    for members in placements(read, ranks):
        group = Group(read.accelerators[0], read.levels, links, members)
        small, large = (
            {row.algorithm: row.time_s for row in group_rows(op, cluster, group, bytes)}
            for bytes in (size, size + more)
        )
        assert small.keys() == large.keys()
        assert all(0 < small[name] <= large[name] for name in small)


def test_ring_and_tree_are_those_of_the_formulas() -> None:
    # (C3) and (C4) by hand: 64 ranks in 8 nodes of 8, S = 1 GiB; each card carries S / 8.
    size, phi = 2**30, 2 * 63 / 64
    own, passing = (collective_curve(H100, NVLINK4, op, 8) for op in ("all_reduce", "all_gather"))
    ring, tree = network_curve(NDR, "ring"), network_curve(NDR, "tree")

    def together(one: float, other: float, overlap: float) -> float:
        return float((one**overlap + other**overlap) ** (1 / overlap))

    outer = phi * size / 8 / ring.bytes_per_s * (1 + (ring.half_bytes / (size / 8)) ** ring.exponent)
    inner = phi * size / passing.bytes_per_s * (1 + (passing.half_bytes / size) ** passing.exponent)
    steps = 2 * 7 * (ring.hop_s + 7 * ring.inner_hop_s)
    by_ring = own.alpha_s + steps + together(outer, inner, ring.overlap)
    outer = 2 * size / 8 / tree.bytes_per_s * (1 + (tree.half_bytes / (size / 8)) ** tree.exponent)
    inner = 2 * 7 / 8 * size / own.bytes_per_s * (1 + (own.half_bytes / size) ** own.exponent)
    by_tree = own.alpha_s + 2 * 3 * tree.hop_s + together(outer, inner, ring.overlap)
    rows = collective_rows("all-reduce", size, "dgx-h100:8", 64)
    assert row_of(rows, 64, "ring", size).time_s == pytest.approx(by_ring, rel=1e-12)
    assert row_of(rows, 64, "tree", size).time_s == pytest.approx(by_tree, rel=1e-12)


def test_groups_fill_the_levels_that_they_name() -> None:
    rows = collective_rows("all-reduce", MIB, "gb200-nvl72:36")
    seen = {row.group.ranks: (row.group.level, row.group.placement, row.algorithm) for row in rows if row.fastest}
    assert list(seen) == [2, 4, 8, 16, 32, 64, 72, 128, 144]
    assert seen[4] == ("node", "node 4", "in-domain")
    assert seen[72] == ("rack", "node 4 x rack 18", "in-domain")  # tray and rack are one domain of NVLink
    assert seen[144][:2] == ("fabric", "node 4 x rack 18 x fabric 2")
    assert {row.algorithm for row in rows if row.group.ranks == 144} == {"ring", "tree"}


def test_a_group_asked_for_has_every_placement() -> None:
    rows = collective_rows("all-gather", MIB, "dgx-h100:8", 8)
    assert list(dict.fromkeys(row.group.members for row in rows)) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert {row.group.level for row in rows} == {"node", "fabric"}
    assert row_of(tuple(row for row in rows if row.group.members == (1, 8)), 8, "ring", MIB).group.domain == (1, None)


def test_racks_of_unequal_room_hold_what_every_one_of_them_holds() -> None:
    cluster = load_cluster("gb200-nvl72:19")  # 10 trays in one rack, 9 in the other
    assert {members for members in placements(cluster, 72)} == {(4, 9, 2)}
    assert {members for members in placements(cluster, 40)} == {(4, 10, 1), (4, 5, 2)}
    assert list(placements(cluster, 80)) == []


def test_links_of_another_rate_in_a_node_are_not_one_domain() -> None:
    pair = Domain("pair", "pair", NVLINK4, H100, 2)
    cluster = Cluster("pairs", Domain("node", "node", PCIE5, children=(pair,) * 4))
    rows = collective_rows("all-reduce", MIB, cluster)
    assert {(row.group.ranks, row.algorithm) for row in rows} == {(2, "in-domain"), (4, "ring"), (8, "ring")}
    curves = row_of(rows, 8, "ring", MIB).curves
    assert [curve.split(":")[0] for curve in curves] == [
        "nvlink4, all_gather of 2 ranks",
        "pcie5, all_reduce of 4 ranks",
    ]


def test_bandwidths_are_those_of_nccl_tests() -> None:
    rows = collective_rows("all-reduce", MIB, "dgx-h100:2", 8)
    row = row_of(rows, 8, "in-domain", MIB)
    assert row.algorithm_bytes_per_s == MIB / row.time_s
    assert row.bus_bytes_per_s == pytest.approx(row.algorithm_bytes_per_s * 7 / 4)
    assert bus_factor("sendrecv", 8) == 1


@pytest.mark.parametrize("size", [1, 3, 64, 1000, MIB, MAX_BYTES])
def test_sizes_are_powers_of_two_around_the_one_asked_for(size: int) -> None:
    sizes = message_sizes(size)
    assert size in sizes
    assert all(power.bit_count() == 1 for power in sizes if power != size)
    assert size / 64 <= sizes[0] < max(2, size / 32)
    assert size * 32 < sizes[-1] <= size * 64


def test_a_measured_point_stands_beside_the_fastest_row() -> None:
    # ai-dynamo/aiconfigurator@095f58a51c, h100_sxm, nccl 2.29.2: all-reduce of 256 MiB among 8 takes 1092.1 us.
    rows = collective_rows("all-reduce", 256 * MIB, "dgx-h100:1", 8)
    found = row_of(rows, 8, "in-domain", 256 * MIB).measured
    assert found[0].time_s == pytest.approx(1092.1e-6)
    assert "aiconfigurator" in found[0].source
    assert found[0].left_out == ""
    assert found[0].error == pytest.approx(found[0].model_time_s / 1092.1e-6 - 1)
    assert len({comparison.source for comparison in found}) == len(found) > 1
    assert any(comparison.left_out for comparison in found[1:])  # a source that no curve was fitted to


def test_a_measured_point_between_nodes_is_of_the_same_network() -> None:
    rows = collective_rows("all-reduce", 2**30, "dgx-h100:10", 80)
    measured = next(row for row in rows if row.bytes == 2**30 and row.fastest and row.group.members == (8, 10)).measured
    assert measured[0].time_s == pytest.approx(6149.2e-6, rel=1e-4)
    assert "xxrjun/nccl-tests-cluster" in measured[0].source
    assert not any(row.measured for row in rows if not row.fastest)
    other = Cluster("slow", Domain("fabric", "fabric", Link("hdr", "infiniband", 25e9, 4e-6), children=(
        Domain("node", "node", NVLINK4, H100, 8),) * 10))  # fmt: skip
    assert not any(row.measured for row in collective_rows("all-reduce", 2**30, other, 80))


def test_measured_points_are_within_a_factor_of_two_in_size() -> None:
    rows = collective_rows("all-to-all", 512 * MIB, "dgx-h200:1", 8)
    for row in rows:
        assert all(1 / NEAR <= comparison.bytes / row.bytes <= NEAR for comparison in row.measured)
    assert row_of(rows, 8, "in-domain", 1024 * MIB).measured[0].bytes == 512 * MIB
    assert row_of(rows, 8, "in-domain", 2048 * MIB).measured == ()


def test_an_accelerator_that_nobody_measured_says_whose_curve_it_takes() -> None:
    rows = collective_rows("all-to-all", MIB, "dgx-h800:1", 8)
    assert all(row.scaled and not row.measured for row in rows)
    assert "no alltoall measurement; nvlink curve of H100-SXM scaled by 0.44" in rows[0].curves[0]
    assert not any(row.scaled for row in collective_rows("all-to-all", MIB, "dgx-h100:1", 8))


def test_curves_miss_the_points_that_they_were_fitted_to_as_little_as_their_rows_say() -> None:
    said = {
        (row["accelerator"], row["op"], int(row["ranks"])): float(row["mape_pct"])
        for row in read_table("collectives/curves.csv")
        if int(row["points"]) == 21
    }
    seen: dict[tuple[str, str, int], list[float]] = {}
    links = {"dgx-h100:1": "H100-SXM", "dgx-a100:1": "A100-SXM-80GB"}
    for cluster, name in links.items():
        read = load_cluster(cluster)
        for point in read_table("collectives/points.csv"):
            key = (point["accelerator"], point["op"], int(point["domain_ranks"]))
            if point["accelerator"] == name and key in said and point["domains"] == "1" and not point["left_out"]:
                spans = ((key[2], read.links[0][0]),)
                model_s = collective_time_s(read.accelerators[0], point["op"], int(point["bytes"]), spans)
                seen.setdefault(key, []).append(abs(model_s / float(point["time_us"]) * 1e6 - 1))
    assert len(seen) == 24
    for key, errors in seen.items():
        assert 100 * sum(errors) / len(errors) == pytest.approx(said[key], abs=0.2)


def test_every_measured_point_has_a_source() -> None:
    assert all(row["source"] for row in read_table("collectives/points.csv"))
    with pytest.raises(ValueError, match="network='' must be named where domains=2"):
        MeasuredCollective("A", "nvlink", 1e9, "all_reduce", 2, "", 0.0, 2, 8, 1e-6, "", "somewhere")
    with pytest.raises(ValueError, match=r"time_s=0\.0 must be positive"):
        MeasuredCollective("A", "nvlink", 1e9, "all_reduce", 2, "", 0.0, 1, 8, 0.0, "", "somewhere")


def test_bad_input_is_told_all_at_once() -> None:
    with pytest.raises(sw.InputError) as error:
        sw.collective("broadcast", 0, "dgx-h10:4", 1)
    assert [fault.split("=")[0] for fault in error.value.faults] == ["op", "bytes", "group", "cluster"]
    assert "must be one of all-reduce" in error.value.faults[0]


@pytest.mark.parametrize("group", [True, 33, 11, -4, 2.0])
def test_a_group_that_the_cluster_cannot_hold_is_refused(group: int) -> None:
    with pytest.raises(sw.InputError, match="group="):
        collective_rows("all-reduce", MIB, "dgx-h100:4", group)


def test_clusters_of_unlike_parts_or_of_one_device_are_refused() -> None:
    other = Accelerator("other", "any", 2**30, 1e12, {"bf16": 1e12})
    nodes = (Domain("a", "node", NVLINK4, H100, 8), Domain("b", "node", PCIE5, other, 8))
    with pytest.raises(sw.InputError) as error:
        collective_rows("all-reduce", MIB, Cluster("mixed", Domain("fabric", "fabric", NDR, children=nodes)))
    assert "mixed accelerators (H100-SXM, other)" in error.value.faults[0]
    assert "level node has 2 different links" in error.value.faults[1]
    with pytest.raises(sw.InputError, match="device_count=1 must be 2 or more"):
        collective_rows("all-reduce", MIB, Cluster("one", Domain("node", "node", NVLINK4, H100, 1)))


def test_a_group_is_built_of_one_number_per_level() -> None:
    with pytest.raises(ValueError, match="one number for each level"):
        Group(H100, ("node",), (NVLINK4,), (2, 2))
    with pytest.raises(ValueError, match="two ranks or more"):
        Group(H100, ("node",), (NVLINK4,), (1,))


def test_the_table_has_the_rows_and_the_nearest_measurement() -> None:
    table = sw.collective("All_Reduce", 64 * MIB, "dgx-h100:2")
    rows = collective_rows("all-reduce", 64 * MIB, "dgx-h100:2")
    assert len(table) == len(rows)
    assert list(table.time_s) == [row.time_s for row in rows]
    for cells, row in zip(table.to_dict("records"), rows, strict=True):
        assert cells["fastest"] == row.fastest
        if row.measured:
            assert cells["measured_error"] == row.measured[0].error
            assert cells["measured_source"] == row.measured[0].source
    unmeasured = sw.collective("p2p", MIB, "dgx-h800:1")
    assert unmeasured.measured_bytes.isna().all()


def test_the_command_prints_tables_and_a_plot_and_writes_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    code, text = invoke("all-reduce", "--bytes", str(64 * MIB), "--cluster", "dgx-h100:2", "--json", str(path), "-q")
    assert code == 0, text
    for words in ("all_reduce on dgx-h100:2", "tree*", "time against size", "measured, 8 ranks", "aiconfigurator"):
        assert words in text
    rows = json.loads(path.read_text())
    assert rows == [row.to_dict() for row in collective_rows("all-reduce", 64 * MIB, "dgx-h100:2")]
    code, text = invoke("p2p", "--bytes", "1", "--cluster", "dgx-h100:1", "--json", "-")
    assert code == 0
    assert {row["algorithm"] for row in json.loads(text)} == {"p2p"}


def test_the_command_names_what_is_wrong_with_code_2(tmp_path: Path) -> None:
    code, text = invoke("broadcast", "--bytes", "0", "--cluster", "dgx-h10:4", "--group", "1")
    assert code == 2
    assert text.count("error: ") == 4
    code, text = invoke("all-reduce", "--bytes", "8", "--cluster", "dgx-h100:1", "--json", str(tmp_path))
    assert code == 2
    assert "must be a file" in text
    assert invoke("all-reduce", "--cluster", "dgx-h100:1")[0] == 2
