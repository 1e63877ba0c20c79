"""The optimizer on the host: bytes and seconds by hand, the search against exhaustive search, what refuses it, what it cures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_universe import agrees, value_of
from typer.testing import CliRunner
from universe import INFINIBAND, NVLINK, admitted, examples, instance_of, instances, llama, model_of, plans

from shardwise.data.cluster import Accelerator, Cluster, Domain, Host, Link
from shardwise.data.cluster_file import parse_cluster_toml, write_cluster_toml
from shardwise.data.faults import InputError
from shardwise.data.instance import Instance
from shardwise.data.limits import parse_limits
from shardwise.data.model_parts import attention, layer, mlp
from shardwise.data.plan import Degrees, Plan
from shardwise.data.workload import Training
from shardwise.formulations.objective import idle_watts, relative_watts
from shardwise.formulations.offload import host_rates_s
from shardwise.formulations.step_time import unit_times_s
from shardwise.solver.cli import app
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.evaluate import cost_tables, evaluate, stage_params
from shardwise.solver.export.megatron import megatron_flags
from shardwise.solver.fit import fit
from shardwise.solver.simulate import simulate
from shardwise.solver.solve import build_instance, solve

MIB = 2**20
DOCS = Path(__file__).parents[2] / "docs"
OFFLOADS: tuple[dict[str, Any], ...] = (
    {"offload_optimizer": 1.0},
    {"offload_optimizer": 0.5},
    {"offload_optimizer": "auto"},
    {"offload_optimizer": 1.0, "offload_param": True},
    {"offload_optimizer": 1.0, "offload_param": True},
)


def offloading(share: float | str, **more: object) -> Instance:
    workload = Training(1024, 8, offload_optimizer=share, **more)  # type: ignore[arg-type]
    return instance_of(llama(4), workload=workload)


def plan_of(instance: Instance, share: float, **sizes: int) -> Plan:
    degrees: dict[str, Any] = {**sizes, "offload_optimizer": share}
    return plan_from_degrees(instance, degrees_from(instance, **degrees))


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "states"), [("adamw", 12), ("sgd", 8)])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_states_leave_the_device_for_the_host(optimizer: str, states: int, share: float) -> None:
    workload = Training(1024, 8, offload_optimizer=share, optimizer=optimizer)  # type: ignore[arg-type]
    instance = instance_of(llama(4), workload=workload, rules="free" if optimizer == "sgd" else "megatron-core")
    plan = plan_of(instance, share, dp=4)
    here, there = (evaluate(instance, own).stages[0] for own in (plan_of(instance, 0.0, dp=4), plan))
    params = stage_params(cost_tables(instance), plan, 0).total
    assert here.optimizer == states * params / 4
    assert there.optimizer == pytest.approx(states * params / 4 * (1 - share))
    assert replace(there, optimizer=here.optimizer) == here
    host = evaluate(instance, plan).host
    assert host is not None
    assert host.stages[0] == pytest.approx(share * (states + 4) * params / 4)
    assert host.devices == 4
    assert host.node_bytes == pytest.approx(share * (states + 4) * params)
    assert host.node_capacity_bytes == pytest.approx(0.9 * 2e12, abs=4 * MIB)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_step_waits_for_the_copies_and_for_the_host(share: float) -> None:
    """Gradients of 4 bytes and weights of 2 over 32 GB/s; 30 bytes a parameter at 0.46 of a quarter of 400 GB/s."""
    instance = offloading(share)
    plan, plain = plan_of(instance, share, dp=4), plan_of(instance, 0.0, dp=4)
    owned = stage_params(cost_tables(instance), plan, 0).total / 4
    device = owned * (18 + (1 - share) * 30) / (18 + 30)
    found, before = evaluate(instance, plan), evaluate(instance, plain)
    expected = before.parts.optimizer * device / owned + share * owned * (6 / 32e9 + 30 / (0.46 * 1e11))
    assert found.parts.optimizer == pytest.approx(expected, rel=1e-9)
    later = found.parts.optimizer - before.parts.optimizer
    assert found.step_time_s == pytest.approx(before.step_time_s + later, rel=1e-12)
    assert simulate(instance, plan).tails[0].optimizer_s == found.parts.optimizer


@pytest.mark.parametrize("replicas", [1, 4])
def test_weights_on_the_host_leave_the_device_and_come_back_with_every_pass(replicas: int) -> None:
    """16-bit weights of one device's shard over 32 GB/s, of a layer twice a micro-batch and of the ends once and a half."""
    workload = Training(1024, 8, offload_optimizer=1.0, offload_param=True)
    instance = instance_of(llama(4), rules="deepspeed", workload=workload)
    there, here = (
        plan_from_degrees(instance, degrees_from(instance, dp=replicas, zero=3, offload_param=param))
        for param in (True, False)
    )
    one, other = evaluate(instance, there), evaluate(instance, here)
    assert one.legal
    params = stage_params(cost_tables(instance), there, 0).total
    assert one.stages[0].weights == 0
    assert other.stages[0].weights == 2 * params / replicas
    assert one.host is not None
    assert one.host.stages[0] == pytest.approx((16 + 2) * params / replicas)
    largest = cost_tables(instance).kind_params(1)[0].total
    assert one.stages[0].gather_buffers == 8 * largest
    assert other.stages[0].gather_buffers == (8 * largest if replicas > 1 else 0)
    placed = there.placement
    fetched = 2 * largest / replicas / 32e9
    for end in (False, True):
        with_host, without = (
            unit_times_s(instance, plan.degrees, placed, cost_tables(instance).kind_params(1)[0], end=end)
            for plan in (there, here)
        )
        assert with_host[0] - without[0] == pytest.approx(fetched)
        assert with_host[1] - without[1] == pytest.approx(0 if end else fetched)
    assert one.step_time_s > other.step_time_s
    assert one.parts.weight_gather > other.parts.weight_gather


