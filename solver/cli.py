"""The command line.

Exit codes: 0 done (a plan; a legal plan that fits), 1 proven no, 2 bad input, 3 not known in time. Solver modules are
imported by the commands that need them, so that help and catalogues start at once.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from shardwise.data.faults import InputError
from shardwise.data.pipeline import SCHEDULES
from shardwise.data.recompute import CORE, MODULES
from shardwise.solver.cli_batch import batch_command
from shardwise.solver.cli_collective import collective_command
from shardwise.solver.cli_fit import fit_command
from shardwise.solver.cli_report import compare_command, report_command
from shardwise.solver.cli_runs import calibrate_command, validate_command
from shardwise.solver.cli_training_run import run_document, run_of, run_options, with_terms
from shardwise.solver.cli_workload import (
    RULES,
    FixOption,
    LimitOption,
    ModelArgument,
    ProfileOption,
    RulesOption,
    training,
    workload_options,
)
from shardwise.solver.option_groups import takes
from shardwise.solver.saved import read_plan, saved_instance
from shardwise.solver.terminal import (
    BAD_INPUT,
    DONE,
    INTERRUPTED,
    NO,
    UNKNOWN,
    JsonOption,
    QuietOption,
    check_outputs,
    complain,
    err,
    show,
    write,
    write_json,
)

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan

LAUNCHERS = ("megatron-core",)
PLAN_FILE = "A plan.json, the file of plan --json, or STORE/CELL of a batch."
SIZES = {"seq_len": "--seq-len", "global_batch": "--global-batch"}


class Commands(TyperGroup):
    """Every fault of the input is told in words and with its exit code, never as a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            for fault in error.faults:
                complain(fault)
            ctx.exit(BAD_INPUT)
        except KeyboardInterrupt:
            complain("interrupted")
            ctx.exit(UNKNOWN)
        except OSError as error:
            complain(str(error))
            ctx.exit(BAD_INPUT)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Proven hybrid-parallel plans for large language models.",
)
plan_app = typer.Typer(no_args_is_help=True, help="Find the best plan and prove how good it is.")
app.add_typer(plan_app, name="plan")
app.command("fit")(fit_command)
app.command("collective")(collective_command)
app.command("validate")(validate_command)
app.command("calibrate")(calibrate_command)
app.command("report")(report_command)
app.command("compare")(compare_command)
app.command("batch")(batch_command)

ClusterArgument = Annotated[
    str, typer.Argument(metavar="CLUSTER", help="name[:nodes] of the catalogue, or a TOML file.")
]
SeqLenOption = Annotated[int, typer.Option("--seq-len", help="Tokens per sequence.")]
BatchOption = Annotated[int, typer.Option("--global-batch", help="Sequences per step.")]


def main() -> None:
    """Run the command line; a terminal that lacks a character shows its escape instead."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except SystemExit as end:
        if end.code != INTERRUPTED:
            raise
        complain("interrupted")
        sys.exit(UNKNOWN)


def version(value: bool) -> None:
    if value:
        from shardwise import __version__

        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Proven hybrid-parallel plans for large language models."""


