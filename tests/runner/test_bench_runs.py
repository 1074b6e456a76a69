"""`sirtaki bench` with ranks, at tiny sizes: every operation, peers, wrong results and lost ranks."""

from __future__ import annotations

import functools
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import FAILSAFE_SECONDS, Hosts, read_terminal
from process_world import may_read_siblings
from tiers import exhaustive_unless

from sirtaki.runner.bench import cli
from sirtaki.runner.bench.operations import OPERATIONS
from sirtaki.runner.bench.peers import mpirun
from sirtaki.runner.launch.errors import LaunchError

Bench = Callable[..., subprocess.CompletedProcess[str]]
FEW = ("--rounds", "2")
TINY = ("-b", "8", "-e", "128K", "-f", "128", *FEW)


def has_mpi() -> bool:
    try:
        return bool(mpirun())
    except LaunchError:
        return False


@pytest.fixture
def bench(sirtaki: Bench) -> Bench:
    """Returns a function that runs the program, with more variables, and returns its output."""
    return functools.partial(sirtaki, "bench")


def in_ranks(folder: Path, text: str) -> dict[str, str]:
    """Returns variables with which ranks execute a text when Python starts."""
    inner = "\n".join(f"    {line}" for line in text.splitlines())
    (folder / "sitecustomize.py").write_text(f"import os\nif 'SIRTAKI_RANK' in os.environ:\n{inner}\n")
    return {"PYTHONPATH": str(folder)}


def settings(operation: str) -> tuple[str, ...]:
    """Returns options for a quick measurement."""
    return TINY if OPERATIONS[operation].has_size else FEW


def algorithm_of(operation: str, size: int) -> str:
    """Returns the algorithm that is expected for so many bytes among two ranks of a host."""
    if operation in ("broadcast", "allgather", "alltoall"):
        return "single copy" if size >= 64 << 10 and may_read_siblings() else ""
    return "whole" if operation == "allreduce" else ""


def check_rows(rows: list[dict[str, Any]], operation: str) -> None:
    sizes = [8, 1024, 128 << 10] if OPERATIONS[operation].has_size else [0]
    assert [row["size"] for row in rows] == sizes
    for row in rows:
        assert row["wrong"] == 0
        assert 0 < row["time_us"] <= row["p99_us"]
        assert (row["limit"] is None) == (row["size"] < 64 << 10)
        assert row["backend"] == ("shared memory" if row["size"] else "")
        assert row["algorithm"] == algorithm_of(operation, row["size"])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_measured_and_checked(operation: str, bench: Bench) -> None:
    done = bench(operation, "-np", "2", *settings(operation), "--json", "-")
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(done.stdout)
    assert (values["ranks"], values["operation"], values["wrong"]) == (2, operation, 0)
    check_rows(values["rows"], operation)


def test_links(bench: Bench) -> None:
    done = bench("link", "-np", "2", "-e", "64K", "--rounds", "2", "--json", "-")
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(done.stdout)
    assert (values["link_ranks"], values["size"], values["wrong"]) == ([0, 1], 64 << 10, 0)
    for matrix in (values["bytes_per_second"], values["latency_us"]):
        assert (matrix[0][0], matrix[1][1]) == (0.0, 0.0)
        assert matrix[0][1] > 0
        assert matrix[1][0] > 0


@pytest.mark.parametrize("peers", [(), pytest.param(("--peers", "gloo"), marks=pytest.mark.exhaustive)])
def test_steps(peers: tuple[str, ...], bench: Bench) -> None:
    pytest.importorskip("torch")
    done = bench("step", "-np", "2", "--rounds", "1", "--json", "-", *peers)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["model"] for row in rows] == ["linear", "transformer"]
    assert (rows[0]["tensors"], rows[0]["bytes"]) == (12, 6 * (1024 * 1024 + 1024) * 4)
    for row in rows:
        assert row["wrong"] == 0
        assert row["exchange_ms"] > 0
        assert all(ratio > 0 for ratio in row["peers"].values())
        assert ",".join(row["peers"]) == "".join(peers[1:])


