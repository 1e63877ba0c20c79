"""Time of one layer under a software profile: the terms of `layer_costs` joined with its constants.

Every function takes numbers or arrays of any one shape, so that one formula serves a single plan and a table of runs.
With g, c, w the terms of matrix products, attention core and element-wise work, and T, C, E the collectives of tensor,
context and expert parallelism, A those of context parallelism that attention waits for:

(J1) the device works      D = gemm g + core c + elementwise w
     and waits             X = tp_exposed T + cp_exposed C + A + ep_exposed E
(J2) the host issues n launches: H = host_launch n, a little more for the backward pass (BACKWARD_LAUNCHES).
(J3) a pass takes ((D + X)^q + H^q)^(1/q) + tp_sync n_T (t - 1), q = HOST_JOIN: the host runs ahead of the device, but
     not always, and each of the n_T collectives of tensor parallelism starts when the last of its t ranks arrives.
(J4) what is recomputed is a forward pass again (J3), its attention core alone (arXiv 2205.05198, section 5), or the pass
     (J3) of other modules (layer_costs, L16), taken together; the share `recompute_overlap` of it hides under
     communication.
(J5) weights sharded over data parallelism (ZeRO-3) are gathered ahead of each pass, gradients reduced behind the
     backward pass: of a transfer G beside a pass P, max(dp_floor G, G - dp_overlap P) shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from shardwise.data.profile import Profile
    from shardwise.formulations.layer_costs import LayerTerms

HOST_JOIN = 3.0
BACKWARD_LAUNCHES = 2.0

Number = Any
"""A float, or an array of floats."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds for one micro-batch: passes, and the extra time of recomputing the attention core or the whole layer."""

    forward_s: Number
    backward_s: Number
    selective_s: Number = 0.0
    full_s: Number = 0.0

    @property
    def both_s(self) -> Number:
        return self.forward_s + self.backward_s


def layer_time(terms: LayerTerms, profile: Profile, tp: Number, *, scale: Number = 1.0) -> LayerTime:
    """(J1)-(J4) of one layer; `scale` lengthens every pass (stragglers)."""
    host = profile.host_launch_s * terms.launches
    late = profile.tp_sync_s * terms.collectives * (tp - 1)
    repeat = (1 - profile.recompute_overlap) * scale
    forward = (
        _pass(
            profile,
            (terms.gemm_forward, terms.core_forward, terms.traffic_forward),
            (terms.tensor_forward, terms.context_forward, terms.exchange_forward, terms.expert_forward),
            host,
        )
        + late
    )
    backward = (
        _pass(
            profile,
            (terms.gemm_backward, terms.core_backward, terms.traffic_backward),
            (terms.tensor_backward, terms.context_backward, terms.exchange_backward, terms.expert_backward),
            BACKWARD_LAUNCHES * host,
        )
        + late
    )
    return LayerTime(forward * scale, backward * scale, profile.core * terms.core_forward * repeat, forward * repeat)


def modules_time_s(again: LayerTerms, profile: Profile, tp: Number) -> Number:
    """(J4) What modules other than the attention core add, `again` their forward passes."""
    forward = _pass(
        profile,
        (again.gemm_forward, again.core_forward, again.traffic_forward),
        (again.tensor_forward, again.context_forward, again.exchange_forward, again.expert_forward),
        profile.host_launch_s * again.launches,
    )
    return (forward + profile.tp_sync_s * again.collectives * (tp - 1)) * (1 - profile.recompute_overlap)


def weight_gradient_s(terms: LayerTerms, profile: Profile) -> Number:
    """The half of the backward pass's matrix products that no other stage waits for; none of those of frozen matrices."""
    return profile.gemm * (terms.gemm_backward - terms.gemm_frozen) / 2


def time_by_cause(terms: LayerTerms, profile: Profile) -> dict[str, Number]:
    """(J1) of both passes, by what it is spent on; what (J3) adds to their sum is the host's."""
    return {
        "compute": profile.gemm * (terms.gemm_forward + terms.gemm_backward)
        + profile.core * (terms.core_forward + terms.core_backward)
        + profile.elementwise * (terms.traffic_forward + terms.traffic_backward),
        "tensor_parallel": profile.tp_comm_exposed * (terms.tensor_forward + terms.tensor_backward),
        "context_parallel": profile.cp_comm_exposed * (terms.context_forward + terms.context_backward)
        + terms.exchange_forward
        + terms.exchange_backward,
        "expert_parallel": profile.ep_comm_exposed * (terms.expert_forward + terms.expert_backward),
    }


def exposed(transfer: Number, cover: Number, profile: Profile) -> Number:
    """(J5) What shows of a transfer beside passes that take `cover`."""
    return larger(profile.dp_comm_floor * transfer, transfer - profile.dp_comm_overlap * cover)


def _pass(
    profile: Profile, work: tuple[Number, Number, Number], waits: tuple[Number, Number, Number, Number], host: Number
) -> Number:
    """(J1), (J3)."""
    gemm, core, traffic = work
    tensor, context, exchange, expert = waits
    device = profile.gemm * gemm + profile.core * core + profile.elementwise * traffic
    device = device + profile.tp_comm_exposed * tensor + profile.cp_comm_exposed * context + exchange
    return joined(device + profile.ep_comm_exposed * expert, host)


def joined(device: Number, host: Number) -> Number:
    """(J3)."""
    return (device**HOST_JOIN + host**HOST_JOIN) ** (1 / HOST_JOIN)


def larger(a: Number, b: Number) -> Number:
    """The larger of two numbers, or of two arrays element by element."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return max(a, b)
