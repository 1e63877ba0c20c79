"""Measured training runs: rows of a CSV as models, clusters, workloads and degrees.

The columns are those of `training_calibration.csv` in the collected facts, one run a row: architecture, hardware, layout,
software, and what was measured. Empty architecture columns are taken from the catalogue model that `model` names, and
listed as assumed. A row that cannot be modelled keeps its place with a reason.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

from shardwise.data.faults import InputError, unreadable
from shardwise.data.model import MAX_LAYERS, Latent, Model
from shardwise.data.model_catalog import load_model
from shardwise.data.model_parts import attention, latent_attention, layer, linear, mlp, moe, norm
from shardwise.data.plan import Degrees
from shardwise.data.run_hardware import cluster_of
from shardwise.data.run_words import (
    DISTRIBUTED,
    attention_of,
    fused_norm_of,
    lora_of,
    precision_of,
    profile_of,
    recompute_modules_of,
    recompute_of,
    zero_of,
)
from shardwise.data.workload import Training

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from shardwise.data.cluster import Cluster
    from shardwise.data.model import LayerKind

Row = dict[str, str]
MemoryKind = Literal["allocated", "reserved", "device"]

NEEDED = ("id", "model", "gpu", "n_gpus", "seq_len", "micro_batch", "global_batch", "framework")
MAX_ROWS = 1_000_000
MAX_CELL = 10_000

NOT_SCORED = (
    "unusable", "implausible", "duplicate", "suspicious", "ratio_only", "not_comparable", "noisy", "bubble_dominated",
    "inferred", "step_vs_block_derived",
)  # fmt: skip
"""Flags of rows whose time is not what the layout gives."""

GATED = ("llama", "internlm", "mistral", "mixtral", "qwen", "deepseek", "moonlight", "gemma", "yi", "baichuan", "palm")


@dataclass(frozen=True)
class Run:
    """One row: what ran, how, and what was measured. With `reason` set, `degrees` and the rest may be missing."""

    id: str
    source: str
    row: Row = field(repr=False)
    profile: str
    reason: str = ""
    model: Model | None = None
    cluster: Cluster | None = None
    workload: Training | None = None
    degrees: Degrees | None = None
    schedule: str = ""
    recompute: str = "none"
    recompute_share: float = 1.0
    recompute_modules: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """n_gpus."""
        return _count(self.row, "n_gpus")

    @property
    def measured_step_time_s(self) -> float | None:
        return _number(self.row, "step_time_s")

    @property
    def measured_memory_gb(self) -> float | None:
        return _number(self.row, "peak_mem_gb")

    @property
    def out_of_memory(self) -> bool:
        return _number(self.row, "oom") == 1

    @property
    def flags(self) -> str:
        return self.row.get("flags", "").lower()

    @property
    def scored(self) -> bool:
        """Whether its step time is a measurement of its layout."""
        stated = _number(self.row, "tp") is not None and _number(self.row, "pp") is not None
        sharded = any(word in self.row.get("zero_fsdp", "").lower() for word in ("fsdp", "hsdp", "zero"))
        return (
            self.measured_step_time_s is not None
            and (stated or sharded)
            and not self.out_of_memory
            and not any(flag in self.flags for flag in NOT_SCORED)
        )

    @property
    def scored_memory_gb(self) -> float | None:
        """Its memory reading; None without one, or where its unit is in doubt."""
        return None if "mem_unit" in self.flags else self.measured_memory_gb

    @property
    def scored_out_of_memory(self) -> bool:
        """Whether it ran out of memory for its size, not for the fragmentation of one run."""
        return self.out_of_memory and "oom_due_to_fragmentation" not in self.flags

    @property
    def memory_kind(self) -> MemoryKind:
        """What the source's memory reading counts; the device's where it does not say."""
        notes = self.row.get("notes", "").lower()
        if "allocated" in notes or "alloc_gib" in notes:
            return "allocated"
        if "reserved" in notes:
            return "reserved"
        return KIND_OF_SOURCE.get(self.source, "device")


KIND_OF_SOURCE: dict[str, MemoryKind] = {"zb": "allocated", "tt": "reserved"}


def read_runs(path: Path | str) -> list[Run]:
    """Every row of a CSV of runs, in order.

    Raises
    ------
    InputError
        When the file cannot be read as a table with the columns needed.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError([f"{path}: column {name} is missing" for name in missing])
            rows = [{key: (value or "")[:MAX_CELL] for key, value in row.items() if key} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a readable CSV: {unreadable(error)}") from None
    if len(rows) > MAX_ROWS:
        raise InputError(f"{path}: {len(rows)} rows, at most {MAX_ROWS} are read")
    return [run_of(row) for row in rows]


def run_of(row: Row) -> Run:
    """One row as a `Run`; what cannot be modelled becomes its `reason`."""
    run = Run(row["id"], row["id"].split("_")[0], row, profile_of(row.get("framework", ""), row.get("zero_fsdp", "")))
    try:
        return _modelled(run)
    except (InputError, ValueError) as error:
        faults = error.faults if isinstance(error, InputError) else [str(error)]
        return replace(run, reason="; ".join(faults))


def _modelled(run: Run) -> Run:
    row = run.row
    assumed: list[str] = []
    lora = lora_of(" ".join((row["model"], row.get("framework", ""), row.get("notes", "")[:80])), assumed)
    faults = [f"{name} is empty" for name in ("n_gpus", "seq_len", "global_batch") if not row.get(name)]
    sharded = any(word in row.get("zero_fsdp", "").lower() for word in ("fsdp", "hsdp", "zero"))
    if not row.get("tp") and not sharded:
        faults.append("tp is empty: the layout is not known")
    if faults:
        raise InputError(faults)
    model, guessed = _model(row)
    degrees = _degrees(row, assumed)
    workload = Training(
        seq_len=_count(row, "seq_len"),
        global_batch=_count(row, "global_batch"),
        precision=precision_of(row.get("precision", ""), assumed),
        attention=attention_of(row.get("flash_attention", ""), run.profile, assumed),
        fused_norm=fused_norm_of(row, run.profile),
        fp32_gradients="fp32 grad" in row.get("precision", "").lower(),
        **lora,
    )
    cluster = cluster_of(
        row["gpu"],
        degrees.devices,
        _whole(row, "gpus_per_node"),
        row.get("interconnect", ""),
        _number(row, "gpu_mem_gb"),
    )
    schedule = _schedule(row, degrees)
    if schedule == "zb-v":
        degrees = replace(degrees, vpp=2)
    recompute, share = recompute_of(row.get("recompute", ""))
    if recompute == "unknown":
        assumed.append("recompute is not stated: none assumed")
        recompute = "none"
    return replace(
        run,
        model=model,
        cluster=cluster,
        workload=workload,
        degrees=degrees,
        schedule=schedule,
        recompute=recompute,
        recompute_share=share,
        recompute_modules=recompute_modules_of(row.get("recompute", "")),
        assumed=(*guessed, *assumed),
    )


# -- architecture ------------------------------------------------------------------------------------------------------


def _model(row: Row) -> tuple[Model, tuple[str, ...]]:
    known = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "moe", "n_params_b", "seq_len")
    return _built(row["model"], tuple(row.get(name, "") for name in known))


