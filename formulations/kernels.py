"""Time of one kernel on one accelerator.

Constants come from measured curves (`shardwise.data.efficiency`); P is the dense peak of the precision, W the achieved
memory bandwidth, t0 the launch floor. u (+) v = (u^4 + v^4)^(1/4) joins compute and memory time: at least the larger,
below the sum; a kernel near the ridge of the roofline pays a little for both.

(K1) GEMM of M x K by K x N, F = 2 M N K:
         t = t0 + F / (P e) (1 + c_m/M) (1 + c_n/N) (1 + c_k/K) (1 + d F / (F + P 1ms))  (+)  bytes / W
     bytes = b (M K + N K) + 2 M N for operands of b bytes. The c are tile, wave and pipeline losses; d is the clock
     that a long kernel loses to its own power. FP8 curves hold the cast of the M x K operand (hence their large c_n).
(K2) Grouped GEMM, G groups over M rows in total, in one launch: (K1) with F and bytes summed over groups of M/G rows.
(K3) Flash attention, H heads of B sequences of S queries, keys per query counted as executed:
         keys(S) = S,  causal (S+1)/2,  causal window w < S: w - w (w-1) / (2 S),  window alone: w
         t = t0 + 2 (d_qk + d_v) (B H S + c_rows) (keys + c_keys) x / (P e)  (+)  bytes of q, k, v, o / W
     x = (1 + s/d) / (1 + s/128), d = (d_qk + d_v) / 2, charges the exponentials, whose cost does not shrink with d; all
     measured points have d = 128. The backward pass does 2.5 times the FLOPs at `backward_rate` of the forward's rate
     (FlashAttention-2, arXiv 2307.08691: five products against two), and moves 2.5 times the bytes.
(K4) Unfused attention: two batched GEMMs by (K2) over the full S x S matrix (masked halves are computed) and its
     softmax, mask and dropout by (K5), backward twice the GEMMs.
(K5) Memory-bound kernels: t = launches t0 + bytes / W.

Every time is positive, finite, and nondecreasing in each size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from shardwise.data.efficiency import attention_curve, gemm_curve, memory_curve

if TYPE_CHECKING:
    from shardwise.data.cluster import Accelerator
    from shardwise.data.efficiency import GemmCurve

MEASURED_HEAD_DIM = 128
BACKWARD_FLOPS = 2.5
THROTTLE_S = 1e-3
# Bytes per element of the S x S matrix. Forward: fused scale-mask-softmax reads and writes 16 bits, dropout reads and
# writes 16 and writes an 8-bit mask. Backward: dropout reads mask and gradient and writes, softmax reads two, writes.
# Without a fused kernel scale, mask, cast to fp32, softmax, cast back and dropout each read and write.
UNFUSED_BYTES = {
    "unfused": {"forward": 9.0, "backward": 11.0},
    "eager": {"forward": 33.0, "backward": 31.0},
}
UNFUSED_LAUNCHES = {"unfused": 2, "eager": 6}
FLASH1_RATE = 0.63
""" FlashAttention-1 against 2 on A100, forward and backward (arXiv 2307.08691, section 4.1: 1.7 to 3 times, 1.6 here)."""


def gemm_time_s(accelerator: Accelerator, m: float, n: float, k: float, precision: str = "bf16") -> float:
    """Return the seconds of one GEMM (K1)."""
    return _gemm_s(gemm_curve(accelerator, precision), 1, m, n, k)


def grouped_gemm_time_s(
    accelerator: Accelerator, groups: int, m_total: float, n: float, k: float, precision: str = "bf16"
) -> float:
    """Return the seconds of a grouped GEMM (K2): `m_total` rows spread evenly over `groups` weights."""
    return _gemm_s(gemm_curve(accelerator, precision), groups, m_total / groups, n, k)


def attention_time_s(
    accelerator: Accelerator,
    batch: float,
    seq: int,
    heads: float,
    kv_heads: float,
    head_dim: int,
    v_head_dim: int,
    *,
    causal: bool = True,
    window: int | None = None,
    keys: float | None = None,
    direction: Literal["forward", "backward"] = "forward",
    kernel: str = "flash",
    precision: str = "bf16",
) -> float:
    """Return the seconds of one pass of softmax attention: `kernel` is flash or flash1 (K3), unfused or eager (K4).

    `keys` are those that a query meets where neither `causal` nor `window` tells, as in packed sequences; (K4) computes
    all of them.
    """
    if kernel in UNFUSED_BYTES:
        return _unfused_s(accelerator, batch * heads, seq, head_dim, v_head_dim, direction, precision, kernel)
    curve = attention_curve(accelerator, precision)
    dims = head_dim + v_head_dim
    softmax = (1 + 2 * curve.softmax_dim / dims) / (1 + curve.softmax_dim / MEASURED_HEAD_DIM)
    rows = batch * heads * seq + curve.c_rows
    met = keys_per_query(seq, causal=causal, window=window) if keys is None else keys
    compute_s = 2 * dims * rows * (met + curve.c_keys) * softmax / (curve.flops_per_s * curve.efficiency)
    if kernel in ("flash1", "flash2"):
        compute_s /= (FLASH1_RATE if kernel == "flash1" else 1.0) * curve.flash2_rate
    memory_s = 2 * batch * seq * (heads + kv_heads) * dims / curve.bytes_per_s
    once = _joined_s(compute_s, memory_s)
    return curve.launch_s + (once if direction == "forward" else once * BACKWARD_FLOPS / curve.backward_rate)


def memory_bound_time_s(accelerator: Accelerator, bytes_moved: float, launches: float = 1) -> float:
    """Return the seconds of kernels that only move bytes (K5)."""
    curve = memory_curve(accelerator)
    return launches * curve.launch_s + bytes_moved / curve.bytes_per_s


def keys_per_query(seq: float, *, causal: bool, window: int | None) -> float:
    """Return the mean number of keys that a query meets (K3)."""
    reach = seq if window is None else min(window, seq)
    return reach - reach * (reach - 1) / (2 * seq) if causal else reach


def _gemm_s(curve: GemmCurve, groups: float, m: float, n: float, k: float) -> float:
    flops = 2 * groups * m * n * k
    compute_s = flops / (curve.flops_per_s * curve.efficiency)
    compute_s *= (1 + curve.c_m / m) * (1 + curve.c_n / n) * (1 + curve.c_k / k)
    compute_s *= 1 + curve.throttle * flops / (flops + curve.flops_per_s * THROTTLE_S)
    moved = groups * (curve.operand_bytes * (m * k + n * k) + 2 * m * n)
    return curve.launch_s + _joined_s(compute_s, moved / curve.bytes_per_s)


def _unfused_s(
    accelerator: Accelerator,
    matrices: float,
    seq: int,
    head_dim: int,
    v_head_dim: int,
    direction: Literal["forward", "backward"],
    precision: str,
    kernel: str,
) -> float:
    """(K4)."""
    curve = gemm_curve(accelerator, precision)
    products = _gemm_s(curve, matrices, seq, seq, head_dim) + _gemm_s(curve, matrices, seq, v_head_dim, seq)
    scores = matrices * seq * seq
    softmax = memory_bound_time_s(accelerator, UNFUSED_BYTES[kernel][direction] * scores, UNFUSED_LAUNCHES[kernel])
    return softmax + (products if direction == "forward" else 2 * products)


def _joined_s(compute_s: float, memory_s: float) -> float:
    """u (+) v, scaled by the larger so that no fourth power underflows."""
    low, high = sorted((compute_s, memory_s))
    return high * math.pow(1 + math.pow(low / high, 4), 0.25)
