"""Read the file of a catalogue: the cells to solve, as products of lists, less what is dropped, with settings by cell.

The lists at the top of the file, or those of every `[[grid]]` on top of them, are multiplied; a cell that meets a condition of
`drop` is left out, and every `[[override]]` changes the settings of the cells that meet its `where`.
"""

from __future__ import annotations

import operator
import re
import tomllib
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from shardwise.data.cluster_catalog import load_cluster, load_family
from shardwise.data.cluster_form import describe
from shardwise.data.faults import InputError, unreadable
from shardwise.data.limits import parse_limits
from shardwise.data.model_catalog import load_model, slug_of
from shardwise.data.profile import load_profile
from shardwise.data.rules import MEGATRON_CORE, load_rules
from shardwise.data.workload import MAX_BATCH, MAX_SEQUENCE, Training
from shardwise.formulations.objective import OBJECTIVES
from shardwise.solver.solve import MOST_ALTERNATIVES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.data.cluster import Cluster
    from shardwise.data.model import Model
    from shardwise.data.profile import Profile
    from shardwise.data.rules import Rules

MAX_FILE_BYTES = 2**20
MAX_CELLS = 100_000
AXES = ("models", "clusters", "nodes", "seq_lens", "global_batches", "precisions", "objectives")
APART = ("seq_len", "global_batch", "precision", "offload_optimizer", "offload_param")
"""Fields of the workload that are axes of a grid, or that a row of the store does not tell."""
WORKLOAD = tuple(f.name for f in fields(Training) if f.name not in APART)

Name = Annotated[str, Field(min_length=1, max_length=500)]
Text = Annotated[str, Field(min_length=1, max_length=2000)]


def _axis(item: Any) -> Any:
    return Annotated[tuple[item, ...], Field(min_length=1, max_length=10_000)] | None


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value  # TOML has lists, a frozen value has tuples


class SettingsForm(_Form):
    """What a cell is solved with; those of a grid or an override replace those of the file."""

    workload: dict[str, Any] | None = Field(default=None, description=f"Of the workload: {', '.join(WORKLOAD)}.")
    rules: Name | None = None
    profile: Name | None = None
    limits: Annotated[tuple[Text, ...], Field(max_length=100)] | None = None
    price: Annotated[float, Field(gt=0, lt=1e9)] | None = Field(default=None, description="USD of a device-hour.")
    deadline_s: Annotated[float, Field(gt=0, lt=1e12)] | None = None
    time_limit_s: Annotated[float, Field(gt=0, lt=1e9)] | None = None
    solver_workers: Annotated[int, Field(ge=1, le=4096)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    free_chunks: bool | None = None


class GridForm(SettingsForm):
    """A product of lists."""

    models: _axis(Name) = None  # type: ignore[valid-type]
    clusters: _axis(Name) = None  # type: ignore[valid-type]
    nodes: _axis(Annotated[int, Field(ge=1)]) = None  # type: ignore[valid-type]
    seq_lens: _axis(Annotated[int, Field(ge=1, le=MAX_SEQUENCE)]) = None  # type: ignore[valid-type]
    global_batches: _axis(Annotated[int, Field(ge=1, le=MAX_BATCH)]) = None  # type: ignore[valid-type]
    precisions: _axis(Name) = None  # type: ignore[valid-type]
    objectives: _axis(Name) = None  # type: ignore[valid-type]


class OverrideForm(SettingsForm):
    """Settings of the cells that meet `where`."""

    where: Text


class CatalogueForm(GridForm):
    """The whole file."""

    name: Name | None = None
    drop: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()
    grid: Annotated[tuple[GridForm, ...], Field(max_length=1000)] = ()
    override: Annotated[tuple[OverrideForm, ...], Field(max_length=1000)] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """How a cell is solved, beside its place in the grid. `workload` holds further fields of `Training`."""

    workload: tuple[tuple[str, Any], ...] = ()
    rules: Rules = MEGATRON_CORE
    profile: Profile = field(default_factory=lambda: load_profile(MEGATRON_CORE.profile))
    limits: tuple[str, ...] = ()
    price: float | None = None
    deadline_s: float | None = None
    time_limit_s: float | None = None
    solver_workers: int = 1
    seed: int = 0
    top: int = 0
    free_chunks: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """One question: what to plan on what, and how. `family` is the entry of `clusters` in the file."""

    model: Model
    cluster: Cluster
    family: str
    nodes: int
    seq_len: int
    global_batch: int
    precision: str
    objective: str
    settings: Settings

    def __str__(self) -> str:
        workload = f"{self.seq_len} x {self.global_batch} {self.precision}"
        return f"{self.model.name} on {self.cluster.name}, {workload}, {self.objective}"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The cells of a file, in its order, each once. `dropped` were left out by its conditions."""

    name: str
    cells: tuple[Cell, ...]
    dropped: int


def read_catalogue(path: Path) -> Catalogue:
    """The catalogue of a TOML file; names of files in it are looked up beside it.

    Raises
    ------
    InputError
        With every fault of the file. What a cell alone is at fault for, such as a precision that its accelerator lacks, is
        told when the cell is solved.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"catalogue {path}: cannot be read: {unreadable(error)}") from None
    if len(content) > MAX_FILE_BYTES:
        raise InputError(f"catalogue {path}: the file is larger than {MAX_FILE_BYTES} bytes")
    try:
        return parse_catalogue(text, path.stem, path.parent)
    except InputError as error:
        raise InputError([f"catalogue {path}: {fault}" for fault in error.faults]) from None


