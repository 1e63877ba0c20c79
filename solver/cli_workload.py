"""The options that commands share about model, workload, rules and limits, and the workload made of them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shardwise.data.faults import InputError
from shardwise.data.rules import PACKS

RULES = ", ".join(PACKS)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Catalogue name, or path of a config.json.")]
PrecisionOption = Annotated[str, typer.Option("--precision", help="bf16, fp16, fp8, mxfp8 or nvfp4.")]
OptimizerOption = Annotated[str, typer.Option("--optimizer", help="adamw or sgd.")]
AttentionOption = Annotated[str, typer.Option("--attention", help="flash, flash2, flash1, unfused or eager.")]
RulesOption = Annotated[str, typer.Option("--rules", help=f"Rule pack: {RULES}.")]
ProfileOption = Annotated[
    str | None, typer.Option("--profile", help="Software constants: a name, or a TOML file; the pack's by default.")
]
LimitOption = Annotated[
    list[str] | None,
    typer.Option("--limit", help='Such as "pp<=8", "memory_gb<=70" or "memory_fraction<=0.9". Repeat it.'),
]
FixOption = Annotated[list[str] | None, typer.Option("--fix", help="Such as tp=8. Repeat it.")]
LoraRankOption = Annotated[
    int | None, typer.Option("--lora-rank", help="Freeze the model and train adapters of this rank (LoRA).")
]
LoraModulesOption = Annotated[
    str | None, typer.Option("--lora-modules", help="What has adapters: all (default) or attention.")
]
QloraOption = Annotated[
    bool | None,
    typer.Option("--qlora/--no-qlora", help="Hold the frozen matrices in four bits (NF4); needs --lora-rank."),
]
MeanDocumentOption = Annotated[
    float | None,
    typer.Option(
        "--mean-document-length", help="Sequences are packed of documents of this length that do not attend to others."
    ),
]
MtpOption = Annotated[
    int | None, typer.Option("--mtp-layers", help="Multi-token-prediction modules that are trained; none by default.")
]
ImbalanceOption = Annotated[
    float | None,
    typer.Option("--expert-imbalance", help="Tokens of the busiest expert-parallel rank over the mean, default 1."),
]
CapacityOption = Annotated[
    float | None,
    typer.Option(
        "--expert-capacity", help="Most tokens of an expert over its mean; others are dropped. None by default."
    ),
]
PadOption = Annotated[
    bool | None,
    typer.Option("--pad-experts/--no-pad-experts", help="Pad every expert to its capacity; needs --expert-capacity."),
]
OverlapOption = Annotated[
    bool | None,
    typer.Option(
        "--tp-overlap/--no-tp-overlap",
        help="Overlap tensor-parallel collectives with the products beside them; as the profile has it by default.",
    ),
]
LengthsOption = Annotated[
    str | None, typer.Option("--lengths", metavar="FILE", help="The same, by a CSV with the columns length,count.")
]


def tuning_fields(lora_rank: int | None, lora_modules: str | None, qlora: bool | None) -> dict[str, Any]:
    """What the options say of adapters, as fields of the workload."""
    held = None if qlora is None else ("nf4" if qlora else "16bit")
    fields = {"lora_rank": lora_rank, "lora_modules": lora_modules, "base_precision": held}
    return {name: value for name, value in fields.items() if value is not None}


def packing_fields(mean_document_length: float | None, lengths: str | None) -> dict[str, Any]:
    """What the options say of packing, as a field of the workload, or the faults in its place."""
    from shardwise.data.document_lengths import read_lengths

    if mean_document_length is not None and lengths is not None:
        return {"lengths": InputError("--mean-document-length and --lengths say the same: leave out one")}
    if mean_document_length is not None:
        return {"lengths": ((mean_document_length, 1),)}
    try:
        return {} if lengths is None else {"lengths": read_lengths(lengths)}
    except InputError as error:
        return {"lengths": error}


def routing_fields(
    expert_imbalance: float | None,
    mtp_layers: int | None,
    expert_capacity: float | None,
    pad_experts: bool | None,
    tp_overlap: bool | None,
) -> dict[str, Any]:
    """What the options say of experts, multi-token prediction and overlap, as fields of the workload."""
    given = {
        "expert_imbalance": expert_imbalance, "mtp_layers": mtp_layers, "expert_capacity": expert_capacity,
        "pad_experts": pad_experts, "tp_overlap": tp_overlap,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


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
