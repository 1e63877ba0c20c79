"""The sections of a plan's page. Every number of a plan is that of `evaluate` and `simulate`; searches are told as saved."""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Any

from shardwise.data.faults import InputError
from shardwise.data.model import Moe
from shardwise.data.profile import list_profiles, profile_document
from shardwise.formulations.objective import Objective
from shardwise.solver.binding import limits_of
from shardwise.solver.crossings import crossings
from shardwise.solver.render import degrees_in_words, difference_in_words, verdict_in_words
from shardwise.solver.report.blocks import (
    Block,
    Cell,
    Domain,
    Note,
    Section,
    cut,
    items,
    number,
    table,
)
from shardwise.solver.report.charts import bars, stacked
from shardwise.solver.report.timeline import shown_stages, timeline
from shardwise.solver.result import Alternative
from shardwise.solver.simulate import simulate

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan
    from shardwise.solver.evaluate import Evaluation
    from shardwise.solver.saved import Certificate, Saved

GB = 1e9
SAME = 1e-9
"""Relative difference of a saved value from the evaluated one that is rounding."""
MAX_SIMULATED = 400_000
"""Passes; more take longer than a page is worth."""
MAX_MEMBERS = 16
MAX_FAULTS = 20
VALUED = {
    "step-time": "step time",
    "throughput-per-device": "tokens per second and device",
    "energy": "energy a token at the wall",
    "cost": "cost",
    "devices": "devices",
}
MORE = {"minimise": "less", "maximise": "more"}
MEANING = {
    "tp": "tensor parallel: every layer split",
    "pp": "pipeline stages",
    "dp": "data-parallel replicas",
    "cp": "context parallel: every sequence split",
    "cp_comm_type": "how context parallelism exchanges keys and values",
    "cp_a2a": "neighbours that exchange sequence for heads",
    "ep": "expert parallel: experts spread",
    "etp": "every expert split",
    "vpp": "chunks of layers per stage",
    "micro_batch": "sequences per micro-batch",
    "zero": "ZeRO stage; 3 is FSDP",
    "dp_replicate": "whole copies among the replicas (HSDP)",
    "sequence_parallel": "activations between the split layers split too",
    "offload_optimizer": "share of the optimizer on the host",
    "offload_param": "sharded weights on the host",
    "offload_layers": "first layers whose saved activations are on the host",
}


def headline(instance: Instance, plan: Plan, evaluation: Evaluation, certificate: Certificate | None) -> Section:
    """Step time, certificate, verdict, and what breaks."""
    e = evaluation
    blocks: list[Block] = []
    if certificate is None:
        blocks.append(
            Note(
                "The file holds no certificate: a report of the result that plan --json writes tells status and bound."
            )
        )
    else:
        blocks += proof(certificate, _worth(certificate, instance, e))
    for mark, faults in (("illegal", e.faults), ("breaks a limit", e.limit_faults)):
        blocks += [Note(cut(fault), mark, "bad") for fault in faults[:MAX_FAULTS]]
        if len(faults) > MAX_FAULTS:
            blocks.append(Note(f"{len(faults) - MAX_FAULTS} more faults are left out.", mark, "bad"))
    blocks += [Note(risk, "risk", "bad") for risk in e.risks]
    peak = e.peak_memory_bytes / GB
    rows = [
        (Cell("step time"), number(e.step_time_s, f"{e.step_time_s:.4f} s", "step_time_s")),
        (Cell("verdict"), Cell(verdict_in_words(e))),
        (Cell("tokens per second"), number(e.tokens_per_s, f"{e.tokens_per_s:,.0f}", "tokens_per_s")),
        (
            Cell("tokens per second and device"),
            number(e.tokens_per_s_per_device, f"{e.tokens_per_s_per_device:,.0f}", "tokens_per_s_per_device"),
        ),
        (
            Cell("model FLOPs utilization"),
            number(e.model_flops_utilization, f"{100 * e.model_flops_utilization:.1f} %", "model_flops_utilization"),
        ),
        (
            Cell(f"memory of stage {e.worst_stage}, the fullest"),
            number(
                peak,
                f"{peak:.1f} GB, {peak * (1 - e.memory_band):.1f} to {peak * (1 + e.memory_band):.1f}: {e.verdict}",
            ),
        ),
        (
            Cell("devices"),
            number(e.devices, f"{e.devices:,}, {e.idle_devices:,} idle, on {e.nodes:,} nodes", "devices"),
        ),
    ]
    if e.energy is None:
        rows.append((Cell("energy"), Cell(f"not known: {e.energy_reason}")))
    else:
        step, token = e.energy.joules_per_step, e.energy.joules_per_token
        mega = tuple(value / 1e6 for value in (step.value, step.low, step.high))
        rows.append(
            (
                Cell("energy at the wall, a step"),
                number(
                    step.value,
                    f"{mega[0]:.3g} MJ, {mega[1]:.3g} to {mega[2]:.3g}",
                    "joules_per_step",
                ),
            )
        )
        rows.append((Cell("energy a token"), number(token.value, f"{token.value:.3g} J", "joules_per_token")))
    return Section("headline", "Result", (*blocks, *table("The plan in numbers", ("quantity", "value"), rows)))


