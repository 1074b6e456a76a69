"""`sirtaki bench` and GPUs: which peers are measured, and the lines about those that cannot be."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tiers import exhaustive_unless

from sirtaki.bench import worker
from sirtaki.common import basics
from sirtaki.runner.bench.cli import command, make_plan, parser
from sirtaki.runner.bench.collective_report import CollectiveReport, Load
from sirtaki.runner.bench.messages import OWN, BenchWorld, Measurement, Plan, Timing
from sirtaki.runner.bench.operations import OPERATIONS

PLAN = Plan("allreduce", "float32", 1 << 20, 4 << 20, 4.0, 3, ["gloo"])
Command = Callable[..., CompletedProcess[str]]
FEW = ("-np", "2", "--rounds", "2")
TINY = (*FEW, "-b", "8", "-e", "1K", "-f", "128")


@pytest.mark.parametrize(
    ("arguments", "peers", "left_out", "meets_as_torch"),
    [
        (("--peers", "gloo,nccl"), ["gloo"], ["nccl"], True),
        (("--peers", "nccl"), [], ["nccl"], False),
        (("--peers", "gloo,nccl", "--device", "cuda"), ["nccl"], ["gloo"], True),
        (("--peers", "mpi,gloo", "--device", "cuda"), [], ["mpi", "gloo"], False),
    ],
)
def test_peers_of_another_device_are_left_out(
    arguments: tuple[str, ...],
    peers: list[str],
    left_out: list[str],
    meets_as_torch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    options = parser().parse_args(["-np", "2", *arguments])
    plan = make_plan(options)
    assert (plan.peers, list(plan.left_out)) == (peers, left_out)
    words = command(options, plan)
    assert ("--torch-env" in words) == meets_as_torch
    assert Path(words[0]).name != "mpirun"
    assert Plan.decode(words[-1]) == plan


def test_peers_that_the_ranks_cannot_measure_have_no_column() -> None:
    plan = replace(PLAN, peers=["gloo", "nccl"], device="cuda", left_out={"mpi": "it has no GPUs"})
    world = BenchWorld(2, {"a": 2}, 1, {OWN: "1"}, 0.0, 0, {"nccl": "a has 2 ranks and 1 GPUs"})
    found = CollectiveReport(plan, world, Load(0.0, 2))
    assert found.plan.peers == ["gloo"]
    head = list(found.head_lines())
    assert head[2:4] == ["# mpi is left out: it has no GPUs", "# nccl is left out: a has 2 ranks and 1 GPUs"]
    assert not any(re.search(r"\bnccl$", line) for line in head)
    timing = Timing(10.0, 11.0, (10.0,))
    list(found.take(Measurement(1 << 20, 1 << 18, {}, {OWN: timing, "gloo": timing})))
    assert found.rows[0].limit is None  # of GPUs it is not known
    assert json.loads(found.as_json())["left_out"].keys() == {"mpi", "nccl"}


@pytest.mark.parametrize(
    ("has_nccl", "gpus", "reason"),
    [
        (False, 2, "was built without NCCL"),
        (True, 1, "has 2 ranks and 1 GPUs, and NCCL takes one rank for each GPU"),
        (True, 2, ""),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank(
    has_nccl: bool, gpus: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(basics, "local_size", lambda: 2)
    monkeypatch.setattr(worker.hvd, "allgather_object", lambda one: ["", one])
    found = worker.unusable_peers(replace(PLAN, peers=["nccl"], device="cuda"))
    assert found.keys() == ({"nccl"} if reason else set())
    assert found.get("nccl", "").endswith(reason)
    assert worker.unusable_peers(PLAN) == {}


def test_a_peer_for_gpus_is_left_out_and_the_others_are_measured(sirtaki: Command) -> None:
    pytest.importorskip("torch")
    done = sirtaki("bench", *FEW, "-b", "8", "-e", "8", "--peers", "gloo,nccl")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    (line,) = (line for line in lines if "left out" in line)
    assert line == "# nccl is left out: it exchanges tensors on GPUs: --device cuda measures them"
    (row,) = (line.split() for line in lines if not line.startswith("#"))
    assert len(row) == 12  # the last one is gloo's
    assert float(row[-1]) > 0


def test_ranks_without_a_gpu_say_so_in_one_line(sirtaki: Command) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    done = sirtaki("bench", *TINY, "--device", "cuda", "--peers", "nccl")
    assert (done.returncode, done.stdout) == (2, "")
    why = r"(was built without CUDA|finds no CUDA device): leave out --device cuda"
    assert re.fullmatch(rf"sirtaki bench: torch \S+ on \S+ {why}", done.stderr.strip())


@pytest.mark.parametrize(
    "operation", [pytest.param(name, marks=exhaustive_unless(name == "alltoall")) for name in OPERATIONS]
)
def test_tensors_of_torch_have_the_same_results(operation: str, sirtaki: Command, tmp_path: Path) -> None:
    """On the CPU, as GPUs would be: sirtaki.torch instead of sirtaki.numpy."""
    pytest.importorskip("torch")
    planted = "import sirtaki.bench.implementations as them; del them._NUMPYS['sirtaki']"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nif 'SIRTAKI_RANK' in os.environ:\n    {planted}\n"
    )
    variables, sizes = {"PYTHONPATH": str(tmp_path)}, TINY if OPERATIONS[operation].has_size else FEW
    done = sirtaki("bench", operation, *sizes, "--json", "-", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(done.stdout)
    assert ", torch " in values["versions"]["sirtaki"]
    assert [row["wrong"] for row in values["rows"]] == [0] * (2 if OPERATIONS[operation].has_size else 1)
