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

from shardwise.data.cluster_catalog import family_cluster, load_accelerator, load_family
from shardwise.data.faults import InputError
from shardwise.data.model import MAX_LAYERS, Latent, Model
from shardwise.data.model_catalog import load_model
from shardwise.data.model_parts import attention, latent_attention, layer, linear, mlp, moe, norm
from shardwise.data.plan import Degrees
from shardwise.data.workload import Training

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from shardwise.data.cluster import Cluster, Link
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

FAMILY_OF = (
    ("gb300", "gb300-nvl72"),
    ("gb200", "gb200-nvl72"),
    ("b300", "dgx-b300"),
    ("b200", "dgx-b200"),
    ("h200", "dgx-h200"),
    ("h800", "dgx-h800"),
    ("h100", "dgx-h100"),
    ("a800", "dgx-a800"),
    ("a100-sxm4-40", "dgx-a100-40gb"),
    ("a100", "dgx-a100"),
    ("v100", "v100-sxm"),
    ("mi355", "mi355x"),
    ("mi350", "mi355x"),
    ("mi325", "mi325x"),
    ("mi300", "mi300x"),
    ("l40s", "l40s"),
    ("a10g", "a10g"),
    ("910b", "ascend-910b"),
    ("v5p", "tpu-v5p"),
    ("v5e", "tpu-v5e"),
    ("v6e", "tpu-v6e"),
    ("gaudi3", "gaudi3"),
    ("gaudi2", "gaudi2"),
)
"""Node family by a part of the accelerator's name, more specific ones first."""

PROFILE_OF = (
    ("nvidia release", "mlperf-nemo"),
    ("framework release", "mlperf-nemo"),
    ("container 26.06", "megatron-bridge-26.06"),
    ("container 26.08", "megatron-bridge-26.06"),
    ("container 2", "megatron-bridge"),
    ("megatron-bridge", "megatron-lm-2026"),
    ("te 2.", "megatron-lm-2026"),
    ("nemo", "megatron-core"),
    ("megatron-core", "megatron-core"),
    ("torchtitan", "torchtitan"),
    ("nanotron", "nanotron"),
    ("internevo", "internevo"),
    ("internlm", "internevo"),
    ("llm-foundry", "fsdp1"),
    ("composer", "fsdp1"),
    ("fsdp", "fsdp1"),
    ("aleph", "aleph-scaling"),
    ("megatron-lm schedule", "megatron-2023"),
    ("megatron-deepspeed", "megatron-2021"),
    ("deepspeed", "megatron-2021"),
    ("megatron-lm (202", "megatron-2021"),
    ("megatron", "megatron-core"),
    ("mxnet", "mlperf-nemo"),
    ("maxtext", "megatron-core"),
    ("paxml", "megatron-core"),
)
"""Profile by a part of what `framework` says, first match."""

BEFORE_FLASH = ("megatron-2021", "megatron-2023", "aleph-scaling")
"""Generations whose default is the fused softmax."""
DISTRIBUTED = ("megatron-core", "megatron-bridge", "megatron-bridge-26.06", "mlperf-nemo", "megatron-lm-2026")
"""Generations whose recipes use the distributed optimizer."""
FALLBACK_PROFILE = "megatron-core"
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
    assumed: tuple[str, ...] = ()

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
        raise InputError(f"{path}: not a readable CSV: {error}") from None
    if len(rows) > MAX_ROWS:
        raise InputError(f"{path}: {len(rows)} rows, at most {MAX_ROWS} are read")
    return [run_of(row) for row in rows]


def run_of(row: Row) -> Run:
    """One row as a `Run`; what cannot be modelled becomes its `reason`."""
    run = Run(row["id"], row["id"].split("_")[0], row, profile_of(row.get("framework", "")))
    try:
        return _modelled(run)
    except (InputError, ValueError) as error:
        faults = error.faults if isinstance(error, InputError) else [str(error)]
        return replace(run, reason="; ".join(faults))


def profile_of(framework: str) -> str:
    """The profile of the framework generation that a text names."""
    text = framework.lower()
    return next((profile for part, profile in PROFILE_OF if part in text), FALLBACK_PROFILE)


