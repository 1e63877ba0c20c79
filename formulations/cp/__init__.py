"""The CP-SAT formulation of a set of candidates.

Sets: candidates C with degrees, placement, schedule and integer coefficients; chunks i = 0 .. S - 1 of layers, on the
stages that the layout of the chosen candidate says; layer kinds q.

Variables (`variables.py`)
    x_c        candidate c is chosen; exactly one is. Degree and placement variables are channelled to x.
    cut_i      first layer of chunk i; n_qi the layers of kind q in chunk i.
    sel_i, block_i, r_qi, s_qi
               recompute setting of chunk i, and the layers of kind q that it recomputes fully and selectively.
    F_i, B_i, W_i, X_k, fill_k, end_k, T
               the terms of (T1)-(T6), and the step time.

Constraint groups, each one function of one module, in any order:
    (G1) `selection.add_selection`        one candidate; degrees and placement follow.
    (G2) `stages.add_contiguous_stages`   chunks partition the layers; only the first and last may be empty.
    (G3) `stages.add_even_chunks`         with v > 1 the middle chunks hold q + 1 or q layers, larger ones first.
    (G4) `recompute.add_recompute`        settings, counts, and uniformity where the pack asks for it.
    (G5) `memory_capacity.add_memory_capacity`  every stage fits at every moment of the schedule.
    (G6) `step_time.add_step_time`        T is at least every simple path and every cut.
    (G7) `objective.add_value`            V is at least what the plan is worth.
    (G8) `pinned_layers.add_pinned_layers`  layers are on the stages that the user pins them to.

Constraints that hold for one candidate are enforced by x_c; none is a product of variables.
"""

from shardwise.formulations.cp.formulation import Formulation, build
from shardwise.formulations.cp.step_time import Cut
from shardwise.formulations.cp.variables import Option

__all__ = ["Cut", "Formulation", "Option", "build"]
