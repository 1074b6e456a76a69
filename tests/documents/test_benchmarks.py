"""The benchmarks run, check their results, and write the data of the tables. No figure is judged."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosts.network import missing
from process_world import PATIENCE

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str | Path) -> str:
    """Returns the output of a benchmark; fails with that output if the benchmark fails."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=4 * PATIENCE,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_collective_is_measured_from_numpy_and_torch_beside_gloo(tmp_path: Path) -> None:
    path = tmp_path / "collectives.json"
    run("collectives.py", "--sizes", "1K", "--rounds", "1", "--json", path)
    measured = json.loads(path.read_text())
    found = {(row["collective"], row["who"]) for row in measured["rows"]}
    collectives = {
        "grouped_allreduce",
        "broadcast",
        "allgather",
        "reducescatter",
        "alltoall",
        "sendrecv",
        "barrier",
    }
    assert {collective for collective, _ in found} == collectives
    for who in ("sirtaki numpy", "sirtaki torch", "gloo"):
        assert {(collective, who) for collective in collectives} <= found
    assert all(row["median"] > 0 for row in measured["rows"])
    for who in ("sirtaki C", "sirtaki torch", "gloo"):  # a peer is compared with sirtaki's same layer
        assert all(
            (row["slower"] is not None) == (who == "gloo") for row in measured["rows"] if row["who"] == who
        )


def test_allreduces_of_16_bit_floats_are_measured_by_threads_of_a_rank(tmp_path: Path) -> None:
    path = tmp_path / "dtypes.json"
    kinds = ("--only", "allreduce", "--dtypes", "float32", "bfloat16", "--threads", "2")
    run("collectives.py", *kinds, "--sizes", "64K", "--rounds", "1", "--json", path)
    measured = json.loads(path.read_text())
    found = {(row["dtype"], row["who"]) for row in measured["rows"]}
    deepspeed = importlib.util.find_spec("deepspeed") is not None
    for who in ("sirtaki C", "sirtaki numpy", "sirtaki torch", "gloo", *["deepspeed"] * deepspeed):
        assert {("float32", who), ("bfloat16", who)} <= found
    assert measured["versions"]["deepspeed"].startswith("left out: ") != deepspeed
    assert all(row["threads"] == 2 and row["bytes"] == 1 << 16 for row in measured["rows"])


@pytest.mark.exhaustive
def test_one_command_writes_a_page_about_the_peers_that_are_here(tmp_path: Path) -> None:
    tiny = ("--sizes", "1K", "64K", "--rounds", "1", "--folder", tmp_path, "--json", tmp_path / "all.json")
    output = run("compare.py", "--only", "allreduce", "gpu", *tiny)
    assert f"wrote {tmp_path / 'comparison.md'}" in output
    page = (tmp_path / "comparison.md").read_text()
    assert page.startswith("# sirtaki beside its peers\n")
    assert " cores, load " in page
    for who in ("sirtaki C", "sirtaki C, shared", "sirtaki torch", "gloo", "memory bound"):
        assert page.count(f"KiB | {who} |") == 2
    rows = json.loads((tmp_path / "all.json").read_text())["allreduce"]["rows"]
    medians = {row["who"]: row["median"] for row in rows if row["bytes"] == 1024}
    assert f"| 1 KiB | gloo | {medians['gloo']:,.1f} |" in page
    assert "\n## Targets\n" in page
    assert (tmp_path / "allreduce" / "allreduce.png").stat().st_size > 10_000
    assert "(allreduce/allreduce.png)" in page
    assert ("\n## Left out\n" in page) == ("there is no GPU" in page)


@pytest.mark.exhaustive
def test_steps_are_measured_with_and_without_a_deadline(tmp_path: Path) -> None:
    path = tmp_path / "deadlines.json"
    run("deadlines.py", "--ranks", "2", "--rounds", "1", "--steps", "5", "--json", path)
    rows = json.loads(path.read_text())["rows"]
    assert {row["way"] for row in rows} == {"synchronous", "accumulate", "drop"}
    for row in rows:
        assert row["steps_per_second"] > 0
        assert (row["missed"] == 0) or row["way"] != "synchronous"


@pytest.mark.exhaustive
def test_conditions_are_measured_beside_peers_and_cliffs_are_named(tmp_path: Path) -> None:
    path = tmp_path / "robustness.json"
    conditions = ("little polling",)
    run(
        "robustness.py", "--only", *conditions, "--sizes", "1K", "--no-moves", "--rounds", "1", "--json", path
    )
    measured = json.loads(path.read_text())["conditions"]
    assert set(measured) == set(conditions)
    for condition in measured.values():
        assert {"sirtaki C", "sirtaki torch", "gloo", "memory bound"} <= {
            row["who"] for row in condition["rows"]
        }
        assert condition["cliffs"] == []  # a single size has no cliff


