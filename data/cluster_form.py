"""What a cluster file may say: the fields, their units and bounds, and which of them exclude each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from shardwise.data.cluster import MAX_DEVICES

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LEVELS = 8

Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=5000)]
Count = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
Positive = Annotated[float, Field(gt=0)]
_NAME, _TABLE = "(name)", "(table)"
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8"]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class LinkForm(_Form):
    """A link, or what is different about the one it replaces."""

    like: Name | None = Field(default=None, description="A link of the catalogue to start from.")
    name: Name | None = None
    kind: Name | None = None
    bandwidth_GBps_per_device: Positive | None = Field(
        default=None, description="10^9 bytes/s per accelerator and direction."
    )
    latency_us: Annotated[float, Field(ge=0, lt=1e7)] | None = None
    oversubscription: Annotated[float, Field(ge=1)] | None = Field(default=None, description="1 is non-blocking.")


def _link_kind(value: object) -> str:
    return _TABLE if isinstance(value, dict | LinkForm) else _NAME


AnyLink = Annotated[
    Annotated[Name, Tag(_NAME)] | Annotated[LinkForm, Tag(_TABLE)],
    Discriminator(_link_kind),
    Field(description="A link of the catalogue, or a table of numbers."),
]


class AcceleratorForm(_Form):
    """An accelerator that the catalogue does not have."""

    name: Name
    vendor: Text = ""
    memory_GiB: Annotated[float, Field(ge=0.001, le=1e6)] = Field(description="2^30 bytes.")
    memory_bandwidth_GBps: Positive
    tflops: Annotated[dict[Precision, Positive], Field(min_length=1, description="Dense peak by precision.")]
    tdp_W: Positive | None = None
    idle_W: Positive | None = None
    host_link_GBps: Positive | None = None
    price_usd_per_hour: Annotated[float, Field(ge=0)] | None = None
    source: Text = ""
    confidence: Text = ""
    notes: Annotated[list[Text], Field(max_length=100)] = []


class LevelForm(_Form):
    """The name and link that all domains of one level share."""

    name: Name
    link: AnyLink | None = None


class GroupForm(_Form):
    """`count` equal members of the level above: nodes of a family, nodes of an accelerator, or domains of groups."""

    count: Count = 1
    name: Name | None = None
    family: Name | None = Field(default=None, description="A node family of the catalogue.")
    accelerator: Name | None = Field(default=None, description="Of the catalogue, or of this file.")
    devices: Count | None = Field(default=None, description="Free accelerators of each node.")
    groups: Annotated[list[GroupForm], Field(min_length=1, max_length=10_000)] | None = None
    link: AnyLink | None = Field(default=None, description="What joins the members of this group.")


class ClusterForm(_Form):
    """A cluster file."""

    name: Name | None = None
    source: Text = ""
    assumed: Annotated[list[Text], Field(max_length=1000)] = []
    family: Name | None = Field(default=None, description="A node family of the catalogue; then no groups.")
    nodes: Count | None = Field(default=None, description="Nodes of the family.")
    devices: Count | None = Field(default=None, description="Free accelerators of each node of the family.")
    link: AnyLink | None = Field(default=None, description="What joins the outermost members.")
    host_memory_GB: Positive | None = Field(
        default=None, description="Memory of the host of each node, 10^9 bytes; that of the family without it."
    )
    host_memory_GBps: Positive | None = Field(
        default=None, description="What the host's memory reads and writes, 10^9 bytes/s."
    )
    accelerators: Annotated[list[AcceleratorForm], Field(max_length=100)] = []
    levels: Annotated[list[LevelForm], Field(min_length=1, max_length=MAX_LEVELS)] | None = Field(
        default=None, description="Innermost first."
    )
    groups: Annotated[list[GroupForm], Field(min_length=1, max_length=10_000)] | None = None


def cluster_schema() -> dict[str, Any]:
    """Return the JSON Schema of a cluster file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **ClusterForm.model_json_schema()}


def tables(raw: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """`raw` and every group in it, each with the path that its fields start with, however wrong their values are."""
    if isinstance(raw, dict):
        yield path, {key: value for key, value in raw.items() if value is not None}
        groups = raw.get("groups")
        for index, group in enumerate(groups if isinstance(groups, list) and path.count("groups") < MAX_LEVELS else ()):
            yield from tables(group, f"{path}groups[{index}].")


def contradictions(raw: dict[str, Any]) -> Iterator[str]:
    """Statements of a file that exclude each other, whatever their values."""
    for path, table in tables(raw):
        one_of = ("family", "accelerator", "groups") if path else ("family", "groups")
        given = [key for key in one_of if key in table]
        if len(given) != 1:
            where = path.removesuffix(".") or "the file"
            yield f"{where}: give exactly one of {', '.join(one_of)}, not {' and '.join(given) or 'none'}"
        if path and "accelerator" in table and "devices" not in table:
            yield f"{path}devices is missing: say how many accelerators are free on each node"
        for key in ("devices", "nodes"):
            if key in table and "groups" in table and (key == "devices" or not path):
                yield f"{path}{key} contradicts groups: say it in each group"
        if not path and "family" in table and "levels" in table:
            yield "levels contradicts family: the family brings its levels; use groups to change them"


def describe(error: Any, page: str = "docs/clusters.md") -> str:
    """One finding of pydantic as `path=value: rule`; `page` lists the fields."""
    path = ""
    for part in error["loc"]:
        if part not in (_NAME, _TABLE):
            path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    if error["type"] == "missing":
        return f"{path} is missing"
    if error["type"] == "extra_forbidden":
        return f"{path} is not a field here; see {page} for those there are"
    try:
        value = repr(error["input"])
    except ValueError:  # thousands of digits
        value = "a huge number"
    return f"{path}={value if len(value) <= 60 else value[:60] + '...'}: {error['msg']}"
