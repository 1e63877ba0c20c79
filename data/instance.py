"""The instance: everything a solve or an evaluation needs, cross-checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from shardwise.data.cluster import Host
from shardwise.data.faults import InputError
from shardwise.data.limits import Limits
from shardwise.data.profile import Profile, load_profile
from shardwise.data.recompute import ANY, modules_of
from shardwise.data.rules import (
    MEGATRON_CORE,
    Rules,
    capacity_faults,
    module_faults,
    mtp_faults,
    offload_faults,
    overlap_faults,
    precision_faults,
)

if TYPE_CHECKING:
    from shardwise.data.cluster import Accelerator, Cluster, Link
    from shardwise.data.model import Model
    from shardwise.data.workload import Training


@dataclass(frozen=True, eq=False)
class Instance:
    """Model, cluster, workload, rules, profile and limits that belong together: everything that a solve needs.

    `build_instance` makes one of names and files.

    Attributes
    ----------
    rules
        What the framework accepts (`docs/rules.md`).
    profile
        The fitted constants of the software (`docs/cost-model.md`).
    limits
        What the user asked for beside, such as `tp<=8`.

    Raises
    ------
    InputError
        When the parts do not fit each other, with every reason.
    """

    model: Model
    cluster: Cluster
    workload: Training
    rules: Rules = MEGATRON_CORE
    profile: Profile = field(default_factory=lambda: load_profile("megatron-core"))
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        faults = []
        if len(self.cluster.accelerators) > 1:
            names = ", ".join(accelerator.name for accelerator in self.cluster.accelerators)
            faults.append(
                f"cluster {self.cluster.name}: mixed accelerators ({names}) are not planned yet; use one type"
            )
        faults += [
            f"cluster {self.cluster.name}: level {level} has {len(links)} different links; one per level is planned"
            for level, links in enumerate(self.cluster.links)
            if len(links) > 1
        ]
        precision = self.workload.precision
        faults += [
            f"workload.precision={precision!r} is not supported by {accelerator.name}; "
            f"it supports {', '.join(sorted(accelerator.flops_per_s))}"
            for accelerator in self.cluster.accelerators
            if self.workload.peak not in accelerator.flops_per_s
        ]
        positions = self.model.max_positions
        if positions and has_learned_positions(self.model) and self.workload.seq_len > positions:
            faults.append(
                f"workload.seq_len={self.workload.seq_len} exceeds max_position_embeddings={positions}, "
                "which are learned positions"
            )
        faults += mtp_faults(self.rules, self.model, self.workload.mtp_layers)
        faults += capacity_faults(self.rules, self.model, self.workload)
        faults += self._offload_faults()
        faults += overlap_faults(self.rules, self.workload)
        faults += [f"workload.{fault}" for fault in precision_faults(self.rules, self.model, precision)]
        faults += self.limits.layer_faults(len(self.model.layers))
        if self.limits.recompute_modules not in (None, ANY):
            modules = modules_of(self.limits.recompute_modules)
            faults += module_faults(self.rules, self.model, modules, precision)
        if faults:
            raise InputError(faults)

    def _offload_faults(self) -> list[str]:
        """What is missing where the host may have a share of the optimizer, or saved activations."""
        share, activations = self.workload.offload_optimizer, self.workload.offload_activations
        if not share and not activations:
            return []
        if share and self.rules.offload in ("none", "distributed"):  # in ZeRO-1 or not at all
            most, optimizer = self.workload.offload_shares[-1], self.workload.optimizer
            wrong = offload_faults(self.rules, 1, most, optimizer=optimizer)
            if wrong:
                return [f"workload.{fault}" for fault in wrong]
        if activations and not self.rules.activations_to_host:
            return [f"workload.offload_activations=true: {self.rules.name} has no saved activations on the host"]
        faults, asked = [], f"offload_optimizer={share}" if share else "offload_activations=true"
        if self.workload.offload_param:
            faults += [f"workload.{fault}" for fault in offload_faults(self.rules, 3, 1.0, param=True)]
        if self.cluster.host is None:
            faults.append(
                f"workload.{asked}: the host of cluster {self.cluster.name} is not known; state "
                "host_memory_GB and host_memory_GBps in a cluster file (docs/clusters.md)"
            )
        faults += [
            f"workload.{asked}: the link of {accelerator.name} to its host is not known; state "
            "host_link_GBps under [[accelerators]] of a cluster file"
            for accelerator in self.cluster.accelerators
            if accelerator.host_link_bytes_per_s is None
        ]
        return faults

    @property
    def accelerator(self) -> Accelerator:
        """The one type of device of the cluster."""
        return self.cluster.accelerators[0]

    @property
    def levels(self) -> tuple[Link, ...]:
        """The link of each level, innermost first."""
        return tuple(links[0] for links in self.cluster.links)

    def free_nodes(self, blocks: tuple[int, ...]) -> int:
        """Nodes that a placement with these `blocks` leaves free."""
        return len(self.cluster.leaves) - prod(blocks[1:])

    @cached_property
    def host(self) -> Host:
        """The share of its node's host that each device has, where the host is known: all devices of a node have one."""
        host, devices = self.cluster.host, max(leaf.devices for leaf in self.cluster.leaves)
        assert host is not None
        return Host(host.memory_bytes / devices, host.bandwidth_bytes_per_s / devices)

    @property
    def overlaps(self) -> bool:
        """Whether matrix products and the collectives of tensor parallelism overlap, where there is sequence parallelism."""
        said = self.workload.tp_overlap
        return bool(self.profile.tp_overlap) if said is None else said

    @property
    def memory_limit_bytes(self) -> int:
        """What one device may use: its memory, or the user's `memory_gb` or `memory_fraction` of it if that is lower."""
        own = self.accelerator.memory_bytes
        return int(min(own, self.limits.memory_fraction * own, self.limits.memory_gb * 1e9))


def has_learned_positions(model: Model) -> bool:
    """Whether the sequence length is bounded by a table of learned positions."""
    return any("position" in tensor.name for tensor in model.embedding)
