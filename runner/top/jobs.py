"""The jobs of this user on this host, found by their private folders, and the snapshots of one of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from sirtaki.bindings.state_file import FOLDER, FOR_NOW
from sirtaki.runner.errors import LaunchError
from sirtaki.runner.job_directory import PREFIX, parents
from sirtaki.runner.states import RankState, read_states
from sirtaki.runner.top.snapshot import RankSample, Snapshot

_FIRST_SECONDS = 3.0  # in which every rank that can write its state has written it
_LOOK_SECONDS = 0.05


class Job:
    """A job with ranks on this host, whose states are written from now on, for as long as it is watched."""

    def __init__(self, folder: Path) -> None:
        """Raises LaunchError if the folder has gone, or cannot be written to."""
        self.folder = folder
        self._states = folder / FOLDER
        self.watch()

    def watch(self) -> None:
        """Asks the ranks for their states for some more seconds. Raises LaunchError."""
        try:
            self._states.mkdir(mode=0o700, exist_ok=True)
            (self._states / FOR_NOW).touch()
        except OSError as error:
            raise LaunchError(f"the job of {self.folder} cannot be watched: {error.strerror}") from None

    @property
    def is_over(self) -> bool:
        return not self.folder.exists()

    def snapshot(self) -> Snapshot:
        """Returns the ranks' last states. Missing are ranks that have written none, or that were lost before
        the newest world began.
        """
        found = [_sample_of(state) for state in read_states(self._states)]
        newest = max((one.generation for one in found), default=0)
        ranks = tuple(one for one in found if one.is_up or one.generation == newest)
        return Snapshot(time.time(), self.folder.name, ranks)

    def first_snapshot(self) -> Snapshot:
        """Waits until all ranks have written their states, or some seconds have passed."""
        end = time.monotonic() + _FIRST_SECONDS
        while True:
            found = self.snapshot()
            if found.is_complete or time.monotonic() > end or self.is_over:
                return found
            time.sleep(_LOOK_SECONDS)


def find_job(text: str | None) -> Job:
    """Returns the job that a folder, or the process of one of its ranks or of its hvdrun, belongs to.

    Without a text it is the only job. Raises LaunchError if there is none, or several.
    """
    if text is not None and not text.isdecimal():
        folder = Path(text)
        if not (folder / "key").is_file():
            raise LaunchError(f"{text} is no folder of a job that runs on this host: {_advice(_folders())}")
        return Job(folder.absolute())
    folders = list(_folders())
    if text is not None:
        folders = [folder for folder in folders if _belongs_to(int(text), folder)]
    if len(folders) == 1:
        return Job(folders[0])
    if text is not None:
        raise LaunchError(f"process {text} is no rank of a job on this host: {_advice(_folders())}")
    if not folders:
        raise LaunchError("no job of yours has ranks on this host. Start one with hvdrun, then look again")
    raise LaunchError(f"several jobs have ranks on this host: {_advice(folders)}")


def _folders() -> Iterator[Path]:
    """Yields the private folders of this user's jobs on this host."""
    for parent in parents():
        for folder in sorted(Path(parent).glob(f"{PREFIX}*")):
            with contextlib.suppress(OSError):
                if (folder / "key").stat().st_uid == os.getuid():
                    yield folder


def _advice(folders: Iterator[Path] | Sequence[Path]) -> str:
    found = [f"sirtaki top {folder}" for folder in folders]
    return f"choose one: {'; '.join(found)}" if found else "there is none"


def _belongs_to(pid: int, folder: Path) -> bool:
    """Returns whether a process is a rank of a folder's job, or its hvdrun: their environment, or their
    children's, names the folder's key.
    """
    wanted = str(folder / "key")
    try:
        process = psutil.Process(pid)
        return any(one.environ().get("SIRTAKI_KEY_FILE") == wanted for one in (process, *process.children()))
    except psutil.Error:
        return False


def _sample_of(state: RankState) -> RankSample:
    values, process = state.values, state.process
    cpu_seconds, memory, is_stopped = 0.0, 0, False
    if process is not None:
        with contextlib.suppress(psutil.Error), process.oneshot():
            times = process.cpu_times()
            cpu_seconds, memory = times.user + times.system, process.memory_info().rss
            is_stopped = process.status() == psutil.STATUS_STOPPED
    names = RankSample.__dataclass_fields__
    own = {name: values[name] for name in names if name in values}
    return RankSample(
        **own, is_up=state.is_up, is_stopped=is_stopped, cpu_seconds=cpu_seconds, memory_bytes=memory
    )