@lru_cache(maxsize=4096)
def _built(name: str, cells: tuple[str, ...]) -> tuple[Model, tuple[str, ...]]:
    """The model of a row; `cells` are its architecture columns."""
    stated = [float(text) if text and index != 6 else None for index, text in enumerate(cells)]
    experts = cells[6]
    layers, hidden, heads, kv_heads, ffn, vocab, _, params_b, seq_len = stated
    named = catalog_model(name)
    if named is not None and _agrees(named, layers, hidden):
        return _with_layers(named, layers), (f"architecture of {named.name} from the catalogue",)
    if layers is None or hidden is None or heads is None:
        raise InputError(f"model {name!r} is not in the catalogue and layers, hidden or heads are empty")
    assumed: list[str] = []
    if not 1 <= layers <= MAX_LAYERS or not 1 <= hidden <= 2**20 or not 1 <= heads <= 2**16:
        raise InputError(f"layers={layers:g}, hidden={hidden:g}, heads={heads:g} are out of range")
    if vocab is None:
        vocab = 51200.0
        assumed.append("vocab=51200 (GPT-2's, padded)")
    width = int(hidden)
    gated = any(word in name.lower() for word in GATED)
    if ffn is None:
        ffn = 4 * hidden
        assumed.append("ffn=4 x hidden")
    if params_b and not experts:
        gated = _gated(params_b * 1e9, layers, hidden, heads, kv_heads or heads, ffn, vocab, gated)
    kind_of_norm: Literal["rmsnorm", "layernorm"] = "rmsnorm" if gated else "layernorm"
    mixer: Any
    if "MLA" in experts:
        mixer = latent_attention(width, int(heads), Latent(1536, 512, 128, 64), 128)
        assumed.append("MLA ranks of DeepSeek-V2")
    else:
        head_dim = 128 if "qwen3" in name.lower() else max(width // int(heads), 1)
        mixer = attention(width, int(heads), int(kv_heads or heads), head_dim, bias=not gated, out_bias=not gated)
    dense = layer(width, mixer, mlp(width, int(ffn), gated=gated, bias=not gated), norm_kind=kind_of_norm)
    kinds: tuple[LayerKind, ...] = (dense,) * int(layers)
    if experts:
        sparse = layer(width, mixer, _experts(width, int(ffn), experts), norm_kind=kind_of_norm)
        first = 1 if "MLA" in experts else 0
        kinds = (dense,) * first + (sparse,) * (int(layers) - first)
    tied = not gated or _is_tied(params_b, kinds, width * vocab)
    positions = linear("embed_positions", int(seq_len or 2048), width, "none") if not gated else ()
    head = () if tied else linear("lm_head", int(vocab), width, "vocab")
    model = Model(
        name, "row", width, int(vocab), tied, kinds,
        (*linear("embed", int(vocab), width, "vocab"), *positions), (*head, *norm("norm", width, kind_of_norm)),
        norm=kind_of_norm, assumed=tuple(assumed),
    )  # fmt: skip
    return model, tuple(assumed)


def _experts(width: int, intermediate: int, text: str) -> Any:
    found = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}
    for key, pattern in (("experts", r"(\d+)\s*experts"), ("topk", r"top-?(\d+)")):
        stated = re.search(pattern, text.lower())
        if stated:
            found.setdefault(key, int(stated[1]))
    found.setdefault("moe_ffn", intermediate)
    if not {"experts", "topk"} <= set(found):
        raise InputError(f"moe={text!r} must state experts and topk")
    return moe(width, found["experts"], found["topk"], found["moe_ffn"], shared_intermediate=found.get("shared_ffn", 0))


