"""Power by phase: what a device and its share of the node draw while it computes, communicates or waits.

The constants are in `power.toml`, each with a band, bounds and its reason, fitted or assumed. The measurements that the
fitted ones come from are in `measured_power.csv`, reduced by `benchmarks/fit_power.py`.
"""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Any

from shardwise.data.faults import InputError

KINDS = ("fitted", "assumed")


@dataclass(frozen=True, slots=True)
class PowerConstant:
    """One constant: the value used, and the `low` and `high` ends of the band around it."""

    value: float
    low: float
    high: float
    fitted: bool
    why: str

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.value <= self.high:
            raise ValueError(f"low={self.low}, value={self.value}, high={self.high} must be zero or more and ascend")


@dataclass(frozen=True, slots=True)
class Power:
    """Shares of TDP by phase, watts of the rest of the node per device, and wall watts per watt drawn in the node."""

    measured_on: str
    compute_share: PowerConstant
    communication_share: PowerConstant
    idle_share: PowerConstant
    rest_w: PowerConstant
    wall_per_node: PowerConstant

    def names(self, *, fitted: bool) -> tuple[str, ...]:
        """Names of the constants that are fitted, or of those that are assumed."""
        return tuple(name for name in CONSTANTS if getattr(self, name).fitted is fitted)


CONSTANTS = tuple(field.name for field in fields(Power) if field.name != "measured_on")
SHARES = ("idle_share", "communication_share", "compute_share")


@lru_cache(maxsize=1)
def load_power() -> Power:
    """The constants that come with the package."""
    text = (resources.files("shardwise.data") / "power.toml").read_text(encoding="utf-8")
    return power_from(tomllib.loads(text))


def power_from(document: dict[str, Any], name: str = "power.toml") -> Power:
    """Check a document of power constants and turn it into `Power`.

    Raises
    ------
    InputError
        Naming every constant that is missing, unknown or out of order, and every phase that draws less than a lighter one.
    """
    constants = document.get("constants")
    if not isinstance(constants, dict):
        raise InputError(f"{name}: the table [constants] is missing")
    faults = [f"{name}: unknown constant {key}" for key in constants if key not in CONSTANTS]
    measured_on = document.get("measured_on")
    if not isinstance(measured_on, str) or not measured_on:
        faults.append(f"{name}: measured_on={measured_on!r} must name the accelerator that was measured")
    read: dict[str, PowerConstant] = {}
    for key in CONSTANTS:
        entry = constants.get(key)
        if not isinstance(entry, dict):
            faults.append(f"{name}: the table [constants.{key}] is missing")
        elif found := _faults(entry):
            faults += [f"{name}: constants.{key}.{fault}" for fault in found]
        else:
            value, low, high = (float(entry[end]) for end in ("value", "low", "high"))
            read[key] = PowerConstant(value, low, high, entry["kind"] == "fitted", entry["why"])
    for lighter, heavier in itertools.pairwise(SHARES):
        if lighter in read and heavier in read:
            for end in ("value", "low", "high"):
                less, more = getattr(read[lighter], end), getattr(read[heavier], end)
                if less > more:
                    faults.append(f"{name}: constants.{lighter}.{end}={less} must be at most that of {heavier}, {more}")
    if faults:
        raise InputError(faults)
    return Power(str(measured_on), **read)


def _faults(entry: dict[str, Any]) -> list[str]:
    faults = [
        f"{key}={entry.get(key)!r} must be a number" for key in ("value", "low", "high") if not _number(entry.get(key))
    ]
    bounds = entry.get("bounds")
    if not isinstance(bounds, list) or len(bounds) != 2 or not all(map(_number, bounds)) or bounds[0] < 0:
        faults.append(f"bounds={bounds!r} must be two numbers, zero or more")
    elif not faults and not bounds[0] <= entry["low"] <= entry["value"] <= entry["high"] <= bounds[1]:
        band = f"low={entry['low']}, value={entry['value']}, high={entry['high']}"
        faults.append(f"{band} must ascend within the bounds {bounds}")
    if entry.get("kind") not in KINDS:
        faults.append(f"kind={entry.get('kind')!r} must be {' or '.join(KINDS)}")
    if not isinstance(entry.get("why"), str) or not entry["why"]:
        faults.append("why is missing: what it was fitted to, or on what ground it is assumed")
    return faults


def _number(value: object) -> bool:
    """Whether `value` is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
