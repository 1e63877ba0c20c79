"""One collective, by algorithm, message size, group and the level of the cluster that the group spans.

Times are those of `formulations.collectives` (C1)-(C6); this module says which groups and sizes are worth a row, calls
the routes by their names, and puts measured points beside them.

(L1) Ranks of a group are `members` of every level, innermost first, as many in each domain of a level. Without a group
     size: the powers of two and the sizes that fill a level, packed, which is the placement of most members inside.
(L2) Sizes: the powers of two from a 64th to 64 times the size asked for, and that size.
(L3) Algorithms, by the name of what (C1)-(C6) have: `in-domain` (C1), the measured curve of whatever NCCL chose there,
     in-network reduction (NVLS) included; `ring` (C3); `tree` (C4), reduced inside every domain first; `pairwise` (C5);
     `p2p` (C6). Nothing reduces in the switches of a network, and there is no broadcast.
(L4) Bandwidths as nccl-tests counts them: of the algorithm, S / t; of the bus, phi S / t.
(L5) A measured point stands beside the fastest algorithm of a row, since NCCL chose, if accelerator, op, links and ranks
     at each level are the row's and its size is within a factor of two; the nearest one of each source. Its error is
     that of the model at the size of the point.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import mul
from typing import TYPE_CHECKING, Any

from shardwise.data.cluster import Cluster
from shardwise.data.cluster_catalog import load_cluster
from shardwise.data.efficiency import SCALE_UP_KINDS, collective_curve, network_curve
from shardwise.data.faults import InputError
from shardwise.data.measured_collectives import measured_collectives
from shardwise.formulations.collectives import bus_factor, collective_time_s, routes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from shardwise.data.cluster import Accelerator, Link
    from shardwise.data.efficiency import CollectiveCurve, NetworkCurve
    from shardwise.data.measured_collectives import MeasuredCollective
    from shardwise.formulations.collectives import Route, Spans

WORDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "alltoall",
    "send": "sendrecv",
    "sendrecv": "sendrecv",
    "p2p": "sendrecv",
}
"""What a user calls an op; case, dashes and underscores do not matter."""
MAX_BYTES = 2**50
REACH = 64
NEAR = 2.0
"""Measured points within this factor in size are shown."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate: `members` of each level of a cluster, innermost first (L1)."""

    accelerator: Accelerator
    levels: tuple[str, ...]
    links: tuple[Link, ...]
    members: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.levels) == len(self.links) == len(self.members):
            raise ValueError(f"members={self.members} must have one number for each level of {self.levels}")
        if self.ranks < 2:
            raise ValueError(f"members={self.members} must be of two ranks or more")

    @property
    def ranks(self) -> int:
        return math.prod(self.members)

    @property
    def spans(self) -> Spans:
        return tuple(zip(self.members, self.links, strict=True))

    @property
    def level(self) -> str:
        """The outermost level that the group spans."""
        return self.used[-1][0]

    @property
    def used(self) -> tuple[tuple[str, int, Link], ...]:
        """The levels that the group spans."""
        together = zip(self.levels, self.members, self.links, strict=True)
        return tuple((level, members, link) for level, members, link in together if members > 1)

    @property
    def placement(self) -> str:
        return " x ".join(f"{level} {members}" for level, members, _ in self.used)

    @property
    def domain(self) -> tuple[int, Link | None]:
        """Ranks of the innermost scale-up domain and its link; levels of one kind and rate are one domain."""
        inside = self.used[: self._depth]
        return math.prod(members for _, members, _ in inside), inside[0][2] if inside else None

    @property
    def outside(self) -> tuple[tuple[int, Link], ...]:
        """What joins the domains."""
        return tuple((members, link) for _, members, link in self.used[self._depth :])

    @property
    def _depth(self) -> int:
        first = self.used[0][2]
        if first.kind not in SCALE_UP_KINDS:
            return 0
        return len(list(takewhile(lambda level: _same(level[2], first), self.used)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A measured point and what the model says of it (L5)."""

    bytes: int
    time_s: float
    model_time_s: float
    left_out: str
    source: str

    @property
    def error(self) -> float:
        return self.model_time_s / self.time_s - 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "time_s": self.time_s,
            "model_time_s": self.model_time_s,
            "error": self.error,
            "left_out_of_fit": self.left_out,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True)
class Row:
    """One algorithm for one group and size. `curves` say what was measured where, and what was scaled (`scaled`)."""

    op: str
    cluster: str
    group: Group
    algorithm: str
    bytes: int
    time_s: float
    fastest: bool
    curves: tuple[str, ...]
    scaled: bool
    measured: tuple[Comparison, ...] = ()

    @property
    def algorithm_bytes_per_s(self) -> float:
        return self.bytes / self.time_s

    @property
    def bus_bytes_per_s(self) -> float:
        return bus_factor(self.op, self.group.ranks) * self.bytes / self.time_s

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "cluster": self.cluster,
            "accelerator": self.group.accelerator.name,
            "group": self.group.ranks,
            "level": self.group.level,
            "placement": self.group.placement,
            "algorithm": self.algorithm,
            "bytes": self.bytes,
            "time_s": self.time_s,
            "algorithm_bytes_per_s": self.algorithm_bytes_per_s,
            "bus_bytes_per_s": self.bus_bytes_per_s,
            "fastest": self.fastest,
            "scaled": self.scaled,
            "curves": list(self.curves),
            "measured": [comparison.to_dict() for comparison in self.measured],
        }


def collective(
    op: str, bytes: int, cluster: Cluster | str | os.PathLike[str], group: int | None = None
) -> pd.DataFrame:
    """Return the time of a collective by group, size and algorithm, one row each.

    Parameters
    ----------
    op
        all-reduce, all-gather, reduce-scatter, all-to-all or send (sendrecv, p2p).
    bytes
        The full tensor: the output of an all-gather, the input of a reduce-scatter, the buffer of an all-reduce, what
        one rank holds for an all-to-all or sends.
    group
        Ranks, in every placement on the levels; without it the powers of two and the sizes that fill a level, packed.

    Returns
    -------
    The columns of `shardwise collective --json`; of the measured points the nearest, in `measured_bytes`,
    `measured_time_s`, `measured_error`, `measured_left_out_of_fit` and `measured_source`, empty where there is none.

    Raises
    ------
    InputError
        With every fault.
    """
    import pandas as pd  # slow to import, and the command line does without

    flat = []
    for row in collective_rows(op, bytes, cluster, group):
        cells = row.to_dict()
        cells["curves"] = "; ".join(row.curves)
        nearest: dict[str, Any] = next(iter(cells.pop("measured")), {})
        for name in ("bytes", "time_s", "error", "left_out_of_fit", "source"):
            cells[f"measured_{name}"] = nearest.get(name)
        flat.append(cells)
    table = pd.DataFrame(flat)
    return table.astype({"measured_bytes": "Int64", "measured_time_s": "float64", "measured_error": "float64"})


def collective_rows(
    op: str, bytes: int, cluster: Cluster | str | os.PathLike[str], group: int | None = None
) -> tuple[Row, ...]:
    """Return the rows of `collective` by group, placement, size and algorithm."""
    faults: list[str] = []
    known = {_plain(word): name for word, name in WORDS.items()}
    if not isinstance(op, str) or _plain(op) not in known:
        faults.append(f"op={op!r:.40} must be one of {', '.join(WORDS)}")
    if not _whole(bytes) or not 1 <= bytes <= MAX_BYTES:
        faults.append(f"bytes={bytes!r:.40} must be a whole number between 1 and 2^50")
    if group is not None and (not _whole(group) or group < 2):
        faults.append(f"group={group!r:.40} must be a whole number of 2 or more")
    try:
        read = cluster if isinstance(cluster, Cluster) else load_cluster(os.fspath(cluster))
    except InputError as error:
        raise InputError([*faults, *error.faults]) from None
    faults += cluster_faults(read)
    if faults:
        raise InputError(faults)
    groups = groups_of(read, group)
    name = known[_plain(op)]
    return tuple(
        row for one in groups for size in message_sizes(bytes) for row in group_rows(name, read.name, one, size)
    )


def cluster_faults(cluster: Cluster) -> list[str]:
    """Why no collective can be timed on a cluster."""
    faults = []
    if len(cluster.accelerators) > 1:
        names = ", ".join(accelerator.name for accelerator in cluster.accelerators)
        faults.append(f"cluster {cluster.name}: mixed accelerators ({names}); a collective is timed among one type")
    faults += [
        f"cluster {cluster.name}: level {level} has {len(links)} different links; a collective is timed over one a level"
        for level, links in zip(cluster.levels, cluster.links, strict=True)
        if len(links) > 1
    ]
    if cluster.device_count < 2:
        faults.append(f"cluster {cluster.name}: device_count={cluster.device_count} must be 2 or more")
    return faults


def groups_of(cluster: Cluster, group: int | None) -> list[Group]:
    """Return the groups that get rows (L1)."""
    full = [cluster.capacity(())]
    for _ in cluster.levels[1:]:
        full.append(cluster.capacity(tuple(full)))
    if group is None:
        sizes = {2**exponent for exponent in range(1, cluster.device_count.bit_length())}
        sizes |= set(accumulate(full, mul))
        chosen = [max(found) for size in sorted(sizes - {1}) if (found := list(placements(cluster, size)))]
    else:
        chosen = sorted(placements(cluster, group), reverse=True)
        if not chosen:
            room = " x ".join(f"{level} {size}" for level, size in zip(cluster.levels, full, strict=True))
            raise InputError(
                f"group={group} must be a product of one number per level, within {room} of {cluster.name}"
            )
    links = tuple(links[0] for links in cluster.links)
    return [Group(cluster.accelerators[0], cluster.levels, links, members) for members in chosen]


def placements(cluster: Cluster, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to take as many members in each domain of a level, innermost first."""

    def split(rest: int, block: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        room = cluster.capacity(block)
        if len(block) == len(cluster.levels) - 1:
            if rest <= room:
                yield (*block, rest)
            return
        for members in range(1, min(rest, room) + 1):
            if rest % members == 0:
                yield from split(rest // members, (*block, members))

    return split(ranks, ())


def message_sizes(size: int) -> tuple[int, ...]:
    """The sweep around a size (L2)."""
    powers = (2**exponent for exponent in range((size * REACH).bit_length()))
    return tuple(sorted({size, *(power for power in powers if size <= power * REACH and power <= size * REACH)}))


def group_rows(op: str, cluster: str, group: Group, size: int) -> Iterator[Row]:
    """Yield one row for every algorithm of a group, the measured points beside the fastest."""
    found = named_routes(op, group)
    times = {name: route.time_s(size) for name, route in found.items()}
    best = min(times, key=lambda name: times[name])
    for name, time_s in times.items():
        said, scaled = curves_of(op, name, group)
        measured = comparisons(op, group, size) if name == best else ()
        yield Row(op, cluster, group, name, size, time_s, name == best, said, scaled, measured)


def named_routes(op: str, group: Group) -> dict[str, Route]:
    """The routes of (C1)-(C6) by name (L3)."""
    found = routes(group.accelerator, op, group.spans)
    if op == "sendrecv":
        names = ["p2p"]
    elif not group.outside:
        names = ["in-domain"]
    elif op == "alltoall":
        names = ["pairwise"]
    else:
        names = ["ring", "tree"][: len(found)]
    return dict(zip(names, found, strict=True))


def curves_of(op: str, algorithm: str, group: Group) -> tuple[tuple[str, ...], bool]:
    """What the curves of an algorithm were measured on or scaled from, innermost first, and whether any was scaled."""
    accelerator, (ranks, link) = group.accelerator, group.domain
    used: list[tuple[Link, str, CollectiveCurve | NetworkCurve]] = []
    if link is not None and not (op == "sendrecv" and group.outside):
        passing = "all_gather" if algorithm == "ring" and op == "all_reduce" else op
        used.append((link, f"{passing} of {ranks} ranks", collective_curve(accelerator, link, passing, ranks)))
        if op == "alltoall" and group.outside:
            used.append((link, f"start of {group.ranks} ranks", collective_curve(accelerator, link, op, group.ranks)))
    outer = group.outside[-1:] if op == "sendrecv" else group.outside
    for members, link in outer:
        if link.kind in SCALE_UP_KINDS:
            used.append((link, f"{op} of {members} ranks", collective_curve(accelerator, link, op, members)))
        else:
            kind = {"pairwise": "alltoall", "p2p": "sendrecv"}.get(algorithm, algorithm)
            used.append((link, kind, network_curve(link, kind)))
    said = [
        f"{link.name}, {what}: from measurements on {curve.measured_on}" + (f" ({curve.note})" if curve.note else "")
        for link, what, curve in used
    ]
    return tuple(said), any(curve.scaled for _, _, curve in used)


def comparisons(op: str, group: Group, size: int) -> tuple[Comparison, ...]:
    """The measured points beside a row, the nearest in size first (L5)."""
    (ranks, link), outside = group.domain, group.outside
    if len(outside) > 1:
        return ()
    domains, network = outside[0] if outside else (1, None)
    nearest: dict[str, MeasuredCollective] = {}
    points = measured_collectives(group.accelerator.name, op, ranks, domains)
    near = [point for point in points if size <= NEAR * point.bytes and point.bytes <= NEAR * size]
    for point in sorted(near, key=lambda point: (abs(math.log(point.bytes / size)), bool(point.left_out))):
        if point.ran_over(link, network):
            nearest.setdefault(point.source, point)
    return tuple(
        Comparison(
            point.bytes,
            point.time_s,
            collective_time_s(group.accelerator, op, point.bytes, group.spans),
            point.left_out,
            point.source,
        )
        for point in nearest.values()
    )


def _same(link: Link, other: Link) -> bool:
    return (link.kind, link.effective_bytes_per_s) == (other.kind, other.effective_bytes_per_s)


def _plain(op: str) -> str:
    return re.sub("[^a-z0-9]", "", op.lower())


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
