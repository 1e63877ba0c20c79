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
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.data.faults import InputError
from shardwise.formulations.bounds import SAFETY, BestCase, grid_bounds, last_chunk_layers, whole_layers_s, work_bound_s
from shardwise.formulations.candidates import Candidate, Grid, PlacementTable, enumerate_grids
from shardwise.formulations.coefficients import TimeCoefficients
from shardwise.formulations.cp import Cut, Option
from shardwise.formulations.free_chunks import FreeChunks, MeanPath
from shardwise.formulations.schedule import DRAINED, UNSYNCHRONISED
from shardwise.formulations.splits import Split, SplitSearch, plans_to_try
from shardwise.formulations.timeline import longest_paths
from shardwise.solver.evaluate import Evaluation, admitted_units, cost_tables, evaluate, timed_plan
from shardwise.solver.result import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.data.instance import Instance
    from shardwise.data.plan import Plan
    from shardwise.formulations.free_chunks import Ints
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
FIRST_TRY = 4
PROBES = 32
"""Rows tried before all others, evenly among them: a good incumbent early makes the rest cheaper."""
MOST_SPLITS = 64
"""Splits of one candidate that are judged before it is left to CP-SAT."""


@dataclass(frozen=True)
class Incumbent:
    """The best plan so far. `key` orders plans: integer step time, then the tie order of the candidate."""

    plan: Plan
    evaluation: Evaluation
    candidate: Candidate
    units: int

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        return self.units, self.candidate.tie_key


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
        self, instance: Instance, deadline: float | None, on_progress: Callable[[Progress], None] | None
    ) -> None:
        self.instance = instance
        self.tables = cost_tables(instance)
        self.placements = PlacementTable(instance)
        self.best_case = BestCase(self.tables, self.placements)
        self.splits = SplitSearch(instance, self.tables)
        self.deadline = deadline
        self.on_progress = on_progress
        self.started = time.monotonic()
        self.reported = -math.inf
        self.tally = Tally()
        self.incumbent: Incumbent | None = None
        self.seen: dict[tuple[int, ...], tuple[int, Plan]] = {}
        self.cuts: dict[Cut, None] = {}
        self.unit_s = 1.0
        self.open: list[Option] = []
        self.unopened_bound_s: float | None = None

    # -- reporting ------------------------------------------------------------------------------------------------

    def report(self, phase: str, bound_s: float | None, open_count: int, *, force: bool = False) -> None:
        """Tell the caller, at most ten times a second."""
        now = time.monotonic()
        if self.on_progress is None or (now - self.reported < REPORT_EVERY_S and not force):
            return
        self.reported = now
        value = None if self.incumbent is None else self.incumbent.evaluation.step_time_s
        if value is not None and bound_s is not None:
            bound_s = min(bound_s, value)
        self.on_progress(Progress(phase, value, bound_s, open_count, now - self.started))

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
        self.unit_s = 2.0 ** (math.floor(math.log2(step_time_s)) - RESOLUTION_BITS)

    def units_below(self, lower_s: float, micro_batches: int) -> int:
        """Integer step time that no plan of so many micro-batches that lasts at least `lower_s` is below."""
        return math.floor(lower_s * SAFETY / self.unit_s) - self.rounding_units(micro_batches)

    # -- enumerate and prune --------------------------------------------------------------------------------------

    def enumerate(self) -> list[Grid]:
        """All candidates before placement."""
        grids = list(enumerate_grids(self.instance))
        self.tally.enumerated = sum(len(grid) for grid in grids)
        return grids

    def ordered(self, grids: list[Grid], incumbent_s: float | None) -> list[tuple[float, int, int]]:
        """(bound, grid, row) of every row that (B1) leaves, best bound first; ties in order of enumeration."""
        bounds, where = [], []
        left = 0
        for index, grid in enumerate(grids):
            result = grid_bounds(self.best_case, grid, incumbent_s)
            usable = np.nonzero(result.fits & np.isfinite(result.lower_s))[0]
            left += len(usable)
            if incumbent_s is not None:
                usable = usable[result.lower_s[usable] <= incumbent_s * NEAR]
            bounds.append(result.lower_s[usable])
            where.append(np.stack((np.full(len(usable), index), usable), axis=1))
            self.check_time()
        self.tally.counts["pruned_by_memory"] = self.tally.enumerated - left
        lower = np.concatenate(bounds) if bounds else np.zeros(0)
        rows = np.concatenate(where) if where else np.zeros((0, 2), dtype=np.int64)
        order = np.argsort(lower, kind="stable")
        self.tally.counts["pruned_by_work_bound"] = left - len(order)
        return [(float(lower[i]), int(rows[i, 0]), int(rows[i, 1])) for i in order]

    def first_incumbent(self, grids: list[Grid], ordered: list[tuple[float, int, int]]) -> list[Candidate]:
        """Make a good plan of the best-bound candidates the incumbent, and choose the unit; pruning on or off.

        Without an incumbent, the candidates that the split bound leaves: CP-SAT has to tell whether they hold a plan.
        """
        left: list[Candidate] = []
        for factor in (FIRST_TRY, UNLIMITED):
            for lower_s, grid, row in ordered:
                self.check_time()
                self.choose_unit(lower_s)
                for candidate in self.candidates(grids[grid], row):
                    limit = min(UNLIMITED, math.ceil(factor * lower_s / self.unit_s))
                    option = self.try_candidate(candidate, self.coefficients(candidate), limit)
                    if option is not None and factor == UNLIMITED:
                        left.append(candidate)
                if self.incumbent is not None:
                    self.choose_unit(self.incumbent.evaluation.step_time_s)
                    self.rescale()
                    return []
        if left:
            self.choose_unit(max(self.longest_s(candidate) for candidate in left))
        return left

    def longest_s(self, candidate: Candidate) -> float:
        """Above every step time of the candidate: all passes one after the other, everything recomputed."""
        c = self.tables.time(candidate.degrees, candidate.placement, candidate.schedule)
        units = [*self.instance.model.kind_indices, -2, -1]
        passes = sum(c.forward[u] + c.backward[u] + max(c.full[u], c.selective[u]) for u in units)
        passes += 2 * candidate.degrees.virtual_stages * (max(c.sends) + max(c.lags))
        tails = sum(abs(c.tail_floor[u]) + abs(c.tail_overlap[u]) for u in units)
        return float(candidate.micro_batches * passes + tails + 2 * c.tied + c.overhead)

    def rescale(self) -> None:
        """Express the incumbent in the unit just chosen."""
        old = self.incumbent
        assert old is not None
        self.incumbent = None
        self.seen.clear()
        self.offer(old.plan, old.candidate)

    def candidates(self, grid: Grid, row: int) -> list[Candidate]:
        """The candidates of one row, one per placement."""
        degrees, schedule = grid.degrees(row), grid.shape.schedule
        return [
            Candidate(degrees, placement, int(grid.micro_batches[row]), schedule)
            for placement in self.placements.of(degrees)
        ]

    def coefficients(self, candidate: Candidate) -> TimeCoefficients:
        time = self.tables.time(candidate.degrees, candidate.placement, candidate.schedule)
        return time.in_units(self.unit_s)

    def offer(self, plan: Plan, candidate: Candidate) -> int | None:
        """The units of an admitted plan, which becomes the incumbent if it is better; None if it is not admitted."""
        units = admitted_units(self.instance, plan, self.unit_s)
        if units is None:
            return None
        key = (units, candidate.tie_key)
        known = self.seen.get(candidate.tie_key)
        if known is None or units < known[0]:
            self.seen[candidate.tie_key] = units, plan
        if self.incumbent is None or key < self.incumbent.key:
            evaluation = evaluate(self.instance, plan, unit_s=self.unit_s)
            self.incumbent = Incumbent(plan, evaluation, candidate, units)
        return units

    def try_candidate(self, candidate: Candidate, time_units: TimeCoefficients, limit: int) -> Option | None:
        """The candidate as an option for CP-SAT, or None when its split bound is above `limit`; offers its plans.

        Splits come in ascending order of their bound. Where (P4) holds, the best plan seen is the best of the candidate
        as soon as no split that is left has a smaller bound; its step time is then the candidate's bound.
        """
        splits = self.splits.ascending(candidate, time_units, limit)
        if candidate.degrees.vpp > 1 and not self.instance.rules.even_chunks:
            bound: int | None = self.try_even(candidate, splits)
        else:
            bound = self.try_splits(candidate, time_units, splits, limit)
        if bound is None or bound > limit:
            return None
        return Option(candidate, time_units, self.tables.memory(candidate.degrees, candidate.schedule), bound)

    def try_even(self, candidate: Candidate, splits: Iterator[Split]) -> int:
        """Offer the best even splits of a candidate whose chunks are free; the bound of its placement holds for all."""
        best: int | None = None
        for split in itertools.islice(splits, MOST_SPLITS):
            if best is not None and best <= split.bound:
                break
            units = self.try_split(candidate, split)
            if units is not None:
                best = units if best is None else min(best, units)
        return max(self.units_below(self.placed_bound_s(candidate), candidate.micro_batches), 0)

    def try_splits(
        self, candidate: Candidate, time_units: TimeCoefficients, splits: Iterator[Split], limit: int
    ) -> int | None:
        """The step of the candidate's best plan, or a bound below it: of the splits that (P4) leaves open, or of those
        not tried after `MOST_SPLITS`; None where no plan is within `limit`."""
        best = open_bound = UNLIMITED
        tried = 0
        while batch := list(itertools.islice(splits, MOST_SPLITS if tried else 1)):
            if best <= batch[0].bound:
                break
            timed = self.splits.timed(candidate, time_units, batch).tolist()
            for step, split in sorted(zip(timed, batch, strict=True), key=lambda pair: pair[0]):
                if step > limit or best <= step:
                    break
                units = self.try_split(candidate, split)
                if units is not None:
                    best = min(best, units)
                if not self.splits.exact(candidate) and (units is None or units > step):
                    open_bound = min(open_bound, max(step, split.bound))
            tried += len(batch)
            if tried > MOST_SPLITS:
                open_bound = min(open_bound, batch[-1].bound)
                break
        bound = min(best, open_bound)
        return None if bound == UNLIMITED else bound

    def try_split(self, candidate: Candidate, split: Split) -> int | None:
        """Offer the plans of a split until one is admitted; its units."""
        for plan in plans_to_try(self.instance, candidate, split):
            units = self.offer(plan, candidate)
            if units is not None:
                return units
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

    def settle_by_splits(self) -> bool:
        """The first plan in the documented order, where all splits of the incumbent's candidate are exact and few."""
        incumbent = self.incumbent
        assert incumbent is not None
        candidate = incumbent.candidate
        rules = self.instance.rules
        if not rules.uniform_recompute or (candidate.degrees.vpp > 1 and not rules.even_chunks):
            return False
        splits = list(
            itertools.islice(
                self.splits.ascending(candidate, self.coefficients(candidate), incumbent.units), MOST_SPLITS + 1
            )
        )
        if len(splits) > MOST_SPLITS:
            return False
        equal = [
            plan
            for split in splits
            for plan in plans_to_try(self.instance, candidate, split)
            if admitted_units(self.instance, plan, self.unit_s) == incumbent.units
        ]
        first = min(equal, key=settled_key)
        self.incumbent = replace(incumbent, plan=first, evaluation=evaluate(self.instance, first, unit_s=self.unit_s))
        return True

    def beaten(self, option: Option) -> bool:
        """Whether the option cannot improve on the incumbent, in step time or in tie order."""
        assert self.incumbent is not None
        return (option.bound, option.candidate.tie_key) > self.incumbent.key

    def met(self, option: Option) -> bool:
        """Whether the incumbent is a plan of the option, and takes as long as its bound."""
        assert self.incumbent is not None
        return option.candidate.tie_key == self.incumbent.candidate.tie_key and option.bound >= self.incumbent.units

    def raise_bounds(self, options: tuple[Option, ...], units: int) -> None:
        """No plan of `options` that would be returned is below `units`."""
        among = {id(option) for option in options}
        self.open = [
            replace(option, bound=max(option.bound, units)) if id(option) in among else option for option in self.open
        ]

    def prune(self, grids: list[Grid], ordered: list[tuple[float, int, int]]) -> None:
        """Best bound first: drop every candidate whose work, placement or split bound is above the incumbent."""
        counts = self.tally.counts
        self.unopened_bound_s = ordered[0][0] if ordered else None
        for _, grid, row in ordered[:: max(len(ordered) // PROBES, 1)]:
            self.check_time()
            for candidate in self.candidates(grids[grid], row):
                assert self.incumbent is not None
                self.try_candidate(candidate, self.coefficients(candidate), self.incumbent.units)
        most = max((int(grids[grid].micro_batches[row]) for _, grid, row in ordered), default=1)
        for position, (lower_s, grid, row) in enumerate(ordered):
            assert self.incumbent is not None
            if self.units_below(lower_s, most) > self.incumbent.units:
                counts["pruned_by_work_bound"] += len(ordered) - position
                break
            self.unopened_bound_s = lower_s
            self.check_time()
            self.report("pruning", lower_s, len(ordered) - position + len(self.open))
            for candidate in self.candidates(grids[grid], row):
                self.tally.placements += 1
                bound_s = self.placed_bound_s(candidate)
                if self.units_below(bound_s, candidate.micro_batches) > self.incumbent.units:
                    counts["pruned_by_placement_bound"] += 1
                    continue
                option = self.try_candidate(candidate, self.coefficients(candidate), self.incumbent.units)
                if option is None:
                    counts["pruned_by_split_bound"] += 1
                elif self.beaten(option):
                    counts["pruned_by_tie_order"] += 1
                else:
                    self.open.append(option)
        self.unopened_bound_s = None
        left = [option for option in self.open if not self.beaten(option)]
        counts["pruned_by_split_bound"] += len(self.open) - len(left)
        self.open = sorted(left, key=lambda option: (option.bound, option.candidate.tie_key))

    def tighten(self) -> None:
        """(C1)-(C5) Better bounds and plans of the open candidates whose chunks are free, best bound first. A bound holds
        for all candidates of the same shape and times."""
        known: dict[tuple[Shape, TimeCoefficients], int] = {}
        for position, option in enumerate(self.open):
            if option.candidate.degrees.vpp == 1 or self.instance.rules.even_chunks or self.beaten(option):
                continue
            alike = option.candidate.shape, option.time
            for bound in [known[alike]] if alike in known else self.raised(option):
                known[alike] = max(option.bound, bound, known.get(alike, 0))
                self.open[position] = replace(option, bound=max(option.bound, known[alike]))
                self.report("pruning", self.open[0].bound * self.unit_s, len(self.open))
                self.check_time()
        left = [option for option in self.open if not self.beaten(option)]
        self.tally.counts["pruned_by_split_bound"] += len(self.open) - len(left)
        self.open = sorted(left, key=lambda option: (option.bound, option.candidate.tie_key))

    def raised(self, option: Option) -> Iterator[int]:
        """(C1)-(C5) Bounds of one candidate, while its plans are offered; all ways first, where they are few."""
        assert self.incumbent is not None
        candidate = option.candidate
        free = FreeChunks(self.splits, candidate, option.time, self.incumbent.units)
        path = MeanPath.nothing(candidate.degrees.virtual_stages)
        bound, cuts = free.by_ways(path, option.bound, 1)
        yield self.offer_cuts(free, cuts, bound)
        known = self.seen.get(candidate.tie_key)
        if bound >= self.incumbent.units or known is None:
            return
        yield from self.searched(free, np.array(known[1].cuts), bound)
        free = FreeChunks(self.splits, candidate, option.time, self.incumbent.units)
        starts = []
        for length, mean, cuts in free.play(np.array(self.seen[candidate.tie_key][1].cuts)):
            if length > bound:
                path, bound = mean, math.floor(min(length * SAFETY, free.limit + 1))
                yield bound
            if bound > self.incumbent.units or cuts is None:
                return
            starts.append(cuts)
        if starts:
            split, _ = free.fastest(np.array(starts), UNLIMITED)
            if split is not None:
                yield from self.searched(free, np.array(split.cuts), bound)
        free = FreeChunks(self.splits, candidate, option.time, self.incumbent.units)
        bound, cuts = free.by_ways(path, bound)
        yield self.offer_cuts(free, cuts, bound)

    def searched(self, free: FreeChunks, cuts: Ints, bound: int) -> Iterator[int]:
        """Offer the plans that local search finds; `bound` as it is, once a round."""
        for better in free.better(cuts):
            if better is not None:
                self.try_split(free.candidate, better)
            yield bound

    def offer_cuts(self, free: FreeChunks, cuts: Ints | None, bound: int) -> int:
        """Offer the plans of some cuts with the least settings that fit; `bound` as it is."""
        if cuts is not None:
            split, _ = free.fastest(cuts[None], UNLIMITED)
            if split is not None:
                self.try_split(free.candidate, split)
        return bound

    def placed_bound_s(self, candidate: Candidate) -> float:
        """(B2)-(B4) with the candidate's own placement."""
        instance, d = self.instance, candidate.degrees
        time_s = self.tables.time(d, candidate.placement, candidate.schedule)
        m = candidate.micro_batches
        both = [f + b for f, b in zip(time_s.forward, time_s.backward, strict=True)]
        work = sum(both[unit] for unit in (*instance.model.kind_indices, -2, -1))
        fastest = min(both[:-2])
        whole = whole_layers_s(both[:-2], np.bincount(instance.model.kind_indices), d.pp)
        hops = [link for link in candidate.layout.hop_before if link >= 0]
        transfers = 2 * sum(time_s.sends[link] for link in hops)
        within_s = math.inf if self.incumbent is None else self.incumbent.evaluation.step_time_s
        last = last_chunk_layers(within_s, m * fastest, len(instance.model.layers))
        bound = work_bound_s(
            work, transfers, fastest, whole, m, d.pp, d.vpp, len(instance.model.layers), last,
            drains=candidate.schedule in DRAINED, even=instance.rules.even_chunks,
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
        most = self.most_units()
        for candidate in candidates:
            coefficients = clipped(self.coefficients(candidate), most + 1)
            self.open.append(
                Option(candidate, coefficients, self.tables.memory(candidate.degrees, candidate.schedule), 0)
            )

    def most_units(self) -> int:
        """Above every step time that still matters: without an incumbent the unit is that of the slowest plan."""
        return 2 ** (RESOLUTION_BITS + 2) if self.incumbent is None else self.incumbent.units


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
