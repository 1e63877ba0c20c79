"""Which measured curve speaks for a device or a link, and that it says when it is another's."""

from __future__ import annotations

import math

import pytest

from shardwise.data.cluster import Accelerator, Link
from shardwise.data.cluster_catalog import list_accelerators, load_accelerator
from shardwise.data.efficiency import (
    OPS,
    attention_curve,
    collective_curve,
    gemm_curve,
    memory_curve,
    network_curve,
    read_table,
)
from shardwise.data.faults import InputError

GIB = 2**30
NVLINK4 = Link("nvlink4", "nvlink", 450e9, 1.9e-6)
NDR = Link("ib-ndr", "infiniband", 50e9, 4e-6)
MEASURED = ("kernels/gemm.csv", "kernels/attention.csv", "kernels/memory.csv", "collectives/curves.csv")


def accelerator(name: str, bandwidth: float = 1e12, **tflops: float) -> Accelerator:
    return Accelerator(name, "any", 80 * GIB, bandwidth, {p: t * 1e12 for p, t in tflops.items()})


H100 = accelerator("H100-SXM", 3350e9, bf16=989, fp8=1979)


@pytest.mark.parametrize("table", [*MEASURED, "collectives/networks.csv"])
def test_every_row_carries_its_source_and_its_errors(table: str) -> None:
    for row in read_table(table):
        assert row["source"]
        assert int(row["points"]) >= 1
        assert 0 <= float(row["median_ape_pct"]) <= 15
        assert row["heldout_mape_pct"] or int(row["points"]) < 10


@pytest.mark.parametrize("table", ["kernels/achievable.csv", "stand_ins.csv"])
def test_every_borrowed_number_says_why(table: str) -> None:
    assert all(row.get("source") or row.get("why") for row in read_table(table))


