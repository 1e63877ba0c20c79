"""Cluster files: reading, writing, and telling what is wrong."""

import copy
import json
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.cluster import Accelerator, Cluster, Domain, Link
from shardwise.data.cluster_catalog import list_accelerators, list_clusters, list_links, load_accelerator, load_cluster
from shardwise.data.cluster_file import (
    MAX_FILE_BYTES,
    cluster_from_form,
    parse_cluster_toml,
    read_cluster_file,
    write_cluster_toml,
)
from shardwise.data.cluster_form import cluster_schema
from shardwise.data.faults import InputError

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = sorted((DOCS / "examples").glob("*.toml")) if DOCS.is_dir() else []


def faults(text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        parse_cluster_toml(text)
    return list(caught.value.faults)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_loads_fits_the_schema_and_survives_writing(path: Path) -> None:
    cluster = load_cluster(str(path))
    jsonschema.validate(tomllib.loads(path.read_text()), cluster_schema())
    assert parse_cluster_toml(write_cluster_toml(cluster)) == cluster


@pytest.mark.skipif(not DOCS.is_dir(), reason="not a checkout")
def test_the_committed_schema_is_the_generated_one() -> None:
    assert json.loads((DOCS / "cluster.schema.json").read_text()) == cluster_schema()


@pytest.mark.skipif(not DOCS.is_dir(), reason="not a checkout")
def test_the_page_lists_the_whole_catalogue() -> None:
    page = (DOCS / "clusters.md").read_text()
    assert [name for name in (*list_clusters(), *list_accelerators(), *list_links()) if f"`{name}`" not in page] == []


def test_a_family_and_its_nodes_are_the_catalogue_cluster() -> None:
    assert parse_cluster_toml("family = 'dgx-h100'\nnodes = 6") == load_cluster("dgx-h100:6")
    assert parse_cluster_toml("family = 'selene'") == load_cluster("selene")


def test_five_devices_of_one_node() -> None:
    cluster = parse_cluster_toml("family = 'dgx-h100'\nnodes = 1\ndevices = 5")
    assert (cluster.device_count, cluster.levels) == (5, ("node",))


def test_unequal_nodes_take_link_and_levels_from_their_family() -> None:
    text = "[[groups]]\nfamily = 'dgx-h100'\ncount = 6\n[[groups]]\nfamily = 'dgx-h100'\ndevices = 7"
    cluster = parse_cluster_toml(text, "lab")
    assert (cluster.name, cluster.device_count, cluster.levels) == ("lab", 55, ("node", "fabric"))
    assert cluster.links == load_cluster("dgx-h100:7").links


def test_mixed_accelerators_need_the_link_between_them() -> None:
    groups = "[[groups]]\nfamily = 'dgx-a100'\ncount = 4\n[[groups]]\nfamily = 'dgx-h100'"
    assert faults(groups) == ["link is missing: name a link of the catalogue or give its numbers, here or in levels"]
    cluster = parse_cluster_toml(f"link = 'ib-hdr'\n{groups}")
    assert [accelerator.name for accelerator in cluster.accelerators] == ["A100-SXM-80GB", "H100-SXM"]
    assert [link.name for level in cluster.links for link in level] == ["nvlink3", "nvlink4", "ib-hdr"]


def test_a_link_says_only_what_differs() -> None:
    cluster = parse_cluster_toml("family = 'dgx-h100'\nnodes = 4\nlink = { oversubscription = 2.5, latency_us = 7 }")
    assert cluster.root.link == Link("ib-ndr", "infiniband", 50e9, 7e-6, 2.5)


def test_levels_give_names_and_links_to_all_groups() -> None:
    text = """
        [[levels]]
        name = "box"
        link = "pcie5"
        [[levels]]
        name = "net"
        link = { bandwidth_GBps_per_device = 1.25, latency_us = 50 }
        [[groups]]
        accelerator = "L40S"
        devices = 4
        count = 3
        [[groups]]
        accelerator = "l40s"
        devices = 2
        link = "pcie4"
    """
    cluster = parse_cluster_toml(text)
    assert cluster.levels == ("box", "net")
    assert [child.link.name for child in cluster.root.children] == ["pcie5"] * 3 + ["pcie4"]
    assert cluster.root.link == Link("link", "link", 1.25e9, 50e-6)


def test_an_own_accelerator_comes_before_the_catalogue() -> None:
    text = """
        accelerators = [{ name = "H100-SXM", memory_GiB = 64, memory_bandwidth_GBps = 3000, tflops = { bf16 = 900 } }]
        groups = [{ accelerator = "H100-SXM", devices = 8, link = "nvlink4" }]
    """
    cluster = parse_cluster_toml(text)
    assert cluster.accelerators[0].memory_bytes == 64 * 2**30
    assert cluster.accelerators[0].flops_per_s == {"bf16": 900e12}
    assert parse_cluster_toml(write_cluster_toml(cluster)) == cluster


def test_a_rack_of_a_family_holds_no_more_than_the_family_says() -> None:
    assert parse_cluster_toml("[[groups]]\nfamily = 'gb200-nvl72'\ncount = 18").levels == ("node", "rack")
    assert "at most 18 members, not 19" in faults("[[groups]]\nfamily = 'gb200-nvl72'\ncount = 19")[0]


@pytest.mark.parametrize("name", list_clusters())
def test_every_family_survives_writing(name: str) -> None:
    for text in (name, f"{name}:7", f"{name}:1"):
        cluster = load_cluster(text)
        assert parse_cluster_toml(write_cluster_toml(cluster)) == cluster


NAMES = st.text("ab \"'\\#]=\n\r\t\0\x7f\x85\u2028é😀", min_size=1, max_size=8)
NUMBERS = st.integers(1, 10**9).map(lambda number: number / 1000)


@st.composite
def links(draw: st.DrawFn) -> Link:
    return Link(draw(NAMES), draw(NAMES), draw(NUMBERS) * 1e9, draw(NUMBERS) / 1e6, 1 + draw(NUMBERS))


@st.composite
def accelerators(draw: st.DrawFn) -> Accelerator:
    maybe = st.none() | NUMBERS
    return Accelerator(
        name=draw(NAMES),
        vendor=draw(NAMES),
        memory_bytes=draw(st.integers(2**21, 2**45)),
        memory_bandwidth_bytes_per_s=draw(NUMBERS) * 1e9,
        flops_per_s={"bf16": draw(NUMBERS) * 1e12, "fp8": draw(NUMBERS) * 1e12},
        tdp_w=draw(maybe),
        price_usd_per_hour=draw(maybe),
        source=draw(NAMES),
        notes=tuple(draw(st.lists(NAMES, max_size=2))),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    types = draw(st.lists(accelerators(), min_size=1, max_size=2, unique_by=lambda accelerator: accelerator.name))
    types.append(load_accelerator("H100-SXM"))
    names = draw(st.lists(NAMES, min_size=1, max_size=3))
    joins = draw(st.lists(links(), min_size=1, max_size=3))

    def domain(depth: int) -> Domain:
        name, link = draw(st.sampled_from([names[depth], "other"])), draw(st.sampled_from(joins))
        if depth == 0:
            return Domain(name, names[0], link, draw(st.sampled_from(types)), draw(st.integers(1, 8)))
        children = [domain(depth - 1) for _ in range(draw(st.integers(1, 3)))]
        return Domain(name, names[depth], link, children=tuple(children) * draw(st.integers(1, 2)))

    return Cluster(draw(NAMES), domain(len(names) - 1), draw(NAMES), tuple(draw(st.sets(NAMES, max_size=2))))


@settings(deadline=None)
@given(clusters())
def test_what_is_written_reads_back_equal(cluster: Cluster) -> None:
    text = write_cluster_toml(cluster)
    assert parse_cluster_toml(text) == cluster
    jsonschema.validate(tomllib.loads(text), cluster_schema())


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_cluster_file(path)


def test_broken_text_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    for content, rule in ((b"family = ", "TOML"), (b"\xff\xfe", "UTF-8"), (b"#" * (MAX_FILE_BYTES + 1), "bytes")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rule):
            load_cluster(str(path))


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "9" * 5000, f"family = 0x{'f' * 9000}"])
def test_text_that_breaks_parsers_is_bad_input(text: str) -> None:
    assert faults(text)


