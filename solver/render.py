"""Results as text for people: tables on a terminal."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from shardwise.data.model import Moe
from shardwise.data.plan import PLACED
from shardwise.solver.result import LAYOUT
from shardwise.solver.training_run import ENDLESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console

    from shardwise.data.instance import Instance
    from shardwise.data.plan import Degrees, Plan
    from shardwise.solver.evaluate import Evaluation, HostMemory
    from shardwise.solver.pareto import Front
    from shardwise.solver.result import Result
    from shardwise.solver.simulate import Simulation
    from shardwise.solver.training_run import TrainingRun

GB = 1e9
MIB = 2**20
PROVEN: dict[str, Callable[[Result], str]] = {
    "step-time": lambda r: f"step time {r.value:.4f} s, no plan is faster than {r.bound:.4f} s",
    "throughput-per-device": lambda r: f"{r.value:,.1f} tokens/s a device, no plan has more than {r.bound:,.1f}",
    "energy": lambda r: f"{r.value:.5g} J a token at the wall, no plan takes less than {r.bound:.5g}",
    "cost": lambda r: f"{r.value:.5g} USD per million tokens, no plan costs less than {r.bound:.5g}",
    "devices": lambda r: f"{r.value:,.0f} devices, no plan has fewer than {r.bound:,.0f}",
}
"""Value and bound of each objective in words."""
NOTHING = 1e-7
"""Shares below this are rounding."""


def show_result(console: Console, instance: Instance, result: Result, run: TrainingRun | None = None) -> None:
    """Everything that `plan training` prints."""
    _line(console, f"[bold]{escape(_title(instance))}: {result.status}[/bold]")
    if result.plan is None or result.evaluation is None or result.value is None or result.bound is None:
        for reason in result.reason:
            _line(console, f"  {escape(reason)}")
        show_search(console, result)
        return
    _line(console, f"{PROVEN[result.objective](result)} (gap {100 * (result.gap or 0.0):.4f} %)")
    if result.objective != "step-time":
        _line(console, f"step time {result.evaluation.step_time_s:.4f} s")
    show_evaluation(console, instance, result.plan, result.evaluation)
    show_training_run(console, run)
    show_search(console, result)
    show_alternatives(console, result)
    show_assumptions(console, instance)


def show_alternatives(console: Console, result: Result) -> None:
    """The other plans met, how sure the choice among all is, and which one is recommended."""
    robust = result.robustness
    if not result.alternatives or robust is None or result.plan is None or result.value is None:
        return
    table = Table(title="plans met", title_justify="left")
    table.add_column("", justify="right")
    least, unit = result.value, result.unit
    if result.objective == "devices" and result.evaluation is not None:  # all have as many, and differ in their step
        least, unit = result.evaluation.step_time_s, "s"
    for name in (unit, "against", "best in", "regret"):
        table.add_column(name, justify="right")
    table.add_column("differs from the best plan in", overflow="fold")

    def add(index: int, value: float, against: str, words: str) -> None:
        share, regret = robust.of(index)
        mark = " *" if index == robust.recommended else ""
        table.add_row(
            f"{index}{mark}", f"{value:.5g}", against,
            "-" if share is None else f"{100 * share:.0f} %",
            "-" if regret is None else f"{100 * regret:.2f} %",
            words,
        )  # fmt: skip

    add(0, least, "", "")
    for index, other in enumerate(result.alternatives, start=1):
        against = "a tie" if other.tie else f"{100 * (other.value / least - 1):+.2f} %"
        add(index, other.value, against, " ".join(f"{k}={v}" for k, v in other.differs(result.plan).items()))
    console.print(table)
    _line(
        console,
        f"each differs from every better one in at least one of {', '.join(LAYOUT)}; 1 and on were met by the search and are "
        "not proven to be the next best",
    )
    if robust.reason is not None:
        _line(console, f"not told how often each is the best: {robust.reason}")
        return
    _line(
        console,
        f"best in, regret: share of {robust.draws} draws of the profile's constants (seed {robust.seed}) in which a plan is "
        "the best of these, and how much worse than the best of them it is on the mean",
    )
    if robust.recommended:
        own, best = robust.of(robust.recommended)[1], robust.of(0)[1]
        assert own is not None
        assert best is not None
        _line(
            console,
            f"[yellow]recommended:[/yellow] plan {robust.recommended}, not the optimum: its expected regret is "
            f"{100 * own:.2f} %, that of the optimum {100 * best:.2f} %",
        )
    else:
        _line(console, "recommended: the optimum, which has the least expected regret too")


def show_front(console: Console, front: Front) -> None:
    """The points of `plan --pareto`, the fastest first."""
    table = Table(title=f"step time against {front.objective}", title_justify="left")
    for name in ("step s", front.unit, "bound", "gap", "devices"):
        table.add_column(name, justify="right")
    table.add_column("plan", overflow="fold")
    for point in front.points:
        result = point.result
        assert result.plan is not None
        table.add_row(
            f"{point.step_time_s:.4f}",
            f"{point.value:.5g}",
            f"{result.bound:.5g}",
            f"{100 * (result.gap or 0.0):.3f} %",
            str(result.plan.degrees.devices),
            degrees_in_words(result.plan),
        )
    console.print(table)
    apart = f"{100 * front.step:g} % of their step time apart" if front.step else "all that differ"
    state = "complete" if front.complete else "not complete: the time was too short for some points"
    _line(console, f"points {apart}; {state}. Each is the least of all plans that last no longer than its deadline.")


def show_verdict(
    console: Console, instance: Instance, plan: Plan, evaluation: Evaluation, run: TrainingRun | None = None
) -> None:
    """Everything that `evaluate` prints."""
    _line(console, f"[bold]{escape(_title(instance))}: {verdict_in_words(evaluation)}[/bold]")
    _line(console, f"step time {evaluation.step_time_s:.4f} s")
    show_evaluation(console, instance, plan, evaluation)
    show_training_run(console, run)
    show_assumptions(console, instance)


def verdict_in_words(evaluation: Evaluation) -> str:
    """Legality and fit."""
    verdict = "legal" if evaluation.legal else "illegal"
    verdict += ", fits" if evaluation.fits else ", does not fit"
    return verdict + (", breaks limits" if evaluation.limit_faults else "")


def show_simulation(console: Console, instance: Instance, simulation: Simulation) -> None:
    """Everything that `simulate` prints."""
    plan, evaluation = simulation.plan, simulation.evaluation
    _line(console, f"[bold]{escape(_title(instance))}: {verdict_in_words(evaluation)}[/bold]")
    _line(console, f"step time {simulation.step_time_s:.4f} s, schedule {plan.schedule}")
    _line(console, f"{degrees_in_words(plan)}; {simulation.micro_batches} micro-batches")
    if simulation.micro_batches != plan.micro_batches:
        _line(
            console,
            f"[yellow]simulated with {simulation.micro_batches} micro-batches:[/yellow] the schedule does not run with "
            f"the plan's {plan.micro_batches}",
        )
    capacity = evaluation.capacity_mib * MIB / GB
    table = Table(title="stages", title_justify="left")
    for name in ("stage", "busy s", "after s", "bubble s", "bubble", "in flight", f"peak GB of {capacity:.1f}"):
        table.add_column(name, justify="right")
    busy = simulation.passes.busy_s
    for k, (tail, memory) in enumerate(zip(simulation.tails, simulation.memory, strict=True)):
        table.add_row(
            str(k), f"{busy[k]:.3f}", f"{tail.total_s:.3f}", f"{simulation.bubble_s[k]:.3f}",
            f"{100 * simulation.bubble_share[k]:.1f} %", str(memory.peak_in_flight), f"{memory.peak_bytes / GB:.1f}",
        )  # fmt: skip
    console.print(table)
    _line(
        console, "after: exposed gradient sync, optimizer and parameter gather; in flight: micro-batches x chunks, most"
    )
    show_faults(console, evaluation)


def show_search(console: Console, result: Result) -> None:
    """The universe, and what became of its candidates."""
    said, counts = result.report.get("universe", {}), result.report.get("candidates", {})
    if said:
        limits = ", ".join(said["limits"]) or "none"
        _line(
            console,
            escape(
                f"universe: rules {said['rules']}, profile {said['profile']}; schedules {', '.join(said['schedules'])}; "
                f"zero {', '.join(map(str, said['zero_stages']))}; vpp <= {said['max_vpp']}, micro_batch <= "
                f"{said['max_micro_batch']}; stages {said['stages']}; recompute {said['recompute']}; placements "
                f"{said['placements']}; limits {limits}"
            ),
        )
    if counts:
        pruned = {name.removeprefix("pruned_by_"): n for name, n in counts.items() if name.startswith("pruned") and n}
        parts = [f"{counts['enumerated']} enumerated"]
        parts += [f"{n} pruned by {name.replace('_', ' ')}" for name, n in pruned.items()]
        parts.append(f"{counts['solved']} solved by CP-SAT")
        solved = result.report["cp_sat"]
        cuts = f"CP-SAT solves {solved['solves']}, critical-path cuts {solved['cuts']} in rounds {solved['cut_rounds']}"
        _line(console, f"candidates: {', '.join(parts)}; {cuts}; {result.report['wall_time_s']:.2f} s")


def show_evaluation(console: Console, instance: Instance, plan: Plan, evaluation: Evaluation) -> None:
    """Degrees, stages, time and memory of a plan, and the rules it breaks."""
    _line(console, f"{degrees_in_words(plan)}; {plan.micro_batches} micro-batches, schedule {plan.schedule}")
    _line(
        console,
        f"{evaluation.tokens_per_s:,.0f} tokens/s ({evaluation.tokens_per_s_per_device:,.0f} per device), model FLOPs "
        f"utilization {100 * evaluation.model_flops_utilization:.1f} %, {evaluation.idle_devices} idle devices",
    )
    for table in (
        _stages(plan, evaluation),
        _memory(evaluation),
        _time(evaluation),
        _placement(instance, plan),
    ):
        console.print(table)
    _line(console, escape(_crossings(instance, plan)))
    peak, band = evaluation.peak_memory_bytes / GB, evaluation.memory_band
    _line(
        console,
        f"memory {peak:.1f} GB, {peak * (1 - band):.1f} to {peak * (1 + band):.1f} within the band of the profile: "
        f"{evaluation.verdict}",
    )
    if evaluation.host is not None:
        _line(console, _host(evaluation.host))
    _line(console, escape(_energy(evaluation)))
    for risk in evaluation.risks:
        _line(console, f"[yellow]risk:[/yellow] {escape(risk)}")
    show_faults(console, evaluation)


def show_training_run(console: Console, run: TrainingRun | None) -> None:
    """Time to train, device-hours, cost, energy and goodput, where a run was asked for."""
    if run is None:
        return
    terms, checkpointing = run.terms, run.time.checkpointing
    if run.time.ends:
        length = (
            f"{run.days:,.2f} days, {run.device_hours:,.0f} device-hours on {run.devices} devices of {run.nodes} nodes"
        )
    else:
        length = ENDLESS
    _line(
        console,
        f"time to train on {terms.tokens:,} tokens: {run.steps:,} steps, {length}; straggler margin "
        f"{100 * terms.straggler_margin:g} %",
    )
    if run.cost_usd is None:
        _line(console, f"cost is not known: {run.cost_reason}")
    elif run.time.ends:
        whose = "of the accelerator" if terms.price is None else "given"
        _line(
            console,
            f"cost {run.cost_usd:,.0f} USD, at {run.price_usd_per_hour:g} USD per device-hour, the price {whose}",
        )
    if run.energy_mwh is None:
        _line(console, escape(f"energy of the run is not known: {run.energy_reason}"))
    else:
        mwh = run.energy_mwh
        _line(console, f"energy of the run {mwh.value:,.4g} MWh ({mwh.low:,.4g} to {mwh.high:,.4g})")
    if checkpointing is None:
        _line(console, f"goodput is not told: {run.goodput_reason}")
        return
    _line(
        console,
        f"goodput {100 * checkpointing.goodput:.2f} %: a failure every {checkpointing.mtbf_s / 3600:,.4g} h over "
        f"{run.nodes} nodes of {terms.node_mtbf_hours:,g} h, {checkpointing.expected_failures:,.1f} expected; a checkpoint "
        f"every {checkpointing.interval_steps:,} steps ({checkpointing.interval_s:,.0f} s; Daly "
        f"{checkpointing.daly_interval_s:,.0f} s, Young {checkpointing.young_interval_s:,.0f} s) takes "
        f"{terms.checkpoint_s:g} s, a restart {terms.restart_s:g} s",
    )


def show_faults(console: Console, evaluation: Evaluation) -> None:
    """Why a plan is not admitted."""
    for fault in evaluation.faults:
        _line(console, f"[red]illegal:[/red] {escape(fault)}")
    for fault in evaluation.limit_faults:
        _line(console, f"[red]breaks a limit:[/red] {escape(fault)}")
    if evaluation.host is not None and not evaluation.host.fits:
        _line(console, f"[red]does not fit:[/red] {_host(evaluation.host)}")
    if not evaluation.device_fits:
        _line(
            console,
            f"[red]does not fit:[/red] stage {evaluation.worst_stage} needs "
            f"{evaluation.peak_memory_bytes / GB:.1f} GB, {evaluation.capacity_mib * MIB / GB:.1f} GB usable",
        )


def _host(host: HostMemory) -> str:
    """What the hosts hold of the optimizer."""
    return (
        f"host memory of a node {host.node_bytes / GB:,.1f} GB of {host.node_capacity_bytes / GB:,.1f} GB usable, "
        f"{max(host.stages) / GB:.1f} GB for each of {host.devices} devices"
    )


def _energy(evaluation: Evaluation) -> str:
    energy = evaluation.energy
    if energy is None:
        return f"energy is not known: {evaluation.energy_reason}"
    step, token, watts = energy.joules_per_step, energy.joules_per_token, energy.watts_per_device
    return (
        f"energy at the wall {step.value / 1e6:.3g} MJ a step ({step.low / 1e6:.3g} to {step.high / 1e6:.3g}), "
        f"{token.value:.3g} J a token, {watts.value:.0f} W per device slot; "
        f"fitted {', '.join(energy.fitted)}, assumed {', '.join(energy.assumed)}"
    )


def show_assumptions(console: Console, instance: Instance) -> None:
    """What the inputs left unsaid."""
    assumed = [*instance.model.assumed, *instance.cluster.assumed]
    if instance.workload.assumes_even_routing and any(isinstance(kind.ffn, Moe) for kind in instance.model.kinds):
        assumed.append("tokens are routed evenly over the experts; imbalance would slow plans with ep > 1 most")
    for line in assumed:
        _line(console, f"assumed: {escape(line)}")


def _line(console: Console, text: str) -> None:
    """A line that the terminal wraps, so that a file or a pipe gets it whole."""
    console.print(text, highlight=False, soft_wrap=True)


def _title(instance: Instance) -> str:
    return f"{instance.model.name} on {instance.cluster.name}"


def degrees_in_words(plan: Plan) -> str:
    """The degrees on one line, those of 1 that are rarely more left out."""
    return f"{words_of_degrees(plan.degrees)} ({plan.degrees.devices} devices)"


def words_of_degrees(d: Degrees) -> str:
    """The degrees alone."""
    sequence = " sp" if d.sequence_parallel else ""
    others = [
        ("cp", d.cp, 1),
        ("cp_comm_type", d.cp_comm_type, "p2p"),
        ("cp_a2a", d.cp_a2a, 1),
        ("ep", d.ep, 1),
        ("etp", d.etp, d.tp),
        ("dp_replicate", d.dp_replicate, 1),
        ("offload_optimizer", f"{d.offload_optimizer:g}", "0"),
        ("offload_param", int(d.offload_param), 0),
        ("offload_layers", d.offload_layers, 0),
    ]
    more = "".join(f"{name}={value} " for name, value, usual in others if value != usual)
    return f"tp={d.tp}{sequence} pp={d.pp} vpp={d.vpp} dp={d.dp} {more}micro_batch={d.micro_batch} zero={d.zero}"


def difference_in_words(other: Plan, best: Plan) -> str:
    """The degrees of another plan, or what else tells it from the best one."""
    if other.degrees != best.degrees:
        return degrees_in_words(other)
    if other.placement != best.placement:
        placement = other.placement
        factors = " ".join(
            f"{axis}={'x'.join(map(str, placement.factors(axis)))}" for axis in placement.rank_order.split("-")
        )
        return f"the same degrees placed {factors}, rank order {placement.rank_order}"
    return f"the same degrees with stages of {' '.join(map(str, other.chunk_layers))} layers"


def _stages(plan: Plan, evaluation: Evaluation) -> Table:
    """Runs of equal stages in one row."""
    capacity = evaluation.capacity_mib * MIB / GB
    table = Table(
        "stage", "layers", "chunks", "recompute", f"GB of {capacity:.1f}", title="stages", title_justify="left"
    )
    keyed = [(stage.layers, stage.chunks, stage.recompute_words) for stage in plan.stages]
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
        if abs(value) > NOTHING * total:
            table.add_row(
                name.replace("_", " "), f"{value / unit:.3f}", f"{100 * value / total:.1f} %" if total else "-"
            )
    return table


def _time(evaluation: Evaluation) -> Table:
    parts = evaluation.parts
    items = [(name, getattr(parts, name)) for name in parts.__slots__]
    title = f"step time of stage {evaluation.busiest_stage}, the busiest"
    return _rows(Table("part", "s", "share", title=title, title_justify="left"), items, 1.0, evaluation.step_time_s)


def _memory(evaluation: Evaluation) -> Table:
    worst = evaluation.stages[evaluation.worst_stage]
    items = [(name, getattr(worst, name)) for name in worst.__slots__] + [("total", worst.total)]
    capacity = evaluation.capacity_mib * MIB
    title = f"memory of stage {evaluation.worst_stage}, the fullest, of {capacity / GB:.1f} GB usable"
    return _rows(Table("line", "GB", "of usable", title=title, title_justify="left"), items, GB, capacity)


def _placement(instance: Instance, plan: Plan) -> Table:
    p = plan.placement
    table = Table(
        *("level", "link", *PLACED, "members used"),
        title=f"placement, rank order {p.rank_order}",
        title_justify="left",
    )
    for level, link in enumerate(instance.levels):
        factors = (str(p.factors(axis)[level]) for axis in PLACED)
        table.add_row(escape(instance.cluster.levels[level]), escape(link.name), *factors, str(p.blocks[level]))
    return table


def _crossings(instance: Instance, plan: Plan) -> str:
    """Which axis communicates over which level."""
    from shardwise.formulations.coefficients import groups_of  # reads numpy, which catalogues and help can do without

    members = {axis: plan.placement.factors(axis) for axis in PLACED}
    spread = groups_of(instance, plan.degrees, plan.placement).ep
    if spread:
        members["ep"] = tuple(size for size, _ in spread[0])
    said = []
    for axis, factors in members.items():
        crossed = [name for name, factor in zip(instance.cluster.levels, factors, strict=True) if factor > 1]
        if crossed:
            said.append(f"{axis} over {' and '.join(crossed)}")
    return f"traffic: {', '.join(said) or 'none between devices'}"
