"""(J1)-(J5) by hand, and the same for numbers and arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.data.profile import load_profile
from shardwise.formulations.layer_costs import TERMS, LayerTerms
from shardwise.formulations.layer_time import exposed, layer_time, time_by_cause

PLAIN = replace(
    load_profile("megatron-core"),
    gemm=1.0, core=1.0, elementwise=1.0, host_launch_s=0.0, tp_sync_s=0.0, tp_comm_exposed=1.0, cp_comm_exposed=0.5,
    ep_comm_exposed=2.0, dp_comm_floor=0.1, dp_comm_overlap=0.8, recompute_overlap=0.0,
)  # fmt: skip
TERMS_OF = LayerTerms(3.0, 6.0, 1.0, 2.5, 0.5, 1.0, 0.4, 0.4, 0.2, 0.4, 0.3, 0.3, 10.0, 2.0)


def test_without_a_host_a_pass_is_its_work_and_what_shows_of_its_collectives() -> None:
    # 3 + 1 + 0.5 + 0.4 + 0.5 x 0.2 + 2 x 0.3 = 5.6; 6 + 2.5 + 1 + 0.4 + 0.5 x 0.4 + 2 x 0.3 = 10.7.
    time = layer_time(TERMS_OF, PLAIN, 2)
    assert time.forward_s == pytest.approx(5.6)
    assert time.backward_s == pytest.approx(10.7)
    assert time.selective_s == pytest.approx(1.0)
    assert time.full_s == pytest.approx(5.6)
    assert sum(time_by_cause(TERMS_OF, PLAIN).values()) == pytest.approx(5.6 + 10.7)


def test_host_and_device_join_softly() -> None:
    # H = 0.56 x 10 = 5.6 as long as the device: (2 x 5.6^3)^(1/3) = 5.6 x 2^(1/3).
    time = layer_time(TERMS_OF, replace(PLAIN, host_launch_s=0.56), 2)
    assert time.forward_s == pytest.approx(5.6 * 2 ** (1 / 3))
    far = layer_time(TERMS_OF, replace(PLAIN, host_launch_s=100.0), 2)
    assert far.forward_s == pytest.approx(1000.0, rel=1e-6)
    assert far.backward_s == pytest.approx(2000.0, rel=1e-6)


def test_each_collective_waits_for_the_further_ranks() -> None:
    # 2 collectives x 7 further ranks x 0.01.
    late = layer_time(TERMS_OF, replace(PLAIN, tp_sync_s=0.01), 8)
    assert late.forward_s == pytest.approx(5.6 + 0.14)
    assert late.backward_s == pytest.approx(10.7 + 0.14)
    assert layer_time(TERMS_OF, replace(PLAIN, tp_sync_s=0.01), 1).forward_s == pytest.approx(5.6)


@pytest.mark.parametrize(("transfer", "cover", "shows"), [(10.0, 5.0, 6.0), (10.0, 20.0, 1.0), (0.0, 5.0, 0.0)])
def test_what_shows_of_a_transfer_beside_a_pass(transfer: float, cover: float, shows: float) -> None:
    # max(0.1 G, G - 0.8 P).
    assert exposed(transfer, cover, PLAIN) == pytest.approx(shows)


def test_arrays_give_what_numbers_give() -> None:
    profile = load_profile("megatron-2021")
    rng = np.random.default_rng(1)
    columns = rng.random((len(TERMS), 5, 2))
    degrees = np.array([[1.0], [2.0], [4.0], [8.0], [16.0]])
    table = layer_time(LayerTerms(*columns), profile, degrees)
    for row in range(5):
        for unit in range(2):
            one = layer_time(LayerTerms(*columns[:, row, unit].tolist()), profile, degrees[row, 0])
            for name in ("forward_s", "backward_s", "selective_s", "full_s"):
                assert getattr(table, name)[row, unit] == pytest.approx(getattr(one, name), rel=1e-12)