def test_collective_curves_miss_by_less_than_eight_percent_in_median_over_rows() -> None:
    rows = [row for row in read_table("collectives/curves.csv") if not row["derived"]]
    medians = sorted(float(row["median_ape_pct"]) for row in rows)
    held_out = sorted(float(row["heldout_median_ape_pct"]) for row in rows)
    assert medians[len(medians) // 2] <= 5
    assert held_out[len(held_out) // 2] <= 8


def test_every_measured_curve_is_monotone_in_bytes() -> None:
    rows = [*read_table("collectives/curves.csv"), *read_table("collectives/networks.csv")]
    assert all(0 < float(row["exponent"]) <= 1 for row in rows)


def test_measured_accelerator_answers_from_its_own_row() -> None:
    for curve in (gemm_curve(H100, "bf16"), attention_curve(H100, "bf16"), memory_curve(H100)):
        assert curve.measured_on == "H100-SXM"
        assert not curve.scaled
        assert curve.note == ""
        assert "aiconfigurator" in curve.source


def test_unmeasured_accelerator_names_its_stand_in() -> None:
    curve = gemm_curve(accelerator("A10G", 600e9, bf16=70), "bf16")
    assert curve.scaled
    assert curve.measured_on == "L40S"
    assert curve.note == "A10G: no bf16 GEMM measurement; curve of L40S scaled by peak and bandwidth"


def test_stand_in_moves_by_the_best_measured_matmul_rates() -> None:
    # MI300X reaches 668.4 of 1300 TFLOP/s, H100 794.5 of 989: 0.5142 / 0.8033 = 0.640.
    mi300x = accelerator("MI300X", 5300e9, bf16=1300, fp8=2610)
    ratio = gemm_curve(mi300x, "bf16").efficiency / gemm_curve(H100, "bf16").efficiency
    assert ratio == pytest.approx(0.640, abs=1e-3)
    # Nobody measured its FP8: what BF16 misses, FP8 misses too.
    assert gemm_curve(mi300x, "fp8").efficiency / gemm_curve(H100, "fp8").efficiency == pytest.approx(ratio)


def test_unsupported_precision_names_accelerator_and_precision() -> None:
    with pytest.raises(InputError, match="precision=fp8 is not supported by V100-SXM-32GB, which has fp16"):
        gemm_curve(accelerator("V100-SXM-32GB", 900e9, fp16=125), "fp8")


def test_measured_link_answers_from_its_own_row() -> None:
    curve = collective_curve(H100, NVLINK4, "all_reduce", 8)
    assert not curve.scaled
    assert curve.measured_on == "H100-SXM"


def test_capped_nvlink_takes_the_curve_of_its_own_chip_by_bandwidth() -> None:
    capped = Link("nvlink4-200", "nvlink", 200e9, 1.9e-6)
    curve = collective_curve(accelerator("H800-SXM", bf16=989), capped, "all_gather", 8)
    own = collective_curve(H100, NVLINK4, "all_gather", 8)
    assert curve.scaled
    assert curve.bytes_per_s == pytest.approx(own.bytes_per_s * 200 / 450)
    assert "nvlink curve of H100-SXM scaled by 0.44" in curve.note


def test_rank_counts_between_measured_ones_are_interpolated() -> None:
    four, six, eight = (collective_curve(H100, NVLINK4, "all_gather", n) for n in (4, 6, 8))
    assert four.alpha_s < six.alpha_s < eight.alpha_s
    assert four.bytes_per_s <= six.bytes_per_s <= eight.bytes_per_s
    assert "interpolated between 4 and 8" in six.note


def test_beyond_the_largest_measured_rank_count_only_the_start_grows() -> None:
    eight, many = (collective_curve(H100, NVLINK4, "all_gather", n) for n in (8, 32))
    assert many.alpha_s > eight.alpha_s
    assert many.bytes_per_s == eight.bytes_per_s
    assert "extrapolated from 8 ranks" in many.note


def test_roce_shares_the_row_of_infiniband_and_a_slow_wire_replaces_the_hop() -> None:
    roce = network_curve(Link("roce", "roce", 50e9, 4e-6), "ring")
    assert not roce.scaled
    assert roce.bytes_per_s == network_curve(NDR, "ring").bytes_per_s
    wan = network_curve(Link("wan", "wan", 0.0125e9, 0.05), "ring")
    assert wan.scaled
    assert wan.hop_s == 0.05
    assert "no measurement over wan" in wan.note


def test_oversubscription_divides_the_rate() -> None:
    thin = Link("spine", "infiniband", 50e9, 4e-6, oversubscription=7.0)
    assert network_curve(thin, "ring").bytes_per_s == pytest.approx(network_curve(NDR, "ring").bytes_per_s / 7)


@pytest.mark.parametrize("name", ["H200", "B300-SXM", "GB300", "MI355X", "Gaudi3", "Ascend 910B", "TPU v5p", "X1"])
@pytest.mark.parametrize("kind", ["nvlink", "pcie", "xgmi", "hccs", "ici", "neuronlink"])
def test_every_accelerator_finds_a_curve_on_every_scale_up_link(name: str, kind: str) -> None:
    link = Link(kind, kind, 123e9, 2e-6)
    for op in OPS:
        curve = collective_curve(accelerator(name, bf16=100), link, op, 5)
        assert 0 < curve.alpha_s < 1
        assert 0 < curve.bytes_per_s < 1e12
        assert curve.note


def test_every_catalogue_accelerator_has_finite_curves() -> None:
    known = 0
    for name in list_accelerators():
        try:
            device = load_accelerator(name)
        except InputError:  # listed, but without the numbers a plan needs
            continue
        known += 1
        for precision in device.flops_per_s:
            gemm, attention = gemm_curve(device, precision), attention_curve(device, precision)
            assert 0.2 < gemm.efficiency <= 1
            assert 0.2 < attention.efficiency <= 1
            assert 0 < gemm.launch_s < 1e-4
            assert 0 < memory_curve(device).bytes_per_s < math.inf
    assert known >= 40