def _worth(certificate: Certificate, instance: Instance, evaluation: Evaluation) -> float | None:
    """What the certificate's objective makes of the plan; a cost only with the price, which files do not hold."""
    goal = Objective(certificate.objective)
    if goal.name == "devices":
        return evaluation.devices
    if goal.name == "cost" or goal.faults(instance):
        return None
    return goal.value(instance, goal.seconds(instance, evaluation))


def proof(certificate: Certificate, worth: float | None) -> list[Block]:
    """What a search proved, and whether it speaks of this plan, which is `worth` so much where that is known."""
    c = certificate
    goal = Objective(c.objective)
    words = {
        "OPTIMAL": ("proven optimal within the universe below", "good"),
        "FEASIBLE": ("a plan with a proven bound; the search did not close", "plain"),
        "INFEASIBLE": ("proven: no plan exists", "bad"),
        "UNKNOWN": ("not known in time", "plain"),
    }[c.status]
    out: list[Block] = [Note(words[0], c.status, words[1])]  # type: ignore[arg-type]
    if c.value is not None and c.bound is not None and c.gap is not None:
        rows = [
            (Cell(VALUED[c.objective]), number(c.value, f"{c.value:,.5g} {goal.unit}", "value")),
            (Cell(f"no plan has {MORE[goal.sense]} than"), number(c.bound, f"{c.bound:,.5g} {goal.unit}", "bound")),
            (Cell("gap"), number(c.gap, f"{100 * c.gap:.4f} %", "gap")),
        ]
        out += table("Certificate", ("quantity", "value"), rows)
        if worth is not None and abs(c.value - worth) > SAME * max(abs(c.value), abs(worth)):
            out.append(
                Note(
                    f"the certificate speaks of {c.value:.6g} {goal.unit}, this plan is evaluated to {worth:.6g} {goal.unit}: "
                    "the file was edited, or written by another release",
                    "does not match",
                    "bad",
                )
            )
    return out


def degrees(instance: Instance, plan: Plan) -> Section:
    """The degrees, and over which levels each is spread."""
    levels = instance.cluster.levels
    rows = []
    for name, value in plan.degrees.to_dict().items():
        where = ""
        if name in ("tp", "pp", "dp", "cp"):
            factors = plan.placement.factors(name)
            spread = (f"{level} {n}" for level, n in zip(levels, factors, strict=True) if n > 1)
            where = " x ".join(spread) or "not split"
        said = ("yes" if value else "no") if isinstance(value, bool) else str(value)
        shown = Cell(said) if isinstance(value, str) else number(value, said, name)
        rows.append((Cell(name), shown, Cell(MEANING[name]), Cell(cut(where))))
    notes = Note(
        f"{degrees_in_words(plan)}; {plan.micro_batches} micro-batches, schedule {plan.schedule}, rank order "
        f"{plan.placement.rank_order}"
    )
    columns = ("degree", "value", "what it is", "over which levels")
    return Section("degrees", "Degrees", (notes, *table("Degrees of the plan", columns, rows)))


