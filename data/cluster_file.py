"""The TOML form of a cluster: what people write for machines that the catalogue does not have.

A file is either a node family and a number of nodes, or groups of equal members from the outermost level inwards. A
link is taken from, in this order: the group, `levels`, the node family. Units are in the names; see docs/clusters.md.
"""

from __future__ import annotations

import json
import math
import tomllib
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shardwise.data.cluster import MAX_DEVICES, Accelerator, Cluster, Domain, Host, Link
from shardwise.data.cluster_catalog import (
    FamilyLevel,
    family_cluster,
    list_accelerators,
    list_links,
    load_accelerator,
    load_family,
    load_link,
)
from shardwise.data.cluster_form import (
    MAX_LEVELS,
    AcceleratorForm,
    ClusterForm,
    GroupForm,
    LinkForm,
    contradictions,
    describe,
    tables,
)
from shardwise.data.faults import InputError, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

MAX_FILE_BYTES = 2**21


def read_cluster_file(path: Path) -> Cluster:
    """Return the cluster that the TOML file at `path` describes, or every fault found."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"cluster file {str(path)[:200]!r} cannot be read: {unreadable(error)}") from None
    if len(content) > MAX_FILE_BYTES:
        raise InputError(
            f"cluster file {path}: more than {MAX_FILE_BYTES} bytes; write equal nodes as one group with count"
        )
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"cluster file {path}: {unreadable(error)}") from None
    try:
        return parse_cluster_toml(text, path.stem)
    except InputError as error:
        raise InputError([f"{path}: {fault}" for fault in error.faults]) from None


def parse_cluster_toml(text: str, name: str = "cluster") -> Cluster:
    """Return the cluster that the TOML `text` describes; `name` is used where it gives none."""
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid TOML: {str(error) or 'nested too deeply'}") from None
    return cluster_from_form(raw, name)


def cluster_from_form(raw: dict[str, Any], name: str = "cluster") -> Cluster:
    """Return the cluster that the parsed file `raw` describes, or every fault found."""
    faults = [*contradictions(raw), *_unusable(raw)]
    try:
        form = ClusterForm.model_validate(raw)
    except ValidationError as error:
        raise InputError([*map(describe, error.errors(include_url=False)), *faults]) from None
    if faults:
        raise InputError(faults)
    return _Builder(form, name).cluster()


def _unusable(raw: dict[str, Any]) -> Iterator[str]:
    """Names in `raw` that the catalogue and the file do not have, and nodes with more devices than their family."""
    lists = {key: raw[key] if isinstance(raw.get(key), list) else [] for key in ("accelerators", "levels")}
    own = [entry.get("name") for entry in lists["accelerators"] if isinstance(entry, dict)]
    links = [
        (f"levels[{i}].link", entry.get("link")) for i, entry in enumerate(lists["levels"]) if isinstance(entry, dict)
    ]
    for path, table in tables(raw):
        links.append((f"{path}link", table.get("link")))
        family, accelerator, devices = (table.get(key) for key in ("family", "accelerator", "devices"))
        if isinstance(family, str):
            yield from _lookup(load_family, family, f"{path}family")
        if path and isinstance(accelerator, str) and accelerator not in own:
            yield from _lookup(load_accelerator, accelerator, f"{path}accelerator")
        if isinstance(devices, int) and (most := _node_size(family)) and most < devices <= MAX_DEVICES:
            yield f"{path}devices={devices} must be at most {most}, the node size of {family}"
    for path, link in links:
        name = link.get("like") if isinstance(link, dict) else link
        if isinstance(name, str):
            yield from _lookup(load_link, name, path)


def _lookup(load: Callable[[str], object], name: str, path: str) -> tuple[str, ...]:
    try:
        load(name)
    except InputError as error:
        return tuple(f"{path}: {fault}" for fault in error.faults)
    return ()


def _node_size(family: object) -> int:
    """Devices per node of `family`, 0 where there is no such family."""
    if not isinstance(family, str) or _lookup(load_family, family, ""):
        return 0
    return load_family(family).devices_per_node


class _Builder:
    """Turns a form whose names are known into a cluster, and collects what is wrong on the way."""

    def __init__(self, form: ClusterForm, name: str) -> None:
        self.form = form
        self.name = form.name or name
        self.faults: list[str] = []
        self.own: dict[str, Accelerator] = {}
        self.names: tuple[str, ...] = ()
        self.assumed = dict.fromkeys(form.assumed)

    def cluster(self) -> Cluster:
        form = self.form
        self._read_accelerators()
        if self.faults:
            raise InputError(self.faults)
        if form.family is not None:
            cluster = self._of_family(form.family)
        else:
            root = self._root(form.groups or [])
            families = set().union(*map(_family_names, form.groups or []))
            cluster = None if root is None else self._named(root, self.name, form.source, families)
        if cluster is None or self.faults:
            raise InputError(list(dict.fromkeys(self.faults)))
        return cluster

    def _of_family(self, name: str) -> Cluster | None:
        form = self.form
        try:
            cluster = family_cluster(load_family(name), form.nodes, form.devices)
        except InputError as error:
            self.faults += error.faults
            return None
        root = cluster.root
        if form.link is not None and not root.children:
            self.faults.append("link joins nodes, and here is one node; use groups to change the link inside it")
        elif form.link is not None:
            link = self._link(form.link, root.link, "link")
            root = Domain(root.name, root.level, link or root.link, children=root.children)
        self.assumed |= dict.fromkeys(cluster.assumed)
        return self._named(root, form.name or cluster.name, form.source or cluster.source, {name})

    def _named(self, root: Domain, name: str, source: str, families: set[str | None]) -> Cluster | None:
        try:
            return Cluster(name, root, source, tuple(self.assumed), self._host(families))
        except ValueError as error:
            self.faults.append(str(error))
            return None

    def _host(self, families: set[str | None]) -> Host | None:
        """The host of every node: what the file says, and the rest from the only node family."""
        own = {load_family(name).host if name else None for name in families}
        known = own.pop() if len(own) == 1 else None
        memory, bandwidth = self.form.host_memory_GB, self.form.host_memory_GBps
        if known is None and (memory is None) != (bandwidth is None):
            self.faults.append("host_memory_GB and host_memory_GBps: give both, or a node family whose host is known")
        if known is None and (memory is None or bandwidth is None):
            return None
        return Host(
            known.memory_bytes if known and memory is None else _giga(memory or 0),
            known.bandwidth_bytes_per_s if known and bandwidth is None else _giga(bandwidth or 0),
        )

    def _read_accelerators(self) -> None:
        for index, form in enumerate(self.form.accelerators):
            path = f"accelerators[{index}]"
            if form.name in self.own:
                self.faults.append(f"{path}.name={form.name!r} is defined twice; keep one")
            try:
                self.own[form.name] = _accelerator(form)
            except (ValueError, OverflowError) as error:
                self.faults.append(f"{path}: {error}")

    def _root(self, groups: list[GroupForm]) -> Domain | None:
        """The outermost domain: a domain around all members, or the only member where no level is left for one."""
        form = self.form
        self.faults += _uneven(groups, "")
        inner = max(map(_depth, groups))
        single = len(groups) == 1 and groups[0].count == 1
        bare = single and form.link is None and (form.levels is None or len(form.levels) == inner + 1)
        top = inner if bare else inner + 1
        if form.levels is not None and len(form.levels) != top + 1:
            wanted = f"{top + 1}, the node being one"
            self.faults.append(f"levels has {len(form.levels)} entries; these groups need {wanted}")
        if top >= MAX_LEVELS:
            self.faults.append(f"groups are nested {top + 1} levels deep; at most {MAX_LEVELS} are supported")
        devices = sum(group.count * _least_devices(group) for group in groups)
        if devices > MAX_DEVICES:
            self.faults.append(f"groups: {devices} devices or more in all, at most {MAX_DEVICES} are supported")
        if self.faults:
            return None
        self.names = _level_names(form, groups, top)
        if bare:
            return self._domain(groups[0], top, "groups[0].")
        return self._domain(GroupForm(groups=groups, link=form.link), top, "")

    def _domain(self, group: GroupForm, depth: int, path: str) -> Domain | None:
        """One member of `group`; None where something in it is wrong, which `faults` then tells."""
        members = [
            (inner.count, self._domain(inner, depth - 1, f"{path}groups[{index}]."))
            for index, inner in enumerate(group.groups or ())
        ]
        accelerator, devices = self._node(group)
        level = self._level(group, depth, f"{path}link")
        link = self._link(group.link, level.link if level else None, f"{path}link")
        children = tuple(child for count, member in members if member for child in (member,) * count)
        if link is None or not (accelerator or children) or any(member is None for _, member in members):
            return None
        name = self.names[depth]
        return Domain(group.name or name, name, link, accelerator, devices, children)

    def _node(self, group: GroupForm) -> tuple[Accelerator | None, int]:
        """The accelerator and free devices of a node; nothing for a group of groups."""
        if group.family is not None:
            family = load_family(group.family)
            self.assumed |= dict.fromkeys(family.assumed)
            return family.accelerator, group.devices or family.devices_per_node
        if group.accelerator is not None:
            return self.own.get(group.accelerator) or load_accelerator(group.accelerator), group.devices or 0
        return None, 0

    def _level(self, group: GroupForm, depth: int, path: str) -> FamilyLevel | None:
        """The level that `levels` describes or, where it does not, the one that all node families below agree on."""
        families = [load_family(name) if name else None for name in _family_names(group)]
        found = {family.levels[depth] if family and depth < len(family.levels) else None for family in families}
        level = found.pop() if len(found) == 1 else None
        stated = self.form.levels[depth] if self.form.levels else None
        members = sum(inner.count for inner in group.groups or ())
        if level and level.size and members > level.size and group.link is None and (not stated or not stated.link):
            self.faults.append(f"{path}: a {level.name} joins at most {level.size} members, not {members}; nest groups")
        if stated is None:
            return level
        link = self._link(stated.link, level.link if level else None, f"levels[{depth}].link", needed=False)
        return None if link is None else FamilyLevel(stated.name, link, None)

    def _link(self, form: str | LinkForm | None, base: Link | None, path: str, needed: bool = True) -> Link | None:
        """`base` with what `form` says differently."""
        if isinstance(form, str):
            return load_link(form)
        if form is not None:
            try:
                return _changed(form, load_link(form.like) if form.like else base)
            except ValueError as error:
                self.faults.append(f"{path}: {error}")
                return None
        if base is None and needed:
            self.faults.append(
                f"{path} is missing: name a link of the catalogue or give its numbers, here or in levels"
            )
        return base


def _level_names(form: ClusterForm, groups: list[GroupForm], top: int) -> tuple[str, ...]:
    """The names of the levels: those given, or those of the only node family, or plain ones."""
    if form.levels:
        return tuple(level.name for level in form.levels)
    names = ["node", "pod", *(f"tier {depth}" for depth in range(2, top))][: max(top, 1)] + ["fabric"] * (top > 0)
    families = set().union(*map(_family_names, groups))
    if len(families) > 1 or None in families:
        return tuple(names)
    own = [level.name for level in load_family(families.pop() or "").levels]
    return tuple(own[: top + 1] if top < len(own) else own[:-1] + names[len(own) - 1 : -1] + own[-1:])


def _changed(form: LinkForm, base: Link | None) -> Link:
    bandwidth, latency = form.bandwidth_GBps_per_device, form.latency_us
    if base is None and (bandwidth is None or latency is None):
        raise ValueError("give bandwidth_GBps_per_device and latency_us, or a link of the catalogue as like")
    start = base or Link("link", "link", 1.0, 0.0)
    return Link(
        name=start.name if form.name is None else form.name,
        kind=start.kind if form.kind is None else form.kind,
        bandwidth_bytes_per_s=start.bandwidth_bytes_per_s if bandwidth is None else _giga(bandwidth),
        latency_s=start.latency_s if latency is None else _micro(latency),
        oversubscription=start.oversubscription if form.oversubscription is None else form.oversubscription,
    )


def _accelerator(form: AcceleratorForm) -> Accelerator:
    return Accelerator(
        name=form.name,
        vendor=form.vendor,
        memory_bytes=_gibi(form.memory_GiB),
        memory_bandwidth_bytes_per_s=_giga(form.memory_bandwidth_GBps),
        flops_per_s={precision: _tera(peak) for precision, peak in form.tflops.items()},
        tdp_w=form.tdp_W,
        idle_w=form.idle_W,
        host_link_bytes_per_s=None if form.host_link_GBps is None else _giga(form.host_link_GBps),
        price_usd_per_hour=form.price_usd_per_hour,
        source=form.source,
        confidence=form.confidence,
        notes=tuple(form.notes),
    )


def _depth(group: GroupForm) -> int:
    return 1 + max(map(_depth, group.groups)) if group.groups else 0


def _uneven(groups: list[GroupForm], path: str) -> list[str]:
    """Faults of groups that stand side by side with different numbers of levels."""
    depths = {f"{path}groups[{index}]": _depth(group) for index, group in enumerate(groups)}
    faults = []
    if len(set(depths.values())) > 1:
        found = ", ".join(f"{name} has {depth + 1}" for name, depth in list(depths.items())[:8])
        faults.append(f"groups side by side need equally many levels, but {found}; nest the flatter ones in groups")
    for name, group in zip(depths, groups, strict=True):
        faults += _uneven(group.groups or [], f"{name}.")
    return faults


def _least_devices(group: GroupForm) -> int:
    """Devices of one member, a family's node counted as one device: a bound before anything is built."""
    if group.groups:
        return sum(inner.count * _least_devices(inner) for inner in group.groups)
    return group.devices or 1


