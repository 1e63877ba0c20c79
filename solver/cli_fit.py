"""The command that tells whether a model fits, where its memory goes, and on how many devices at least."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from shardwise.data.faults import InputError
from shardwise.solver.cli_workload import (
    FixOption,
    LimitOption,
    ModelArgument,
    ProfileOption,
    RulesOption,
    training,
    workload_options,
)
from shardwise.solver.option_groups import takes
from shardwise.solver.progress import watching
from shardwise.solver.render import GB, NOTHING, degrees_in_words
from shardwise.solver.terminal import (
    DONE,
    NO,
    UNKNOWN,
    JsonOption,
    QuietOption,
    check_outputs,
    complain,
    err,
    show,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from shardwise.data.workload import Training
    from shardwise.solver.fit import Fit

UNMODELLED = "not modelled, and less memory each: 8-bit optimizer states, weights or activations on the host"

COLUMNS = 4
"""Targets beside each other."""


@takes(details=workload_options)
def fit_command(
    *,
    model: ModelArgument,
    on: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ACCELERATOR|CLUSTER...",
            help="Accelerators, name[:nodes] of the catalogue, TOML files; eight common accelerators without any.",
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", help="Tokens per sequence; 4096, or the positions of the model, without it."),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", help="Sequences per step; 3360, which divides well, without it.")
    ] = None,
    details: dict[str, Any],
    rules: RulesOption = "megatron-core",
    profile: ProfileOption = None,
    fix: FixOption = None,
    limit: LimitOption = None,
    time_limit: Annotated[float | None, typer.Option("--time-limit", help="Seconds for all of them.")] = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Does MODEL fit, where does its memory go, and on how few devices.

    Exit code 0 when it fits somewhere, 1 when it is proven that it fits nowhere asked, 2 for bad input, 3 when the time
    was too short to tell.
    """
    from shardwise.solver.fit import GLOBAL_BATCH, fit, usual_seq_len

    check_outputs(json=json_path)
    limits = [*(fix or []), *(limit or [])]
    workload = checked(
        {
            "seq_len": usual_seq_len(model) if seq_len is None else seq_len,
            "global_batch": GLOBAL_BATCH if global_batch is None else global_batch,
            **details,
        },
        model,
        on,
        rules,
        profile,
        limits,
        time_limit,
    )
    with watching(err, quiet=quiet) as watch:
        found = fit(
            model, on, workload, rules=rules, profile=profile, limits=limits, time_limit_s=time_limit,
            changes=on is not None and len(on) == 1, on_progress=watch.report,
        )  # fmt: skip
    write_json({"model": model, "fits": [one.to_dict() for one in found]}, json_path)
    show_fits(show(json_path), found, assumed=global_batch is None)
    if watch.interrupted:
        complain("interrupted; what was found until then is above")
        raise typer.Exit(UNKNOWN)
    answers = {one.answer for one in found}
    raise typer.Exit(DONE if answers & {"fits", "tight"} else UNKNOWN if "unknown" in answers else NO)


def checked(
    said: dict[str, Any],
    model: str,
    on: Sequence[str] | None,
    rules: str,
    profile: str | None,
    limits: list[str],
    time_limit: float | None,
) -> Training:
    """The workload, or its faults with those of all other parts."""
    from shardwise.data.workload import Training
    from shardwise.solver.fit import instances

    workload = training(said)
    if isinstance(workload, Training):
        return workload
    faults = list(workload.faults)
    try:
        instances(model, on, Training(1, 1), rules, profile, limits, time_limit)
    except InputError as error:
        faults += error.faults
    raise InputError(faults)


def show_fits(console: Console, found: Sequence[Fit], *, assumed: bool) -> None:
    """Everything that `fit` prints."""
    if len(found) > 1:
        _line(console, f"[bold]{escape(found[0].instance.model.name)}: the fewest devices[/bold]")
        console.print(_summary(found))
    for one in found:
        if len(found) == 1:
            for line in _lines(one):
                _line(console, escape(line))
        else:
            _line(console, escape(f"{one.asked}: {one.reason or _plan(one)}"))
    held = [one for one in found if one.evaluation is not None]
    for start in range(0, len(held), COLUMNS):
        console.print(_memory(held[start : start + COLUMNS]))
    for one in found:
        for line in _more(one):
            _line(console, escape(line if len(found) == 1 else f"{one.asked}: {line}"))
    _line(console, UNMODELLED)
    workload = found[0].instance.workload
    if assumed:
        _line(
            console,
            f"assumed: {workload.global_batch:,} sequences of {workload.seq_len:,} tokens a step, a number that replicas "
            "of almost any count divide and that fills every pipeline; --global-batch says otherwise",
        )
    for said in dict.fromkeys(
        line for one in found for line in (*one.instance.model.assumed, *one.instance.cluster.assumed)
    ):
        _line(console, f"assumed: {escape(said)}")


