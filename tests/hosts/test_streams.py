"""The comparison of streams between hosts with and without MSG_ZEROCOPY."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from launching import FAILSAFE_SECONDS

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "zero_copy.py"


def test_streams_with_and_without_copies_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "streams.json"
    words = ["--rounds", "2", "--connections", "1", "2", "--megabytes", "4", "--json", path]
    done = subprocess.run(
        [sys.executable, BENCHMARK, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=FAILSAFE_SECONDS,
    )
    assert done.returncode == 0, done.stdout
    rows = json.loads(path.read_text())["rows"]
    assert [row["connections"] for row in rows] == [1, 2]
    for row in rows:
        assert min(row["plain"], row["zero_copy"], row["plain_processor"], row["zero_copy_processor"]) > 0
        assert 0 <= row["copied"] <= 1
        assert 0 < row["calls"] < 1