def test_a_pipe_gets_plain_lines_and_files_are_written(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ("--plot", str(tmp_path / "a.svg"), "--json", str(tmp_path / "a.json"))
    done = bench("-np", "2", *TINY, *files, "-d", "float64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [line[:5] for line in lines] == [
        ["8", "1", "float64", "sum", "-1"],
        ["1024", "128", "float64", "sum", "-1"],
        ["131072", "16384", "float64", "sum", "-1"],
    ]
    assert "# Out of bounds values : 0 OK" in done.stdout
    check_rows(json.loads((tmp_path / "a.json").read_text())["rows"], "allreduce")
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_a_terminal_shows_progress_and_the_pipe_beside_it_all_lines(environment: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sirtaki", "bench", "-np", "2", *TINY]
    environment |= {"TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = read_terminal(ours)
        assert process.stdout is not None
        output = process.stdout.read().decode()
    os.close(ours)
    assert process.returncode == 0, shown
    assert b"starting ranks" in shown
    sizes = [line.split()[0] for line in output.splitlines() if not line.startswith("#")]
    assert sizes == ["8", "1024", "131072"]
    assert "\x1b" not in output


def test_three_ranks_beside_gloo(bench: Bench) -> None:
    pytest.importorskip("torch")
    done = bench(
        "alltoall", "-np", "3", "-b", "1K", "-e", "1K", "--rounds", "2", "--peers", "gloo", "--json", "-"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["size"], row["count"], row["wrong"]) == (1020, 85, 0)
    assert row["peers"]["gloo"]["wrong"] == 0
    assert row["peers"]["gloo"]["ratio"] > 0


@pytest.mark.parametrize(
    "operation", [pytest.param(name, marks=exhaustive_unless(name == "allreduce")) for name in OPERATIONS]
)
def test_all_peers_deliver_the_same_results(operation: str, bench: Bench) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("mpi4py")
    if not has_mpi():
        pytest.skip("there is no mpirun")
    done = bench(operation, "-np", "2", *settings(operation), "--peers", "gloo,mpi", "--json", "-")
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(done.stdout)
    check_rows(values["rows"], operation)
    for row in values["rows"]:
        assert {name: peer["wrong"] for name, peer in row["peers"].items()} == {"gloo": 0, "mpi": 0}


def test_planted_wrong_elements_are_counted(bench: Bench, tmp_path: Path) -> None:
    """Rank 1 delivers one wrong element in each checked call: two calls at each of two sizes."""
    planted = in_ranks(
        tmp_path,
        "import sirtaki.numpy as hvd\n"
        "right = hvd.allreduce_\n"
        "def allreduce_(array, **options):\n"
        "    right(array, **options)\n"
        "    if array.any() and hvd.rank() == 1:\n"
        "        array[-1] += 1\n"
        "    return array\n"
        "hvd.allreduce_ = allreduce_",
    )
    done = bench("-np", "2", "-b", "8", "-e", "1K", "-f", "128", "--rounds", "1", **planted)
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = [line.split()[8] for line in done.stdout.splitlines() if not line.startswith("#")]
    assert wrong == ["2", "2"]
    assert "# Out of bounds values : 4 FAILED" in done.stdout
    assert "# sirtaki has delivered 4 wrong elements" in done.stdout


def test_a_rank_that_dies_is_named(bench: Bench, tmp_path: Path) -> None:
    dying = in_ranks(
        tmp_path,
        "import signal, sirtaki.bench.patterns as patterns\n"
        "def die(self, result, count, rank):\n"
        "    if rank == 1:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return 0\n"
        "patterns.Patterns.count_wrong = die",
    )
    done = bench("-np", "2", *TINY, **dying)
    assert done.returncode == 2, done.stdout + done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("sirtaki bench: the ranks did not finish: ")
    assert "rank 1" in last
    assert "signal 9" in last


def test_hosts(hosts: Hosts, bench: Bench) -> None:
    hosts(hostB={})
    done = bench("-H", "localhost:1,hostB:1", *TINY, "--json", "-")
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(done.stdout)
    assert values["ranks"] == 2
    assert [row["wrong"] for row in values["rows"]] == [0, 0, 0]
    assert values["limit"].startswith("a plain copy")  # the stand-in is this machine


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("import time; time.sleep(60)", "the ranks have been silent for 1 s, and were ended"),
        ("print('@sirtaki-bench {')", "a message of rank 0 cannot be read: "),
        ("raise SystemExit(3)", "the ranks did not finish: their launcher ended with exit code 3"),
    ],
)
def test_ranks_that_do_not_answer(program: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "SILENCE_SECONDS", 0.5 if "sleep" in program else FAILSAFE_SECONDS)
    with pytest.raises(LaunchError, match=text):
        list(cli.messages([sys.executable, "-c", program], os.environ, blocks=2))
