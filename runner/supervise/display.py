"""Everything that hvdrun shows: the lines of every rank, each with its rank, and hvdrun's own."""

from __future__ import annotations

import functools
import os
import re
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from sirtaki.bindings.bootstrap.connection.wire import printable
from sirtaki.bindings.bootstrap.job import join_names
from sirtaki.runner.hosts.channel import EventWatch
from sirtaki.runner.launch.errors import LaunchError

if TYPE_CHECKING:
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
        """Creates the streams of a rank in a job of `size` ranks; its lines begin with "[label] ".

        Raises as `expect`.
        """
        files = _open_files(folder, rank, size)
        for number, sink in self._sinks.items():
            prefix = _prefix(label, rank, sink.is_terminal)
            self._streams[rank, number] = Stream(prefix, sink, files.get(number))

    def add_spare(self, lane: int, label: str) -> None:
        """Creates the streams of a spare as `lane`; both are shown on hvdrun's standard error."""
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

    def show_error_of(self, rank: int, name: str, died: bool) -> str:
        """Returns a line with the exception of the traceback at the end of a rank's standard error.

        Without a traceback, shows the last lines again and returns "". `name`: the process's name. `died`: a
        signal ended the process, so an exception among the last lines has been handled.
        """
        stream = self._streams[rank, STDERR]
        lines = without_log_lines(stream.tail)
        if not died and (exception := exception_in(lines)):
            return exception
        if lines:
            self.say(f"the last lines that {name} wrote to its standard error:")
        for line in lines:
            self._stderr.write_line(stream.prefix, line)
        return ""

    def mute_errors_except(self, rank: int) -> None:
        """Shows no more standard error of any rank but this: N tracebacks of a single Ctrl-C are useless."""
        for (other, number), stream in self._streams.items():
            stream.shown = number == STDOUT or other == rank

    def balance(self) -> None:
        """Polls the pipes that have room in their sink; the other ranks wait."""
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
        """Returns whether a progress line replaces the previous progress line."""
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


# ---- The last lines of a rank's standard error: a Python exception, log lines of libraries -------------


# The beginnings of lines that TensorFlow, XLA and absl log at their start.
_LOG_LINE = re.compile(
    rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IW] |[IW]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ \S+\.cc:\d+\] "
    rb"|WARNING: All log messages before absl::|To enable the following instructions: "
)
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)(, in (?P<function>.+))?$')


def without_log_lines(lines: Iterable[bytes]) -> list[bytes]:
    """Returns these lines without libraries' start-up logs."""
    return [line for line in lines if not _LOG_LINE.match(line)]


def exception_in(lines: Sequence[bytes]) -> str:
    """Returns the last traceback's exception in these lines, and the user's line; "" if there is none."""
    texts = [line.decode(errors="replace").rstrip() for line in lines]
    frames = [(number, found) for number, text in enumerate(texts) if (found := _FRAME.match(text))]
    if not frames:
        return ""
    exception = next((text for text in texts[frames[-1][0] :] if text and not text.startswith(" ")), "")
    place = _place([found for _, found in frames])
    return f"{exception} ({place})" if exception and place else exception


def _place(frames: Sequence[re.Match[str]]) -> str:
    try:
        from sirtaki.bindings.observing.user_code import format_location, is_internal
    except ImportError:  # the core is not built here
        return ""
    own = [frame for frame in frames if not is_internal(frame["file"])]
    if not own:
        return ""
    return format_location(own[-1]["function"] or "<module>", own[-1]["file"], int(own[-1]["line"]))


# ---- The ranks' output, line by line -------------------------------------------------------------------
# It is shown with the rank's number and stored in files; its last lines are kept.


