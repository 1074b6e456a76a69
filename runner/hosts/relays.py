"""An agent's connections to the agents of further hosts, between which and hvdrun it passes bytes on.

hvdrun itself connects to the first hosts of a large job only (`HostAttempts`), so that no machine runs too
many processes of ssh. The agent does not look into the bytes: it takes the place of a pipe.
"""

from __future__ import annotations

import itertools
import os
import selectors
import shutil
from collections.abc import Callable, Sequence

from sirtaki.bindings.bootstrap.connection.descriptor_limit import allow_descriptors
from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, WireError
from sirtaki.runner.hosts.channel import Outgoing
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.process import Process
from sirtaki.runner.launch.reaper import Reaper

ORDERS = (MessageKind.REACH, MessageKind.PASS, MessageKind.PASS_END, MessageKind.DROP)
_READ_BYTES = 64 * 1024
_MAX_FINAL_READS = 16  # more reads than a full pipe needs
_MAX_BACKLOG = 1024 * 1024  # for hvdrun; while there is more, nothing is read
_PER_LANE = 6  # descriptors, until the process has started
_CANNOT_START = 255  # as ssh's exit code for an error of its own


class Relays:
    """The connections, by their lanes. `send` sends a frame to hvdrun."""

    def __init__(
        self, selector: selectors.BaseSelector, send: Callable[[Frame], None], reaper: Reaper
    ) -> None:
        self._selector = selector
        self._send = send
        self._reaper = reaper
        self._lanes: dict[int, _Lane] = {}

    def take(self, frame: Frame) -> None:
        """Handles an order from hvdrun; signals are blocked meanwhile.

        Raises WireError if it is malformed.
        """
        lane = self._lanes.get(frame.rank)
        if frame.kind == MessageKind.REACH and lane is None:
            self._reach(frame.rank, frame.values.get("command"))
        elif lane is not None:
            lane.take(frame)

    @property
    def running(self) -> bool:
        return bool(self._lanes)

    def balance(self, backlog: int) -> None:
        """Reads from the relayed processes only while less than _MAX_BACKLOG bytes wait for hvdrun."""
        for lane in self._lanes.values():
            lane.watch(backlog < _MAX_BACKLOG)

    def poll(self) -> None:
        """Reports the connections that have ended."""
        for number in [number for number, lane in self._lanes.items() if lane.has_ended()]:
            del self._lanes[number]

    def _reach(self, number: int, command: object) -> None:
        if not isinstance(command, list) or not command or any(type(word) is not str for word in command):
            raise WireError("REACH has no command")
        path = shutil.which(command[0])
        try:
            if path is None:
                raise LaunchError(f"there is no {command[0]} on the PATH there")
            command = [path, *command[1:]]
            allow_descriptors(_PER_LANE)
            self._lanes[number] = _Lane(number, command, self._selector, self._send, self._reaper)
        except (OSError, LaunchError) as error:
            self._send(Frame(MessageKind.PASSED_ERROR, number, f"{error}\n".encode()))
            self._send(Frame.of(MessageKind.PASSED_END, {"code": _CANNOT_START, "killed_by": 0}, number))


def _open_pipes(count: int) -> list[tuple[int, int]]:
    """Returns that many pipes. Raises OSError, and leaves none open, if there are too many descriptors."""
    pipes: list[tuple[int, int]] = []
    try:
        while len(pipes) < count:
            pipes.append(os.pipe())
    except OSError:
        for descriptor in itertools.chain.from_iterable(pipes):
            os.close(descriptor)
        raise
    return pipes


class _Lane:
    """A process of ssh, and its streams."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        selector: selectors.BaseSelector,
        send: Callable[[Frame], None],
        reaper: Reaper,
    ) -> None:
        self._number = number
        self._selector = selector
        self._send = send
        (theirs_in, ours_in), (ours_out, theirs_out), (ours_err, theirs_err) = _open_pipes(3)
        self._open = {ours_out: MessageKind.PASSED, ours_err: MessageKind.PASSED_ERROR}
        self._input = Outgoing(ours_in, selector)
        self._watched: set[int] = set()
        for descriptor in self._open:
            os.set_blocking(descriptor, False)
        try:
            self._process = Process(command, os.environ, reaper, (theirs_in, theirs_out, theirs_err))
        except (OSError, LaunchError):
            self._close()
            raise
        finally:
            for descriptor in (theirs_in, theirs_out, theirs_err):
                os.close(descriptor)

    def take(self, frame: Frame) -> None:
        if frame.kind == MessageKind.PASS:
            self._input.send(frame.payload)
        elif frame.kind == MessageKind.PASS_END:
            self._input.finish()
        elif frame.kind == MessageKind.DROP:
            self._process.signal(frame.number)
        else:
            raise frame.unexpected()

    def watch(self, wanted: bool) -> None:
        ready = set(self._open) if wanted else set()
        for descriptor in self._watched - ready:
            self._selector.unregister(descriptor)
        for descriptor in ready - self._watched:
            self._selector.register(descriptor, selectors.EVENT_READ, lambda d=descriptor: self._read(d))
        self._watched = ready

    def has_ended(self) -> bool:
        """Returns whether the process has ended; if so, has passed on the rest, and how it ended."""
        result = self._process.poll()
        if result is None:
            return False
        for descriptor in list(self._open):
            for _ in range(_MAX_FINAL_READS):
                if not self._read(descriptor):
                    break
        self._close()
        self._process.clear()
        code, killed_by = result
        self._send(Frame.of(MessageKind.PASSED_END, {"code": code, "killed_by": killed_by}, self._number))
        return True

    def _read(self, descriptor: int) -> bool:
        """Forwards readable data; returns False if there is none, or at the end."""
        if descriptor not in self._open:
            return False
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._send(Frame(self._open[descriptor], self._number, data))
        else:
            self._close_one(descriptor)
        return bool(data)

    def _close_one(self, descriptor: int) -> None:
        del self._open[descriptor]
        if descriptor in self._watched:
            self._watched.discard(descriptor)
            self._selector.unregister(descriptor)
        os.close(descriptor)

    def _close(self) -> None:
        for descriptor in list(self._open):
            self._close_one(descriptor)
        self._input.close()
