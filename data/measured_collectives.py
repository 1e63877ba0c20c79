"""The measured points behind the curves of `data/collectives/`, and those that no curve was fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from shardwise.data.efficiency import SCALE_UP_KINDS, read_table

if TYPE_CHECKING:
    from shardwise.data.cluster import Link

NEAR = 0.01
"""Links are the same when their rates differ by no more than this."""


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """One run of `op` on `bytes`: `domain_ranks` in each of `domains`, which a network joins where there are several.

    `left_out` says why no curve was fitted to the point; it is empty where one was.
    """

    accelerator: str
    kind: str
    nominal_bytes_per_s: float
    op: str
    domain_ranks: int
    network: str
    network_bytes_per_s: float
    domains: int
    bytes: int
    time_s: float
    left_out: str
    source: str

    def __post_init__(self) -> None:
        if not (self.bytes > 0 and self.time_s > 0):
            raise ValueError(f"bytes={self.bytes} and time_s={self.time_s} must be positive")
        if (self.domains > 1) != bool(self.network):
            raise ValueError(f"network={self.network!r} must be named where domains={self.domains} is more than 1")

    def ran_over(self, domain: Link | None, network: Link | None) -> bool:
        """Whether the point was measured over links like these; a link that joins nobody does not matter."""
        inside = self.domain_ranks == 1 or (
            domain is not None
            and SCALE_UP_KINDS.get(domain.kind) == self.kind
            and _alike(domain.effective_bytes_per_s, self.nominal_bytes_per_s)
        )
        outside = self.domains == 1 or (
            network is not None
            and network.kind == self.network
            and _alike(network.effective_bytes_per_s, self.network_bytes_per_s)
        )
        return inside and outside


def measured_collectives(accelerator: str, op: str, domain_ranks: int, domains: int) -> tuple[MeasuredCollective, ...]:
    """Return the points of one accelerator, op and group, by size."""
    return _points().get((accelerator, op, domain_ranks, domains), ())


def _alike(rate: float, measured: float) -> bool:
    return abs(rate / measured - 1) < NEAR


@cache
def _points() -> dict[tuple[str, str, int, int], tuple[MeasuredCollective, ...]]:
    found: dict[tuple[str, str, int, int], list[MeasuredCollective]] = {}
    for row in read_table("collectives/points.csv"):
        point = MeasuredCollective(
            accelerator=row["accelerator"],
            kind=row["kind"],
            nominal_bytes_per_s=float(row["nominal_GBps"]) * 1e9,
            op=row["op"],
            domain_ranks=int(row["domain_ranks"]),
            network=row["network"],
            network_bytes_per_s=float(row["network_GBps"] or 0) * 1e9,
            domains=int(row["domains"]),
            bytes=int(row["bytes"]),
            time_s=float(row["time_us"]) * 1e-6,
            left_out=row["left_out"],
            source=row["source"],
        )
        found.setdefault((point.accelerator, point.op, point.domain_ranks, point.domains), []).append(point)
    return {key: tuple(sorted(points, key=lambda point: point.bytes)) for key, points in found.items()}
