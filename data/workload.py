"""The workload: what is to be run, independent of how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
Optimizer = Literal["adamw", "sgd"]
Attention = Literal["flash", "flash2", "flash1", "unfused", "eager"]
"""The best flash kernel of the accelerator, FlashAttention-2 or 1 whatever the accelerator, matrix products with one
fused softmax kernel, or with none."""

OPTIMIZER_STATE_BYTES: dict[str, int] = {"adamw": 12, "sgd": 8}
"""fp32 master weight and moments: AdamW keeps two, SGD one (Rajbhandari et al., arXiv 1910.02054, section 3.1)."""

PEAK_OF = {"mxfp8": "fp8", "nvfp4": "fp4"}
"""Precisions by the peak of the accelerator that they run at, where the names differ."""

MAX_SEQUENCE = 2**26
MAX_BATCH = 2**24


@dataclass(frozen=True, slots=True)
class Training:
    """One optimizer step of pre-training: `global_batch` sequences of `seq_len` tokens.

    `attention` and `fused_norm` name the kernels that are there: norms are one kernel, or a chain of fp32 operations.
    `fp32_gradients` asks for accumulation in fp32 where the framework does not do so anyway.
    """

    seq_len: int
    global_batch: int
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    attention: Attention = "flash"
    fused_norm: bool = True
    fp32_gradients: bool = False

    def __post_init__(self) -> None:
        faults = []
        for name, value, most in (
            ("seq_len", self.seq_len, MAX_SEQUENCE),
            ("global_batch", self.global_batch, MAX_BATCH),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
                faults.append(f"workload.{name}={value!r} must be a whole number between 1 and {most}")
        faults += [
            f"workload.{name}={getattr(self, name)!r} must be true or false"
            for name in ("fused_norm", "fp32_gradients")
            if not isinstance(getattr(self, name), bool)
        ]
        for name, chosen, allowed in (
            ("precision", self.precision, get_args(Precision)),
            ("optimizer", self.optimizer, get_args(Optimizer)),
            ("attention", self.attention, get_args(Attention)),
        ):
            if chosen not in allowed:
                faults.append(f"workload.{name}={chosen!r} must be one of {', '.join(allowed)}")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def peak(self) -> str:
        """The precision that the accelerator's peak goes by."""
        return PEAK_OF.get(self.precision, self.precision)

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.global_batch
