"""Hosts that hvdrun reaches over the agent of another host: hvdrun's side of `relays`."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Sequence
from typing import Protocol

from sirtaki.runner.frames import Frame, Kind, WireError
from sirtaki.runner.outgoing import Outgoing

_READ_BYTES = 64 * 1024
_MAX_BACKLOG = 1024 * 1024  # bytes that wait for a reader; while there are more, nothing is read
_LOST = 255  # as ssh's exit code when a connection breaks


class AgentProcess(Protocol):
    """A process of ssh or srun, here or on another host."""

    def poll(self) -> tuple[int, int] | None:
        """Returns how the process ended: its exit code, or 0 and the signal; None while it runs."""

    def signal(self, number: int) -> None:
        """Sends it a signal."""

    def clear(self) -> None:
        """Ends it, and forgets it."""


class RelayedProcess:
    """A process of ssh on another host, to whose agent `send` sends frames.

    The agent's side of its three streams is what the process would have here: the other ends do not differ.
    """

    def __init__(
        self,
        lane: int,
        command: Sequence[str],
        selector: selectors.BaseSelector,
        send: Callable[[Frame], None],
        streams: tuple[int, int, int],
    ) -> None:
        self.lost = ""  # why it is gone, if its agent is
        self._lane = lane
        self._selector = selector
        self._send = send
        self._result: tuple[int, int] | None = None
        self._signals: set[int] = set()  # that were sent: they all end it
        self._input = os.dup(streams[0])
        self._output, self._errors = (Outgoing(os.dup(stream), selector) for stream in streams[1:])
        os.set_blocking(self._input, False)
        self._watched = False
        self.watch(True)
        send(Frame.of_values(Kind.REACH, {"command": list(command)}, lane))

    @property
    def backlog(self) -> int:
        """Returns how many bytes of its output nobody has read yet."""
        return self._output.backlog

    def watch(self, wanted: bool) -> None:
        """Passes its input on, or lets it wait."""
        wanted = wanted and self._input >= 0
        if wanted and not self._watched:
            self._selector.register(self._input, selectors.EVENT_READ, self.pass_on)
        elif self._watched and not wanted:
            self._selector.unregister(self._input)
        self._watched = wanted

    def poll(self) -> tuple[int, int] | None:
        """Returns how the process ended, once all that it has written to its output can be read."""
        return None if self._output.backlog else self._result

    def signal(self, number: int) -> None:
        if self._result is None and number not in self._signals:
            self._signals.add(number)
            self._send(Frame.of_number(Kind.DROP, self._lane, number))

    def clear(self) -> None:
        self._close_input()
        self._output.close()
        self._errors.close()

    def take(self, frame: Frame) -> None:
        """Takes a frame of the agent."""
        if frame.kind == Kind.PASSED:
            self._output.send(frame.payload)
        elif frame.kind == Kind.PASSED_ERROR:
            if self._errors.backlog < _MAX_BACKLOG:  # the rest is dropped: hvdrun's output may have no reader
                self._errors.send(frame.payload)
        else:
            values = frame.values
            code, killed_by = values.get("code"), values.get("killed_by")
            if not isinstance(code, int) or not isinstance(killed_by, int):
                raise WireError("the end of a connection is malformed")
            self._end(code, killed_by)

    def lose(self, why: str) -> None:
        """Notes that the agent is gone."""
        if self._result is None:
            self.lost = why
            self._end(_LOST, 0)

    def _end(self, code: int, killed_by: int) -> None:
        self._result = code, killed_by
        self._close_input()
        self._output.finish()
        self._errors.finish()

    def pass_on(self) -> bool:
        """Passes on some input; returns False if there is none."""
        if self._input < 0:  # closed by an earlier event
            return False
        try:
            data = os.read(self._input, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._send(Frame(Kind.PASS, self._lane, data))
        else:
            self._send(Frame(Kind.PASS_END, self._lane))
            self._close_input()
        return bool(data)

    def _close_input(self) -> None:
        if self._input >= 0:
            self.watch(False)
            os.close(self._input)
            self._input = -1


class RelayedHosts:
    """The processes of ssh that a host's agent holds, by their lanes. `send` sends a frame to the agent."""

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[Frame], None]) -> None:
        self._selector = selector
        self._send = send
        self._lanes: dict[int, RelayedProcess] = {}

    def start(self, command: Sequence[str], streams: tuple[int, int, int]) -> RelayedProcess:
        """Has the agent start a process, whose streams these are."""
        lane = len(self._lanes)
        self._lanes[lane] = RelayedProcess(lane, command, self._selector, self._send, streams)
        return self._lanes[lane]

    def take(self, frame: Frame) -> None:
        """Takes a frame of the agent. Raises WireError if it belongs to no process."""
        process = self._lanes.get(frame.rank)
        if process is None:
            raise WireError(f"{frame.kind.name} of lane {frame.rank} is not expected")
        process.take(frame)

    def balance(self, backlog: int) -> bool:
        """Passes input on while the agent reads it; returns whether there is room for what it sends.

        `backlog` is the number of bytes that wait for the agent.
        """
        for process in self._lanes.values():
            process.watch(backlog < _MAX_BACKLOG)
        return all(process.backlog < _MAX_BACKLOG for process in self._lanes.values())

    def lose(self, why: str) -> None:
        """Notes that the agent is gone, and all its processes with it."""
        for process in self._lanes.values():
            process.lose(why)
