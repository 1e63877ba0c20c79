"""The plan: degrees, stages and placement, and its versioned JSON form (`docs/plan.schema.json`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from shardwise.data.faults import InputError
from shardwise.data.pipeline import SCHEDULES, Layout, Schedule, chunks_faults, layout
from shardwise.data.recompute import CORE, module_set, modules_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAN_VERSION = 1
MAX_FILE_BYTES = 64_000_000
MAX_DEGREE = 2**20

Recompute = Literal["none", "selective", "full"]
RankOrder = Literal["tp-dp-pp", "tp-pp-dp"]
CpCommType = Literal["p2p", "allgather", "a2a", "a2a+p2p"]
CP_COMM_TYPES: tuple[CpCommType, ...] = ("p2p", "allgather", "a2a", "a2a+p2p")
"""How context parallelism brings queries and keys together, in Megatron's words: pieces of keys and values in a ring, all
of them gathered, the sequence exchanged for heads (Ulysses), or that within groups and a ring among them."""

AXES = ("tp", "pp", "dp")
"""The axes that the search spreads over the levels of the cluster; `cp` is placed between tp and dp where it is given."""

PLACED = (*AXES, "cp")
COUNTS = ("tp", "pp", "dp", "vpp", "micro_batch", "cp", "ep", "etp", "dp_replicate", "cp_a2a")


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many ways each axis splits; each is a whole number of at least 1.

    Attributes
    ----------
    tp, pp, dp, cp
        Tensor, pipeline, data and context parallelism; their product is the number of devices.
    vpp
        Chunks of layers on each pipeline stage.
    micro_batch
        Sequences of one replica that pass the pipeline together.
    sequence_parallel
        Whether norms and dropouts are split over the `tp` ranks along the sequence (Korthikanti et al., arXiv 2205.05198).
    zero
        What is sharded over data parallelism: 1 optimizer states, 2 gradients too, 3 weights too (FSDP).
    dp_replicate
        Groups that each hold a whole copy (HSDP, or a distributed optimizer within groups): ZeRO shards over
        `dp_shard` = dp / dp_replicate ranks and the groups all-reduce among each other.
    cp_comm_type
        The algorithm of context parallelism; "p2p", whatever is said, where there is none.
    cp_a2a
        Neighbouring ranks that exchange sequence for heads under "a2a+p2p", 1 under every other algorithm.
    ep, etp
        Experts are spread `ep` ways and each split `etp` ways within the tp x cp x dp ranks of a stage
        (Megatron core/parallel_state.py); an `etp` of 0 becomes tp, Megatron's default.
    offload_optimizer
        The share of the optimizer, states and update, that the host has (0 to 1).
    offload_param
        Whether the host has the sharded weights too (DeepSpeed's `offload_param`).
    offload_layers
        The first so many layers leave their saved activations to the host between their two passes (Megatron's
        `--cpu-offloading-num-layers`).

    Raises
    ------
    ValueError
        Naming every degree out of its range, and those that do not divide each other. What a framework accepts beyond
        that is its rule pack's to say, in `Evaluation.faults`.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    micro_batch: int = 1
    zero: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    etp: int = 0
    dp_replicate: int = 1
    cp_comm_type: CpCommType = "p2p"
    cp_a2a: int = 1
    offload_optimizer: float = 0.0
    offload_param: bool = False
    offload_layers: int = 0

    def __post_init__(self) -> None:
        if self.etp == 0 and not isinstance(self.etp, bool):
            object.__setattr__(self, "etp", self.tp if _is_count(self.tp, 1) else 1)  # a wrong tp is told once
        faults = [
            f"degrees.{name}={getattr(self, name)!r} must be a whole number between 1 and {MAX_DEGREE}"
            for name in COUNTS
            if not _is_count(getattr(self, name), 1)
        ]
        if self.zero not in (0, 1, 2, 3) or isinstance(self.zero, bool):
            faults.append(f"degrees.zero={self.zero!r} must be 0, 1, 2 or 3")
        if self.cp_comm_type not in CP_COMM_TYPES:
            faults.append(f"degrees.cp_comm_type={self.cp_comm_type!r} must be one of {', '.join(CP_COMM_TYPES)}")
        elif self.cp == 1:
            object.__setattr__(self, "cp_comm_type", "p2p")
        faults += [
            f"degrees.{name}={getattr(self, name)!r} must be true or false"
            for name in ("sequence_parallel", "offload_param")
            if not isinstance(getattr(self, name), bool)
        ]
        if not _is_count(self.offload_layers, 0):
            faults.append(
                f"degrees.offload_layers={self.offload_layers!r} must be a whole number from 0 to {MAX_DEGREE}"
            )
        share = self.offload_optimizer
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            faults.append(f"degrees.offload_optimizer={share!r} must be a share from 0 to 1")
        if not faults:
            if self.cp_comm_type != "a2a+p2p" and self.cp_a2a > 1:
                faults.append(f"degrees.cp_a2a={self.cp_a2a} needs cp_comm_type=a2a+p2p, not {self.cp_comm_type}")
            elif self.cp_comm_type == "a2a+p2p" and (self.cp % self.cp_a2a or not 1 < self.cp_a2a < self.cp):
                faults.append(
                    f"degrees.cp_a2a={self.cp_a2a} must divide cp={self.cp} and be neither 1 nor cp with cp_comm_type=a2a+p2p"
                )
            if self.dp % self.dp_replicate:
                faults.append(f"degrees.dp_replicate={self.dp_replicate} does not divide dp={self.dp}")
            if self.tp * self.cp * self.dp % (self.ep * self.etp):
                faults.append(
                    f"degrees: ep={self.ep} x etp={self.etp} does not divide tp x cp x dp = {self.tp * self.cp * self.dp}"
                )
        if faults:
            raise ValueError("; ".join(faults))

    def to_dict(self) -> dict[str, Any]:
        """Every degree, without offloading where there is none."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("offload") or value}

    @property
    def on_host(self) -> bool:
        """Whether the host holds anything of the plan."""
        return bool(self.offload_optimizer or self.offload_layers)

    @property
    def devices(self) -> int:
        """tp x cp x pp x dp."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def expert_dp(self) -> int:
        """Ranks of a stage that hold the same experts (Megatron core/parallel_state.py)."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def expert_dp_shard(self) -> int:
        """Ranks that share one copy of the same experts under ZeRO."""
        return max(self.expert_dp // self.dp_replicate, 1)

    @property
    def dp_shard(self) -> int:
        """Data-parallel ranks that share one copy under ZeRO."""
        return self.dp // self.dp_replicate

    @property
    def virtual_stages(self) -> int:
        """Chunks of layers in the whole pipeline, `vpp` of them on each stage."""
        return self.pp * self.vpp

    @property
    def schedule(self) -> Schedule:
        """The one that a plan has when it names none: 1F1B, interleaved with more than one chunk a stage."""
        return "interleaved-1f1b" if self.vpp > 1 else "1f1b"


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: the layers of each of its `vpp` chunks, and what is recomputed.

    `recompute` is "none", "selective" or "full". Selective recompute repeats the modules `recompute_modules` of every
    layer that has them (`data.recompute.MODULES`), the attention core (Korthikanti et al., arXiv 2205.05198, section 5)
    where none are named.
    With `recompute="full"` the first `recompute_layers` layers of every chunk are recomputed (Megatron's block method,
    core/transformer/transformer_block.py); a chunk with fewer layers is recomputed whole.
    """

    chunks: tuple[int, ...]
    recompute: Recompute = "none"
    recompute_layers: int = 0
    recompute_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = []
        try:
            named = self.recompute_modules or ((CORE,) if self.recompute == "selective" else ())
            object.__setattr__(self, "recompute_modules", modules_of(module_set(named)) if named else ())
        except (ValueError, TypeError) as error:
            faults.append(f"stage: {error}")
        if self.recompute_modules and self.recompute != "selective":
            faults.append(f"stage.recompute_modules={self.recompute_modules} needs recompute=selective")
        if not self.chunks or not all(_is_count(n, 0) for n in self.chunks):
            faults.append(f"stage.chunks={self.chunks} must be one layer count, not negative, per chunk")
        if self.recompute not in ("none", "selective", "full"):
            faults.append(f"stage.recompute={self.recompute!r} must be none, selective or full")
        if not _is_count(self.recompute_layers, 0) or (self.recompute == "full") != (self.recompute_layers > 0):
            faults.append(
                f"stage.recompute_layers={self.recompute_layers} must be positive with recompute=full and 0 otherwise"
            )
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def layers(self) -> int:
        """Of all chunks together."""
        return sum(self.chunks)

    @property
    def mode(self) -> str:
        """ "none", "full" or the set of modules."""
        return "+".join(self.recompute_modules) or self.recompute

    @property
    def recompute_words(self) -> str:
        """As reports put it: "none", "full 3", "selective" of the attention core, or "selective layernorm+moe_act"."""
        detail = self.recompute_layers or ("" if self.mode == CORE else "+".join(self.recompute_modules))
        return f"{self.recompute} {detail}".strip()


def stage_in(chunks: tuple[int, ...], mode: str, block: int = 0) -> Stage:
    """A stage in a mode of `Stage.mode`."""
    if mode in ("none", "full"):
        return Stage(chunks, mode, block)  # type: ignore[arg-type]
    return Stage(chunks, "selective", 0, modules_of(mode))


@dataclass(frozen=True, slots=True)
class Placement:
    """How each degree factors over the levels of the cluster, innermost level first: one factor per level.

    `tp=(8, 2)` spreads sixteen tensor-parallel ranks over two domains of eight. Each member of a level holds one block
    of the levels below it. Rank numbers follow `rank_order`, fastest axis first.
    """

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    dp: tuple[int, ...]
    rank_order: RankOrder = "tp-dp-pp"
    cp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.cp:
            object.__setattr__(self, "cp", (1,) * len(self.tp))
        stated = f"placement: tp={self.tp}, cp={self.cp}, pp={self.pp}, dp={self.dp}"
        if not len(self.tp) == len(self.pp) == len(self.dp) == len(self.cp) > 0:
            raise ValueError(f"{stated} must have one factor per level each")
        if not all(_is_count(f, 1) for f in (*self.tp, *self.cp, *self.pp, *self.dp)):
            raise ValueError(f"{stated} must be whole numbers of at least 1")
        if self.rank_order not in ("tp-dp-pp", "tp-pp-dp"):
            raise ValueError(f"placement.rank_order={self.rank_order!r} must be tp-dp-pp or tp-pp-dp")

    def factors(self, axis: str) -> tuple[int, ...]:
        """Those of "tp", "cp", "pp" or "dp"."""
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp, "cp": self.cp}[axis]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Members used at each level, innermost first."""
        return tuple(t * c * p * d for t, c, p, d in zip(self.tp, self.cp, self.pp, self.dp, strict=True))

    def crossing_level(self, rank: int) -> int:
        """The level whose link joins pipeline rank `rank` to `rank + 1`."""
        step = 1
        for level, factor in enumerate(self.pp):
            step *= factor
            if (rank + 1) % step:
                return level
        return len(self.pp) - 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What a user runs: degrees, one `Stage` per pipeline rank, a placement, and micro-batches per replica and step.

    `schedule` is 1F1B, interleaved with `vpp` > 1, where it is not said. `instance` and `evaluation` are the documents
    saved beside it, when there are any; they take no part in comparisons.

    Raises
    ------
    ValueError
        When stages, chunks, placement or schedule do not belong to the degrees, naming every field.
    """

    degrees: Degrees
    stages: tuple[Stage, ...]
    placement: Placement
    micro_batches: int
    schedule: Schedule = field(default="", kw_only=True)  # type: ignore[arg-type]
    instance: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    evaluation: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        faults = []
        if not self.schedule:
            object.__setattr__(self, "schedule", self.degrees.schedule)
        elif self.schedule not in SCHEDULES:
            faults.append(f"plan.schedule={self.schedule!r} must be one of {', '.join(SCHEDULES)}")
        else:
            faults += [f"plan.{fault}" for fault in chunks_faults(self.schedule, self.degrees.vpp)]
        if len(self.stages) != self.degrees.pp:
            faults.append(f"plan.stages: {len(self.stages)} stages given, pp={self.degrees.pp}")
        if {len(stage.chunks) for stage in self.stages} - {self.degrees.vpp}:
            faults.append(f"plan.stages: every stage must have vpp={self.degrees.vpp} chunks")
        d, placed = self.degrees, self.placement
        if (prod(placed.tp), prod(placed.pp), prod(placed.dp), prod(placed.cp)) != (d.tp, d.pp, d.dp, d.cp):
            faults += [
                f"placement.{axis}={placed.factors(axis)} multiplies to {prod(placed.factors(axis))}, "
                f"not {axis}={getattr(d, axis)}"
                for axis in PLACED
                if prod(placed.factors(axis)) != getattr(d, axis)
            ]
        if not _is_count(self.micro_batches, 1):
            faults.append(f"plan.micro_batches={self.micro_batches!r} must be a whole number of at least 1")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def layout(self) -> Layout:
        """Where the chunks lie."""
        return layout(self.schedule, self.degrees.pp, self.degrees.vpp)

    @property
    def chunk_layers(self) -> tuple[int, ...]:
        """Layers of every chunk in network order."""
        return tuple(self.stages[stage].chunks[row] for stage, row in self.layout.places)

    @property
    def layer_stages(self) -> tuple[int, ...]:
        """The stage of every layer."""
        where = zip(self.layout.places, self.chunk_layers, strict=True)
        return tuple(stage for (stage, _), layers in where for _ in range(layers))

    @property
    def cuts(self) -> tuple[int, ...]:
        """First layer of every chunk in network order, and the number of layers at the end."""
        out = [0]
        for layers in self.chunk_layers:
            out.append(out[-1] + layers)
        return tuple(out)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: plain lists, numbers and strings."""
        cuts = self.cuts
        document: dict[str, Any] = {
            "version": PLAN_VERSION,
            "kind": "training",
            "degrees": self.degrees.to_dict() | {"devices": self.degrees.devices},
            "schedule": self.schedule,
            "micro_batches": self.micro_batches,
            "stages": [
                {
                    "layers": stage.layers,
                    "chunks": [
                        {"first_layer": cuts[slot], "layers": layers}
                        for slot, layers in zip(self.layout.slots_of(k), stage.chunks, strict=False)
                    ],
                    "recompute": stage.recompute,
                    "recompute_layers": stage.recompute_layers,
                    **(
                        {}
                        if stage.mode in ("none", CORE, "full")
                        else {"recompute_modules": list(stage.recompute_modules)}
                    ),
                }
                for k, stage in enumerate(self.stages)
            ],
            "placement": {
                "rank_order": self.placement.rank_order,
                **{axis: list(self.placement.factors(axis)) for axis in PLACED},
            },
        }
        if self.instance is not None:
            document["instance"] = self.instance
        if self.evaluation is not None:
            document["evaluation"] = self.evaluation
        return document

    def to_json(self) -> str:
        """The text of `plan.json` (`docs/plan.schema.json`)."""
        return json.dumps(self.to_dict(), indent=2)

    @staticmethod
    def from_dict(document: Any) -> Plan:
        """Read the JSON document back.

        Raises
        ------
        InputError
            Naming every field that is missing, unknown or breaks a rule.
        """
        if not isinstance(document, dict):
            raise InputError("plan: the document must be a JSON object")
        if document.get("version") != PLAN_VERSION:
            raise InputError(
                f"plan.version={document.get('version')!r} is not supported; this release reads {PLAN_VERSION}"
            )
        faults: list[str] = []
        degrees = _read_degrees(document.get("degrees"), faults)
        stages = _read_stages(document.get("stages"), faults)
        placement = _read_placement(document.get("placement"), faults)
        if faults or degrees is None or stages is None or placement is None:
            raise InputError(faults)
        try:
            schedule = document.get("schedule", degrees.schedule)
            plan = Plan(degrees, stages, placement, document.get("micro_batches", 0), schedule=schedule)
        except ValueError as error:
            raise InputError(str(error)) from None
        faults += _contradictions(document, plan.to_dict())
        if faults:
            raise InputError(faults)
        return replace(plan, instance=document.get("instance"), evaluation=document.get("evaluation"))

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read `plan.json`; raises `InputError` as `from_dict` does."""
        if len(text) > MAX_FILE_BYTES:
            raise InputError(f"plan: the file is larger than {MAX_FILE_BYTES} bytes")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"plan: not JSON: {error}") from None
        return Plan.from_dict(document)


def _contradictions(document: dict[str, Any], read: dict[str, Any]) -> Iterator[str]:
    """Where a document says something else of what follows from the rest of it."""

    def other(name: str, said: Any, own: Any) -> Iterator[str]:
        if said != own:
            yield f"plan.{name}={said!r:.40} does not go with the rest of the plan, which makes it {own!r}"

    yield from other("kind", document.get("kind", read["kind"]), read["kind"])
    devices = read["degrees"]["devices"]
    yield from other("degrees.devices", document["degrees"].get("devices", devices), devices)
    for k, (stage, own) in enumerate(zip(document["stages"], read["stages"], strict=True)):
        yield from other(f"stages[{k}].layers", stage.get("layers", own["layers"]), own["layers"])
        for row, (chunk, part) in enumerate(zip(stage["chunks"], own["chunks"], strict=True)):
            first = part["first_layer"]
            yield from other(f"stages[{k}].chunks[{row}].first_layer", chunk.get("first_layer", first), first)


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= MAX_DEGREE


def _read_degrees(entry: Any, faults: list[str]) -> Degrees | None:
    if not isinstance(entry, dict):
        faults.append("plan.degrees must be an object of degrees")
        return None
    known = {name: value for name, value in entry.items() if name != "devices"}
    unknown = set(known) - set(Degrees.__slots__)
    faults += [f"plan.degrees.{name} is unknown" for name in sorted(unknown)]
    try:
        return Degrees(**{name: value for name, value in known.items() if name not in unknown})
    except ValueError as error:
        faults.append(f"plan: {error}")
        return None


def _read_stages(entry: Any, faults: list[str]) -> tuple[Stage, ...] | None:
    if not isinstance(entry, list) or not entry:
        faults.append("plan.stages must be a list with one object per stage")
        return None
    stages = []
    for index, stage in enumerate(entry):
        try:
            chunks = tuple(chunk["layers"] for chunk in stage["chunks"])
            modules = tuple(stage.get("recompute_modules", ()))
            stages.append(Stage(chunks, stage.get("recompute", "none"), stage.get("recompute_layers", 0), modules))
        except (KeyError, TypeError, AttributeError):
            faults.append(f"plan.stages[{index}] needs chunks, each with layers")
        except ValueError as error:
            faults.append(f"plan.stages[{index}]: {error}")
    return tuple(stages) if len(stages) == len(entry) else None


def _read_placement(entry: Any, faults: list[str]) -> Placement | None:
    try:
        tp, pp, dp = (tuple(entry[axis]) for axis in AXES)
        return Placement(tp, pp, dp, entry.get("rank_order", "tp-dp-pp"), tuple(entry.get("cp", ())))
    except (KeyError, TypeError, AttributeError):
        faults.append(f"plan.placement needs a list of factors for each of {', '.join(AXES)}")
    except ValueError as error:
        faults.append(f"plan: {error}")
    return None
