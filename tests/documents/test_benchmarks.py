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
