"""The metrics of an elastic job, while its ranks change."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from elastic.running import FAILSAFE_SECONDS, QUICK, command
from launching import wait_until
from scraping import ports_in, scrape

RECOVERY = "sirtaki_recovery_seconds"
PHASES = ("detect", "agree", "rebuild", "state", "first_step")
MANY = 100_000  # samples: minutes of training


def test_a_lost_rank_and_the_recovery_are_counted(tmp_path: Path) -> None:
    options = ("-np", "2", "--min-np", "1", "--metrics-port", "0", *QUICK)
    output = tmp_path / "output"
    with output.open("wb") as file:
        job = subprocess.Popen(
            command(options, "numpy_training.py", [MANY, 0.01, "1:step:3"]),
            env={**os.environ, "SIRTAKI_CPU_ALGORITHM": "direct"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )

    def has_recovered() -> bool:
        assert job.poll() is None, output.read_text()
        found = scrape(port)
        return (
            found.get(("sirtaki_ranks_lost_total", "0")) == 1
            and found["sirtaki_world_size", ""] == 2
            and found["sirtaki_generation", ""] >= 2
            and found["sirtaki_up", "0"] == found.get(("sirtaki_up", "1")) == 1
            and all(found[f"{RECOVERY}_bucket", f"+Inf {phase} 0"] >= 1 for phase in PHASES)
            and sum(found[f"{RECOVERY}_sum", f"{phase} 0"] for phase in PHASES) > 0
        )

    try:
        (port,) = ports_in(output)
        wait_until(has_recovered, "the loss was counted, and another rank has joined")
    finally:
        job.terminate()
        job.wait(FAILSAFE_SECONDS)
