"""Kernel times against measured points, by hand, and as functions of their sizes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.cluster import Accelerator
from shardwise.data.efficiency import GemmCurve
from shardwise.data.faults import InputError
from shardwise.formulations import kernels
from shardwise.formulations.kernels import (
    attention_time_s,
    gemm_time_s,
    grouped_gemm_time_s,
    keys_per_query,
    memory_bound_time_s,
)

GIB = 2**30


def accelerator(name: str, bandwidth: float, **tflops: float) -> Accelerator:
    return Accelerator(name, "any", 80 * GIB, bandwidth * 1e9, {p: t * 1e12 for p, t in tflops.items()})


A100 = accelerator("A100-SXM-80GB", 2039, bf16=312, fp16=312)
H100 = accelerator("H100-SXM", 3350, bf16=989, fp16=989, fp8=1979)
H200 = accelerator("H200-SXM", 4800, bf16=989, fp16=989, fp8=1979)
B200 = accelerator("B200-SXM", 8000, bf16=2250, fp16=2250, fp8=4500)
L40S = accelerator("L40S", 864, bf16=362, fp16=362, fp8=733)
OTHERS = [
    accelerator("A10G", 600, bf16=70),
    accelerator("V100-SXM-32GB", 900, fp16=125),
    accelerator("MI300X", 5300, bf16=1300, fp8=2610),
    accelerator("GB200", 8000, bf16=2500, fp8=5000, fp4=10000),
    accelerator("Gaudi3", 3700, bf16=1677, fp8=1677),
    accelerator("Ascend 910B", 1600, fp16=320),
    accelerator("TPU v5p", 2765, bf16=459),
    accelerator("Trainium2", 2900, bf16=667, fp8=1299),
]
EVERY = [A100, H100, H200, B200, L40S, *OTHERS]

# aiconfigurator-core 0.12.0 (PyPI wheel, Apache-2.0) systems/data, gemm_perf.parquet: M, N, K, us.
GEMMS = [
    (A100, "bf16", 4096, 8192, 8192, 2115.9),
    (A100, "bf16", 1, 8192, 8192, 88.0),
    (H100, "bf16", 4096, 8192, 8192, 697.7),
    (H100, "bf16", 8192, 16384, 4096, 1574.1),
    (H100, "bf16", 1, 8192, 8192, 51.6),
    (H100, "fp8", 2048, 4096, 8192, 141.4),
    (H200, "bf16", 2048, 4096, 8192, 165.8),
    (B200, "bf16", 2048, 4096, 8192, 86.9),
    (L40S, "bf16", 8192, 16384, 4096, 5280.9),
]
# Same wheel, context_attention_perf.parquet, causal, head_dim 128: batch, sequence, heads, KV heads, us.
ATTENTIONS = [
    (A100, 1, 4096, 32, 8, 899.6),
    (A100, 1, 8192, 64, 8, 6203.6),
    (H100, 1, 4096, 32, 8, 264.3),
    (H100, 1, 8192, 64, 8, 1834.7),
    (H100, 4, 4096, 8, 1, 255.6),
]

sizes = st.integers(min_value=1, max_value=2**17)
dims = st.sampled_from([64, 96, 128, 192, 256])
any_accelerator = st.sampled_from(EVERY)


def precision_of(device: Accelerator) -> str:
    return next(iter(device.flops_per_s))


@pytest.mark.parametrize(("device", "precision", "m", "n", "k", "measured_us"), GEMMS)
def test_gemm_is_within_12_percent_of_measured(
    device: Accelerator, precision: str, m: int, n: int, k: int, measured_us: float
) -> None:
    assert gemm_time_s(device, m, n, k, precision) * 1e6 == pytest.approx(measured_us, rel=0.12)


@pytest.mark.parametrize(("device", "batch", "seq", "heads", "kv_heads", "measured_us"), ATTENTIONS)
def test_causal_attention_is_within_10_percent_of_measured(
    device: Accelerator, batch: int, seq: int, heads: int, kv_heads: int, measured_us: float
) -> None:
    predicted = attention_time_s(device, batch, seq, heads, kv_heads, 128, 128)
    assert predicted * 1e6 == pytest.approx(measured_us, rel=0.10)


def test_gemm_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = GemmCurve(1e15, 0.8, 64, 128, 256, 4e-6, 2e12, 0.1, 2, "", "", False, "")
    monkeypatch.setattr(kernels, "gemm_curve", lambda accelerator, precision: curve)
    # F = 2 x 1024 x 2048 x 4096 = 17.18e9, at 0.8e15 21.47 us; tiles 1.0625 x 1.0625 x 1.0625 = 1.19946: 25.76 us;
    # clock 1 + 0.1 x 17.18e9 / (17.18e9 + 1e12) = 1.001689: 25.802 us.
    # Bytes 2 (1024 x 4096 + 2048 x 4096 + 1024 x 2048) = 29.36e6, at 2e12 14.680 us.
    # (25.802^4 + 14.680^4)^(1/4) = (443219 + 46441)^(1/4) = 26.453; with the launch 30.453 us.
    assert gemm_time_s(H100, 1024, 2048, 4096) * 1e6 == pytest.approx(30.453, rel=1e-3)


def test_keys_per_query_by_hand() -> None:
    # Queries 1..4 see 1, 2, 3, 4 keys; with a window of 2 they see 1, 2, 2, 2.
    assert keys_per_query(4, causal=True, window=None) == pytest.approx(10 / 4)
    assert keys_per_query(4, causal=True, window=2) == pytest.approx(7 / 4)
    assert keys_per_query(4, causal=False, window=None) == 4
    assert keys_per_query(4, causal=False, window=3) == 3


def test_causal_attention_costs_about_half_of_full_attention() -> None:
    causal, full = (attention_time_s(H100, 1, 16384, 32, 8, 128, 128, causal=c) for c in (True, False))
    assert 1.8 < full / causal < 2.0


def test_backward_attention_does_two_and_a_half_times_the_flops_at_a_lower_rate() -> None:
    forward = attention_time_s(A100, 1, 16384, 32, 8, 128, 128)
    backward = attention_time_s(A100, 1, 16384, 32, 8, 128, 128, direction="backward")
    assert backward / forward == pytest.approx(2.5 / 0.86, rel=0.01)


def test_small_heads_run_at_a_lower_rate() -> None:
    narrow, wide = (attention_time_s(H100, 1, 8192, heads, heads, d, d) for heads, d in ((64, 64), (32, 128)))
    assert narrow > 1.2 * wide


def test_unfused_attention_costs_more_than_flash() -> None:
    for direction in ("forward", "backward"):
        flash, unfused = (
            attention_time_s(H100, 1, 8192, 32, 8, 128, 128, direction=direction, kernel=k)
            for k in ("flash", "unfused")
        )
        assert unfused > 2 * flash


def test_one_group_is_a_plain_gemm() -> None:
    assert grouped_gemm_time_s(H100, 1, 4096, 4096, 4096) == gemm_time_s(H100, 4096, 4096, 4096)


def test_more_groups_over_the_same_rows_cost_more() -> None:
    times = [grouped_gemm_time_s(H100, groups, 8192, 2048, 7168) for groups in (1, 4, 16, 64, 256)]
    assert times == sorted(times)


def test_memory_bound_time_reaches_the_streaming_bandwidth() -> None:
    # Streaming weights on H100 reaches 75 to 92 % of 3350 GB/s.
    assert 1 / 0.92 < memory_bound_time_s(H100, 3350e9, launches=0) < 1 / 0.75
    assert memory_bound_time_s(H100, 0, launches=3) == pytest.approx(3 * memory_bound_time_s(H100, 0))


def test_unsupported_precision_is_an_input_error() -> None:
    with pytest.raises(InputError, match="precision=fp8 is not supported by A100-SXM-80GB, which has bf16, fp16"):
        gemm_time_s(A100, 128, 128, 128, "fp8")
    with pytest.raises(InputError, match="precision=fp8 is not supported by A100-SXM-80GB"):
        attention_time_s(A100, 1, 128, 8, 8, 128, 128, precision="fp8")


@given(device=any_accelerator, m=sizes, n=sizes, k=sizes, grow=sizes, axis=st.integers(0, 2))
def test_gemm_time_is_positive_finite_and_nondecreasing(
    device: Accelerator, m: int, n: int, k: int, grow: int, axis: int
) -> None:
    precision = precision_of(device)
    more = [grow if axis == i else 0 for i in range(3)]
    small = gemm_time_s(device, m, n, k, precision)
    large = gemm_time_s(device, m + more[0], n + more[1], k + more[2], precision)
    assert 0 < small <= large * (1 + 1e-12)
    assert math.isfinite(large)


@given(device=any_accelerator, groups=st.integers(1, 256), m=sizes, n=sizes, k=sizes, grow=sizes)
def test_grouped_gemm_time_is_nondecreasing_in_rows(
    device: Accelerator, groups: int, m: int, n: int, k: int, grow: int
) -> None:
    precision = precision_of(device)
    small, large = (grouped_gemm_time_s(device, groups, rows, n, k, precision) for rows in (m, m + grow))
    assert 0 < small <= large * (1 + 1e-12)


@given(
    device=any_accelerator,
    batch=st.integers(1, 64),
    seq=sizes,
    heads=st.integers(1, 128),
    dim=dims,
    window=st.none() | sizes,
    causal=st.booleans(),
    kernel=st.sampled_from(["flash", "flash1", "unfused", "eager"]),
    direction=st.sampled_from(["forward", "backward"]),
    axis=st.integers(0, 3),
    grow=st.integers(1, 4096),
)
def test_attention_time_is_positive_finite_and_nondecreasing(
    device: Accelerator,
    batch: int,
    seq: int,
    heads: int,
    dim: int,
    window: int | None,
    causal: bool,
    kernel: str,
    direction: str,
    axis: int,
    grow: int,
) -> None:
    def time_s(batch: int, seq: int, heads: int, dim: int) -> float:
        return attention_time_s(
            device,
            batch,
            seq,
            heads,
            heads,
            dim,
            dim,
            causal=causal,
            window=window,
            direction=direction,  # type: ignore[arg-type]
            kernel=kernel,
            precision=precision_of(device),
        )

    size = [batch, seq, heads, dim]
    larger = list(size)
    larger[axis] += grow
    small, large = time_s(*size), time_s(*larger)
    assert 0 < small <= large * (1 + 1e-12)
    assert math.isfinite(large)


@given(device=any_accelerator, moved=st.floats(0, 1e13), grow=st.floats(0, 1e13), launches=st.integers(1, 100))
def test_memory_bound_time_is_nondecreasing(device: Accelerator, moved: float, grow: float, launches: int) -> None:
    small, large = (memory_bound_time_s(device, size, launches) for size in (moved, moved + grow))
    assert 0 < small <= large
