"""Compare two plans: what differs, what each is worth, and a walk from one to the other.

The walk starts at the first plan and takes over one thing of the second at a time, in the order of `ORDER`; the last
step is the second plan. What depends on a changed degree follows it: etp where it is tp, the number of micro-batches,
and where those of the first plan no longer fit, the schedule (by the degrees), the stages (as even as possible, larger
ones first), their recompute (that of the first stage for all) and the placement (ranks packed along the devices). What a
step costs depends on those before it: another order shares the same sum out differently.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardwise.data.faults import InputError
from shardwise.data.instance_document import instance_document
from shardwise.data.pipeline import chunks_faults
from shardwise.data.plan import PLACED, Degrees, Plan, stage_in
from shardwise.solver.default_plan import plan_from_degrees
from shardwise.solver.evaluate import Evaluation, TimeParts, evaluate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.data.instance import Instance

GB = 1e9
NOTHING = 1e-7
DIGITS = {"s": ".4f", "GB": ".3f", "MJ": ".4g", "J": ".4g"}
"""How quantities of a unit are written; others are whole numbers."""
DEGREES = (
    "tp", "sequence_parallel", "cp", "cp_comm_type", "cp_a2a", "ep", "etp", "pp", "vpp", "dp", "dp_replicate", "zero",
    "offload_optimizer", "offload_param", "offload_layers", "micro_batch",
)  # fmt: skip
PARTS = ("schedule", "stages", "recompute", "placement", "micro_batches")
ORDER = (*DEGREES, *PARTS)
"""The order in which a walk changes things."""
PRICED = ("model", "cluster", "workload", "profile")
"""Parts of an instance that change what a plan costs; rules and limits only say whether it is admitted."""


@dataclass(frozen=True, eq=False)
class Side:
    """One of two plans."""

    name: str
    instance: Instance
    plan: Plan
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of the plan or the instance that differs, in words."""

    what: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity of both plans in `unit`; None where it is not known."""

    group: str
    what: str
    unit: str
    a: float | None
    b: float | None

    @property
    def change(self) -> float | None:
        """b - a."""
        return None if self.a is None or self.b is None else self.b - self.a


@dataclass(frozen=True, slots=True)
class Step:
    """A stop of the walk. `fault` says why it is not a plan; then there is no time, and the next change is against the
    last plan before it."""

    change: str
    step_time_s: float | None
    delta_s: float | None
    devices: int | None
    verdict: str
    fault: str = ""


@dataclass(frozen=True, eq=False)
class Comparison:
    """What `compare` returns. `walk` is empty where the plans are of different instances; `no_walk` says so."""

    a: Side
    b: Side
    differences: tuple[Difference, ...]
    measures: tuple[Measure, ...]
    walk: tuple[Step, ...]
    no_walk: str

    @property
    def told(self) -> tuple[Measure, ...]:
        """The measures that one of the plans has more than rounding of."""
        return tuple(m for m in self.measures if max(abs(m.a or 0.0), abs(m.b or 0.0)) > NOTHING)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        sides = {name: {"name": side.name, "evaluation": side.evaluation.to_dict()} for name, side in self._sides}
        return sides | {
            "differences": [asdict(difference) for difference in self.differences],
            "measures": [asdict(measure) | {"change": measure.change} for measure in self.measures],
            "walk_order": list(ORDER),
            "walk": [asdict(step) for step in self.walk],
            "no_walk": self.no_walk or None,
        }

    @cached_property
    def _sides(self) -> tuple[tuple[str, Side], ...]:
        return (("a", self.a), ("b", self.b))


def compare(a: tuple[str, Instance, Plan], b: tuple[str, Instance, Plan]) -> Comparison:
    """Compare two plans, each given with its name and its instance.

    Raises
    ------
    InputError
        When a plan does not belong to its instance, with every fault of both.
    """
    sides, faults = [], []
    for name, instance, plan in (a, b):
        try:
            sides.append(Side(name, instance, plan, evaluate(instance, plan)))
        except InputError as error:
            faults += [f"{name}: {fault}" for fault in error.faults]
    if faults:
        raise InputError(faults)
    one, two = sides
    parts = tuple(_instance_differences(one.instance, two.instance))
    apart = [part.what for part in parts if part.what.split(".")[0] in PRICED]
    no_walk = f"the plans are of different instances ({', '.join(apart)}), so there is no walk" if apart else ""
    return Comparison(
        one,
        two,
        (*parts, *_plan_differences(one.plan, two.plan)),
        tuple(_measures(one.evaluation, two.evaluation)),
        () if no_walk else tuple(walk(one.instance, one.plan, two.plan)),
        no_walk,
    )


def walk(instance: Instance, a: Plan, b: Plan) -> Iterator[Step]:
    """Every stop from `a` to `b` on one instance; raises `InputError` when `a` does not belong to it."""
    first = evaluate(instance, a)
    yield Step("the first plan", first.step_time_s, None, first.devices, _verdict(first))
    donors, degrees = dict.fromkeys(PARTS, a), asdict(a.degrees)
    current: Plan | None = a
    before = first.step_time_s
    for name in ORDER:
        if name in DEGREES:
            old, new = degrees[name], getattr(b.degrees, name)
            if old == new:
                continue
            degrees[name] = new
            if name == "tp" and degrees["etp"] == old:
                degrees["etp"] = new
            if name == "cp_comm_type":
                degrees["cp_a2a"] = b.degrees.cp_a2a
            change = f"{name} {old} to {new}"
        else:
            donors[name] = b
            if current is not None and _part(current, name) == _part(b, name):
                continue
            if current is None and _part(a, name) == _part(b, name):
                continue
            change = f"{name} of the second plan"
        try:
            current = _built(instance, degrees, donors)
            evaluation = evaluate(instance, current)
        except (InputError, ValueError) as error:
            current = None
            fault = error.faults[0] if isinstance(error, InputError) else str(error)
            yield Step(change, None, None, None, "not a plan", fault)
            continue
        step = evaluation.step_time_s
        yield Step(change, step, step - before, evaluation.devices, _verdict(evaluation))
        before = step


def _built(instance: Instance, values: dict[str, Any], donors: dict[str, Plan]) -> Plan:
    """A plan of these degrees with the parts of its donors where they fit.

    Raises
    ------
    InputError, ValueError
        When there is no such plan.
    """
    degrees = Degrees(**values)
    schedule, recompute = donors["schedule"].schedule, donors["recompute"]
    if chunks_faults(schedule, degrees.vpp):
        schedule = degrees.schedule
    counted = donors["micro_batches"]
    same_batch = (counted.degrees.dp, counted.degrees.micro_batch) == (degrees.dp, degrees.micro_batch)
    share = degrees.dp * degrees.micro_batch
    if not same_batch and instance.workload.global_batch % share:
        raise ValueError(f"dp x micro_batch = {share} does not divide global_batch={instance.workload.global_batch}")
    first = recompute.stages[0]
    plan = plan_from_degrees(
        instance,
        degrees,
        recompute=first.recompute,
        recompute_layers=first.recompute_layers or None,
        recompute_modules=first.recompute_modules,
        rank_order=donors["placement"].placement.rank_order,
        schedule=schedule,
    )
    split = donors["stages"]
    chunks = [stage.chunks for stage in (split if _same_grid(split.degrees, degrees) else plan).stages]
    settings = recompute.stages if len(recompute.stages) == degrees.pp else plan.stages
    stages = tuple(
        stage_in(own, setting.mode, setting.recompute_layers) for own, setting in zip(chunks, settings, strict=True)
    )
    placed = donors["placement"].placement
    fits = all(getattr(donors["placement"].degrees, axis) == getattr(degrees, axis) for axis in PLACED)
    return replace(
        plan,
        stages=stages,
        placement=placed if fits else plan.placement,
        micro_batches=counted.micro_batches if same_batch else plan.micro_batches,
    )


def _same_grid(one: Degrees, other: Degrees) -> bool:
    return (one.pp, one.vpp) == (other.pp, other.vpp)


def _part(plan: Plan, name: str) -> object:
    """What a walk compares of a part."""
    if name == "stages":
        return tuple(stage.chunks for stage in plan.stages)
    if name == "recompute":
        return tuple((stage.mode, stage.recompute_layers) for stage in plan.stages)
    return getattr(plan, name)


def _verdict(evaluation: Evaluation) -> str:
    if evaluation.faults:
        more = f" and {len(evaluation.faults) - 1} more" if len(evaluation.faults) > 1 else ""
        return f"illegal: {evaluation.faults[0]}{more}"
    if not evaluation.fits:
        return f"does not fit: {evaluation.peak_memory_bytes / GB:.1f} GB"
    return "breaks a limit" if evaluation.limit_faults else "fits"


def _instance_differences(a: Instance, b: Instance) -> Iterator[Difference]:
    """Parts of the instance, the workload and the profile field by field."""

    one, two = instance_document(a), instance_document(b)
    for part in ("workload", "profile"):
        for name in one[part] | two[part]:
            first, second = (document[part].get(name, "none") for document in (one, two))
            if first != second:
                yield Difference(f"{part}.{name}", str(first), str(second))
    names = {
        "model": (a.model.name, b.model.name),
        "cluster": (a.cluster.name, b.cluster.name),
        "rules": (a.rules.name, b.rules.name),
        "limits": (", ".join(a.limits.text) or "none", ", ".join(b.limits.text) or "none"),
    }
    for part, (first, second) in names.items():
        same = a.model == b.model if part == "model" else one[part] == two[part]
        if not same:
            alike = " (another of that name)" if first == second else ""
            yield Difference(part, first, second + alike)


def _plan_differences(a: Plan, b: Plan) -> Iterator[Difference]:
    for name in DEGREES:
        one, two = getattr(a.degrees, name), getattr(b.degrees, name)
        follows = name == "etp" and one == a.degrees.tp and two == b.degrees.tp
        if one != two and not follows:
            yield Difference(name, str(one), str(two))
    words = {
        "schedule": lambda plan: plan.schedule,
        "micro_batches": lambda plan: str(plan.micro_batches),
        "stages": lambda plan: " ".join("+".join(map(str, stage.chunks)) for stage in plan.stages),
        "recompute": _recompute,
        "placement": _placement,
    }
    for name, said in words.items():
        if said(a) != said(b):
            yield Difference(name, said(a), said(b))


def _recompute(plan: Plan) -> str:
    settings = [stage.recompute_words for stage in plan.stages]
    return settings[0] if len(set(settings)) == 1 else ", ".join(settings)


def _placement(plan: Plan) -> str:
    p = plan.placement
    return " ".join(f"{axis}={'x'.join(map(str, p.factors(axis)))}" for axis in PLACED) + f", {p.rank_order}"


def _measures(a: Evaluation, b: Evaluation) -> Iterator[Measure]:
    """Step time and its parts, memory of the worst stage by line, energy."""
    time, memory = "time", "memory"
    yield Measure(time, "step time", "s", a.step_time_s, b.step_time_s)
    for field in fields(TimeParts):
        one, two = getattr(a.parts, field.name), getattr(b.parts, field.name)
        yield Measure(time, field.name.replace("_", " "), "s", one, two)
    yield Measure("throughput", "tokens per second", "1/s", a.tokens_per_s, b.tokens_per_s)
    yield Measure(
        "throughput", "tokens per second and device", "1/s", a.tokens_per_s_per_device, b.tokens_per_s_per_device
    )
    yield Measure("throughput", "devices", "", float(a.devices), float(b.devices))
    one_stage, two_stage = a.stages[a.worst_stage], b.stages[b.worst_stage]
    yield Measure(memory, "memory of the fullest stage", "GB", one_stage.total / GB, two_stage.total / GB)
    for name, value in asdict(one_stage).items():
        yield Measure(memory, name.replace("_", " "), "GB", value / GB, getattr(two_stage, name) / GB)
    joules = [None if e.energy is None else e.energy.joules_per_step.value / 1e6 for e in (a, b)]
    tokens = [None if e.energy is None else e.energy.joules_per_token.value for e in (a, b)]
    yield Measure("energy", "energy of a step", "MJ", *joules)
    yield Measure("energy", "energy of a token", "J", *tokens)


def in_words(value: float | None, unit: str, *, sign: bool = False) -> str:
    """A measure as text, nothing where it is not known."""
    if value is None:
        return ""
    text = f"{value:{'+' if sign else ''},{DIGITS.get(unit, '.0f')}}"
    return text.replace("-", "") if not text.strip("+-0.,") else text
