"""Limits on layers and on nodes are read, intersected and told when they are broken."""

from __future__ import annotations

import pytest

from shardwise.data.faults import InputError
from shardwise.data.limits import Range, parse_limits, variable_of
from shardwise.data.workload import Training
from shardwise.solver.solve import build_instance


def test_layers_are_pinned_to_stages_and_together() -> None:
    limits = parse_limits(["stage[40]<=3", " stage[40] >= 1 ", "stage[7]=0", "stage[1]=stage[5]", "free_nodes>=2"])
    assert limits.pinned == {40: Range(1, 3), 7: Range(0, 0)}
    assert limits.together == ((1, 5),)
    assert limits.range("free_nodes").low == 2
    assert variable_of("stage[40]<=3") == "stage[40]"
    stages = (0,) * 8 + (4,) * 40
    assert limits.stage_faults(stages) == [
        "layer 40 is on stage 4, which breaks the limit stage[40]<=3, stage[40] >= 1"
    ]
    assert limits.stage_faults((0, 0, 0, 0, 0, 1, 1, 1, *[2] * 40)) == [
        "layer 7 is on stage 1, which breaks the limit stage[7]=0",
        "layers 1 and 5 are on stages 0 and 1, which breaks the limit stage[1]=stage[5]",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("stage[1]<=stage[2]", "two layers take = to be on one stage"),
        ("stage[1]=first", "a layer takes the number of a stage, or another layer as stage[N]"),
        ("pp=stage[2]", "only a layer, stage[N], takes the stage of another"),
        ("stage[1]=2,stage[1]=3", "limits on stage[1] contradict each other: stage[1]=2, stage[1]=3"),
        ("stage[-1]=2", "cannot be read"),
    ],
)
def test_what_is_no_limit_on_a_layer_is_said(text: str, fault: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_limits([text])
    assert fault in str(caught.value)


def test_a_layer_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        build_instance("llama-3.1-8b", "dgx-h100:1", Training(4096, 8), limits=["stage[32]=0"])
    assert "limit on stage[32]: the model has layers 0 to 31" in str(caught.value)


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("modules", ["any", "mlp"])
def test_modules_are_of_selective_recompute(mode: str, modules: str) -> None:
    with pytest.raises(InputError, match=f"recompute_modules needs recompute=selective, not {mode}"):
        parse_limits([f"recompute={mode}", f"recompute_modules={modules}"])