TAIL_LINES = 20
_TAIL_LINE_BYTES = 4096
_READ_BYTES = 64 * 1024
_LONGEST_LINE = 1024 * 1024  # bytes; a longer line is split, which bounds the memory for each rank
_LONGEST_UNTRUSTED = 2000  # characters of a line
_PENDING_LIMIT = 1024 * 1024  # bytes that may wait for the reader of hvdrun's output before the ranks wait
_PIPE_BUFFER = 4096  # a pipe that poll reports as writable accepts this many bytes without blocking
_BAR_SECONDS = 10.0  # between two states of a progress bar on an output where they do not replace each other
_ERASE_REST_OF_LINE = b"\x1b[K"


class Sink:
    """One of hvdrun's own outputs: accepts whole lines, and writes them as fast as the reader reads them."""

    def __init__(self, descriptor: int, selector: selectors.BaseSelector) -> None:
        self.is_terminal = os.isatty(descriptor)
        self.error: OSError | None = None  # why the output can no longer be written
        self._descriptor = descriptor
        self._pending = bytearray()
        self._watch = EventWatch(selector, descriptor, selectors.EVENT_WRITE, self._write)
        self._in_line = False  # whether the reader has got the beginning of a line only
        self._result_at: int | None = None  # where hvdrun's result begins in what is pending
        self._column_dirty = False  # whether a carriage return has left text under the cursor
        self._next_states: dict[bytes, float] = {}  # when to show the next state of each rank's progress bar

    @property
    def empty(self) -> bool:
        return not self._pending

    @property
    def full(self) -> bool:
        return len(self._pending) > _PENDING_LIMIT

    def write_line(self, prefix: bytes, line: bytes) -> None:
        """Queues a line with its end: a line feed or, for a progress bar, a carriage return."""
        if self.error is not None:
            return
        if line.endswith(b"\r") and not self.is_terminal:
            line = self._progress_line(prefix, line)
            if not line:
                return
        if self._column_dirty and self.is_terminal:
            self._pending += _ERASE_REST_OF_LINE
        self._column_dirty = line.endswith(b"\r")
        self._pending += line if line == b"\r" else prefix + line
        self._watch.set(True)

    def _progress_line(self, prefix: bytes, line: bytes) -> bytes:
        """Returns an occasional state of a bar as a line, if states do not replace each other; else b""."""
        now = time.monotonic()
        if line == b"\r" or now < self._next_states.get(prefix, 0.0):
            return b""
        self._next_states[prefix] = now + _BAR_SECONDS
        return line[:-1] + b"\n"

    def begin_result(self) -> None:
        """Marks what follows as hvdrun's result, which `drop` keeps."""
        self._result_at = len(self._pending)

    def drop(self) -> None:
        """Discards the ranks' output that has not been written, but for the rest of a line."""
        end = len(self._pending) if self._result_at is None else self._result_at
        start = self._pending.find(b"\n", 0, end) + 1 if self._in_line else 0
        del self._pending[start:end]
        self._result_at = None if self._result_at is None else start
        self._watch.set(bool(self._pending))

    def _write(self) -> None:
        try:
            written = os.write(self._descriptor, self._pending[:_PIPE_BUFFER])
        except OSError as error:
            self.error = error
            self._pending.clear()
        else:
            self._in_line = not self._pending[:written].endswith(b"\n")
            del self._pending[:written]
            if self._result_at is not None:
                self._result_at = max(self._result_at - written, 0)
        if not self._pending:
            self._watch.set(False)


