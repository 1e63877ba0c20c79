"""The cluster: accelerators in a tree of domains, each level joined by links of one kind.

A `Domain` either holds `devices` interchangeable accelerators of one type (a leaf) or child domains. Its `link` joins
its members to each other: NVSwitch inside a node, rails and spines above. Bandwidth is per accelerator and direction,
so a node's NICs are already shared out among its accelerators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

MAX_DEVICES = 2**20


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the members of a domain; `bandwidth_bytes_per_s` is per accelerator and direction."""

    name: str
    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        faults = []
        if not 0 < self.bandwidth_bytes_per_s < math.inf:
            faults.append(f"link.bandwidth_bytes_per_s={self.bandwidth_bytes_per_s} must be positive and finite")
        if not 0 <= self.latency_s < 10:
            faults.append(f"link.latency_s={self.latency_s} must be between 0 and 10 s")
        if not 1 <= self.oversubscription < math.inf:
            faults.append(f"link.oversubscription={self.oversubscription} must be at least 1 (1 is non-blocking)")
        if faults:
            raise ValueError("; ".join(faults))

    def __hash__(self) -> int:
        """Cheap: links are part of what collectives are remembered by."""
        return hash(self.name)

    @property
    def effective_bytes_per_s(self) -> float:
        """Bandwidth left per accelerator when every accelerator of the domain sends at once."""
        return self.bandwidth_bytes_per_s / self.oversubscription


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device type. `flops_per_s` maps a precision to the dense peak; absent precisions are not supported."""

    name: str
    vendor: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    flops_per_s: dict[str, float]
    tdp_w: float | None = None
    idle_w: float | None = None
    host_link_bytes_per_s: float | None = None
    price_usd_per_hour: float | None = None
    source: str = ""
    confidence: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        numbers = {
            "memory_bytes": self.memory_bytes,
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s,
            "tdp_w": self.tdp_w,
            "idle_w": self.idle_w,
            "host_link_bytes_per_s": self.host_link_bytes_per_s,
            **{f"flops_per_s[{precision}]": peak for precision, peak in self.flops_per_s.items()},
        }
        faults = [
            f"accelerator {self.name}: {field}={value} must be positive and finite"
            for field, value in numbers.items()
            if value is not None and not 0 < value < math.inf
        ]
        if not self.flops_per_s:
            faults.append(f"accelerator {self.name}: flops_per_s={{}} must name the peak of at least one precision")
        if self.price_usd_per_hour is not None and not 0 <= self.price_usd_per_hour < math.inf:
            price = self.price_usd_per_hour
            faults.append(f"accelerator {self.name}: price_usd_per_hour={price} must be zero or more, and finite")
        if faults:
            raise ValueError("; ".join(faults))

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes))


@dataclass(frozen=True, slots=True)
class Host:
    """The memory beside the processors of one node, which its accelerators share: bytes, and bytes per second."""

    memory_bytes: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        faults = [
            f"host.{name}={value} must be positive and finite"
            for name, value in (
                ("memory_bytes", self.memory_bytes),
                ("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s),
            )
            if not 0 < value < math.inf
        ]
        if faults:
            raise ValueError("; ".join(faults))


@dataclass(frozen=True, slots=True)
class Domain:
    """A node of the tree: either `devices` of one `accelerator`, or `children`, joined by `link`."""

    name: str
    level: str
    link: Link
    accelerator: Accelerator | None = None
    devices: int = 0
    children: tuple[Domain, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.children) == (self.accelerator is not None):
            raise ValueError(f"domain {self.name}: give either an accelerator with devices, or children")
        if self.accelerator is not None and not 0 < self.devices <= MAX_DEVICES:
            raise ValueError(f"domain {self.name}: devices={self.devices} must be between 1 and {MAX_DEVICES}")
        if self.children and self.devices:
            raise ValueError(f"domain {self.name}: devices={self.devices} must be 0 where there are children")
        if len({child.depth for child in _distinct(self.children)}) > 1:
            raise ValueError(f"domain {self.name}: all children must have the same number of levels below them")

    def __hash__(self) -> int:
        """Cheap for thousands of children: equal domains have equally many, and equal first ones."""
        return hash((self.name, self.level, self.link, self.accelerator, self.devices, len(self.children), self._first))

    @property
    def _first(self) -> Domain | None:
        return self.children[0] if self.children else None

    @property
    def depth(self) -> int:
        """Levels below this domain: 0 for a leaf."""
        return 1 + self.children[0].depth if self.children else 0


@dataclass(frozen=True)
class Cluster:
    """A tree of domains. `levels` and `capacity` are what the placement of a plan needs to know. `host` is that of every
    node, None where it is not known.

    Equal children are best one shared object: every property below visits a shared domain once.
    """

    name: str
    root: Domain
    source: str = ""
    assumed: tuple[str, ...] = ()
    host: Host | None = None

    def __post_init__(self) -> None:
        if self.device_count > MAX_DEVICES:
            raise ValueError(f"cluster {self.name}: {self.device_count} devices, at most {MAX_DEVICES} are supported")
        types = [accelerator.name for accelerator in self.accelerators]
        if len(set(types)) < len(types):
            raise ValueError(f"cluster {self.name}: two different accelerators share a name, {', '.join(types)}")
        names: dict[int, str] = {}
        for domain in self._domains:
            if names.setdefault(domain.depth, domain.level) != domain.level:
                both = f"{names[domain.depth]} and {domain.level}"
                raise ValueError(f"cluster {self.name}: one level has two names, {both}; give its domains one name")

    @cached_property
    def _domains(self) -> tuple[Domain, ...]:
        """Every domain object once, parents before children, in order of first appearance."""
        seen: dict[int, Domain] = {}
        stack = [self.root]
        while stack:
            domain = stack.pop()
            if id(domain) not in seen:
                seen[id(domain)] = domain
                stack.extend(reversed(_distinct(domain.children)))
        return tuple(seen.values())

    @cached_property
    def leaves(self) -> tuple[Domain, ...]:
        """The innermost domains, left to right; device ids count through them in this order."""
        level: tuple[Domain, ...] = (self.root,)
        while level[0].children:
            level = tuple(child for domain in level for child in domain.children)
        return level

    @cached_property
    def device_count(self) -> int:
        return _device_count(self.root, {})

    @cached_property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """The distinct device types, in order of first appearance."""
        return tuple(dict.fromkeys(d.accelerator for d in self._domains if d.accelerator is not None))

    @cached_property
    def levels(self) -> tuple[str, ...]:
        """The name of each level, innermost first."""
        names = {domain.depth: domain.level for domain in self._domains}
        return tuple(names[depth] for depth in sorted(names))

    @cached_property
    def links(self) -> tuple[tuple[Link, ...], ...]:
        """The links of each level, innermost first; one link a level when the level is uniform."""
        levels: list[dict[Link, None]] = [{} for _ in range(self.root.depth + 1)]
        for domain in self._domains:
            levels[domain.depth][domain.link] = None
        return tuple(tuple(level) for level in levels)

    @cached_property
    def _capacities(self) -> dict[tuple[int, ...], int]:
        return {}

    def capacity(self, block: tuple[int, ...]) -> int:
        """How many blocks fit side by side at the level above `block`.

        `block` gives the members used per level, innermost first: (8,) asks how many leaves hold 8 devices, (4, 18)
        how many domains hold 18 leaves of 4 devices. Each member hosts one block. () asks for the largest leaf.
        """
        if len(block) > self.root.depth:
            raise ValueError(f"block={block} must name at most {self.root.depth} levels, those below the root")
        if block not in self._capacities:
            known: dict[int, int] = {}
            sites = (domain for domain in self._domains if domain.depth == len(block))
            self._capacities[block] = max(_hosted(domain, block, known) for domain in sites)
        return self._capacities[block]


def _distinct(domains: tuple[Domain, ...]) -> list[Domain]:
    """The distinct objects among `domains`, in order; thousands of equal children are usually one object."""
    return list({id(domain): domain for domain in domains}.values())


def _device_count(domain: Domain, known: dict[int, int]) -> int:
    if not domain.children:
        return domain.devices
    for child in _distinct(domain.children):
        if id(child) not in known:
            known[id(child)] = _device_count(child, known)
    return sum(known[id(child)] for child in domain.children)


def _hosted(domain: Domain, block: tuple[int, ...], known: dict[int, int]) -> int:
    """Members of `domain` that can each hold the block up to the level of `domain`."""
    if not domain.children:
        return domain.devices
    need = block[domain.depth - 1]
    for child in _distinct(domain.children):
        if id(child) not in known:
            known[id(child)] = _hosted(child, block, known)
    return sum(known[id(child)] >= need for child in domain.children)