@plan_app.command("training")
@takes(details=workload_options, of_run=run_options)
def plan_training(
    *,
    model: ModelArgument,
    cluster: ClusterArgument,
    seq_len: SeqLenOption,
    global_batch: BatchOption,
    details: dict[str, Any],
    objective: Annotated[
        str, typer.Option("--objective", help="step-time, throughput-per-device, energy, cost or devices.")
    ] = "step-time",
    deadline_s: Annotated[
        float | None, typer.Option("--deadline-s", help="Only plans whose step lasts no longer, in seconds.")
    ] = None,
    pareto: Annotated[
        str | None, typer.Option("--pareto", help="Front of step time against energy or cost, beside the plan.")
    ] = None,
    pareto_step: Annotated[
        float, typer.Option("--pareto-step", help="Least distance of its points, as a share of the step time; 0: all.")
    ] = 0.02,
    rules: RulesOption = "megatron-core",
    profile: ProfileOption = None,
    fix: FixOption = None,
    limit: LimitOption = None,
    keep_free: Annotated[
        int | None, typer.Option("--keep-free", min=0, help="Nodes that the plan leaves free.")
    ] = None,
    time_limit: Annotated[float | None, typer.Option("--time-limit", help="Seconds.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="CP-SAT workers.")] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    no_prune: Annotated[bool, typer.Option("--no-prune", help="One CP-SAT model over all candidates.")] = False,
    free_chunks: Annotated[
        bool, typer.Option("--free-chunks", help="With vpp > 1 any contiguous split, not only even ones.")
    ] = False,
    top: Annotated[int, typer.Option("--top", help="Other plans to tell of, each of another layout; 0 for none.")] = 5,
    of_run: dict[str, Any],
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan.")] = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Plan the training of MODEL on CLUSTER.

    Exit code 0 with a plan, 1 when it is proven that there is none, 2 for bad input, 3 when the time was too short.
    """
    check_outputs(output=output, json=json_path)
    workload = training({"seq_len": seq_len, "global_batch": global_batch, **details})
    with progress(quiet) as watch:
        from shardwise.solver.pareto import pareto_front
        from shardwise.solver.solve import solve

        price = of_run["price"]
        if of_run["tokens"] is None and "cost" in (objective, pareto):  # the price is of the objective alone
            of_run = of_run | {"price": None}
        with with_terms(of_run) as terms:
            kept = [] if keep_free is None else [f"free_nodes>={keep_free}"]
            instance = read_instance(model, cluster, workload, rules, profile, [*(fix or []), *(limit or []), *kept])
        front = None
        if pareto is not None:
            front = pareto_front(
                instance, pareto, step=pareto_step, price=price, deadline_s=deadline_s, time_limit_s=time_limit,
                workers=workers, seed=seed, on_progress=watch.report,
            )  # fmt: skip
        result = solve(
            instance=instance,
            objective=objective,
            price=price,
            deadline_s=deadline_s,
            time_limit_s=time_limit,
            workers=workers,
            seed=seed,
            prune=not no_prune,
            free_chunks=free_chunks,
            top=top,
            on_progress=watch.report,
        )
    run = None if terms is None or result.evaluation is None else run_of(result.evaluation, terms)
    drawn = {} if front is None else {"pareto": front.to_dict()}
    write_json(result.to_dict() | run_document(terms, run) | drawn, json_path)
    if output is not None and result.plan is not None:
        write(result.plan.to_json(), output)
    from shardwise.solver.render import show_front, show_result

    console = show(json_path, output)
    show_result(console, instance, result, run)
    if front is not None:
        show_front(console, front)
    code = {"OPTIMAL": DONE, "FEASIBLE": DONE, "INFEASIBLE": NO, "UNKNOWN": UNKNOWN}[result.status]
    # CP-SAT takes Ctrl-C itself and hands back what it has; without a limit nothing else ends a search early.
    if watch.interrupted or (result.status == "FEASIBLE" and time_limit is None):
        complain("interrupted; what was found until then is above" if result.plan else "interrupted")
        code = code if result.status in ("OPTIMAL", "INFEASIBLE") else UNKNOWN
    raise typer.Exit(code)


def read_instance(
    model: Any, cluster: Any, workload: Any, rules: str, profile: str | None, limits: list[str]
) -> Instance:
    """The instance, or every fault of all its parts, those of the workload among them."""
    from shardwise.data.workload import Training
    from shardwise.solver.solve import build_instance

    faults = list(workload.faults) if isinstance(workload, InputError) else []
    stand_in = Training(1, 1) if isinstance(workload, InputError) else workload
    try:
        instance = build_instance(model, cluster, stand_in, rules=rules, profile=profile, limits=limits)
    except InputError as error:
        raise InputError([*faults, *error.faults]) from None
    if faults:
        raise InputError(faults)
    return instance


def progress(quiet: bool) -> Any:
    """The watch over a solve."""
    from shardwise.solver.progress import watching

    return watching(err, quiet=quiet)


@app.command("evaluate")
@takes(details=workload_options, of_run=run_options)
def evaluate_command(
    *,
    model: Annotated[str | None, typer.Argument(metavar="MODEL")] = None,
    cluster: Annotated[str | None, typer.Argument(metavar="CLUSTER")] = None,
    plan_path: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help=PLAN_FILE)] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", help="Tokens per sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option("--global-batch", help="Sequences per step.")] = None,
    details: dict[str, Any],
    rules: Annotated[str | None, typer.Option("--rules", help=f"{RULES}; megatron-core by default.")] = None,
    profile: ProfileOption = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Tensor parallel degree, default 1.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", help="Pipeline stages, default 1.")] = None,
    dp: Annotated[int | None, typer.Option("--dp", help="Replicas, default the devices that are left.")] = None,
    cp: Annotated[int | None, typer.Option("--cp", help="Context parallel degree, default 1.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", help="Expert parallel degree, default 1.")] = None,
    cp_comm_type: Annotated[
        str | None, typer.Option("--cp-comm-type", help="p2p, allgather, a2a or a2a+p2p; default what the pack takes.")
    ] = None,
    cp_a2a: Annotated[
        int | None, typer.Option("--cp-a2a", help="Neighbours that exchange sequence for heads under a2a+p2p.")
    ] = None,
    etp: Annotated[
        int | None, typer.Option("--etp", help="Expert tensor parallel degree, default tp; 1 where the pack says so.")
    ] = None,
    dp_replicate: Annotated[
        int | None, typer.Option("--dp-replicate", help="Whole copies among the replicas (HSDP), default 1.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help=f"{', '.join(SCHEDULES)}; by --vpp without it.")
    ] = None,
    vpp: Annotated[int | None, typer.Option("--vpp", help="Chunks per stage, default 1.")] = None,
    micro_batch: Annotated[int | None, typer.Option("--micro-batch", help="Sequences, default 1.")] = None,
    zero: Annotated[
        int | None,
        typer.Option("--zero", help="ZeRO stage 0, 1, 2 or 3 (FSDP); default 1, or FSDP where the pack has no 1."),
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel", help="Default: on where tp > 1 and the pack has it."
        ),
    ] = None,
    stages: Annotated[str | None, typer.Option("--stages", help="Layers per chunk, such as 6,6,6,4.")] = None,
    recompute: Annotated[str | None, typer.Option("--recompute", help="none (default), selective or full.")] = None,
    recompute_layers: Annotated[
        int | None, typer.Option("--recompute-layers", help="Of each chunk with --recompute full, default all.")
    ] = None,
    recompute_modules: Annotated[
        str | None,
        typer.Option(
            "--recompute-modules", help=f"With --recompute selective, default {CORE}: {', '.join(MODULES)}, by commas."
        ),
    ] = None,
    offload_layers: Annotated[
        int | None,
        typer.Option("--offload-layers", help="First layers whose saved activations are on the host, default 0."),
    ] = None,
    rank_order: Annotated[str | None, typer.Option("--rank-order", help="tp-dp-pp (default) or tp-pp-dp.")] = None,
    fix: FixOption = None,
    limit: LimitOption = None,
    of_run: dict[str, Any],
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan.")] = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Legality, time and memory of one plan, by part.

    Give MODEL, CLUSTER and degrees, or --plan; a plan brings its instance, of which any part can be replaced. Exit code
    0 for a legal plan that fits, 1 for one that is illegal, does not fit or breaks a limit, 2 for bad input.
    """
    del quiet  # nothing here takes long enough to report
    check_outputs(output=output, json=json_path)
    plan = None if plan_path is None else read_plan(plan_path)
    degrees = given(
        tp=tp, pp=pp, dp=dp, vpp=vpp, micro_batch=micro_batch, zero=zero, sequence_parallel=sequence_parallel,
        cp=cp, ep=ep, etp=etp, dp_replicate=dp_replicate, cp_comm_type=cp_comm_type, cp_a2a=cp_a2a,
        offload_layers=offload_layers,
    )  # fmt: skip
    shape = given(
        stages=stages,
        recompute=recompute,
        recompute_layers=recompute_layers,
        recompute_modules=None if recompute_modules is None else recompute_modules.split(","),
        rank_order=rank_order,
        schedule=schedule,
    )
    if plan is not None and (degrees or shape):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in {**degrees, **shape})
        raise InputError(f"--plan says all of the plan: leave out {options}")
    workload = given(seq_len=seq_len, global_batch=global_batch) | details
    if offload_layers:
        workload.setdefault("offload_activations", True)
    if plan is None and workload.get("offload_optimizer") == "auto":
        raise InputError("--offload-optimizer auto: a plan made of degrees has one share; give a number from 0 to 1")
    packs = given(rules=rules, profile=profile)
    limits = None if fix is None and limit is None else [*(fix or []), *(limit or [])]
    with with_terms(of_run) as terms:
        instance = evaluated_instance(model, cluster, plan, workload, packs, limits)

    from shardwise.solver.default_plan import degrees_from, plan_from_degrees
    from shardwise.solver.evaluate import evaluate
    from shardwise.solver.render import show_verdict

    if plan is None:
        shape["stages"] = numbers(stages)
        plan = plan_from_degrees(instance, degrees_from(instance, **degrees), **shape)
    result = evaluate(instance, plan)
    run = None if terms is None else run_of(result, terms)
    write_json(result.to_dict() | {"plan": plan.to_dict()} | run_document(terms, run), json_path)
    if output is not None:
        from shardwise.data.instance_document import instance_document

        write(replace(plan, instance=instance_document(instance), evaluation=result.to_dict()).to_json(), output)
    show_verdict(show(json_path, output), instance, plan, result, run)
    raise typer.Exit(DONE if result.admitted else NO)


def given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def evaluated_instance(
    model: str | None,
    cluster: str | None,
    plan: Plan | None,
    workload: dict[str, Any],
    packs: dict[str, str],
    limits: list[str] | None,
) -> Instance:
    """What the command says, completed by the instance saved in the plan."""
    saved = None if plan is None or plan.instance is None else saved_instance(plan.instance)
    if saved is not None and not (model or cluster or workload or packs or limits is not None):
        return saved
    parts: dict[str, Any] = {"model": model, "cluster": cluster, **dict.fromkeys(SIZES), **workload}
    if saved is not None:
        parts = {"model": saved.model, "cluster": saved.cluster, **saved.workload.to_dict()} | given(**parts)
        packs = {"rules": saved.rules.name, "profile": saved.profile.name} | packs
        limits = list(saved.limits.text) if limits is None else limits
    words = {"model": "MODEL", "cluster": "CLUSTER", **SIZES}
    missing = [word for name, word in words.items() if parts[name] is None]
    if missing:
        where = "" if plan is None else ", which the plan does not hold"
        raise InputError([f"{name} is missing{where}" for name in missing])
    return read_instance(
        parts.pop("model"),
        parts.pop("cluster"),
        training(parts),
        packs.get("rules", "megatron-core"),
        packs.get("profile"),
        limits or [],
    )


def numbers(text: str | None) -> list[int] | None:
    """`6,6,4` as whole numbers."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--stages {text!r} must be whole numbers separated by commas, such as 6,6,6,4") from None


@app.command("simulate")
def simulate_command(
    plan_path: Annotated[Path, typer.Argument(metavar="PLAN", help=PLAN_FILE)],
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Write the timeline as a Chrome trace.")
    ] = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """One step of a plan, pass by pass: its time, bubbles and memory, and a trace of it.

    The trace opens in chrome://tracing and ui.perfetto.dev. Exit code 0 for a legal plan that fits, 1 for one that is
    illegal, does not fit or breaks a limit, 2 for bad input.
    """
    from shardwise.solver.render import show_simulation
    from shardwise.solver.simulate import simulate
    from shardwise.solver.trace import chrome_trace, said_sampled

    check_outputs(output=output, json=json_path)
    plan = read_plan(plan_path)
    instance = saved_instance(plan.instance)
    simulation = simulate(instance, plan)
    if output is not None:
        write(json.dumps(chrome_trace(simulation), separators=(",", ":")), output)
        sampled = said_sampled(simulation)
        if sampled and not quiet:
            err.print(f"trace: {sampled}", highlight=False, soft_wrap=True)
    write_json(simulation.to_dict(), json_path)
    show_simulation(show(output, json_path), instance, simulation)
    raise typer.Exit(DONE if simulation.evaluation.admitted else NO)


@app.command("export")
def export_command(
    plan_path: Annotated[Path, typer.Argument(metavar="PLAN", help=PLAN_FILE)],
    to: Annotated[str, typer.Option("--to", help="megatron-core.")],
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="FILE")] = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Launch flags of a plan.

    Exit code 1 when the launcher does not accept the plan.
    """
    from shardwise.solver.evaluate import broken_rules
    from shardwise.solver.export.megatron import megatron_faults, megatron_flags, to_megatron

    del quiet
    if to not in LAUNCHERS:
        raise InputError(f"--to {to!r} is unknown; this release writes {', '.join(LAUNCHERS)}")
    check_outputs(output=output, json=json_path)
    plan = read_plan(plan_path)
    instance = saved_instance(plan.instance)
    faults = dict.fromkeys((*broken_rules(instance, plan), *megatron_faults(instance, plan)))
    if faults:
        for fault in faults:
            complain(f"the plan is not legal for {to}: {fault}")
        raise typer.Exit(NO)
    text, flags = to_megatron(instance, plan), megatron_flags(instance, plan)
    write_json({"launcher": to, "flags": flags}, json_path)
    if output is not None or json_path != "-":
        write(text.rstrip("\n"), output or "-")


@app.command("catalog")
def catalog_command(
    what: Annotated[str, typer.Argument(metavar="models|accelerators|clusters|profiles|rules")],
    name: Annotated[str | None, typer.Argument(metavar="NAME")] = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """What is known, each number with its source."""
    from shardwise.solver import catalog

    del quiet
    check_outputs(json=json_path)
    if what not in catalog.SECTIONS:
        raise InputError(f"catalog {what!r} is unknown; known are {', '.join(catalog.SECTIONS)}")
    rows = catalog.SECTIONS[what](name)
    write_json(rows, json_path)
    table = Table()
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else escape(str(value)) for value in row.values()))
    show(json_path).print(table)
