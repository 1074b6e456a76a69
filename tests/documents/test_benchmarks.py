"""The benchmarks run, check what they measure, and write what the tables are made of. No figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import PATIENCE

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str | Path) -> str:
    """What a benchmark prints; fails with that if it fails."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=2 * PATIENCE,
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

    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps({"collectives, 2 ranks": measured, "targets": measured["targets"]}))
    tables = run("tables.py", whole)
    assert tables.count("| alltoall | 1 KiB |") == 1


def test_leaders_spare_rank_0_frames_when_many_negotiate(tmp_path: Path) -> None:
    path = tmp_path / "negotiation.json"
    run("negotiation.py", "--ranks", "8", "64", "--tensors", "20", "--rounds", "1", "--json", path)
    found = {(row["ranks"], row["to"]): row for row in json.loads(path.read_text())["rows"]}
    assert len(found) == 4
    for step in ("first", "steady"):
        few, many = found[64, "leaders"][step], found[64, "rank 0"][step]
        assert (few["frames_in"], many["frames_in"]) == (14, 63)  # of seven leaders, and of its own host
        assert (few["frames_out"], many["frames_out"]) == (14, 63)
        assert few["bytes_in"] < many["bytes_in"]
        assert few["frames_of_all"] == many["frames_of_all"] == 2 * 63
        assert all(row[step]["latency"] > 0 and row[step]["processor"] > 0 for row in found.values())
        assert found[8, "leaders"][step]["frames_of_all"] == 2 * 7
    assert found[64, "leaders"]["steady"]["bytes_of_all"] < found[64, "leaders"]["first"]["bytes_of_all"]


def test_an_allreduce_between_two_hosts_is_measured_beside_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "between.json"
    run("between.py", "--sizes", "64K", "--set", "sockets_per_link=2", "--json", path)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["bytes"] == 65_536
    assert min(row["sirtaki"], row["stream"], *row["share"]) > 0
