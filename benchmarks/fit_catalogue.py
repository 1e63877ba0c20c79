"""The fewest devices of every catalogue model on eight accelerators: prints the table, checks it, writes docs/fit.md.

    python benchmarks/fit_catalogue.py [--every N] [--check-s S] [--out docs/fit.md]

Each cell is `sw.fit`: every smaller number of devices is excluded by a bound, and the plan is one that fits, not the
fastest. With `--check-s` a search that knows nothing of that bound has S seconds for each cell to find a plan on fewer
devices; a plan that it finds is an error.
"""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import shardwise as sw
from shardwise.data.model_catalog import catalog_models
from shardwise.solver.fit import GLOBAL_BATCH, MOST_DEVICES, SEQ_LEN, Fit, fit
from shardwise.solver.solve import solve

if TYPE_CHECKING:
    from shardwise.data.plan import Plan

HEAD = """# Fewest devices

Every model of the catalogue on eight accelerators: the fewest devices that pre-train it, and a plan on them. Written by
`make bench-fit`.

* bf16 weights, fp32 gradients and AdamW states, {seq_len:,} tokens a sequence, {batch:,} sequences a step; models with
  fewer positions take as many tokens as they have.
* Rules and profile `megatron-core`: TP, PP with any split of the layers, CP, EP, DP with ZeRO-0 to 3, any recompute; no
  offload. Up to {most:,} devices in the nodes that are usual for the accelerator.
* No smaller number has a plan, by a bound ([formulation.md](formulation.md)). The plan is one that fits, not the
  fastest: `shardwise fit MODEL ACCELERATOR` finds that one and tells where its memory goes.
* `*`: tight, within {band:.0%} of the memory. `t`, `p`, `c`, `e`, `d`: degrees above 1 of TP, PP, CP, EP, DP; `z`: ZeRO
  stage where DP or CP is above 1; `r`: full recompute, `s`: selective.

"""


def short(plan: Plan) -> str:
    """The plan in a few letters."""
    d = plan.degrees
    axes = [("t", d.tp), ("p", d.pp), ("c", d.cp), ("e", d.ep), ("d", d.dp)]
    words = [f"{letter}{size}" for letter, size in axes if size > 1]
    if d.dp * d.cp > 1 and d.zero:
        words.append(f"z{d.zero}")
    recompute = {"none": "", "selective": "s", "full": "r"}[plan.stages[0].recompute]
    return " ".join([*words, recompute]).strip()


def cell(one: Fit) -> str:
    """The number and the plan, or why not."""
    if one.devices is None or one.plan is None:
        return f">{one.excluded:,}"
    return f"**{one.devices:,}**{'*' if one.answer == 'tight' else ''} {short(one.plan)}".strip()


def confirmed(one: Fit, seconds: float) -> str:
    """What a search over fewer devices, by step time and without the bounds of `fit`, says."""
    if one.devices in (None, 1):
        return "nothing below"
    i, fewer = one.instance, f"devices<={(one.devices or 0) - 1}"
    own = solve(
        i.model,
        i.cluster,
        i.workload,
        rules=i.rules.name,
        limits=[*i.limits.text, fewer],
        time_limit_s=seconds,
        workers=1,
    )
    return {"INFEASIBLE": "confirmed", "UNKNOWN": "not known in time"}.get(own.status, "REFUTED")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="one model in so many")
    parser.add_argument("--check-s", type=float, default=0.0, help="seconds for the independent check of a cell")
    parser.add_argument("--out", type=Path, help="where the page goes")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    started, checks, answers, lines = time.monotonic(), Counter[str](), Counter[str](), []
    for entry in catalog_models()[:: options.every]:
        model = sw.load_model(entry.slug)
        try:
            found = fit(model, quick=True)
        except sw.InputError as error:
            print(entry.slug, *error.faults)
            return 1
        band = found[0].instance.profile.memory_band
        answers.update(one.answer for one in found)
        if options.check_s:
            checks.update(confirmed(one, options.check_s) for one in found)
        row = f"| {entry.slug} | {model.params / 1e9:.1f} | {' | '.join(cell(one) for one in found)} |"
        lines.append(row)
        print(row, flush=True)
        if checks["REFUTED"]:
            print(f"a plan on fewer devices exists: {entry.slug}")
            return 1
    names = [one.instance.accelerator.name for one in found]
    seconds = time.monotonic() - started
    head = ["model", "B", *names]
    page = HEAD.format(seq_len=SEQ_LEN, batch=GLOBAL_BATCH, most=MOST_DEVICES, band=band)
    page += "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]) + "\n"
    said = ", ".join(f"{count} {answer}" for answer, count in sorted(answers.items()))
    print(f"{sum(answers.values())} cells in {seconds:.0f} s on {platform.machine()}, one process: {said}")
    if checks:
        print("fewer devices, by an independent search:", ", ".join(f"{n} {what}" for what, n in checks.items()))
    if options.out:
        options.out.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
