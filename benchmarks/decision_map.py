"""Which axes the fastest plan uses, over model size, devices, sequence length and kind of model: writes docs/decision-map.md.

    python benchmarks/decision_map.py [--panel NAME] [--time-limit 180] [--out docs]

Each cell is one `sw.solve` on DGX H100 nodes, with 16,777,216 tokens a step in all of them, so that cells of a row and of a
panel compare. A cell that the time limit ended is written with its gap. The second table solves some cells again with one
axis forbidden, which tells what the axis is worth there.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shardwise as sw
from shardwise.solver.solve import versions

if TYPE_CHECKING:
    from shardwise.data.plan import Degrees
    from shardwise.solver.result import Result

TOKENS = 2**24
SEQ_LEN = 8192
NODE = 8
DEVICES = (8, 64, 512, 4096)
SEED, WORKERS = 0, 1
AXES = {"tp": "T", "pp": "P", "cp": "C", "ep": "E"}
"""What splits a model, and its letter; data parallelism and ZeRO fill the rest of the devices."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One table: a row for each model and sequence length, a column for each number of devices."""

    title: str
    rows: tuple[tuple[str, int], ...]


PANELS = {
    "size": Panel(
        "Dense models, by size",
        tuple(
            (model, SEQ_LEN)
            for model in (
                "llama-3.2-1b", "llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3.1-70b",
                "mistral-large-2407-123b", "llama-3.1-405b",
            )
        ),
    ),
    "length": Panel(
        "One dense model, by sequence length",
        tuple(("llama-3.1-8b", length) for length in (8192, 32768, 131072, 524288, 1048576)),
    ),
    "kind": Panel(
        "Experts, Mamba and hybrids",
        tuple(
            (model, SEQ_LEN)
            for model in ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "mamba-2-2.7b", "nemotron-h-56b")
        ),
    ),
}  # fmt: skip

UNPLANNED = ("no plan", "not known")

WORTH = (
    ("llama-3.1-8b", SEQ_LEN, 64),
    ("llama-3.1-8b", SEQ_LEN, 512),
    ("qwen2.5-32b", SEQ_LEN, 64),
    ("llama-3.1-70b", SEQ_LEN, 64),
    ("llama-3.1-70b", SEQ_LEN, 512),
    ("mistral-large-2407-123b", SEQ_LEN, 512),
    ("llama-3.1-405b", SEQ_LEN, 4096),
    ("llama-3.1-8b", 32768, 64),
    ("llama-3.1-8b", 131072, 64),
    ("mixtral-8x7b", SEQ_LEN, 64),
    ("qwen3-30b-a3b", SEQ_LEN, 64),
    ("nemotron-h-56b", SEQ_LEN, 512),
)

HEAD = """# Decision map

Which axes the fastest plan uses, over model size, devices, sequence length and kind of model. Written by
`make bench-map`; what to make of it is in the [design guide](design-guide.md).

* DGX H100 nodes of 8, non-blocking fabric; bf16, AdamW, flash attention; rules and profile `megatron-core`.
* {tokens:,} tokens a step in every cell: {batch:,} sequences of {seq_len:,} tokens, or fewer and longer ones.
* A cell is one `shardwise plan training MODEL dgx-h100:NODES --seq-len N --global-batch N`. It is proven optimal over the
  universe of [formulation.md](formulation.md) unless its gap is written beside it.
* `t`, `p`, `c`, `e`, `d`: degrees above 1 of TP, PP, CP, EP, DP; `v`: chunks a stage; `z`: ZeRO stage above 1 (3 is FSDP);
  `r`: full recompute, `s`: selective; `of N`: the best plan leaves devices idle and uses N of them. "No plan": proven that
  none fits.
* Letters in the picture: **T**ensor, **P**ipeline, **C**ontext, **E**xpert parallelism; "data" is data parallelism (with any
  ZeRO stage) alone.

![axes of the fastest plan in each cell](img/decision_map.svg)

"""