def test_all_faults_of_the_fields_are_told_together() -> None:
    told = faults("""
        nam = "typo"
        link = { bandwidth_GBps_per_device = -1, latency_us = nan }
        [[groups]]
        family = "dgx-h1000"
        count = 1000000000
        [[groups]]
        family = "dgx-h100"
        accelerator = "H100-SXM"
        devices = 0
        [[groups]]
        accelerator = "nonesuch"
        devices = "8"
        link = "nonesuch"
    """)
    starts = [
        "nam is not a field",
        "link.bandwidth_GBps_per_device=-1:",
        "link.latency_us=nan:",
        "groups[0].count=1000000000:",
        "groups[0].family: cluster='dgx-h1000'",
        "groups[1]: give exactly one of",
        "groups[1].devices=0:",
        "groups[2].devices='8':",
        "groups[2].accelerator: accelerator='nonesuch'",
        "groups[2].link: link='nonesuch'",
    ]
    assert len(told) == len(starts)
    for start in starts:
        assert any(fault.startswith(start) for fault in told), (start, told)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "the file: give exactly one of family, groups, not none"),
        ("family = 'dgx-h100'\n[[groups]]\nfamily = 'dgx-h100'", "not family and groups"),
        ("nodes = 3\n[[groups]]\nfamily = 'dgx-h100'", "nodes contradicts groups"),
        ("family = 'dgx-h100'\nlevels = [{ name = 'node' }]", "levels contradicts family"),
        ("family = 'dgx-h100'\nnodes = 1\nlink = 'ib-hdr'", "here is one node"),
        ("family = 'dgx-h100'\nnodes = 131073", "nodes=131073 must be"),
        ("family = 'dgx-h100'\ndevices = 9", "devices=9 must be at most 8"),
        ("[[groups]]\naccelerator = 'H100-SXM'", "groups[0].devices is missing"),
        ("[[groups]]\naccelerator = 'L40'\ndevices = 1\nlink = 'pcie4'", "memory_bandwidth_GBps is unknown"),
        ("[[groups]]\naccelerator = 'H100-SXM'\ndevices = 8", "groups[0].link is missing"),
        ("[[groups]]\naccelerator = 'H100-SXM'\ndevices = 8\nlink = { latency_us = 1 }", "give bandwidth_GBps"),
        ("[[groups]]\nfamily = 'dgx-h100'\ncount = 131073", "1048584 devices"),
        ("groups = [{ count = 1048576, groups = [{ family = 'p5', count = 1048576 }] }]", "at most 1048576"),
        ("groups = [{ family = 'p5' }, { groups = [{ family = 'p5' }] }]", "equally many levels"),
        ("levels = [{ name = 'a' }]\ngroups = [{ family = 'p5', count = 2 }]", "levels has 1 entries"),
        ("groups = " + "[{ groups = " * 9 + "[{ family = 'p5' }]" + " }]" * 9, "levels deep"),
        ("accelerators = [{ name = 'x' }]\nfamily = 'p5'", "accelerators[0].memory_GiB is missing"),
        ("[[groups]]\nfamily = 'p5'\nlink = { bandwidth_GBps_per_device = 1e300 }", "must be positive and finite"),
    ],
)
def test_what_cannot_be_meant_is_told(text: str, fault: str) -> None:
    assert any(fault in told for told in faults(text)), faults(text)


