"""What the words in a row of measured runs mean: software generation, sharding, recompute, precision, kernels."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from shardwise.data.faults import InputError
from shardwise.data.recompute import MODULES

if TYPE_CHECKING:
    from collections.abc import Mapping

PROFILE_OF = (
    ("nvidia release", "mlperf-nemo"),
    ("framework release", "mlperf-nemo"),
    ("container 26.06", "megatron-bridge-26.06"),
    ("container 26.08", "megatron-bridge-26.06"),
    ("container 2", "megatron-bridge"),
    ("megatron-bridge", "megatron-lm-2026"),
    ("te 2.", "megatron-lm-2026"),
    ("nemo", "megatron-core"),
    ("megatron-core", "megatron-core"),
    ("torchtitan", "torchtitan"),
    ("nanotron", "nanotron"),
    ("internevo", "internevo"),
    ("internlm", "internevo"),
    ("llm-foundry", "fsdp1"),
    ("composer", "fsdp1"),
    ("fsdp", "fsdp1"),
    ("aleph", "aleph-scaling"),
    ("megatron-lm schedule", "megatron-2023"),
    ("megatron-deepspeed", "megatron-2021"),
    ("deepspeed", "megatron-2021"),
    ("megatron-lm (202", "megatron-2021"),
    ("megatron", "megatron-core"),
    ("mxnet", "mlperf-nemo"),
    ("maxtext", "megatron-core"),
    ("paxml", "megatron-core"),
)
"""Profile by a part of what `framework` says, first match."""

RULES_OF = (
    ("torchtitan", "torchtitan"),
    ("megatron", "megatron-core"),
    ("nemo", "megatron-core"),
    ("mindspeed", "mindspeed"),
    ("deepspeed", "deepspeed"),
    ("accelerate", "accelerate"),
)
"""Rule pack by a part of what `framework` says, first match."""

BEFORE_FLASH = ("megatron-2021", "megatron-2023", "aleph-scaling")
"""Generations whose default is the fused softmax."""
DISTRIBUTED = ("megatron-core", "megatron-bridge", "megatron-bridge-26.06", "mlperf-nemo", "megatron-lm-2026")
"""Generations whose recipes use the distributed optimizer."""
FALLBACK_PROFILE = "megatron-core"


def profile_of(framework: str, sharding: str = "") -> str:
    """The profile of the framework generation that a text names; else that of FSDP where weights are sharded so."""
    text = framework.lower()
    fallback = "fsdp1" if "fsdp" in sharding.lower() else FALLBACK_PROFILE
    return next((profile for part, profile in PROFILE_OF if part in text), fallback)


def rules_of(framework: str) -> str:
    """The rule pack of the framework that a text names; mathematical legality where it names none."""
    return next((rules for part, rules in RULES_OF if part in framework.lower()), "free")


def zero_of(text: str, dp: int) -> tuple[int, int]:
    """ZeRO stage and replica groups from what a row says."""
    group = re.search(r"group of (\d+)", text)
    replicate = dp // int(group[1]) if group and dp % int(group[1]) == 0 and dp > int(group[1]) else 1
    if "hsdp" in text and "fsdp (" not in text:
        return 3, dp // 8 if dp % 8 == 0 and dp > 8 else 1
    if "fsdp" in text or "zero-3" in text or "zero3" in text:
        return 3, replicate
    if "zero-2" in text or "zero2" in text:
        return 2, replicate
    if "zero-1" in text or "zero1" in text or "distributed optimizer" in text:
        return 1, replicate
    return 0, 1


def recompute_of(text: str) -> tuple[str, float]:
    """Mode and share of layers."""
    text = text.lower()
    if not text or "recipe" in text:
        return "unknown", 1.0
    if "every other" in text or "every n-th" in text:
        return "full", 0.5
    if text.startswith("full"):
        return "full", 1.0
    if text.startswith("selective"):
        return "selective", 1.0
    return "none", 1.0


def recompute_modules_of(text: str) -> tuple[str, ...]:
    """The modules of "selective(layernorm+moe_act)"; none where it names others, or none."""
    words = re.fullmatch(r"selective\(([a-z_+]+)\)", text.lower().strip())
    modules = tuple(words[1].split("+")) if words else ()
    return modules if set(modules) <= set(MODULES) else ()


def precision_of(text: str, assumed: list[str]) -> Any:
    text = text.lower()
    if "nvfp4" in text or "fp4" in text:
        if "ambiguous" in text:
            assumed.append("precision=nvfp4 (fp8 or nvfp4 in the source)")
        return "nvfp4"
    if "mxfp8" in text or "fp8-mx" in text or "mx on" in text:
        return "mxfp8"
    if "fp8" in text:
        return "fp8"
    if ("fp32" in text or "tf32" in text) and "16" not in text:
        raise InputError(f"precision={text!r}: training in 32 bits is not modelled")
    return "fp16" if text.startswith("fp16") and "bf16" not in text else "bf16"


def lora_of(text: str, assumed: list[str]) -> dict[str, Any]:
    """Rank, matrices and frozen precision of adapters, as fields of the workload; none where `text` names no LoRA."""
    text = text.lower()
    if "lora" not in text:
        return {}
    rank = re.search(r"\b(?:r|rank)\s*[=:]?\s*(\d{1,5})\b", text)
    if rank is None:
        raise InputError("LoRA: the rank is not stated, such as rank=16 in the column notes")
    modules = "attention" if re.search(r"(?:\bon|modules=)\s*attention", text) else "all"
    if modules == "all":
        assumed.append("adapters on all projections")
    return {
        "lora_rank": int(rank[1]),
        "lora_modules": modules,
        "base_precision": "nf4" if "qlora" in text or "nf4" in text else "16bit",
    }


def attention_of(text: str, profile: str, assumed: list[str]) -> Any:
    text = text.lower()
    if "v1" in text or "triton" in text or text == "flash_attention":
        return "flash1"
    if text.startswith(("yes", "flash_attention2", "sdpa")):
        return "flash2"
    if text.startswith("no") or text == "fused":
        return "unfused"
    if text == "torch":
        return "eager"
    if not text:
        kernel = "unfused" if profile in BEFORE_FLASH else "flash"
        assumed.append(f"attention={kernel} (not stated)")
        return kernel
    return "flash"


def fused_norm_of(row: Mapping[str, str], profile: str) -> bool:
    kernels = row.get("flash_attention", "").lower()
    framework = row.get("framework", "").lower()
    if profile == "aleph-scaling":
        return "rms" in kernels
    if profile == "torchtitan":
        return "compile" in framework
    return True