def step_time(evaluation: Evaluation) -> Section:
    """Where the step goes."""
    e, total = evaluation, evaluation.step_time_s
    parts = asdict(e.parts)
    named = [(name.replace("_", " "), value) for name, value in parts.items()]
    chart = bars("time-chart", f"Step time of stage {e.busiest_stage}, the busiest, by part", named, "s")
    rows = [
        (
            Cell(name.replace("_", " ")),
            number(value, f"{rounded:.4f}", f"{name}_s"),
            number(value / total, f"{100 * rounded / total:.2f} %"),
        )
        for name, value in parts.items()
        for rounded in (value if abs(value) > SAME * total else 0.0,)
    ]
    rows.append((Cell("step"), number(total, f"{total:.4f}", "step_s"), number(1.0, "100 %")))
    note = Note("Fill and drain is what the busiest stage waits for others.")
    return Section("step-time", "Step time", (chart, note, *table("Step time by part", ("part", "s", "share"), rows)))


def memory(plan: Plan, evaluation: Evaluation) -> Section:
    """Memory of every stage, line by line."""
    names = list(asdict(evaluation.stages[0]))
    words = [name.replace("_", " ") for name in names]
    capacity = evaluation.capacity_mib * 2**20 / GB
    lines = {k: [getattr(evaluation.stages[k], name) / GB for name in names] for k in shown_stages(plan.degrees.pp)}
    if evaluation.worst_stage not in lines:
        worst = evaluation.stages[evaluation.worst_stage]
        lines[evaluation.worst_stage] = [getattr(worst, name) / GB for name in names]
    chart = stacked(
        "memory-chart",
        "Memory of one device of each stage",
        [(f"stage {k}", values) for k, values in sorted(lines.items())],
        words,
        capacity,
        "GB",
    )
    rows = []
    for k, (stage, own) in enumerate(zip(evaluation.stages, plan.stages, strict=True)):
        rows.append(
            (
                number(k, f"stage {k}"),
                number(own.layers, str(own.layers)),
                Cell(own.recompute_words),
                *(
                    number(getattr(stage, name) / GB, f"{getattr(stage, name) / GB:.2f}", f"{name}_gb")
                    for name in names
                ),
                number(stage.total / GB, f"{stage.total / GB:.2f}", "total_gb"),
                number(stage.total / GB / capacity, f"{100 * stage.total / GB / capacity:.1f} %"),
            )
        )
    sampled = (
        [Note(f"Sampled: {len(lines)} of {plan.degrees.pp} stages are drawn.")] if len(lines) < plan.degrees.pp else []
    )
    columns = ("stage", "layers", "recompute", *words, "total", "of capacity")
    listed = table("Memory of one device of each stage, in GB", columns, rows)
    return Section("memory", "Memory", (chart, *sampled, *listed))


