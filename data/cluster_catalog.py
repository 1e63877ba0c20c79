"""The catalogue: accelerators, links and node families, each number with its source.

`name:nodes` becomes a `Cluster` of equal nodes. Nothing is read before the first question; then two TOML files beside
this module are parsed once.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.data.cluster import MAX_DEVICES, Accelerator, Cluster, Domain, Host, Link
from shardwise.data.faults import InputError

Record = dict[str, Any]

_NEEDED = ("memory_GiB", "memory_bandwidth_GBps", "tflops")
_HOST = ("host_memory_GB", "host_memory_GBps")
_NUMBERS = (*_NEEDED, "tdp_W", "idle_W", "scale_up_GBps", "host_link_GBps", "measured_tflops", "price_usd_per_hour")


class Fact(NamedTuple):
    """One number of the catalogue and where it comes from."""

    name: str
    value: float | str
    source: str
    confidence: str

    @property
    def assumed(self) -> bool:
        return self.confidence.startswith("D")


@dataclass(frozen=True, slots=True)
class FamilyLevel:
    """One level of a node family; `size` is the most members it joins, None when there is no limit."""

    name: str
    link: Link
    size: int | None


@dataclass(frozen=True, slots=True)
class NodeFamily:
    """Equal nodes and the levels above them, from the node outwards."""

    name: str
    accelerator: Accelerator
    devices_per_node: int
    default_nodes: int
    levels: tuple[FamilyLevel, ...]
    source: str
    assumed: tuple[str, ...]
    host: Host | None = None

    @property
    def max_nodes(self) -> int:
        """Nodes the outermost level can join, and a plan can use."""
        sizes = [level.size for level in self.levels[1:]]
        limit = MAX_DEVICES // self.devices_per_node
        return limit if None in sizes else min(limit, math.prod(size for size in sizes if size))


def load_cluster(text: str) -> Cluster:
    """Return the cluster called `name[:nodes]` in the catalogue, or described by the TOML file at path `text`.

    Names may be written in any case, with spaces, dashes or underscores; without `:nodes` the family has the number that
    the catalogue states. `docs/clusters.md` lists the families, each number with its source, and the fields of a file.

    Raises
    ------
    InputError
        When there is no such name, with close ones; or with every fault of the file.
    """
    if text.endswith(".toml") or _is_file(text):
        from shardwise.data.cluster_file import read_cluster_file  # pydantic is slow to import

        return read_cluster_file(Path(text))
    name, colon, nodes = text.partition(":")
    try:
        family = load_family(name)
    except InputError as error:
        raise InputError([*error.faults, *([] if not colon else _node_faults(nodes, MAX_DEVICES))]) from None
    if not colon:
        return family_cluster(family)
    if faults := _node_faults(nodes, family.max_nodes):
        raise InputError(faults)
    return family_cluster(family, int(nodes))


def family_cluster(family: NodeFamily, nodes: int | None = None, devices: int | None = None) -> Cluster:
    """Return `nodes` equal nodes with `devices` free accelerators each; by default the family's own numbers.

    A level with more members than it joins is split as evenly as possible; a level with one member is left out.
    """
    nodes = family.default_nodes if nodes is None else nodes
    devices = family.devices_per_node if devices is None else devices
    faults = _node_faults(str(nodes), family.max_nodes)
    if not 1 <= devices <= family.devices_per_node:
        faults.append(
            f"devices={devices} must be between 1 and {family.devices_per_node}, the node size of {family.name}"
        )
    if faults:
        raise InputError(faults)
    node = family.levels[0]
    members = (Domain(node.name, node.name, node.link, family.accelerator, devices),) * nodes
    for level in family.levels[1:]:
        if len(members) > 1:
            members = _joined(members, level)
    of_each = "" if devices == family.devices_per_node else f" ({devices} devices each)"
    return Cluster(f"{family.name}:{nodes}{of_each}", members[0], family.source, family.assumed, family.host)


def list_clusters() -> tuple[str, ...]:
    """Return the names of the node families, in the order of the catalogue."""
    return tuple(_families())


def list_accelerators() -> tuple[str, ...]:
    """Return the names of the accelerators, in the order of the catalogue, incomplete ones included."""
    return tuple(_accelerators())


def list_links() -> tuple[str, ...]:
    """Return the names of the links, in the order of the catalogue."""
    return tuple(_network()["links"])


@lru_cache(maxsize=256)
def load_accelerator(name: str) -> Accelerator:
    """Return the accelerator called `name`; case, spaces, dashes and underscores do not matter."""
    table = _accelerators()
    name = _canonical("accelerator", name, table)
    record = table[name]
    missing = [field for field in _NEEDED if field not in record]
    if missing:
        cure = "define the accelerator with this number under [[accelerators]] of a cluster file"
        raise InputError([f"accelerator {name}: {field} is unknown in the catalogue; {cure}" for field in missing])
    assumed = (fact for fact in accelerator_facts(name) if fact.assumed)
    price = record.get("price_usd_per_hour")
    return Accelerator(
        name=name,
        vendor=record["vendor"],
        memory_bytes=round(record["memory_GiB"] * 2**30),
        memory_bandwidth_bytes_per_s=record["memory_bandwidth_GBps"] * 1e9,
        flops_per_s={precision: peak * 1e12 for precision, peak in record["tflops"].items()},
        tdp_w=record.get("tdp_W"),
        idle_w=record.get("idle_W"),
        host_link_bytes_per_s=record["host_link_GBps"] * 1e9 if "host_link_GBps" in record else None,
        price_usd_per_hour=None if price is None else (price["low"] + price["high"]) / 2,
        source=record["source"],
        confidence=record["confidence"],
        notes=(*record.get("notes", ()), *(f"assumed: {fact.name}={fact.value}: {fact.source}" for fact in assumed)),
    )


@lru_cache(maxsize=256)
def load_link(name: str) -> Link:
    """Return the link called `name`, at one port per accelerator unless its entry says otherwise."""
    name = _canonical("link", name, _network()["links"])
    return _link({"link": name})


@lru_cache(maxsize=256)
def load_family(name: str) -> NodeFamily:
    """Return the node family called `name`; case, spaces, dashes and underscores do not matter."""
    table = _families()
    name = _canonical("cluster", name, table)
    record = table[name]
    facts = (*cluster_facts(name), *accelerator_facts(record["accelerator"]))
    return NodeFamily(
        name=name,
        accelerator=load_accelerator(record["accelerator"]),
        devices_per_node=record["devices_per_node"],
        default_nodes=record.get("default_nodes", 1),
        levels=tuple(FamilyLevel(level["name"], _link(level), level.get("size")) for level in record["levels"]),
        source=record["source"],
        assumed=tuple(f"{fact.name}={fact.value}: {fact.source}" for fact in facts if fact.assumed),
        host=Host(*(record[field] * 1e9 for field in _HOST)) if _HOST[0] in record else None,
    )


def is_accelerator(name: str) -> bool:
    """Whether `name` or an alias of it is an accelerator of the catalogue."""
    return _plain(name) in _known(_accelerators())


def usual_family(name: str) -> NodeFamily:
    """Return the first node family of the catalogue whose nodes hold the accelerator `name`."""
    name = _canonical("accelerator", name, _accelerators())
    family = next((family for family, record in _families().items() if record["accelerator"] == name), None)
    if family is None:
        load_accelerator(name)  # what it lacks comes first
        raise InputError(f"accelerator {name}: no node family of the catalogue holds it; give a cluster file")
    return load_family(family)


def accelerator_facts(name: str) -> tuple[Fact, ...]:
    """Return every number known of the accelerator `name`, with its source and confidence."""
    table = _accelerators()
    name = _canonical("accelerator", name, table)
    record = table[name]
    numbers: dict[str, Any] = {}
    for field in _NUMBERS:
        value = record.get(field)
        if field == "price_usd_per_hour" and value is not None:
            numbers[field] = f"{value['low']} to {value['high']} ({value['kind']}, {value['date']})"
        elif isinstance(value, dict):
            numbers |= {f"{field}.{precision}": peak for precision, peak in value.items()}
        elif value is not None:
            numbers[field] = value
    facts = []
    for field, value in numbers.items():
        own = record.get("provenance", {})
        origin = own.get(field) or own.get(field.partition(".")[0]) or record
        facts.append(Fact(f"{name}.{field}", value, origin["source"], origin["confidence"]))
    return tuple(facts)


def cluster_facts(name: str) -> tuple[Fact, ...]:
    """Return every number of the node family `name`, with its source and confidence; its accelerator's are apart."""
    table = _families()
    name = _canonical("cluster", name, table)
    record = table[name]
    facts = [
        Fact(f"{name}.{field}", record[field], record["source"], record["confidence"])
        for field in ("devices_per_node", "default_nodes")
        if field in record
    ]
    for field in _HOST:
        if field in record:
            own = record["provenance"][field]
            facts.append(Fact(f"{name}.{field}", record[field], own["source"], own["confidence"]))
    for level in record["levels"]:
        link = _network()["links"][level["link"]]
        latency = _network()["latencies"][link["latency"]]
        origins: dict[str, tuple[float, Record]] = {
            "bandwidth_GBps_per_device": (link["bandwidth_GBps_per_device"], link),
            "latency_us": (latency["us"], latency),
            "oversubscription": (1, record),
        }
        origins |= {field: (level[field], level) for field in origins if field in level}
        if "size" in level:
            origins["size"] = (level["size"], record)
        facts += [
            Fact(f"{name}.{level['name']}.{field}", value, origin["source"], origin["confidence"])
            for field, (value, origin) in origins.items()
        ]
    return tuple(facts)