def test_weights_on_the_host_are_refused_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"offload_param=True needs workload\.offload_optimizer=1 or auto"):
        Training(1024, 8, offload_optimizer=0.5, offload_param=True)
    allowed = Training(1024, 8, offload_optimizer="auto", offload_param=True)
    with pytest.raises(InputError, match=r"workload\.offload_param=true: megatron-core has no weights on the host"):
        instance_of(workload=allowed)
    for rules, said, fault in (
        ("deepspeed", {"zero": 2, "offload_optimizer": 1.0}, "needs zero=3 and offload_optimizer=1"),
        ("deepspeed", {"zero": 3, "offload_optimizer": 0.5}, "needs zero=3 and offload_optimizer=1"),
        ("free", {"zero": 3, "pp": 2, "offload_optimizer": 1.0}, "needs pp=1, not pp=2"),
    ):
        instance = instance_of(llama(), rules=rules, workload=allowed)
        degrees: dict[str, Any] = {**said, "offload_param": True}
        plan = plan_from_degrees(instance, degrees_from(instance, **degrees))
        assert [one for one in evaluate(instance, plan).faults if fault in one]
    plain = instance_of(llama(), rules="deepspeed", workload=Training(1024, 8, offload_optimizer=1.0))
    kept = plan_from_degrees(plain, degrees_from(plain, zero=3, offload_param=True))
    with pytest.raises(InputError, match="which the workload's offload_param does not allow"):
        evaluate(plain, kept)


def test_one_device_trains_what_only_its_host_holds() -> None:
    """With its weights on the device too nothing fits, whatever the share of the optimizer."""
    workload = Training(1024, 8, offload_optimizer="auto", offload_param=True)
    limits = ("zero=3",)
    roomy = instance_of(
        llama(8, 2048), (1,), rules="deepspeed", workload=workload, limits=limits, memory_bytes=int(8e9)
    )
    result = solve(instance=roomy, workers=1)
    assert result.plan is not None
    assert result.plan.degrees.offload_param
    less = replace(roomy, workload=Training(1024, 8, offload_optimizer="auto"))
    assert solve(instance=less, workers=1).status == "INFEASIBLE"


def test_copies_are_no_faster_than_the_memory_of_the_host() -> None:
    instance = offloading(1.0)
    device = replace(instance.accelerator, host_link_bytes_per_s=450e9)
    domain = replace(instance.cluster.root, accelerator=device)
    fast = replace(instance, cluster=replace(instance.cluster, root=domain))
    assert host_rates_s(fast)[0] == pytest.approx(6 / 1e11)
    assert host_rates_s(instance)[0] == pytest.approx(6 / 32e9)


