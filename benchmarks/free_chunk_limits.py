"""How far the relaxation of `--free-chunks` is from a plan, and how many cuts have to be known before it is near.

    python benchmarks/free_chunk_limits.py [--seeds 322 194 490] [--seconds 60]

Instances are those of `agreement.py`; these three are left with a gap above 5 %. The best plan found in some seconds is
taken, some of its cuts are fixed, and of all splits that have these cuts the value of the game (C2) is told as a share of the
plan's step: no mean of paths is a better bound. Were it above 95 % with few cuts fixed, branching on those would prove
the promised gap.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "solver"))

from schedule_instances import instance_with

from shardwise.data.rules import free_chunks
from shardwise.formulations.free_chunks import FreeChunks
from shardwise.formulations.path_game import play
from shardwise.solver.search import Search, TimeUpError
from shardwise.solver.tighten import tighten

if TYPE_CHECKING:
    from shardwise.formulations.cp import Option
    from shardwise.formulations.free_chunks import Floats, Ints

SECONDS = 60.0


class Fixed(FreeChunks):
    """Splits that begin some chunks with given layers."""

    def __init__(self, search: Search, option: Option, first_layers: dict[int, int]) -> None:
        super().__init__(search.splits, option.candidate, option.time, search.longest(option.candidate))
        self.first_layers = first_layers

    def bars(self, chunk: int) -> Floats:
        out = super().bars(chunk)
        if chunk not in self.first_layers:
            return out
        others = np.arange(len(out)) != self.first_layers[chunk]
        return np.where(others[:, None], np.inf, out)


def best_plan(seed: int, seconds: float) -> tuple[Search, Option, Ints, float]:
    """A search, its candidate, the cuts of the best plan found and its bound as a share of it."""
    instance = instance_with(seed)
    search = Search(replace(instance, rules=free_chunks(instance.rules)), time.monotonic() + seconds)
    search.enumerate()
    search.first_incumbent()
    search.probe(search.within())
    search.prune(search.within())
    option = search.open[0]
    with contextlib.suppress(TimeUpError):
        tighten(search)
    assert search.incumbent is not None
    bound = min([search.incumbent.units, *(own.bound for own in search.open)])
    cuts = np.array(search.seen[option.candidate.tie_key][1].cuts)
    return search, option, cuts, bound / search.incumbent.units


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[322, 194, 490])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for the plan of each instance")
    options = parser.parse_args()
    for seed in options.seeds:
        search, option, cuts, bound = best_plan(seed, options.seconds)
        assert search.incumbent is not None
        p, v, step = option.candidate.degrees.pp, option.candidate.degrees.vpp, search.incumbent.units
        print(f"seed {seed}: {p} stages of {v} chunks, {len(search.instance.model.layers)} layers, bound {bound:.1%}")
        for every in (0, p, -(-p // 2), -(-p // 3), -(-p // 4), 2):
            stages = range(0, p, every) if every else ()
            fixed = {row * p + k: int(cuts[row * p + k]) for row in range(v) for k in stages if row * p + k}
            value = max(length for length, _, _ in play(Fixed(search, option, fixed), cuts))
            print(f"  {len(fixed):>3} of {p * v - 1} cuts fixed: {value / step:.1%}", flush=True)


if __name__ == "__main__":
    main()
