"""The metrics of an elastic job, while its ranks change."""

from __future__ import annotations

import os
import subprocess

import pytest
from elastic.running import FAILSAFE_SECONDS, QUICK, command
from launching import wait_until
from scraping import Samples, free_port, scrape

PHASES = ("detect", "agree", "rebuild", "state", "first_step")
MANY = 100_000  # samples: minutes of training


@pytest.mark.full
def test_a_lost_rank_and_the_recovery_are_counted() -> None:
    port = free_port()
    options = ("-np", "2", "--min-np", "1", "--metrics-port", str(port), *QUICK)
    job = subprocess.Popen(
        command(options, "numpy_training.py", [MANY, 0.01, "1:step:3"]),
        env={**os.environ, "SIRTAKI_CPU_ALGORITHM": "direct"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    found: Samples = {}

    def has_recovered() -> bool:
        assert job.poll() is None, "the job has ended"
        found.clear()
        found.update(scrape(port))
        return (
            found.get(("sirtaki_ranks_lost_total", "0")) == 1 and found.get(("sirtaki_world_size", "")) == 2
        )

    try:
        wait_until(has_recovered, "the loss was counted, and another rank has joined")
        assert found["sirtaki_generation", ""] >= 2
        assert found["sirtaki_up", "0"] == found["sirtaki_up", "1"] == 1
        for phase in PHASES:
            assert found["sirtaki_recovery_seconds_bucket", f"+Inf {phase} 0"] >= 1
            assert found["sirtaki_recovery_seconds_sum", f"{phase} 0"] >= 0
    finally:
        job.terminate()
        job.wait(FAILSAFE_SECONDS)
