"""Commands, exit codes and messages of the command line, and the Python names behind them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import shardwise as sw
from shardwise.data.instance_document import instance_document
from shardwise.data.plan import Plan
from shardwise.data.runs import shipped_runs
from shardwise.solver.cli import app
from shardwise.solver.default_plan import plan_from_degrees

TRAINING = ("--seq-len", "4096", "--global-batch", "64")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, so that nothing of this one helps it."""
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert "Traceback" not in done.stderr + done.stdout
    return done


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of Llama-3.1-8B on two nodes."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    document = path.with_name("result.json")
    done = run(
        "plan", "training", "llama-3.1-8b", "dgx-h100:2", *TRAINING, "-o", str(path), "--json", str(document), "-q"
    )
    assert done.returncode == 0, done.stderr
    assert "OPTIMAL" in done.stdout
    return path


def invoked(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def evaluated(*arguments: str) -> Any:
    done = invoked("evaluate", *arguments, "--json", "-")
    return json.loads(done.stdout)


def test_adapters_and_documents_are_options_of_evaluate(tmp_path: Path, plan_file: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("length,count\n512,7\n")
    plain = evaluated("--plan", str(plan_file))
    lora = evaluated("--plan", str(plan_file), "--lora-rank", "16")
    qlora = evaluated("--plan", str(plan_file), "--lora-rank", "16", "--qlora", "--lora-modules", "attention")
    assert qlora["peak_memory_gb"] < lora["peak_memory_gb"] < plain["peak_memory_gb"]
    mean = evaluated("--plan", str(plan_file), "--mean-document-length", "512")
    listed = evaluated("--plan", str(plan_file), "--lengths", str(lengths))
    assert mean["step_time_s"] == listed["step_time_s"] < plain["step_time_s"]


def test_faults_of_adapters_and_documents_are_told_together(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("length,count\nx,1\n5,y\n")
    options = ("--seq-len", "0", "--global-batch", "64", "--lora-modules", "attention", "--lengths", str(lengths))
    done = invoked("plan", "training", "llama-3.1-8c", "dgx-h100:1", *options)
    assert done.exit_code == 2
    for words in ("seq_len=0", "needs workload.lora_rank", "line 2: length='x'", "line 3: count='y'", "llama-3.1-8c"):
        assert words in done.stderr
    both = ("--mean-document-length", "5", "--lengths", str(lengths))
    assert "leave out one" in invoked("evaluate", "llama-3.1-8b", "dgx-h100:1", *TRAINING, *both).stderr


def test_plan_writes_the_documents_of_the_contract(plan_file: Path) -> None:
    result = json.loads(plan_file.with_name("result.json").read_text())
    assert {
        "status",
        "objective",
        "sense",
        "unit",
        "value",
        "bound",
        "gap",
        "plan",
        "evaluation",
        "alternatives",
        "report",
    } <= set(result)
    assert result["status"] == "OPTIMAL"
    assert 0 <= result["gap"] < 1e-5
    assert result["bound"] <= result["value"]
    plan = json.loads(plan_file.read_text())
    assert plan == result["plan"]
    assert {"dp", "tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch", "zero"} <= set(plan["degrees"])
    assert {"schedule", "stages", "placement"} <= set(plan)


def test_top_out_of_range_is_bad_input_and_a_number_keeps_so_many(tmp_path: Path) -> None:
    wrong = invoked("plan", "training", "qwen3-0.6b", "dgx-h100:1", *TRAINING, "--top", "-1")
    assert wrong.exit_code == 2
    assert "top=-1 must be a whole number between 0 and 100" in wrong.stderr
    out = tmp_path / "two.json"
    done = invoked("plan", "training", "qwen3-0.6b", "dgx-h100:1", *TRAINING, "--top", "2", "--json", str(out))
    assert done.exit_code == 0
    document = json.loads(out.read_text())
    assert len(document["alternatives"]) == 2
    assert document["robustness"]["recommended"] in (0, 1, 2)
    assert "not proven to be the next best" in done.stdout


def test_a_plan_file_evaluates_alone_to_the_same_time(plan_file: Path) -> None:
    out = plan_file.with_name("evaluation.json")
    done = run("evaluate", "--plan", str(plan_file), "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    saved = json.loads(plan_file.with_name("result.json").read_text())
    assert json.loads(out.read_text())["step_time_s"] == pytest.approx(saved["value"], rel=1e-12)


def test_plan_json_matches_its_schema(plan_file: Path) -> None:
    import jsonschema

    schema = json.loads((Path(__file__).parents[2] / "docs" / "plan.schema.json").read_text())
    jsonschema.validate(json.loads(plan_file.read_text()), schema)


def test_json_to_stdout_is_nothing_but_json() -> None:
    done = run("plan", "training", "qwen3-0.6b", "dgx-h100:1", *TRAINING, "--json", "-")
    assert done.returncode == 0
    assert json.loads(done.stdout)["status"] == "OPTIMAL"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ("llama-3.1-8b", "dgx-h100:1", "--seq-len", "-1", "--global-batch", "0"),
            2,
            ["workload.seq_len=-1", "workload.global_batch=0"],
        ),
        (("llama-3.1-8c", "dgx-h999:1", *TRAINING), 2, ["llama-3.1-8b", "dgx-h999"]),
        (("llama-3.1-8b", "dgx-h100:0", *TRAINING), 2, ["0"]),
        (("llama-3.1-8b", "dgx-h100:1", *TRAINING, "--precision", "int3"), 2, ["workload.precision='int3'", "bf16"]),
        (("llama-3.1-8b", "v100-sxm:1", *TRAINING), 2, ["precision='bf16'", "fp16"]),
        (("llama-3.1-8b", "dgx-h100:1", *TRAINING, "--fix", "tp=8", "--limit", "tp<=4"), 2, ["contradict", "tp=8, tp<=4"]),
        (
            ("llama-3.1-8b", "dgx-h100:1", *TRAINING, "--limit", "q<=4", "--rules", "none"),
            2,
            ["unknown variable 'q'", "rules='none'"],
        ),
        (("llama-3.1-8b", "dgx-h100:1", *TRAINING, "--limit", "zero=3", "--limit", "pp>=2"), 1, ["zero"]),
        (("missing.json", "missing.toml", *TRAINING), 2, ["missing.json", "missing.toml"]),
        (("llama-3.1-405b", "dgx-h100:1", *TRAINING), 1, ["memory", "85.9 GB usable"]),
        (("qwen2.5-14b", "dgx-h100:4", *TRAINING, "--fix", "tp=16"), 1, ["tp=16 does not divide num_attention_heads=40"]),
        (("llama-3.1-8b", "dgx-h100:1", *TRAINING, "--fix", "dp=3"), 1, ["dp", "global_batch=64"]),
        (("llama-3.1-8b", "dgx-h100:1", *TRAINING, "--workers", "0"), 2, ["workers=0"]),
        (("llama-3.1-8b", "dgx-h100:1", *TRAINING, "--objective", "beauty"), 2, ["objective='beauty'"]),
    ],
)  # fmt: skip
def test_no_and_bad_input_say_why(arguments: tuple[str, ...], code: int, words: list[str]) -> None:
    done = run("plan", "training", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    text = (done.stdout + done.stderr).replace("\n", " ")
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"model_type": "llama", "hidden_size": -5, "num_hidden_layers": 1000000000}', "num_hidden_layers=1000000000"),
        ('{"model_type": "martian"}', "model_type='martian' is unknown"),
    ],
)
def test_bad_model_files_say_why(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    done = run("plan", "training", str(file), "dgx-h100:1", *TRAINING)
    assert done.returncode == 2
    assert words in done.stderr


def test_evaluate_tells_an_illegal_plan_by_every_rule() -> None:
    done = run(
        "evaluate",
        "qwen2.5-14b",
        "dgx-h100:4",
        *TRAINING,
        "--tp",
        "16",
        "--pp",
        "2",
        "--vpp",
        "2",
        "--micro-batch",
        "3",
    )
    assert done.returncode == 1
    assert "tp=16 does not divide num_attention_heads=40" in done.stdout
    assert "micro_batch=3 x dp=1 does not divide global_batch=64" in done.stdout


def test_evaluate_takes_uneven_stages() -> None:
    done = run(
        "evaluate", "bloom-176b", "dgx-a100:48", "--seq-len", "2048", "--global-batch", "2048", "--tp", "4", "--pp", "12",
        "--micro-batch", "2", "--recompute", "full", "--stages", "5,6,6,6,6,6,6,6,6,6,6,5",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recompute" in done.stdout
    wrong = run("evaluate", "bloom-176b", "dgx-a100:48", *TRAINING, "--pp", "2", "--stages", "5,x")
    assert wrong.returncode == 2
    assert "whole numbers" in wrong.stderr


def test_evaluate_says_over_which_levels_experts_spread() -> None:
    out = invoked(
        "evaluate",
        "qwen3-30b-a3b",
        "dgx-h100:2",
        "--seq-len",
        "4096",
        "--global-batch",
        "64",
        "--ep",
        "16",
        "--etp",
        "1",
    )
    assert "traffic: dp over node and fabric, ep over node and fabric" in out.stdout


def test_evaluate_says_when_a_plan_does_not_fit() -> None:
    done = run("evaluate", "llama-3.1-70b", "dgx-h100:1", *TRAINING, "--tp", "8")
    assert done.returncode == 1
    assert "does not fit" in done.stdout


@pytest.mark.parametrize("what", ["models", "accelerators", "clusters", "profiles", "rules"])
def test_catalogues_list_and_describe(what: str) -> None:
    done = run("catalog", what, "--json", "-")
    assert done.returncode == 0
    rows = json.loads(done.stdout)
    first = run("catalog", what, rows[0]["name"], "--json", "-")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)


def test_unknown_catalogue_is_bad_input() -> None:
    assert run("catalog", "planets").returncode == 2
    assert run("catalog", "models", "no-such-model").returncode == 2


def test_version_and_help_answer() -> None:
    assert run("--version").stdout.strip() == f"shardwise {sw.__version__}"
    assert "plan" in run("--help").stdout


def test_the_package_starts_without_its_heavy_parts() -> None:
    code = "import sys, shardwise; print([m for m in ('pandas', 'ortools', 'pydantic', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_and_catalogues_do_not_load_the_solver() -> None:
    code = (
        "import sys\nfrom shardwise.solver.cli import app\n"
        "try:\n    app(['catalog', 'models'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([m for m in ('pandas', 'ortools', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


values = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**70), st.text(max_size=4), st.lists(st.integers(-1, 9), max_size=3)
)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_mutated_plan_is_a_plan_or_an_input_error(plan_file: Path, data: st.DataObject) -> None:
    document = json.loads(plan_file.read_text())
    target: Any = document
    for _ in range(data.draw(st.integers(0, 3))):
        if isinstance(target, dict) and target:
            key = data.draw(st.sampled_from(sorted(target)))
        elif isinstance(target, list) and target:
            key = data.draw(st.integers(0, len(target) - 1))
        else:
            break
        if data.draw(st.booleans()):
            target[key] = data.draw(values)
            break
        target = target[key]
    try:
        plan = Plan.from_json(json.dumps(document))
    except sw.InputError as error:
        assert error.faults  # noqa: PT017
    else:
        assert plan.to_dict()["version"] == 1


