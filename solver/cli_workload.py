"""The options that commands share about model, workload, rules and limits, and the workload made of them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shardwise.data.faults import InputError
from shardwise.data.rules import PACKS

RULES = ", ".join(PACKS)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Catalogue name, or path of a config.json.")]
RulesOption = Annotated[str, typer.Option("--rules", help=f"Rule pack: {RULES}.")]
ProfileOption = Annotated[
    str | None, typer.Option("--profile", help="Software constants: a name, or a TOML file; the pack's by default.")
]
LimitOption = Annotated[
    list[str] | None,
    typer.Option("--limit", help='Such as "pp<=8", "memory_gb<=70" or "memory_fraction<=0.9". Repeat it.'),
]
FixOption = Annotated[list[str] | None, typer.Option("--fix", help="Such as tp=8. Repeat it.")]


def workload_options(
    precision: Annotated[
        str | None, typer.Option("--precision", help="bf16 (default), fp16, fp8, mxfp8 or nvfp4.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="adamw (default) or sgd.")] = None,
    attention: Annotated[
        str | None, typer.Option("--attention", help="flash (default), flash2, flash1, unfused or eager.")
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option("--lora-rank", help="Freeze the model and train adapters of this rank (LoRA).")
    ] = None,
    lora_modules: Annotated[
        str | None, typer.Option("--lora-modules", help="What has adapters: all (default) or attention.")
    ] = None,
    qlora: Annotated[
        bool | None,
        typer.Option("--qlora/--no-qlora", help="Hold the frozen matrices in four bits (NF4); needs --lora-rank."),
    ] = None,
    mean_document_length: Annotated[
        float | None,
        typer.Option(
            "--mean-document-length",
            help="Sequences are packed of documents of this length that do not attend to others.",
        ),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", metavar="FILE", help="The same, by a CSV with the columns length,count.")
    ] = None,
    expert_imbalance: Annotated[
        float | None,
        typer.Option("--expert-imbalance", help="Tokens of the busiest expert-parallel rank over the mean, default 1."),
    ] = None,
    mtp_layers: Annotated[
        int | None,
        typer.Option("--mtp-layers", help="Multi-token-prediction modules that are trained; none by default."),
    ] = None,
    expert_capacity: Annotated[
        float | None,
        typer.Option(
            "--expert-capacity", help="Most tokens of an expert over its mean; others are dropped. None by default."
        ),
    ] = None,
    pad_experts: Annotated[
        bool | None,
        typer.Option(
            "--pad-experts/--no-pad-experts", help="Pad every expert to its capacity; needs --expert-capacity."
        ),
    ] = None,
    tp_overlap: Annotated[
        bool | None,
        typer.Option(
            "--tp-overlap/--no-tp-overlap",
            help="Overlap tensor-parallel collectives with the products beside them; as the profile has it by default.",
        ),
    ] = None,
    offload_optimizer: Annotated[
        str | None,
        typer.Option(
            "--offload-optimizer",
            metavar="SHARE|auto",
            help="Share of the optimizer that a plan may leave to the host.",
        ),
    ] = None,
    offload_param: Annotated[
        bool | None,
        typer.Option(
            "--offload-param/--no-offload-param",
            help="A plan may leave its ZeRO-3 weights to the host too; needs --offload-optimizer.",
        ),
    ] = None,
    offload_activations: Annotated[
        bool | None,
        typer.Option(
            "--offload-activations/--no-offload-activations",
            help="A plan without a pipeline may leave the saved activations of its first layers to the host.",
        ),
    ] = None,
) -> dict[str, Any]:
    """What the options say of the workload beyond its sizes, as fields of it; what was left out is left out here."""
    said = {
        "precision": precision, "optimizer": optimizer, "attention": attention,
        "lora_rank": lora_rank, "lora_modules": lora_modules,
        "base_precision": None if qlora is None else ("nf4" if qlora else "16bit"),
        "lengths": document_lengths(mean_document_length, lengths),
        "expert_imbalance": expert_imbalance, "mtp_layers": mtp_layers,
        "expert_capacity": expert_capacity, "pad_experts": pad_experts,
        "tp_overlap": tp_overlap,
        "offload_optimizer": share_or_word(offload_optimizer), "offload_param": offload_param,
        "offload_activations": offload_activations,
    }  # fmt: skip
    return {name: value for name, value in said.items() if value is not None}


def document_lengths(mean: float | None, file: str | None) -> Any:
    """What the options say of packing, or the faults in its place."""
    from shardwise.data.document_lengths import read_lengths

    if mean is not None and file is not None:
        return InputError("--mean-document-length and --lengths say the same: leave out one")
    if mean is not None:
        return ((mean, 1),)
    try:
        return None if file is None else read_lengths(file)
    except InputError as error:
        return error


def share_or_word(said: str | None) -> float | str | None:
    """A share as a number; what is no number is told by the workload."""
    try:
        return None if said is None else float(said)
    except ValueError:
        return said


def training(fields: dict[str, Any]) -> Any:
    """The workload, or its faults to be told together with others; a field may be an `InputError` of its own."""
    from shardwise.data.workload import Training

    faults = [fault for value in fields.values() if isinstance(value, InputError) for fault in value.faults]
    known = {name: value for name, value in fields.items() if not isinstance(value, InputError)}
    try:
        workload = Training(**known)
    except ValueError as error:
        return InputError([*str(error).split("; "), *faults])
    return InputError(faults) if faults else workload
