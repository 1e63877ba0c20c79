"""How sure the choice among plans is, given that the constants of the profile are not known exactly.

Plans i = 1 ... K, the best first; constants k of (R1), `fitting.TIME_WIDTHS`, with value c_k in the profile and width s_k;
draws d = 1 ... D, the same for all plans; z_kd independent standard normal numbers of a seeded generator.

(Q1) drawn constants     c_kd = c_k exp(spread s_k z_kd) for those of `LOGARITHMIC`, else c_k + spread s_k z_kd, no further out
     than the bounds in `shared.toml`, which are widened to hold c_k. A spread of 1 is how far (R1) expects the constants
     of software that was not measured to lie from their prior; of a profile that was fitted to like runs they are known
     better, so shares near 1 are safer than they look. Step times move by 7 to 10 % on the mean in dense models
     and by 27 % where experts dispatch, around the 17.2 % that `validate` finds on the mean of sources left out. Constants
     of memory are not drawn: every plan stays admitted; nor is `sync_contention`, which is a fabric's more than the
     software's.
(Q2) worth of a plan     V_id = T_id for step time, N_i T_id for throughput a device and cost (O1), (O2); T_id is the step of
     (V1) under the constants of draw d, all plans and draws at once.
(Q3) share of draws      b_i = |{d : i is the first with V_id <= (1 + TIED) min_j V_jd}| / D; they sum to 1.
(Q4) expected regret     r_i = mean over d of V_id / min_j V_jd - 1.
(Q5) recommended         the first i with r_i <= min_j r_j + TIED.

Regret is against the K plans at hand, not against every plan: another draw may make a plan the best that the search
never met. Errors of the formulas themselves, and of the kernel and collective curves, are not drawn.

Energy is left out: its watts have bands of their own, which no fit ties to those of the constants. So is "devices": the
constants do not change how many devices a plan takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.data.profile import BASE, profile_document
from shardwise.formulations.objective import PER_DEVICE
from shardwise.formulations.table import UnitTimes, plan_table, step_times_s
from shardwise.solver.fitting import LOGARITHMIC, TIME_WIDTHS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.data.plan import Plan
    from shardwise.data.profile import Profile
    from shardwise.formulations.coefficients import CostTables
    from shardwise.formulations.objective import ObjectiveName

Floats = npt.NDArray[np.float64]

DRAWS = 200
SPREAD = 1.0
DRAWN = {name: width for name, width in TIME_WIDTHS.items() if name != "sync_contention"}
TIED = 1e-5
"""Plans closer than this share of their worth are equal: a solve tells them no further apart."""
LEFT_OUT = {
    "energy": "the watts of energy have bands of their own, which no fit ties to those of the constants",
    "devices": "the constants of the profile do not change how many devices a plan takes",
}
"""Objectives without (Q2), and why."""
ACTIVATIONS_AWAY = "copies of saved activations hide behind passes, which the tables of (Q2) do not follow"


@dataclass(frozen=True, slots=True)
class Robustness:
    """(Q3)-(Q5) of the best plan and, in order, its alternatives; empty and with a `reason` where there is no (Q2)."""

    best_share: tuple[float, ...] = ()
    expected_regret: tuple[float, ...] = ()
    recommended: int | None = None
    draws: int = DRAWS
    seed: int = 0
    spread: float = SPREAD
    reason: str | None = None

    def of(self, index: int) -> tuple[float | None, float | None]:
        """Share of draws and expected regret of one plan, if they are known."""
        known = index < len(self.best_share)
        return (self.best_share[index], self.expected_regret[index]) if known else (None, None)

    def to_dict(self) -> dict[str, Any]:
        """Of the best plan; those of the others are written beside them. `recommended` is 0 for the best plan and
        n for the n-th alternative."""
        share, regret = self.of(0)
        return {
            "best_share": share,
            "expected_regret": regret,
            "recommended": self.recommended,
            "draws": self.draws,
            "seed": self.seed,
            "spread": self.spread,
            "reason": self.reason,
        }


def robustness(
    tables: CostTables,
    plans: Sequence[Plan],
    objective: ObjectiveName = "step-time",
    *,
    draws: int = DRAWS,
    spread: float = SPREAD,
    seed: int = 0,
) -> Robustness:
    """(Q1)-(Q5) of plans of one instance, the best first."""
    if objective in LEFT_OUT:
        return Robustness(draws=draws, seed=seed, spread=spread, reason=LEFT_OUT[objective])
    if any(plan.degrees.offload_layers for plan in plans):
        return Robustness(draws=draws, seed=seed, spread=spread, reason=ACTIVATIONS_AWAY)
    if len(plans) == 1:
        return Robustness((1.0,), (0.0,), 0, draws, seed, spread)
    constants = drawn_constants(tables.instance.profile, draws, spread, seed)
    worth = step_times_under(tables, plans, constants)
    if objective in PER_DEVICE:
        worth = worth * np.array([plan.degrees.devices for plan in plans])[:, None]
    share, regret = shares_and_regrets(worth)
    recommended = int(np.argmax(regret <= regret.min() + TIED))
    return Robustness(tuple(share.tolist()), tuple(regret.tolist()), recommended, draws, seed, spread)


def drawn_constants(profile: Profile, draws: int, spread: float, seed: int) -> dict[str, Floats]:
    """(Q1) The drawn constants by name, each of shape (D,)."""
    bounds = profile_document(BASE)["constants"]
    normal = np.random.default_rng(seed).standard_normal((len(DRAWN), draws))
    out = {}
    for (name, width), z in zip(DRAWN.items(), normal, strict=True):
        value, (low, high) = getattr(profile, name), bounds[name]["bounds"]
        drawn = value * np.exp(spread * width * z) if name in LOGARITHMIC else value + spread * width * z
        out[name] = np.clip(drawn, min(low, value), max(high, value))
    return out


def step_times_under(tables: CostTables, plans: Sequence[Plan], constants: dict[str, Floats]) -> Floats:
    """(Q2) T of every plan under every draw, shape (K, D)."""
    units, profile = UnitTimes(tables), tables.instance.profile
    draws = len(next(iter(constants.values())))
    table = plan_table([(units, plan) for plan in plans]).rows(np.repeat(np.arange(len(plans)), draws))
    fixed = {name: getattr(profile, name) for name in profile.__slots__}
    columns = {name: np.tile(values, len(plans))[:, None] for name, values in constants.items()}
    return step_times_s(table, SimpleNamespace(**fixed | columns)).reshape(len(plans), draws)


def shares_and_regrets(worth: Floats) -> tuple[Floats, Floats]:
    """(Q3), (Q4) of V, shape (K, D)."""
    over = worth / worth.min(axis=0)
    first = np.argmax(over <= 1 + TIED, axis=0)
    share = np.bincount(first, minlength=len(worth)) / worth.shape[1]
    return share, np.asarray(over.mean(axis=1) - 1)
