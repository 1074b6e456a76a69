"""Everything that hvdrun shows: the lines of every rank, each with its rank, and hvdrun's own."""

from __future__ import annotations

import functools
import os
import selectors
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from sirtaki.runner.errors import LaunchError
from sirtaki.runner.output import Pipe, Sink, Stream
from sirtaki.runner.rendezvous.job import name_of
from sirtaki.runner.rendezvous.wire import printable
from sirtaki.runner.standard_error import exception_in, without_log_lines

if TYPE_CHECKING:  # slow to import, and needed on terminals only
    from rich.console import Console

STDOUT, STDERR = 1, 2
_LONGEST_TEXT = 8000  # characters
_MAX_FINAL_READS = 16  # more reads than a full pipe needs
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class Display:
    """The ranks' streams and the outputs on which they are shown.

    A rank's standard output appears on hvdrun's standard output, its standard error on hvdrun's standard
    error.
    """

    def __init__(self, selector: selectors.BaseSelector, verbose: bool = False) -> None:
        self._selector = selector
        self._verbose = verbose
        self._stdout = self._stderr = Sink(STDOUT, selector)
        if not os.path.sameopenfile(STDOUT, STDERR):  # if both are one file, one sink keeps lines whole
            self._stderr = Sink(STDERR, selector)
        self._sinks = {STDOUT: self._stdout, STDERR: self._stderr}
        self._streams: dict[tuple[int, int], Stream] = {}  # by rank and stream number
        self._open: set[Pipe] = set()
        self._reading: set[Pipe] = set()

    def expect(self, size: int, folder: Path | None = None) -> None:
        """Prepares for the ranks, before they start. `folder`: also keep the exact bytes of each rank there.

        Raises LaunchError if that cannot be written.
        """
        for rank in range(size):
            self.add(rank, str(rank), folder, size)

    def add(self, rank: int, label: str, folder: Path | None, size: int) -> None:
        """Prepares for one of `size` ranks, whose lines begin with "[label] ". Raises as `expect`."""
        files = _open_files(folder, rank, size)
        for number, sink in self._sinks.items():
            prefix = _prefix(label, rank, sink.is_terminal)
            self._streams[rank, number] = Stream(prefix, sink, files.get(number))

    def add_spare(self, lane: int, label: str) -> None:
        """Prepares for a spare, whose output is shown on hvdrun's standard error, as that of `lane`."""
        for number in self._sinks:
            self._streams[lane, number] = Stream(f"[{label}] ".encode(), self._stderr)

    def read_rank(self, rank: int, stdout: int, stderr: int) -> None:
        """Shows the data from these descriptors as the output of `rank`, and closes them at their end."""
        for number, descriptor in ((STDOUT, stdout), (STDERR, stderr)):
            self._open.add(Pipe(descriptor, self._streams[rank, number]))
        self.balance()

    def move_spare(self, spare: int, rank: int) -> None:
        """Shows the output of a spare of this host, in its lane so far, as that of a rank from now on."""
        for number in self._sinks:
            stream = self._streams.pop((spare, number))
            stream.close()
            for pipe in self._open:
                if pipe.stream is stream:
                    pipe.stream = self._streams[rank, number]
        self.balance()

    def end_lines(self, rank: int) -> None:
        """Shows unfinished lines of a rank on another host: another process takes its place."""
        for number in self._sinks:
            self._streams[rank, number].end_line()

    def read_host(self, name: str, stderr: int) -> Stream:
        """Shows the data from this descriptor as the output of the connection to a host."""
        stream = Stream(f"[{name}] ".encode(), self._stderr, is_trusted=False)
        self._open.add(Pipe(stderr, stream))
        self.balance()
        return stream

    def read_available(self, stream: Stream) -> None:
        """Shows what can be read for a stream now: the process that has written it has ended."""
        for pipe in self._open:
            if pipe.stream is stream:
                _read_rest(pipe)

    def take(self, rank: int, number: int, data: bytes) -> None:
        """Shows data that a rank has written to its standard output or error on another host."""
        self._streams[rank, number].take(data)

    def has_room(self, number: int) -> bool:
        """Returns whether there is room for more of the ranks' standard output or error."""
        return not self._sinks[number].full

    def say(self, text: str) -> None:
        """Shows a line of hvdrun's own. It may contain another process's text, so control sequences are
        removed for a terminal, and further lines are indented: they cannot pass for hvdrun's.
        """
        shown = printable(text, _LONGEST_TEXT).replace("\n", "\n  ")
        self._stderr.write_line(b"", f"hvdrun: {shown}\n".encode())

    def detail(self, text: str) -> None:
        """Shows a line of hvdrun's own in verbose mode only."""
        if self._verbose:
            self.say(text)

    def show_error_of(self, rank: int, name: str = "", died: bool = False) -> str:
        """Returns a line with the exception of the traceback at the end of a rank's standard error. If
        there is none, shows the last lines again and returns "". `name`: that of the rank, if it has another.
        `died`: a signal ended it, so an exception among its last lines is one that it has handled.
        """
        stream = self._streams[rank, STDERR]
        lines = without_log_lines(stream.tail)
        if not died and (exception := exception_in(lines)):
            return exception
        if lines:
            self.say(f"the last lines that {name or name_of(rank)} wrote to its standard error:")
        for line in lines:
            self._stderr.write_line(stream.prefix, line)
        return ""

    def mute_errors_except(self, rank: int) -> None:
        """Shows no more standard error except that of one rank: N tracebacks of one Ctrl-C are useless."""
        for (other, number), stream in self._streams.items():
            stream.shown = number == STDOUT or other == rank

    def balance(self) -> None:
        """Polls the ranks whose lines can be shown; the other ranks wait for room."""
        ready = {pipe for pipe in self._open if not pipe.stream.sink.full}
        for pipe in self._reading - ready:
            self._selector.unregister(pipe.descriptor)
        for pipe in ready - self._reading:
            self._selector.register(pipe.descriptor, selectors.EVENT_READ, lambda p=pipe: self._read(p))
        self._reading = ready

    @property
    def reader_error(self) -> OSError | None:
        """Returns why hvdrun's standard output can no longer be written."""
        return self._stdout.error

    @property
    def all_shown(self) -> bool:
        return self._stdout.empty and self._stderr.empty

    def close_streams(self) -> None:
        """Shows the data that is still available, and closes the streams without waiting for more."""
        for pipe in list(self._open):
            _read_rest(pipe)
            self._close(pipe)
        for stream in self._streams.values():
            stream.close()

    def begin_result(self, drops_output: bool = False) -> None:
        """Marks what follows as hvdrun's result. `drops_output`: discards the ranks' output before."""
        if drops_output:
            self.drop()
        self._stdout.begin_result()
        self._stderr.begin_result()

    def drop(self) -> None:
        """Discards the ranks' output that has not been shown."""
        self._stdout.drop()
        self._stderr.drop()

    def show_progress(self, text: str) -> None:
        """Shows a line of hvdrun's own that the next line replaces on a terminal; "" removes it there."""
        if not self._stderr.is_terminal:
            if text:
                self.say(text)
        else:
            self._stderr.write_line(b"", f"hvdrun: {text}\r".encode() if text else b"\r")

    @property
    def refreshes(self) -> bool:
        """Returns whether a progress line replaces the previous one."""
        return self._stderr.is_terminal

    def _read(self, pipe: Pipe) -> None:
        if pipe in self._open and pipe.read() == b"":
            self._close(pipe)

    def _close(self, pipe: Pipe) -> None:
        self._open.discard(pipe)
        if pipe in self._reading:
            self._reading.discard(pipe)
            self._selector.unregister(pipe.descriptor)
        pipe.close()