@pytest.mark.exhaustive
def test_leaders_spare_rank_0_frames_when_many_negotiate(tmp_path: Path) -> None:
    path = tmp_path / "simulated.json"
    run(
        "simulate.py",
        "--only",
        "direct",
        "--ranks",
        "8",
        "64",
        "--tensors",
        "20",
        "--rounds",
        "1",
        "--json",
        path,
    )
    found = {(row["ranks"], row["to"]): row for row in json.loads(path.read_text())["direct"]}
    assert len(found) == 4
    for step in ("first", "steady"):
        few, many = found[64, "leaders"][step], found[64, "rank 0"][step]
        assert (few["frames_in"], many["frames_in"]) == (14, 63)  # from seven leaders, and from its own host
        assert (few["frames_out"], many["frames_out"]) == (14, 63)
        assert few["bytes_in"] < many["bytes_in"]
        assert few["frames_of_all"] == many["frames_of_all"] == 2 * 63
        assert all(row[step]["latency"] > 0 and row[step]["processor"] > 0 for row in found.values())
        assert found[8, "leaders"][step]["frames_of_all"] == 2 * 7
    assert found[64, "leaders"]["steady"]["bytes_of_all"] < found[64, "leaders"]["first"]["bytes_of_all"]


def test_starts_are_measured_by_the_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    run("scale.py", "--ranks", "2", "8", "--rounds", "1", "--json", path)
    few, more = json.loads(path.read_text())["rows"]
    assert (few["ranks"], more["ranks"]) == (2, 8)
    assert few["descriptors"] < more["descriptors"]
    for row in (few, more):
        assert min(row["seconds"], row["processor"], row["first"], row["memory"]) > 0


@pytest.mark.exhaustive
def test_an_allreduce_over_loopback_is_measured_beside_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    variants = ("--algorithms", "auto", "--encrypted", "--set", "sockets_per_link=2", "--no-peers")
    run("hosts.py", "--loopback", "--sizes", "64K", "--rounds", "1", *variants, "--json", path)
    rows = json.loads(path.read_text())["rows"]
    assert [row["who"] for row in rows] == ["sirtaki", "sirtaki, encrypted", "stream"]
    assert all(row["bytes"] == 65_536 and min(row["milliseconds"], row["share"]) > 0 for row in rows)
    assert rows[-1]["share"] == pytest.approx(1.0)


@pytest.mark.exhaustive
def test_checks_of_parameters_are_measured_beside_steps_without(tmp_path: Path) -> None:
    path = tmp_path / "checks.json"
    run("checks.py", "--rounds", "2", "--json", path)
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 3
    assert all(row["step"] > 0 and row["once"] > 0 for row in rows)


@pytest.mark.exhaustive
def test_steps_over_groups_of_torch_are_measured_beside_gloo(tmp_path: Path) -> None:
    path = tmp_path / "torch_backend.json"
    assert "FSDP2's step" in run("torch_backend.py", "--rounds", "5", "--json", path)
    models = json.loads(path.read_text())["models"]
    assert len(models) == 3
    exchanges = {"DDP, gloo", "DDP, sirtaki", "FSDP2, gloo", "FSDP2, sirtaki"}
    assert all(set(model["costs"]) == exchanges for model in models)
    assert all(min(times) > 0 for model in models for times in model["times"].values())


@pytest.mark.exhaustive
def test_steps_of_divided_models_are_measured_beside_gloo(tmp_path: Path) -> None:
    path = tmp_path / "model_parallel.json"
    assert "tensor parallel" in run("model_parallel.py", "--rounds", "5", "--json", path)
    divisions = json.loads(path.read_text())["divisions"]
    assert [one["division"] for one in divisions] == ["tensor parallel", "pipeline"]
    assert all(set(one["times"]) == {"gloo", "sirtaki"} for one in divisions)
    assert all(min(times) > 0 for one in divisions for times in one["times"].values())


@pytest.mark.exhaustive
def test_trainings_with_a_slow_rank_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "staleness.json"
    run("staleness.py", "-np", "2", "--updates", "8", "--milliseconds", "5", "--rounds", "1", "--json", path)
    rows = json.loads(path.read_text())["rows"]
    assert {row["slow"] for row in rows} == {"none", "one", "each"}
    assert {(row["method"], row["staleness"]) for row in rows} == {
        ("table", 3),
        *(("optimizer", staleness) for staleness in range(4)),
    }
    assert all(min(row["speed"], row["share"], row["updates"], row["accuracy"]) > 0 for row in rows)


