"""A job of spare_training.py that runs, and that a test disturbs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic.programs.small_training import SmallTraining
from elastic.running import Ended, RunningJob, command, running_job

SAMPLES = 20_000  # as in spare_training.py


class Running(RunningJob):
    """The job, whose folder is that of its files."""

    def __init__(self, process: subprocess.Popen[Any], folder: Path) -> None:
        super().__init__(process, folder / "output")
        self._folder = folder

    def wait_for_spares(self, host: str, times: int = 1) -> None:
        """Waits until so many spares of another host have imported their modules."""
        self.says(f" waits on {host}, with", times)

    def workers(self, slot: str = "localhost:1") -> list[int]:
        """Returns the pids of the workers in a slot, the oldest first."""
        return self._pids(rf"the worker in slot {slot} is pid (\d+)")

    def spares(self, host: str = "") -> list[int]:
        """Returns the pids of the spares here, or of those of another host."""
        return self._pids(rf"spare \d+ is pid (\d+){f' on {host}' if host else ''}\n")

    def end(self) -> Ended:
        """Lets the training end."""
        (self._folder / "end").touch()
        return self.ended()

    def ran(self) -> set[int]:
        """Returns the pids of the processes that have run the program."""
        return {int(path.name.partition("-")[2]) for path in self._folder.glob("ran-*")}

    def _pids(self, pattern: str) -> list[int]:
        return [int(pid) for pid in re.findall(pattern, self.text)]


@contextmanager
def running(
    folder: Path, options: Sequence[str], environment: Mapping[str, str] | None = None, size: int = 2
) -> Iterator[Running]:
    """Starts a job that ends with this number of ranks; ends it at the latest when the test has ended."""
    start = command(options, "spare_training.py", (str(folder), size))
    with running_job(folder, start, **(environment or {})) as job:
        yield Running(job.process, folder)


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
