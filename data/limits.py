"""The user's limits: `tp=8`, `pp<=4`, `recompute=full`, `memory_gb<=70`, `memory_fraction<=0.9`.

Each limit bounds one variable of the plan. Integer variables take `=`, `<=`, `>=`, `<`, `>`; `recompute`, `schedule` and
`cp_comm_type` take `=`, and `recompute=full` asks for every layer to be recomputed, where without it any number of layers
may be. `recompute_modules=layernorm+moe_act` says what selective recompute repeats, or `any`. `stage[40]=3` or
`stage[40]<=1` pins a layer to stages, both counted from 0, and `stage[10]=stage[12]` two layers, with those between them
where a stage has one chunk, to one stage. `free_nodes>=2` keeps nodes free. Limits on one variable are intersected; an
empty intersection is a contradiction and reported as such.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from shardwise.data.faults import InputError
from shardwise.data.pipeline import SCHEDULES
from shardwise.data.plan import CP_COMM_TYPES
from shardwise.data.recompute import ANY, module_set

if TYPE_CHECKING:
    from collections.abc import Iterable

INTEGER_VARIABLES = (
    "dp",
    "tp",
    "pp",
    "cp",
    "ep",
    "etp",
    "vpp",
    "micro_batch",
    "zero",
    "dp_replicate",
    "cp_a2a",
    "sequence_parallel",
    "devices",
    "free_nodes",
)
NAMED: dict[str, tuple[str, ...]] = {
    "recompute": ("none", "selective", "full"),
    "schedule": SCHEDULES,
    "cp_comm_type": CP_COMM_TYPES,
}
"""Variables whose value is a word."""
OTHERS = ("recompute_modules", "memory_gb", "memory_fraction", "stage[LAYER]")
ALIASES = {"mbs": "micro_batch", "sp": "sequence_parallel", "gpus": "devices", "micro-batch": "micro_batch"}
MAX_VALUE = 2**31

_STAGE = r"stage\[(\d{1,6})\]"
_FORM = re.compile(rf"\s*([A-Za-z_-][A-Za-z0-9_-]*|{_STAGE})\s*(<=|>=|==|=|<|>)\s*({_STAGE}|[A-Za-z0-9_.+-]+)\s*")


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `low` to `high`, both included."""

    low: int = 0
    high: int = MAX_VALUE

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user allows. `text` keeps the limits as written, for messages and reports.

    recompute_modules
        What selective recompute repeats, as `data.recompute.module_set` writes it, or `data.recompute.ANY`.
    pinned, together
        The stages that a layer may be on, and pairs of layers that are on one stage.
    """

    ranges: dict[str, Range] = field(default_factory=dict)
    recompute: str | None = None
    recompute_modules: str | None = None
    schedule: str | None = None
    cp_comm_type: str | None = None
    memory_gb: float = inf
    memory_fraction: float = 1.0
    pinned: dict[int, Range] = field(default_factory=dict)
    together: tuple[tuple[int, int], ...] = ()
    text: tuple[str, ...] = ()

    def range(self, variable: str) -> Range:
        return self.ranges.get(variable, Range())

    def admits(self, variable: str, value: int) -> bool:
        return value in self.range(variable)

    def faults(self, values: dict[str, int]) -> list[str]:
        """Every integer limit that `values` breaks, with the value."""
        out = []
        for variable, allowed in self.ranges.items():
            if variable in values and values[variable] not in allowed:
                out.append(f"{variable}={values[variable]} breaks the limit {self._stated(variable)}")
        return out

    def stage_faults(self, stages: tuple[int, ...]) -> list[str]:
        """Every limit on layers that their `stages` break."""
        out = [
            f"layer {layer} is on stage {stages[layer]}, which breaks the limit {self._stated(f'stage[{layer}]')}"
            for layer, allowed in self.pinned.items()
            if stages[layer] not in allowed
        ]
        return out + [
            f"layers {one} and {other} are on stages {stages[one]} and {stages[other]}, which breaks the limit "
            f"stage[{one}]=stage[{other}]"
            for one, other in self.together
            if stages[one] != stages[other]
        ]

    def layer_faults(self, layers: int) -> list[str]:
        """Layers that a model of so many has not."""
        named = {*self.pinned, *(layer for pair in self.together for layer in pair)}
        return [f"limit on stage[{q}]: the model has layers 0 to {layers - 1}" for q in sorted(named) if q >= layers]

    def _stated(self, variable: str) -> str:
        return ", ".join(text for text in self.text if variable_of(text) == variable)


def variable_of(text: str) -> str | None:
    """The variable that one limit speaks of, or None when it cannot be read."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    name = match[1].lower()
    return ALIASES.get(name, name)


