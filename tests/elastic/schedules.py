"""Random schedules of losses: kills ranks of a job, at random moments; the job has to end exactly.

One of the first ranks is spared, so that the state is never lost; that may be any of them.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from elastic.running import FAILSAFE_SECONDS, QUICK, Ended, check_exact, command, results_in

SAMPLES = 600
PAUSE = 0.002  # seconds after each step


def workers_of(job: subprocess.Popen[bytes]) -> dict[int, int]:
    """Returns the processes of a job's workers, by their numbers."""
    found = {}
    try:
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    except FileNotFoundError:
        return {}
    for pid in children:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        for variable in variables:
            if variable.startswith(b"SIRTAKI_WORKER="):
                found[int(variable.partition(b"=")[2])] = int(pid)
    return found


def run_schedule(seed: int) -> None:
    """Runs a job, kills ranks, and checks the result. Raises AssertionError with the seed."""
    source = random.Random(seed)
    size = source.randint(2, 4)
    spared = source.randrange(size)
    options = ("-np", str(size), "--min-np", "1", *QUICK)
    with tempfile.TemporaryFile("w+") as output:
        job = subprocess.Popen(
            command(options, "numpy_training.py", (SAMPLES, PAUSE)),
            env={**os.environ, "SIRTAKI_CPU_ALGORITHM": "direct"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            for _ in range(source.randint(1, 6)):
                time.sleep(source.choice((0.02, 0.2, 0.6)) * source.random() * 2)
                victims = [pid for number, pid in sorted(workers_of(job).items()) if number != spared]
                for pid in source.sample(victims, min(len(victims), source.choice((1, 1, 1, 2)))):
                    try:
                        os.kill(pid, source.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV)))
                    except ProcessLookupError:
                        continue
            job.wait(FAILSAFE_SECONDS)
        finally:
            job.kill()
        output.seek(0)
        text = output.read()
    killed_late = "was lost after its training had ended" in text  # the job then fails, with exact results
    try:
        assert job.returncode == int(killed_late), text
        check_exact(Ended(0, text, results_in(text)), SAMPLES, {spared})
    except AssertionError as error:
        raise AssertionError(f"schedule {seed}: {error}") from None
