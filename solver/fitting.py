"""Fit the constants of a profile to measured step times and memory readings.

(R1) time: minimise sum_i w_i^2 rho((ln T_i(c) - ln t_i) / f) + sum_k ((c_k - p_k) / s_k)^2 over the constants c within
     their bounds; rho is soft-L1, T_i the predicted and t_i the measured step, p_k the prior and s_k its width. Constants
     of `LOGARITHMIC` are fitted, and their widths meant, in their logarithms.
     The longest path of a row (V2) stays the same while the constants move; it is found anew at the fit, which starts
     again from there.
(R2) memory: the same on ln of predicted over measured bytes, with a row that ran out of memory asking for more than the
     device has, and one that ran for less: each is charged only when it is on the wrong side.
(R3) leave-one-out residual of row i: r_i / (1 - h_i), h the diagonal of J (J^T J + S^-2)^-1 J^T at the fit; exact for a
     linear model (Cook & Weisberg, Residuals and Influence in Regression, 1982, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.formulations.table import path_table, path_times_s, step_times_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.data.profile import Profile
    from shardwise.formulations.memory_table import MemoryTable
    from shardwise.formulations.table import PathTable, PlanTable

Floats = npt.NDArray[np.float64]

TIME_WIDTHS: dict[str, float] = {
    "gemm": 0.10,
    "core": 0.15,
    "elementwise": 0.4,
    "host_launch_s": 1.0,
    "tp_sync_s": 1e-5,
    "tp_comm_exposed": 0.3,
    "cp_comm_exposed": 0.3,
    "ep_comm_exposed": 0.5,
    "dp_comm_floor": 0.5,
    "dp_comm_overlap": 0.3,
    "sync_contention": 1.0,
    "p2p_exposed": 0.5,
    "p2p_exposed_interleaved": 0.4,
    "step_overhead_s": 0.05,
    "straggler": 0.003,
}
"""Constants of (R1) and how far each may be expected to lie from its prior."""

TIME_PRIORS: dict[str, float] = {
    "gemm": 1.05,
    "core": 1.0,
    "elementwise": 1.1,
    "host_launch_s": 1e-5,
    "tp_sync_s": 3e-6,
    "tp_comm_exposed": 0.9,
    "cp_comm_exposed": 0.2,
    "ep_comm_exposed": 0.3,
    "dp_comm_floor": 0.1,
    "dp_comm_overlap": 0.8,
    "sync_contention": 0.0,
    "p2p_exposed": 1.0,
    "p2p_exposed_interleaved": 0.2,
    "step_overhead_s": 0.0,
    "straggler": 0.003,
}
"""Where each is expected before any run is seen: kernels a little slower than alone, most sync hidden, Megatron waiting
for its transfers."""

MEMORY_WIDTHS: dict[str, float] = {
    "memory_activations": 0.25,
    "memory_fragmentation": 0.15,
    "memory_reserve_bytes": 2e9,
}
LOGARITHMIC = ("gemm", "core", "elementwise", "host_launch_s")
PATH_ROUNDS = 2
TIME_SCALE = 0.03
MEMORY_SCALE = 0.05
RAN_WEIGHT = 1.35
"""A row that ran and is called out of memory is charged more: a wrong "no" is the worse answer."""


@dataclass(frozen=True, eq=False)
class Fit:
    """Fitted constants, and for each row the residual ln(predicted / measured) and its leave-one-out value (R3)."""

    profile: Profile
    names: tuple[str, ...]
    residuals: Floats
    left_out: Floats


def fit_time(
    table: PlanTable,
    measured_s: Floats,
    prior: Profile,
    bounds: Mapping[str, tuple[float, float]],
    names: Sequence[str] = tuple(TIME_WIDTHS),
    *,
    weights: Floats | None = None,
    scale: float = TIME_SCALE,
) -> Fit:
    """(R1) of the constants `names`; all others stay those of `prior`."""
    names = tuple(names)
    weights = np.full(len(table), 2.0) if weights is None else weights
    logs = np.log(measured_s)

    found = prior
    for _ in range(PATH_ROUNDS):
        paths = path_table(table, found)

        def charged(profile: Profile, paths: PathTable = paths) -> Floats:
            return weights * soft_l1(np.log(path_times_s(paths, profile)) - logs, scale)

        found, jacobian = _least_squares(charged, prior, bounds, names, TIME_WIDTHS, found)
    last = np.asarray(np.log(step_times_s(table, found)) - logs)
    leverage = np.minimum(_leverage(jacobian, len(last)), 0.95)
    return Fit(found, names, last, last / (1 - leverage))


def fit_memory(
    table: MemoryTable,
    kind: npt.NDArray[Any],
    measured_bytes: Floats,
    out_of_memory: npt.NDArray[np.bool_],
    prior: Profile,
    bounds: Mapping[str, tuple[float, float]],
    names: Sequence[str] = tuple(MEMORY_WIDTHS),
) -> Fit:
    """(R2); `measured_bytes` is NaN where a row has no reading, `kind` what a reading counts."""
    read = np.isfinite(measured_bytes)
    device = np.full(len(kind), "device")
    logs = np.log(np.where(read, measured_bytes, 1.0))

    def charged(profile: Profile) -> Floats:
        readings = np.where(read, np.log(table.peaks(profile, kind)) - logs, 0.0)
        load = np.log(table.peaks(profile, device) / table.capacity[:, 0])
        verdicts = np.where(out_of_memory, np.maximum(0.01 - load, 0), RAN_WEIGHT * np.maximum(load + 0.01, 0))
        return np.concatenate([soft_l1(readings / MEMORY_SCALE, 1.0), soft_l1(verdicts / MEMORY_SCALE, 1.0)])

    found, jacobian = _least_squares(charged, prior, bounds, tuple(names), MEMORY_WIDTHS)
    last = np.where(read, np.log(table.peaks(found, kind)) - logs, np.nan)
    leverage = np.minimum(_leverage(jacobian, len(last)), 0.95)
    return Fit(found, tuple(names), last, last / (1 - leverage))


def soft_l1(residuals: Floats, scale: float) -> Floats:
    """Signed square root of the soft-L1 loss: squared and summed it is quadratic near zero and linear far out."""
    return np.asarray(np.sign(residuals) * np.sqrt(2 * (np.sqrt(1 + (residuals / scale) ** 2) - 1)))


def _least_squares(
    charged: Callable[[Profile], Floats],
    prior: Profile,
    bounds: Mapping[str, tuple[float, float]],
    names: tuple[str, ...],
    widths: Mapping[str, float],
    first: Profile | None = None,
) -> tuple[Profile, Floats]:
    """The profile that minimises the charges and the distance from the prior, and the Jacobian of both there; the search
    starts at `first`, or at the prior."""
    from scipy.optimize import least_squares  # takes half a second, which a solve that reads the widths can do without

    logarithmic = np.array([name in LOGARITHMIC for name in names])
    tiny = np.array([1e-9 if log else 0.0 for log in logarithmic])

    def inward(values: Floats) -> Floats:
        return np.where(logarithmic, np.log(np.maximum(values, tiny + 1e-300)), values)

    low = inward(np.array([bounds[name][0] for name in names]) + tiny)
    high = inward(np.array([bounds[name][1] for name in names]))
    start = inward(np.array([getattr(prior, name) for name in names]))
    begin = inward(np.array([getattr(first or prior, name) for name in names]))
    width = np.array([widths[name] for name in names])
    margin = 1e-9 * (high - low)

    def profile_at(x: Floats) -> Profile:
        values = np.where(logarithmic, np.exp(np.where(logarithmic, x, 0.0)), x)
        constants: dict[str, Any] = dict(zip(names, values.tolist(), strict=True))
        return replace(prior, **constants)

    if not names:
        return prior, np.zeros((len(charged(prior)), 0))
    solved = least_squares(
        lambda x: np.concatenate([charged(profile_at(x)), (x - start) / width]),
        np.clip(begin, low + margin, high - margin),
        bounds=(low, high),
        x_scale=width,
        max_nfev=60,
    )
    return profile_at(solved.x), np.asarray(solved.jac)


def _leverage(jacobian: Floats, rows: int) -> Floats:
    """(R3) h of the first `rows` residuals."""
    if jacobian.shape[1] == 0:
        return np.zeros(rows)
    q, _ = np.linalg.qr(jacobian)
    return np.asarray((q[:rows] ** 2).sum(axis=1))
