"""Read the fields of a model description, collecting every fault and every assumption on the way."""

from __future__ import annotations

from typing import Any

from shardwise.data.faults import InputError
from shardwise.data.model import MAX_LAYERS

MAX_FIELD = 2**31
STAND_IN = 1
"""What a faulty field reads as, so that the fields after it are checked too; the description is refused at the end."""


def shown(value: object) -> str:
    """A value as an error shows it: short, and never failing itself."""
    try:
        return repr(value)[:80]
    except ValueError:  # sys.set_int_max_str_digits: no text for thousands of digits
        return f"a {type(value).__name__} too large to show"


class Fields:
    """The fields of one configuration object. `faults` and `assumed` fill up as fields are read."""

    def __init__(self, raw: dict[str, Any], where: str = "") -> None:
        self.raw, self.where = raw, where
        self.faults: list[str] = []
        self.assumed: list[str] = []
        self.unsound: set[str] = set()

    def has(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def first(self, *names: str) -> str:
        """The first of `names` that is given, else the first."""
        return next((name for name in names if self.has(name)), names[0])

    def fault(self, name: str, rule: str) -> None:
        self.unsound.add(name)
        self.faults.append(f"{self.where}{name}={shown(self.raw.get(name))} {rule}")

    def integer(
        self, *names: str, default: int | None = None, why: str = "", least: int = 1, most: int = MAX_FIELD
    ) -> int:
        """A whole number under the first of `names` that is given, or `default`, which is then listed as assumed."""
        name = self.first(*names)
        value = self.raw.get(name)
        if value is None:
            if default is None:
                self.unsound.add(name)
                self.faults.append(f"{self.where}{name} is missing: a whole number of at least {least} is needed")
                return max(least, STAND_IN)
            if why:
                self.assumed.append(f"{name}={default} ({why}; not in the config)")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.fault(name, f"must be a whole number from {least} to {most}")
            return max(least, STAND_IN)
        return value

    def optional(self, *names: str) -> int | None:
        """A whole number of at least 1, or None when the field is absent, null or 0."""
        name = self.first(*names)
        return self.integer(name, least=0) or None if self.has(name) else None

    def flag(self, name: str, *, default: bool, why: str = "") -> bool:
        """True or false."""
        value = self.raw.get(name)
        if value is None:
            if why:
                self.assumed.append(f"{name}={str(default).lower()} ({why}; not in the config)")
            return default
        if not isinstance(value, bool):
            self.fault(name, "must be true or false")
            return default
        return value

    def layers(self, *names: str, default: int | None = None) -> int:
        return self.integer(*(names or ("num_hidden_layers",)), default=default, most=MAX_LAYERS)

    def per_layer(self, name: str, layers: int, allowed: tuple[Any, ...]) -> list[Any] | None:
        """A list with one entry per layer, each one of `allowed`; None when the field is absent."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < layers:
            self.fault(name, f"must be a list with an entry for each of the {layers} layers")
            return None
        unknown = [item for item in value[:layers] if not isinstance(item, str | int) or item not in allowed]
        if unknown:
            self.faults.append(
                f"{self.where}{name} holds {shown(unknown[0])}; known are {', '.join(map(str, allowed))}"
            )
            return None
        return value[:layers]

    def divisible(self, name: str, value: int, divisor_name: str, divisor: int) -> None:
        """Fault a value that is not a multiple, unless either field is at fault already."""
        if value % divisor and not self.unsound & {name, divisor_name}:
            self.faults.append(f"{self.where}{name}={value} is not a multiple of {divisor_name}={divisor}")

    def nested(self, name: str) -> Fields:
        """The object under `name`, sharing the lists of faults and assumptions."""
        value = self.raw.get(name)
        if not isinstance(value, dict):
            self.fault(name, "must be an object")
            value = {}
        inner = Fields(value, f"{self.where}{name}.")
        inner.faults, inner.assumed = self.faults, self.assumed
        return inner

    def check(self) -> None:
        """Refuse the description if any field was at fault."""
        if self.faults:
            raise InputError(list(dict.fromkeys(self.faults)))
