"""Writes a rank's state once a second to a file, while somebody watches the job: `sirtaki top`, Prometheus.

One thread of each rank that hvdrun has started does it. It looks once a second whether the job's private
folder on this host has a folder `states` with a mark of a watcher, and reads the core's counters as
`hvd.stats()` does: no call of the program becomes slower. The file is replaced as a whole, so that no reader
sees a part.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sirtaki.bindings.context import Context, process
from sirtaki.bindings.library import call, lib
from sirtaki.bindings.observing.observe import activity, slowest_tensors, statistics
from sirtaki.bindings.observing.ownership import held_folder, others_can_write
from sirtaki.bindings.observing.user_code import frame_of_main_thread, line_of, stack_of
from sirtaki.bindings.observing.watch_marks import (
    ANSWER,
    FOLDER,
    INTERVAL_SECONDS,
    RECORDER,
    Order,
    is_watched,
    read_order,
    replace_file,
)

_COUNTERS = (
    *("operations", "failed", "plans", "bytes", "by_backend", "sent", "cache_hits", "cache_misses"),
    *("waiting_seconds", "moving_seconds", "wait", "transfer", "stalls", "steps"),
)
_PHASES = ("detect", "agree", "rebuild", "state", "first_step")
_JOIN_SECONDS = 1.0
_TENSORS = 10  # the slowest ones, as many of them as fit into so many bytes
_TENSOR_BYTES = 900


class StateWriter:
    """The state-writing thread of a process, and its file."""

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._folder = folder
        self._file = folder / f"{os.getpid()}.json"
        self._last: dict[str, Any] = {}
        self._recordings = Recordings(folder)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sirtaki state", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread before the interpreter does. A forked child has none."""
        if os.getpid() != self._pid:
            return
        self._end.set()
        self._thread.join(_JOIN_SECONDS)
        self._recordings.stop()

    def _run(self) -> None:
        while not self._end.is_set():
            with contextlib.suppress(Exception):  # such as a full disk: there will be another time
                if is_watched(self._folder):
                    self._write()
            self._end.wait(INTERVAL_SECONDS)

    def _write(self) -> None:
        context = process.context
        is_member = context is not None and not context.is_provisional
        begin = time.time()
        if context is not None and is_member:
            self._last = _values_of(context)
            self._recordings.look(context)
        elif not self._last:
            return  # this process was not a rank yet
        times = {"time": begin, "look_seconds": time.time() - begin}
        answer = {ANSWER: self._recordings.answer} if self._recordings.answer else {}
        replace_file(self._file, json.dumps({**self._last, "is_member": is_member, **times, **answer}))


def start_of_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Starts this process's thread if hvdrun has started it and the thread does not run yet."""
    if environment.get("SIRTAKI_LAUNCHER") == "hvdrun" and (key := environment.get("SIRTAKI_KEY_FILE")):
        _start(Path(key).parent, os.getpid())


@cache
def _start(job_folder: Path, pid: int) -> None:
    """Starts the thread once per process: a forked child has none, and may become a rank of its own."""
    try:
        writer = StateWriter(held_folder(job_folder) / FOLDER)
    except OSError:  # a program that cleans temporary files has removed it: nobody watches the job there
        return
    writer.start()
    atexit.register(writer.stop)


def _values_of(context: Context) -> dict[str, Any]:
    counted: Mapping[str, Any] = {**statistics(context)}
    late = counted["lateness"][counted["rank"]]
    survivors = context.survivors
    membership = survivors.membership if survivors is not None else None
    changes = counted["changes"]
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "rank": counted["rank"],
        "size": counted["size"],
        "generation": membership.generation if membership is not None else 1,
        **{name: counted[name] for name in _COUNTERS},
        "activity": activity(context),
        "tensors": _tensors(context),
        "line": line_of(frame := frame_of_main_thread()),
        "stack": stack_of(frame),
        "late_times": late["times"],
        "late_seconds": late["times"] * late["mean_seconds"],
        "last_change": changes[-1]["reason"] if changes else "",
        "ranks_lost": sum(len(change["lost"]) for change in changes),
        "recoveries": {phase: _seconds_of(phase, changes) for phase in _PHASES if membership},
    }


def _tensors(context: Context) -> list[list[Any]]:
    """Returns rows of the slowest tensors, as `runner.top.snapshot.RankSample.tensors` documents them."""
    rows: list[list[Any]] = []
    for times in slowest_tensors(context, _TENSORS):
        seconds = (times["exposed_seconds"], times["wait_seconds"], times["transfer_seconds"])
        row = [times["name"], times["operations"], *(duration and round(duration, 5) for duration in seconds)]
        if len(json.dumps([*rows, row])) > _TENSOR_BYTES:
            break
        rows.append(row)
    return rows


def _seconds_of(phase: str, changes: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the duration of a phase in each change; omits changes in which the phase is not over yet."""
    found = [change[f"{phase}_seconds"] for change in changes]
    return [seconds for seconds in found if seconds is not None]


# ---- The recordings of a rank, made in a thread of their own when a watcher orders them ----------------


MAX_BYTES = 64 << 20  # of a timeline, which ends when it is larger
_CHECK_SECONDS = 0.1  # between two looks at its size


class Recordings:
    """The recordings of this process; a single recording runs at a time.

    Attributes:
        answer: what has become of the last order; None if there was none.
    """

    def __init__(self, states: Path) -> None:
        """`states` is the folder with the orders."""
        self.answer: dict[str, Any] | None = None
        self._states = states
        self._last = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_recording(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def look(self, context: Context) -> None:
        """Starts the recording that was ordered since the last call, if any."""
        if self.is_recording:
            return
        order = read_order(self._states, self._last)
        if order is not None:
            self._last = order.number
            arguments = (context, order)
            self._thread = threading.Thread(
                target=self._record, args=arguments, name="sirtaki recording", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Ends the recording in progress."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def _record(self, context: Context, order: Order) -> None:
        file, note, error = order.file_of(context.rank), "", ""
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(file.parent)
            if order.action == RECORDER:
                call(lib.srt_write_recorder, context.pointer, os.fsencode(file))
            elif context.timeline.start(context, str(file), mark_decisions=False, unless_running=True):
                note = self._watch_timeline(context, file, order.seconds)
            else:
                error = f"a timeline is being written already, to {context.timeline.path}"
        except Exception as problem:  # the job goes on, whatever prevents a recording
            error = str(problem)
        self.answer = {"number": order.number, "file": str(file), "note": note, "error": error}

    def _watch_timeline(self, context: Context, file: Path, seconds: float) -> str:
        """Ends the timeline after some seconds; returns a note if it has ended before."""
        begin = time.monotonic()
        reason = ""
        try:
            while not reason and (left := begin + seconds - time.monotonic()) > 0:
                if self._end.wait(min(left, _CHECK_SECONDS)) or context.is_shut_down:
                    reason = "the rank has left its world"
                elif context.timeline.path != str(file):
                    reason = "the program has started or stopped a timeline"
                elif _size_of(file) >= MAX_BYTES:
                    reason = f"its file has reached {MAX_BYTES >> 20} MiB"
        finally:
            context.timeline.stop(context, str(file))
        return f"its timeline ended after {time.monotonic() - begin:.1f} s: {reason}" if reason else ""


def _check_private(folder: Path) -> None:
    """Raises OSError unless the folder is this user's, so that nobody else has put links there."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or others_can_write(status):
        raise OSError(f"{folder} is not a folder of this user's own, or others may write to it")


def _size_of(file: Path) -> int:
    with contextlib.suppress(OSError):  # somebody has removed it
        return file.stat().st_size
    return 0
