"""A job of spare_training.py that runs, and that a test disturbs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from elastic.programs.small_training import SmallTraining
from elastic.running import FAILSAFE_SECONDS, Ended, command, results_in
from launching import wait_until

SAMPLES = 20_000  # as in spare_training.py


class Running:
    """The job, with its output so far."""

    def __init__(self, job: subprocess.Popen[bytes], folder: Path) -> None:
        self.job = job
        self.folder = folder

    @property
    def text(self) -> str:
        return (self.folder / "output").read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        wait_until(lambda: self.text.count(text) >= times or self.job.poll() is not None, text)
        assert self.text.count(text) >= times, self.text

    def wait_for_spares(self, host: str, times: int = 1) -> None:
        """Waits until so many spares of another host have imported their modules."""
        self.wait_for(f" waits on {host}, with", times)

    def workers(self, slot: str = "localhost:1") -> list[int]:
        """Returns the pids of the workers in a slot, the oldest first."""
        return self._pids(rf"the worker in slot {slot} is pid (\d+)")

    def spares(self, host: str = "") -> list[int]:
        """Returns the pids of the spares here, or of those of another host."""
        return self._pids(rf"spare \d+ is pid (\d+){f' on {host}' if host else ''}\n")

    def end(self) -> Ended:
        """Lets the training end."""
        (self.folder / "end").touch()
        return self.ended()

    def ended(self) -> Ended:
        code = self.job.wait(FAILSAFE_SECONDS)
        return Ended(code, self.text, results_in(self.text))

    def ran(self) -> set[int]:
        """Returns the pids of the processes that have run the program."""
        return {int(path.name.partition("-")[2]) for path in self.folder.glob("ran-*")}

    def _pids(self, pattern: str) -> list[int]:
        return [int(pid) for pid in re.findall(pattern, self.text)]


@contextmanager
def running(
    folder: Path, options: Sequence[str], environment: Mapping[str, str] | None = None, size: int = 2
) -> Iterator[Running]:
    """Starts a job that ends with this number of ranks; ends it at the latest when the test has ended."""
    with open(folder / "output", "wb") as output:
        job = subprocess.Popen(
            command(options, "spare_training.py", (str(folder), size)),
            env={**os.environ, "SIRTAKI_CPU_ALGORITHM": "direct", **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Running(job, folder)
    finally:
        job.terminate()
        job.wait(FAILSAFE_SECONDS)


def check_exact(ended: Ended, ranks: int) -> None:
    """Checks that so many ranks have come to the end, with the weights of a replay."""
    assert ended.code == 0, ended.text
    assert len(ended.results) == ranks, ended.text
    sizes = ended.results[0]["sizes"]
    expected = SmallTraining(SAMPLES).replay(sizes)
    for result in ended.results:
        assert result["sizes"] == sizes
        assert result["steps"] == len(sizes)
        assert result["w"] == expected
