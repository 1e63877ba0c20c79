"""Reduce measured collectives to the small curves of `data/collectives/`.

    python benchmarks/fit_collectives.py FACTS --out data/collectives

FACTS is a folder holding `accelerators.csv` and `collectives/*.csv`. `curves.csv` holds one scale-up domain, by (C1) of
`formulations/collectives.py`; `networks.csv` holds networks, by (C2)-(C6) on top of the curves just fitted. Every row
carries the error of its fit, and that on the fifth of its points that a second, seeded fit did not see. `points.csv`
holds the measurements themselves, those that no fit saw with the reason why.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from shardwise.data.efficiency import CollectiveCurve, NetworkCurve
from shardwise.formulations.collectives import Inner, Outer, Route, bus_factor, group_routes, sendrecv_route

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[tuple[int, ...], np.dtype[Any]]
    Row = dict[str, Any]
    Table = Any  # a DataFrame; pandas' stubs give its cells types too wide to calculate with

SEED = 20
HARDWARE = {  # as measured: catalogue name, kind of the scale-up link, its nominal GB/s per accelerator and direction
    "A100-SXM4-80GB": ("A100-SXM-80GB", "nvlink", 300.0),
    "H100-SXM5-80GB": ("H100-SXM", "nvlink", 450.0),
    "H200-SXM": ("H200-SXM", "nvlink", 450.0),
    "B200-SXM": ("B200-SXM", "nvlink", 900.0),
    "B300-SXM": ("B300-SXM", "nvlink", 900.0),
    "GB200 (4 GPU tray)": ("GB200", "nvlink", 900.0),
    "GB200 NVL72": ("GB200", "nvlink", 900.0),
    "GB300 (4 GPU tray)": ("GB300", "nvlink", 900.0),
    "L40S": ("L40S", "pcie", 31.0),
    "RTX PRO 6000 Blackwell Server": ("RTX PRO 6000 Blackwell Server", "pcie", 63.0),
    "MI300X": ("MI300X", "xgmi", 448.0),
}
NETWORKS = {"InfiniBand": "infiniband", "+ IB": "infiniband", "RoCE": "roce", "EFA": "efa"}  # by a word of the fabric
MEASURED_SENDRECV = {"a100_dgx": "A100-SXM4-80GB", "h100_dgx": "H100-SXM5-80GB"}
# Tables stop at 512 MiB. Where larger sizes exist (H100: 445 GB/s at 512 MiB, 482 at 16 GiB) the rate rises by 8 %.
HEADROOM = 1.08
NOMINAL = 50e9  # every network measured has one 400 Gb/s card per accelerator
MAIN_NOTE = "ai-dynamo/aiconfigurator"


def fit_curve(size: Array, seconds: Array, phi: float, seed: int = SEED) -> Row:
    """(C1): alpha, bus bandwidth, half size and exponent, with their errors."""

    def predicted(p: Array, size: Array) -> Array:
        alpha, rate, half, exponent = np.exp(p)
        return np.asarray(alpha + size * phi / rate * (1 + (half / size) ** exponent))

    best = float((size * phi / seconds).max())
    low = np.log([0.7 * seconds.min(), 0.7 * best, 1.0, 0.02])
    high = np.log([1e-3, HEADROOM * best, 1e9, 1.0])
    start = np.clip(np.log([seconds.min(), best, 1e6, 0.5]), low + 1e-6, high - 1e-6)

    def solve(chosen: Array) -> Array:
        size_seen, seconds_seen = size[chosen], seconds[chosen]
        return np.asarray(
            least_squares(
                lambda p: np.log(predicted(p, size_seen) / seconds_seen),
                start,
                bounds=(low, high),
                loss="soft_l1",
                f_scale=0.1,
            ).x
        )

    seen = np.random.default_rng(seed).random(len(size)) >= 0.2
    p, q = solve(np.ones(len(size), bool)), solve(seen)
    alpha, rate, half, exponent = np.exp(p).tolist()
    values = {
        "alpha_us": significant(alpha * 1e6),
        "busbw_GBps": significant(rate * 1e-9),
        "half_bytes": significant(half),
        "exponent": significant(exponent),
    }
    return values | errors(
        np.abs(predicted(p, size) / seconds - 1), np.abs(predicted(q, size) / seconds - 1)[~seen], size
    )


def significant(value: float) -> float:
    return float(f"{value:.4g}")


def errors(ape: Array, held: Array, size: Array) -> Row:
    def percent(value: Any) -> float:
        return round(100 * float(value), 1)

    return {
        "points": len(ape),
        "min_bytes": int(size.min()),
        "max_bytes": int(size.max()),
        "median_ape_pct": percent(np.median(ape)),
        "mape_pct": percent(ape.mean()),
        "heldout_median_ape_pct": percent(np.median(held)) if len(held) else "",
        "heldout_mape_pct": percent(held.mean()) if len(held) else "",
    }


def borrowed_start(size: Array, seconds: Array, phi: float, like: Row) -> Row:
    """A curve for large messages only: the start of `like`, and below four points its half size too."""

    def predicted(half: float) -> Array:
        saturation = 1 + (half / size) ** like["exponent"]
        rate = float(np.median(size * phi / seconds * saturation))
        return np.asarray(like["alpha_us"] * 1e-6 + size * phi / rate * saturation)

    halves = np.geomspace(1e6, 1e9, 200) if len(size) >= 4 else np.array([like["half_bytes"]])
    half = float(min(halves, key=lambda half: np.abs(np.log(predicted(half) / seconds)).sum()))
    rate = float(np.median(size * phi / seconds * (1 + (half / size) ** like["exponent"])))
    values = {
        "alpha_us": like["alpha_us"],
        "busbw_GBps": significant(rate * 1e-9),
        "half_bytes": significant(half),
        "exponent": like["exponent"],
    }
    return values | errors(np.abs(predicted(half) / seconds - 1), np.array([]), size)


def curve_rows(points: Table, vidur: Table) -> list[Row]:
    """One row per accelerator, op and rank count of a scale-up domain."""
    rows: dict[tuple[str, str, int], Row] = {}

    def add(hardware: str, op: str, ranks: int, fitted: Row, source: str, derived: str = "") -> None:
        name, kind, nominal = HARDWARE[hardware]
        key = {"accelerator": name, "kind": kind, "nominal_GBps": nominal, "op": op, "ranks": ranks}
        rows[name, op, ranks] = key | fitted | {"source": source, "derived": derived}

    local = points[points.fabric.str.contains("NVLink.*/NVSwitch$|PCIe|xGMI full mesh", regex=True)]
    local = local[local.source.str.contains(MAIN_NOTE) | (local.hw == "MI300X")]
    for (hardware, op, ranks), group in local.groupby(["hw", "op", "num_gpus"]):
        size, seconds = sizes_and_seconds(group)
        add(hardware, op, ranks, fit_curve(size, seconds, bus_factor(op, ranks)), sources(group))

    racks = points[points.fabric == "NVL72 (1 rack)"]
    tray = rows["GB200", "all_reduce", 4]
    growth = tray["alpha_us"] - rows["GB200", "all_reduce", 2]["alpha_us"]
    like = tray | {"alpha_us": significant(tray["alpha_us"] + growth * np.log2(72 / 4))}
    fitted = borrowed_start(*sizes_and_seconds(racks), bus_factor("all_reduce", 72), like)
    add("GB200 NVL72", "all_reduce", 72, fitted, sources(racks), "start extrapolated from 4 ranks")

    mesh = rows["MI300X", "all_reduce", 8]
    pair = points[(points.hw == "MI300X") & (points.num_gpus == 2)]
    fitted = borrowed_start(*sizes_and_seconds(pair), 1.0, mesh)
    add("MI300X", "all_reduce", 2, fitted, sources(pair), "start and saturation of 8 ranks")
    for op in ("all_gather", "reduce_scatter", "alltoall"):
        for ranks in (2, 8):
            like = rows["MI300X", "all_reduce", ranks]
            halved = {name: like[name] for name in like if name not in ("op", "derived", "source")}
            halved["alpha_us"] = significant(like["alpha_us"] / 2 if op != "alltoall" else like["alpha_us"])
            add(
                "MI300X",
                op,
                ranks,
                halved,
                like["source"],
                "all_reduce: its bus bandwidth and, but for alltoall, half its start",
            )

    for topology, hardware in MEASURED_SENDRECV.items():
        group = vidur[(vidur.topology == topology) & (vidur.op == "send_recv") & (vidur.devices_per_node == 2)]
        size, seconds = group.size_field.to_numpy(float), group.latency_ms.to_numpy() * 1e-3
        add(hardware, "sendrecv", 2, fit_curve(size, seconds, 1.0), sources(group))
    for hardware, (name, _, _) in HARDWARE.items():
        if (name, "sendrecv", 2) not in rows:
            like = rows[name, "alltoall", 2]
            same = {key: like[key] for key in like if key not in ("op", "derived", "source")}
            same["half_bytes"] = significant(like["half_bytes"] / 2)
            add(hardware, "sendrecv", 2, same, like["source"], "alltoall of 2 ranks, which sends half its bytes")
    return [rows[key] for key in sorted(rows)]


def sizes_and_seconds(group: Table) -> tuple[Array, Array]:
    return group.size_bytes.to_numpy(float), group.time_us.to_numpy() * 1e-6


def sources(points: Table) -> str:
    """Name every source of `points`; a path inside a repository does without its remarks."""
    found = [one.strip() if one.strip().startswith("public copy") else one.split(" (")[0] for one in points.source]
    return "; ".join(dict.fromkeys(found))


class Networks:
    """Predicts inter-node points from the fitted curves and the constants of one network."""

    def __init__(self, curves: Sequence[Row]) -> None:
        self.curves = {(row["accelerator"], row["op"], row["ranks"]): row for row in curves}

    def inner(self, hardware: str, op: str, members: int, ranks: int) -> Inner | None:
        if members == 1:
            return None
        name = HARDWARE[hardware][0]
        own = self.curve(name, op, members)
        ring = self.curve(name, "all_gather" if op == "all_reduce" else op, members)
        start_s = own.alpha_s
        if op == "alltoall":
            last, first = self.curve(name, op, 8), self.curve(name, op, 4)
            start_s = last.alpha_s + (last.alpha_s - first.alpha_s) / 4 * (ranks - 8)
        return Inner(members, own, ring, start_s)

    def curve(self, name: str, op: str, ranks: int) -> CollectiveCurve:
        row = self.curves[name, op, ranks]
        constants = row["alpha_us"] * 1e-6, row["busbw_GBps"] * 1e9, row["half_bytes"], row["exponent"]
        return CollectiveCurve(ranks, *constants, "", name, False, "")

    def seconds(self, points: Table, constants: Array, ring: Array | None = None) -> Array:
        """Predict `points`; `constants` are of every algorithm, except of the ring where it has its own."""
        own, passing = network_curve(constants), network_curve(constants if ring is None else ring)
        out = []
        for point in points.itertuples():
            ranks, nodes = int(point.num_gpus), int(point.num_nodes)
            if point.op == "sendrecv":
                found: tuple[Route, ...] = (sendrecv_route(own),)
            else:
                inner = self.inner(point.hw, point.op, ranks // nodes, ranks)
                straight = own if point.op == "alltoall" else passing
                found = group_routes(point.op, ranks, inner, (Outer(nodes, ranks // nodes, straight, own),))
            out.append(min(route.time_s(float(point.size_bytes)) for route in found))
        return np.array(out)

    def fit(self, points: Table, fixed: dict[int, float], ring: Array | None = None) -> tuple[Array, Row]:
        """Return efficiency, hop, half size, exponent, overlap, inner hop; `fixed` is what the points cannot tell."""
        measured = points.time_us.to_numpy() * 1e-6
        start = np.log([0.95, 12e-6, 1e6, 0.5, 5.0, 3e-6])
        low = np.log([0.4, 1e-6, 1.0, 0.05, 2.0, 1e-7])
        # An exponent near 1 is a second latency, and would hide the hops.
        high = np.log([1.0, 2e-4, 1e8, 0.8, 12.0, 2e-5])
        free = [i for i in range(6) if i not in fixed]

        def whole(p: Array) -> Array:
            out = np.exp(start)
            out[free] = np.exp(p)
            for i, value in fixed.items():
                out[i] = value
            return np.asarray(out)

        def solve(chosen: Array) -> Array:
            return whole(
                least_squares(
                    lambda p: np.log(self.seconds(points[chosen], whole(p), ring) / measured[chosen]),
                    np.clip(start[free], low[free] + 1e-6, high[free] - 1e-6),
                    bounds=(low[free], high[free]),
                    loss="soft_l1",
                    f_scale=0.1,
                ).x
            )

        seen = np.random.default_rng(SEED).random(len(points)) >= 0.2
        p, q = solve(np.ones(len(points), bool)), solve(seen)
        ape, held = (np.abs(self.seconds(points, c, ring) / measured - 1) for c in (p, q))
        return p, errors(ape, held[~seen], points.size_bytes.to_numpy())


def network_curve(constants: Array) -> NetworkCurve:
    efficiency, hop_s, half, exponent, overlap, inner_hop_s = constants.tolist()
    return NetworkCurve(NOMINAL * efficiency, hop_s, inner_hop_s, half, exponent, overlap, "", "", False, "")


def network_rows(points: Table, curves: Sequence[Row]) -> list[Row]:
    networks = Networks(curves)
    rings = ("all_reduce", "all_gather", "reduce_scatter")
    ib = points[points.fabric.str.contains("InfiniBand|IB NDR", regex=True) & points.hw.str.startswith("H100")]
    # The 2-node runs of cluster00 give 13.5 GB/s on a card of 50, those of cluster01 40: the former is no full NDR.
    ib = ib[~ib.source.str.contains("cluster00")]
    # Of the runs on 10 nodes, sendrecv has half the card's rate at any size; those on 2 nodes are of a later NCCL.
    pairs = ib[(ib.op == "sendrecv") & (ib.num_nodes == 2)]
    roce = points[points.fabric == "NVLink4 + RoCE 8x400G"]
    # The first sizes of this run fall from 6 ms to 0.4: its warm-up.
    efa = points[points.fabric.str.contains("EFA") & (points.size_bytes >= 2**18)]

    # RoCE starts at 1 KiB and tells the hop. Its two nodes exchange S once (C4), too little to load the cards, so their
    # efficiency is InfiniBand's, which starts at 32 MiB.
    hop = float(networks.fit(roce, {0: 0.98, 4: 4.0, 5: 5e-6})[0][1])
    wide = (ib.op == "all_reduce") & (ib.num_gpus >= 4 * ib.num_nodes)
    ring, ring_errors = networks.fit(ib[ib.op.isin(rings) & ~wide], {1: hop})
    efficiency, _, half, exponent, overlap, inner_hop = ring.tolist()
    shared = {1: hop, 4: overlap, 5: inner_hop}
    tree, tree_errors = networks.fit(pd.concat([ib[wide], roce]), {0: efficiency} | shared, ring)
    exchange, exchange_errors = networks.fit(ib[ib.op == "alltoall"], shared)
    pair, pair_errors = networks.fit(pairs, {2: half, 3: exponent} | shared)
    efa_fit, efa_errors = networks.fit(efa, {4: overlap, 5: inner_hop})

    rdma_on = "H100-SXM, 8x400G NDR, 2 to 12 nodes; H200-SXM, 8x400G RoCE, 2 nodes"
    on = {
        "infiniband": (rdma_on, "roce omni-path slingshot any-other"),
        "efa": ("B200-SXM, EFAv4 8x400G, 4 nodes", "tcpx tcpxo"),
    }
    out: list[Row] = []

    def add(kind: str, algorithm: str, constants: Array, measured: Row, source: str) -> None:
        measured_on, stands_for = on[kind]
        names = ["efficiency", "hop_us", "half_bytes", "exponent", "overlap", "inner_hop_us"]
        values = dict(zip(names, map(significant, constants * np.array([1, 1e6, 1, 1, 1, 1e6])), strict=True))
        out.append(
            {"kind": kind, "stands_for": stands_for, "algorithm": algorithm}
            | values
            | measured
            | {"measured_on": measured_on, "source": source}
        )

    ib_source, roce_source, efa_source = (sources(group) for group in (ib, roce, efa))
    add("infiniband", "ring", ring, ring_errors, f"{ib_source}; hop of {roce_source}")
    add("infiniband", "tree", tree, tree_errors, f"{ib_source}; {roce_source}")
    add("efa", "ring", efa_fit, efa_errors, f"{efa_source}; inner hops of {ib_source}")
    add("efa", "tree", efa_fit, efa_errors, f"{efa_source}; inner hops of {ib_source}")
    for algorithm, constants, measured in (("alltoall", exchange, exchange_errors), ("sendrecv", pair, pair_errors)):
        add("infiniband", algorithm, constants, measured, f"{ib_source}; hop of {roce_source}")
        borrowed = np.array([constants[0], efa_fit[1], *constants[2:]])
        add("efa", algorithm, borrowed, measured, f"infiniband's row: {ib_source}; hop of {efa_source}")
    return out


def point_rows(points: Table, vidur: Table) -> list[Row]:
    """Every measured point of known hardware: `domain_ranks` in each of `domains` that a network joins."""
    out: list[Row] = []
    for point in points[points.hw.isin(HARDWARE)].itertuples():
        name, kind, nominal = HARDWARE[point.hw]
        network = next((kind for word, kind in NETWORKS.items() if word in point.fabric), "")
        racks = int(point.num_gpus) // 72 if point.hw == "GB200 NVL72" else int(point.num_nodes)
        domains = racks if network else 1
        doubt = "; its 96 ranks are inferred, 64 to 96 are possible" if "inferred" in str(point.note) else ""
        out.append(
            {
                "accelerator": name,
                "kind": kind,
                "nominal_GBps": nominal,
                "op": point.op,
                "domain_ranks": int(point.num_gpus) // domains,
                "network": network,
                "network_GBps": NOMINAL * 1e-9 if network else "",
                "domains": domains,
                "bytes": int(point.size_bytes),
                "time_us": point.time_us,
                "left_out": why_left_out(point),
                "source": sources(points.loc[[point.Index]]) + doubt,
            }
        )
    for topology, hardware in MEASURED_SENDRECV.items():
        name, kind, nominal = HARDWARE[hardware]
        group = vidur[(vidur.topology == topology) & (vidur.op == "send_recv") & (vidur.devices_per_node == 2)]
        # The point nearest to each power of two speaks for the 993.
        for exponent in range(11, 27):
            point = group.loc[(group.size_field - 2**exponent).abs().idxmin()]
            key = {"accelerator": name, "kind": kind, "nominal_GBps": nominal, "op": "sendrecv", "domain_ranks": 2}
            alone = {"network": "", "network_GBps": "", "domains": 1}
            seen = {"bytes": int(point.size_field), "time_us": significant(point.latency_ms * 1e3), "left_out": ""}
            out.append(key | alone | seen | {"source": point.source})
    order = ("accelerator", "op", "domain_ranks", "domains", "network", "bytes")
    return sorted(out, key=lambda row: tuple(row[name] for name in order))


def why_left_out(point: Any) -> str:
    """Why no fit saw a point; empty where one did."""
    alone = point.num_nodes == 1 and MAIN_NOTE not in point.source
    if alone and (point.hw != "MI300X" or (point.fabric == "xGMI" and point.num_gpus == 8)):
        return "the curve is fitted to another source" + ("; NVLS off" if "NVLS_ENABLE=0" in str(point.note) else "")
    if "x NVL72" in point.fabric:
        return "networks are fitted to H100, H200 and B200 nodes"
    if "cluster00" in point.source:
        return "13.5 GB/s on a card of 50: no full NDR"
    if point.op == "sendrecv" and point.num_nodes > 2:
        return "half the rate of the card at any size, by an older NCCL"
    if "EFA" in point.fabric and point.size_bytes < 2**18:
        return "times fall as the size grows: the warm-up of the run"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    points: Table = pd.read_csv(arguments.facts / "collectives" / "nccl_points.csv")
    vidur: Table = pd.read_csv(arguments.facts / "collectives" / "vidur_network_measured.csv")
    pd.DataFrame(point_rows(points, vidur)).to_csv(out / "points.csv", index=False, lineterminator="\n")
    curves = curve_rows(points, vidur)
    pd.DataFrame(curves).to_csv(out / "curves.csv", index=False, lineterminator="\n")
    networks = network_rows(points, curves)
    pd.DataFrame(networks).to_csv(out / "networks.csv", index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