def pipeline(instance: Instance, plan: Plan) -> Section:
    """The simulated step."""
    passes = 3 * plan.micro_batches * max(len(plan.layout.stage), 1)
    try:
        if passes > MAX_SIMULATED:
            raise InputError(f"up to {passes} passes, more than the {MAX_SIMULATED} that a page simulates")
        simulation = simulate(instance, plan)
    except InputError as error:
        notes = tuple(Note(f"The timeline is not drawn: {fault}.") for fault in error.faults)
        return Section("timeline", "Pipeline timeline", notes)
    chart, left_out = timeline(simulation)
    busy = simulation.passes.busy_s
    rows = [
        (
            number(k, f"stage {k}"),
            number(busy[k], f"{busy[k]:.3f}"),
            number(tail.total_s, f"{tail.total_s:.3f}"),
            number(simulation.bubble_s[k], f"{simulation.bubble_s[k]:.3f}", "bubble_s"),
            number(simulation.bubble_share[k], f"{100 * simulation.bubble_share[k]:.1f} %"),
            number(held.peak_in_flight, str(held.peak_in_flight)),
            number(held.peak_bytes / GB, f"{held.peak_bytes / GB:.1f}"),
        )
        for k, (tail, held) in enumerate(zip(simulation.tails, simulation.memory, strict=True))
    ]
    columns = ("stage", "busy s", "after s", "bubble s", "bubble", "in flight", "peak GB")
    note = Note(
        "After: exposed gradient sync, optimizer and parameter gather. In flight: micro-batches x chunks, at most."
    )
    return Section(
        "timeline",
        "Pipeline timeline",
        (chart, *map(Note, left_out), *table("The simulated step by stage", columns, rows), note),
    )


def placement(instance: Instance, plan: Plan, evaluation: Evaluation) -> Section:
    """The cluster tree with the ranks on it, and what crosses which level."""
    levels = instance.cluster.levels
    rows = []
    for crossing in crossings(instance, plan, evaluation.busiest_stage):
        each = crossing.bytes_per_call
        outermost = max(level for level, members in enumerate(crossing.members) if members > 1)
        rows.append(
            (
                Cell(crossing.axis),
                Cell(crossing.what),
                Cell(crossing.op.replace("_", "-")),
                Cell(
                    cut(" x ".join(f"{level} {n}" for level, n in zip(levels, crossing.members, strict=True) if n > 1))
                ),
                Cell(cut(f"{levels[outermost]} ({instance.levels[outermost].name})")),
                Cell("buckets") if crossing.calls is None else number(crossing.calls, f"{crossing.calls:,}"),
                Cell("") if each is None else number(each, f"{each / 1e6:,.1f}"),
                number(crossing.bytes_per_step, f"{crossing.bytes_per_step / GB:,.2f}", "bytes_per_step"),
            )
        )
    if not rows:
        return Section(
            "placement", "Placement", (_domain(instance, plan, len(levels) - 1), Note("Nothing crosses a link."))
        )
    columns = ("axis", "what moves", "operation", "group", "slowest link", "calls a step", "MB a call", "GB a step")
    note = Note(
        f"Bytes are those of whole tensors, of one device of stage {evaluation.busiest_stage}, the busiest, as the cost "
        "model times them; gradient buckets are not counted as calls. Part of it hides behind computation."
    )
    return Section(
        "placement",
        "Placement",
        (_domain(instance, plan, len(levels) - 1), *table("What crosses which level", columns, rows), note),
    )


def _domain(instance: Instance, plan: Plan, level: int) -> Domain:
    """A level and, opened, the first of its members."""
    p, link = plan.placement, instance.levels[level]
    used, room = p.blocks[level], instance.cluster.capacity(p.blocks[:level])
    below = instance.cluster.levels[level - 1] if level else "device"
    over = f", {link.oversubscription:g}:1 oversubscribed" if link.oversubscription > 1 else ""
    return Domain(
        cut(f"{instance.cluster.levels[level]}: {used} of {room} members used"),
        cut(
            f"{link.name}, {link.bandwidth_bytes_per_s / GB:.4g} GB/s a device each way, {link.latency_s * 1e6:.3g} us{over}"
        ),
        tuple(cut(f"{below} {member}: {_ranks(plan, level, member)}") for member in range(min(used, MAX_MEMBERS))),
        max(used - MAX_MEMBERS, 0),
        _domain(instance, plan, level - 1) if level else None,
    )


