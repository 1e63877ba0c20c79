"""Each constraint group alone: an instance it admits, one it forbids and one on the edge.

Coefficients are small numbers written out here, so that every expected value can be checked by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from ortools.sat.python import cp_model

from shardwise.data.cluster import Accelerator, Cluster, Domain, Link
from shardwise.data.instance import Instance
from shardwise.data.limits import parse_limits
from shardwise.data.model import LayerKind, Mlp, Model, Tensor
from shardwise.data.plan import Degrees, Placement
from shardwise.data.rules import load_rules
from shardwise.data.workload import Training
from shardwise.formulations.candidates import Candidate
from shardwise.formulations.coefficients import MemoryCoefficients, TimeCoefficients
from shardwise.formulations.cp.memory_capacity import add_memory_capacity
from shardwise.formulations.cp.recompute import add_recompute
from shardwise.formulations.cp.selection import add_selection
from shardwise.formulations.cp.stages import add_contiguous_stages, add_even_chunks
from shardwise.formulations.cp.step_time import Cut, add_step_time
from shardwise.formulations.cp.variables import (
    Choice,
    Chunks,
    Clock,
    Option,
    RecomputeChoice,
    new_choice,
    new_chunks,
)
from shardwise.formulations.memory import MIB, ActivationBytes
from shardwise.formulations.objective import Worth
from shardwise.formulations.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from shardwise.formulations.timeline import Shape

A = LayerKind("a", None, Mlp(64, False), (Tensor("a", (64, 64), "column"),))
B = LayerKind("b", None, Mlp(128, False), (Tensor("b", (128, 64), "column"),))


def instance_of(layers: str, *, rules: str = "megatron-core", limits: tuple[str, ...] = ()) -> Instance:
    """A model of layers "aab", ... on four devices; only its layers, rules and limits matter here."""
    kinds = tuple({"a": A, "b": B}[letter] for letter in layers)
    model = Model("toy", "toy", 64, 128, False, kinds, (Tensor("embed", (128, 64), "vocab"),), ())
    device = Accelerator("toy", "none", 2**34, 1e12, {"bf16": 1e15})
    cluster = Cluster("toy", Domain("node", "node", Link("l", "nvlink", 1e11, 1e-6), device, 4))
    return Instance(model, cluster, Training(64, 8), load_rules(rules), limits=parse_limits(limits))


NONE = (0, 0, 0, 0)
NO_TIME = TimeCoefficients(
    forward=NONE, backward=NONE, weight=NONE, selective=NONE, full=NONE, tail_floor=NONE, tail_overlap=NONE,
    sends=(0,) * 8, lags=(0,) * 8, tied=0, overhead=0,
)  # fmt: skip
NO_MEMORY = MemoryCoefficients(
    state=(0, 0), activations=(ActivationBytes(0, 0, 0, (0,) * 7),) * 2, embedding=0, head=0, fixed=0, capacity=0
)


def option_of(
    pp: int = 1,
    vpp: int = 1,
    tp: int = 1,
    micro_batches: int = 8,
    *,
    kinds: int = 1,
    time: TimeCoefficients = NO_TIME,
    memory: MemoryCoefficients = NO_MEMORY,
    bound: int = 0,
    schedule: str = "",
) -> Option:
    degrees = Degrees(tp=tp, pp=pp, vpp=vpp)
    candidate = Candidate(degrees, Placement((tp,), (pp,), (1,)), micro_batches, schedule or degrees.schedule)
    per_unit = ("forward", "backward", "weight", "selective", "full", "tail_floor", "tail_overlap")
    time = replace(time, **{name: getattr(time, name)[:kinds] + getattr(time, name)[-2:] for name in per_unit})
    memory = replace(memory, state=memory.state[:kinds], activations=memory.activations[:kinds])
    return Option(candidate, time, memory, bound, Worth(1))


@dataclass
class Group:
    """A model with the variables of some options and no constraints yet."""

    instance: Instance
    options: tuple[Option, ...]

    def __post_init__(self) -> None:
        self.model = cp_model.CpModel()
        self.choice: Choice = new_choice(self.model, self.options)
        chunks = max(option.candidate.degrees.virtual_stages for option in self.options)
        self.chunks: Chunks = new_chunks(self.model, self.instance, chunks)

    def choose(self, option: int) -> None:
        """Fix the choice without the selection group."""
        for c, literal in enumerate(self.choice.literals):
            self.model.add(literal == (c == option))

    def lay_out(self, *layers: int) -> None:
        """Fix the layers of every chunk, and the cuts and counts that follow, without the stage groups."""
        indices, cut = self.instance.model.kind_indices, 0
        self.model.add(self.chunks.cut[0] == 0)
        for i, variable in enumerate(self.chunks.layers):
            size = layers[i] if i < len(layers) else 0
            self.model.add(variable == size)
            for q, row in enumerate(self.chunks.count):
                if len(self.chunks.count) > 1:
                    self.model.add(row[i] == indices[cut : cut + size].count(q))
            cut += size
            self.model.add(self.chunks.cut[i + 1] == cut)

    def recompute(self, block: int, *, selective: bool = False) -> RecomputeChoice:
        """Fixed recompute of the layout, without the recompute group: needs `lay_out` on a model of one kind."""
        constant = self.model.new_constant
        flag, many = constant(int(selective)), constant(block)
        full, some, picked = [], [], []
        for i, layers in enumerate(self.chunks.layers):
            again = self.model.new_int_var(0, 99, f"again[{i}]")
            self.model.add_min_equality(again, [many, layers])
            any_full = self.model.new_bool_var(f"any[{i}]")
            self.model.add(again >= 1).only_enforce_if(any_full)
            self.model.add(again == 0).only_enforce_if(~any_full)
            chosen = self.model.new_int_var(0, 99, f"picked[{i}]")
            self.model.add(chosen == (layers if selective else 0))
            full.append(again)
            some.append(any_full)
            picked.append(chosen)
        size = len(full)
        return RecomputeChoice(
            ("core_attn",),
            ((flag,) * size,),
            (many,) * size,
            tuple(full),
            (tuple(full),),
            ((tuple(picked),),),
            tuple(some),
        )

    def feasible(self) -> bool:
        return self.solved()[0]

    def solved(self) -> tuple[bool, cp_model.CpSolver]:
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = 10
        status = solver.solve(self.model)
        assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE), solver.status_name(status)
        return status == cp_model.OPTIMAL, solver


# -- (G1) selection ----------------------------------------------------------------------------------------------------


def selection(*fixed: tuple[str, int]) -> Group:
    group = Group(instance_of("aaaa"), (option_of(tp=1, pp=4), option_of(tp=2, pp=2), option_of(tp=4, pp=1)))
    add_selection(group.model, group.options, group.choice)
    for name, value in fixed:
        group.model.add(group.choice.degrees[name] == value)
    return group


def test_selection_admits_the_degrees_and_placement_of_one_candidate() -> None:
    feasible, solver = selection(("tp", 2)).solved()
    assert feasible
    group = selection(("tp", 2), ("pp", 2), ("tp_at_level[0]", 2), ("pp_at_level[0]", 2))
    feasible, solver = group.solved()
    assert feasible
    assert [solver.value(literal) for literal in group.choice.literals] == [0, 1, 0]


def test_selection_forbids_degrees_mixed_from_two_candidates() -> None:
    assert not selection(("tp", 2), ("pp", 4)).feasible()
    assert not selection(("tp", 4), ("tp_at_level[0]", 2)).feasible()


@pytest.mark.parametrize("chosen", [0, 2, 3])
def test_selection_takes_exactly_one_candidate(chosen: int) -> None:
    """On the edge: one literal is fine, none and two are not."""
    group = selection()
    group.model.add(sum(group.choice.literals) == (1 if chosen == 3 else chosen))
    assert group.feasible() == (chosen == 3)


# -- (G2) contiguous stages --------------------------------------------------------------------------------------------


def stages(layers: str, pp: int, sizes: tuple[int, ...], *, vpp: int = 1) -> Group:
    group = Group(instance_of(layers), (option_of(pp=pp, vpp=vpp), option_of(pp=4, vpp=2)))
    group.choose(0)
    add_contiguous_stages(group.model, group.instance, group.options, group.choice, group.chunks)
    for variable, size in zip(group.chunks.layers, sizes, strict=False):
        group.model.add(variable == size)
    return group


def test_stages_admit_a_contiguous_split_and_count_its_kinds() -> None:
    group = stages("aabab", 3, (2, 1, 2))
    feasible, solver = group.solved()
    assert feasible
    # a a | b | a b
    kinds = [[solver.value(variable) for variable in row[:3]] for row in group.chunks.count]
    assert kinds == [[2, 0, 1], [0, 1, 1]]
    assert [solver.value(cut) for cut in group.chunks.cut[:4]] == [0, 2, 3, 5]


@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 2, 2), (5, 5, 5)])
def test_stages_forbid_a_split_that_misses_or_repeats_layers(sizes: tuple[int, ...]) -> None:
    assert not stages("aabab", 3, sizes).feasible()


@pytest.mark.parametrize(
    ("sizes", "admitted"), [((0, 5, 0), True), ((0, 0, 5), False), ((5, 0, 0), False), ((4, 1, 0), True)]
)
def test_only_the_first_and_the_last_stage_may_be_empty(sizes: tuple[int, ...], admitted: bool) -> None:
    """On the edge: an empty end is admitted, an empty middle is not."""
    assert stages("aabab", 3, sizes).feasible() == admitted


def test_chunks_that_the_candidate_does_not_have_hold_no_layer() -> None:
    assert stages("aab", 2, (1, 2, 0, 0)).feasible()
    assert not stages("aab", 2, (1, 1, 1, 0)).feasible()


# -- (G3) even chunks --------------------------------------------------------------------------------------------------


def even(pp: int, vpp: int, sizes: tuple[int, ...]) -> bool:
    group = Group(instance_of("a" * 12), (option_of(pp=pp, vpp=vpp),))
    group.choose(0)
    add_even_chunks(group.model, group.options, group.choice, group.chunks)
    for variable, size in zip(group.chunks.layers, sizes, strict=True):
        group.model.add(variable == size)
    return group.feasible()


def test_even_chunks_admit_equal_middle_chunks_with_free_ends() -> None:
    assert even(3, 2, (0, 2, 2, 2, 2, 4))


def test_even_chunks_forbid_a_middle_chunk_two_layers_larger() -> None:
    assert not even(3, 2, (1, 3, 2, 1, 1, 4))


@pytest.mark.parametrize(
    ("sizes", "admitted"),
    [
        ((0, 3, 3, 2, 2, 2), True),  # one layer more, larger first
        ((0, 2, 2, 3, 3, 2), False),  # larger ones last
        ((0, 3, 2, 3, 2, 2), False),  # larger ones not together
        ((5, 1, 1, 1, 1, 3), True),  # the ends are free in size
    ],
)
def test_even_chunks_may_differ_by_one_layer_larger_ones_first(sizes: tuple[int, ...], admitted: bool) -> None:
    """On the edge: a difference of one, in one order only."""
    assert even(3, 2, sizes) == admitted


def test_even_chunks_do_not_concern_one_chunk_a_stage() -> None:
    assert even(4, 1, (1, 5, 1, 5))


def test_even_chunks_with_two_middle_chunks_on_two_stages() -> None:
    assert even(2, 2, (4, 2, 1, 5))
    assert not even(2, 2, (4, 1, 2, 5))
    assert not even(2, 2, (3, 3, 1, 5))


# -- (G4) recompute ----------------------------------------------------------------------------------------------------


def recompute(
    layers: str, sizes: tuple[int, ...], *, rules: str = "megatron-core", limits: tuple[str, ...] = (), vpp: int = 1
) -> tuple[Group, RecomputeChoice]:
    kinds = len(set(layers))
    group = Group(
        instance_of(layers, rules=rules, limits=limits), (option_of(pp=len(sizes) // vpp, vpp=vpp, kinds=kinds),)
    )
    group.choose(0)
    group.lay_out(*sizes)
    return group, add_recompute(group.model, group.instance, group.options, group.choice, group.chunks)


def test_recompute_admits_one_block_for_all_stages_and_counts_its_layers() -> None:
    # a a b | b a with block 2: (a a) and (b a) are repeated.
    group, chosen = recompute("aabba", (3, 2))
    group.model.add(chosen.block[0] == 2)
    feasible, solver = group.solved()
    assert feasible
    assert [[solver.value(n) for n in row] for row in chosen.full] == [[2, 1], [0, 1]]
    assert [solver.value(n) for n in chosen.full_layers] == [2, 2]
    assert [[solver.value(n) for n in row] for row in chosen.selected[0]] == [[0, 0], [0, 0]]


def test_recompute_forbids_two_settings_where_the_pack_wants_one() -> None:
    for rules, admitted in (("megatron-core", False), ("free", True)):
        group, chosen = recompute("aaaa", (2, 2), rules=rules)
        group.model.add(chosen.full_layers[0] == 1)
        group.model.add(chosen.full_layers[1] == 2)
        assert group.feasible() == admitted


def test_recompute_forbids_selective_and_full_together() -> None:
    group, chosen = recompute("aaaa", (2, 2))
    group.model.add(chosen.selective[0][0] == 1)
    group.model.add(chosen.block[0] == 1)
    assert not group.feasible()


def test_selective_recompute_concerns_every_layer_of_the_chunk() -> None:
    group, chosen = recompute("abb", (2, 1))
    group.model.add(chosen.selective[0][0] == 1)
    feasible, solver = group.solved()
    assert feasible
    assert [[solver.value(n) for n in row] for row in chosen.selected[0]] == [[1, 0], [1, 1]]


@pytest.mark.parametrize(("block", "repeated"), [(1, (1, 1)), (2, (2, 1)), (3, (3, 1)), (4, (3, 1))])
def test_a_block_repeats_no_more_layers_than_the_chunk_has(block: int, repeated: tuple[int, ...]) -> None:
    """On the edge: a block as large as the chunk, and one layer larger."""
    group, chosen = recompute("aaaa", (3, 1))
    group.model.add(chosen.block[0] == block)
    feasible, solver = group.solved()
    assert feasible
    assert tuple(solver.value(n) for n in chosen.full_layers) == repeated


@pytest.mark.parametrize(("block", "admitted"), [(0, False), (2, False), (3, True)])
def test_full_recompute_as_a_limit_means_every_layer(block: int, admitted: bool) -> None:
    group, chosen = recompute("aaaa", (3, 1), limits=("recompute=full",))
    group.model.add(chosen.block[0] == block)
    assert group.feasible() == admitted


@pytest.mark.parametrize(("limit", "selective", "block"), [("none", 0, 0), ("selective", 1, 0)])
def test_a_recompute_limit_leaves_one_setting(limit: str, selective: int, block: int) -> None:
    group, chosen = recompute("aa", (1, 1), limits=(f"recompute={limit}",))
    feasible, solver = group.solved()
    assert feasible
    assert {solver.value(flag) for (flag, *_) in chosen.selective} == {selective}
    assert {solver.value(size) for size in chosen.block} == {block}


def test_the_chunks_of_a_stage_share_its_setting() -> None:
    for first, second, admitted in ((0, 2, False), (0, 1, True)):
        group, chosen = recompute("aaaaaaaa", (2, 2, 2, 2), rules="free", vpp=2)
        group.model.add(chosen.block[first] == 1)
        group.model.add(chosen.block[second] == 2)
        assert group.feasible() == admitted


# -- (G5) memory capacity ----------------------------------------------------------------------------------------------


def fits(
    capacity: int, sizes: tuple[int, ...] = (2, 1), *, block: int = 0, selective: bool = False, vpp: int = 1
) -> bool:
    """Two stages, four micro-batches; MiB: state 10 a layer, kept 3 / 2 / 1 a layer and micro-batch, embedding 5,
    head 7, fixed 20, working 4."""
    memory = MemoryCoefficients(
        state=(10,), activations=(ActivationBytes(3 * MIB, 1 * MIB, 4 * MIB, (1 * MIB,) * 7),), embedding=5, head=7, fixed=20,
        capacity=capacity,
    )  # fmt: skip
    group = Group(instance_of("a" * sum(sizes)), (option_of(pp=2, vpp=vpp, micro_batches=4, memory=memory),))
    group.choose(0)
    group.lay_out(*sizes)
    add_memory_capacity(
        group.model, group.options, group.choice, group.chunks, group.recompute(block, selective=selective)
    )
    return group.feasible()


def test_memory_admits_a_stage_with_room_to_spare_and_forbids_one_without() -> None:
    assert fits(1000)
    assert not fits(30)


@pytest.mark.parametrize(
    ("sizes", "block", "selective", "need"),
    [
        # Stage 0 holds 2 micro-batches in flight: 20 fixed + 5 embedding + 2 x 10 + 2 x (2 x 3) = 57;
        # stage 1: 20 + 7 + 10 + 1 x (1 x 3) = 40.
        ((2, 1), 0, False, 57),
        # The other way round: 25 + 10 + 2 x 3 = 41; 27 + 20 + 2 x 3 = 53.
        ((1, 2), 0, False, 53),
        # Selective: 45 + 2 x (2 x 2) = 53.
        ((2, 1), 0, True, 53),
        # Block 1: one layer keeps 1, the other 3, and working memory: 45 + 2 x 1 + 2 x 3 + 4 = 57.
        ((2, 1), 1, False, 57),
        # Block 2: 45 + 2 x (2 x 1) + 4 = 53.
        ((2, 1), 2, False, 53),
        # No layer, nothing kept, no working memory on stage 0 (25); stage 1: 27 + 30 + 3 x 1 + 4 = 64.
        ((0, 3), 3, False, 64),
    ],
)
def test_memory_is_on_the_edge_at_exactly_the_need_of_the_fullest_stage(
    sizes: tuple[int, ...], block: int, selective: bool, need: int
) -> None:
    assert fits(need, sizes, block=block, selective=selective)
    assert not fits(need - 1, sizes, block=block, selective=selective)


def test_memory_holds_at_every_moment_of_an_interleaved_schedule() -> None:
    # pp=2, vpp=2, m=4: stage 0 holds (3,2) or (4,1) micro-batches of its two chunks (test_schedule.py).
    # Chunks 1 1 1 1: states 2 x 10, activations max(3 + 2, 4 + 1) x 3 = 15, and 25: 60.
    # Stage 1: (2,1) or (3,0): 27 + 20 + 9 = 56.
    assert fits(60, (1, 1, 1, 1), vpp=2)
    assert not fits(59, (1, 1, 1, 1), vpp=2)
    # Chunks 2 1 1 0 make the second moment decide: (3,2): 3 x 2 x 3 + 2 x 3 = 24; (4,1): 4 x 2 x 3 + 3 = 27; 25 + 30 + 27.
    assert fits(82, (2, 1, 1, 0), vpp=2)
    assert not fits(81, (2, 1, 1, 0), vpp=2)


def test_memory_of_a_candidate_that_is_not_chosen_does_not_matter() -> None:
    tight = option_of(pp=1, memory=replace(NO_MEMORY, fixed=1))
    group = Group(instance_of("aa"), (option_of(pp=1), tight))
    group.choose(0)
    group.lay_out(2)
    add_memory_capacity(group.model, group.options, group.choice, group.chunks, group.recompute(0))
    assert group.feasible()


# -- (G6) step time ----------------------------------------------------------------------------------------------------

TIME = replace(
    NO_TIME, forward=(4, 0, 1, 2), backward=(6, 0, 2, 3), weight=(3, 0, 0, 1), selective=(1, 0, 0, 0),
    full=(2, 0, 0, 0), tail_floor=(1, 0, 3, 5), tail_overlap=(-2, 0, 20, 1), sends=(1, 0), lags=(7, 0), tied=13,
    overhead=100,
)  # fmt: skip
"""Layers that take 4 forward and 6 backward, an embedding 1 and 2, a head 2 and 3; eight micro-batches."""


def timed(
    step: int | None,
    sizes: tuple[int, ...],
    *,
    block: int = 0,
    selective: bool = False,
    most: int = 10_000,
    bound: int = 0,
    schedule: str = "",
    cuts: tuple[Cut, ...] = (),
) -> tuple[Group, Clock]:
    option = option_of(pp=len(sizes), time=TIME, bound=bound, schedule=schedule)
    group = Group(instance_of("a" * sum(sizes)), (option,))
    group.choose(0)
    group.lay_out(*sizes)
    recomputed = group.recompute(block, selective=selective)
    clock = add_step_time(group.model, group.options, group.choice, group.chunks, recomputed, most, cuts)
    if step is not None:
        group.model.add(clock.step == step)
    return group, clock


@pytest.mark.parametrize(
    ("sizes", "block", "selective", "step"),
    [
        # One stage of three layers: 8 x (3 x 10 + 3 + 5) = 304; tail the larger of 3 x 1 + 3 + 5 = 11 and
        # 3 x (-2) + 20 + 1 = 15; no tied copy; 100 + 304 + 15.
        ((3,), 0, False, 419),
        # Two stages 2 | 1. Forward of stage 0: 2 x 4 + 1 + 1 to send = 10, backward 2 x 6 + 2 = 14; stage 1: 4 + 2 = 6 and
        # 6 + 3 + 1 to send = 10. Stage 1 starts after 10 + 7 and works 8 x 16 = 128 until 145; stage 0 works 8 x 24 = 192,
        # and the drain 145 + 7 + 14 is earlier. Tails: stage 0 max(2 + 3, -4 + 20) + 13 = 29, stage 1
        # max(1 + 5, -2 + 1) + 13 = 19. 100 + max(192 + 29, 145 + 19).
        ((2, 1), 0, False, 321),
        # 0 | 3: 1 + 1 and 2; 12 + 2 and 18 + 3 + 1. Stage 1 starts at 2 + 7, works 8 x 36 = 288 until 297; drain
        # 297 + 7 + 2 = 306. Tails: max(3, 20) + 13 = 33; max(3 + 5, -6 + 1) + 13 = 21. 100 + max(306 + 33, 297 + 21).
        ((0, 3), 0, False, 439),
        # 1 | 2, every layer repeated (block 2): 4 + 1 + 1 and 6 + 2 + 2; 8 + 2 and 12 + 4 + 3 + 1. Stage 1 from 6 + 7
        # until 13 + 8 x 30 = 253; drain 253 + 7 + 10 = 270. Tail 0: max(1 + 3, -2 + 20) + 13 = 31.
        ((1, 2), 2, False, 401),
        # Block 1 repeats one layer of each: stage 1 until 13 + 8 x 28 = 237; drain 237 + 7 + 10 = 254; + 31 + 100.
        ((1, 2), 1, False, 385),
        # Selective: stage 1 until 13 + 8 x 28 = 237; drain 237 + 7 + (6 + 1 + 2) = 253; + 31 + 100.
        ((1, 2), 0, True, 384),
    ],
)
def test_the_step_is_admitted_from_exactly_its_longest_path(
    sizes: tuple[int, ...], block: int, selective: bool, step: int
) -> None:
    """On the edge: the longest path itself; above it admitted, one unit below forbidden."""
    for units, admitted in ((step - 1, False), (step, True), (step + 50, True)):
        group, _ = timed(units, sizes, block=block, selective=selective)
        assert group.feasible() == admitted, units
    group, clock = timed(None, sizes, block=block, selective=selective)
    group.model.minimize(clock.step)
    feasible, solver = group.solved()
    assert feasible
    assert round(solver.objective_value) == step


def test_no_step_above_the_given_most_and_none_below_the_bound() -> None:
    assert timed(None, (3,), most=419)[0].feasible()
    assert not timed(None, (3,), most=418)[0].feasible()
    assert timed(500, (3,), bound=500)[0].feasible()
    assert not timed(499, (3,), bound=500)[0].feasible()


def test_a_zero_bubble_stage_is_busy_from_its_own_start() -> None:
    # 2 | 1 under ZB-H1: no stage waits for another before its optimizer. 100 + max(192 + 29, 128 + 19).
    group, clock = timed(None, (2, 1), schedule="zb-h1")
    group.model.minimize(clock.step)
    _, solver = group.solved()
    assert round(solver.objective_value) == 321
    # 0 | 3: 100 + max(8 x 4 + 33, 288 + 21).
    group, clock = timed(None, (0, 3), schedule="zb-h1")
    group.model.minimize(clock.step)
    _, solver = group.solved()
    assert round(solver.objective_value) == 409


def test_a_cut_holds_for_candidates_of_its_shape_only() -> None:
    # 2 | 1: nine forward passes of stage 0, two backward ones of stage 1, three waits, then stage 0 ends:
    # 9 x 10 + 2 x 10 + 3 x 7 + 29 + 100 = 260; thirty forward passes: 470.
    passes = ((FORWARD, 0, 9), (BACKWARD, 1, 2))
    for shape, count, step in (
        (Shape("1f1b", 2, 1, 8), 9, 321),
        (Shape("1f1b", 2, 1, 8), 30, 470),
        (Shape("1f1b", 2, 1, 9), 30, 321),
    ):
        cut = Cut(shape, ((FORWARD, 0, count), passes[1]), ((0, 3),), 0)
        group, clock = timed(None, (2, 1), cuts=(cut,))
        group.model.minimize(clock.step)
        _, solver = group.solved()
        assert round(solver.objective_value) == step


def test_a_cut_counts_input_and_weight_gradients_apart() -> None:
    # 2 | 1 under ZB-H1: weight gradients of stage 0 take 2 x 3 of 14, those of stage 1 3 + 1 of 10.
    # 50 input gradients of stage 0 and 10 weight gradients of stage 1: 50 x 8 + 10 x 4, tail 29, 100.
    cut = Cut(Shape("zb-h1", 2, 1, 8), ((INPUT, 0, 50), (WEIGHT, 1, 10)), (), 0)
    group, clock = timed(None, (2, 1), schedule="zb-h1", cuts=(cut,))
    group.model.minimize(clock.step)
    _, solver = group.solved()
    assert round(solver.objective_value) == 569
