"""This user's jobs on this host, found by their private folders, and the snapshots of a job."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from sirtaki.bindings.observing.ownership import held_folder
from sirtaki.bindings.observing.watch_marks import FOLDER, watch_for_now
from sirtaki.runner.launch.errors import LaunchError, explained
from sirtaki.runner.observe.state_shape import RankSample
from sirtaki.runner.observe.states import RankState, read_job
from sirtaki.runner.top.snapshot import Snapshot

INTERVAL_SECONDS = 1.0  # the ranks write as often
_FIRST_SECONDS = 5.0  # in which every rank that can write its state has written it
_NEXT_SECONDS = 3.0
_LOOK_SECONDS = 0.05


class WatchedJob:
    """A job with ranks on this host; its ranks write states for as long as it is watched."""

    def __init__(self, folder: Path) -> None:
        """Raises LaunchError if the folder has gone, is another user's, or cannot be written to."""
        self.folder = folder
        self._since = time.time()
        try:
            self._states = held_folder(folder, self) / FOLDER
            os.lstat(folder / "key")
        except PermissionError:
            raise LaunchError(f"the job of {folder} belongs to another user: watch it as that user") from None
        except OSError as error:
            raise LaunchError(f"the job of {folder} cannot be watched: {error.strerror}") from None
        self.watch()

    def watch(self) -> None:
        """Asks the ranks for their states for some more seconds. Raises LaunchError."""
        with explained(f"the job of {self.folder} cannot be watched"):
            watch_for_now(self._states)

    @property
    def is_over(self) -> bool:
        return not self.folder.exists()

    def snapshot(self) -> Snapshot:
        """Returns the ranks' last states. Missing are ranks that have written none, or that were lost before
        the newest world began.
        """
        found = [_sample_of(state) for state in read_job(self._states)]
        newest = max((sample.generation for sample in found), default=0)
        ranks = tuple(sample for sample in found if sample.is_up or sample.generation == newest)
        return Snapshot(time.time(), self._since, self.folder.name, ranks)

    def next_snapshot(self, before: Snapshot | None) -> Snapshot:
        """Returns a snapshot once all ranks that can have written newer states, or after some seconds."""
        moments = {} if before is None else {rank.place: rank.time for rank in before.ranks}
        end = time.monotonic() + (_FIRST_SECONDS if before is None else _NEXT_SECONDS)
        while True:
            found = self.snapshot()
            if found.is_newer_than(moments) or time.monotonic() > end or self.is_over:
                return found
            time.sleep(_LOOK_SECONDS)

    def snapshots(self) -> Iterator[Snapshot]:
        """Yields a snapshot per second until the job is over; the last may have no ranks."""
        snapshot: Snapshot | None = None
        while snapshot is None or not self.is_over:
            snapshot = self.next_snapshot(snapshot)
            yield snapshot
            time.sleep(INTERVAL_SECONDS)
            with contextlib.suppress(LaunchError):  # it has ended meanwhile
                self.watch()


def find_job(text: str | None) -> WatchedJob:
    """Returns the job of a folder, or of a process: a rank or its hvdrun.

    Without a text it is the only job. Raises LaunchError if there is none, or several.
    """
    if text is not None and not text.isdecimal():
        if not (Path(text) / "key").is_file():
            advice = _advice(_folders_of(psutil.process_iter()))
            raise LaunchError(f"{text} is no folder of a job that runs on this host: {advice}")
        return WatchedJob(Path(text).absolute())
    if text is not None:
        folders = _folders_of(_with_children(int(text)))
        if not folders:
            advice = _advice(_folders_of(psutil.process_iter()))
            raise LaunchError(f"process {text} has no ranks of a job on this host: {advice}")
        return WatchedJob(folders[0])
    folders = _folders_of(psutil.process_iter())
    if not folders:
        raise LaunchError("no job of yours has ranks on this host. Start one with hvdrun, then look again")
    if len(folders) > 1:
        raise LaunchError(f"several jobs have ranks on this host: {_advice(folders)}")
    return WatchedJob(folders[0])


def _folders_of(processes: Iterable[psutil.Process]) -> list[Path]:
    """Returns the private folders of the jobs to which processes of this user belong, as ranks of hvdrun."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if process.uids().real != os.getuid():
                continue
            variables = process.environ()
            if variables.get("SIRTAKI_LAUNCHER") == "hvdrun" and (key := variables.get("SIRTAKI_KEY_FILE")):
                found.add(Path(key).parent)
    return sorted(folder for folder in found if (folder / "key").is_file())


def _with_children(pid: int) -> list[psutil.Process]:
    """Returns a process and its children; nothing if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children()]
    except psutil.Error:
        return []


def _advice(folders: Iterable[Path]) -> str:
    found = [f"sirtaki top {folder}" for folder in folders]
    return f"choose one: {'; '.join(found)}" if found else "there is none"


def _sample_of(state: RankState) -> RankSample:
    names = RankSample.__dataclass_fields__
    own = {name: state.values[name] for name in names if name in state.values}
    return RankSample(**own, is_up=state.is_up, **state.process_state()._asdict())
