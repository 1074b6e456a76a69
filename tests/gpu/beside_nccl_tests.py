"""Runs NVIDIA's all_reduce_perf, and prints its bus bandwidth beside that of benchmarks/nccl.py.

Usage: beside_nccl_tests.py NCCL_JSON
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from card import report, skip

PROGRAM = "all_reduce_perf"
SIZE, IN_PLACE_BUS_BANDWIDTH = 0, 11  # columns of its table


def bandwidths(text: str) -> dict[int, float]:
    """Returns the bus bandwidth of in-place all-reduces, in GB/s by size, from the program's output."""
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {int(row[SIZE]): float(row[IN_PLACE_BUS_BANDWIDTH]) for row in rows if len(row) > 12}


def measure(size: int, gpus: int) -> dict[int, float]:
    command = [PROGRAM, "-b", str(size), "-e", str(size), "-g", str(gpus)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return bandwidths(done.stdout)


def main() -> None:
    if shutil.which(PROGRAM) is None:
        skip(f"{PROGRAM} of nccl-tests is not on the PATH")
        return
    results = Path(sys.argv[1])
    if not results.exists():
        skip(f"there is no {results.name}, with which these figures are compared")
        return
    measured: dict[str, Any] = json.loads(results.read_text())
    for row in measured["rows"]:
        if (row["collective"], row["who"]) == ("allreduce", "sirtaki"):
            for size, theirs in measure(row["bytes"], measured["ranks"]).items():
                figures = f"{row['busbw']:.2f} GB/s, nccl-tests {theirs:.2f} GB/s"
                report(**{f"busbw_of_{size}_bytes": figures})


if __name__ == "__main__":
    main()