def _ranks(plan: Plan, level: int, member: int) -> str:
    """Which ranks of each axis a member of a level holds, in the first domain of that level."""
    words, rest = [], member
    for axis in ("tp", "cp", *plan.placement.rank_order.split("-")[1:]):
        factors = plan.placement.factors(axis)
        rest, digit = divmod(rest, factors[level])
        inner = prod(factors[:level])
        if getattr(plan.degrees, axis) > 1:
            name = "stage" if axis == "pp" else axis
            words.append(f"{name} {digit * inner}" + (f"-{(digit + 1) * inner - 1}" if inner > 1 else ""))
    return ", ".join(words) or "everything"


ALTERNATIVES = (
    "The plan, and others that the search met, none of them proven to be the next best; best in: share of draws of the profile's "
    "constants in which a plan is the best of these; regret: how much worse than the best of them it is on the mean"
)


def alternatives(saved: Saved, plan: Plan, step_time_s: float) -> Section:
    """The plan among those that the search met: ties, and how sure the choice is."""
    c = saved.certificate
    if not saved.alternatives:
        return Section("alternatives", "Alternatives", (Note("The file holds no alternatives."),))
    known = c is not None and c.value is not None and c.objective not in ("step-time", "devices")
    best, goal = (c.value if known else step_time_s), Objective(c.objective if c else "step-time")  # type: ignore[union-attr]
    own = Alternative(plan, best or 0.0, False, saved.best_share, saved.expected_regret)
    rows = []
    for index, other in enumerate((own, *saved.alternatives)):
        against = other.value / best - 1 if best else 0.0
        kind = "the plan" if index == 0 else "tie" if other.tie else "worse"
        share, regret = other.best_share, other.expected_regret
        rows.append(
            (
                number(index, f"{index}{' *' if index == saved.recommended else ''}"),
                Cell(kind),
                number(other.value, f"{other.value:,.5g}"),
                number(against, f"{100 * against:+.2f} %" if kind == "worse" else ""),
                Cell("-") if share is None else number(share, f"{100 * share:.0f} %"),
                Cell("-") if regret is None else number(regret, f"{100 * regret:.2f} %", "expected_regret"),
                Cell(cut(degrees_in_words(plan) if index == 0 else difference_in_words(other.plan, plan))),
                Cell(cut(f"{other.plan.schedule}; stages {' '.join(map(str, other.plan.chunk_layers))}", 200)),
            )
        )
    columns = (
        "no.",
        "kind",
        goal.value_unit,
        "against the plan",
        "best in",
        "regret",
        "plan",
        "schedule and layers by chunk",
    )
    said = () if saved.recommended is None else (Note(_recommended(saved), "recommended (*)"),)
    return Section("alternatives", "Alternatives", (*said, *table(ALTERNATIVES, columns, rows)))


def _recommended(saved: Saved) -> str:
    if not saved.recommended:
        return "the plan, which has the least expected regret too"
    other = saved.alternatives[saved.recommended - 1].expected_regret
    told = [f"{100 * regret:.2f} %" if regret is not None else "not known" for regret in (other, saved.expected_regret)]
    return f"plan {saved.recommended}, not the best one: its expected regret is {told[0]}, that of the plan {told[1]}"


def limits(instance: Instance, plan: Plan, evaluation: Evaluation) -> Section:
    """Limits, and whether the plan sits on their edge."""
    rows = [
        (
            Cell(limit.name),
            Cell("binds" if limit.binds else "has room"),
            Cell(cut(limit.allowed)),
            Cell(cut(limit.plan)),
            Cell(limit.source),
        )
        for limit in limits_of(instance, plan, evaluation)
    ]
    note = Note(
        "A limit binds where the plan sits on its edge; what lies behind it, a search with the limit moved tells."
    )
    columns = ("limit", "state", "allowed", "plan", "set by")
    return Section("limits", "Limits that bind", (*table("Limits of the plan", columns, rows), note))