@pytest.mark.parametrize(("billions", "seconds"), [(1, 0.22), (4, 1.03), (10, 2.57)])
def test_the_update_is_that_of_the_optimizer_that_was_written_for_it(billions: int, seconds: float) -> None:
    """arXiv 2101.06840, table 4: a DGX-2, all of its host for one process."""
    toy = Accelerator("V100", "NVIDIA", 2**35, 9e11, {"fp16": 1.25e14}, host_link_bytes_per_s=16e9)
    node = Domain("node", "node", Link("pcie", "pcie", 16e9, 1e-6), toy, 1)
    cluster = Cluster("dgx-2", node, host=Host(1.5e12, 12 * 8 * 2.666e9))
    instance = Instance(llama(), cluster, Training(1024, 8, "fp16", offload_optimizer=1.0))
    assert host_rates_s(instance)[1] * billions * 1e9 == pytest.approx(seconds, rel=0.17)


def test_a_waiting_device_takes_idle_power() -> None:
    """Energy is that of the three phases: copies communicate, and while the host updates the device idles."""
    instance = offloading(1.0)
    slow = replace(instance, cluster=replace(instance.cluster, host=Host(2e12, 4e10)))
    plans = plan_of(instance, 1.0, dp=4)
    fast, slower = evaluate(instance, plans), evaluate(slow, plans)
    assert fast.energy is not None
    assert slower.energy is not None
    copied, updated = (
        (b - a) * stage_params(cost_tables(instance), plans, 0).total / 4
        for a, b in zip(host_rates_s(instance), host_rates_s(slow), strict=True)
    )
    assert slower.step_time_s - fast.step_time_s == pytest.approx(copied + updated, rel=1e-9)
    more = slower.energy.joules_per_step.value - fast.energy.joules_per_step.value
    idle = slower.energy.joules_per_step.value  # above every power of idling
    assert 0 < more < idle
    watts, (_, communication) = idle_watts(instance), relative_watts(instance)
    assert more == pytest.approx(4 * watts * (copied * (1 + communication) + updated), rel=1e-6)


# -- the search --------------------------------------------------------------------------------------------------------


@examples(20)
@given(instances(tunings=OFFLOADS), st.booleans())
def test_exhaustive_search_and_the_solver_agree_with_shares_on_the_host(instance: Instance, prune: bool) -> None:
    result = solve(instance=instance, workers=1, prune=prune)
    agrees(instance, result, admitted(instance, result.report["unit_s"]))


@examples(12)
@given(instances(tunings=OFFLOADS), st.sampled_from(("energy", "devices", "throughput-per-device")))
def test_exhaustive_search_and_the_solver_agree_on_other_objectives(instance: Instance, objective: str) -> None:
    found = admitted(instance, 1.0)
    result = solve(instance=instance, workers=1, objective=objective)
    if not found:
        assert result.status == "INFEASIBLE"
        return
    assert result.status == "OPTIMAL"
    assert result.plan is not None
    every = [value_of(objective, evaluate(instance, one.plan), instance) for one in found]
    best, own = min(every), value_of(objective, evaluate(instance, result.plan), instance)
    assert evaluate(instance, result.plan).admitted
    assert own <= best + abs(best) * 1e-5


@pytest.mark.parametrize("prune", [True, False])
def test_a_host_that_is_full_sends_layers_elsewhere(prune: bool) -> None:
    """Six wide layers are fast and have most parameters, so the best split puts them on one stage; a host with a little less
    room than that takes has none of it."""
    limits = ("tp=1", "cp=1", "dp=1", "pp=2", "vpp=1", "micro_batch=1", "zero=1", "recompute=none")
    wide, narrow = layer(1024, None, mlp(1024, 8192, gated=True)), layer(1024, attention(1024, 8, 8, 128), None)
    model = model_of([wide] * 6 + [narrow] * 6, 1024, 32000, tied=False)
    workload = Training(16384, 256, offload_optimizer=1.0)

    def solved(host_bytes: float) -> tuple[tuple[int, ...], float]:
        instance = instance_of(
            model, (2,), workload=workload, limits=limits, host_bytes=host_bytes, memory_bytes=14_000 * MIB
        )
        result = solve(instance=instance, workers=1, prune=prune)
        agrees(instance, result, admitted(instance, result.report["unit_s"]))
        assert result.plan is not None
        return result.plan.chunk_layers, result.plan.degrees.offload_optimizer

    needed = 2 * 2810 * MIB / 0.9
    assert solved(needed + 2 * MIB) == ((6, 6), 1.0)
    assert solved(needed - 2 * MIB) == ((5, 7), 0.0)


@examples(20)
@given(
    st.sampled_from(("deepspeed", "free")),
    st.sampled_from(((1,), (2,), (4,), (2, 2))),
    st.sampled_from((1, 4, 12)),
    st.sampled_from(("zero>=1", "zero=3", "tp<=2")),
    st.sampled_from((0.0, 0.1, 0.4)),
    st.booleans(),
)
def test_exhaustive_search_and_the_solver_agree_with_weights_on_the_host(
    rules: str, sizes: tuple[int, ...], batch: int, limit: str, rank: float, prune: bool
) -> None:
    """The memory is what some plan with its weights on the host needs, so that few plans without fit."""
    limits = ("pp<=2", "vpp=1", "micro_batch<=2", "cp<=2", "tp<=2", limit)
    workload = Training(1024, batch, offload_optimizer=1.0, offload_param=True)

    def built(memory_bytes: int) -> Instance:
        return instance_of(
            llama(3), sizes, (NVLINK, INFINIBAND)[: len(sizes)], rules=rules, workload=workload, limits=limits,
            memory_bytes=memory_bytes,
        )  # fmt: skip

    roomy = built(2**45)
    needs = sorted(max(evaluate(roomy, one).memory_mib) for one in plans(roomy) if one.degrees.offload_param)
    assert needs
    instance = built(needs[int(rank * (len(needs) - 1))] * MIB)
    result = solve(instance=instance, workers=1, prune=prune or sizes != (1,))
    agrees(instance, result, admitted(instance, result.report["unit_s"]))
    if rank == 0:
        assert result.plan is not None
        assert result.plan.degrees.offload_param


def test_nothing_goes_to_the_host_where_all_fits_without() -> None:
    instance = offloading("auto")
    result = solve(instance=instance, workers=1)
    plain = solve(instance=replace(instance, workload=Training(1024, 8)), workers=1)
    assert result.plan is not None
    assert result.plan.degrees.offload_optimizer == 0
    assert result.plan == plain.plan
    assert result.report["universe"].pop("offload_optimizer") == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert result.report["universe"] == plain.report["universe"]


def test_the_smallest_share_that_fits_is_taken() -> None:
    """One device of 35 GB for 1.3 B parameters: 18 bytes a parameter do not fit, 15 do."""
    small = instance_of(
        llama(24, 2048), (1,), memory_bytes=int(3.2e10), workload=Training(1024, 8, offload_optimizer="auto")
    )
    result = solve(instance=small, workers=1, objective="step-time")
    assert result.plan is not None
    share = result.plan.degrees.offload_optimizer
    assert share > 0
    fitting = [
        one
        for one in (0.25, 0.5, 0.75, 1.0)
        if evaluate(small, replace(result.plan, degrees=replace(result.plan.degrees, offload_optimizer=one))).fits
    ]
    assert share == fitting[0]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [-0.1, 1.5, True, "most", None])
def test_shares_are_from_none_to_all(share: object) -> None:
    with pytest.raises(ValueError, match=r"workload\.offload_optimizer=.* must be a share from 0 to 1, or auto"):
        Training(1024, 8, offload_optimizer=share)  # type: ignore[arg-type]
    if share is not None:
        with pytest.raises(ValueError, match=r"degrees\.offload_optimizer=.* must be a share from 0 to 1"):
            Degrees(offload_optimizer=share)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rules", "zero", "share", "fault"),
    [
        ("megatron-core", 1, 0.5, None),
        ("megatron-core", 0, 0.5, "needs zero=1, not zero=0"),
        ("megatron-core", 3, 1.0, "needs zero=1, not zero=3"),
        ("mindspeed", 1, 1.0, None),
        ("deepspeed", 0, 1.0, "needs zero >= 1"),
        ("deepspeed", 1, 1.0, None),
        ("deepspeed", 2, 1.0, None),
        ("deepspeed", 2, 0.5, "with zero=2 must be 1"),
        ("deepspeed", 3, 0.5, None),
        ("free", 0, 0.5, None),
    ],
)
def test_packs_say_which_stages_have_a_share(rules: str, zero: int, share: float, fault: str | None) -> None:
    instance = instance_of(llama(), rules=rules, workload=Training(1024, 8, offload_optimizer=share))
    found = [one for one in evaluate(instance, plan_of(instance, share, dp=4, zero=zero)).faults if "offload" in one]
    if fault is None:
        assert not found
    else:
        assert len(found) == 1
        assert fault in found[0]


@pytest.mark.parametrize("rules", ["torchtitan", "accelerate"])
def test_packs_without_it_refuse_the_workload(rules: str) -> None:
    with pytest.raises(InputError, match=f"{rules} has no optimizer on the host"):
        instance_of(rules=rules, workload=Training(1024, 8, offload_optimizer=1.0))


def test_a_host_that_is_not_known_is_named_with_its_fields() -> None:
    with pytest.raises(InputError, match="mi300x:1 is not known; state host_memory_GB and host_memory_GBps"):
        build_instance("llama-3.1-8b", "mi300x:1", Training(4096, 8, offload_optimizer="auto"))
    bare = replace(instance_of().accelerator, host_link_bytes_per_s=None)
    known = instance_of()
    cluster = replace(known.cluster, root=replace(known.cluster.root, accelerator=bare))
    with pytest.raises(InputError, match="link of toy to its host is not known; state host_link_GBps"):
        Instance(llama(), cluster, Training(1024, 8, offload_optimizer=1.0))


def test_a_plan_has_no_share_that_its_workload_does_not_allow() -> None:
    instance = offloading(0.5)
    plan = plan_of(instance, 0.25, dp=4)
    with pytest.raises(InputError, match=r"offload_optimizer=0.25 is not one of 0, 0.5"):
        evaluate(instance, plan)


# -- documents ---------------------------------------------------------------------------------------------------------


def test_a_plan_says_so_only_where_there_is_a_share() -> None:
    instance = offloading(0.5)
    plain, shared = plan_of(instance, 0.0, dp=4), plan_of(instance, 0.5, dp=4)
    assert "offload_optimizer" not in plain.to_dict()["degrees"]
    assert "host" not in evaluate(instance, plain).to_dict()
    assert shared.to_dict()["degrees"]["offload_optimizer"] == 0.5
    assert Plan.from_json(shared.to_json()) == shared
    host = evaluate(instance, shared).to_dict()["host"]
    assert host["fits"]
    assert host["node_gb"] == pytest.approx(4 * host["stages_gb"][0])
    assert "offload_optimizer" not in Training(1024, 8).to_dict()
    assert Training(**instance.workload.to_dict()) == instance.workload


def test_megatron_gets_its_three_flags() -> None:
    instance = build_instance("llama-3.1-8b", "dgx-h100:1", Training(4096, 64, offload_optimizer=0.75))
    flags = megatron_flags(instance, plan_of(instance, 0.75, tp=2))
    assert [flag for flag in flags if "offload" in flag or "aware" in flag] == [
        "--optimizer-cpu-offload",
        "--optimizer-offload-fraction 0.75",
        "--use-precision-aware-optimizer",
    ]
    assert not [flag for flag in megatron_flags(instance, plan_of(instance, 0.0, tp=2)) if "offload" in flag]


# -- what it cures -----------------------------------------------------------------------------------------------------


def test_it_is_named_where_it_makes_a_plan_possible() -> None:
    instance = build_instance("llama-3.1-70b", "dgx-h100:1", Training(4096, 64))
    said = solve(instance=instance, workers=1)
    assert said.status == "INFEASIBLE"
    assert "with --offload-optimizer 1 it fits (tp=" in said.reason[0]
    (found,) = fit("llama-3.1-70b", "dgx-h100:1", Training(4096, 64), workers=1)
    assert found.answer == "does not fit"
    assert "with --offload-optimizer 1 it fits (tp=" in (found.reason or "")
    (cured,) = fit("llama-3.1-70b", "dgx-h100:1", Training(4096, 64, offload_optimizer=1.0), quick=True, workers=1)
    assert cured.answer in ("fits", "tight")
    assert cured.plan is not None
    assert cured.plan.degrees.offload_optimizer == 1
    assert cured.arithmetic.optimizer_bytes == 0


def test_it_is_not_named_where_it_cures_nothing() -> None:
    for model, cluster in (("llama-3.1-405b", "dgx-h100:1"), ("llama-3.1-70b", "mi300x:1")):
        limits = ["memory_gb<=20"] if cluster.startswith("mi") else []
        said = solve(instance=build_instance(model, cluster, Training(4096, 64), limits=limits), workers=1)
        assert said.status == "INFEASIBLE"
        assert "offload" not in said.reason[0]


def test_fewest_devices_with_the_host_are_proven() -> None:
    """One device fewer has no plan."""
    workload = Training(1024, 24, offload_optimizer=1.0)
    instance = instance_of(llama(12, 2048), (8,), memory_bytes=int(7e9), workload=workload)
    result = solve(instance=instance, workers=1, objective="devices")
    assert result.plan is not None
    fewer = replace(instance, limits=parse_limits([f"devices<={result.plan.degrees.devices - 1}"]))
    assert solve(instance=fewer, workers=1).status == "INFEASIBLE"


# -- command line ------------------------------------------------------------------------------------------------------

SAID = ("llama-3.1-70b", "dgx-h100:1", "--seq-len", "4096", "--global-batch", "64")


def invoked(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_plan_on_the_command_line_has_its_share_and_its_host(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = invoked("plan", "training", *SAID, "--offload-optimizer", "auto", "--top", "0", "-q", "-o", str(path))
    assert done.exit_code == 0
    assert "offload_optimizer=" in done.stdout
    assert "GB of 1,800.0 GB usable" in done.stdout
    document = json.loads(path.read_text())
    jsonschema.validate(document, json.loads((DOCS / "plan.schema.json").read_text()))
    assert document["degrees"]["offload_optimizer"] > 0
    assert document["instance"]["workload"]["offload_optimizer"] == "auto"
    again = invoked("evaluate", "--plan", str(path))
    assert again.exit_code == 0
    shown = invoked("simulate", str(path))
    assert shown.exit_code == 0
    assert "--optimizer-offload-fraction" in invoked("export", str(path), "--to", "megatron-core").stdout
    assert invoked("report", str(path), "-o", str(tmp_path / "page.html")).exit_code == 0


def test_evaluate_takes_a_share() -> None:
    degrees = ("--tp", "4", "--pp", "2")
    refused = invoked("evaluate", *SAID, *degrees, "--offload-optimizer", "auto")
    assert refused.exit_code == 2
    assert "give a number from 0 to 1" in refused.stderr
    for share, code in (("0.1", 1), ("1", 0)):
        done = invoked("evaluate", *SAID, *degrees, "--recompute", "full", "--offload-optimizer", share, "--json", "-")
        assert done.exit_code == code
        found = json.loads(done.stdout)
        assert found["plan"]["degrees"]["offload_optimizer"] == float(share)
        assert found["host"]["fits"]
    wrong = invoked("evaluate", *SAID, "--offload-optimizer", "half")
    assert wrong.exit_code == 2
    assert "workload.offload_optimizer='half' must be a share from 0 to 1, or auto" in wrong.stderr


def test_a_cluster_file_says_what_its_hosts_have(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('family = "dgx-h100"\nnodes = 1\nhost_memory_GB = 500\n')
    done = invoked(
        "evaluate", "llama-3.1-70b", str(path), *SAID[2:], "--tp", "4", "--pp", "2", "--recompute", "full",
        "--offload-optimizer", "1",
    )  # fmt: skip
    assert done.exit_code == 1
    assert "does not fit: host memory of a node 1,1" in done.stdout
    assert "of 450.0 GB usable" in done.stdout
    path.write_text('[[groups]]\naccelerator = "H100-SXM"\ndevices = 8\nlink = "nvlink4"\n')
    refused = invoked("evaluate", "llama-3.1-8b", str(path), *SAID[2:], "--offload-optimizer", "1")
    assert refused.exit_code == 2
    assert "state host_memory_GB and host_memory_GBps" in refused.stderr
    text = 'host_memory_GB = 500\n[[groups]]\naccelerator = "H100-SXM"\ndevices = 8\nlink = "nvlink4"\n'
    with pytest.raises(InputError, match="give both, or a node family whose host is known"):
        parse_cluster_toml(text)
    both = parse_cluster_toml("host_memory_GBps = 400\n" + text)
    assert both.host == Host(5e11, 4e11)
    assert parse_cluster_toml(write_cluster_toml(both)) == both