def _modelled(run: Run) -> Run:
    row = run.row
    assumed: list[str] = []
    if "lora" in (row["model"] + row.get("framework", "") + row.get("notes", "")[:80]).lower():
        raise InputError("LoRA: frozen weights are not modelled yet")
    faults = [f"{name} is empty" for name in ("n_gpus", "seq_len", "micro_batch", "global_batch") if not row.get(name)]
    sharded = any(word in row.get("zero_fsdp", "").lower() for word in ("fsdp", "hsdp"))
    if not row.get("tp") and not sharded:
        faults.append("tp is empty: the layout is not known")
    if faults:
        raise InputError(faults)
    model, guessed = _model(row)
    degrees = _degrees(row, assumed)
    workload = Training(
        seq_len=_count(row, "seq_len"),
        global_batch=_count(row, "global_batch"),
        precision=_precision(row.get("precision", ""), assumed),
        attention=_attention(row.get("flash_attention", ""), run.profile, assumed),
        fused_norm=_fused_norm(row, run.profile),
        fp32_gradients="fp32 grad" in row.get("precision", "").lower(),
    )
    cluster = cluster_of(
        row["gpu"],
        degrees.devices,
        _whole(row, "gpus_per_node"),
        row.get("interconnect", ""),
        _number(row, "gpu_mem_gb"),
    )
    recompute, share = _recompute(row.get("recompute", ""))
    if recompute == "unknown":
        assumed.append("recompute is not stated: none assumed")
        recompute = "none"
    return replace(
        run,
        model=model,
        cluster=cluster,
        workload=workload,
        degrees=degrees,
        schedule=_schedule(row, degrees),
        recompute=recompute,
        recompute_share=share,
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
        sparse = layer(width, mixer, _experts(width, experts), norm_kind=kind_of_norm)
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


def _experts(width: int, text: str) -> Any:
    found = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}
    if not {"experts", "topk", "moe_ffn"} <= set(found):
        raise InputError(f"moe={text!r} must state experts, topk and moe_ffn")
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
    zero, replicate = _zero(sharding, dp)
    if not sharding and profile_of(row.get("framework", "")) in DISTRIBUTED:
        zero = 1
        assumed.append("distributed optimizer (not stated)")
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
        tp=tp, pp=pp, dp=dp, vpp=vpp if pp > 1 else 1, micro_batch=_count(row, "micro_batch"), zero=zero,
        sequence_parallel=parallel and tp > 1, cp=cp, ep=ep, etp=1 if ep > 1 else 0, dp_replicate=replicate,
    )  # fmt: skip


def _zero(text: str, dp: int) -> tuple[int, int]:
    """ZeRO stage and replica groups from what a row says."""
    group = re.search(r"group of (\d+)", text)
    replicate = dp // int(group[1]) if group and dp % int(group[1]) == 0 and dp > int(group[1]) else 1
    if "hsdp" in text and "fsdp (" not in text:
        return 3, dp // 8 if dp % 8 == 0 and dp > 8 else 1
    if "fsdp" in text or "zero-3" in text or "zero3" in text:
        return 3, replicate
    if "zero-2" in text or "zero2" in text:
        return 2, replicate
    if "zero-1" in text or "zero1" in text or "distributed optimizer" in text:
        return 1, replicate
    return 0, 1


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


def _recompute(text: str) -> tuple[str, float]:
    """Mode and share of layers."""
    text = text.lower()
    if not text or "recipe" in text:
        return "unknown", 1.0
    if "every other" in text or "every n-th" in text:
        return "full", 0.5
    if text.startswith("full"):
        return "full", 1.0
    if text.startswith("selective"):
        return "selective", 1.0
    return "none", 1.0


def _precision(text: str, assumed: list[str]) -> Any:
    text = text.lower()
    if "nvfp4" in text or "fp4" in text:
        if "ambiguous" in text:
            assumed.append("precision=nvfp4 (fp8 or nvfp4 in the source)")
        return "nvfp4"
    if "mxfp8" in text or "fp8-mx" in text or "mx on" in text:
        return "mxfp8"
    if "fp8" in text:
        return "fp8"
    return "fp16" if text.startswith("fp16") and "bf16" not in text else "bf16"


