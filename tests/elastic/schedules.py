"""Random schedules of losses and joins: the job has to end exactly.

At random moments, ranks are killed or asked to end, and others replace them. In each third job, a discovery
script also adds slots and takes them away. One of the first ranks is spared, so that the state is never lost;
that may be any of them.
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
MOST_RANKS = 4
PAUSE = 0.002  # seconds after each step
PAUSE_WITH_DISCOVERY = 0.02  # the script is called once a second


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


class Discovery:
    """A discovery script whose answer a schedule changes: the number of slots of this host."""

    def __init__(self, folder: Path) -> None:
        self._answer = folder / "answer"
        self.script = folder / "discover"
        self.script.write_text(f"#!/bin/sh\ncat {self._answer}\n")
        self.script.chmod(0o755)

    def set_slots(self, count: int) -> None:
        """Sets the answer, of which no part can be read alone."""
        new = self._answer.with_suffix(".new")
        new.write_text(f"localhost:{count}\n")
        new.replace(self._answer)


def run_schedule(seed: int) -> None:
    """Runs a job, kills ranks, and checks the result. Raises AssertionError with the seed."""
    source = random.Random(seed)
    size = source.randint(2, MOST_RANKS)
    spared = source.randrange(size)
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "output"), "w+") as output:
        discovery, options, pause = None, ["-np", str(size), "--min-np", "1", *QUICK], PAUSE
        if seed % 3 == 0:
            discovery, pause = Discovery(Path(folder)), PAUSE_WITH_DISCOVERY
            discovery.set_slots(size)
            options += ["--max-np", str(MOST_RANKS), "--host-discovery-script", str(discovery.script)]
        job = subprocess.Popen(
            command(options, "numpy_training.py", (SAMPLES, pause)),
            env={**os.environ, "SIRTAKI_CPU_ALGORITHM": "direct"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            for _ in range(source.randint(1, 6)):
                time.sleep(source.choice((0.02, 0.2, 0.6)) * source.random() * 2)
                if discovery is not None:
                    discovery.set_slots(source.randint(spared + 1, MOST_RANKS))
                _end_some(job, source, spared)
            if discovery is not None:
                discovery.set_slots(size)  # without which the job may not have begun
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


def _end_some(job: subprocess.Popen[bytes], source: random.Random, spared: int) -> None:
    """Kills one or two of the job's workers, or asks them to end."""
    victims = [pid for number, pid in sorted(workers_of(job).items()) if number != spared]
    for pid in source.sample(victims, min(len(victims), source.choice((1, 1, 1, 2)))):
        try:
            os.kill(pid, source.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)))
        except ProcessLookupError:
            continue
