"""Profiles: the fitted or assumed software constants of one framework generation."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path

from shardwise.data.faults import InputError

MAX_FILE_BYTES = 1_000_000
MAX_CONSTANT = 1e18


@dataclass(frozen=True, slots=True)
class Profile:
    """Constants of one software generation; each is explained in its file (`data/profiles/*.toml`)."""

    name: str
    tp_comm_exposed: float
    dp_comm_floor: float
    dp_comm_overlap: float
    p2p_exposed: float
    p2p_exposed_interleaved: float
    layer_overhead_s: float
    step_overhead_s: float
    recompute_overlap: float
    memory_reserve_bytes: float
    memory_fragmentation: float
    bucket_bytes: float


CONSTANTS = tuple(field.name for field in fields(Profile) if field.name != "name")


def list_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files("shardwise.data") / "profiles"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


@lru_cache(maxsize=32)
def load_profile(name: str) -> Profile:
    """A profile by catalogue name or path of a TOML file.

    Raises
    ------
    InputError
        Naming every missing, unknown or out-of-bounds constant.
    """
    return profile_from(profile_document(name), name)


def profile_document(name: str) -> dict[str, object]:
    """The TOML document of a profile, with the reason and bounds of each constant."""
    if name in list_profiles():
        text = (resources.files("shardwise.data") / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
    elif Path(name).is_file():
        if Path(name).stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"profile {name}: the file is larger than {MAX_FILE_BYTES} bytes")
        text = Path(name).read_text(encoding="utf-8", errors="replace")
    else:
        raise InputError(f"profile {name!r} is neither a file nor one of {', '.join(list_profiles())}")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"profile {name}: not TOML: {error}") from None


def saved_profile(document: object) -> Profile:
    """A profile from its name and constants, as a plan file keeps them; raises `InputError` naming each that is off."""
    if not isinstance(document, dict):
        raise InputError(f"plan.instance.profile={document!r} must be an object of constants")
    faults = [f"plan.instance.profile.{key} is unknown" for key in document if key not in (*CONSTANTS, "name")]
    for key in CONSTANTS:
        value = document.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_CONSTANT:
            faults.append(f"plan.instance.profile.{key}={value!r} must be a number from 0 to 1e18")
    if faults or document["bucket_bytes"] <= 0:
        raise InputError(faults or ["plan.instance.profile.bucket_bytes=0 must be positive"])
    return Profile(str(document.get("name", "saved")), **{key: float(document[key]) for key in CONSTANTS})


def profile_from(document: dict[str, object], name: str) -> Profile:
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
        else:
            values[key] = float(value)
    if faults:
        raise InputError(faults)
    return Profile(name=str(document.get("name", name)), **values)
