"""The workload: what is to be run, independent of how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
Optimizer = Literal["adamw", "sgd"]
Attention = Literal["flash", "flash2", "flash1", "unfused", "eager"]
"""The best flash kernel of the accelerator, FlashAttention-2 or 1 whatever the accelerator, matrix products with one
fused softmax kernel, or with none."""

LoraModules = Literal["attention", "all"]
"""Matrices that are given adapters: those of the token mixers, or those of the feed-forward parts as well."""
BasePrecision = Literal["16bit", "nf4"]
"""What the frozen matrices of the layers are held in."""

OPTIMIZER_STATE_BYTES: dict[str, int] = {"adamw": 12, "sgd": 8}
"""fp32 master weight and moments: AdamW keeps two, SGD one (Rajbhandari et al., arXiv 1910.02054, section 3.1)."""

FROZEN_BYTES: dict[str, float] = {"16bit": 2.0, "nf4": (4 + 8 / 64 + 32 / (64 * 256)) / 8}
"""A frozen parameter. NF4 has 4 bits, and with double quantisation one 8-bit constant for 64 of them and one fp32 constant
for 256 of those: 0.127 bits more (Dettmers et al., arXiv 2305.14314, section 3)."""

PEAK_OF = {"mxfp8": "fp8", "nvfp4": "fp4"}
"""Precisions by the peak of the accelerator that they run at, where the names differ."""

MAX_SEQUENCE = 2**26
MAX_BATCH = 2**24
MAX_RANK = 2**14
MAX_LENGTHS = 10_000
MAX_IMBALANCE = 1000
MAX_MTP = 64

OFFLOAD_STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the optimizer on the host that "auto" stands for."""


