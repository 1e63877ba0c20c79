"""Time of one collective over a group of ranks.

A group is described by its spans, innermost level first: f_l members at level l, joined by that level's link. n is the
product of the f_l, p_l that of the levels inside l, N = n / f_0. S is the full, unsharded tensor: the output of an
all-gather, the input of a reduce-scatter, the buffer of an all-reduce, what one rank holds for an all-to-all, what one
rank sends for a sendrecv. The bus factor is phi = 2 (n-1)/n for all-reduce, 1 for sendrecv, else (n-1)/n.

(C1) Inside a scale-up domain (NVLink, xGMI, PCIe, ...), by the measured curve of n ranks, whatever NCCL chose there:
         t = alpha + phi S / B (1 + (h/S)^g),  0 < g <= 1
(C2) A network level, where each of the p_l ranks below brings its share of cards, R_l, so that they carry x = S / p_l:
         u_l(phi) = phi x / R_l (1 + (h/x)^g), and one hop costs at least the latency of the link.
(C3) Flat ring over all levels: t = alpha_0 + steps + (u_0^q + sum_l u_l(phi)^q)^(1/q), the rate of a ring that leaves
     the node: about min(NVLink, NIC rate x ranks of the group on the node), a little less where the two are close. u_0
     is the ring of f_0 ranks in the domain, that is (C1) of all-gather with phi of the op. Steps, once or for an
     all-reduce twice, as NCCL counts them (src/graph/tuning.cc, nsteps and nInterSteps): N - 1 hops between domains
     and, beyond the f_0 - 1 in alpha_0, (N - 1) (f_0 - 1) cheaper ones inside.
(C4) All-reduce by trees between domains, as NCCL's Tree and NVLSTree: u_0 by (C1) of all-reduce in the domain,
     u_l(2), u_l(1) for N = 2 (each domain sends S once), 2 ceil(log2 f_l) hops a level (same file).
(C5) All-to-all: level 0 moves its share S f_0/n by (C1); what leaves a block of p_l ranks leaves by the cards of its
     sender, (n - p_l)/n S / R_l; levels overlap as in (C3); one hop a level, and the start of n ranks.
(C6) Sendrecv: every rank sends to its neighbour; the outermost boundary decides, one rank's share of cards wide.

Levels of one scale-up kind and rate that follow each other are one domain (the tray and the rack of an NVL72). A slower
scale-up level outside another, such as PCIe between NVLink pairs, is a bottleneck that its ranks do not widen. The
faster of (C3) and (C4) is taken for all-reduce, as NCCL's tuner would; the others have rings only.

What holds: time is positive, finite, nondecreasing in S for every op and placement; a group of one rank costs nothing.
Moving ranks from a network level to the level inside it (same n) is never slower under (C2)-(C5) as far as the network
terms go: x shrinks, the hops fall. It is NOT a theorem for the sum: the inner curves are measurements, and some inner
links are slower than the network outside (eight L40S over PCIe: 2 GB/s; a RoCE card: 25), some inner starts longer.
`best_collective_time_s` therefore takes the minimum over every placement, and that is the admissible bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from shardwise.data.efficiency import OPS, SCALE_UP_KINDS, collective_curve, network_curve
from shardwise.data.faults import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.data.cluster import Accelerator, Link
    from shardwise.data.efficiency import CollectiveCurve, NetworkCurve

Spans = tuple[tuple[int, "Link"], ...]


@dataclass(frozen=True, slots=True)
class Term:
    """What keeps one level busy: seconds per byte of S, twice that at `half_bytes`."""

    seconds_per_byte: float
    half_bytes: float
    exponent: float

    def busy_s(self, size: float) -> float:
        return size * self.seconds_per_byte * (1 + math.pow(self.half_bytes / size, self.exponent))


@dataclass(frozen=True, slots=True)
class Route:
    """One algorithm for one group: what it costs to start, and the levels that it keeps busy together."""

    start_s: float
    terms: tuple[Term, ...]
    overlap: float = 1.0

    def time_s(self, size: float) -> float:
        busy = [term.busy_s(size) for term in self.terms]
        longest = max(busy)
        together = sum(math.pow(one / longest, self.overlap) for one in busy)
        return self.start_s + longest * math.pow(together, 1 / self.overlap)


@dataclass(frozen=True, slots=True)
class Inner:
    """The innermost scale-up domain: the curve of the op among its `members`, and of a ring that passes through."""

    members: int
    own: CollectiveCurve
    ring: CollectiveCurve
    start_s: float


@dataclass(frozen=True, slots=True)
class Outer:
    """A network level: `members` of it in the group, each of `inside` ranks."""

    members: int
    inside: int
    curve: NetworkCurve
    tree: NetworkCurve


def collective_time_s(accelerator: Accelerator, op: str, bytes: float, spans: Spans) -> float:
    """Return the seconds of `op` on `bytes` over the group of `spans`, by the fastest of (C1)-(C6)."""
    return fastest_time_s(accelerator, op, bytes, (spans,))


def fastest_time_s(accelerator: Accelerator, op: str, bytes: float, alternatives: tuple[Spans, ...]) -> float:
    """Return the least `collective_time_s` of the places that a group may have."""
    if bytes <= 0:
        return 0.0
    return min((route.time_s(bytes) for route in _routes(accelerator, op, alternatives)), default=0.0)


def p2p_time_s(accelerator: Accelerator, bytes: float, link: Link) -> float:
    """Return the seconds to send `bytes` to another rank over `link` (C6)."""
    return collective_time_s(accelerator, "sendrecv", bytes, ((2, link),))


def bandwidth_time_per_byte(accelerator: Accelerator, op: str, spans: Spans, bucket_bytes: float) -> float:
    """Return the seconds per byte of a tensor that is synchronised in buckets of `bucket_bytes`."""
    return collective_time_s(accelerator, op, bucket_bytes, spans) / bucket_bytes


def best_collective_time_s(
    accelerator: Accelerator, op: str, bytes: float, size: int, levels: tuple[tuple[int, Link], ...]
) -> float:
    """Return the least `collective_time_s` over all placements of `size` ranks on `levels` of (capacity, link).

    A placement factors `size` over the levels, each factor within its capacity. Infinite when there is none.
    """
    if size == 1:
        return 0.0
    return min((collective_time_s(accelerator, op, bytes, s) for s in placements(size, levels)), default=math.inf)


def split_spans(spans: Spans, inner: int) -> tuple[Spans, Spans]:
    """A group as its blocks of `inner` neighbouring ranks, and the group of those blocks."""
    near: list[tuple[int, Link]] = []
    far: list[tuple[int, Link]] = []
    left = inner
    for members, link in spans:
        taken = math.gcd(members, left)
        left //= taken
        near.append((taken, link))
        far.append((members // taken, link))
    return tuple(near), tuple(far)


@lru_cache(maxsize=16384)
def placements(size: int, levels: tuple[tuple[int, Link], ...]) -> tuple[Spans, ...]:
    """Return every factorization of `size` over `levels` with each factor within the capacity of its level."""

    def split(rest: int, level: int) -> Iterator[Spans]:
        if level == len(levels):
            if rest == 1:
                yield ()
            return
        capacity, link = levels[level]
        for members in range(1, min(rest, capacity) + 1):
            if rest % members == 0:
                for outer in split(rest // members, level + 1):
                    yield ((members, link), *outer)

    return tuple(split(size, 0))


@lru_cache(maxsize=65536)
def _routes(accelerator: Accelerator, op: str, alternatives: tuple[Spans, ...]) -> tuple[Route, ...]:
    """Those of all places; a group of one rank has none in any."""
    return tuple(route for spans in alternatives for route in routes(accelerator, op, spans))


@lru_cache(maxsize=65536)
def routes(accelerator: Accelerator, op: str, spans: Spans) -> tuple[Route, ...]:
    """Return the algorithms that NCCL would consider for `op`; none for a group of one rank."""
    if op not in OPS:
        raise InputError(f"op={op} is not one of {', '.join(OPS)}")
    spans = _merged(spans)
    if not spans:
        return ()
    if op == "sendrecv":
        return _sendrecv(accelerator, spans)
    ranks = math.prod(members for members, _ in spans)
    members, link = spans[0]
    inner = None
    inside = 1
    if link.kind in SCALE_UP_KINDS:
        inner = _inner(accelerator, op, members, ranks, link)
        inside, spans = members, spans[1:]
    outer: list[Outer] = []
    slow: list[Term] = []
    for members, link in spans:
        if link.kind in SCALE_UP_KINDS:
            slow.append(_term(bus_factor(op, ranks), collective_curve(accelerator, link, op, members)))
        else:
            curve = network_curve(link, "alltoall" if op == "alltoall" else "ring")
            outer.append(Outer(members, inside, curve, network_curve(link, "tree")))
        inside *= members
    return group_routes(op, ranks, inner, tuple(outer), tuple(slow))


def group_routes(
    op: str, ranks: int, inner: Inner | None, outer: tuple[Outer, ...], slow: tuple[Term, ...] = ()
) -> tuple[Route, ...]:
    """Return the routes of `op` from the curves of its levels; `slow` are scale-up levels outside the innermost."""
    start_s = inner.start_s if inner else 0.0
    if inner and not outer and not slow:
        return (Route(start_s, (_term(bus_factor(op, ranks), inner.own),)),)
    overlap = outer[0].curve.overlap if outer else 1.0
    if op == "alltoall":
        terms = [_network(1 - level.inside / ranks, 1, level.curve) for level in outer]
        if inner:
            share = inner.members / ranks
            terms.append(
                Term(
                    share * bus_factor(op, inner.members) / inner.own.bytes_per_s,
                    inner.own.half_bytes / share,
                    inner.own.exponent,
                )
            )
        start_s += sum(level.curve.hop_s for level in outer)
        return (Route(start_s, (*terms, *slow), overlap),)
    found = [_ring(op, ranks, inner, outer, slow, overlap)]
    if op == "all_reduce" and outer:
        found.append(_tree(ranks, inner, outer, slow, overlap))
    return tuple(found)


def sendrecv_route(network: NetworkCurve) -> Route:
    """Return the route of a message between two ranks over a network (C6)."""
    return Route(network.hop_s, (_network(1.0, 1, network),))


def bus_factor(op: str, ranks: int) -> float:
    """Return phi, the share of S that the busiest link carries."""
    if op == "sendrecv":
        return 1.0
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks


def _ring(
    op: str, ranks: int, inner: Inner | None, outer: tuple[Outer, ...], slow: tuple[Term, ...], overlap: float
) -> Route:
    """(C3)."""
    phi = bus_factor(op, ranks)
    terms = [_network(phi, level.inside, level.curve) for level in outer]
    if inner:
        terms.append(_term(phi, inner.ring))
    start_s = inner.start_s if inner else 0.0
    turns = 2 if op == "all_reduce" else 1
    members = inner.members if inner else 1
    for level in outer:
        crossings = turns * (level.members - 1) * (ranks // (level.inside * level.members))
        start_s += crossings * (level.curve.hop_s + (members - 1) * level.curve.inner_hop_s)
    return Route(start_s, (*terms, *slow), overlap)


def _tree(ranks: int, inner: Inner | None, outer: tuple[Outer, ...], slow: tuple[Term, ...], overlap: float) -> Route:
    """(C4)."""
    domains = ranks // (inner.members if inner else 1)
    sent = 1.0 if domains == 2 else 2.0
    terms = [_network(sent, level.inside, level.tree) for level in outer]
    if inner:
        terms.append(_term(bus_factor("all_reduce", inner.members), inner.own))
    start_s = inner.start_s if inner else 0.0
    start_s += sum(2 * math.ceil(math.log2(level.members)) * level.tree.hop_s for level in outer)
    return Route(start_s, (*terms, *slow), overlap)


def _sendrecv(accelerator: Accelerator, spans: Spans) -> tuple[Route, ...]:
    """(C6)."""
    members, link = spans[-1]
    if link.kind in SCALE_UP_KINDS:
        curve = collective_curve(accelerator, link, "sendrecv", members)
        return (Route(curve.alpha_s, (_term(1.0, curve),)),)
    return (sendrecv_route(network_curve(link, "sendrecv")),)


def _inner(accelerator: Accelerator, op: str, members: int, ranks: int, link: Link) -> Inner:
    own = collective_curve(accelerator, link, op, members)
    ring = collective_curve(accelerator, link, "all_gather" if op == "all_reduce" else op, members)
    # An all-to-all posts a message per peer, in the node or out of it.
    start = collective_curve(accelerator, link, op, ranks) if op == "alltoall" else own
    return Inner(members, own, ring, start.alpha_s)


def _term(phi: float, curve: CollectiveCurve) -> Term:
    return Term(phi / curve.bytes_per_s, curve.half_bytes, curve.exponent)


def _network(sent: float, inside: int, curve: NetworkCurve) -> Term:
    """(C2): each of the `inside` cards carries S / inside, so S is `inside` times larger when it saturates them."""
    return Term(sent / (inside * curve.bytes_per_s), curve.half_bytes * inside, curve.exponent)


def _merged(spans: Spans) -> Spans:
    """Drop levels that the group does not use, and join scale-up levels of one kind and rate into one domain."""
    merged: list[tuple[int, Link]] = []
    for members, link in spans:
        if members == 1:
            continue
        if merged and link.kind in SCALE_UP_KINDS:
            below, inner = merged[-1]
            if (link.kind, link.effective_bytes_per_s) == (inner.kind, inner.effective_bytes_per_s):
                merged[-1] = (below * members, inner)
                continue
        merged.append((members, link))
    return tuple(merged)
