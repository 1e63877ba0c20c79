"""Enumerate, prune with proof, close the rest with CP-SAT.

The search keeps three things: the incumbent plan, the open candidates (neither pruned nor closed) and a tally of what
happened to every candidate. A candidate is dropped only by an admissible bound above the incumbent, or equal to it and
later in the tie order, so OPTIMAL means what it says.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from shardwise.data.faults import InputError
from shardwise.formulations.bounds import (
    SAFETY,
    BestCase,
    grid_bounds,
    last_chunk_layers,
    memory_fits,
    quick_bounds_s,
    whole_layers_s,
    work_bound_s,
)
from shardwise.formulations.candidates import Candidate, Grid, PlacementTable, enumerate_grids
from shardwise.formulations.coefficients import MemoryCoefficients, TimeCoefficients
from shardwise.formulations.cp import Cut, Option
from shardwise.formulations.dominance import dominated, needless_offload
from shardwise.formulations.objective import Objective
from shardwise.formulations.passes import counts_of
from shardwise.formulations.schedule import DRAINED, UNSYNCHRONISED
from shardwise.formulations.splits import Split, SplitSearch, plans_to_try
from shardwise.formulations.timeline import longest_paths
from shardwise.solver.evaluate import Evaluation, admitted_units, cost_tables, evaluate, timed_plan
from shardwise.solver.result import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy.typing as npt

    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan
    from shardwise.formulations.bounds import Floats
    from shardwise.formulations.objective import Worth
    from shardwise.formulations.timeline import Shape

log = logging.getLogger(__name__)

NO_PRUNE_LIMIT = 2000
RESOLUTION_BITS = 32
"""The incumbent is worth about 2^32 units: what CP-SAT multiplies stays far below 2^53, and the step of a plan with
thousands of micro-batches is still rounded by less than 1e-5 of it."""
UNLIMITED = 2**60
NEAR = 1 + 1e-4
"""Rows with a float bound this close to the incumbent are compared in integer units, rounding included."""
REPORT_EVERY_S = 0.1
FIRST_TRY, FIRST_ROWS = 4, 256
"""Rows are first tried up to so many times their bound, and so many of them before all are sorted."""
FIRST_SHAPES, PROBES, PROBED_ROWS = 16, 32, 1024
"""Shapes that are bounded before there is an incumbent, and rows that are tried before all others, of how many."""
MOST_SPLITS, MOST_AGAIN = 64, 4096
"""Splits of one candidate that are judged at first, and again with the incumbent known, before it is left to CP-SAT."""


class Row(NamedTuple):
    """One row of a grid, and what its candidates are worth at least: V of the objective, and their step, in seconds."""

    value_s: float
    step_s: float
    grid: Grid
    row: int


@dataclass(frozen=True, eq=False)
class Bounded:
    """Rows of a grid with their bounds, as in `Row`."""

    grid: Grid
    value_s: Floats
    step_s: Floats

    def rows(self, chosen: npt.NDArray[np.bool_]) -> Bounded:
        return Bounded(self.grid.rows(chosen), self.value_s[chosen], self.step_s[chosen])


class Ordered(Sequence[Row]):
    """Rows best bound first, ties in order of enumeration, the first `most` of them. Each is made when it is asked for: of
    half a million only a few are looked at."""

    def __init__(self, bounded: list[Bounded], most: int | None = None) -> None:
        lower = np.concatenate([own.value_s for own in bounded]) if bounded else np.zeros(0)
        order = np.nonzero(np.isfinite(lower))[0]
        if most is not None and most < len(order):
            order = np.sort(order[np.argpartition(lower[order], most)[:most]])
        self.bounded = bounded
        self.order = order[np.argsort(lower[order], kind="stable")]
        self.starts = np.cumsum([0, *(len(own.grid) for own in bounded)])

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = self.order[index]
        where = int(np.searchsorted(self.starts, at, side="right")) - 1
        own, row = self.bounded[where], int(at - self.starts[where])
        return Row(float(own.value_s[row]), float(own.step_s[row]), own.grid, row)


class Work(NamedTuple):
    """Seconds of one micro-batch through all layers, through the fastest, `whole_layers_s`, forward through the fastest, and
    the tails of all stages together."""

    total: float
    fastest: float
    whole: float
    forward: float
    tails: float


@dataclass(frozen=True)
class Incumbent:
    """The best plan so far: its V and its step time in units of `unit_s`. `key` orders plans: V, then the tie order of the
    candidate. It is evaluated when somebody asks, as most are soon replaced."""

    search: Search
    plan: Plan
    candidate: Candidate
    value: int
    units: int
    unit_s: float

    @property
    def key(self) -> tuple[int, tuple[float, ...]]:
        return self.value, self.candidate.tie_key

    @property
    def near_s(self) -> float:
        """Rows with a bound above this many seconds (`NEAR`) are not looked at: V as it is, for V in units is rounded down."""
        return self.seconds * NEAR

    @cached_property
    def evaluation(self) -> Evaluation:
        return evaluate(self.search.instance, self.plan, unit_s=self.unit_s)

    @cached_property
    def seconds(self) -> float:
        """V in seconds, not rounded."""
        return self.search.objective.seconds(self.search.instance, self.evaluation)


@dataclass
class Tally:
    """What happened to the candidates, by the reason."""

    enumerated: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    placements: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"enumerated": self.enumerated, "placements_expanded": self.placements, **dict(self.counts)}


class TimeUpError(Exception):
    """The time limit passed while candidates were still open."""


class Search:
    """The state of one solve up to the candidates that CP-SAT has to close."""

    def __init__(
        self,
        instance: Instance,
        deadline: float | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        objective: Objective | None = None,
    ) -> None:
        self.instance = instance
        self.objective = objective or Objective("step-time")
        self.tables = cost_tables(instance)
        self.placements = PlacementTable(instance)
        self.best_case = BestCase(self.tables, self.placements)
        self.splits = SplitSearch(instance, self.tables)
        self.deadline = deadline
        self.longest_s = math.inf
        self.on_progress = on_progress
        self.started = time.monotonic()
        self.reported = -math.inf
        self.tally = Tally()
        self.incumbent: Incumbent | None = None
        self.seen: dict[tuple[float, ...], tuple[int, Plan]] = {}
        self.cuts: dict[Cut, None] = {}
        self.unit_s = 1.0
        self.in_units: dict[int, tuple[TimeCoefficients, TimeCoefficients]] = {}
        self.timed: tuple[Candidate, TimeCoefficients] | None = None
        self.works: dict[int, tuple[TimeCoefficients, Work]] = {}
        self.worths: dict[tuple[int, Shape], tuple[TimeCoefficients, Worth]] = {}
        self.waiting: deque[tuple[float, Grid]] = deque()
        self.bounded: list[Bounded] = []
        self.in_reach: list[Bounded] | None = None
        self.tried: set[tuple[Grid, int, int]] = set()
        self.full: set[tuple[MemoryCoefficients, Shape]] = set()
        """Of these no plan fits, wherever it lies."""
        self.open: list[Option] = []
        self.unopened_bound_s: float | None = None

    # -- reporting ------------------------------------------------------------------------------------------------

    def report(self, phase: str, bound_s: float | None, open_count: int, *, force: bool = False) -> None:
        """Tell the caller, at most ten times a second."""
        now = time.monotonic()
        if self.on_progress is None or (now - self.reported < REPORT_EVERY_S and not force):
            return
        self.reported = now
        best_s = None if self.incumbent is None else self.incumbent.seconds
        if best_s is not None and bound_s is not None:
            bound_s = min(bound_s, best_s)
        value, bound = (None if s is None else self.objective.value(self.instance, s) for s in (best_s, bound_s))
        self.on_progress(Progress(phase, value, bound, self.objective.value_unit, open_count, now - self.started))

    def check_time(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeUpError

    # -- units ----------------------------------------------------------------------------------------------------

    def rounding_units(self, micro_batches: int) -> int:
        """How many units a step may be worth less than it lasts: one for each rounded term of its longest path.

        A path holds each pass of a chunk at most once. A pass sums up to three terms a layer (input and weight
        gradients, recompute), embedding and head likewise, and one to send; a transfer adds one.
        """
        layers, rules = len(self.instance.model.layers), self.instance.rules
        chunks = min(rules.max_vpp * self.instance.cluster.device_count, layers + 2)
        return micro_batches * (4 * (layers + 2) + 4 * chunks) + 6 * (layers + 2) + 16

    @property
    def excess_units(self) -> int:
        """How many units a step may be worth more: those of the time before a stage starts that does not count."""
        layers, schedules = len(self.instance.model.layers), self.instance.rules.schedules
        return 3 * (layers + 2) if UNSYNCHRONISED & set(schedules) else 0

    def choose_unit(self, step_time_s: float) -> None:
        """A power of two of seconds, so that converting is exact."""
        unit_s = 2.0 ** (math.floor(math.log2(step_time_s)) - RESOLUTION_BITS)
        if unit_s != self.unit_s:
            self.unit_s = unit_s
            self.in_units.clear()
            self.worths.clear()

    def units_below(self, lower_s: float, micro_batches: int) -> int:
        """Integer step time that no plan of so many micro-batches that lasts at least `lower_s` is below."""
        return math.floor(lower_s * SAFETY / self.unit_s) - self.rounding_units(micro_batches)

    # -- enumerate and prune --------------------------------------------------------------------------------------

    def enumerate(self, *, prune: bool = True) -> list[Grid]:
        """The candidates before placement that none dominates, those of the best shape (B7) first; all of them wait to be
        bounded."""
        grids = list(enumerate_grids(self.instance))
        self.tally.enumerated = sum(len(grid) for grid in grids)
        self.report("enumerating", None, self.tally.enumerated, force=True)
        self.unopened_bound_s = 0.0
        bounds, left = [], []
        for grid in grids:
            beaten = dominated(self.best_case, grid) if prune else np.zeros(0, dtype=bool)
            if prune and self.objective.name != "energy":
                beaten = beaten | needless_offload(self.best_case, grid)
            own = grid.rows(~beaten) if beaten.any() else grid
            self.tally.counts["pruned_by_dominance"] += len(grid) - len(own)
            if len(own):
                step_s = quick_bounds_s(self.best_case, own)
                bounds.append(float(self.value_s(own, step_s).min()) if np.isfinite(step_s[0]) else math.inf)
                left.append(own)
            self.check_time()
            self.report("enumerating", None, self.tally.enumerated)
        order = np.argsort(bounds, kind="stable").tolist()
        self.waiting = deque((bounds[i], left[i]) for i in order)
        self.unopened_bound_s = min(bounds, default=None)
        return [left[i] for i in order]

    def bound(self, shapes: int, most_s: float) -> None:
        """Bound the rows of the next waiting shapes, those that (B7) does not put above `most_s`."""
        counts = self.tally.counts
        for _ in range(min(shapes, len(self.waiting))):
            lower_s, grid = self.waiting.popleft()
            if lower_s > most_s * NEAR or lower_s == math.inf:
                counts["pruned_by_shape_bound"] += len(grid)
                continue
            fitting = grid.rows(memory_fits(self.best_case, grid))
            counts["pruned_by_memory"] += len(grid) - len(fitting)
            if len(fitting):
                step_s = grid_bounds(self.best_case, fitting, None)
                if np.isfinite(step_s).any():
                    self.bounded.append(Bounded(fitting, self.value_s(fitting, step_s), step_s))
                    self.in_reach = None
            self.check_time()
            self.report("bounding", None, len(self.waiting))

    def of_devices(self, count: int, bounded: list[Bounded]) -> Search:
        """A search over the bounded rows of exactly so many devices, which shares what this one knows."""
        search = Search(self.instance, self.deadline, self.on_progress, self.objective)
        search.longest_s, search.tables, search.placements = self.longest_s, self.tables, self.placements
        search.best_case, search.splits, search.started = self.best_case, self.splits, self.started
        search.tally = self.tally
        chosen = [own.rows(own.grid.devices == count) for own in bounded]
        search.waiting = deque((float(own.value_s.min()), own.grid) for own in chosen if len(own.grid))
        search.unopened_bound_s = min((bound for bound, _ in search.waiting), default=None)
        return search

    def keep(self, rows: Callable[[Grid], npt.NDArray[np.bool_]]) -> None:
        """Leave those of the waiting rows that have room."""
        kept = []
        for bound_s, grid in self.waiting:
            self.check_time()
            left = grid.rows(rows(grid))
            self.tally.counts["pruned_by_room"] += len(grid) - len(left)
            if len(left):
                kept.append((bound_s, left))
        self.waiting = deque(kept)

    def terms_of(self, grid: Grid) -> tuple[Any, Any]:
        """`Objective.of_rows`."""
        return self.objective.of_rows(self.tables, grid, lambda size: self.best_case.terms(grid.shape.sharding(size)))

    def value_s(self, grid: Grid, step_s: Floats) -> Floats:
        """V in seconds of every row from below."""
        factor, extra = self.terms_of(grid)
        return np.asarray(factor * (step_s + extra))

    def refined(self, rows: Sequence[Row]) -> list[Row]:
        """A few rows by bounds that know of recompute (B6)-(B9): those that need little memory come first."""
        of_grid: dict[int, list[Row]] = {}
        for row in rows:
            of_grid.setdefault(id(row.grid), []).append(row)
        again = []
        for own in of_grid.values():
            few = own[0].grid.rows(np.array([row.row for row in own]))
            step_s = grid_bounds(self.best_case, few, math.inf)
            for row, value, step in zip(own, self.value_s(few, step_s).tolist(), step_s.tolist(), strict=True):
                again.append(Row(value, step, row.grid, row.row))
        return sorted(again, key=lambda row: row.value_s)

    def within(self) -> Ordered:
        """The rows that can be as good as the incumbent, by bounds that know it; a better incumbent leaves fewer of them."""
        assert self.incumbent is not None
        most_s = self.incumbent.near_s
        self.bound(len(self.waiting), most_s)
        left = []
        for own in self.bounded if self.in_reach is None else self.in_reach:
            close = own.rows(own.value_s <= most_s).grid
            if len(close):
                factor, extra = self.terms_of(close)
                step_s = grid_bounds(self.best_case, close, np.minimum(most_s / factor - extra, self.longest_s))
                value_s = np.asarray(factor * (step_s + extra))
                usable = (value_s <= most_s) & (step_s <= self.longest_s * NEAR)
                left.append(Bounded(close, value_s, step_s).rows(usable))
        self.tally.counts["pruned_by_work_bound"] = sum(len(own.grid) for own in self.bounded)
        self.tally.counts["pruned_by_work_bound"] -= sum(len(own.grid) for own in left)
        self.in_reach = left
        return Ordered(left)

    def first_incumbent(self) -> list[Candidate]:
        """Make a good plan of the best-bound candidates the incumbent, and choose the unit; pruning on or off.

        Without an incumbent, the candidates that the split bound leaves: CP-SAT has to tell whether they hold a plan.
        """
        shapes = FIRST_SHAPES
        while self.waiting and self.incumbent is None:
            self.bound(shapes, math.inf)
            self.try_rows(self.refined(Ordered(self.bounded, FIRST_ROWS)), FIRST_TRY)
            shapes *= 2
        if self.incumbent is None:
            self.try_rows(Ordered(self.bounded), FIRST_TRY)
        if self.incumbent is None:
            left = self.try_rows(Ordered(self.bounded), UNLIMITED)
            if self.incumbent is None:
                if left:
                    self.choose_unit(max(self.serial_s(candidate) for candidate in left))
                return left
        self.rescale()
        self.bound(len(self.waiting), self.incumbent.near_s)
        self.probe(self.refined(Ordered(self.bounded, PROBED_ROWS)))
        self.rescale()
        return []

    def try_rows(self, rows: Iterable[Row], factor: int) -> list[Candidate]:
        """Try rows until one gives an incumbent, with plans up to `factor` times the bound; the candidates left. Rows that
        were tried so before gave none."""
        left = []
        for _, step_s, grid, row in rows:
            if (grid, row, factor) in self.tried:
                continue
            self.tried.add((grid, row, factor))
            self.check_time()
            self.report("trying", None, len(self.bounded))
            self.choose_unit(step_s)
            for candidate in self.candidates(grid, row):
                memory = self.tables.memory(candidate.degrees, candidate.schedule)
                if (memory, candidate.shape) in self.full:
                    continue
                limit = min(self.longest(candidate), math.ceil(factor * step_s / self.unit_s))
                option = self.try_candidate(candidate, self.coefficients(candidate), limit)
                if option is not None:
                    left.append(candidate)
                elif limit >= UNLIMITED:
                    self.full.add((memory, candidate.shape))
            if self.incumbent is not None:
                break
        return left

    def probe(self, rows: Sequence[Row]) -> None:
        """Try a few rows, the first and others evenly among all: a good incumbent early makes the rest cheaper."""
        first = PROBES // 2
        for _, _, grid, row in [*rows[:first], *rows[first :: max(len(rows) // first, 1)]]:
            self.check_time()
            self.report("trying", None, len(rows))
            for candidate in self.candidates(grid, row):
                self.try_candidate(candidate, self.coefficients(candidate), self.longest(candidate))

    def serial_s(self, candidate: Candidate) -> float:
        """Above every step time of the candidate: all passes one after the other, everything recomputed."""
        c = self.tables.time(candidate.degrees, candidate.placement, candidate.schedule)
        units = [*self.instance.model.kind_indices, -2, -1]
        again = [max(own) for own in zip(c.full, *map(c.of_set, range(len(self.tables.sets))), strict=True)]
        passes = sum(c.forward[u] + c.backward[u] + again[u] for u in units)
        passes += 2 * candidate.degrees.virtual_stages * (max(c.sends) + max(c.lags))
        tails = sum(abs(c.tail_floor[u]) + abs(c.tail_overlap[u]) for u in units)
        return float(candidate.micro_batches * passes + tails + 2 * c.tied + c.overhead)

    def rescale(self) -> None:
        """Choose the unit by the incumbent, and express it so."""
        old = self.incumbent
        assert old is not None
        self.choose_unit(old.units * old.unit_s * self.worth(old.candidate).weight)
        self.incumbent = None
        self.seen.clear()
        self.offer(old.plan, old.candidate)

    def candidates(self, grid: Grid, row: int) -> list[Candidate]:
        """The candidates of one row: one per placement and number of replicas; with (U6) those that need the host."""
        degrees, schedule = grid.degrees(row), grid.shape.schedule
        every = [
            Candidate(replace(degrees, dp_replicate=count), placement, int(grid.micro_batches[row]), schedule)
            for placement in self.placements.of(degrees)
            for count in self.placements.replicates(degrees, placement)
        ]
        if not degrees.offload_layers:
            return every
        least = [self.tables.least_offload(candidate.degrees) for candidate in every]
        return [
            replace(candidate, degrees=replace(candidate.degrees, offload_layers=layers))
            for candidate, layers in zip(every, least, strict=True)
            if layers
        ]

    def time(self, candidate: Candidate) -> TimeCoefficients:
        """Seconds of a candidate; what one candidate is asked about follows one after the other."""
        if self.timed is None or self.timed[0] is not candidate:
            self.timed = candidate, self.tables.time(candidate.degrees, candidate.placement, candidate.schedule)
        return self.timed[1]

    def coefficients(self, candidate: Candidate) -> TimeCoefficients:
        """Units of a candidate; candidates that share their seconds share these."""
        time = self.time(candidate)
        known = self.in_units.get(id(time))
        if known is None or known[0] is not time:
            known = self.in_units[id(time)] = time, time.in_units(self.unit_s)
        return known[1]

    def worth(self, candidate: Candidate) -> Worth:
        """What a candidate's step is worth, remembered by what it depends on."""
        time = self.time(candidate)
        key = id(time), candidate.shape
        known = self.worths.get(key)
        if known is None or known[0] is not time:
            own = self.objective.worth(self.tables, candidate, time, self.unit_s)
            known = self.worths[key] = time, own
        return known[1]

    @property
    def longest_units(self) -> int:
        """No plan within the time allowed lasts more units; one of so many is within it but for rounding."""
        return math.floor(self.longest_s / self.unit_s) + self.excess_units

    def longest(self, candidate: Candidate) -> int:
        """No plan of the candidate that lasts more units is within the time allowed and as good as the incumbent."""
        most = UNLIMITED
        if self.longest_s < math.inf:
            most = self.longest_units
        if self.incumbent is None:
            return most
        worth = self.worth(candidate)
        return min(most, worth.longest(self.incumbent.value // worth.multiplier))

    def inner(self, plan: Plan, candidate: Candidate) -> tuple[int, int] | None:
        """The step of an admitted plan in units, and its inner value; None if it is not admitted."""
        units = admitted_units(self.instance, plan, self.unit_s)
        if units is None or (self.longest_s < math.inf and units > self.longest_units):
            return None
        worth = self.worth(candidate)
        if worth.plain:
            return units, units
        return units, int(
            worth.inner(units, candidate.layout, counts_of(plan, self.tables.kind_prefixes, self.tables.sets))
        )

    def offer(self, plan: Plan, candidate: Candidate) -> int | None:
        """The inner value of an admitted plan, which becomes the incumbent if it is better; None if it is not admitted."""
        found = self.inner(plan, candidate)
        if found is None:
            return None
        units, inner = found
        value = self.worth(candidate).multiplier * inner
        known = self.seen.get(candidate.tie_key)
        if known is None or value < known[0]:
            self.seen[candidate.tie_key] = value, plan
        if self.incumbent is None or (value, candidate.tie_key) < self.incumbent.key:
            self.incumbent = Incumbent(self, plan, candidate, value, units, self.unit_s)
        return inner

    def try_candidate(
        self, candidate: Candidate, time_units: TimeCoefficients, limit: int, most: int = MOST_SPLITS
    ) -> Option | None:
        """The candidate as an option for CP-SAT, or None when its split bound is above `limit`; offers its plans.

        Splits come in ascending order of their bound. Where (P4) holds, the best plan seen is the best of the candidate
        as soon as no split that is left has a smaller bound; its step time is then the candidate's bound. After `most`
        splits the bound of the next ones is.
        """
        splits = self.splits.ascending(candidate, time_units, limit)
        if candidate.degrees.vpp > 1 and not self.instance.rules.even_chunks:
            bound: int | None = self.try_even(candidate, splits)
        else:
            bound = self.try_splits(candidate, time_units, splits, limit, most)
        worth = self.worth(candidate)
        if bound is None or (worth.plain and bound > limit):
            return None
        memory = self.tables.memory(candidate.degrees, candidate.schedule)
        return Option(candidate, time_units, memory, bound, worth)

    def try_even(self, candidate: Candidate, splits: Iterator[Split]) -> int:
        """Offer the best even splits of a candidate whose chunks are free; the bound of its placement holds for all."""
        best: int | None = None
        worth = self.worth(candidate)
        for split in itertools.islice(splits, MOST_SPLITS):
            if best is not None and best <= worth.least(split.bound):
                break
            inner = self.try_split(candidate, split)
            if inner is not None:
                best = inner if best is None else min(best, inner)
        return worth.least(max(self.units_below(self.placed_bound_s(candidate), candidate.micro_batches), 0))

    def try_splits(
        self, candidate: Candidate, time_units: TimeCoefficients, splits: Iterator[Split], limit: int, most: int
    ) -> int | None:
        """The inner value of the candidate's best plan, or a bound below it: of the splits that (P4) leaves open, or of
        those not tried after `most`; None where no plan is within `limit` units of time."""
        best = open_bound = UNLIMITED
        worth, tried = self.worth(candidate), 0
        while batch := list(itertools.islice(splits, MOST_SPLITS if tried else 1)):
            if best <= worth.least(batch[0].bound):
                break
            steps, counts = self.splits.timed(candidate, time_units, batch)
            inners = worth.inner(steps, candidate.layout, counts)
            for inner, step, split in sorted(
                zip(inners.tolist(), steps.tolist(), batch, strict=True), key=lambda own: own[0]
            ):
                if best <= inner:
                    break
                if step > limit:
                    continue
                offered = self.try_split(candidate, split)
                if offered is not None:
                    best = min(best, offered)
                if not self.splits.exact(candidate) and (offered is None or offered > inner):
                    open_bound = min(open_bound, max(inner, worth.least(split.bound)))
            tried += len(batch)
            if tried > most:
                open_bound = min(open_bound, worth.least(batch[-1].bound))
                break
        bound = min(best, open_bound)
        return None if bound == UNLIMITED else bound

    def try_split(self, candidate: Candidate, split: Split) -> int | None:
        """Offer the plans of a split until one is admitted; its inner value."""
        for plan in plans_to_try(self.instance, candidate, split):
            inner = self.offer(plan, candidate)
            if inner is not None:
                return inner
        return None

    def cut_off(self, plan: Plan) -> bool:
        """Keep the longest path of `plan` as a cut for all candidates of its shape; False if it is known."""
        timed = timed_plan(self.instance, plan, self.unit_s)
        passes = timed.passes
        paths = longest_paths(timed.shape, passes.durations[..., None], passes.lags[:, None], passes.tails[:, None])
        held, hops = paths.passes[..., 0], paths.hops[:, 0]
        cut = Cut(
            timed.shape,
            tuple((int(kind), int(slot), int(held[kind, slot])) for kind, slot in zip(*held.nonzero(), strict=True)),
            tuple((int(link), int(hops[link])) for link in hops.nonzero()[0]),
            int(paths.stage[0]),
        )
        known = cut in self.cuts
        self.cuts[cut] = None
        return not known

    def try_again(self) -> None:
        """Try the open candidates whose splits are all there is of them, best bound first, to the end where it is near: most
        were broken off when less was known. CP-SAT would have to tell their splits apart one by one."""
        for position, option in enumerate(self.open):
            candidate = option.candidate
            several = candidate.degrees.vpp > 1 and not self.instance.rules.even_chunks
            if several or not self.splits.exact(candidate) or self.beaten(option) or self.met(option):
                continue
            self.check_time()
            found = self.try_candidate(candidate, option.time, self.longest(candidate), MOST_AGAIN)
            bound = UNLIMITED if found is None else max(found.bound, option.bound)
            self.open[position] = replace(option, bound=bound)
        self.drop_beaten()

    def settle_by_splits(self) -> bool:
        """The first plan in the documented order, where all splits of the incumbent's candidate are exact and few."""
        incumbent = self.incumbent
        assert incumbent is not None
        candidate = incumbent.candidate
        rules = self.instance.rules
        if not rules.uniform_recompute or (candidate.degrees.vpp > 1 and not rules.even_chunks):
            return False
        time_units, worth = self.coefficients(candidate), self.worth(candidate)
        splits = list(
            itertools.islice(self.splits.ascending(candidate, time_units, self.longest(candidate)), MOST_AGAIN + 1)
        )
        if len(splits) > MOST_AGAIN:
            return False
        best = incumbent.value // worth.multiplier
        steps, counts = self.splits.timed(candidate, time_units, splits)
        inners = worth.inner(steps, candidate.layout, counts)
        equal = [
            plan
            for split, inner in zip(splits, inners.tolist(), strict=True)
            if inner <= best
            for plan in plans_to_try(self.instance, candidate, split)
            if (found := self.inner(plan, candidate)) is not None and found[1] == best
        ]
        modes = self.splits.all_modes
        first = min(equal, key=lambda plan: (*settled_key(plan), modes.index(plan.stages[0].mode)))
        self.incumbent = replace(incumbent, plan=first)
        return True

    def beaten(self, option: Option) -> bool:
        """Whether the option cannot improve on the incumbent, in value or in tie order."""
        assert self.incumbent is not None
        return (option.worth.multiplier * option.bound, option.candidate.tie_key) > self.incumbent.key

    def met(self, option: Option) -> bool:
        """Whether the incumbent is a plan of the option, and is worth no more than its bound."""
        assert self.incumbent is not None
        same = option.candidate.tie_key == self.incumbent.candidate.tie_key
        return same and option.worth.multiplier * option.bound >= self.incumbent.value

    def least_s(self, options: Iterable[Option]) -> float:
        """V in seconds that no plan of some options is below."""
        return min((option.worth.multiplier * option.bound for option in options), default=0) * self.unit_s

    def raise_bounds(self, options: tuple[Option, ...], value: int) -> None:
        """No plan of `options` that would be returned is below V of `value`."""
        among = {id(option) for option in options}
        self.open = [
            replace(option, bound=max(option.bound, -(-value // option.worth.multiplier)))
            if id(option) in among
            else option
            for option in self.open
        ]

    def prune(self, ordered: Sequence[Row]) -> None:
        """Best bound first: drop every candidate whose work, placement or split bound is above the incumbent."""
        counts = self.tally.counts
        self.unopened_bound_s = ordered[0].value_s if ordered else None
        for position, (value_s, _, grid, row) in enumerate(ordered):
            assert self.incumbent is not None
            if value_s > self.incumbent.near_s:
                counts["pruned_by_work_bound"] += len(ordered) - position
                break
            self.unopened_bound_s = value_s
            self.check_time()
            self.report("pruning", value_s, len(ordered) - position + len(self.open))
            for candidate in self.candidates(grid, row):
                self.tally.placements += 1
                bound_s, limit = self.placed_bound_s(candidate), self.longest(candidate)
                if self.units_below(bound_s, candidate.micro_batches) > limit:
                    counts["pruned_by_placement_bound"] += 1
                    continue
                option = self.try_candidate(candidate, self.coefficients(candidate), limit)
                if option is None:
                    counts["pruned_by_split_bound"] += 1
                elif self.beaten(option):
                    counts["pruned_by_tie_order"] += 1
                else:
                    self.open.append(option)
        self.unopened_bound_s = None
        self.drop_beaten()

    def drop_beaten(self) -> None:
        """Leave the options that can still improve on the incumbent, best bound first."""
        left = [option for option in self.open if not self.beaten(option)]
        self.tally.counts["pruned_by_split_bound"] += len(self.open) - len(left)
        self.open = sorted(left, key=lambda own: (own.worth.multiplier * own.bound, own.candidate.tie_key))

    def work(self, candidate: Candidate) -> Work:
        """What (B2)-(B5) need of a candidate's seconds, remembered with them."""
        time = self.time(candidate)
        known = self.works.get(id(time))
        if known is None or known[0] is not time:
            both = np.array(time.forward) + np.array(time.backward)
            counts = self.tables.kind_counts

            def through(seconds: Floats) -> float:
                return float(seconds[:-2] @ counts + seconds[-2:].sum())

            whole = float(whole_layers_s(both[:-2].tolist(), counts, candidate.degrees.pp))
            tails = max(through(np.array(own)) for own in (time.tail_floor, time.tail_overlap))
            own = Work(through(both), float(both[:-2].min()), whole, min(time.forward[:-2]), tails)
            known = self.works[id(time)] = time, own
        return known[1]

    def placed_bound_s(self, candidate: Candidate) -> float:
        """(B2)-(B5) with the candidate's own placement."""
        d, m, layers = candidate.degrees, candidate.micro_batches, len(self.instance.model.layers)
        time_s, work = self.time(candidate), self.work(candidate)
        hops = [link for link in candidate.layout.hop_before if link >= 0]
        transfers = 2 * sum(time_s.sends[link] for link in hops)
        within_s = math.inf if self.incumbent is None else self.longest(candidate) * self.unit_s * NEAR
        last = last_chunk_layers(within_s, m * work.fastest, layers)
        bound = work_bound_s(
            work.total, transfers, work.fastest, work.whole, work.forward, work.tails, m, d.pp, d.vpp, layers, last,
            drains=candidate.schedule in DRAINED, even=self.instance.rules.even_chunks,
        )  # fmt: skip
        return float(bound) + time_s.overhead

    # -- no pruning -----------------------------------------------------------------------------------------------

    def all_options(self, grids: list[Grid]) -> None:
        """Every candidate as an option with bound 0; refused above `NO_PRUNE_LIMIT`.

        A coefficient above the incumbent is as good as one just above it: no admitted plan uses it.
        """
        candidates = [c for grid in grids for row in range(len(grid)) for c in self.candidates(grid, row)]
        if len(candidates) > NO_PRUNE_LIMIT:
            raise InputError(f"--no-prune: {len(candidates)} candidates, at most {NO_PRUNE_LIMIT} go into one model")
        self.tally.placements = len(candidates)
        self.open_all(candidates)

    def open_all(self, candidates: list[Candidate]) -> None:
        """Open every candidate with bound 0."""
        most = self.most_units(candidates)
        for candidate in candidates:
            coefficients = clipped(self.coefficients(candidate), most + 1)
            memory = self.tables.memory(candidate.degrees, candidate.schedule)
            worth = self.worth(candidate)
            self.open.append(Option(candidate, coefficients, memory, worth.least(0), worth))

    def most_units(self, candidates: Iterable[Candidate]) -> int:
        """Above every step time that still matters: without an incumbent the unit is that of the slowest plan."""
        most: int = 2 ** (RESOLUTION_BITS + 2)
        if self.incumbent is None:
            return most
        return max(min(self.longest(candidate), most) for candidate in candidates)


def settled_key(plan: Plan) -> tuple[int, int, int, tuple[int, ...]]:
    """The order of equal plans of one candidate: fewest recomputed layers, smallest setting, smallest largest chunk,
    most layers in the earliest chunks."""
    recomputed = setting = 0
    for stage in plan.stages:
        if stage.recompute == "full":
            recomputed += sum(min(stage.recompute_layers, layers) for layers in stage.chunks)
            setting = max(setting, stage.recompute_layers)
        elif stage.recompute == "selective":
            recomputed += stage.layers
            setting = 1
    layers = plan.chunk_layers
    return recomputed, setting, max(layers), tuple(-n for n in layers)


def clipped(coefficients: TimeCoefficients, most: int) -> TimeCoefficients:
    """No coefficient above `most`."""
    changed: dict[str, Any] = {}
    for name in TimeCoefficients.__slots__:
        value = getattr(coefficients, name)
        changed[name] = tuple(min(x, most) for x in value) if isinstance(value, tuple) else min(value, most)
    return replace(coefficients, **changed)
