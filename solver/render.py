"""Results as text for people: tables on a terminal."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table

from shardwise.data.model import Moe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan
    from shardwise.solver.evaluate import Evaluation
    from shardwise.solver.result import Result

GB = 1e9
MIB = 2**20


def show_result(console: Console, instance: Instance, result: Result) -> None:
    """Everything that `plan training` prints."""
    console.print(f"[bold]{instance.model.name}[/bold] on {instance.cluster.name}: {result.status}", highlight=False)
    if result.plan is None or result.evaluation is None or result.value is None:
        for reason in result.reason:
            console.print(f"  {reason}", highlight=False, soft_wrap=True)
        return
    gap = result.gap or 0.0
    console.print(
        f"step time {result.value:.4f} s, no plan is faster than {result.bound:.4f} s (gap {100 * gap:.4f} %)",
        highlight=False,
    )
    show_evaluation(console, instance, result.plan, result.evaluation)
    counts = result.report["candidates"]
    pruned = {name.removeprefix("pruned_by_"): n for name, n in counts.items() if name.startswith("pruned") and n}
    console.print(
        f"candidates: {counts['enumerated']} enumerated, "
        + ", ".join(f"{n} pruned by {name.replace('_', ' ')}" for name, n in pruned.items())
        + f", {counts['solved']} closed by CP-SAT; {result.report['wall_time_s']:.2f} s",
        highlight=False,
        soft_wrap=True,
    )
    for other in result.alternatives[:3]:
        words = "tie" if other.tie else f"+{100 * (other.value / result.value - 1):.2f} %"
        console.print(f"also met: {_degrees(other.plan)} ({words})", highlight=False)
    show_assumptions(console, instance)


def show_evaluation(console: Console, instance: Instance, plan: Plan, evaluation: Evaluation) -> None:
    """Degrees, stages, time and memory of a plan."""
    console.print(
        f"{_degrees(plan)}; {plan.micro_batches} micro-batches, schedule {plan.schedule}\n"
        f"{evaluation.tokens_per_s:,.0f} tokens/s ({evaluation.tokens_per_s_per_device:,.0f} per device), model FLOPs "
        f"utilization {100 * evaluation.model_flops_utilization:.1f} %, {evaluation.idle_devices} idle devices",
        highlight=False,
    )
    console.print(_stages(plan, evaluation))
    console.print(_time(evaluation))
    console.print(_memory(evaluation))
    console.print(_placement(instance, plan))
    for fault in (*evaluation.faults, *evaluation.limit_faults):
        console.print(f"[red]illegal:[/red] {fault}", highlight=False)
    if not evaluation.fits:
        console.print(
            f"[red]does not fit:[/red] stage {evaluation.worst_stage} needs {evaluation.peak_memory_bytes / GB:.1f} GB, "
            f"{evaluation.capacity_mib * MIB / GB:.1f} GB usable",
            highlight=False,
        )


def show_assumptions(console: Console, instance: Instance) -> None:
    """What the inputs left unsaid."""
    assumed = [*instance.model.assumed, *instance.cluster.assumed]
    if any(isinstance(kind.ffn, Moe) for kind in instance.model.kinds):
        assumed.append("tokens are routed evenly over the experts; ep=1, expert parallelism is not searched yet")
    for line in assumed:
        console.print(f"assumed: {line}", highlight=False, soft_wrap=True)


def _degrees(plan: Plan) -> str:
    d = plan.degrees
    sequence = " sp" if d.sequence_parallel else ""
    return (
        f"tp={d.tp}{sequence} pp={d.pp} vpp={d.vpp} dp={d.dp} micro_batch={d.micro_batch} zero={d.zero} "
        f"({d.devices} devices)"
    )


def _stages(plan: Plan, evaluation: Evaluation) -> Table:
    """Runs of equal stages in one row."""
    table = Table("stage", "layers", "chunks", "recompute", "memory GB", title="stages", title_justify="left")
    keyed = [
        (stage.layers, stage.chunks, f"{stage.recompute} {stage.recompute_layers or ''}".strip())
        for stage in plan.stages
    ]
    start = 0
    for (layers, chunks, recompute), run in groupby(keyed):
        count = len(list(run))
        memory = [stage.total / GB for stage in evaluation.stages[start : start + count]]
        name = str(start) if count == 1 else f"{start}-{start + count - 1}"
        parts = " ".join(map(str, chunks)) if len(chunks) > 1 else ""
        spread = f"{max(memory):.1f}" if count == 1 else f"{max(memory):.1f} to {min(memory):.1f}"
        table.add_row(name, str(layers), parts, recompute, spread)
        start += count
    return table


def _rows(table: Table, items: Iterable[tuple[str, float]], unit: float, total: float) -> Table:
    for name, value in items:
        if value:
            table.add_row(name.replace("_", " "), f"{value / unit:.3f}", f"{100 * value / total:.1f} %")
    return table


def _time(evaluation: Evaluation) -> Table:
    parts = evaluation.parts
    items = [(name, getattr(parts, name)) for name in parts.__slots__]
    title = f"step time, along the path that is busy on stage {evaluation.busiest_stage}"
    return _rows(Table("part", "s", "share", title=title, title_justify="left"), items, 1.0, evaluation.step_time_s)


def _memory(evaluation: Evaluation) -> Table:
    worst = evaluation.stages[evaluation.worst_stage]
    items = [(name, getattr(worst, name)) for name in worst.__slots__] + [("total", worst.total)]
    capacity = evaluation.capacity_mib * MIB
    title = f"memory of stage {evaluation.worst_stage}, the fullest, of {capacity / GB:.1f} GB usable"
    return _rows(Table("line", "GB", "of usable", title=title, title_justify="left"), items, GB, capacity)


def _placement(instance: Instance, plan: Plan) -> Table:
    title = f"placement, rank order {plan.placement.rank_order}"
    table = Table("level", "link", "tp", "pp", "dp", "members used", title=title, title_justify="left")
    names = instance.cluster.levels
    for level, link in enumerate(instance.levels):
        p = plan.placement
        table.add_row(
            names[level], link.name, str(p.tp[level]), str(p.pp[level]), str(p.dp[level]), str(p.blocks[level])
        )
    return table
