"""Read what earlier commands wrote: a plan, the instance saved in it, and the result that `plan --json` keeps.

Files come from anywhere, so sizes are bounded and every fault names its field.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, is_dataclass
from math import isfinite
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from shardwise.data.faults import InputError, unreadable
from shardwise.data.plan import Plan
from shardwise.solver.result import Alternative, Status, relative_gap
from shardwise.solver.store import of_store, stored_result

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardwise.data.instance import Instance
    from shardwise.formulations.objective import ObjectiveName

MAX_PLAN_BYTES = 64_000_000


def read_plan(path: Path) -> Plan:
    """The plan of what `read_saved` reads; raises `InputError` as that does, and where there is no plan."""
    plan = read_saved(path).plan
    if plan is None:
        raise InputError(f"{path}: there is no plan in it")
    return plan


def saved_instance(document: Any) -> Instance:
    """The instance saved in a plan. Whoever edited the file is told of a field of the wrong type by its name."""
    from shardwise.data.instance_document import instance_from_document

    try:
        instance = instance_from_document(document)
    except OverflowError as error:
        raise InputError(f"plan.instance cannot be read: {error}") from None
    faults = list(dict.fromkeys(mistyped(instance.model, type(instance.model), "plan.instance.model")))
    if faults:
        raise InputError(faults)
    return instance


def mistyped(value: Any, hint: Any, name: str, least: int = 1) -> Iterator[str]:
    """Every field below `value` that is not what its annotation says, or not a size."""
    from shardwise.data.model import MAX_SIZE

    options = get_args(hint)
    if isinstance(hint, UnionType):
        mine = [option for option in options if isinstance(value, get_origin(option) or option)]
        if mine:
            yield from mistyped(value, mine[0], name, least)
        else:
            yield f"{name}={value!r:.40} must be {hint}"
    elif get_origin(hint) is tuple:
        seen = {id(item): (item, index) for index, item in reversed(list(enumerate(value)))}
        for item, index in seen.values():
            yield from mistyped(item, options[0], f"{name}[{index}]", least)
    elif get_origin(hint) is Literal:
        if not isinstance(value, str | int) or value not in options:
            yield f"{name}={value!r:.40} must be one of {', '.join(map(str, options))}"
    elif not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        yield f"{name}={value!r:.40} must be {hint.__name__}"
    elif hint is int and not least <= value <= MAX_SIZE:
        yield f"{name}={value!r:.40} must be between {least} and 2^40"
    elif is_dataclass(value):
        hints = get_type_hints(type(value))
        for field in fields(value):
            lowest = 0 if field.default == 0 else 1
            yield from mistyped(getattr(value, field.name), hints[field.name], f"{name}.{field.name}", lowest)


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a search proved of its objective; `value` and `bound` are in the unit of that."""

    status: Status
    value: float | None
    bound: float | None
    objective: ObjectiveName = "step-time"

    @property
    def gap(self) -> float | None:
        if self.value is None or self.bound is None:
            return None
        return relative_gap(self.value, self.bound)


@dataclass(frozen=True, slots=True)
class Saved:
    """A plan file or a result file. Without a plan `reason` says why; `search` is the report of the search.

    best_share, expected_regret
        Of the plan against its alternatives; those have their own.
    recommended
        0 for the plan, n for the n-th alternative; None where it is not known.
    """

    plan: Plan | None
    certificate: Certificate | None = None
    alternatives: tuple[Alternative, ...] = ()
    best_share: float | None = None
    expected_regret: float | None = None
    recommended: int | None = None
    reason: tuple[str, ...] = ()
    search: dict[str, Any] = field(default_factory=dict)


def read_saved(path: Path) -> Saved:
    """A `plan.json`, the document that `plan --json` wrote, or a cell of a store, as STORE/CELL.

    Raises
    ------
    InputError
        When it is none of them, with every fault.
    """
    if of_store(path):
        return _stored(path)
    try:
        document = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    try:
        return _saved(document)
    except InputError as error:
        raise InputError([f"{path}: {fault}" for fault in error.faults]) from None


