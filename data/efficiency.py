"""Measured efficiency curves: which row of `data/kernels/` and `data/collectives/` speaks for a device or a link.

An accelerator or link that was measured is answered from its own row. Any other is answered by a stand-in, and the
curve says so (`scaled`, `note`). The stand-in of an accelerator is the first row of `stand_ins.csv` whose prefix starts
the name and that was measured. It lends its efficiency, which multiplies the peak of the accelerator asked for; where
`achievable.csv` holds the best measured matmul rate of both, the efficiency moves by the ratio of what they reach. The
stand-in of a scale-up link is, among measured links of the kind, that of the accelerator's own stand-in, else the one
of nearest bandwidth; it lends the shape, and bandwidth scales by the nominal ones. Networks lend theirs by kind.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING

from shardwise.data.faults import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.data.cluster import Accelerator, Link

Row = dict[str, str]

# Kinds of scale-up links by the measured kind that lends them its curves: full meshes of point-to-point links take
# xGMI's, switched or torus ones NVLink's. Every other kind is a network, with a card per accelerator.
SCALE_UP_KINDS = {
    "nvlink": "nvlink",
    "nvswitch": "nvlink",
    "pcie": "pcie",
    "xgmi": "xgmi",
    "hccs": "xgmi",
    "ub": "nvlink",
    "ici": "nvlink",
    "neuronlink": "nvlink",
}
OPS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv")
NARROW = ("fp8", "fp4", "int8")


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """Constants of (K1); `flops_per_s` is the peak they multiply."""

    flops_per_s: float
    efficiency: float
    c_m: float
    c_n: float
    c_k: float
    launch_s: float
    bytes_per_s: float
    throttle: float
    operand_bytes: float
    source: str
    measured_on: str
    scaled: bool
    note: str


@dataclass(frozen=True, slots=True)
class AttentionCurve:
    """Constants of (K3); `flops_per_s` is the peak they multiply."""

    flops_per_s: float
    efficiency: float
    c_keys: float
    c_rows: float
    launch_s: float
    bytes_per_s: float
    softmax_dim: float
    backward_rate: float
    flash2_rate: float
    source: str
    measured_on: str
    scaled: bool
    note: str


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Constants of (K5): the bandwidth that streaming kernels achieve, and what a launch costs."""

    bytes_per_s: float
    launch_s: float
    source: str
    measured_on: str
    scaled: bool
    note: str


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """Constants of (C1) for `ranks` members of one scale-up domain; `bytes_per_s` is the bus bandwidth."""

    ranks: int
    alpha_s: float
    bytes_per_s: float
    half_bytes: float
    exponent: float
    source: str
    measured_on: str
    scaled: bool
    note: str


@dataclass(frozen=True, slots=True)
class NetworkCurve:
    """Constants of (C2) for one network link; `bytes_per_s` is what one accelerator's share of cards achieves."""

    bytes_per_s: float
    hop_s: float
    inner_hop_s: float
    half_bytes: float
    exponent: float
    overlap: float
    source: str
    measured_on: str
    scaled: bool
    note: str


@cache
def read_table(path: str) -> tuple[Row, ...]:
    """Return the rows of `data/<path>`."""
    with files("shardwise.data").joinpath(path).open(encoding="utf-8") as lines:
        return tuple(csv.DictReader(lines))


@lru_cache(maxsize=4096)
def gemm_curve(accelerator: Accelerator, precision: str) -> GemmCurve:
    """Return the GEMM curve of `accelerator`; other 8-bit precisions share the FP8 one, wider ones BF16's."""
    peak = peak_flops_per_s(accelerator, precision)
    table = "fp8" if precision in NARROW else "bf16"
    if precision == "fp4" and _stand_in(accelerator.name, _gemm_rows(precision)) is not None:
        table = precision
    rows = _gemm_rows(table)
    row, notes = _row_for(accelerator, rows, f"{table} GEMM")
    efficiency = float(row["efficiency"])
    if row["accelerator"] != accelerator.name:
        ratio = _reach(accelerator.name, row["accelerator"], table)
        if ratio is not None:
            efficiency = min(1.0, efficiency * ratio)
            notes.append(f"efficiency times {ratio:.2f}, the ratio of best measured matmul rates over peak")
    if precision not in ("bf16", "fp16", table):
        notes.append(f"{precision} takes the efficiency of {table}")
    return GemmCurve(
        flops_per_s=peak,
        efficiency=efficiency,
        c_m=float(row["c_m"]),
        c_n=float(row["c_n"]),
        c_k=float(row["c_k"]),
        launch_s=float(row["launch_us"]) * 1e-6,
        bytes_per_s=float(row["memory_efficiency"]) * accelerator.memory_bandwidth_bytes_per_s,
        throttle=float(row["throttle"]),
        operand_bytes={"fp32": 4.0, "tf32": 4.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}.get(precision, 2.0),
        source=row["source"],
        measured_on=row["accelerator"],
        scaled=bool(notes),
        note="; ".join(notes),
    )


