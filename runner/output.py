"""The ranks' output, line by line: shown with the rank's number, stored in files, its last lines kept."""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from typing import BinaryIO

from sirtaki.runner.rendezvous.wire import printable

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
        self._selector = selector
        self._pending = bytearray()
        self._watched = False
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
        """Takes one line with its end: a line feed or, for a progress bar, a carriage return."""
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
        self._watch(True)

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
        self._watch(bool(self._pending))

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
            self._watch(False)

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._watched:
            self._selector.register(self._descriptor, selectors.EVENT_WRITE, self._write)
        elif self._watched and not wanted:
            self._selector.unregister(self._descriptor)
        self._watched = wanted


class Stream:
    """The standard output or standard error of one rank, on whichever host it runs."""

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
        """Shows an unfinished line: its process has ended, and another one may follow."""
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
        """Reads at most one buffer; returns b"" at the end of the stream, None if no data is available."""
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return None
        self.stream.take(data)
        return data

    def close(self) -> None:
        os.close(self.descriptor)
        self.stream.end_line()
