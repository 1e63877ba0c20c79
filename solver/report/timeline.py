"""The timeline of a step as a chart: every pass of a short one, the start and the end of a long one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.formulations.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from shardwise.solver.report.blocks import Chart, Key, Line, Path, Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.solver.simulate import Simulation

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 960, 70, 12, 26, 22, 16
GAP = 30
MAX_STAGES = 32
WHOLE = 160
"""Passes of a stage that are drawn from end to end."""
SHOWN = 40
"""Passes of every stage at each end of a longer one."""
MAX_DRAWN = 1_200
"""Passes of one stage."""
SERIES = {
    FORWARD: Key("fwd", "F", "forward"),
    BACKWARD: Key("bwd", "B", "backward"),
    INPUT: Key("bwd", "I", "input gradient"),
    WEIGHT: Key("wgt", "W", "weight gradient"),
}
AFTER = (
    Key("syn", "S", "gradient sync"),
    Key("opt", "O", "optimizer"),
    Key("gat", "G", "parameter gather"),
    Key("ovh", "X", "step overhead"),
)


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds from `start` to `end`, drawn from `x` on."""

    start: float
    end: float
    x: float
    scale: float

    def clip(self, start: float, end: float) -> tuple[float, float] | None:
        """Where a span lies in the drawing: x and width, or None outside of the window."""
        start, end = max(start, self.start), min(end, self.end)
        if end <= start:
            return None
        return self.x + (start - self.start) * self.scale, (end - start) * self.scale


def timeline(simulation: Simulation) -> tuple[Chart, tuple[str, ...]]:
    """The chart, and in words what it leaves out."""
    stages = shown_stages(simulation.plan.degrees.pp)
    windows = _windows(simulation, stages)
    paths: list[Path] = []
    texts = [Text(LEFT - 8, TOP + row * ROW + 12, f"stage {stage}", "end") for row, stage in enumerate(stages)]
    used: dict[str, Key] = {}
    for row, stage in enumerate(stages):
        drawn: dict[str, list[str]] = {}
        for key, start, end in _spans(simulation, stage, windows):
            used.setdefault(key.letter, key)
            for window in windows:
                box = window.clip(start, end)
                if box is not None:
                    x, width = box
                    y = TOP + row * ROW
                    drawn.setdefault(key.series, []).append(
                        f"M{x:.1f} {y}h{max(width, 0.1):.1f}v{BAR}h-{max(width, 0.1):.1f}z"
                    )
                    if width >= 11:
                        texts.append(Text(round(x + width / 2, 1), y + 12, key.letter, "middle", "in"))
        paths += [Path("".join(boxes), series) for series, boxes in drawn.items()]
    bottom = TOP + ROW * len(stages)
    lines = []
    for window in windows:
        for at in (window.start, (window.start + window.end) / 2, window.end):
            x = round(window.x + (at - window.start) * window.scale, 1)
            lines.append(Line(x, TOP - 6, x, bottom, "tick"))
            end = at == window.end and window is windows[-1]
            anchor = "start" if at == window.start else "end" if end or at == window.end else "middle"
            texts.append(Text(x, TOP - 12, f"{at:.4g} s", anchor))  # type: ignore[arg-type]
    chart = Chart(
        "timeline-chart",
        "Pipeline timeline",
        f"A row for each of {len(stages)} stages; time runs from left to right, gaps are bubbles.",
        WIDTH,
        bottom + 8,
        paths=tuple(paths),
        lines=tuple(lines),
        texts=tuple(texts),
        legend=tuple(used.values()),
    )
    return chart, tuple(_left_out(simulation, stages, windows))


def shown_stages(pp: int, most: int = MAX_STAGES) -> list[int]:
    """All stages, or the first, the last and some evenly between."""
    return sorted({round(stage) for stage in np.linspace(0, pp - 1, min(pp, most)).tolist()})


def _windows(simulation: Simulation, stages: list[int]) -> tuple[Window, ...]:
    passes, step = simulation.passes, simulation.step_time_s
    room = WIDTH - LEFT - RIGHT
    first = passes.first
    longest = max(int(first[stage + 1] - first[stage]) for stage in stages)
    edge = step
    if longest > WHOLE:
        ends = [float(passes.end_s[min(first[k] + SHOWN, first[k + 1]) - 1]) for k in stages]
        starts = [float(passes.start_s[max(first[k + 1] - SHOWN, first[k])]) for k in stages]
        edge = max(*ends, step - min(starts))
    if 2 * edge >= step:
        return (Window(0.0, step, LEFT, room / step if step else 0.0),)
    scale = (room - GAP) / 2 / edge
    return Window(0.0, edge, LEFT, scale), Window(step - edge, step, LEFT + (room + GAP) / 2, scale)


def _spans(simulation: Simulation, stage: int, windows: tuple[Window, ...]) -> Iterator[tuple[Key, float, float]]:
    """What a stage does within the windows, at most its share of what is drawn."""
    passes, own = simulation.passes, _seen(simulation, stage, windows)
    if len(own) > MAX_DRAWN:
        own = own[np.linspace(0, len(own) - 1, MAX_DRAWN).round().astype(np.int64)]
    for op in own.tolist():
        yield SERIES[int(passes.kind[op])], float(passes.start_s[op]), float(passes.end_s[op])
    tail = simulation.tails[stage]
    at = tail.start_s
    for key, length in zip(AFTER, (tail.gradient_sync_s, tail.optimizer_s, tail.parameter_gather_s), strict=False):
        yield key, at, at + length
        at += length
    if simulation.overhead_s:
        over = max(one.start_s + one.total_s for one in simulation.tails) if simulation.synchronised else at
        yield AFTER[-1], over, over + simulation.overhead_s


def _seen(simulation: Simulation, stage: int, windows: tuple[Window, ...]) -> npt.NDArray[np.int64]:
    """The passes of a stage that lie in a window."""
    passes, own = simulation.passes, simulation.passes.of_stage(stage)
    seen = np.zeros(own.stop - own.start, dtype=bool)
    for window in windows:
        seen |= (passes.start_s[own] < window.end) & (passes.end_s[own] > window.start)
    found: npt.NDArray[np.int64] = np.flatnonzero(seen) + own.start
    return found


def _left_out(simulation: Simulation, stages: list[int], windows: tuple[Window, ...]) -> Iterator[str]:
    pp, edge = simulation.plan.degrees.pp, windows[0].end
    if simulation.micro_batches != simulation.plan.micro_batches:
        yield (
            f"Simulated with {simulation.micro_batches} micro-batches: the schedule does not run with the plan's "
            f"{simulation.plan.micro_batches}."
        )
    if len(stages) < pp:
        yield f"Sampled: {len(stages)} of {pp} stages are drawn, the first, the last and some evenly between."
    if len(windows) > 1:
        yield (
            f"Sampled: the first and the last {edge:.4g} s of {simulation.step_time_s:.4g} s are drawn; the steady state "
            "between them is left out."
        )
    most = max(len(_seen(simulation, stage, windows)) for stage in stages)
    if most > MAX_DRAWN:
        yield f"Sampled: {MAX_DRAWN} of up to {most} passes of a stage are drawn, evenly between."