def parse_limits(texts: Iterable[str]) -> Limits:
    """Read limits such as `"pp<=8"`; commas separate several in one text.

    Raises
    ------
    InputError
        Naming every limit that cannot be read, has an unknown variable, or contradicts another.
    """
    if isinstance(texts, str):
        raise InputError(f"limits={texts!r:.60} must be a list of texts, such as [{texts!r:.60}]")
    faults: list[str] = []
    ranges: dict[str, Range] = {}
    pinned: dict[int, Range] = {}
    together: list[tuple[int, int]] = []
    named: dict[str, set[str]] = {name: set() for name in NAMED}
    modules: set[str] = set()
    memory_gb, memory_fraction = inf, 1.0
    written = tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
    for text in written:
        match = _FORM.fullmatch(text)
        variable = variable_of(text)
        if match is None:
            faults.append(
                f"limit {text!r} cannot be read: write variable, =, <=, >=, < or >, and a value, such as pp<=8"
            )
            continue
        sign, value = match[3], match[4]
        if match[2] is not None and match[5] is not None:
            if sign not in ("=", "=="):
                faults.append(f"limit {text!r}: two layers take = to be on one stage")
            else:
                together.append((int(match[2]), int(match[5])))
        elif match[2] is not None:
            if not re.fullmatch(r"\d{1,10}", value):
                faults.append(f"limit {text!r}: a layer takes the number of a stage, or another layer as stage[N]")
            else:
                pinned[int(match[2])] = _narrow(pinned.get(int(match[2]), Range()), sign, int(value))
        elif match[5] is not None:
            faults.append(f"limit {text!r}: only a layer, stage[N], takes the stage of another")
        elif variable in NAMED:
            if sign not in ("=", "==") or value not in NAMED[variable]:
                faults.append(f"limit {text!r}: {variable} takes = and one of {', '.join(NAMED[variable])}")
            else:
                named[variable].add(value)
        elif variable == "recompute_modules":
            try:
                if sign not in ("=", "=="):
                    raise ValueError(f"recompute_modules takes =, not {sign}")
                modules.add(ANY if value == ANY else module_set(value.split("+")))
            except ValueError as error:
                faults.append(f"limit {text!r}: {error}")
        elif variable == "memory_gb":
            number = _number(value)
            if sign not in ("<=", "<") or number is None or not 0 < number < MAX_VALUE:
                faults.append(f"limit {text!r}: memory_gb takes <= and a positive number of decimal GB")
            else:
                memory_gb = min(memory_gb, number)
        elif variable == "memory_fraction":
            number = _number(value)
            if sign not in ("<=", "<") or number is None or not 0 < number <= 1:
                faults.append(
                    f"limit {text!r}: memory_fraction takes <= and a share of the memory, above 0 and at most 1"
                )
            else:
                memory_fraction = min(memory_fraction, number)
        elif variable in INTEGER_VARIABLES:
            if not re.fullmatch(r"\d{1,10}", value) or int(value) > MAX_VALUE:
                faults.append(f"limit {text!r}: {variable} takes a whole number from 0 to {MAX_VALUE}")
            else:
                ranges[variable] = _narrow(ranges.get(variable, Range()), sign, int(value))
        else:
            known = ", ".join((*INTEGER_VARIABLES, *NAMED, *OTHERS))
            faults.append(f"limit {text!r}: unknown variable {variable!r}; known are {known}")
    every = {**ranges, **{f"stage[{layer}]": allowed for layer, allowed in pinned.items()}}
    for variable, allowed in every.items():
        if allowed.low > allowed.high:
            stated = ", ".join(text for text in written if variable_of(text) == variable)
            faults.append(f"limits on {variable} contradict each other: {stated}")
    faults += [
        f"limits on {name} contradict each other: {', '.join(sorted(values))}"
        for name, values in (*named.items(), ("recompute_modules", modules))
        if len(values) > 1
    ]
    if modules and named["recompute"] - {"selective"}:
        said = ", ".join(sorted(named["recompute"]))
        faults.append(f"limits contradict each other: recompute_modules needs recompute=selective, not {said}")
    if faults:
        raise InputError(faults)
    recompute, schedule, cp_comm_type = (next(iter(named[name]), None) for name in NAMED)
    return Limits(
        ranges,
        recompute,
        next(iter(modules), None),
        schedule,
        cp_comm_type,
        memory_gb,
        memory_fraction,
        pinned,
        tuple(together),
        written,
    )


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _narrow(allowed: Range, sign: str, value: int) -> Range:
    low, high = {
        "=": (value, value),
        "==": (value, value),
        "<=": (0, value),
        "<": (0, value - 1),
        ">=": (value, MAX_VALUE),
        ">": (value + 1, MAX_VALUE),
    }[sign]
    return Range(max(allowed.low, low), min(allowed.high, high))
