"""Options that several commands take, declared once.

A group is a function: its parameters are the options, and what it returns is what they say together. Typer reads the
options of a command off the signature of its function, so a group joins a command by standing in that signature.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def takes(**groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put the options of each group in the place of the parameter of its name, which is handed what the group returns."""

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        options = {name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()}
        shown = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in own.parameters.items()
            for one in (options[name].values() if name in options else [parameter])
        ]

        @functools.wraps(command)
        def run(**said: Any) -> None:
            for name, group in groups.items():
                said[name] = group(**{option: said.pop(option) for option in options[name]})
            command(**said)

        run.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in shown}
        return run

    return declare