class Stream:
    """The standard output or standard error of a rank on any host."""

    def __init__(
        self, prefix: bytes, sink: Sink, file: BinaryIO | None = None, is_trusted: bool = True
    ) -> None:
        """Creates the stream. `is_trusted`: its control sequences, such as colours, may reach a terminal."""
        self._is_trusted = is_trusted
        self.sink = sink
        self.file = file
        self.shown = True
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.prefix = prefix
        self._partial_line = b""

    def take(self, data: bytes) -> None:
        """Shows the whole lines among the data that the rank has written."""
        self._write_file(data)
        lines = (self._partial_line + data).splitlines(keepends=True)
        # A carriage return at the end may be the first half of a line end: the next byte decides.
        complete = not lines or lines[-1].endswith(b"\n")
        self._partial_line = b"" if complete else lines.pop()
        for line in lines:
            self._show(line)
        if len(self._partial_line) > _LONGEST_LINE:
            self._show_partial_line()

    def end_line(self) -> None:
        """Shows an unfinished line: the process has ended, and a new process may use the stream."""
        if self._partial_line:
            self._show_partial_line()

    def close(self) -> None:
        self.end_line()
        if self.file is not None:
            self.file.close()

    def _write_file(self, data: bytes) -> None:
        if self.file is None:
            return
        try:
            self.file.write(data)
            self.file.flush()
        except OSError as error:
            text = f"hvdrun: cannot write {self.file.name}: {error.strerror}; continuing without it\n"
            self.sink.write_line(b"", text.encode())
            self.file = None

    def _show_partial_line(self) -> None:
        self._show(self._partial_line + b"\n")
        self._partial_line = b""

    def _show(self, line: bytes) -> None:
        if not self._is_trusted:
            text = line.decode(errors="replace").rstrip("\r\n")
            line = printable(text, _LONGEST_UNTRUSTED).encode() + b"\n"
        if line.endswith(b"\n"):
            self.tail.append(line[-_TAIL_LINE_BYTES:])
        if self.shown:
            self.sink.write_line(self.prefix, line)


class Pipe:
    """The pipe that feeds a stream from a process of this host."""

    def __init__(self, descriptor: int, stream: Stream) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.stream = stream

    def read(self) -> bytes | None:
        """Reads up to a buffer of data; returns b"" at the end of the stream, None without available data."""
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return None
        self.stream.take(data)
        return data

    def close(self) -> None:
        os.close(self.descriptor)
        self.stream.end_line()


# ---- Which peers are present and which are missing: a line, refreshed on a terminal, else repeated -----


FIRST_REFRESH_SECONDS = 1.0  # a shorter wait needs no line
FIRST_REPEAT_SECONDS = 5.0


class Progress:
    """A wait for each of `names`, by their keys. On a terminal the line is refreshed, elsewhere repeated
    at doubling intervals. `show` receives the line, and "" when the line has to disappear.
    """

    def __init__(
        self, what: str, names: Mapping[int, str], show: Callable[[str], None], refreshes: bool
    ) -> None:
        self._what = what
        self._names = names
        self._show = show
        self._refreshes = refreshes
        self._missing = set(names)
        self._pause = FIRST_REFRESH_SECONDS if refreshes else FIRST_REPEAT_SECONDS
        self._shown = False
        self.due: float | None = None  # when to show the next line (time.monotonic())

    def begin(self) -> None:
        """Starts the wait; does nothing if it has started, or if nothing is awaited."""
        if self.due is None and self._missing:
            self.due = time.monotonic() + self._pause

    def note(self, key: int) -> None:
        """Records that the peer with this key is present."""
        if key not in self._missing:
            return
        self._missing.discard(key)
        if not self._missing:
            self.end()
        elif self._refreshes and self._shown:
            self._show(self.line)

    def poll(self, now: float) -> None:
        """Shows the line if it is due."""
        if self.due is not None and self.due <= now:
            self._show(self.line)
            self._shown = True
            self._pause *= 2
            self.due = now + self._pause

    def end(self) -> None:
        """Ends the wait."""
        self._missing = set()
        self.due = None
        if self._shown and self._refreshes:
            self._show("")
        self._shown = False

    @property
    def line(self) -> str:
        """Formats "7 of 8 ranks are here; waiting for rank 3 (hostB)"."""
        present = len(self._names) - len(self._missing)
        awaited = join_names(self._names[key] for key in sorted(self._missing))
        return f"{present} of {len(self._names)} {self._what}; waiting for {awaited}"