@cache
def _gemm_rows(precision: str) -> dict[str, Row]:
    return {row["accelerator"]: row for row in read_table("kernels/gemm.csv") if row["precision"] == precision}


@lru_cache(maxsize=4096)
def attention_curve(accelerator: Accelerator, precision: str) -> AttentionCurve:
    """Return the flash-attention curve of `accelerator`, measured in BF16; other precisions scale it by peak."""
    peak = peak_flops_per_s(accelerator, precision)
    rows = {row["accelerator"]: row for row in read_table("kernels/attention.csv")}
    row, notes = _row_for(accelerator, rows, "attention")
    if precision not in ("bf16", "fp16"):
        notes.append(f"{precision} takes the efficiency of bf16")
    return AttentionCurve(
        flops_per_s=peak,
        efficiency=float(row["efficiency"]),
        c_keys=float(row["c_keys"]),
        c_rows=float(row["c_rows"]),
        launch_s=float(row["launch_us"]) * 1e-6,
        bytes_per_s=float(row["memory_efficiency"]) * accelerator.memory_bandwidth_bytes_per_s,
        softmax_dim=float(row["softmax_dim"]),
        backward_rate=float(row["backward_rate"]),
        flash2_rate=float(row["flash2_rate"]),
        source=row["source"],
        measured_on=row["accelerator"],
        scaled=bool(notes),
        note="; ".join(notes),
    )


@lru_cache(maxsize=4096)
def memory_curve(accelerator: Accelerator) -> MemoryCurve:
    """Return the streaming-bandwidth curve of `accelerator`."""
    rows = {row["accelerator"]: row for row in read_table("kernels/memory.csv")}
    row, notes = _row_for(accelerator, rows, "memory")
    return MemoryCurve(
        bytes_per_s=float(row["efficiency"]) * accelerator.memory_bandwidth_bytes_per_s,
        launch_s=float(row["launch_us"]) * 1e-6,
        source=row["source"],
        measured_on=row["accelerator"],
        scaled=bool(notes),
        note="; ".join(notes),
    )


@lru_cache(maxsize=4096)
def collective_curve(accelerator: Accelerator, link: Link, op: str, ranks: int) -> CollectiveCurve:
    """Return the curve of `op` among `ranks` accelerators of one scale-up domain.

    Between measured rank counts its constants are interpolated along log2(ranks). Beyond the largest one only the start
    grows: with log2(ranks) for all-reduce, which has trees and switches that reduce, linearly for the others.
    """
    kind = SCALE_UP_KINDS[link.kind]
    rows = [row for row in read_table("collectives/curves.csv") if row["kind"] == kind and row["op"] == op]
    nominal = {row["accelerator"]: float(row["nominal_GBps"]) * 1e9 for row in rows}
    donor = accelerator.name if accelerator.name in nominal else _stand_in(accelerator.name, nominal)
    if donor is None:
        donor = min(nominal, key=lambda name: abs(math.log(nominal[name] / link.bandwidth_bytes_per_s)))
    curve = _at_ranks([_collective_curve(row) for row in rows if row["accelerator"] == donor], op, ranks)
    scale = link.effective_bytes_per_s / nominal[donor]
    if donor == accelerator.name and link.kind == kind and abs(scale - 1) < 0.01:
        return curve
    note = f"{link.name} on {accelerator.name}: no {op} measurement; {kind} curve of {donor} scaled by {scale:.2f}"
    alpha_s = max(curve.alpha_s, link.latency_s)
    return replace(
        curve, alpha_s=alpha_s, bytes_per_s=curve.bytes_per_s * scale, scaled=True, note=_join(curve.note, note)
    )


@lru_cache(maxsize=4096)
def network_curve(link: Link, algorithm: str) -> NetworkCurve:
    """Return the curve of `algorithm` (ring, tree, alltoall, sendrecv) over a network link.

    RoCE was measured with InfiniBand's cards and shares its row. A link latency above the measured hop replaces it.
    """
    rows = [row for row in read_table("collectives/networks.csv") if row["algorithm"] == algorithm]
    row = next((row for row in rows if link.kind in (row["kind"], *row["stands_for"].split())), None)
    row = row or next(row for row in rows if "any-other" in row["stands_for"])
    own = link.kind == row["kind"] or link.kind in row["measured_on"].lower()
    return NetworkCurve(
        bytes_per_s=float(row["efficiency"]) * link.effective_bytes_per_s,
        hop_s=max(float(row["hop_us"]) * 1e-6, link.latency_s),
        inner_hop_s=float(row["inner_hop_us"]) * 1e-6,
        half_bytes=float(row["half_bytes"]),
        exponent=float(row["exponent"]),
        overlap=float(row["overlap"]),
        source=row["source"],
        measured_on=row["measured_on"],
        scaled=not own,
        note="" if own else f"{link.name}: no measurement over {link.kind}; {algorithm} of {row['kind']}, by bandwidth",
    )


