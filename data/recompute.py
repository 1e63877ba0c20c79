"""Modules that selective recompute can repeat on their own, in Megatron's words.

A set of modules is one word, its modules in the order of `MODULES` joined by "+", such as "layernorm+moe_act".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.data.model import Attention, LayerKind, Mlp, Moe

if TYPE_CHECKING:
    from collections.abc import Iterable

MODULES = ("core_attn", "layernorm", "mla_up_proj", "moe_act", "shared_experts", "mlp", "moe")
"""megatron/training/config `--recompute-modules`; those of gated delta nets and hyper-connections are not modelled."""
CORE = "core_attn"
ANY = "any"
"""As a limit: the search may choose among sets (coefficients, F3)."""
WITHIN = {"moe": ("moe_act", "shared_experts")}
"""What a module repeats anyway."""


def module_set(words: Iterable[str]) -> str:
    """The set of some modules; raises `ValueError` for none, an unknown one, or one that lies within another."""
    chosen = set(words)
    unknown = sorted(chosen - set(MODULES))
    if unknown or not chosen:
        raise ValueError(f"recompute_modules={'+'.join(unknown)!r} must be among {', '.join(MODULES)}")
    for outer, inner in WITHIN.items():
        twice = sorted(chosen & set(inner))
        if outer in chosen and twice:
            raise ValueError(f"recompute_modules: {outer} repeats {', '.join(twice)} with it; leave one out")
    return "+".join(module for module in MODULES if module in chosen)


def modules_of(mode: str) -> tuple[str, ...]:
    """The modules of a set; of the modes "none" and "full" none."""
    return () if mode in ("none", "full") else tuple(mode.split("+"))


def has_module(kind: LayerKind, module: str) -> bool:
    """Whether a layer of `kind` has something that the module repeats. Norms that are part of the projection behind them
    are not repeated (core/transformer/transformer_layer.py, `recompute_input_layernorm`; core/models/gpt/
    gpt_layer_specs.py): those ahead of latent attention and of experts are separate."""
    latent = isinstance(kind.mixer, Attention) and kind.mixer.latent is not None
    routed = isinstance(kind.ffn, Moe)
    return {
        "core_attn": kind.mixer is not None,
        "layernorm": latent or routed,
        "mla_up_proj": latent,
        "moe_act": routed,
        "shared_experts": isinstance(kind.ffn, Moe) and kind.ffn.shared_intermediate > 0,
        "mlp": isinstance(kind.ffn, Mlp),
        "moe": routed,
    }[module]
