"""Energy of a training step.

A step of t seconds on N devices splits, on their mean (phases, H1-H3), into t_p seconds of each phase p: it computes,
it communicates without computing, or it idles (pipeline bubble, host). t = t_compute + t_communication + t_idle. With
the share s_p of the TDP drawn in phase p, the watts R that the rest of the node draws per device, and the wall watts k
that one watt inside the node costs (`data/power.toml`):

(E1) a device in phase p draws P_p = max(s_p TDP, the idle power of the accelerator where it is known);
(E2) the devices alone take E_device = N (P_compute t_compute + P_communication t_communication + P_idle t_idle);
(E3) at the wall the nodes take E = k (E_device + N R t) = N (W_compute t_compute + ... + W_idle t_idle) with
     W_p = k (P_p + R): a linear function of the times;
(E4) mean watts are W = E / (N t) per device slot, joules per token E / tokens;
(E5) every constant enters (E1)-(E4) with one sign, so that all of them at their low, or at their high, give the least
     and the most that their bands allow.

Devices that the plan leaves idle, network switches outside the nodes, storage and cooling of the building are not in E.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.data.power import load_power

if TYPE_CHECKING:
    from shardwise.data.cluster import Accelerator
    from shardwise.data.power import Power, PowerConstant


@dataclass(frozen=True, slots=True)
class Band:
    """A quantity with the least and the most that the bands of its constants allow (E5)."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.value <= self.high < math.inf:
            raise ValueError(f"low={self.low}, value={self.value}, high={self.high} must ascend, from zero on")

    def __mul__(self, factor: float) -> Band:
        return Band(self.value * factor, self.low * factor, self.high * factor)

    def __add__(self, other: Band) -> Band:
        return Band(self.value + other.value, self.low + other.low, self.high + other.high)


@dataclass(frozen=True, slots=True)
class PhaseWatts:
    """Watts of one device slot by phase."""

    compute: Band
    communication: Band
    idle: Band

    def joules(self, compute_s: float, communication_s: float, idle_s: float) -> Band:
        """Energy of one slot that spends these seconds in the phases."""
        return self.compute * compute_s + self.communication * communication_s + self.idle * idle_s


@dataclass(frozen=True, slots=True)
class Energy:
    """What a step takes. Everything is at the wall, rest of the node included, except what says `device`.

    `fitted` and `assumed` name the constants by how they are known; `notes` says what was carried over.
    """

    joules_per_step: Band
    joules_per_token: Band
    watts_per_device: Band
    device_joules_per_step: Band
    device_watts: Band
    fitted: tuple[str, ...]
    assumed: tuple[str, ...]
    notes: tuple[str, ...]


def why_no_energy(accelerator: Accelerator) -> str | None:
    """Why the energy of a step on `accelerator` is unknown, or None where it is known."""
    if accelerator.tdp_w is None:
        cure = "give it as tdp_W in a cluster file"
        return f"energy is unknown: accelerator {accelerator.name} has no tdp_W in the catalogue; {cure}"
    return None


def device_watts(accelerator: Accelerator, power: Power | None = None) -> PhaseWatts | None:
    """(E1) P_p of `accelerator` alone, None without a TDP."""
    power = power or load_power()
    if accelerator.tdp_w is None:
        return None
    tdp_w, least_w = accelerator.tdp_w, accelerator.idle_w or 0.0

    def drawn(share: PowerConstant) -> Band:
        return Band(*(max(end * tdp_w, least_w) for end in (share.value, share.low, share.high)))

    return PhaseWatts(drawn(power.compute_share), drawn(power.communication_share), drawn(power.idle_share))


def wall_watts(accelerator: Accelerator, power: Power | None = None) -> PhaseWatts | None:
    """(E3) W_p of one device slot of `accelerator` with its share of the node, None without a TDP."""
    power = power or load_power()
    alone = device_watts(accelerator, power)
    if alone is None:
        return None
    rest, factor = power.rest_w, power.wall_per_node

    def at_wall(device: Band) -> Band:
        return Band(
            factor.value * (device.value + rest.value),
            factor.low * (device.low + rest.low),
            factor.high * (device.high + rest.high),
        )

    return PhaseWatts(at_wall(alone.compute), at_wall(alone.communication), at_wall(alone.idle))


def step_energy(
    accelerator: Accelerator,
    devices: int,
    compute_s: float,
    communication_s: float,
    idle_s: float,
    tokens: int,
    power: Power | None = None,
) -> Energy | None:
    """(E2)-(E5) Energy of one step.

    Parameters
    ----------
    devices
        N, the devices that the plan uses.
    compute_s, communication_s, idle_s
        The phases of the step on the mean device; communication that hides under compute is compute.
    tokens
        Tokens that the step trains on, over all devices.
    power
        Other constants than those of the package.

    Returns
    -------
    Energy or None
        None where the accelerator has no TDP; `why_no_energy` says so in words.
    """
    _check(devices, compute_s, communication_s, idle_s, tokens)
    power = power or load_power()
    alone, wall = device_watts(accelerator, power), wall_watts(accelerator, power)
    if alone is None or wall is None:
        return None
    step_s = compute_s + communication_s + idle_s
    of_device = alone.joules(compute_s, communication_s, idle_s)
    of_slot = wall.joules(compute_s, communication_s, idle_s)
    return Energy(
        joules_per_step=of_slot * devices,
        joules_per_token=of_slot * (devices / tokens),
        watts_per_device=of_slot * (1 / step_s),
        device_joules_per_step=of_device * devices,
        device_watts=of_device * (1 / step_s),
        fitted=power.names(fitted=True),
        assumed=power.names(fitted=False),
        notes=_notes(accelerator, power),
    )


def _notes(accelerator: Accelerator, power: Power) -> tuple[str, ...]:
    if accelerator.name == power.measured_on:
        return ()
    return (
        f"{accelerator.name}: no power measurement; shares of TDP and the rest of the node are those of {power.measured_on}",
    )


def _check(devices: int, compute_s: float, communication_s: float, idle_s: float, tokens: int) -> None:
    times = {"compute_s": compute_s, "communication_s": communication_s, "idle_s": idle_s}
    faults = [
        f"{name}={value} must be zero or more, and finite" for name, value in times.items() if not 0 <= value < math.inf
    ]
    faults += [
        f"{name}={value} must be at least 1" for name, value in (("devices", devices), ("tokens", tokens)) if value < 1
    ]
    if not faults and not 0 < sum(times.values()) < math.inf:
        faults.append("compute_s + communication_s + idle_s must be positive and finite")
    if faults:
        raise ValueError("; ".join(faults))