def peak_flops_per_s(accelerator: Accelerator, precision: str) -> float:
    """Return the dense peak of `accelerator` in `precision`, or say which precisions it has."""
    peak = accelerator.flops_per_s.get(precision)
    if peak is None:
        offered = ", ".join(sorted(accelerator.flops_per_s))
        raise InputError(f"precision={precision} is not supported by {accelerator.name}, which has {offered}")
    return peak


def _row_for(accelerator: Accelerator, rows: dict[str, Row], what: str) -> tuple[Row, list[str]]:
    """Return the row that speaks for `accelerator`, and a note if it is another device's."""
    if accelerator.name in rows:
        return rows[accelerator.name], []
    donor = _stand_in(accelerator.name, rows)
    if donor is None:
        raise LookupError(f"stand_ins.csv names no device with a {what} measurement for {accelerator.name}")
    return rows[donor], [f"{accelerator.name}: no {what} measurement; curve of {donor} scaled by peak and bandwidth"]


def _stand_in(name: str, measured: dict[str, Row] | dict[str, float]) -> str | None:
    """Return the first stand-in of `name` that was measured; the empty prefix of the last row starts every name."""
    for row in read_table("stand_ins.csv"):
        if name.startswith(row["prefix"]) and row["stand_in"] in measured:
            return row["stand_in"]
    return None


def _reach(name: str, donor: str, precision: str) -> float | None:
    """Ratio of what `name` and `donor` reach of their peaks, in BF16 where only that was measured on both."""
    best = {
        (row["accelerator"], row["precision"]): float(row["tflops"]) / float(row["peak_tflops"])
        for row in read_table("kernels/achievable.csv")
    }
    for measured in (precision, "bf16"):
        if (name, measured) in best and (donor, measured) in best:
            return best[name, measured] / best[donor, measured]
    return None


def _collective_curve(row: Row) -> CollectiveCurve:
    return CollectiveCurve(
        ranks=int(row["ranks"]),
        alpha_s=float(row["alpha_us"]) * 1e-6,
        bytes_per_s=float(row["busbw_GBps"]) * 1e9,
        half_bytes=float(row["half_bytes"]),
        exponent=float(row["exponent"]),
        source=row["source"],
        measured_on=row["accelerator"],
        scaled=bool(row["derived"]),
        note=row["derived"],
    )


def _at_ranks(curves: Sequence[CollectiveCurve], op: str, ranks: int) -> CollectiveCurve:
    """Interpolate between the measured rank counts, or extrapolate beyond the largest."""
    curves = sorted(curves, key=lambda curve: curve.ranks)
    last = curves[-1]
    for low, high in pairwise(curves):
        if low.ranks < ranks < high.ranks:
            return _blend(low, high, ranks)
    if ranks <= last.ranks or op == "sendrecv":
        return next((curve for curve in curves if curve.ranks >= ranks), last)
    first = curves[-2] if len(curves) > 1 else replace(last, ranks=1, alpha_s=last.alpha_s / 2)
    if op == "all_reduce":
        reach = math.log2(ranks / last.ranks) / math.log2(last.ranks / first.ranks)
    else:
        reach = (ranks - last.ranks) / (last.ranks - first.ranks)
    alpha_s = last.alpha_s + max(0.0, last.alpha_s - first.alpha_s) * reach
    note = f"{ranks} ranks of {last.measured_on}: {op} extrapolated from {last.ranks} ranks"
    return replace(last, ranks=ranks, alpha_s=alpha_s, scaled=True, note=_join(last.note, note))


def _blend(low: CollectiveCurve, high: CollectiveCurve, ranks: int) -> CollectiveCurve:
    share = math.log2(ranks / low.ranks) / math.log2(high.ranks / low.ranks)

    def along(a: float, b: float) -> float:
        return math.exp((1 - share) * math.log(a) + share * math.log(b))

    return replace(
        high,
        ranks=ranks,
        alpha_s=along(low.alpha_s, high.alpha_s),
        bytes_per_s=along(low.bytes_per_s, high.bytes_per_s),
        half_bytes=along(low.half_bytes, high.half_bytes),
        exponent=along(low.exponent, high.exponent),
        scaled=True,
        note=_join(high.note, f"{ranks} ranks interpolated between {low.ranks} and {high.ranks}"),
    )


def _join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
