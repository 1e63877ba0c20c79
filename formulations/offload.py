"""What the host of a node does for its devices: bytes it holds, and seconds that the devices wait.

With s the share of the optimizer on the host (`Degrees.offload_optimizer`), and per parameter that a device owns:

(U1) the device keeps 1 - s of its optimizer states (M1). The host holds s of them, fp32 master weights whatever the device
     keeps, and the fp32 gradients that it reads: 16 s bytes with AdamW, 12 s with SGD (Megatron core/optimizer/
     cpu_offloading/hybrid_optimizer.py, whose copies of gradients stay; DeepSpeed runtime/zero/stage_1_and_2.py). Gradients
     stay on the device besides, also where DeepSpeed frees some: memory is not understated.
(U2) all devices of a node have the same share of its host: of its memory, of which HOST_USABLE is there for them, and of
     what it reads and writes. Each stage has to fit its device's share, so that a node fits whichever stages it has.
(U3) a step then takes, beside the update of the 1 - s on the device (T4), one after the other
         s (g + 2) / L  copies: gradients as the device accumulates them (g bytes) to the host, 16-bit weights back,
         s u / (e H)    update: u bytes read and written, twice the states, the gradient and the weight in 16 bits,
     L the slower of the device's link to the host and of H, H the share of the host's bytes per second, e its
     efficiency. Nothing of it overlaps anything: Megatron has --overlap-cpu-optimizer-d2h-h2d for the copies, which is off,
     and DeepSpeed copies gradients during the backward pass, so both can be faster than this.

(U4) with `Degrees.offload_param` the host holds the 2 bytes of every weight that ZeRO-3 shards too, frozen ones as they are
     held, and the device none of them beside the layers that it gathers (M6). Each gather of a unit (J5) fetches this device's
     shard from the host first, bytes / L, with every forward and every backward pass; both are hidden as gathers are.

(U5) with N = `Degrees.offload_layers` (p = 1, nothing recomputed, so one micro-batch at a time) the activations that (M2)
     keeps for the first N layers lie on the host between their two passes. The device holds two layers' worth of the kind
     that keeps most in their place: what one pass made is copied while the next computes, and comes back likewise
     (Transformer Engine cpu_offload.py, double buffering). The host holds those of all N, without what the device's
     allocator adds (M5). A pass of such a layer takes no less than its copy, bytes / L: max(0, bytes / L - pass) shows,
     forward and backward.
(U6) N + 1 layers take no less time and leave no more on the device than N >= 1 do, and leave the host more: every term of
     (U5) is added for each layer, and none is negative. Of the plans of a candidate that differ in N alone the one with
     the least N that fits the device is therefore the best, none where it fits without; where it does not fit the host,
     no other does.

e = HOST_ADAM_EFFICIENCY is pinned to the optimizer that DeepSpeed wrote for this, in Ren et al., arXiv 2101.06840, table 4: 0.22,
1.03 and 2.57 s for 1, 4 and 10 billion parameters on a DGX-2, whose two sockets of six channels of DDR4-2666 have 256 GB/s
nominally: 0.53, 0.46 and 0.46. PyTorch's own of that time reaches 0.08 there (14.76 s); Megatron takes PyTorch's fused one.
A switch that several devices share on their way to the host, as two do in a DGX A100, is not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.data.workload import OPTIMIZER_STATE_BYTES

if TYPE_CHECKING:
    from shardwise.data.instance import Instance

HOST_USABLE = 0.9
"""Of the host's memory: an assumption; the rest is for the system, data loading and what pinning rounds up."""
HOST_ADAM_EFFICIENCY = 0.46
HOST_GRADIENT_BYTES = 4
HOST_WEIGHT_BYTES = 2


def host_bytes_per_param(instance: Instance) -> float:
    """(U1) for s = 1."""
    return OPTIMIZER_STATE_BYTES[instance.workload.optimizer] + HOST_GRADIENT_BYTES


def host_capacity_bytes(instance: Instance) -> float:
    """(U2) What one device may take of its host's memory."""
    return HOST_USABLE * instance.host.memory_bytes


def host_copy_s(instance: Instance) -> float:
    """1 / L, seconds per byte; the cluster's host is known."""
    link = instance.accelerator.host_link_bytes_per_s
    assert link is not None
    return 1 / min(link, instance.host.bandwidth_bytes_per_s)


def host_rates_s(instance: Instance) -> tuple[float, float]:
    """(U3) Seconds per parameter of the copies and of the update, for s = 1."""
    copied = instance.profile.gradient_bytes + HOST_WEIGHT_BYTES
    touched = 2 * OPTIMIZER_STATE_BYTES[instance.workload.optimizer] + HOST_GRADIENT_BYTES + HOST_WEIGHT_BYTES
    rate = instance.host.bandwidth_bytes_per_s
    return copied * host_copy_s(instance), touched / (HOST_ADAM_EFFICIENCY * rate)