def _family_names(group: GroupForm) -> set[str | None]:
    """The families of the nodes below, None standing for nodes of no family."""
    if group.groups:
        return set().union(*map(_family_names, group.groups))
    return {group.family}


def _gibi(value: float) -> int:
    return round(value * 2**30)


def _giga(value: float) -> float:
    return value * 1e9


def _tera(value: float) -> float:
    return value * 1e12


def _micro(value: float) -> float:
    return value / 1e6


def write_cluster_toml(cluster: Cluster) -> str:
    """Return `cluster` as a file that reads back equal; numbers that no file can state exactly move by one rounding."""
    names = cluster.levels
    links = [level[0] for level in cluster.links]
    own = [accelerator for accelerator in cluster.accelerators if not _in_catalogue(accelerator)]
    lines = [f"name = {_text(cluster.name)}"]
    lines += [f"source = {_text(cluster.source)}"] if cluster.source else []
    lines += [f"assumed = [{', '.join(map(_text, cluster.assumed))}]"] if cluster.assumed else []
    if cluster.host is not None:
        sizes = (cluster.host.memory_bytes, cluster.host.bandwidth_bytes_per_s)
        names_of = ("host_memory_GB", "host_memory_GBps")
        lines += [f"{name} = {_stated(size, 1e9, _giga)}" for name, size in zip(names_of, sizes, strict=True)]
    for accelerator in own:
        lines += ["", "[[accelerators]]", *_accelerator_lines(accelerator)]
    for name, link in zip(names, links, strict=True):
        lines += ["", "[[levels]]", f"name = {_text(name)}", f"link = {_link_value(link)}"]
    root = cluster.root
    plain = root.children and root.name == root.level
    for count, member in _runs(root.children if plain else (root,)):
        lines += ["", *_group_lines(member, count, links, "groups")]
    return "\n".join(lines) + "\n"