def _link(level: Record) -> Link:
    """The catalogue link that `level` names, with what the level states itself."""
    record = _network()["links"][level["link"]] | level
    return Link(
        name=level["link"],
        kind=record["kind"],
        bandwidth_bytes_per_s=record["bandwidth_GBps_per_device"] * 1e9,
        latency_s=_network()["latencies"][record["latency"]]["us"] / 1e6,
        oversubscription=float(record.get("oversubscription", 1)),
    )


def _joined(members: tuple[Domain, ...], level: FamilyLevel) -> tuple[Domain, ...]:
    """`members` in as few domains as `level.size` allows, as even as possible; equal domains are one object."""
    count = 1 if level.size is None else math.ceil(len(members) / level.size)
    least, larger = divmod(len(members), count)
    shared: dict[Domain, Domain] = {}
    domains = []
    start = 0
    for index in range(count):
        stop = start + least + (index < larger)
        domain = Domain(level.name, level.name, level.link, children=members[start:stop])
        domains.append(shared.setdefault(domain, domain))
        start = stop
    return tuple(domains)


def _node_faults(nodes: str, most: int) -> list[str]:
    if re.fullmatch("[0-9]{1,9}", nodes) and 1 <= int(nodes) <= most:
        return []
    return [f"nodes={nodes[:40]} must be a whole number between 1 and {most}"]


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # a name too long for the file system
        return False


def _canonical(kind: str, name: str, table: Record) -> str:
    """The key of `table` that `name` means, by itself or by an alias."""
    known, plain = _known(table), _plain(name)
    if plain in known:
        return known[plain]
    close = dict.fromkeys(known[match] for match in difflib.get_close_matches(plain[:80], known, 5, 0.5))
    hint = f"; did you mean {', '.join(close)}?" if close else f"; known: {', '.join(table)}"
    raise InputError(f"{kind}={name[:80]!r} is not in the catalogue{hint}")


def _known(table: Record) -> dict[str, str]:
    """Keys of `table` by every name they go by."""
    return {_plain(alias): key for key, record in table.items() for alias in (key, *record.get("aliases", ()))}


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


@cache
def _accelerators() -> dict[str, Record]:
    return _read("accelerators.toml")


@cache
def _network() -> dict[str, dict[str, Record]]:
    return _read("node_families.toml")


def _families() -> dict[str, Record]:
    return _network()["families"]


def _read(name: str) -> Record:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
