"""Options that commands share: one declaration, the same in each of them."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from shardwise.solver.cli import evaluate_command, plan_training
from shardwise.solver.cli_fit import fit_command
from shardwise.solver.cli_training_run import run_options
from shardwise.solver.cli_workload import workload_options
from shardwise.solver.option_groups import takes


def size_options(
    width: Annotated[int, typer.Option("--width", help="Metres.")] = 1,
    height: Annotated[int | None, typer.Option("--height")] = None,
) -> dict[str, Any]:
    return {"width": width, "height": height}


@pytest.mark.parametrize("arguments", [[], ["--width", "3"], ["--height", "2", "--name", "x"]])
def test_a_group_stands_in_the_signature_and_hands_over_what_its_options_say(arguments: list[str]) -> None:
    app, seen = typer.Typer(), []

    @app.command()
    @takes(size=size_options)
    def command(*, name: Annotated[str, typer.Option("--name")] = "y", size: dict[str, Any]) -> None:
        seen.append((name, size))

    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    said = dict(zip(arguments[::2], arguments[1::2], strict=True))
    height = said.get("--height")
    assert seen == [(said.get("--name", "y"), {"width": int(said.get("--width", 1)), "height": height and int(height)})]
    text = CliRunner().invoke(app, ["--help"]).output
    assert "Metres." in text
    assert "--size" not in text


@pytest.mark.parametrize(
    ("command", "groups"),
    [
        (plan_training, (workload_options, run_options)),
        (evaluate_command, (workload_options, run_options)),
        (fit_command, (workload_options,)),
    ],
)
def test_commands_take_every_option_of_their_groups(command: Any, groups: Any) -> None:
    own = inspect.signature(command).parameters
    for group in groups:
        shared = inspect.signature(group, eval_str=True).parameters
        assert {name: own[name].default for name in shared} == {name: one.default for name, one in shared.items()}
