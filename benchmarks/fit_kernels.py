"""Reduce measured GEMM and attention tables to the small curves of `data/kernels/`.

    python benchmarks/fit_kernels.py FACTS --out data/kernels

FACTS is a folder holding `accelerators.csv` and `kernels/*.csv`. Every row written carries the error of its fit: on all
points of the training range, and on the fifth of them that a second fit, with the same seed each time, never saw.
The forms are (K1), (K3) and (K5) of `formulations/kernels.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray[tuple[int, ...], np.dtype[Any]]
    Form = Callable[[Array], Array]
    Row = dict[str, Any]
    Table = Any  # a DataFrame; pandas' stubs give its cells types too wide to calculate with

SEED = 20
ACCELERATOR = {
    "a100_sxm": "A100-SXM-80GB",
    "h100_sxm": "H100-SXM",
    "h200_sxm": "H200-SXM",
    "b200_sxm": "B200-SXM",
    "l40s": "L40S",
}
PRECISION = {"bfloat16": "bf16", "fp8": "fp8"}
# FP8 rows of TensorRT-LLM (torch_flow) start 7 us later than those of vLLM, at any size, and exist for H100 only.
KERNEL_SOURCES = {
    "bf16": ["torch_flow", "vllm_default", "torch.nn.functional.linear"],
    "fp8": ["CutlassFP8ScaledMMLinearKernel"],
}
BLEND = 4  # exponent that joins compute and memory time; free fits scatter between 2 and 50 without gain
# Rate of the backward over the forward pass. The tables hold no backward: these are the papers' figures, recalled and
# not read again for this fit (confidence C).
BACKWARD_RATE = {
    "A100-SXM-80GB": (0.86, "arXiv 2307.08691: forward up to 73 % of peak, backward 63 %; not re-read"),
    "H100-SXM": (0.80, "arXiv 2407.08608: forward up to 740 TFLOP/s, backward about 580; backward not re-read"),
}
# Exponentials run beside the matrix units at a rate that does not shrink with head_dim: at head_dim 128 they take half
# the matmul time on H100 (arXiv 2407.08608, not re-read) and a quarter on A100, whose matmul is half as fast per SM.
# No other head_dim was measured: this is an assumption.
SOFTMAX_DIM = {"A100-SXM-80GB": 32.0, "H100-SXM": 64.0}


def fit(form: Form, seconds: Array, weight: Array, start: list[float], low: list[float], high: list[float]) -> Array:
    """Least absolute relative error, nearly: soft-L1 on the log of predicted over measured, in log parameters."""
    solved = least_squares(
        lambda p: np.log(form(np.exp(p)) / seconds) * np.sqrt(weight),
        np.log(start),
        bounds=(np.log(low), np.log(high)),
        loss="soft_l1",
        f_scale=0.1,
    )
    return np.asarray(np.exp(solved.x))


def errors(ape: Array, held_ape: Array) -> Row:
    """Median and mean absolute percentage error, fitted and held out."""
    return {
        "points": len(ape),
        "median_ape_pct": round(float(np.median(ape)) * 100, 1),
        "mape_pct": round(float(np.mean(ape)) * 100, 1),
        "heldout_median_ape_pct": round(float(np.median(held_ape)) * 100, 1),
        "heldout_mape_pct": round(float(np.mean(held_ape)) * 100, 1),
    }


def columns(rows: Table, *names: str) -> list[Array]:
    return [rows[name].to_numpy(float) for name in names]


def fit_gemm(rows: Table, peak: float, bandwidth: float, operand_bytes: float) -> Row:
    """(K1); held to shapes of training (M >= 512, N >= 1024, K >= 512), with smaller ones at a third of the weight."""
    m, n, k, latency = columns(rows, "m", "n", "k", "latency_us")
    seconds = latency * 1e-6
    flops = 2 * m * n * k
    moved = operand_bytes * (m * k + n * k) + 2 * m * n
    training = (m >= 512) & (n >= 1024) & (k >= 512)
    weight = np.where(training, 1.0, 0.3)

    def form(chosen: Array) -> Callable[[Array], Array]:
        def seconds_of(p: Array) -> Array:
            e, c_m, c_n, c_k, t0, bw, throttle = p
            f = flops[chosen]
            compute = f / (peak * e) * (1 + c_m / m[chosen]) * (1 + c_n / n[chosen]) * (1 + c_k / k[chosen])
            compute = compute * (1 + throttle * f / (f + peak * 1e-3))
            memory = moved[chosen] / (bandwidth * bw)
            return np.asarray(t0 + (compute**BLEND + memory**BLEND) ** (1 / BLEND))

        return seconds_of

    start = [0.8, 60.0, 60.0, 100.0, 3e-6, 0.8, 0.1]
    low = [0.2, 1e-3, 1e-3, 1e-3, 5e-7, 0.3, 1e-4]
    high = [1.0, 1e4, 1e4, 1e4, 5e-5, 1.0, 1.0]
    every = np.ones(len(m), bool)
    seen = np.random.default_rng(SEED).random(len(m)) >= 0.2
    p = fit(form(every), seconds, weight, start, low, high)
    q = fit(form(seen), seconds[seen], weight[seen], start, low, high)
    names = ["efficiency", "c_m", "c_n", "c_k", "launch_us", "memory_efficiency", "throttle"]
    values = dict(zip(names, p.tolist(), strict=True))
    values["launch_us"] *= 1e6
    ape = np.abs(form(every)(p) / seconds - 1)[training]
    held = np.abs(form(every)(q) / seconds - 1)[training & ~seen]
    return {name: float(f"{value:.4g}") for name, value in values.items()} | errors(ape, held)


def fit_memory(rows: Table, bandwidth: float) -> Row:
    """(K5) on weight-streaming GEMMs: M <= 16, weights of at least 64 MiB, so no cache holds them."""
    rows = rows[(rows.m <= 16) & (rows.n * rows.k * 2 >= 2**26)]
    m, n, k, latency = columns(rows, "m", "n", "k", "latency_us")
    seconds = latency * 1e-6
    moved = 2 * (m * k + n * k + m * n)
    seen = np.random.default_rng(SEED).random(len(m)) >= 0.2

    def form(chosen: Array) -> Callable[[Array], Array]:
        return lambda p: np.asarray(p[0] + moved[chosen] / (bandwidth * p[1]))

    bounds = ([3e-6, 0.8], [5e-7, 0.3], [2e-5, 1.0])
    every = np.ones(len(m), bool)
    p = fit(form(every), seconds, np.ones(len(m)), *bounds)
    q = fit(form(seen), seconds[seen], np.ones(int(seen.sum())), *bounds)
    ape = np.abs(form(every)(p) / seconds - 1)
    held = np.abs(form(every)(q) / seconds - 1)[~seen]
    return {"efficiency": float(f"{p[1]:.4g}"), "launch_us": float(f"{p[0] * 1e6:.4g}")} | errors(ape, held)


def fit_attention(rows: Table, peak: float, bandwidth: float) -> Row:
    """(K3) on causal prefill; held to sequences of at least 1024 tokens that take at least 20 us."""
    batch, seq, heads, kv_heads, dim, latency = columns(
        rows, "batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "latency_us"
    )
    seconds = latency * 1e-6
    moved = 2 * batch * seq * dim * 2 * (heads + kv_heads)
    training = (seq >= 1024) & (seconds > 2e-5)
    weight = np.where(training, 1.0, 0.1)

    def form(chosen: Array) -> Callable[[Array], Array]:
        def seconds_of(p: Array) -> Array:
            e, c_keys, c_rows, t0, bw = p
            queries = (batch * heads * seq)[chosen]
            keys = (seq[chosen] + 1) / 2
            compute = 4 * dim[chosen] * (queries + c_rows) * (keys + c_keys) / (peak * e)
            memory = moved[chosen] / (bandwidth * bw)
            return np.asarray(t0 + (compute**BLEND + memory**BLEND) ** (1 / BLEND))

        return seconds_of

    start = [0.6, 200.0, 8000.0, 1e-5, 0.3]
    low = [0.1, 1.0, 1.0, 1e-6, 0.05]
    high = [1.0, 4000.0, 1e5, 5e-5, 1.0]
    every = np.ones(len(seq), bool)
    seen = np.random.default_rng(SEED).random(len(seq)) >= 0.2
    p = fit(form(every), seconds, weight, start, low, high)
    q = fit(form(seen), seconds[seen], weight[seen], start, low, high)
    names = ["efficiency", "c_keys", "c_rows", "launch_us", "memory_efficiency"]
    values = dict(zip(names, p.tolist(), strict=True))
    values["launch_us"] *= 1e6
    ape = np.abs(form(every)(p) / seconds - 1)[training]
    held = np.abs(form(every)(q) / seconds - 1)[training & ~seen]
    return {name: float(f"{value:.4g}") for name, value in values.items()} | errors(ape, held)


def achievable(accelerators: Table) -> Table:
    """The best dense matmul rate that anyone measured, per accelerator and precision."""
    rows = [
        {"accelerator": name, "precision": precision, "tflops": best, "peak_tflops": peak, "source": source}
        for precision in ("bf16", "fp8")
        for name, best, peak, source in zip(
            accelerators.name,
            accelerators[f"measured_{precision}_mamf_tflops"],
            accelerators[f"{precision}_tflops"],
            accelerators.source,
            strict=True,
        )
        if best > 0 and peak > 0
    ]
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    accelerators: Table = pd.read_csv(arguments.facts / "accelerators.csv")
    known: Table = accelerators.set_index("name")
    folder = arguments.facts / "kernels"

    gemm: Table = pd.concat([pd.read_csv(folder / f"{name}.csv") for name in ("gemm_bf16_h100_a100", "gemm_other")])
    gemm["precision"] = gemm.gemm_dtype.map(PRECISION)
    gemm = gemm[[source in KERNEL_SOURCES[p] for source, p in zip(gemm.kernel_source, gemm.precision, strict=True)]]
    # H100 and A100 rows of two libraries describe the same device; the mean of their logs is one device.
    keys = ["system", "precision", "m", "n", "k"]
    source = gemm.source.iloc[0].replace(" systems/data", "")
    gemm = gemm.assign(latency_us=np.log(gemm.latency_us)).groupby(keys, as_index=False).latency_us.mean()
    gemm["latency_us"] = np.exp(gemm.latency_us)

    gemm_rows: list[Row] = []
    memory_rows: list[Row] = []
    attention_rows: list[Row] = []
    for (system, precision), rows in gemm.groupby(["system", "precision"]):
        name = ACCELERATOR[system]
        peak, bandwidth = known.loc[name, f"{precision}_tflops"] * 1e12, known.loc[name, "mem_bw_GBs"] * 1e9
        key = {"accelerator": name, "precision": precision}
        measured = {"source": f"{source} {system}/gemm"}
        gemm_rows.append(key | fit_gemm(rows, peak, bandwidth, 2 if precision == "bf16" else 1) | measured)
        if precision == "bf16":
            memory_rows.append({"accelerator": name} | fit_memory(rows, bandwidth) | measured)
    attention: Table = pd.read_csv(folder / "attention_h100_a100.csv").query("phase == 'context'")
    for system, rows in attention.groupby("system"):
        name = ACCELERATOR[system]
        rate, rate_source = BACKWARD_RATE[name]
        fitted = fit_attention(rows, known.loc[name, "bf16_tflops"] * 1e12, known.loc[name, "mem_bw_GBs"] * 1e9)
        attention_rows.append(
            {"accelerator": name, "kernel": rows.kernel_source.iloc[0], "softmax_dim": SOFTMAX_DIM[name]}
            | {"backward_rate": rate}
            | fitted
            | {"source": f"{source} {system}/attention", "backward_source": rate_source}
        )
    tables = {"gemm": gemm_rows, "memory": memory_rows, "attention": attention_rows}
    for table, rows_of in tables.items():
        pd.DataFrame(rows_of).to_csv(out / f"{table}.csv", index=False, lineterminator="\n")
    achievable(accelerators).to_csv(out / "achievable.csv", index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
