"""The command line.

Exit codes: 0 done (a plan; a legal plan that fits), 1 proven no, 2 bad input, 3 not known in time. Solver modules are
imported by the commands that need them, so that help and catalogues start at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from shardwise.data.faults import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

DONE, NO, BAD_INPUT, UNKNOWN = 0, 1, 2, 3
MAX_PLAN_BYTES = 64_000_000

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Proven hybrid-parallel plans for large language models."
)
plan_app = typer.Typer(no_args_is_help=True, help="Find the best plan and prove how good it is.")
app.add_typer(plan_app, name="plan")

out = Console()
err = Console(stderr=True)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Catalogue name, or path of a config.json.")]
ClusterArgument = Annotated[
    str, typer.Argument(metavar="CLUSTER", help="name[:nodes] of the catalogue, or a TOML file.")
]
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON (- for stdout).")
]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")]
SeqLenOption = Annotated[int, typer.Option("--seq-len", help="Tokens per sequence.")]
BatchOption = Annotated[int, typer.Option("--global-batch", help="Sequences per step.")]
PrecisionOption = Annotated[str, typer.Option("--precision", help="bf16, fp16 or fp8.")]
OptimizerOption = Annotated[str, typer.Option("--optimizer", help="adamw or sgd.")]
AttentionOption = Annotated[str, typer.Option("--attention", help="flash or unfused.")]
RulesOption = Annotated[str, typer.Option("--rules", help="Rule pack: megatron-core or free.")]
ProfileOption = Annotated[str, typer.Option("--profile", help="Software constants: a name, or a TOML file.")]
LimitOption = Annotated[
    list[str] | None, typer.Option("--limit", help='Such as "pp<=8" or "memory_gb<=70". Repeat it.')
]
FixOption = Annotated[list[str] | None, typer.Option("--fix", help="Such as tp=8. Repeat it.")]


def main() -> None:
    """Run a command; every fault of the input is told in words, never as a traceback."""
    try:
        app()
    except InputError as error:
        fail(error)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(UNKNOWN)
    except BrokenPipeError:
        sys.exit(DONE)
    except OSError as error:
        err.print(f"error: {error}", highlight=False, markup=False)
        sys.exit(BAD_INPUT)


def fail(error: InputError) -> NoReturn:
    """Print every fault and leave with the code for bad input."""
    for fault in error.faults:
        err.print(f"error: {fault}", highlight=False, markup=False, soft_wrap=True)
    sys.exit(BAD_INPUT)


def write(text: str, path: str) -> None:
    """To a file, or to stdout for `-`. A file is replaced whole or not at all."""
    if path == "-":
        sys.stdout.write(text + "\n")
        return
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(target)


def write_json(document: Any, path: str | None) -> None:
    if path is not None:
        write(json.dumps(document, indent=2), path)


def show(path: str | None) -> Console:
    """Where tables go: nowhere when JSON goes to stdout."""
    return Console(quiet=True) if path == "-" else out


def checked(make: Callable[[], Any]) -> Any:
    """What `make` returns; a value type's `ValueError` is bad input."""
    try:
        return make()
    except ValueError as error:
        raise InputError(str(error).split("; ")) from None