def solved(model: str, seq_len: int, devices: int, seconds: float, limits: tuple[str, ...] = ()) -> Result:
    """The fastest plan of a cell, or the proof that there is none."""
    cluster, workload = f"dgx-h100:{devices // NODE}", sw.Training(seq_len=seq_len, global_batch=TOKENS // seq_len)
    return sw.solve(model, cluster, workload, limits=limits, time_limit_s=seconds, workers=WORKERS, seed=SEED, top=0)


def axes(d: Degrees) -> str:
    """The axes that split the model, as letters."""
    return "+".join(letter for name, letter in AXES.items() if getattr(d, name) > 1) or "data"


def in_words(result: Result, devices: int) -> tuple[str, str]:
    """The axes of a cell, and its plan in a few letters, with the gap where it is not proven."""
    if result.plan is None:
        return UNPLANNED[result.status == "UNKNOWN"], ""
    d, stage = result.plan.degrees, result.plan.stages[0]
    sizes = [("t", d.tp), ("p", d.pp), ("v", d.vpp), ("c", d.cp), ("e", d.ep), ("d", d.dp)]
    words = [f"{letter}{size}" for letter, size in sizes if size > 1]
    if d.zero > 1:
        words.append(f"z{d.zero}")
    words.append({"none": "", "selective": "s", "full": "r"}[stage.recompute])
    if d.devices < devices:
        words.append(f"of {d.devices}")
    if result.status != "OPTIMAL":
        words.append(f"(gap {100 * (result.gap or 0):.1f} %)")
    return axes(d), " ".join(word for word in words if word)


def row_name(model: str, seq_len: int) -> str:
    return model if seq_len == SEQ_LEN else f"{model}, {seq_len:,} tokens"


def worth_table(cells: dict[tuple[str, int, int], Result], seconds: float) -> list[str]:
    """What forbidding one axis costs: the cells of `WORTH`, solved again for each axis that their plan uses."""
    lines = [
        f"| model | devices | fastest plan | step, s | {' | '.join(f'without {name.upper()}' for name in AXES)} |",
        "|" + "---|" * (4 + len(AXES)),
    ]
    for model, seq_len, devices in WORTH:
        best = cells.get((model, seq_len, devices)) or solved(model, seq_len, devices, seconds)
        if best.plan is None or best.value is None:
            continue
        costs = []
        for name in AXES:
            if getattr(best.plan.degrees, name) == 1:
                costs.append("unused")
                continue
            other = solved(model, seq_len, devices, seconds, (f"{name}=1",))
            costs.append(change(best, other))
        told = [row_name(model, seq_len), f"{devices:,}", in_words(best, devices)[1], f"{best.value:.3f}", *costs]
        lines.append(f"| {' | '.join(told)} |")
        print(lines[-1], flush=True)
    return lines


def change(best: Result, other: Result) -> str:
    """How much longer the step takes; at least so much longer where the search had to stop."""
    if other.status == "INFEASIBLE":
        return "no plan"
    assert best.value is not None
    if other.status == "OPTIMAL" and other.value is not None:
        return f"+{100 * (other.value / best.value - 1):.1f} %"
    least = max(0.0, (other.bound or 0.0) / best.value - 1)
    return f"at least +{100 * least:.1f} %"


def plot(panels: dict[str, list[list[tuple[str, str]]]], path: Path) -> None:
    """One grid a panel: a cell has the letters of its axes, its plan, and the colour of the letters."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "shardwise"
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    found = {kind for rows in panels.values() for row in rows for kind, _ in row} - {*UNPLANNED}
    kinds = sorted(found, key=lambda kind: (kind != "data", len(kind), kind))
    colours: dict[str, Any] = {kind: pyplot.get_cmap("Set3")(n) for n, kind in enumerate(kinds)}
    heights = [len(PANELS[name].rows) for name in panels]
    figure, grids = pyplot.subplots(
        len(panels), 1, figsize=(9.2, 0.62 * sum(heights) + 0.8 * len(panels)), height_ratios=heights, squeeze=False
    )
    for (name, rows), grid in zip(panels.items(), grids[:, 0], strict=True):
        for y, row in enumerate(rows):
            for x, (kind, words) in enumerate(row):
                grid.add_patch(
                    Rectangle(
                        (x, y),
                        1,
                        1,
                        facecolor="white" if kind in UNPLANNED else colours[kind],
                        edgecolor="white",
                        linewidth=2,
                    )
                )
                grid.text(x + 0.5, y + 0.36, kind, ha="center", va="center", fontsize=10, fontweight="bold")
                grid.text(x + 0.5, y + 0.74, words, ha="center", va="center", fontsize=7)
        grid.set(xlim=(0, len(DEVICES)), ylim=(len(rows), 0))
        grid.set_xticks([x + 0.5 for x in range(len(DEVICES))], [f"{n:,} devices" for n in DEVICES], fontsize=8)
        grid.set_yticks(
            [y + 0.5 for y in range(len(rows))],
            [row_name(*own).replace(", ", "\n") for own in PANELS[name].rows],
            fontsize=8,
        )
        grid.set_title(PANELS[name].title, fontsize=10, loc="left")
        grid.tick_params(length=0)
        grid.set_frame_on(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--panel", choices=tuple(PANELS), help="only this one, and write nothing")
    parser.add_argument("--time-limit", type=float, default=180.0, help="seconds for a cell")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs")
    options = parser.parse_args()
    started, cpu_s = time.monotonic(), time.process_time()
    cells: dict[tuple[str, int, int], Result] = {}
    page = HEAD.format(tokens=TOKENS, batch=TOKENS // SEQ_LEN, seq_len=SEQ_LEN)
    drawn: dict[str, list[list[tuple[str, str]]]] = {}
    for name, panel in PANELS.items():
        if options.panel not in (None, name):
            continue
        page += f"## {panel.title}\n\n| model | {' | '.join(f'{n:,} devices' for n in DEVICES)} |\n"
        page += "|" + "---|" * (1 + len(DEVICES)) + "\n"
        drawn[name] = []
        for model, seq_len in panel.rows:
            row = []
            for devices in DEVICES:
                key = (model, seq_len, devices)
                if key not in cells:
                    cells[key] = solved(*key, options.time_limit)
                row.append(in_words(cells[key], devices))
            drawn[name].append(row)
            told = (f"**{kind}** {words}".strip() for kind, words in row)
            line = f"| {row_name(model, seq_len)} | {' | '.join(told)} |"
            print(line, f"{time.process_time() - cpu_s:.0f} s", flush=True)
            page += line + "\n"
        page += "\n"
    if options.panel:
        return
    page += (
        "## What an axis is worth\n\nSome of these cells, solved again with one axis forbidden (`--fix tp=1`, ...).\n\n"
    )
    page += "\n".join(worth_table(cells, options.time_limit)) + "\n\n"
    proven = sum(own.status in ("OPTIMAL", "INFEASIBLE") for own in cells.values())
    widest = max((own.gap or 0.0 for own in cells.values()), default=0.0)
    page += (
        f"{len(cells)} cells, {proven} of them proven, the widest gap {100 * widest:.4f} %, {options.time_limit:g} s at most "
        f"for each; {time.process_time() - cpu_s:.0f} s of processor time, {WORKERS} worker, seed {SEED}, "
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"OR-Tools {versions()['ortools']}.\n"
    )
    print(f"{time.monotonic() - started:.0f} s")
    (options.out / "decision-map.md").write_text(page, encoding="utf-8")
    plot(drawn, options.out / "img" / "decision_map.svg")


if __name__ == "__main__":
    main()