@pytest.mark.exhaustive
def test_steps_with_divided_state_are_measured_beside_steps_without(tmp_path: Path) -> None:
    path = tmp_path / "sharding.json"
    run("sharding.py", "--rounds", "5", "--json", path)  # it compares the bits of the parameters
    rows = json.loads(path.read_text())["rows"]
    assert [row["shard"] for row in rows] == 3 * ["none", "state", "gradients"]
    for none, state, gradients in (rows[start : start + 3] for start in (0, 3, 6)):
        assert state["state"] == gradients["state"] < 0.52 * none["state"]
        assert gradients["gradients"] < 0.52 * none["gradients"] == 0.52 * state["gradients"]


@pytest.mark.exhaustive
def test_local_steps_are_measured_beside_synchronous_ones(tmp_path: Path) -> None:
    path, short = tmp_path / "losses.json", ("--every", "2", "--rounds", "1")
    run("local_steps.py", "--only", "losses", "--updates", "3", *short, "--json", path)
    losses = json.loads(path.read_text())["losses"]
    windows = [("synchronous", 1), ("LocalSGD", 2), ("DiLoCo", 2)]
    assert [(row["method"], row["every"]) for row in losses] == [
        *windows,
        ("DiLoCo(0.1)", 2),
        ("DiLoCo(3 %)", 2),
        ("DiLoCo(1 %)", 2),
        ("int8", 1),
        ("powersgd", 1),
    ]
    assert all(1 < row["mean"] < 6 for row in losses)
    sent = {row["method"]: row["kilobytes"] for row in losses}
    assert sent["DiLoCo(1 %)"] < sent["DiLoCo(3 %)"] < 0.2 * sent["DiLoCo"]
    if reason := missing():
        pytest.skip(reason)
    steps = ("--only", "steps", "--models", "transformer", "--steps", "1", "--rate", "none")
    run("local_steps.py", *steps, *short, "--json", path)
    rows = json.loads(path.read_text())["steps"]
    assert [(row["method"], row["every"]) for row in rows] == windows
    plain, *others = rows
    assert all(row["milliseconds"] > 0 for row in rows)
    assert all(0.49 < row["megabytes"] / plain["megabytes"] < 0.51 for row in others)


@pytest.mark.exhaustive
def test_recoveries_are_measured_beside_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "recovery.json"
    kills = ("--kills", "1", "--spare-kills", "1", "--peer-kills", "1")
    run("recovery.py", *kills, "--json", path)
    measured = json.loads(path.read_text())
    assert len(measured["sirtaki"]["kills"]) == 1
    assert len(measured["torchrun"]["kills"]) == 1, measured["torchrun"]["failure"]
    assert all(measured[launcher]["step"] > 0 for launcher in ("sirtaki", "torchrun"))
    assert len(measured["spares"]["kills"]) == 1
    assert measured["commit"]["commit"] > 0
    assert measured["commit"]["bandwidth"] > 0


@pytest.mark.exhaustive
def test_functions_of_tensorflow_are_measured_beside_its_own_strategy(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    path = tmp_path / "tensorflow.json"
    run("tensorflow_allreduce.py", "--sizes", "1K", "--rounds", "1", "--json", path)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["bytes"] == 1024
    assert min(row["sirtaki"], row["strategy"], *row["faster"]) > 0


def test_operations_on_gpus_are_compared_where_there_are_gpus() -> None:
    import torch

    if torch.cuda.device_count():
        assert "time / sirtaki's" in run("nccl.py", "-np", "1", "--sizes", "1K", "--rounds", "1")
        return
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "nccl.py"], capture_output=True, timeout=PATIENCE, text=True
    )
    assert done.returncode == 1
    assert "there is no GPU here" in done.stderr


def test_what_gpus_have_measured_becomes_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("COLUMNS", "160")
    nccl = importlib.import_module("nccl")
    options = nccl.BENCHMARK.parse(["-np", "4", "--sizes", "1K", "64M", "--only", "allreduce"])
    assert (options.ranks, options.sizes, options.only) == (4, [1 << 10, 64 << 20], ["allreduce"])
    blocks = {"sirtaki": [[20.0, 22.0, 21.0]] * 3, "nccl": [[10.0, 11.0, 10.5]] * 3}
    mine, its = nccl.make_rows("allreduce", 64 << 20, 4, blocks, nccl.BASELINE)
    assert (mine["median"], its["median"], mine["slower"], its["slower"].median) == (21.0, 10.5, None, 0.5)
    assert mine["busbw"] == pytest.approx(1.5 * (64 << 20) / 21.0 / 1e3)
    for table in nccl.BENCHMARK.tables({"rows": [mine, its], "ranks": 4}):
        table.print()
    shown = capsys.readouterr().out
    assert "64 MiB" in shown
    assert "0.50 (0.50 to 0.50)" in shown
