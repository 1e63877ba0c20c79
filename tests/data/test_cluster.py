"""The value types of a cluster."""

import math
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.cluster import MAX_DEVICES, Accelerator, Cluster, Domain, Link

LINK = Link("fast", "nvlink", 450e9, 2e-6)
OTHER = Link("slow", "infiniband", 50e9, 4e-6)
GPU = Accelerator("gpu", "vendor", 80 * 2**30, 3e12, {"bf16": 1e15})
OLD = Accelerator("old", "vendor", 40 * 2**30, 2e12, {"fp16": 3e14})


def node(devices: int = 8, accelerator: Accelerator = GPU) -> Domain:
    return Domain("node", "node", LINK, accelerator, devices)


def fabric(*nodes: Domain) -> Domain:
    return Domain("fabric", "fabric", OTHER, children=nodes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bandwidth_bytes_per_s": 0},
        {"bandwidth_bytes_per_s": math.nan},
        {"bandwidth_bytes_per_s": math.inf},
        {"latency_s": -1e-6},
        {"latency_s": math.nan},
        {"oversubscription": 0.5},
        {"oversubscription": math.inf},
    ],
)
def test_a_link_refuses(wrong: dict[str, float]) -> None:
    (field,) = wrong
    fields: dict[str, Any] = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6, "oversubscription": 1.0, **wrong}
    with pytest.raises(ValueError, match=field):
        Link("link", "kind", **fields)


def test_a_link_names_every_fault_at_once() -> None:
    with pytest.raises(ValueError, match=r"bandwidth.*latency.*oversubscription"):
        Link("link", "kind", -1, -1, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_bytes": 0},
        {"memory_bandwidth_bytes_per_s": -1.0},
        {"flops_per_s": {}},
        {"flops_per_s": {"bf16": math.nan}},
        {"tdp_w": 0.0},
        {"host_link_bytes_per_s": math.inf},
        {"price_usd_per_hour": -0.1},
    ],
)
def test_an_accelerator_refuses(wrong: dict[str, Any]) -> None:
    (field,) = wrong
    fields: dict[str, Any] = {
        "memory_bytes": 1,
        "memory_bandwidth_bytes_per_s": 1.0,
        "flops_per_s": {"bf16": 1.0},
        **wrong,
    }
    with pytest.raises(ValueError, match=field):
        Accelerator("name", "vendor", **fields)


def test_a_domain_holds_either_devices_or_children() -> None:
    with pytest.raises(ValueError, match="either"):
        Domain("node", "node", LINK)
    with pytest.raises(ValueError, match="either"):
        Domain("node", "node", LINK, GPU, 8, (node(),))
    with pytest.raises(ValueError, match="devices=3"):
        Domain("node", "node", LINK, None, 3, (node(),))


@pytest.mark.parametrize("devices", [0, -1, MAX_DEVICES + 1])
def test_a_node_refuses_devices_out_of_range(devices: int) -> None:
    with pytest.raises(ValueError, match="devices="):
        node(devices)


def test_children_have_equally_many_levels() -> None:
    with pytest.raises(ValueError, match="same number of levels"):
        fabric(node(), fabric(node()))


def test_a_cluster_refuses_too_many_devices() -> None:
    with pytest.raises(ValueError, match="at most"):
        Cluster("huge", fabric(*(node(MAX_DEVICES),) * 2))


def test_a_level_has_one_name() -> None:
    tray = Domain("tray", "tray", LINK, GPU, 4)
    with pytest.raises(ValueError, match="two names"):
        Cluster("odd", fabric(node(), tray))


def test_different_accelerators_have_different_names() -> None:
    twin = Accelerator("gpu", "vendor", 40 * 2**30, 3e12, {"bf16": 1e15})
    with pytest.raises(ValueError, match="share a name"):
        Cluster("odd", fabric(node(), node(8, twin)))


def test_unequal_nodes_and_mixed_accelerators() -> None:
    cluster = Cluster("mixed", fabric(node(5), node(7, OLD), node(8)))
    assert cluster.device_count == 20
    assert cluster.accelerators == (GPU, OLD)
    assert [leaf.devices for leaf in cluster.leaves] == [5, 7, 8]
    assert cluster.levels == ("node", "fabric")
    assert cluster.links == ((LINK,), (OTHER,))
    assert [cluster.capacity((devices,)) for devices in (4, 5, 6, 8, 9)] == [3, 3, 2, 1, 0]
    assert cluster.capacity(()) == 8


def test_links_tell_levels_that_are_not_uniform() -> None:
    slow_node = Domain("node", "node", OTHER, GPU, 8)
    assert Cluster("mixed", fabric(node(), slow_node)).links == ((LINK, OTHER), (OTHER,))


def test_a_block_does_not_reach_above_the_root() -> None:
    cluster = Cluster("node", node())
    assert cluster.capacity(()) == 8
    with pytest.raises(ValueError, match="at most 0 levels"):
        cluster.capacity((8,))


def test_shared_and_separate_children_are_the_same_cluster() -> None:
    shared = Cluster("c", fabric(*(node(),) * 50))
    separate = Cluster("c", fabric(*(node() for _ in range(50))))
    assert shared == separate
    assert hash(shared) == hash(separate)
    assert shared.device_count == separate.device_count == 400
    assert shared.capacity((8,)) == separate.capacity((8,)) == 50


def trees(depth: int) -> st.SearchStrategy[Domain]:
    if depth == 0:
        return st.integers(1, 4).map(node)
    children = st.lists(trees(depth - 1), min_size=1, max_size=3)
    return children.map(lambda drawn: Domain("d", f"level {depth}", LINK, children=tuple(drawn)))


def holds(domain: Domain, block: tuple[int, ...]) -> bool:
    """Whether some choice of members of `domain` holds `block`, by trying every choice."""
    if not domain.children:
        return any(all(chosen) for chosen in combinations([True] * domain.devices, block[0]))
    chosen_all = combinations(domain.children, block[-1])
    return any(all(holds(child, block[:-1]) for child in chosen) for chosen in chosen_all)


def at_depth(domain: Domain, depth: int) -> list[Domain]:
    if domain.depth == depth:
        return [domain]
    return [found for child in domain.children for found in at_depth(child, depth)]


@given(st.integers(0, 3).flatmap(trees), st.data())
def test_capacity_is_the_most_members_that_hold_the_block(root: Domain, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, root.depth))
    block = tuple(data.draw(st.integers(1, 4)) for _ in range(size))
    most = 0
    for site in at_depth(root, size):
        members = range(1, site.devices + 1) if size == 0 else range(1, len(site.children) + 1)
        most = max([most, *(count for count in members if holds(site, (*block, count)))])
    assert Cluster("tree", root).capacity(block) == most
