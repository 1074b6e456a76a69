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

from sirtaki.bindings.recording_orders import parse_order, place_order, read_order
from sirtaki.bindings.watch_marks import INTERVAL_SECONDS, REMOTE, is_watched_for_now, watch_for_now
from sirtaki.runner.frames import NO_RANK, Frame, Kind, WireError

# Values of a state that stay on the rank's host, where its metrics are served.
_OF_METRICS = frozenset(
    ("by_backend", "wait", "transfer", "recoveries", "plans", "cache_hits", "cache_misses")
)
_SENT_ROWS = 8  # hosts to which a rank has sent the most


class RemoteStates:
    """The states of one host's ranks, on hvdrun's side."""

    def __init__(self, name: str, folder: Path, send: Callable[[Frame], None]) -> None:
        """`folder` is that of the states on this host."""
        self._prefix = name.replace("/", "_")
        self._folder = folder
        self._send = send
        self._last: dict[str, dict[str, Any]] = {}  # by file
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
                    self._send(Frame.of_values(Kind.ORDER, order._asdict()))
                self._number += 1
                self._asked = time.time()
                self._send(Frame.of_number(Kind.WATCH, NO_RANK, self._number))

    def take(self, frame: Frame) -> None:
        """Stores a state; that of an earlier question is too old. Raises WireError if it is malformed."""
        answer = frame.values
        if answer.get("number") != self._number:
            return
        try:
            values, process = dict(answer["values"]), answer["process"]
            pid, behind = int(values["pid"]), self._asked - answer["now"]
            values["time"] += behind
            values["look_seconds"] += time.time() - self._asked
            if process is not None:
                process["begin"] += behind
        except (KeyError, TypeError, ValueError, OverflowError):
            raise WireError(f"{frame.kind.name} is malformed") from None
        name = f"{self._prefix}-{pid}.json"
        self._last[name] = values
        self._store(name, process)

    def end(self) -> None:
        """Stores that no rank runs there any more."""
        for name in self._last:
            self._store(name, None)

    def _store(self, name: str, process: dict[str, Any] | None) -> None:
        folder, text = self._folder / REMOTE, json.dumps({**self._last[name], "process": process})
        with contextlib.suppress(OSError):  # such as a full disk: there will be another answer
            folder.mkdir(mode=0o700, exist_ok=True)
            fresh = folder / f"{name}.new"
            fresh.write_text(text)
            fresh.replace(folder / name)


def take_order(folder: Path, frame: Frame) -> None:
    """Has the ranks of this host record. Raises WireError if the order is malformed."""
    try:
        order = parse_order(frame.values)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise WireError(f"{frame.kind.name} is malformed") from None
    with contextlib.suppress(OSError):  # a full disk: these ranks will not answer
        watch_for_now(folder)
        place_order(folder, order)


def answers(folder: Path, number: int) -> Iterator[Frame]:
    """Yields the states of this host's ranks for a WATCH, and has the ranks go on writing them.

    `folder` is that of the states on this host. The ranks notice within a second that somebody watches.
    """
    from sirtaki.runner.states import read_states  # hvdrun needs none of it, nor do jobs that nobody watches

    with contextlib.suppress(OSError):  # a full disk
        watch_for_now(folder)
    for state in read_states(folder):
        process = state.process_state()._asdict() if state.process is not None else None
        answer: dict[str, Any] = {"number": number, "now": time.time()}
        values = {name: value for name, value in state.values.items() if name not in _OF_METRICS}
        values["sent"] = heapq.nlargest(_SENT_ROWS, values["sent"], key=lambda row: row["bytes"])
        yield Frame.of_values(Kind.STATE, {**answer, "values": values, "process": process})