def _attention(text: str, profile: str, assumed: list[str]) -> Any:
    text = text.lower()
    if "v1" in text or "triton" in text or text == "flash_attention":
        return "flash1"
    if text.startswith(("yes", "flash_attention2", "sdpa")):
        return "flash2"
    if text.startswith("no") or text == "fused":
        return "unfused"
    if text == "torch":
        return "eager"
    if not text:
        kernel = "unfused" if profile in BEFORE_FLASH else "flash"
        assumed.append(f"attention={kernel} (not stated)")
        return kernel
    return "flash"


def _fused_norm(row: Row, profile: str) -> bool:
    kernels = row.get("flash_attention", "").lower()
    framework = row.get("framework", "").lower()
    if profile == "aleph-scaling":
        return "rms" in kernels
    if profile == "torchtitan":
        return "compile" in framework
    return True


# -- hardware ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def cluster_of(
    gpu: str, devices: int, per_node: int | None, interconnect: str, memory_gb: float | None = None
) -> Cluster:
    """The cluster of a run: its node family with as many nodes as the run used, and the network that it names."""
    text = gpu.lower().replace("_", "-").replace(" ", "-")
    family_name = next((family for part, family in FAMILY_OF if part in text), None)
    if family_name is None:
        raise InputError(f"gpu={gpu!r} is not an accelerator of the catalogue")
    family = load_family(family_name)
    if memory_gb is not None and "40gb" in text.replace("-", "") and family_name == "dgx-a100":
        family = load_family("dgx-a100-40gb")
    accelerator = family.accelerator
    if "pcie" in text:
        accelerator = _variant(gpu, accelerator)
    memory = int(memory_gb * 2**30) if memory_gb else accelerator.memory_bytes
    if memory_gb and abs(memory / accelerator.memory_bytes - 1) > 0.05:
        accelerator = replace(accelerator, name=f"{accelerator.name}-{memory_gb:g}GB", memory_bytes=memory)
    if "hbm2e" in text and "h100" in text:
        accelerator = replace(accelerator, memory_bandwidth_bytes_per_s=2.4e12, tdp_w=500.0)
    node = min(per_node or family.devices_per_node, family.devices_per_node)
    levels = list(family.levels)
    rate = network_bytes_per_s(interconnect, family.devices_per_node)
    if rate is not None:
        levels[-1] = replace(levels[-1], link=_with_rate(levels[-1].link, rate))
    family = replace(family, accelerator=accelerator, levels=tuple(levels))
    nodes = -(-devices // node)
    used = node if devices >= node else devices
    if nodes > 1 and devices % node:
        raise InputError(f"n_gpus={devices} is not a whole number of nodes of {node}")
    return family_cluster(family, nodes, used)


def _variant(gpu: str, accelerator: Any) -> Any:
    try:
        return load_accelerator(re.sub(r"\(.*?\)", "", gpu).strip())
    except InputError:
        return accelerator


def network_bytes_per_s(text: str, per_node: int) -> float | None:
    """Bytes per second and device that a description of the network between nodes gives, if it does."""
    inter = text.split("inter:")[-1]
    cards = re.search(r"(\d+)\s*x\s*(?:[A-Za-z0-9-]+\s+)?(?:[A-Za-z0-9-]+\s+)*?(\d+)\s*Gb", inter)
    if cards:
        return int(cards[1]) * int(cards[2]) * 1e9 / 8 / per_node
    whole = re.search(r"(\d+)\s*Gb(?:ps|/s)?\s*(?:/node|(?:RoCE/IB )?per node)", inter) or re.search(
        r"inter (\d+) Gbps per node", text
    )
    if whole:
        return int(whole[1]) * 1e9 / 8 / per_node
    return None


def _with_rate(link: Link, bytes_per_s: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=bytes_per_s)


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