def training(seq_len: int, batch: int, precision: str, optimizer: str, attention: str) -> Any:
    from shardwise.data.workload import Training

    return checked(lambda: Training(seq_len, batch, precision, optimizer, attention))  # type: ignore[arg-type]


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
def plan_training(
    model: ModelArgument,
    cluster: ClusterArgument,
    seq_len: SeqLenOption,
    global_batch: BatchOption,
    precision: PrecisionOption = "bf16",
    optimizer: OptimizerOption = "adamw",
    attention: AttentionOption = "flash",
    objective: Annotated[str, typer.Option("--objective", help="step-time.")] = "step-time",
    rules: RulesOption = "megatron-core",
    profile: ProfileOption = "megatron-core",
    fix: FixOption = None,
    limit: LimitOption = None,
    time_limit: Annotated[float | None, typer.Option("--time-limit", help="Seconds.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="CP-SAT workers.")] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    no_prune: Annotated[bool, typer.Option("--no-prune", help="One CP-SAT model over all candidates.")] = False,
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan.")] = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Plan the training of MODEL on CLUSTER."""
    workload = gather_training(seq_len, global_batch, precision, optimizer, attention)
    with progress(quiet) as on_progress:
        from shardwise.solver.solve import build_instance, solve

        faults = list(workload.faults) if isinstance(workload, InputError) else []
        limits = [*(fix or []), *(limit or [])]
        try:
            from shardwise.data.workload import Training

            usable = Training(1, 1) if isinstance(workload, InputError) else workload
            instance = build_instance(model, cluster, usable, rules=rules, profile=profile, limits=limits)
        except InputError as error:
            raise InputError([*faults, *error.faults]) from None
        if faults:
            raise InputError(faults)
        result = solve(
            instance=instance,
            objective=objective,
            time_limit_s=time_limit,
            workers=workers,
            seed=seed,
            prune=not no_prune,
            on_progress=on_progress,
        )
    write_json(result.to_dict(), json_path)
    if output is not None and result.plan is not None:
        write(result.plan.to_json(), output)
    from shardwise.solver.render import show_result

    show_result(show(json_path), instance, result)
    raise typer.Exit({"OPTIMAL": DONE, "FEASIBLE": DONE, "INFEASIBLE": NO, "UNKNOWN": UNKNOWN}[result.status])


def gather_training(*arguments: Any) -> Any:
    """The workload, or its faults to be told together with others."""
    try:
        return training(*arguments)
    except InputError as error:
        return error


def progress(quiet: bool) -> Any:
    from shardwise.solver.progress import progress_line

    return progress_line(err, quiet=quiet)


def read_plan(path: Path) -> Any:
    """The plan of a file."""
    from shardwise.data.plan import Plan

    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise InputError(f"plan {path}: the file is larger than {MAX_PLAN_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"plan {path}: cannot be read: {error}") from None
    return Plan.from_json(text)


@app.command("evaluate")
def evaluate_command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL")] = None,
    cluster: Annotated[str | None, typer.Argument(metavar="CLUSTER")] = None,
    plan_path: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="A plan.json.")] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len")] = None,
    global_batch: Annotated[int | None, typer.Option("--global-batch")] = None,
    precision: PrecisionOption = "bf16",
    optimizer: OptimizerOption = "adamw",
    attention: AttentionOption = "flash",
    rules: RulesOption = "megatron-core",
    profile: ProfileOption = "megatron-core",
    tp: Annotated[int, typer.Option("--tp")] = 1,
    pp: Annotated[int, typer.Option("--pp")] = 1,
    dp: Annotated[int | None, typer.Option("--dp", help="Default: the devices that are left.")] = None,
    vpp: Annotated[int, typer.Option("--vpp")] = 1,
    micro_batch: Annotated[int, typer.Option("--micro-batch")] = 1,
    zero: Annotated[int, typer.Option("--zero")] = 1,
    sequence_parallel: Annotated[bool | None, typer.Option("--sequence-parallel/--no-sequence-parallel")] = None,
    stages: Annotated[str | None, typer.Option("--stages", help="Layers per chunk, such as 6,6,6,4.")] = None,
    recompute: Annotated[str, typer.Option("--recompute", help="none, selective or full.")] = "none",
    recompute_layers: Annotated[int | None, typer.Option("--recompute-layers")] = None,
    rank_order: Annotated[str, typer.Option("--rank-order", help="tp-dp-pp or tp-pp-dp.")] = "tp-dp-pp",
    fix: FixOption = None,
    limit: LimitOption = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Legality, time and memory of one plan, by part."""
    from shardwise.data.instance_document import instance_from_document
    from shardwise.solver.default_plan import plan_from_degrees
    from shardwise.solver.evaluate import evaluate
    from shardwise.solver.render import show_assumptions, show_evaluation

    del quiet  # nothing here takes long enough to report
    plan = read_plan(plan_path) if plan_path is not None else None
    if model is None or cluster is None:
        if plan is None:
            raise InputError("give MODEL and CLUSTER, or --plan FILE")
        instance = instance_from_document(plan.instance)
    else:
        instance = evaluation_instance(
            model, cluster, plan, seq_len, global_batch, (precision, optimizer, attention), rules, profile,
            [*(fix or []), *(limit or [])],
        )  # fmt: skip
    if plan is None:
        from shardwise.data.plan import Degrees

        sp = sequence_parallel if sequence_parallel is not None else tp > 1
        rest = dp if dp is not None else max(1, instance.cluster.device_count // max(1, tp * pp))
        degrees = checked(
            lambda: Degrees(tp=tp, pp=pp, dp=rest, vpp=vpp, micro_batch=micro_batch, zero=zero, sequence_parallel=sp)
        )
        plan = checked(
            lambda: plan_from_degrees(
                instance,
                degrees,
                stages=numbers(stages),
                recompute=recompute,  # type: ignore[arg-type]
                recompute_layers=recompute_layers,
                rank_order=rank_order,  # type: ignore[arg-type]
            )
        )
    result = evaluate(instance, plan)
    write_json(result.to_dict() | {"plan": plan.to_dict()}, json_path)
    console = show(json_path)
    console.print(f"[bold]{instance.model.name}[/bold] on {instance.cluster.name}", highlight=False)
    console.print(f"step time {result.step_time_s:.4f} s", highlight=False)
    show_evaluation(console, instance, plan, result)
    show_assumptions(console, instance)
    raise typer.Exit(DONE if result.admitted else NO)


def evaluation_instance(
    model: str,
    cluster: str,
    plan: Any,
    seq_len: int | None,
    global_batch: int | None,
    kinds: tuple[str, str, str],
    rules: str,
    profile: str,
    limits: list[str],
) -> Any:
    """The instance of `evaluate`; sizes that are not given come from the plan's file."""
    from shardwise.solver.solve import build_instance

    saved = plan.instance.get("workload", {}) if plan is not None and isinstance(plan.instance, dict) else {}
    length, batch = seq_len or saved.get("seq_len"), global_batch or saved.get("global_batch")
    missing = [name for name, value in (("--seq-len", length), ("--global-batch", batch)) if value is None]
    if missing:
        raise InputError([f"{name} is missing" for name in missing])
    workload = gather_training(length, batch, *kinds)
    if isinstance(workload, InputError):
        raise workload
    return build_instance(model, cluster, workload, rules=rules, profile=profile, limits=limits)


def numbers(text: str | None) -> list[int] | None:
    """`6,6,4` as whole numbers."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--stages {text!r} must be whole numbers separated by commas, such as 6,6,6,4") from None


@app.command("export")
def export_command(
    plan_path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    to: Annotated[str, typer.Option("--to", help="megatron-core.")],
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="FILE")] = None,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Launch flags of a plan."""
    from shardwise.data.instance_document import instance_from_document
    from shardwise.solver.evaluate import evaluate
    from shardwise.solver.export.megatron import megatron_flags, to_megatron

    del quiet
    if to != "megatron-core":
        raise InputError(f"--to {to!r} is unknown; this release writes megatron-core")
    plan = read_plan(plan_path)
    instance = instance_from_document(plan.instance)
    faults = evaluate(instance, plan).faults
    if faults:
        for fault in faults:
            err.print(f"illegal: {fault}", highlight=False, markup=False)
        raise typer.Exit(NO)
    write_json({"launcher": to, "flags": megatron_flags(instance, plan)}, json_path)
    if json_path != "-":
        write(to_megatron(instance, plan).rstrip("\n"), output or "-")


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
    if what not in catalog.SECTIONS:
        raise InputError(f"catalog {what!r} is unknown; known are {', '.join(catalog.SECTIONS)}")
    rows = catalog.SECTIONS[what](name)
    write_json(rows, json_path)
    table = Table()
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    show(json_path).print(table)