def _gated(
    params: float, layers: float, hidden: float, heads: float, kv_heads: float, ffn: float, vocab: float, named: bool
) -> bool:
    """Whether a feed-forward part of two or of three matrices comes nearer to the stated size."""
    shared = layers * hidden * hidden * (2 + 2 * kv_heads / heads)
    sizes = {gated: shared + layers * hidden * ffn * (3 if gated else 2) + vocab * hidden for gated in (False, True)}
    sizes[True] += vocab * hidden
    near = min(sizes, key=lambda gated: abs(sizes[gated] - params))
    far = sizes[not near]
    return near if abs(far - params) > 2 * abs(sizes[near] - params) else named


def _is_tied(params_b: float | None, kinds: tuple[LayerKind, ...], table: float) -> bool:
    """Whether the stated size leaves no room for a head of its own."""
    if not params_b:
        return False
    body = sum(kind.params for kind in kinds)
    return abs(body + table - params_b * 1e9) < abs(body + 2 * table - params_b * 1e9)


def _agrees(model: Model, layers: float | None, hidden: float | None) -> bool:
    """Whether a catalogue model can stand for the row: same width, and as many layers unless it was cut."""
    return (hidden is None or model.hidden == hidden) and (layers is None or len(model.layers) == layers)


def _with_layers(model: Model, layers: float | None) -> Model:
    return (
        model if layers is None or len(model.layers) == layers else replace(model, layers=model.layers[: int(layers)])
    )


