"""Bad input, told all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class InputError(Exception):
    """The input cannot be used.

    Attributes
    ----------
    faults
        Every reason found, not the first alone; each names field, value and rule. `str()` of the error has one a line.
    """

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__("\n".join(self.faults))


def unreadable(error: Exception) -> str:
    """Why a file cannot be read, without its name, which is told beside it."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