def parse_catalogue(text: str, name: str = "catalogue", beside: Path = Path()) -> Catalogue:
    """The catalogue of a TOML text; raises `InputError` with every fault."""
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"not TOML: {error}") from None
    try:
        form = CatalogueForm.model_validate(raw)
    except ValidationError as error:
        raise InputError([describe(fault, "docs/batch.md") for fault in error.errors(include_url=False)]) from None
    return _Reader(form, beside).catalogue(name)


class _Reader:
    """Looks up what a form names, once each, and keeps every fault."""

    def __init__(self, form: CatalogueForm, beside: Path) -> None:
        self.form, self.beside = form, beside
        self.faults: dict[str, None] = {}
        self.models: dict[str, Model | None] = {}
        self.clusters: dict[tuple[str, int | None], Cluster | None] = {}
        self.settings: dict[tuple[int, ...], Settings] = {}
        self.drops = [condition for text in form.drop if (condition := self._read(_condition, text, "drop"))]
        self.met = [False] * len(form.override)
        self.wheres = [self._read(_condition, own.where, f"override[{i}].where") for i, own in enumerate(form.override)]

    def catalogue(self, name: str) -> Catalogue:
        whole = self.form.model_dump(include={*AXES})
        cells: dict[Any, Cell] = {}
        dropped = count = 0
        for index, grid in enumerate(self.form.grid or (GridForm(),)):
            path = f"grid[{index}]." if self.form.grid else ""
            own = {axis: value for axis, value in grid.model_dump(include={*AXES}).items() if value is not None}
            axes = whole | {"precisions": whole["precisions"] or ("bf16",)} | own
            axes["objectives"] = axes["objectives"] or ("step-time",)
            missing = [axis for axis in AXES if axes[axis] is None and axis != "nodes"]
            self.fault(*(f"{path}{axis} is missing" for axis in missing))
            wrong = [one for one in axes["objectives"] if one not in OBJECTIVES]
            self.fault(*(f"{path}objectives: {one!r} must be one of {', '.join(OBJECTIVES)}" for one in wrong))
            if missing or wrong:
                continue
            count += self._count(axes)
            if count > MAX_CELLS:
                self.fault(f"more than {MAX_CELLS:,} cells before any is dropped")
                break
            for values in self._product(axes):
                model, (family, nodes, cluster), *rest = values
                cell = self._cell(model, family, nodes, cluster, rest, grid)
                if cell is None:
                    continue
                facts = _facts(cell, model)
                if any(met(facts) for met in self.drops):
                    dropped += 1
                else:
                    cells.setdefault(_identity(cell), cell)
        if not self.faults:
            never = [(i, own.where) for i, own in enumerate(self.form.override) if not self.met[i]]
            self.fault(*(f"override[{i}].where={where!r} is met by no cell" for i, where in never))
        if self.faults:
            raise InputError(list(self.faults))
        if not cells:
            raise InputError("no cell is left of the grid")
        return Catalogue(self.form.name or name, tuple(cells.values()), dropped)

    def fault(self, *faults: str) -> None:
        self.faults.update(dict.fromkeys(faults))

    def _read(self, function: Callable[..., Any], text: Any, path: str) -> Any:
        try:
            return function(text)
        except InputError as error:
            self.fault(*(f"{path}: {one}" for one in error.faults))
            return None

    def _count(self, axes: dict[str, Any]) -> int:
        count = 1
        for axis in AXES:
            count *= len(axes[axis] or (None,))
        return count

    def _product(self, axes: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        """Cells in the order of the lists, those of one instance next to each other. A cluster that says its own number of
        nodes comes once, whatever `nodes` says."""
        places = {}
        for family in axes["clusters"]:
            for nodes in (None,) if self._whole(family) else axes["nodes"] or (None,):
                cluster = self._cluster(family, nodes)
                places[family, nodes] = (family, nodes, cluster)
        rest = (axes[axis] for axis in ("seq_lens", "global_batches", "precisions", "objectives"))
        yield from product(axes["models"], places.values(), *rest)

    def _whole(self, family: str) -> bool:
        return ":" in family or family.endswith(".toml")

    def _cluster(self, family: str, nodes: int | None) -> Cluster | None:
        if (family, nodes) not in self.clusters:
            text = str(self.beside / family) if family.endswith(".toml") else family
            name = text if nodes is None else f"{text}:{nodes}"
            self.clusters[family, nodes] = self._read(load_cluster, name, "clusters")
        return self.clusters[family, nodes]

    def _model(self, name: str) -> Model | None:
        if name not in self.models:
            beside = self.beside / name
            text = str(beside) if name.endswith(".json") or (beside / "config.json").is_file() else name
            self.models[name] = self._read(load_model, text, "models")
        return self.models[name]

    def _cell(
        self, model: str, family: str, nodes: int | None, cluster: Cluster | None, rest: list[Any], grid: GridForm
    ) -> Cell | None:
        found = self._model(model)
        if found is None or cluster is None:
            return None
        seq_len, global_batch, precision, objective = rest
        if nodes is None:
            nodes = _nodes(family, cluster)
        cell = Cell(found, cluster, family, nodes, seq_len, global_batch, precision, objective, Settings())
        facts = _facts(cell, model)
        forms: list[SettingsForm] = [self.form, grid]
        for index, (own, met) in enumerate(zip(self.form.override, self.wheres, strict=True)):
            if met and met(facts):
                forms.append(own)
                self.met[index] = True
        settings = self._settings(forms)
        return Cell(found, cluster, family, nodes, seq_len, global_batch, precision, objective, settings)

    def _settings(self, forms: list[SettingsForm]) -> Settings:
        key = tuple(map(id, forms))
        if key not in self.settings:
            values: dict[str, Any] = {}
            for form in forms:
                own = form.model_dump(include=set(SettingsForm.model_fields), exclude_none=True)
                values |= own | {"workload": values.get("workload", {}) | own.get("workload", {})}
            workload = values.pop("workload")
            self._read(_known_workload, workload, "workload")
            values["rules"] = self._read(load_rules, values.get("rules", MEGATRON_CORE.name), "rules") or MEGATRON_CORE
            profile = values.get("profile", values["rules"].profile)
            beside = self.beside / profile
            values["profile"] = self._read(load_profile, str(beside) if beside.is_file() else profile, "profile")
            self._read(parse_limits, values.get("limits", ()), "limits")
            self.settings[key] = Settings(workload=tuple(sorted(workload.items())), **values)
        return self.settings[key]


def _known_workload(workload: dict[str, Any]) -> None:
    unknown = [
        f"{name} is not a field here; there are {', '.join(WORKLOAD)}" for name in workload if name not in WORKLOAD
    ]
    if unknown:
        raise InputError(unknown)


def _nodes(family: str, cluster: Cluster) -> int:
    """Nodes of a cluster that says so itself: of `name:nodes` or of the family, else its innermost domains."""
    _, colon, nodes = family.partition(":")
    if colon and nodes.isdigit():
        return int(nodes)
    return len(cluster.leaves) if family.endswith(".toml") else load_family(family).default_nodes


def _identity(cell: Cell) -> tuple[Any, ...]:
    place = (id(cell.model), id(cell.cluster), cell.seq_len, cell.global_batch, cell.precision, cell.objective)
    return (*place, id(cell.settings))


# -- conditions ------------------------------------------------------------------------------------------------------------

SIGNS = {"<=": operator.le, ">=": operator.ge, "!=": operator.ne, "=": operator.eq, "<": operator.lt, ">": operator.gt}
WORDS = ("model", "cluster", "accelerator", "precision", "objective")
NUMBERS = ("nodes", "devices", "seq_len", "global_batch", "params_b", "bytes_per_param")
_CONDITION = re.compile(r"\s*([a-z_]+)\s*(<=|>=|!=|=|<|>)\s*([^\s<>=!]+)\s*")


def _facts(cell: Cell, model: str) -> dict[str, Any]:
    """What conditions speak of. Words go by every name that the file may use."""
    cluster = cell.cluster
    memory_bytes = cluster.accelerators[0].memory_bytes * cluster.device_count
    return {
        "model": {slug_of(model), slug_of(cell.model.name)},
        "cluster": {slug_of(cell.family), slug_of(cluster.name)},
        "accelerator": {slug_of(own.name) for own in cluster.accelerators},
        "precision": {slug_of(cell.precision)},
        "objective": {slug_of(cell.objective)},
        "nodes": cell.nodes,
        "devices": cluster.device_count,
        "seq_len": cell.seq_len,
        "global_batch": cell.global_batch,
        "params_b": cell.model.params / 1e9,
        "bytes_per_param": memory_bytes / cell.model.params,
    }


def _condition(text: str) -> Callable[[dict[str, Any]], bool]:
    """Whether facts meet every part of a text such as `model=llama-3.1-405b, devices<64`."""
    faults: list[str] = []
    tests: list[tuple[str, str, Any]] = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None:
            faults.append(f"{part.strip()!r} cannot be read: write a variable, =, !=, <, <=, > or >=, and a value")
            continue
        name, sign, value = match.groups()
        if name in WORDS:
            if sign not in ("=", "!="):
                faults.append(f"{part.strip()!r}: {name} takes = or !=")
            tests.append((name, sign, slug_of(value)))
        elif name in NUMBERS:
            try:
                tests.append((name, sign, float(value)))
            except ValueError:
                faults.append(f"{part.strip()!r}: {name} takes a number")
        else:
            faults.append(f"{part.strip()!r}: unknown variable; known are {', '.join((*WORDS, *NUMBERS))}")
    if faults:
        raise InputError(faults)

    def met(facts: dict[str, Any]) -> bool:
        return all(
            (value in facts[name]) == (sign == "=") if name in WORDS else SIGNS[sign](facts[name], value)
            for name, sign, value in tests
        )

    return met