@lru_cache(maxsize=1024)
def catalog_model(name: str) -> Model | None:
    """The catalogue model that a row names, however it spells it."""
    text = re.sub(r"\[.*?\]|\(.*?\)", " ", name).strip()
    plain = re.sub(r"[\s_]+", "-", text).strip("-")
    spaced = re.sub(r"(?i)^gpt-?3-", "gpt-", plain)
    for attempt in (name, text, plain, spaced, re.sub(r"(?i)^llama(\d)", r"llama-\1", plain)):
        try:
            return load_model(attempt)
        except (InputError, OSError):
            continue
    return None


# -- layout ------------------------------------------------------------------------------------------------------------


def _degrees(row: Row, assumed: list[str]) -> Degrees:
    devices = _count(row, "n_gpus")
    tp, pp, cp = (_whole(row, name) or 1 for name in ("tp", "pp", "cp"))
    ep = _whole(row, "ep") or 1
    dp = _whole(row, "dp") or max(devices // (tp * pp * cp), 1)
    sharding = row.get("zero_fsdp", "").lower()
    zero, replicate = zero_of(sharding, dp)
    if not sharding and profile_of(row.get("framework", "")) in DISTRIBUTED:
        zero = 1
        assumed.append("distributed optimizer (not stated)")
    micro_batch = _whole(row, "micro_batch")
    if micro_batch is None:
        if row.get("micro_batch"):
            micro_batch = _count(row, "micro_batch")
        micro_batch = 1
        assumed.append("micro_batch=1 (not stated)")
    sequence_parallel = row.get("seq_parallel", "").lower()
    if sequence_parallel.startswith(("yes", "no")) and not sequence_parallel.startswith("not"):
        parallel = sequence_parallel.startswith("yes")
    else:
        parallel = profile_of(row.get("framework", "")) not in ("megatron-2021",)
        if tp > 1:
            assumed.append(f"sequence_parallel={str(parallel).lower()} (not stated)")
    vpp_text = row.get("vpp", "")
    vpp = _whole(row, "vpp") or 1
    if vpp_text.startswith("L/p"):
        layers = _whole(row, "layers") or pp
        vpp = max((layers + 2) // pp, 1)
    return Degrees(
        tp=tp, pp=pp, dp=dp, vpp=vpp if pp > 1 else 1, micro_batch=micro_batch, zero=zero,
        sequence_parallel=parallel and tp > 1, cp=cp, ep=ep, etp=_expert_split(tp, cp, dp, ep), dp_replicate=replicate,
    )  # fmt: skip


def _expert_split(tp: int, cp: int, dp: int, ep: int) -> int:
    """Experts are whole where they are spread, as the recipes have them, and split by tp where they are not."""
    return 1 if ep > 1 and tp * cp * dp % ep == 0 else 0


def _schedule(row: Row, degrees: Degrees) -> str:
    text = row.get("framework", "").lower()
    for part, schedule in (
        ("zb-2p", "zb-2p"),
        ("zb-1p", "zb-h1"),
        ("zb-h1", "zb-h1"),
        ("zb-v", "zb-v"),
        ("gpipe", "gpipe"),
    ):
        if part in text:
            return schedule
    return degrees.schedule


# -- cells -------------------------------------------------------------------------------------------------------------


def _number(row: Row, name: str) -> float | None:
    text = row.get(name, "")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e18 else None


def _whole(row: Row, name: str) -> int | None:
    value = _number(row, name)
    return int(value) if value is not None and value >= 1 and value == int(value) else None


def _count(row: Row, name: str) -> int:
    value = _whole(row, name)
    if value is None:
        raise InputError(f"{name}={row.get(name, '')!r} must be a whole number of at least 1")
    return value


def by_source(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs by their source, in order of first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.source, []).append(run)
    return groups


@lru_cache(maxsize=1)
def shipped_runs() -> tuple[Run, ...]:
    """The measured runs that ship with the package, those that the profiles were fitted to."""
    with resources.as_file(resources.files("shardwise.data") / "measured" / "training_calibration.csv") as path:
        return tuple(read_runs(path))
