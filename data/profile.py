"""Profiles: the software constants of one framework generation, each with its bounds and what it was fitted to."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise.data.faults import InputError, unreadable

MAX_FILE_BYTES = 1_000_000
MAX_CONSTANT = 1e18
SHARES = ("recompute_overlap", "dp_comm_overlap")
"""Constants that bounds on the step take to be shares of a whole: (P3), (B5)."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Constants of one software generation; each is explained in its file (`data/profiles/*.toml`).

    gemm, core, elementwise
        Time of matrix products, attention cores and element-wise work over what the kernel curves say.
    host_launch_s, tp_sync_s
        Host time per kernel launch; what each collective of tensor parallelism waits per further rank.
    tp_comm_exposed, cp_comm_exposed, ep_comm_exposed, p2p_exposed, p2p_exposed_interleaved
        Share of the collectives of an axis that no computation hides.
    dp_comm_floor, dp_comm_overlap, sync_contention
        Share of gradient and weight traffic that always shows; share of the passes beside it that can hide it; growth of
        the sync at the end of a step per doubling of the nodes that it crosses beyond 8.
    recompute_overlap, step_overhead_s, straggler
        Share of recomputation that is hidden; fixed seconds a step; growth of every pass per doubling of devices.
    memory_activations, memory_fragmentation, memory_reserve_bytes
        Activations over what fused kernels keep; share of them that the allocator holds on top; context, communicators
        and workspaces.
    memory_quantile, memory_band
        What a prediction is multiplied by before it is compared with the memory of a device; half width of its band,
        as a share of it.
    weight_bytes, gradient_bytes, reduce_bytes, logit_bytes, gathered_logits, bucket_bytes, selective, tp_overlap
        Facts of the framework: bytes of a resident weight, of a resident gradient, of a gradient on the wire, of a
        logit with its copies; whether each tensor-parallel rank holds the logits of the whole vocabulary (1) or of its
        share (0); size of a gradient bucket; what "selective" recomputes (0 the attention core, 1 all but matrix products);
        whether `tp_comm_exposed` is what shows with overlap (1) or without (0).
    """

    name: str
    gemm: float
    core: float
    elementwise: float
    host_launch_s: float
    tp_sync_s: float
    tp_comm_exposed: float
    cp_comm_exposed: float
    ep_comm_exposed: float
    dp_comm_floor: float
    dp_comm_overlap: float
    sync_contention: float
    p2p_exposed: float
    p2p_exposed_interleaved: float
    recompute_overlap: float
    step_overhead_s: float
    straggler: float
    memory_activations: float
    memory_fragmentation: float
    memory_reserve_bytes: float
    memory_quantile: float
    memory_band: float
    weight_bytes: float
    gradient_bytes: float
    reduce_bytes: float
    logit_bytes: float
    gathered_logits: float
    bucket_bytes: float
    selective: float
    tp_overlap: float = 0.0


CONSTANTS = tuple(field.name for field in fields(Profile) if field.name != "name")
POSITIVE = (
    "gemm",
    "core",
    "memory_activations",
    "memory_quantile",
    "weight_bytes",
    "gradient_bytes",
    "reduce_bytes",
    "bucket_bytes",
)
BASE = "shared"
"""The file whose constants every other profile starts from."""


def list_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files("shardwise.data") / "profiles"
    names = {entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")}
    return sorted(names - {BASE})


@lru_cache(maxsize=64)
def load_profile(name: str) -> Profile:
    """A profile by catalogue name or path of a TOML file.

    Raises
    ------
    InputError
        Naming every missing, unknown or out-of-bounds constant.
    """
    return profile_from(profile_document(name), name)


def profile_document(name: str) -> dict[str, Any]:
    """The TOML document of a profile, with the reason and bounds of each constant.

    A constant that the file does not state is that of `shared.toml`, and says so under `from`.
    """
    if name in (BASE, *list_profiles()):
        text = (resources.files("shardwise.data") / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
    elif Path(name).is_file():
        if Path(name).stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"profile {name}: the file is larger than {MAX_FILE_BYTES} bytes")
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"profile {name}: cannot be read: {unreadable(error)}") from None
    else:
        raise InputError(f"profile {name!r} is neither a file nor one of {', '.join(list_profiles())}")
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"profile {name}: not TOML: {error}") from None
    constants = document.get("constants")
    if name == BASE or not isinstance(constants, dict):
        return document
    shared = {key: entry | {"from": BASE} for key, entry in profile_document(BASE)["constants"].items()}
    return document | {"constants": shared | constants}


def saved_profile(document: object) -> Profile:
    """A profile from its name and constants, as a plan file keeps them; raises `InputError` naming each that is off."""
    if not isinstance(document, dict):
        raise InputError(f"plan.instance.profile={document!r} must be an object of constants")
    faults = [f"plan.instance.profile.{key} is unknown" for key in document if key not in (*CONSTANTS, "name")]
    for key in CONSTANTS:
        value = document.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_CONSTANT:
            faults.append(f"plan.instance.profile.{key}={value!r} must be a number from 0 to 1e18")
        elif key in POSITIVE and value == 0:
            faults.append(f"plan.instance.profile.{key}=0 must be positive")
        elif key in SHARES and value > 1:
            faults.append(f"plan.instance.profile.{key}={value!r} is a share, at most 1")
    if faults:
        raise InputError(faults)
    return Profile(str(document.get("name", "saved")), **{key: float(document[key]) for key in CONSTANTS})


def profile_from(document: dict[str, Any], name: str) -> Profile:
    """Check a profile document and turn it into a `Profile`."""
    faults: list[str] = []
    values: dict[str, float] = {}
    constants = document.get("constants")
    if not isinstance(constants, dict):
        raise InputError(f"profile {name}: the table [constants] is missing")
    faults += [f"profile {name}: unknown constant {key}" for key in constants if key not in CONSTANTS]
    for key in CONSTANTS:
        entry = constants.get(key)
        value = entry.get("value") if isinstance(entry, dict) else None
        bounds = entry.get("bounds") if isinstance(entry, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            faults.append(f"profile {name}: constants.{key}.value={value!r} must be a number")
        elif not (isinstance(bounds, list) and len(bounds) == 2 and all(isinstance(b, int | float) for b in bounds)):
            faults.append(f"profile {name}: constants.{key}.bounds={bounds!r} must be two numbers")
        elif not bounds[0] <= value <= bounds[1]:
            faults.append(f"profile {name}: constants.{key}.value={value} is outside its bounds {bounds}")
        elif value < 0 or (key in POSITIVE and value == 0):
            faults.append(f"profile {name}: constants.{key}.value={value} must be positive")
        elif key in SHARES and value > 1:
            faults.append(f"profile {name}: constants.{key}.value={value} is a share, at most 1")
        else:
            values[key] = float(value)
    if faults:
        raise InputError(faults)
    return Profile(name=str(document.get("name", name)), **values)
