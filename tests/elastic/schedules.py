"""Random schedules of losses and joins: the job has to end exactly.

At random moments, ranks are killed or asked to end, and others replace them. In each third job, a discovery
script also adds slots and takes them away. One of the first ranks is spared, so that the state is never lost;
that may be any of them.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic.running import (
    FAILSAFE_SECONDS,
    QUICK,
    Ended,
    HostScript,
    RunningJob,
    check_exact,
    check_replayed,
    command,
    running_job,
)

PAUSE_WITH_DISCOVERY = 0.01  # seconds, at least: the script is called once a second
POLL_SECONDS = 0.02
MOST_SECONDS = 15.0  # for some steps: none comes while there are too few slots


@dataclass(frozen=True)
class Training:
    """A program that schedules are run with.

    Attributes:
        program, arguments, environment: how a rank runs it.
        check: raises AssertionError if a job has not ended exactly; `spared` are workers that have to be
            among its results.
        most_ranks: at any time.
        pause: mean seconds of the pauses in each step.
        moments: scales of the random seconds between two faults; 0 waits for some steps instead.
        early: in one of so many schedules faults begin while the first ranks start, in others after a step.
        steps: it waits at a random one of so many until it has as many ranks as at the start, so that
            replacements join; 0 if its ranks start so fast that they do anyway.
        is_divided: whether ranks that are lost together may take the only copies of a part of the state with
            them, which ends the job by name.
    """

    program: str
    arguments: Sequence[int | float]
    check: Callable[[Ended, set[int]], None]
    environment: Mapping[str, str] = field(default_factory=dict)
    most_ranks: int = 3
    pause: float = 0.03
    moments: Sequence[float] = (0, 0.03, 0.5, 3.0)
    early: int = 5
    steps: int = 40
    is_divided: bool = False


def _check_replayed(samples: int, epochs: int, tolerance: float) -> Callable[[Ended, set[int]], None]:
    return lambda job, spared: check_replayed(job, samples, epochs, spared, tolerance)


def _keras(backend: str, tolerance: float) -> Training:
    check, environment = _check_replayed(50, 4, tolerance), {"KERAS_BACKEND": backend}
    return Training("keras_training.py", (50, 4), check, environment, steps=30)


TRAININGS = {
    "numpy": Training(
        "numpy_training.py",
        (600, 0),
        lambda job, spared: check_exact(job, 600, spared),
        most_ranks=4,
        pause=0.001,
        moments=(0.02, 0.2, 0.6),
        early=2,
        steps=0,
    ),
    "torch": Training("torch_training.py", (120,), _check_replayed(120, 1, 1e-9)),
    "tensorflow": Training("tensorflow_training.py", (40, 3), _check_replayed(40, 3, 1e-12)),
    "keras-tensorflow": _keras("tensorflow", 1e-12),
    # Keras computes parts of float64 models in float32: products of matrices on torch, tanh on JAX.
    "keras-torch": _keras("torch", 1e-6),
    "keras-jax": _keras("jax", 1e-6),
    "jax": Training("jax_training.py", (40, 3), _check_replayed(40, 3, 1e-12)),
}

TRAININGS |= {
    f"{name}-sharded": replace(
        training, environment={**training.environment, "SHARD": "state"}, is_divided=True
    )
    for name, training in TRAININGS.items()
    if name not in ("numpy", "tensorflow")
}


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


class Schedule:
    """One job with its faults, which a seed determines, apart from the speed of the machine."""

    def __init__(self, seed: int, training: Training, folder: Path) -> None:
        self._source = random.Random(seed)
        self._training = training
        self._size = self._source.randint(2, training.most_ranks)
        self.spared = self._source.randrange(self._size)
        self._script = HostScript(folder) if seed % 3 == 0 else None
        self._is_early = seed % training.early == 0
        self._folder = folder

    def run(self) -> Ended:
        """Runs the job to its end. Raises AssertionError if that takes minutes."""
        with running_job(self._folder, self._command(), **self._environment()) as job:
            try:
                self._disturb(job)
                return job.ended()
            except subprocess.TimeoutExpired:
                job.process.kill()
                raise AssertionError(f"it does not end\n{job.text}") from None

    def _command(self) -> list[str]:
        training = self._training
        options, arguments = ["-np", str(self._size), "--min-np", "1", *QUICK], list(training.arguments)
        if self._script is not None:
            self._script.name(f"localhost:{self._size}")
            options += ["--max-np", str(training.most_ranks), *self._script.options]
        return command(options, training.program, arguments)

    def _environment(self) -> dict[str, str]:
        training = self._training
        pause = training.pause if self._script is None else max(training.pause, PAUSE_WITH_DISCOVERY)
        own = {"TALK": "1", "PAUSE": str(pause), **training.environment}
        if training.steps:
            own["HOLD"] = f"{self._source.randint(1, training.steps)}:{self._size}"
        return own

    def _disturb(self, job: RunningJob) -> None:
        """Kills some of the ranks and changes the slots, at random moments."""
        source = self._source
        if self._is_early:
            self._wait_until(job, lambda: bool(workers_of(job.process)), FAILSAFE_SECONDS)
        else:
            self._wait_for_steps(job, source.randint(1, 5), FAILSAFE_SECONDS)
        for _ in range(source.randint(1, 6)):
            if moment := source.choice(self._training.moments):
                self._wait_until(job, lambda: False, moment * source.random() * 2)
            else:
                self._wait_for_steps(job, source.randint(1, 10), MOST_SECONDS)
            if self._script is not None:
                self._script.name(f"localhost:{source.randint(self.spared + 1, self._training.most_ranks)}")
            self._end_some(job)
        if self._script is not None:
            self._script.name(f"localhost:{self._size}")  # without which the job may not have begun

    def _wait_for_steps(self, job: RunningJob, count: int, most_seconds: float) -> None:
        """Waits until the ranks have taken so many further steps, or the job has ended."""
        wanted = last_step(job.text) + count
        self._wait_until(job, lambda: last_step(job.text) >= wanted, most_seconds)

    def _wait_until(self, job: RunningJob, is_true: Callable[[], bool], seconds: float) -> None:
        """Waits until something is true or the job has ended, at most for so long."""
        deadline = time.monotonic() + seconds
        while job.process.poll() is None and not is_true() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_SECONDS, left))

    def _end_some(self, job: RunningJob) -> None:
        """Kills one or two of the job's workers, or asks them to end."""
        source = self._source
        victims = [pid for number, pid in sorted(workers_of(job.process).items()) if number != self.spared]
        for pid in source.sample(victims, min(len(victims), source.choice((1, 1, 1, 2)))):
            try:
                os.kill(pid, source.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)))
            except ProcessLookupError:
                continue


def last_step(text: str) -> int:
    return max(map(int, re.findall(r"\bstep (\d+)\n", text)), default=0)


def run_schedule(seed: int, name: str = "numpy") -> Ended:
    """Runs a job of a training, kills ranks, and checks the result. Raises AssertionError with the seed."""
    training = TRAININGS[name]
    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(seed, training, Path(folder))
        try:
            job = schedule.run()
            if training.is_divided and "were on ranks that were lost together" in job.text:
                assert job.code == 1, job.text
                return job
            killed_late = "was lost after its training had ended" in job.text  # it then fails, exactly
            assert job.code == int(killed_late), job.text
            training.check(Ended(0, job.text, job.results), {schedule.spared})
            return job
        except AssertionError as error:
            raise AssertionError(f"schedule {seed} of {name}: {error}") from None