def _group_lines(domain: Domain, count: int, links: list[Link], table: str) -> list[str]:
    lines = [f"[[{table}]]"]
    lines += [f"name = {_text(domain.name)}"] if domain.name != domain.level else []
    lines += [f"count = {count}"] if count > 1 else []
    if domain.accelerator is not None:
        lines += [f"accelerator = {_text(domain.accelerator.name)}", f"devices = {domain.devices}"]
    lines += [f"link = {_link_value(domain.link)}"] if domain.link != links[domain.depth] else []
    for inner_count, member in _runs(domain.children):
        lines += ["", *_group_lines(member, inner_count, links, f"{table}.groups")]
    return lines


def _accelerator_lines(accelerator: Accelerator) -> list[str]:
    host = accelerator.host_link_bytes_per_s
    peaks = (f"{name} = {_stated(peak, 1e12, _tera)}" for name, peak in accelerator.flops_per_s.items())
    values = {
        "name": _text(accelerator.name),
        "vendor": _text(accelerator.vendor),
        "memory_GiB": _stated(accelerator.memory_bytes, 2**30, _gibi),
        "memory_bandwidth_GBps": _stated(accelerator.memory_bandwidth_bytes_per_s, 1e9, _giga),
        "tflops": f"{{ {', '.join(peaks)} }}",
        "tdp_W": accelerator.tdp_w,
        "idle_W": accelerator.idle_w,
        "host_link_GBps": None if host is None else _stated(host, 1e9, _giga),
        "price_usd_per_hour": accelerator.price_usd_per_hour,
        "source": _text(accelerator.source),
        "confidence": _text(accelerator.confidence),
        "notes": f"[{', '.join(map(_text, accelerator.notes))}]",
    }
    return [f"{key} = {value}" for key, value in values.items() if value not in (None, '""', "[]")]


