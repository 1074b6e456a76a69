"""The metrics of an elastic job, while its ranks change."""

from __future__ import annotations

from pathlib import Path

from elastic.running import QUICK, command, running_job
from launching import wait_until
from scraping import ports_in, scrape

RECOVERY = "sirtaki_recovery_seconds"
PHASES = ("detect", "agree", "rebuild", "state", "first_step")
MANY = 100_000  # samples: minutes of training


def test_a_lost_rank_and_the_recovery_are_counted(tmp_path: Path) -> None:
    options = ("-np", "2", "--min-np", "1", "--metrics-port", "0", *QUICK)
    start = command(options, "numpy_training.py", [MANY, 0.01, "1:step:3"])

    def has_recovered() -> bool:
        assert job.process.poll() is None, job.text
        found = scrape(port)
        return (
            found.get(("sirtaki_ranks_lost_total", "0")) == 1
            and found["sirtaki_world_size", ""] == 2
            and found["sirtaki_generation", ""] >= 2
            and found["sirtaki_up", "0"] == found.get(("sirtaki_up", "1")) == 1
            and all(found[f"{RECOVERY}_bucket", f"+Inf {phase} 0"] >= 1 for phase in PHASES)
            and sum(found[f"{RECOVERY}_sum", f"{phase} 0"] for phase in PHASES) > 0
        )

    with running_job(tmp_path, start) as job:
        (port,) = ports_in(tmp_path / "output")
        wait_until(has_recovered, "the loss was counted, and another rank has joined")
