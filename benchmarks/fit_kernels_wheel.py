"""Add GEMM and attention curves of more accelerators and precisions to `data/kernels/`.

    python benchmarks/fit_kernels_wheel.py aiconfigurator_core-0.12.0-*.whl FACTS --out data/kernels

The wheel (PyPI, Apache-2.0) holds Parquet files of kernel timings under `systems/data`; nothing else of it is read, and
nothing of it at run time. FACTS is the folder with `accelerators.csv`. Rows that `fit_kernels.py` wrote stay as they are.
Needs pyarrow.
"""

from __future__ import annotations

import argparse
import io
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
from fit_kernels import BACKWARD_RATE, SEED, SOFTMAX_DIM, fit_attention, fit_gemm

POINTS = 4000
ROOT = "aiconfigurator_core/systems/data"
SOURCE = "aiconfigurator-core==0.12.0 (PyPI wheel, Apache-2.0)"
OPERAND_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0, "fp4": 0.5}
# accelerator, folder, library and version, precision, dtype in the table
GEMMS = (
    ("B200-SXM", "b200_sxm/gemm/trtllm/1.3.0rc20", "fp4", "nvfp4"),
    ("GB200", "gb200/gemm/trtllm/1.3.0rc20", "bf16", "bfloat16"),
    ("GB200", "gb200/gemm/vllm/0.24.0", "fp8", "fp8"),
    ("GB200", "gb200/gemm/trtllm/1.3.0rc20", "fp4", "nvfp4"),
    ("GB300", "gb300/gemm/trtllm/1.3.0rc20", "bf16", "bfloat16"),
    ("GB300", "gb300/gemm/vllm/0.24.0", "fp8", "fp8"),
    ("GB300", "gb300/gemm/trtllm/1.3.0rc20", "fp4", "nvfp4"),
    ("B300-SXM", "b300_sxm/gemm/trtllm/1.3.0rc20", "bf16", "bfloat16"),
    ("B300-SXM", "b300_sxm/gemm/vllm/0.24.0", "fp8", "fp8"),
    ("B300-SXM", "b300_sxm/gemm/trtllm/1.3.0rc20", "fp4", "nvfp4"),
)
ATTENTIONS = (("B200-SXM", "b200_sxm/attention/vllm/0.24.0"), ("GB200", "gb200/attention/vllm/0.24.0"))


def table(wheel: zipfile.ZipFile, path: str) -> Any:
    return pd.read_parquet(io.BytesIO(wheel.read(f"{ROOT}/{path}")))


def merged(path: Path, keys: list[str], rows: list[dict[str, Any]]) -> None:
    """Add rows to a CSV, replacing those with the same keys."""
    old = pd.read_csv(path)
    new = pd.DataFrame(rows)
    both = pd.concat([old, new], ignore_index=True).drop_duplicates(keys, keep="last")
    both.sort_values(keys).to_csv(path, index=False, lineterminator="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    known: Any = pd.read_csv(arguments.facts / "accelerators.csv").set_index("name")
    wheel = zipfile.ZipFile(arguments.wheel)
    gemms = []
    for name, folder, precision, dtype in GEMMS:
        rows = table(wheel, f"{folder}/gemm_perf.parquet")
        rows = rows[(rows.gemm_dtype == dtype) & (rows.m >= 128)]
        rows = rows.groupby(["m", "n", "k"], as_index=False).latency.mean()
        rows = rows.sample(min(POINTS, len(rows)), random_state=SEED).assign(latency_us=lambda t: t.latency * 1e3)
        peak = known.loc[name, f"{precision}_tflops"] * 1e12
        bandwidth = known.loc[name, "mem_bw_GBs"] * 1e9
        fitted = fit_gemm(rows, peak, bandwidth, OPERAND_BYTES[precision])
        gemms.append({"accelerator": name, "precision": precision} | fitted | {"source": f"{SOURCE} {folder}"})
        print(gemms[-1])
    merged(arguments.out / "gemm.csv", ["accelerator", "precision"], gemms)
    attentions = []
    for name, folder in ATTENTIONS:
        rows = table(wheel, f"{folder}/context_attention_perf.parquet")
        rows = rows[(rows.attn_dtype == "bfloat16") & (rows.window_size == 0)] if "window_size" in rows else rows
        rows = rows[rows.kv_cache_dtype == "bfloat16"] if "kv_cache_dtype" in rows else rows
        rows = rows[(rows.head_dim == 128) & (rows.step == 0)] if "step" in rows else rows
        rows = rows.assign(latency_us=rows.latency * 1e3)
        rows = rows.rename(columns={"num_key_value_heads_": "num_key_value_heads"})
        rows = rows.sample(min(POINTS, len(rows)), random_state=SEED)
        fitted = fit_attention(rows, known.loc[name, "bf16_tflops"] * 1e12, known.loc[name, "mem_bw_GBs"] * 1e9)
        attentions.append(
            {"accelerator": name, "kernel": "vllm_default", "softmax_dim": SOFTMAX_DIM["H100-SXM"]}
            | {"backward_rate": BACKWARD_RATE["H100-SXM"][0], "flash2_rate": 0.57}
            | fitted
            | {"source": f"{SOURCE} {folder}", "backward_source": "that of H100", "flash2_source": "that of H100"}
        )
        print(attentions[-1])
    merged(arguments.out / "attention.csv", ["accelerator"], attentions)


if __name__ == "__main__":
    main()