def _stored(path: Path) -> Saved:
    return _saved(stored_result(path.parent, path.name))


def _saved(document: Any) -> Saved:
    if not isinstance(document, dict) or not ("status" in document or "plan" in document):
        return Saved(Plan.from_dict(document))
    faults: list[str] = []

    def plan_of(entry: Any, name: str) -> Plan | None:
        try:
            return Plan.from_dict(entry)
        except InputError as error:
            faults.extend(f"{name}{fault}" for fault in error.faults)
            return None

    own = document.get("plan")
    plan = None if own is None else plan_of(own, "")
    certificate = _certificate(document, faults)
    entries = _listed(document, "alternatives", faults)
    alternatives = []
    for index, entry in enumerate(entries):
        name = f"alternatives[{index}]"
        if not isinstance(entry, dict):
            faults.append(f"{name} must be an object with plan, value and tie")
            continue
        other, value = plan_of(entry.get("plan"), f"{name}: "), _number(entry, "value", f"{name}.", faults)
        if other is not None and value is None:
            faults.append(f"{name}.value is missing")
        elif other is not None and value is not None:
            shares = (_number(entry, key, f"{name}.", faults) for key in ("best_share", "expected_regret"))
            alternatives.append(Alternative(other, value, entry.get("tie") is True, *shares))
    reason = _listed(document, "reason", faults)
    if not all(isinstance(line, str) for line in reason):
        faults.append("reason must be a list of strings")
    search = document.get("report", {})
    if not isinstance(search, dict):
        faults.append("report must be an object")
    robust = document.get("robustness") or {}
    if not isinstance(robust, dict):
        faults.append("robustness must be an object")
        robust = {}
    share, regret = (_number(robust, key, "robustness.", faults) for key in ("best_share", "expected_regret"))
    recommended = robust.get("recommended")
    if recommended is not None and (type(recommended) is not int or not 0 <= recommended <= len(entries)):
        faults.append(f"robustness.recommended={recommended!r:.40} must be 0 or count one of the alternatives")
    if faults:
        raise InputError(faults)
    return Saved(plan, certificate, tuple(alternatives), share, regret, recommended, tuple(reason), search)


def _certificate(document: dict[str, Any], faults: list[str]) -> Certificate | None:
    from shardwise.formulations.objective import OBJECTIVES, Objective

    status, objective = document.get("status"), document.get("objective", "step-time")
    value, bound = (_number(document, name, "", faults) for name in ("value", "bound"))
    if status not in get_args(Status):
        faults.append(f"status={status!r:.40} must be one of {', '.join(get_args(Status))}")
        return None
    if objective not in OBJECTIVES:
        faults.append(f"objective={objective!r:.40} must be one of {', '.join(OBJECTIVES)}")
        return None
    if value is not None and bound is not None:
        rises = Objective(objective).sense == "maximise"
        if bound < value if rises else bound > value:
            faults.append(f"bound={bound} must not lie {'below' if rises else 'above'} value={value}")
    return Certificate(status, value, bound, objective)  # type: ignore[arg-type]


def _listed(document: dict[str, Any], name: str, faults: list[str]) -> list[Any]:
    found = document.get(name, [])
    if isinstance(found, list):
        return found
    faults.append(f"{name} must be a list")
    return []


def _number(document: dict[str, Any], name: str, prefix: str, faults: list[str]) -> float | None:
    """A finite number of seconds, or None where there is none."""
    value = document.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e15 or not isfinite(value):
        faults.append(f"{prefix}{name}={value!r:.40} must be a number")
        return None
    return float(value)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise InputError(f"plan {path}: the file is larger than {MAX_PLAN_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"plan {path}: cannot be read: {unreadable(error)}") from None
