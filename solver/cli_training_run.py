"""The options of `plan training` and `evaluate` about a whole training run."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.data.faults import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.solver.evaluate import Evaluation
    from shardwise.solver.training_run import Terms, TrainingRun


def run_options(
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Tokens of the whole run, such as 15T, 300B or 15e12: time to train."),
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", help="US dollars per device-hour, default that of the accelerator.")
    ] = None,
    node_mtbf_hours: Annotated[
        float | None,
        typer.Option("--node-mtbf-hours", help="Mean time between failures of a node, default no failures."),
    ] = None,
    checkpoint_s: Annotated[float | None, typer.Option("--checkpoint-s", help="Seconds to write a checkpoint.")] = None,
    restart_s: Annotated[float | None, typer.Option("--restart-s", help="Seconds to restart after a failure.")] = None,
    straggler_margin: Annotated[
        float | None, typer.Option("--straggler-margin", help="Share by which stragglers slow a step, default 0.")
    ] = None,
) -> dict[str, Any]:
    """What the options say of the run, None where one was left out."""
    return {
        "tokens": tokens,
        "price": price,
        "node_mtbf_hours": node_mtbf_hours,
        "checkpoint_s": checkpoint_s,
        "restart_s": restart_s,
        "straggler_margin": straggler_margin,
    }


@contextmanager
def with_terms(said: dict[str, Any]) -> Iterator[Terms | None]:
    """The terms of the run, None without any; their faults are told together with those met inside."""
    from shardwise.solver.training_run import read_terms

    terms: Terms | None = None
    faults: tuple[str, ...] = ()
    try:
        terms = read_terms(said, option)
    except InputError as error:
        faults = error.faults
    try:
        yield terms
    except InputError as error:
        raise InputError([*error.faults, *faults]) from None
    if faults:
        raise InputError(faults)


def option(name: str) -> str:
    """How the command line calls a term."""
    return f"--{name.replace('_', '-')}"


def run_of(evaluation: Evaluation, terms: Terms) -> TrainingRun:
    """The run of an evaluated plan."""
    from shardwise.solver.training_run import run_on_terms

    return run_on_terms(evaluation, terms)


def run_document(terms: Terms | None, run: TrainingRun | None) -> dict[str, Any]:
    """What the run adds to the JSON document: nothing unless it was asked for, null without a plan."""
    return {} if terms is None else {"training_run": None if run is None else run.to_dict()}