def assumptions(instance: Instance, search: dict[str, Any]) -> Section:
    """Everything taken for granted: model, workload, cluster, rules and profile."""
    model, cluster, profile = instance.model, instance.cluster, instance.profile
    accelerator = instance.accelerator
    told = search.get("assumed") if isinstance(search.get("assumed"), dict) else {}
    assumed = dict.fromkeys([*model.assumed, *_texts(told, "model")])
    if instance.workload.assumes_even_routing and any(isinstance(kind.ffn, Moe) for kind in model.kinds):
        assumed["tokens are routed evenly over the experts"] = None
    facts = [
        ("model", f"{model.name} ({model.family}), {model.params:,} parameters, {len(model.layers)} layers"),
        ("model source", model.source or "not stated"),
        ("workload", ", ".join(f"{name}={value}" for name, value in instance.workload.to_dict().items())),
        ("cluster", f"{cluster.name}, {cluster.device_count:,} x {accelerator.name}"),
        ("cluster source", cluster.source or "not stated"),
        ("accelerator source", accelerator.source or "not stated"),
        ("rules", f"{instance.rules.name} {instance.rules.version}"),
        ("profile", profile.name),
    ]
    peaks = ", ".join(f"{name} {peak / 1e12:.4g}" for name, peak in sorted(accelerator.flops_per_s.items()))
    facts.insert(6, ("accelerator", f"{accelerator.memory_bytes / GB:.1f} GB, dense TFLOP/s: {peaks}"))
    why = _reasons(profile.name)
    constants = [
        (Cell(name), number(value, f"{value:.6g}"), Cell(cut(why.get(name, ""))))
        for name, value in asdict(profile).items()
        if name != "name"
    ]
    noted = [*cluster.assumed, *_texts(told, "cluster"), *accelerator.notes]
    return Section(
        "assumptions",
        "Assumptions",
        (
            *table("Inputs", ("input", "value"), [(Cell(name), Cell(cut(value))) for name, value in facts]),
            Note("About the model:"),
            items(list(assumed) or ["nothing: the source says all of it, or the file does not tell"]),
            Note("About the cluster and its accelerators:"),
            items(list(dict.fromkeys(noted)) or ["nothing beyond the sources above"]),
            *table(f"Constants of profile {cut(profile.name, 80)}", ("constant", "value", "what it is"), constants),
        ),
    )


def _reasons(profile: str) -> dict[str, str]:
    """Why each constant of a profile that ships is what it is; a name from a file is never opened as one."""
    if profile not in list_profiles():
        return {}
    constants = profile_document(profile)["constants"]
    return {name: str(entry.get("why", "")) for name, entry in constants.items()}


def _texts(document: dict[str, Any] | None, name: str) -> list[str]:
    found = (document or {}).get(name)
    return [line for line in found if isinstance(line, str)] if isinstance(found, list) else []


def search_section(search: dict[str, Any]) -> Section:
    """The universe, and what became of its candidates, as the file tells it."""
    if not search:
        return Section("search", "Search", (Note("The file does not tell of a search."),))
    blocks: list[Block] = []
    for name, title in (
        ("universe", "The universe that the certificate speaks of"),
        ("candidates", "Candidates by what became of them"),
        ("cp_sat", "CP-SAT"),
        ("versions", "Versions"),
    ):
        entry = search.get(name)
        if isinstance(entry, dict):
            rows = [(Cell(cut(str(key), 80).replace("_", " ")), _cell(value)) for key, value in entry.items()]
            blocks += table(title, ("quantity", "value"), rows)
    others = {key: value for key, value in search.items() if isinstance(value, int | float | str | bool)}
    rows = [(Cell(cut(str(key), 80).replace("_", " ")), _cell(value)) for key, value in others.items()]
    blocks += table("Of the run", ("quantity", "value"), rows)
    return Section("search", "Search", tuple(blocks))


def _cell(value: Any) -> Cell:
    if isinstance(value, list):
        return Cell(cut(", ".join(cut(str(entry), 200) for entry in value[:50]) or "none"))
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return Cell(cut(str(value)))
    return number(value, f"{value:,}" if isinstance(value, int) else f"{value:.6g}")