def test_python_api_of_the_contract() -> None:
    seen: list[sw.Progress] = []
    result = sw.solve(
        model="llama-3.1-70b",
        cluster="dgx-h100:8",
        workload=sw.Training(seq_len=8192, global_batch=1024),
        limits=["pp<=8"],
        objective="step-time",
        time_limit_s=60,
        on_progress=seen.append,
    )
    assert result.status == "OPTIMAL"
    assert result.plan is not None
    assert result.plan.degrees.pp <= 8
    assert sum(stage.layers for stage in result.plan.stages) == 80
    assert result.unit == "s"
    assert seen
    assert seen[-1].gap is not None
    instance = sw.build_instance("llama-3.1-70b", "dgx-h100:8", sw.Training(8192, 1024), limits=["pp<=8"])
    assert sw.evaluate(instance, result.plan).step_time_s == result.value
    assert Plan.from_json(result.plan.to_json()) == result.plan


def test_input_errors_hold_every_fault() -> None:
    with pytest.raises(sw.InputError) as error:
        sw.solve("no-such-model", "no-such-cluster", sw.Training(8, 8), limits=["tp=x"], rules="none")
    assert len(error.value.faults) == 4


def test_evaluate_many_answers_every_row() -> None:
    import pandas as pd

    common = {"model": "llama-3.1-8b", "cluster": "dgx-h100:1", "seq_len": 4096, "global_batch": 64}
    table = pd.DataFrame(
        [common | {"tp": 2, "dp": 4}, common | {"tp": 3, "dp": 2}, common | {"model": "nope"}, common | {"tp": 1.5}]
    )
    out = sw.evaluate_many(table)
    assert out["step_time_s"].gt(0).tolist() == [True, True, False, False]
    assert out["legal"].tolist()[:2] == [True, False]
    reasons = out["reason"].astype(str).tolist()
    assert "tp=3 does not divide" in reasons[1]
    assert "nope" in reasons[2]
    assert "tp=1.5 must be a whole number" in reasons[3]


