"""The states of ranks on other hosts: hvdrun asks the agents for them once a second while somebody watches.

hvdrun stores them beside those of its own host, so `sirtaki top` and the page show all. Their times are
converted to its clock. A state was written between two moments of that clock, those of the question and of
the answer; the earlier one counts, and the rest is added to the time that the rank's look has taken.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind
from sirtaki.bindings.observing.watch_marks import (
    INTERVAL_SECONDS,
    REMOTE,
    is_watched_for_now,
    parse_order,
    place_order,
    read_order,
    replace_file,
    watch_for_now,
)

_SENT_ROWS = 8  # hosts to which a rank has sent the most
_MOST_FILES = 2048  # of a host, for processes that have been ranks there; the oldest ones are removed
_MOST_BYTES = 64 << 20  # of these files


class RemoteStates:
    """The states of a host's ranks, on hvdrun's side."""

    def __init__(self, name: str, folder: Path, send: Callable[[Frame], None]) -> None:
        """`folder` is that of the states on this host."""
        self._prefix = name.replace("/", "_")
        self._folder = folder
        self._send = send
        self._sizes: dict[str, int] = {}  # of the files that are stored, the oldest first
        self._number = 0  # of the last question
        self._asked = 0.0  # when it was sent, in Unix time
        self._ordered = 0  # the number of the last order for a recording
        self.due = time.monotonic()  # when to look again whether somebody watches

    def poll(self, now: float) -> None:
        """Asks for the states, and passes orders for recordings on, if somebody watches."""
        if self.due <= now:
            self.due = now + INTERVAL_SECONDS
            if is_watched_for_now(self._folder):
                if order := read_order(self._folder, self._ordered):
                    self._ordered = order.number
                    self._send(Frame.of(MessageKind.ORDER, order._asdict()))
                self._number += 1
                self._asked = time.time()
                self._send(Frame(MessageKind.WATCH, number=self._number))

    def take(self, frame: Frame) -> None:
        """Stores a state; that of an earlier question is too old. Raises WireError if it is malformed."""
        from sirtaki.runner.observe.state_shape import moment, process_shape, remote_state  # if watched

        answer = frame.values
        if not self._number or answer.get("number") != self._number:
            return
        try:
            values = remote_state(answer.get("values"))
            process = answer.get("process")
            process = None if process is None else process_shape(process)
            behind = self._asked - moment(answer.get("now"))
        except ValueError as error:
            raise frame.malformed(error) from None
        values["time"] += behind
        values["look_seconds"] += time.time() - self._asked
        if process is not None:
            process["begin"] += behind
        self._store(f"{self._prefix}-{values['pid']}.json", {**values, "process": process})

    def end(self) -> None:
        """Stores that no rank runs there any more."""
        for name in list(self._sizes):
            with contextlib.suppress(OSError, ValueError):  # another process has changed it
                values = json.loads((self._folder / REMOTE / name).read_text())
                self._store(name, {**values, "process": None})

    def _store(self, name: str, values: dict[str, Any]) -> None:
        folder, text = self._folder / REMOTE, json.dumps(values)
        with contextlib.suppress(OSError):  # such as a full disk: there will be another answer
            folder.mkdir(mode=0o700, exist_ok=True)
            replace_file(folder / name, text)
            self._sizes.pop(name, None)
            self._sizes[name] = len(text)
            while len(self._sizes) > _MOST_FILES or sum(self._sizes.values()) > _MOST_BYTES:
                oldest = next(iter(self._sizes))
                del self._sizes[oldest]
                (folder / oldest).unlink(missing_ok=True)


def take_order(folder: Path, frame: Frame) -> None:
    """Places an order for this host's ranks to record. Raises WireError if it is malformed."""
    try:
        order = parse_order(frame.values)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise frame.malformed() from None
    with contextlib.suppress(OSError):  # a full disk: these ranks will not answer
        watch_for_now(folder)
        place_order(folder, order)


def answers(folder: Path, number: int) -> Iterator[Frame]:
    """Yields the states of this host's ranks for a WATCH, and has the ranks go on writing them.

    `folder` is that of the states on this host. The ranks notice within a second that somebody watches.
    """
    from sirtaki.runner.observe.state_shape import OF_METRICS  # a job that nobody watches needs none of it
    from sirtaki.runner.observe.states import read_states

    with contextlib.suppress(OSError):  # a full disk
        watch_for_now(folder)
    for state in read_states(folder):
        process = state.process_state()._asdict() if state.process is not None else None
        answer: dict[str, Any] = {"number": number, "now": time.time()}
        values = {name: value for name, value in state.values.items() if name not in OF_METRICS}
        values["sent"] = heapq.nlargest(_SENT_ROWS, values["sent"], key=lambda row: row["bytes"])
        yield Frame.of(MessageKind.STATE, {**answer, "values": values, "process": process})