def _link_value(link: Link) -> str:
    if link.name in list_links() and load_link(link.name) == link:
        return _text(link.name)
    bandwidth = _stated(link.bandwidth_bytes_per_s, 1e9, _giga)
    latency = _stated(link.latency_s, 1e-6, _micro)
    return (
        f"{{ name = {_text(link.name)}, kind = {_text(link.kind)}, bandwidth_GBps_per_device = {bandwidth}, "
        f"latency_us = {latency}, oversubscription = {link.oversubscription!r} }}"
    )


def _in_catalogue(accelerator: Accelerator) -> bool:
    try:
        return accelerator.name in list_accelerators() and load_accelerator(accelerator.name) == accelerator
    except InputError:  # listed, but incomplete
        return False


def _runs(domains: Iterable[Domain]) -> list[tuple[int, Domain]]:
    """Neighbours that are equal, counted."""
    runs: list[tuple[int, Domain]] = []
    for domain in domains:
        if runs and runs[-1][1] == domain:
            runs[-1] = (runs[-1][0] + 1, domain)
        else:
            runs.append((1, domain))
    return runs


def _stated(value: float, unit: float, read: Callable[[float], float]) -> float:
    """The number of units that reads back as `value`; the nearest one where there is none."""
    guess = value / unit
    near = [guess, float(f"{guess:.15g}")]
    for direction in (-math.inf, math.inf):
        step = guess
        for _ in range(2):
            step = math.nextafter(step, direction)
            near.append(step)
    return next((number for number in near if read(number) == value), guess)


def _text(text: str) -> str:
    """A TOML basic string; JSON escapes the same characters but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
