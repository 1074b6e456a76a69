"""Runs elastic jobs for tests, and checks their results against a replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.programs.small_training import SmallTraining
from launching import FAILSAFE_SECONDS, wait_until

PROGRAMS = Path(__file__).parent / "programs"
QUICK = ("--blacklist-cooldown-range", "0.1", "0.1")  # replacements start at once
REPAIRS = ("arrays were not as on rank 0", "differed from rank 0's")  # hints of states after a change


@dataclass
class Ended:
    """A job that has ended."""

    code: int
    text: str  # hvdrun's standard output and error
    results: list[dict[str, Any]]  # one for each worker that has come to the end of the program


def command(options: Sequence[str], program: str, arguments: Sequence[str | int | float | Path]) -> list[str]:
    """Returns the command of a job."""
    return [
        *(sys.executable, "-m", "sirtaki.runner", *options),
        *(sys.executable, str(PROGRAMS / program), *map(str, arguments)),
    ]


def run_job(
    options: Sequence[str], program: str, *arguments: str | int | float | Path, **environment: str
) -> Ended:
    """Runs a job to its end; fails if that takes minutes."""
    done = subprocess.run(
        command(options, program, arguments),
        env={**os.environ, "SIRTAKI_CPU_ALGORITHM": "direct", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=FAILSAFE_SECONDS,
    )
    return Ended(done.returncode, done.stdout, results_in(done.stdout))


class RunningJob:
    """A job that a test disturbs while it runs. Its output goes to a file, which the test reads meanwhile."""

    def __init__(self, process: subprocess.Popen[Any], output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def text(self) -> str:
        return self._output.read_text(errors="replace")

    def says(self, text: str, times: int = 1) -> None:
        """Waits until the job has shown this text so often."""
        wait_until(
            lambda: self.text.count(text) >= times or self.process.poll() is not None, f"it says: {text}"
        )
        assert self.text.count(text) >= times, self.text

    def ended(self) -> Ended:
        """Waits for the end of the job."""
        code = self.process.wait(FAILSAFE_SECONDS)
        return Ended(code, self.text, results_in(self.text))


@contextmanager
def running_job(folder: Path, command: Sequence[str], **environment: str) -> Iterator[RunningJob]:
    """Starts the command of a job, with its output in this folder; ends it at the latest afterwards."""
    with open(folder / "output", "wb") as output:
        job = subprocess.Popen(
            command,
            env={**os.environ, "SIRTAKI_CPU_ALGORITHM": "direct", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield RunningJob(job, folder / "output")
    finally:
        job.terminate()
        job.wait(FAILSAFE_SECONDS)


class HostScript:
    """A host discovery script, whose answer a test changes."""

    def __init__(self, folder: Path, *names: str) -> None:
        self._answer, script = folder / "answer", folder / "discover.sh"
        self.name(*names)
        script.write_text(f"#!/bin/sh\nexec cat {self._answer}\n")
        script.chmod(0o755)
        self.options = ("--host-discovery-script", str(script))

    def name(self, *names: str) -> None:
        """Sets the hosts with their slots, of which no part can be read alone."""
        new = self._answer.with_suffix(".new")
        new.write_text("".join(f"{name}\n" for name in names))
        new.replace(self._answer)


def run_source(folder: Path, source: str, ranks: int = 2, options: Sequence[str] = ()) -> Ended:
    """Runs a job of so many ranks, whose program is this text, to its end."""
    program = folder / "train.py"
    program.write_text(source)
    return run_job(("-np", str(ranks), "--min-np", "1", *options), str(program))


def results_in(text: str) -> list[dict[str, Any]]:
    """Returns the results that workers have printed."""
    marked = [line.partition("RESULT ")[2] for line in text.splitlines() if "RESULT " in line]
    return [json.loads(line) for line in marked]


def check_exact(job: Ended, samples: int, workers: set[int]) -> None:
    """Checks that these workers have come to the end, with the replay's weights: each sample counts once."""
    assert job.code == 0, job.text
    assert {result["worker"] for result in job.results} >= workers, job.text
    sizes = job.results[0]["sizes"]
    assert all(result["sizes"] == sizes for result in job.results), job.text
    assert sum(sizes) == samples
    expected = SmallTraining(samples).replay(sizes)
    assert all(result["w"] == expected for result in job.results), job.text


def check_replayed(job: Ended, samples: int, epochs: int, workers: set[int], tolerance: float) -> None:
    """Checks that these workers have come to the end, equal to each other and close to the replay.

    Each sample counts once per epoch; the last step of an epoch may be filled up with some of them again. No
    rank may have needed a repair after a change.
    """
    assert job.code == 0, job.text
    assert not any(repair in job.text for repair in REPAIRS), job.text
    assert {result["worker"] for result in job.results} >= workers, job.text
    steps = job.results[0]["steps"]
    assert all(result["steps"] == steps for result in job.results), job.text
    assert len({result["digest"] for result in job.results}) == 1, job.text
    assert all(result["difference"] < tolerance for result in job.results), job.text
    for epoch in range(epochs):
        taken = [one for number, part in steps if number == epoch for one in part]
        last = [part for number, part in steps if number == epoch][-1]
        assert set(taken) == set(range(samples)), job.text
        assert len(taken) - samples < len(last), job.text
    assert steps[-1][0] == epochs - 1, job.text