def _read_rest(pipe: Pipe) -> None:
    """Shows what can be read now, without waiting for more."""
    for _ in range(_MAX_FINAL_READS):
        if not pipe.read():
            break


def _prefix(label: str, rank: int, is_terminal: bool) -> bytes:
    """Returns the prefix of a rank's lines: "[0] ", in a colour of its own if the terminal has colours."""
    prefix = f"[{label}]"
    if is_terminal:
        console = _console()
        with console.capture() as capture:
            console.print(prefix, style=_COLOURS[rank % len(_COLOURS)], markup=False, end="")
        prefix = capture.get()
    return f"{prefix} ".encode()


@functools.cache
def _console() -> Console:
    from rich.console import Console

    return Console(force_terminal=True, highlight=False)


def _open_files(folder: Path | None, rank: int, size: int) -> dict[int, BinaryIO]:
    if folder is None:
        return {}
    rank_folder = folder / f"rank.{rank:0{len(str(size - 1))}d}"
    try:
        rank_folder.mkdir(parents=True, exist_ok=True)
        return {STDOUT: open(rank_folder / "stdout", "wb"), STDERR: open(rank_folder / "stderr", "wb")}
    except OSError as error:
        raise LaunchError(
            f"cannot keep the output of rank {rank} in {rank_folder}: {error.strerror}"
        ) from None