def test_an_accelerator_is_defined_once() -> None:
    entry = "{ name = 'x', memory_GiB = 1, memory_bandwidth_GBps = 1, tflops = { bf16 = 1 } }"
    text = f"accelerators = [{entry}, {entry}]\ngroups = [{{ accelerator = 'x', devices = 1, link = 'pcie4' }}]"
    assert "defined twice" in faults(text)[0]


FORMS: list[dict[str, Any]] = [
    {"family": "gb200-nvl72", "nodes": 20, "devices": 3, "link": {"oversubscription": 2.0}},
    {
        "name": "x",
        "link": {"like": "ib-hdr", "latency_us": 3.0},
        "accelerators": [{"name": "a", "memory_GiB": 1.0, "memory_bandwidth_GBps": 1.0, "tflops": {"bf16": 1.0}}],
        "levels": [{"name": "node", "link": "pcie4"}, {"name": "pod", "link": "ib-ndr"}, {"name": "spine"}],
        "groups": [
            {"count": 2, "groups": [{"accelerator": "a", "devices": 5}, {"family": "dgx-h100", "count": 3}]},
            {"name": "b", "groups": [{"accelerator": "mi300x", "devices": 8, "link": "xgmi-mi300"}]},
        ],
    },
]
JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 20),
    st.sampled_from([2**20, 2**20 + 1, 10**9, 10**400, 1e300, 5e-324]),
    st.floats(),
    st.text("ab-\0é", max_size=6),
    st.sampled_from(["dgx-h100", "H100-SXM", "ib-ndr", "a", [], {}, [{}], {"family": "p5"}, [{"family": "p5"}]]),
)
FIELDS = [
    "name",
    "family",
    "nodes",
    "devices",
    "link",
    "levels",
    "groups",
    "count",
    "accelerator",
    "accelerators",
    "zz",
]


def containers(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value] if isinstance(value, dict | list) else []
    return own + [found for part in inner for found in containers(part)]


@settings(deadline=None)
@given(st.sampled_from(FORMS), st.data())
def test_a_mutated_file_is_read_or_bad_input(form: dict[str, Any], data: st.DataObject) -> None:
    form = copy.deepcopy(form)
    for _ in range(data.draw(st.integers(0, 3))):
        target = data.draw(st.sampled_from(containers(form)))
        places = range(len(target)) if isinstance(target, list) else FIELDS
        if not places:
            target.append(data.draw(JUNK))
            continue
        place = data.draw(st.sampled_from(places))
        if isinstance(target, dict) and data.draw(st.booleans()):
            target.pop(place, None)
        else:
            target[place] = copy.deepcopy(data.draw(JUNK))
    with suppress(InputError):
        cluster = cluster_from_form(form)
        assert parse_cluster_toml(write_cluster_toml(cluster)) == cluster