@dataclass(frozen=True, slots=True)
class Training:
    """One optimizer step: `global_batch` sequences of `seq_len` tokens, both positive whole numbers.

    `precision` is that of the matrix products, `optimizer` says how many bytes of state a parameter has: 12 with AdamW, 8 with
    SGD, the fp32 master weight among them (Rajbhandari et al., arXiv 1910.02054, section 3.1).

    `attention` and `fused_norm` name the kernels that are there: norms are one kernel, or a chain of fp32 operations.
    `fp32_gradients` asks for accumulation in fp32 where the framework does not do so anyway.

    `lora_rank` freezes every weight of the model and trains adapters of that rank beside the matrices that `lora_modules`
    names (LoRA); `base_precision="nf4"` holds the frozen matrices of the layers in four bits (QLoRA).

    `lengths` says that sequences are packed from documents that do not attend to each other: (length, share) pairs, the
    shares counted in documents and in any unit. Documents longer than `seq_len` are cut; none are where it is None.

    `expert_imbalance` is how many times the mean the busiest rank of an expert-parallel group receives: 1 with balanced
    routing; all ranks wait for the busiest, and it holds as much more.

    `expert_capacity` is how many times its mean an expert takes at most of the tokens of each rank, which drops the others;
    `pad_experts` fills every expert up to that. Nothing is dropped where it is None.

    `mtp_layers` multi-token-prediction modules are trained behind the last layer, none where it is 0.

    `offload_optimizer` is the share of the optimizer that a plan may leave to the host, its states in the host's memory and
    its update on the host's processors; "auto" leaves the share to the plan (`OFFLOAD_STEPS`). A plan may always leave none.
    With `offload_param` one that leaves all of it may keep its weights there too, from where every pass fetches them.
    With `offload_activations` a plan without a pipeline may leave the saved activations of its first layers there.
    `tp_overlap` says whether matrix products and the collectives of tensor parallelism beside them overlap, piece by piece;
    None, as in the runs that the profile was fitted to.

    Raises
    ------
    ValueError
        Naming every field that breaks a rule.
    """

    seq_len: int
    global_batch: int
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    attention: Attention = "flash"
    fused_norm: bool = True
    fp32_gradients: bool = False
    lora_rank: int | None = None
    lora_modules: LoraModules = "all"
    base_precision: BasePrecision = "16bit"
    lengths: Sequence[tuple[float, float]] | None = None
    expert_imbalance: float = 1.0
    mtp_layers: int = 0
    expert_capacity: float | None = None
    pad_experts: bool = False
    offload_optimizer: float | Literal["auto"] = 0.0
    offload_param: bool = False
    offload_activations: bool = False
    tp_overlap: bool | None = None

    def __post_init__(self) -> None:
        faults = []
        for name, value, most in (
            ("seq_len", self.seq_len, MAX_SEQUENCE),
            ("global_batch", self.global_batch, MAX_BATCH),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
                faults.append(f"workload.{name}={value!r} must be a whole number between 1 and {most}")
        if (
            isinstance(self.mtp_layers, bool)
            or not isinstance(self.mtp_layers, int)
            or not 0 <= self.mtp_layers <= MAX_MTP
        ):
            faults.append(f"workload.mtp_layers={self.mtp_layers!r} must be a whole number between 0 and {MAX_MTP}")
        elif self.mtp_layers and self.lora_rank is not None:
            faults.append(
                f"workload.mtp_layers={self.mtp_layers} with lora_rank={self.lora_rank}: adapters train without"
            )
        faults += [
            f"workload.{name}={getattr(self, name)!r} must be true or false"
            for name in ("fused_norm", "fp32_gradients", "pad_experts", "offload_param", "offload_activations")
            if not isinstance(getattr(self, name), bool)
        ]
        if not (self.tp_overlap is None or isinstance(self.tp_overlap, bool)):
            faults.append(f"workload.tp_overlap={self.tp_overlap!r} must be true or false")
        for name, chosen, allowed in (
            ("precision", self.precision, get_args(Precision)),
            ("optimizer", self.optimizer, get_args(Optimizer)),
            ("attention", self.attention, get_args(Attention)),
            ("lora_modules", self.lora_modules, get_args(LoraModules)),
            ("base_precision", self.base_precision, get_args(BasePrecision)),
        ):
            if chosen not in allowed:
                faults.append(f"workload.{name}={chosen!r} must be one of {', '.join(allowed)}")
        load = self.expert_imbalance
        if isinstance(load, bool) or not isinstance(load, int | float) or not 1 <= load <= MAX_IMBALANCE:
            faults.append(f"workload.expert_imbalance={load!r} must be a number from 1 (balanced) to {MAX_IMBALANCE}")
        share = self.offload_optimizer
        if share != "auto" and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1):
            faults.append(f"workload.offload_optimizer={share!r} must be a share from 0 to 1, or auto")
        elif self.offload_param is True and self.offload_shares[-1] < 1:
            faults.append(f"workload.offload_param=True needs workload.offload_optimizer=1 or auto, not {share}")
        faults += self._capacity_faults()
        faults += self._lora_faults()
        if self.lengths is not None:
            wrong = length_faults(self.lengths)
            faults += wrong
            if not wrong:
                object.__setattr__(self, "lengths", tuple((length, share) for length, share in self.lengths))
        if faults:
            raise ValueError("; ".join(faults))

    def _capacity_faults(self) -> list[str]:
        factor = self.expert_capacity
        if factor is None:
            return ["workload.pad_experts=True needs workload.expert_capacity"] if self.pad_experts is True else []
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= MAX_IMBALANCE:
            return [f"workload.expert_capacity={factor!r} must be a number above 0, at most {MAX_IMBALANCE}"]
        return []

    def _lora_faults(self) -> list[str]:
        rank = self.lora_rank
        if rank is None:
            return [
                f"workload.{name}={value!r} needs workload.lora_rank"
                for name, value, default in (
                    ("lora_modules", self.lora_modules, "all"),
                    ("base_precision", self.base_precision, "16bit"),
                )
                if value != default
            ]
        faults = []
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank <= MAX_RANK:
            faults.append(f"workload.lora_rank={rank!r} must be a whole number between 1 and {MAX_RANK}")
        if self.base_precision == "nf4" and self.precision not in ("bf16", "fp16"):
            faults.append(
                f"workload.base_precision='nf4' computes in 16 bits: workload.precision={self.precision!r} must be bf16 or fp16"
            )
        return faults

    @property
    def peak(self) -> str:
        """The precision that the accelerator's peak goes by."""
        return PEAK_OF.get(self.precision, self.precision)

    @property
    def tokens_per_step(self) -> int:
        """`seq_len` x `global_batch`."""
        return self.seq_len * self.global_batch

    def to_dict(self) -> dict[str, Any]:
        """The fields, without those of adapters, packing, imbalance, multi-token prediction, capacity, offloading and
        overlap where there are none."""
        unused = [] if self.frozen else ["lora_rank", "lora_modules", "base_precision"]
        unused += ["lengths"] if self.lengths is None else []
        unused += ["expert_imbalance"] if self.expert_imbalance == 1 else []
        unused += [] if self.mtp_layers else ["mtp_layers"]
        unused += ["expert_capacity", "pad_experts"] if self.expert_capacity is None else []
        unused += [] if self.offload_optimizer else ["offload_optimizer"]
        unused += [] if self.offload_param else ["offload_param"]
        unused += [] if self.offload_activations else ["offload_activations"]
        unused += ["tp_overlap"] if self.tp_overlap is None else []
        return {name: value for name, value in asdict(self).items() if name not in unused}

    @property
    def assumes_even_routing(self) -> bool:
        """Whether balanced routing is taken where nothing is said of it, and changes what a plan takes."""
        return self.expert_imbalance == 1 and not self.pad_experts

    @property
    def frozen(self) -> bool:
        """Whether only adapters are trained."""
        return self.lora_rank is not None

    @property
    def offload_shares(self) -> tuple[float, ...]:
        """The values of `Degrees.offload_optimizer` that a plan may have, ascending."""
        return (
            OFFLOAD_STEPS if self.offload_optimizer == "auto" else tuple(sorted({0.0, float(self.offload_optimizer)}))
        )

    @property
    def documents(self) -> tuple[tuple[float, float], ...]:
        """Lengths of the pieces that attend to themselves alone, each with its share of the tokens; none without packing.

        A document longer than a sequence is cut into whole sequences and a rest.
        """
        tokens: dict[float, float] = {}
        for length, share in self.lengths or ():
            whole, rest = divmod(length, self.seq_len)
            for piece, held in ((float(self.seq_len), whole * self.seq_len), (rest, rest)):
                if held:
                    tokens[piece] = tokens.get(piece, 0.0) + share * held
        every = math.fsum(tokens.values())
        return tuple((length, held / every) for length, held in sorted(tokens.items()))


def length_faults(lengths: object) -> list[str]:
    """What is wrong with the (length, share) pairs of a workload."""
    if isinstance(lengths, str) or not isinstance(lengths, Sequence) or not 0 < len(lengths) <= MAX_LENGTHS:
        return [f"workload.lengths must be a list of 1 to {MAX_LENGTHS} pairs of a length and a share"]
    faults = []
    for index, pair in enumerate(lengths):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            faults.append(f"workload.lengths[{index}]={pair!r} must be a pair of a length and a share")
            continue
        for name, value, least, most in (("length", pair[0], 1, MAX_SEQUENCE), ("share", pair[1], 1e-12, 1e12)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                faults.append(f"workload.lengths[{index}]: {name}={value!r} must be a number from {least} to {most}")
    return faults