def _lines(one: Fit) -> list[str]:
    """The answer on one target."""
    where = f"{one.instance.model.name} on {one.instance.accelerator.name} ({one.instance.cluster.name})"
    sums = one.arithmetic
    if one.answer == "unknown":
        lines = [f"{where}: not known in time; no plan on {counted(one.excluded, 'device')} or fewer"]
    elif one.evaluation is None or one.plan is None:
        lines = [f"{where}: does not fit on up to {one.most:,} devices"]
    else:
        lines = [f"{where}: {_verdict(one)} on {counted(one.devices or 0, 'device')} of {one.most:,}, and on no fewer"]
    each = f"weights {sums.weight_bytes:g}, gradients {sums.gradient_bytes:g}, optimizer {sums.optimizer_bytes:g}"
    least = "" if sums.least_devices is None else f": at least {counted(sums.least_devices, 'device')}"
    lines.append(
        f"states alone: {sums.bytes_per_param:g} bytes a parameter ({each}) x {sums.params / 1e9:,.2f} B = "
        f"{sums.state_bytes / GB:,.1f} GB; a device has {sums.usable_bytes / GB:.1f} GB, {sums.reserve_bytes / GB:.1f} of "
        f"them in reserve{least}"
    )
    if one.reason:
        lines.append(one.reason)
    if one.plan is not None and one.evaluation is not None:
        own, status = one.evaluation, "" if one.result is None else one.result.status
        proven = "the fastest on so many" if status == "OPTIMAL" else "not proven to be the fastest on so many"
        lines += [
            f"plan, {proven}: {_plan(one)}",
            f"step time {own.step_time_s:,.4g} s, {own.tokens_per_s:,.0f} tokens/s, model FLOPs utilization "
            f"{100 * own.model_flops_utilization:.1f} %",
        ]
    return lines


def _verdict(one: Fit) -> str:
    return "fits, tight," if one.answer == "tight" else one.answer


def _plan(one: Fit) -> str:
    """The plan in one line."""
    assert one.plan is not None
    assert one.evaluation is not None
    modes = " and ".join(sorted({stage.recompute for stage in one.plan.stages}))
    nodes = counted(one.evaluation.nodes, "node")
    return f"{degrees_in_words(one.plan)} on {nodes}, {one.plan.schedule}, recompute {modes}"


def counted(count: int, what: str) -> str:
    """A number of things."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _more(one: Fit) -> list[str]:
    """What would change the answer."""
    lines = []
    if one.roomy is not None:
        band = f"tight: the fastest plan is within the band of {100 * one.instance.profile.memory_band:g} %"
        most = int(10 * one.arithmetic.usable_bytes / GB / (1 + one.instance.profile.memory_band)) / 10
        there = f"{counted(one.roomy.devices or 0, 'device')} hold{'s' if one.roomy.devices == 1 else ''}"
        if one.roomy.devices is None:
            lines.append(f"{band}; no number of devices asked about leaves it free")
        elif one.roomy.devices == one.devices:
            lines.append(f'{band}; {there} one that leaves it free: --limit "memory_gb<={most:.1f}"')
        else:
            lines.append(f"{band}; {there} one that leaves it free")
    for change in one.changes:
        needed = "fits on none asked about" if change.devices is None else counted(change.devices, "device")
        lines.append(f"{change.what}: {needed}")
    return lines


def _summary(found: Sequence[Fit]) -> Table:
    table = Table()
    for name in ("on", "answer"):
        table.add_column(name, overflow="fold")
    for name in ("devices", "states alone", "step s", "tokens/s"):
        table.add_column(name, justify="right", overflow="fold")
    for one in found:
        own, least = one.evaluation, one.arithmetic.least_devices
        fewest = f"> {one.excluded:,}" if one.devices is None else f"{one.devices:,}"
        speed = ("", "") if own is None else (f"{own.step_time_s:,.4g}", f"{own.tokens_per_s:,.0f}")
        table.add_row(escape(one.asked), one.answer, fewest, "-" if least is None else f">= {least:,}", *speed)
    return table


def _memory(found: Sequence[Fit]) -> Table:
    """The fullest stage of each, line by line."""
    worst = [one.evaluation.stages[one.evaluation.worst_stage] for one in found if one.evaluation]
    table = Table(title="GB of the fullest device", title_justify="left")
    table.add_column("line")
    for one in found:
        table.add_column(escape(one.asked), justify="right")
    for name in worst[0].__slots__:
        values = [getattr(stage, name) for stage in worst]
        if any(value > NOTHING * stage.total for value, stage in zip(values, worst, strict=True)):
            table.add_row(name.replace("_", " "), *(f"{value / GB:.3f}" for value in values))
    table.add_row("total", *(f"{stage.total / GB:.3f}" for stage in worst))
    table.add_row("usable", *(f"{one.arithmetic.usable_bytes / GB:.3f}" for one in found))
    return table


def _line(console: Console, text: str) -> None:
    """A line that the terminal wraps, so that a file or a pipe gets it whole."""
    console.print(text, highlight=False, soft_wrap=True)
