"""The catalogue of accelerators, links and node families."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardwise.data import cluster_catalog
from shardwise.data.cluster import MAX_DEVICES, Link
from shardwise.data.cluster_catalog import (
    Fact,
    accelerator_facts,
    cluster_facts,
    family_cluster,
    list_accelerators,
    list_clusters,
    list_links,
    load_accelerator,
    load_cluster,
    load_family,
    load_link,
)
from shardwise.data.faults import InputError

INCOMPLETE = {
    "H100-NVL": "tflops",
    "MI350X": "tflops",
    "L40": "memory_bandwidth_GBps",
    "A40": "memory_bandwidth_GBps",
    "Ascend 910C": "memory_bandwidth_GBps",
}


def sizes(text: str) -> list[int]:
    """Members of the outermost domains of the cluster `text`."""
    return [len(child.children) or child.devices for child in load_cluster(text).root.children]


def is_sourced(fact: Fact) -> bool:
    return bool(fact.source) and fact.confidence in ("A", "B", "C", "D (assumed)")


@pytest.mark.parametrize("name", list_clusters())
def test_every_family_loads_with_sourced_numbers(name: str) -> None:
    facts = cluster_facts(name)
    cluster = load_cluster(name)
    family = load_family(name)
    levels = [level.name for level in family.levels]
    numbers = ("bandwidth_GBps_per_device", "latency_us", "oversubscription")
    told = {fact.name for fact in facts}
    assert told >= {f"{name}.devices_per_node", *(f"{name}.{level}.{number}" for level in levels for number in numbers)}
    assert all(is_sourced(fact) for fact in facts)
    assert all(any(fact.name in line for line in cluster.assumed) for fact in facts if fact.assumed)
    assert cluster.source
    assert cluster.device_count == family.default_nodes * family.devices_per_node
    assert cluster.levels == tuple(levels[: len(cluster.levels)])


@pytest.mark.parametrize("name", list_accelerators())
def test_every_accelerator_number_is_sourced(name: str) -> None:
    facts = accelerator_facts(name)
    assert facts
    assert all(is_sourced(fact) for fact in facts)


@pytest.mark.parametrize("name", list_accelerators())
def test_every_accelerator_loads_or_names_the_missing_number(name: str) -> None:
    if name in INCOMPLETE:
        with pytest.raises(InputError, match=f"{INCOMPLETE[name]} is unknown"):
            load_accelerator(name)
    else:
        assert load_accelerator(name).name == name


@pytest.mark.parametrize("name", list_links())
def test_every_link_loads(name: str) -> None:
    assert load_link(name).oversubscription == 1


def test_a_provenance_entry_speaks_for_a_number_that_is_there() -> None:
    table = tomllib.loads(Path(cluster_catalog.__file__).with_name("accelerators.toml").read_text(encoding="utf-8"))
    for name, record in table.items():
        for field in record.get("provenance", {}):
            head, _, precision = field.partition(".")
            assert head in record, (name, field)
            assert not precision or precision in record[head], (name, field)


def test_no_name_or_alias_means_two_things() -> None:
    folder = Path(cluster_catalog.__file__)
    network = tomllib.loads(folder.with_name("node_families.toml").read_text(encoding="utf-8"))
    accelerators = tomllib.loads(folder.with_name("accelerators.toml").read_text(encoding="utf-8"))
    for table in (network["families"], network["links"], accelerators):
        names = [name for key, record in table.items() for name in (key, *record.get("aliases", ()))]
        plain = ["".join(filter(str.isalnum, name.lower())) for name in names]
        assert len(set(plain)) == len(plain)


def test_dgx_h100() -> None:
    cluster = load_cluster("dgx-h100:4")
    assert cluster.levels == ("node", "fabric")
    assert cluster.links == (
        (Link("nvlink4", "nvlink", 450e9, 1.9 / 1e6),),
        (Link("ib-ndr", "infiniband", 50e9, 4 / 1e6),),
    )
    assert cluster.capacity((8,)) == 4
    assert cluster.accelerators[0].memory_bytes == 80 * 2**30


def test_one_node_is_one_level() -> None:
    for name in ("dgx-h100:1", "dgx-h100", "gb200-nvl72:1"):
        assert load_cluster(name).levels == ("node",)


@pytest.mark.parametrize("nodes", [6, 12, 24, 42])
def test_node_counts_that_are_no_power_of_two(nodes: int) -> None:
    cluster = load_cluster(f"dgx-h100:{nodes}")
    assert cluster.device_count == 8 * nodes
    assert cluster.capacity((8,)) == nodes


@pytest.mark.parametrize("devices", [5, 7])
def test_part_of_a_node(devices: int) -> None:
    cluster = family_cluster(load_family("dgx-h100"), 1, devices)
    assert cluster.device_count == cluster.capacity(()) == devices
    assert family_cluster(load_family("dgx-h100"), 3, devices).device_count == 3 * devices


@pytest.mark.parametrize("devices", [0, -1, 9])
def test_a_node_has_no_more_devices_than_its_family(devices: int) -> None:
    with pytest.raises(InputError, match=f"devices={devices} must be between 1 and 8"):
        family_cluster(load_family("dgx-h100"), 1, devices)


@pytest.mark.parametrize(
    ("nodes", "racks"),
    [(2, [4] * 2), (18, [4] * 18), (19, [10, 9]), (32, [16, 16]), (42, [14, 14, 14]), (144, [18] * 8)],
)
def test_nvl72_racks_are_as_few_and_as_even_as_possible(nodes: int, racks: list[int]) -> None:
    assert sizes(f"gb200-nvl72:{nodes}") == racks
    assert load_cluster(f"gb200-nvl72:{nodes}").device_count == 4 * nodes


def test_nvl72_has_a_fabric_from_the_second_rack() -> None:
    assert load_cluster("gb200-nvl72:18").levels == ("node", "rack")
    cluster = load_cluster("gb200-nvl72:36")
    assert cluster.levels == ("node", "rack", "fabric")
    assert [level[0].bandwidth_bytes_per_s for level in cluster.links] == [900e9, 900e9, 50e9]
    assert cluster.capacity((4,)) == 18
    assert cluster.capacity((4, 18)) == 2


def test_pods_are_oversubscribed_where_stated() -> None:
    cluster = load_cluster("meta-24k")
    assert cluster.device_count == 24_576
    assert sizes("meta-24k") == [384] * 8
    assert [level[0].oversubscription for level in cluster.links] == [1, 1, 7]
    assert cluster.links[2][0].effective_bytes_per_s == pytest.approx(50e9 / 7)


def test_a_pcie_box_has_no_scale_up_link() -> None:
    assert load_cluster("l40s:2").links[0][0].kind == "pcie"


def test_equal_nodes_are_one_object() -> None:
    cluster = load_cluster("dgx-h100:8192")
    assert cluster.device_count == 65_536
    assert len({id(leaf) for leaf in cluster.leaves}) == 1
    assert cluster.capacity((8,)) == 8192


@pytest.mark.parametrize("name", ["h100", "H100-SXM", "h100_sxm", "H100 SXM", "h100-sxm5-80gb"])
def test_accelerator_names_are_tolerant(name: str) -> None:
    assert load_accelerator(name).name == "H100-SXM"
    assert load_accelerator("a100-80gb").name == "A100-SXM-80GB"


def test_family_names_are_tolerant() -> None:
    assert load_cluster("DGX_H100:4") == load_cluster("dgx-h100:4")
    assert load_cluster("h800:4") == load_cluster("dgx-h800:4")


def test_an_unknown_name_gets_close_matches() -> None:
    with pytest.raises(InputError, match=r"cluster='dgx-h10' .*did you mean dgx-h100"):
        load_cluster("dgx-h10")
    with pytest.raises(InputError, match=r"accelerator='mi30x'.*MI300X"):
        load_accelerator("mi30x")
    with pytest.raises(InputError, match=r"known: .*nvlink4"):
        load_link("??")


@pytest.mark.parametrize(
    "nodes", ["0", "-1", "x", "", "1.5", "1e3", "+4", "٣", "1_0", "131073", "1000000000", "9" * 5000]
)
def test_node_counts_that_are_refused(nodes: str) -> None:
    with pytest.raises(InputError, match=r"nodes=.* must be a whole number between 1 and 131072"):
        load_cluster(f"dgx-h100:{nodes}")


def test_a_torus_ends_at_its_pod() -> None:
    assert load_cluster("tpu-v5p:2240").device_count == 8960
    with pytest.raises(InputError, match="between 1 and 2240"):
        load_cluster("tpu-v5p:2241")


def test_both_faults_are_told() -> None:
    with pytest.raises(InputError) as caught:
        load_cluster("dgx-h10:0")
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize("text", ["", ":", ":8", "a" * 5000, "no/such/file.toml", "\0", "\0.toml", "dgx-h100:8:8", "/"])
def test_nonsense_is_bad_input(text: str) -> None:
    with pytest.raises(InputError):
        load_cluster(text)


def test_no_catalogue_number_exceeds_the_device_limit() -> None:
    for name in list_clusters():
        family = load_family(name)
        assert family.max_nodes * family.devices_per_node <= MAX_DEVICES


def test_the_catalogue_needs_no_pydantic() -> None:
    code = (
        "import sys; from shardwise.data.cluster_catalog import load_cluster; load_cluster('dgx-h100:4'); "
        "sys.exit('pydantic' in sys.modules)"
    )
    path = {"PYTHONPATH": str(Path(cluster_catalog.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=path, check=False).returncode == 0