def invoke(*arguments: str) -> tuple[int, str]:
    """The command inside this process: its exit code and all that it prints; any exception is a failure."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


SMALL = ("llama-3.1-8b", "dgx-h100:1", *TRAINING)


def test_a_plan_brings_its_instance_and_every_part_can_be_replaced(plan_file: Path) -> None:
    plan = str(plan_file)
    assert invoke("evaluate", "--plan", plan)[0] == 0
    code, text = invoke("evaluate", "--plan", plan, "--global-batch", "128")
    assert code == 1
    assert "is not global_batch=128" in text
    code, text = invoke("evaluate", "--plan", plan, "--limit", "devices<=1")
    assert code == 1
    assert "breaks a limit: devices=" in text
    assert "llama-3.1-8b on dgx-h100:4" in invoke("evaluate", "llama-3.1-8b", "dgx-h100:4", "--plan", plan)[1]
    code, text = invoke("evaluate", "--plan", plan, "--tp", "2", "--stages", "32")
    assert code == 2
    assert "leave out --tp, --stages" in text
    code, text = invoke("evaluate", "--plan", plan, "--seq-len", "0")
    assert code == 2
    assert "workload.seq_len=0" in text


def test_what_is_missing_is_named_all_at_once() -> None:
    code, text = invoke("evaluate", "llama-3.1-8b", "--tp", "2")
    assert code == 2
    for name in ("CLUSTER", "--seq-len", "--global-batch"):
        assert f"{name} is missing" in text


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--pp", "1048576", "--vpp", "1048576"), 2, "chunks of layers=32"),
        (("--tp", "1048576"), 1, "tp=1048576 does not divide num_attention_heads=32"),
        (("--zero", "4"), 2, "degrees.zero=4 must be 0, 1, 2 or 3"),
        (("--recompute", "some"), 2, "recompute='some'"),
        (("--rank-order", "pp-first"), 2, "rank_order='pp-first'"),
        (("--stages", "16,16"), 2, "2 numbers given"),
        (("--stages", "-1,33", "--pp", "2"), 2, "stages=-1,33 must not be negative"),
        (("--recompute-layers", "2"), 2, "needs recompute=full"),
        (("--limit", "tp>=2"), 1, "tp=1 breaks the limit tp>=2"),
        (("--limit", "memory_gb<=1"), 1, "does not fit"),
        (("--dp", "16"), 1, "placement needs 16 devices in one node, cluster dgx-h100:1 has 8"),
    ],
)
def test_evaluate_tells_no_from_bad_input(options: tuple[str, ...], code: int, words: str) -> None:
    found, text = invoke("evaluate", *SMALL, *options)
    assert found == code, text
    assert words in text.replace("\n", " ")


def test_outputs_that_cannot_be_written_are_refused_before_the_work(tmp_path: Path) -> None:
    for path in ("", str(tmp_path), str(tmp_path / "missing" / "plan.json")):
        code, text = invoke("plan", "training", "no-such-model", "dgx-h100:1", *TRAINING, "-o", path)
        assert code == 2
        assert f"--output {path!r}" in text
    code, text = invoke("plan", "training", *SMALL, "-o", "-", "--json", "-")
    assert code == 2
    assert "only one of --output and --json" in text
    same = str(tmp_path / "same.json")
    code, text = invoke("plan", "training", *SMALL, "-o", same, "--json", str(tmp_path / "." / "same.json"))
    assert (code, "--output and --json must not name the same file" in text) == (2, True)
    assert not Path(same).exists()


def test_the_file_of_plan_json_serves_wherever_a_plan_file_does(plan_file: Path, tmp_path: Path) -> None:
    result = plan_file.with_name("result.json")
    for command in (("evaluate", "--plan"), ("simulate",), ("export", "--to", "megatron-core")):
        assert invoke(*command, str(result)) == invoke(*command, str(plan_file)), command
    nothing = tmp_path / "nothing.json"
    assert invoke("plan", "training", *SMALL, "--limit", "tp=3", "--json", str(nothing))[0] == 1
    code, text = invoke("evaluate", "--plan", str(nothing))
    assert (code, "there is no plan in it" in text) == (2, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "not JSON"),
        (b"\x94\xff", "cannot be read: it is not UTF-8 text"),
        (b"{", "not JSON"),
        (b"\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "plan.version=None"),
        (b'{"version": 1e999}', "plan.version=inf"),
        (b'{"version": 1}', "plan.degrees must be"),
        (b"null", "must be a JSON object"),
        (b"[1]", "must be a JSON object"),
    ],
)
def test_a_file_that_is_no_plan_is_named_with_its_fault(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    for command in (("evaluate", "--plan"), ("simulate",), ("export", "--to", "megatron-core")):
        code, text = invoke(*command, str(path))
        assert code == 2
        assert str(path) in text
        assert words in text
        assert "Errno" not in text


@pytest.mark.parametrize("content", [b"\x94\xff", b"x = " + b"[" * 100_000, b""])
def test_toml_files_that_cannot_be_read_are_bad_input(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_bytes(content)
    for command in (
        ("evaluate", "llama-3.1-8b", str(path), *TRAINING),
        ("evaluate", *SMALL, "--profile", str(path)),
        ("batch", str(path), "--store", str(tmp_path / "store")),
    ):
        code, text = invoke(*command)
        assert (code, str(path) in text) == (2, True), text


def test_a_folder_without_a_config_and_a_config_without_a_family_are_told_so(tmp_path: Path) -> None:
    assert "the folder holds no config.json" in invoke("evaluate", str(tmp_path), "dgx-h100:1", *TRAINING)[1]
    (tmp_path / "config.json").write_text("{}")
    assert "model_type is missing" in invoke("evaluate", str(tmp_path), "dgx-h100:1", *TRAINING)[1]


def test_an_evaluated_plan_is_written_and_exported(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    shape = ("--tp", "4", "--pp", "2", "--recompute", "selective")
    code, text = invoke("evaluate", *SMALL, *shape, "-o", str(path))
    assert (code, invoke("evaluate", "--plan", str(path))) == (0, (code, text))
    code, text = invoke("export", str(path), "--to", "megatron-core")
    assert (code, "--tensor-model-parallel-size 4" in text) == (0, True)


def test_more_devices_than_there_are_leave_none_idle() -> None:
    code, text = invoke("evaluate", *SMALL, "--tp", "16", "--dp", "2")
    assert code == 1
    assert ", 0 idle devices" in text


def test_a_device_is_written_to_and_a_link_is_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    assert invoke("evaluate", *SMALL, "--json", str(link))[0] == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["legal"]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []
    if Path("/dev/null").is_char_device():
        assert invoke("evaluate", *SMALL, "--json", "/dev/null")[0] == 0
        assert Path("/dev/null").is_char_device()


def test_a_full_disk_is_told_in_words() -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("no device that is always full")
    code, text = invoke("evaluate", *SMALL, "--json", "/dev/full")
    assert code == 2
    assert "No space left" in text


def test_interrupts_end_in_words_and_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.solver.solve.solve", interrupted)
    code, text = invoke("plan", "training", *SMALL)
    assert code == 3
    assert "interrupted" in text


def test_a_time_limit_too_short_for_any_plan_is_code_3() -> None:
    code, text = invoke("plan", "training", "llama-3.1-405b", "dgx-h100:256", *TRAINING, "--time-limit", "1e-9")
    assert code == 3
    assert "UNKNOWN" in text
    assert "time limit" in text


def test_export_tells_an_illegal_plan_from_a_broken_file(plan_file: Path, tmp_path: Path) -> None:
    code, text = invoke("export", str(plan_file), "--to", "megatron-core")
    assert code == 0
    assert "torchrun" in text
    out = tmp_path / "launch.sh"
    assert invoke("export", str(plan_file), "--to", "megatron-core", "-o", str(out), "--json", "-")[0] == 0
    assert out.read_text().startswith("# llama-3.1-8b")
    assert invoke("export", str(plan_file), "--to", "deepspeed")[0] == 2
    document = json.loads(plan_file.read_text())
    document["micro_batches"] += 1
    broken = tmp_path / "plan.json"
    broken.write_text(json.dumps(document))
    code, text = invoke("export", str(broken), "--to", "megatron-core")
    assert code == 1
    assert "not legal for megatron-core" in text
    del document["instance"]
    broken.write_text(json.dumps(document))
    assert invoke("export", str(broken), "--to", "megatron-core")[0] == 2


def test_a_device_without_usable_memory_holds_nothing(tmp_path: Path, plan_file: Path) -> None:
    document = json.loads(plan_file.read_text())
    document["instance"]["profile"]["memory_quantile"] = 1e6
    small = tmp_path / "plan.json"
    small.write_text(json.dumps(document))
    code, text = invoke("evaluate", "--plan", str(small))
    assert code == 1
    assert "does not fit" in text


def test_markup_in_names_is_printed_as_it_is(tmp_path: Path, plan_file: Path) -> None:
    document = json.loads(plan_file.read_text())
    document["instance"]["model"]["name"] = "[/red]odd[bold]"
    odd = tmp_path / "plan.json"
    odd.write_text(json.dumps(document))
    code, text = invoke("evaluate", "--plan", str(odd))
    assert code == 0
    assert "[/red]odd[bold] on dgx-h100:2" in text


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_mutated_plan_file_is_evaluated_or_refused(plan_file: Path, data: st.DataObject) -> None:
    document = json.loads(plan_file.read_text())
    target: Any = document
    while isinstance(target, dict | list) and target:
        key = data.draw(
            st.sampled_from(sorted(target)) if isinstance(target, dict) else st.integers(0, len(target) - 1)
        )
        if data.draw(st.integers(0, 3)) == 0 or not isinstance(target[key], dict | list):
            target[key] = data.draw(values)
            break
        target = target[key]
    mutated = plan_file.with_name("mutated.json")
    mutated.write_text(json.dumps(document))
    assert invoke("evaluate", "--plan", str(mutated))[0] in (0, 1, 2)
    assert invoke("export", str(mutated), "--to", "megatron-core")[0] in (0, 1, 2)
    assert invoke("simulate", str(mutated), "-o", str(plan_file.with_name("trace.json")), "-q")[0] in (0, 1, 2)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("kinds", 0, "mixer", "kv_heads"), None, "mixer.kv_heads=None must be int"),
        (("kinds", 0, "mixer", "heads"), 0, "mixer.heads=0 must be between 1 and 2^40"),
        (("kinds", 0, "tensors", 0, "name"), 7, "name=7 must be str"),
        (("norm",), "batchnorm", "norm='batchnorm' must be one of rmsnorm, layernorm"),
        (("tied",), "yes", "tied='yes' must be bool"),
        (("max_positions",), "x", "max_positions='x' must be int | None"),
    ],
)
def test_a_mistyped_field_of_a_saved_model_is_named(
    path: tuple[str | int, ...], value: object, words: str, plan_file: Path, tmp_path: Path
) -> None:
    document = json.loads(plan_file.read_text())
    target: Any = document["instance"]["model"]
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document))
    code, text = invoke("evaluate", "--plan", str(file))
    assert code == 2
    assert words in text


def few_rows(path: Path, count: int = 30) -> Path:
    """The first scored rows of one shipped source, as a file of one's own."""
    rows = [dict(r.row) for r in shipped_runs() if r.source == "aleph" and r.scored][:count]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_validate_writes_one_prediction_per_row(tmp_path: Path) -> None:
    rows = few_rows(tmp_path / "rows.csv", 8)
    with rows.open("a", encoding="utf-8") as file:
        file.write("odd,,,nonsense" + "," * 36 + "\n")
    done = run("validate", "--rows", str(rows), "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert len(document) == 9
    needed = {"id", "predicted_step_time_s", "predicted_peak_mem_gb", "predicted_fits", "legal", "reason"}
    assert all(needed <= set(entry) for entry in document)
    assert document[0]["predicted_step_time_s"] > 0
    assert (document[-1]["id"], document[-1]["predicted_step_time_s"]) == ("odd", None)
    assert document[-1]["reason"]
    assert "Kendall tau" in done.stdout


def test_validate_takes_a_profile_and_refuses_what_is_none(tmp_path: Path) -> None:
    rows = few_rows(tmp_path / "rows.csv", 4)
    done = run("validate", "--rows", str(rows), "--profile", "megatron-core", "--json", "-", "-q")
    assert done.returncode == 0
    assert {entry["profile"] for entry in json.loads(done.stdout)} == {"megatron-core"}
    assert run("validate", "--rows", str(rows), "--profile", "none-such").returncode == 2
    assert run("validate", "--rows", str(tmp_path / "absent.csv")).returncode == 2
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    bad = run("validate", "--rows", str(tmp_path / "bad.csv"))
    assert bad.returncode == 2
    assert "column gpu is missing" in bad.stderr


def test_calibrate_writes_a_profile_that_evaluate_takes(tmp_path: Path) -> None:
    rows = few_rows(tmp_path / "rows.csv")
    profile = tmp_path / "mine.toml"
    done = run(
        "calibrate", str(rows), "-o", str(profile), "--from", "megatron-core", "--json", str(tmp_path / "c.json")
    )
    assert done.returncode == 0, done.stderr
    assert "leaving one row out" in done.stdout
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["leave_one_out_error"] < found["error_before"]
    text = profile.read_text()
    assert 'name = "mine"' in text
    assert "fitted = " in text
    evaluated = run(
        "evaluate", "llama-3.1-8b", "dgx-a100:2", *TRAINING, "--tp", "2", "--profile", str(profile), "--json", "-"
    )
    assert evaluated.returncode in (0, 1)
    assert json.loads(evaluated.stdout)["step_time_s"] > 0
    assert run("calibrate", str(rows), "-o", str(tmp_path)).returncode == 2


def test_evaluate_takes_every_axis(tmp_path: Path) -> None:
    done = run(
        "evaluate", "qwen3-30b-a3b", "dgx-h100:2", "--seq-len", "4096", "--global-batch", "64", "--cp", "2", "--ep", "8",
        "--etp", "1", "--rules", "megatron-core", "--json", str(tmp_path / "out.json"),
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["legal"]
    assert document["parts"]["expert_parallel_s"] > 0
    assert document["energy"]["joules_per_token"]["low"] < document["energy"]["joules_per_token"]["high"]
    assert document["verdict"] in ("fits", "tight", "does not fit")
    (tmp_path / "plan.json").write_text(json.dumps(document["plan"]))
    assert "ep=8" in done.stdout
    sharded = run(
        "evaluate", "llama-3.1-8b", "dgx-h100:1", *TRAINING, "--zero", "3", "--pp", "2", "--rules", "megatron-core",
    )  # fmt: skip
    assert sharded.returncode == 1
    assert "zero=3 needs pp=1, not pp=2" in sharded.stdout


def test_simulate_writes_a_trace_and_the_summary(plan_file: Path, tmp_path: Path) -> None:
    trace, summary = tmp_path / "trace.json", tmp_path / "summary.json"
    done = run("simulate", str(plan_file), "-o", str(trace), "--json", str(summary))
    assert done.returncode == 0, done.stderr
    saved = json.loads(plan_file.with_name("result.json").read_text())
    document = json.loads(summary.read_text())
    assert document["step_time_s"] == pytest.approx(saved["value"], rel=1e-9)
    assert len(document["stages"]) == saved["plan"]["degrees"]["pp"]
    for stage, peak in zip(document["stages"], saved["evaluation"]["stages"], strict=True):
        assert stage["peak_memory_gb"] == pytest.approx(peak["total_gb"], rel=1e-12)
    assert f"step time {saved['value']:.4f} s" in done.stdout
    assert "bubble" in done.stdout
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} >= {"X", "C", "M"}
    alone = run("simulate", str(plan_file), "-o", "-", "-q")
    assert alone.returncode == 0
    assert json.loads(alone.stdout) == json.loads(trace.read_text())


def test_simulate_tells_no_from_bad_input(plan_file: Path, tmp_path: Path) -> None:
    document = json.loads(plan_file.read_text())
    document["micro_batches"] += 1
    broken = tmp_path / "plan.json"
    broken.write_text(json.dumps(document))
    code, text = invoke("simulate", str(broken))
    assert code == 1
    assert "illegal: micro_batches=" in text
    broken.write_text(long_plan(2**20).to_json())
    code, text = invoke("simulate", str(broken))
    assert code == 2
    assert "passes, at most" in text
    del document["instance"]
    broken.write_text(json.dumps(document))
    assert invoke("simulate", str(broken))[0] == 2
    assert invoke("simulate", str(tmp_path / "absent.json"))[0] == 2
    assert invoke("simulate", str(plan_file), "-o", str(tmp_path))[0] == 2


def test_simulate_says_when_it_shows_a_sample(tmp_path: Path) -> None:
    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    plan.write_text(long_plan(4096).to_json())
    words = "of 4096 micro-batches are shown"
    assert words in run("simulate", str(plan), "-o", str(trace)).stderr
    quiet = run("simulate", str(plan), "-o", str(trace), "-q")
    assert words not in quiet.stdout + quiet.stderr
    assert words in json.loads(trace.read_text())["otherData"]["sampled"]["why"]
    assert trace.stat().st_size < 20_000_000


def long_plan(micro_batches: int) -> Plan:
    """Four stages of Llama-3.1-70B, with its instance."""
    instance = sw.build_instance("llama-3.1-70b", "dgx-h100:4", sw.Training(4096, micro_batches))
    plan = plan_from_degrees(instance, sw.Degrees(tp=8, pp=4, sequence_parallel=True))
    return replace(plan, instance=instance_document(instance))


RUN = ("--tokens", "300B", "--node-mtbf-hours", "50000", "--checkpoint-s", "60", "--restart-s", "300")


def test_plan_and_evaluate_tell_the_same_training_run(plan_file: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "result.json", tmp_path / "evaluation.json"
    code, text = invoke("plan", "training", "llama-3.1-8b", "dgx-h100:2", *TRAINING, *RUN, "--json", str(out), "-q")
    assert code == 0, text
    assert "time to train on 300,000,000,000 tokens: 1,144,410 steps" in text
    assert "a checkpoint every" in text
    told = json.loads(out.read_text())["training_run"]
    assert invoke("evaluate", "--plan", str(plan_file), *RUN, "--json", str(again))[0] == 0
    assert json.loads(again.read_text())["training_run"] == told
    assert told["steps"] == 1_144_410
    assert told["nodes"] == 2
    assert told["device_hours"] == pytest.approx(told["days"] * 24 * told["devices"])
    assert told["cost_usd"] == pytest.approx(told["device_hours"] * told["price_usd_per_hour"])
    assert told["work_time_s"] == pytest.approx(told["goodput"] * told["wall_time_s"])
    assert 0.99 < told["goodput"] < 1
    assert told["energy_mwh"]["low"] < told["energy_mwh"]["value"] < told["energy_mwh"]["high"]
    assert told["failures"]["mtbf_hours"] == 25_000


def test_a_training_run_says_what_is_not_known(tmp_path: Path) -> None:
    out = tmp_path / "evaluation.json"
    shape = ("llama-3.1-8b", "l40s:2", *TRAINING, "--tp", "4")
    code, text = invoke("evaluate", *shape, "--tokens", "15e12", "--json", str(out))
    assert code == 0
    for words in ("cost is not known: no price is known", "goodput is not told: no node MTBF is given"):
        assert words in text
    told = json.loads(out.read_text())["training_run"]
    assert told["cost_usd"] is told["goodput"] is told["failures"] is None
    assert told["wall_time_s"] == told["work_time_s"]
    assert invoke("evaluate", *shape, "--tokens", "15T", "--price", "1.5", "--json", str(out))[0] == 0
    priced = json.loads(out.read_text())["training_run"]
    assert priced["cost_usd"] == pytest.approx(1.5 * told["device_hours"])
    assert invoke("evaluate", *shape, "--json", str(out))[0] == 0
    assert "training_run" not in json.loads(out.read_text())


def test_a_run_that_does_not_end_is_told_without_its_times(tmp_path: Path) -> None:
    out = tmp_path / "evaluation.json"
    failing = ("--tokens", "1B", "--node-mtbf-hours", "0.001", "--checkpoint-s", "9999", "--restart-s", "9999")
    _, text = invoke("evaluate", *SMALL, *failing, "--json", str(out))
    assert "the run is not expected to end" in text
    told = json.loads(out.read_text())["training_run"]
    assert told["days"] is told["cost_usd"] is told["energy_mwh"] is None
    assert told["goodput"] == 0


def test_a_training_run_names_every_bad_term_beside_other_faults() -> None:
    for command in (("plan", "training"), ("evaluate",)):
        code, text = invoke(
            *command, "llama-3.1-8b", "dgx-h100:0", *TRAINING, "--tokens", "15X", "--price", "-1",
            "--node-mtbf-hours", "0", "--straggler-margin", "nan",
        )  # fmt: skip
        assert code == 2
        for words in (
            "nodes=0 must be",
            "--tokens=15X must be a whole number between 1 and 1e+18, such as 15e12, 15T or 300B",
            "--price=-1.0 must be a number between 0 and",
            "--node-mtbf-hours=0.0 must be",
            "--straggler-margin=nan must be",
            "--checkpoint-s is missing",
            "--restart-s is missing",
        ):
            assert words in text
    code, text = invoke("evaluate", *SMALL, "--price", "3")
    assert code == 2
    assert "--tokens is missing beside --price" in text


@pytest.mark.parametrize(
    ("said", "tokens"),
    [("15e12", 15 * 10**12), ("15T", 15 * 10**12), ("1.5b", 1_500_000_000), (2e9, 2 * 10**9), (7, 7)],
)
def test_tokens_are_read_as_people_write_them(said: Any, tokens: int) -> None:
    instance = sw.build_instance("llama-3.1-8b", "dgx-h100:1", sw.Training(4096, 64))
    evaluation = sw.evaluate(instance, plan_from_degrees(instance, sw.Degrees(tp=8, sequence_parallel=True)))
    assert sw.training_run(evaluation, tokens=said).terms.tokens == tokens


@pytest.mark.parametrize("said", ["", "0", "1e19", "-5", "1.5", "inf", "nan", "1e999", "T", "15TB", True, float("nan")])
def test_tokens_that_are_none_are_bad_input(said: Any) -> None:
    nowhere: Any = None
    with pytest.raises(sw.InputError, match="tokens="):
        sw.training_run(nowhere, tokens=said)


def test_a_limit_above_what_is_searched_is_told_so() -> None:
    code, text = invoke("plan", "training", *SMALL, "--fix", "micro_batch=64")
    assert (code, "micro_batch>=64 is above the maximum of the universe, 32" in text) == (1, True)
    assert invoke("evaluate", *SMALL, "--micro-batch", "64", "--dp", "1", "--recompute", "full")[1].find("legal") > 0
