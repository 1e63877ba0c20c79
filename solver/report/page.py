"""Sections as one HTML file: styles, script and charts are in it, and it asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from importlib import resources
from math import isfinite
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shardwise.data.faults import InputError
from shardwise.solver.evaluate import evaluate
from shardwise.solver.report import sections
from shardwise.solver.report.blocks import Note, Section, cut, items
from shardwise.solver.report.compared import comparison_sections

if TYPE_CHECKING:
    from shardwise.data.instance import Instance
    from shardwise.solver.compare import Comparison
    from shardwise.solver.evaluate import Evaluation
    from shardwise.solver.saved import Saved

MAX_PAGE_BYTES = 5_000_000
PARTS = 12
"""Memory lines and other series that the styles know."""


def report_page(saved: Saved, instance: Instance | None) -> tuple[str, Evaluation | None]:
    """The page of a plan or a result, and the evaluation that its numbers are of.

    Parameters
    ----------
    instance
        That of the plan; None where the result holds no plan.

    Raises
    ------
    InputError
        When the plan does not belong to the instance, or its step time is not a number.
    """
    plan = saved.plan
    if plan is None or instance is None:
        return _page(_untold(saved), _without_plan(saved)), None
    evaluation = evaluate(instance, plan)
    if not 0 < evaluation.step_time_s < float("inf") or not isfinite(evaluation.peak_memory_bytes):
        raise InputError(f"the step time of the plan is {evaluation.step_time_s} s: its instance is not a real one")
    parts = (
        sections.headline(instance, plan, evaluation, saved.certificate),
        sections.degrees(instance, plan),
        sections.step_time(evaluation),
        sections.memory(plan, evaluation),
        sections.pipeline(instance, plan),
        sections.placement(instance, plan, evaluation),
        sections.alternatives(saved, plan, evaluation.step_time_s),
        sections.limits(instance, plan, evaluation),
        sections.assumptions(instance, saved.search),
        sections.search_section(saved.search),
    )
    return _page(f"{instance.model.name} on {instance.cluster.name}", parts), evaluation


def comparison_page(comparison: Comparison) -> str:
    """The page of two plans."""
    return _page(f"{comparison.a.name} and {comparison.b.name}", comparison_sections(comparison))


def _without_plan(saved: Saved) -> tuple[Section, ...]:
    proof = [] if saved.certificate is None else sections.proof(saved.certificate, None)
    reasons = items(list(saved.reason) or ["the file does not say why"])
    return (
        Section("headline", "Result", (*proof, Note("There is no plan, because:"), reasons)),
        sections.search_section(saved.search),
    )


def _untold(saved: Saved) -> str:
    universe = saved.search.get("universe")
    told = universe if isinstance(universe, dict) else {}
    return f"{told.get('model', 'a model')} on {told.get('cluster', 'a cluster')}"


def _page(title: str, parts: tuple[Section, ...]) -> str:
    text = rendered("page", ("page.css",), ("sort.js",), title=title, sections=parts)
    if len(text.encode()) > MAX_PAGE_BYTES:
        raise InputError(f"the page would be larger than {MAX_PAGE_BYTES} bytes")
    return text


def rendered(name: str, styles: tuple[str, ...], scripts: tuple[str, ...], *, title: str, **values: Any) -> str:
    """A template of the package with its styles and scripts in it. Only these files are let through unescaped."""
    style, script = (Markup("".join(map(_asset, names))) for names in (styles, scripts))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _environment().get_template(f"{name}.html.j2")
    text = template.render(title=cut(title, 200), style=style, script=script, digest=digest, parts=PARTS, **values)
    return text.rstrip("\n")


def _asset(name: str) -> str:
    return (resources.files("shardwise.solver.report") / "templates" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("shardwise.solver.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment
