"""Measures what the flight recorder, which is always on, costs an operation.

    python benchmarks/recorder.py

The cost covers everything that the core does to record an operation, from its submission to its end,
including the statistics and the reading of clocks. It is measured for steps of one operation, and of 400 in
one plan.
"""

from __future__ import annotations

import json
import subprocess

from common import native
from common.report import show_machine

SECONDS = 120


def main() -> None:
    show_machine()
    program = native.build() / "recorder"
    done = subprocess.run([program], stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    for step, cost in json.loads(done.stdout).items():
        print(f"{step:>16}: {cost:6.1f} ns an operation")


if __name__ == "__main__":
    main()
