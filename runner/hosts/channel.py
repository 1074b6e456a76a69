"""One end of a connection that carries frames, over two non-blocking descriptors."""

from __future__ import annotations

import base64
import binascii
import os
import selectors
from collections.abc import Callable

from sirtaki.bindings.bootstrap.connection.wire import FROM, Frame, Sender, WireError, take_frame

# The way of an agent's bytes to hvdrun: behind the output of the login, and as lines of text if need be.
# The agent begins with START_MARK: output before it comes from the login and is ignored.
#
# Slurm forwards the output of a task line by line, and holds back what does not end with a line feed. Frames
# would stay in its buffers.
START_MARK = b"\0sirtaki agent\0\n"
MAX_BEFORE_MARK = 64 * 1024  # bytes that a login may print
LINES = "--lines"  # the argument with which an agent writes lines
_BEGINNING = b"srt:"
_BYTES_PER_LINE = 720  # 964 characters: Slurm may cut a line of more than 1,024


def encode_lines(data: bytes) -> bytes:
    """Returns lines that stand for these bytes."""
    pieces = [data[at : at + _BYTES_PER_LINE] for at in range(0, len(data), _BYTES_PER_LINE)]
    return b"".join(_BEGINNING + base64.b64encode(piece) + b"\n" for piece in pieces)


class LineDecoder:
    """Decodes encoded lines to bytes; passes any other line, such as a login message, unchanged."""

    def __init__(self) -> None:
        self._rest = b""

    def __call__(self, data: bytes) -> bytes:
        """Returns the bytes of the lines that this completes; at the end, without data, also the rest."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        decoded = [_decode(line) for line in lines]
        if not data:
            decoded.append(self._rest)
            self._rest = b""
        return b"".join(decoded)


class LoginOutput:
    """Removes what a login has printed, up to and with START_MARK; `printed` is its end."""

    def __init__(self) -> None:
        self.printed = b""
        self._has_ended = False

    def __call__(self, data: bytes) -> bytes:
        """Returns the bytes of an agent. Raises WireError if the login prints too much."""
        if self._has_ended:
            return data
        before, mark, rest = (self.printed + data).partition(START_MARK)
        self._has_ended = bool(mark)
        if not mark and len(before) > MAX_BEFORE_MARK:
            raise WireError(f"the login there has printed more than {MAX_BEFORE_MARK} bytes")
        self.printed = before[-MAX_BEFORE_MARK:]
        return rest


def _decode(line: bytes) -> bytes:
    if line.startswith(_BEGINNING):
        try:
            return base64.b64decode(line[len(_BEGINNING) :], validate=True)
        except binascii.Error:  # the reader of the frames reports it
            return line
    return line + b"\n"


# ---- A channel -----------------------------------------------------------------------------------------

INITIAL_CREDIT = 256 * 1024  # bytes of ranks' output that an agent may send before hvdrun grants more
# Further bytes for each stream of a rank once all ranks have ended: the capacity of a pipe.
FINAL_CREDIT = 1024 * 1024
_READ_BYTES = 256 * 1024


class EventWatch:
    """Whether a selector's loop waits for an event of a descriptor, to call `handle`."""

    def __init__(
        self, selector: selectors.BaseSelector, descriptor: int, event: int, handle: Callable[[], object]
    ) -> None:
        self._selector, self._descriptor = selector, descriptor
        self._event, self._handle = event, handle
        self._is_on = False

    def set(self, wanted: bool) -> None:
        """Starts or stops the wait."""
        if wanted and not self._is_on:
            self._selector.register(self._descriptor, self._event, self._handle)
        elif self._is_on and not wanted:
            self._selector.unregister(self._descriptor)
        self._is_on = wanted


class Channel:
    """Reads frames from a descriptor and writes frames to another descriptor; owns both.

    `receive` is called for each frame of `peer`, from the selector's loop. `ended` becomes true, and `error`
    gives the reason, when the peer has closed its end or has sent malformed data. An agent's frames follow
    the output of a `login`. Where `lines` is "read" or "write", what is read, or written, has the form of
    lines (`coding`).
    """

    def __init__(
        self,
        reading: int,
        writing: int,
        selector: selectors.BaseSelector,
        receive: Callable[[Frame], None],
        peer: Sender,
        login: LoginOutput | None = None,
        lines: str = "",
    ) -> None:
        self.ended = False
        self.error = ""
        self._accepted = FROM[peer]
        self._without_login = login or bytes
        self._incoming = bytearray()
        self._reading = reading
        self._watch = EventWatch(selector, reading, selectors.EVENT_READ, self.read)
        self._outgoing = Outgoing(writing, selector)
        self._receive = receive
        self._decode = LineDecoder() if lines == "read" else bytes
        self._encode = encode_lines if lines == "write" else bytes
        os.set_blocking(reading, False)
        self.watch(True)

    @property
    def backlog(self) -> int:
        """Returns how many bytes have not been written yet."""
        return self._outgoing.backlog

    def send(self, frame: Frame) -> None:
        """Writes as much as the peer takes now, and the rest later; nothing once the channel is closed."""
        self.send_bytes(frame.pack())

    def send_bytes(self, data: bytes) -> None:
        self._outgoing.send(self._encode(data))

    def watch(self, wanted: bool) -> None:
        """Starts or stops reading in the selector's loop; the peer waits while it is stopped."""
        self._watch.set(wanted and not self.ended)

    def read(self) -> bool:
        """Reads up to a buffer of data; returns False if nothing is available, or at the end."""
        if self.ended:
            return False
        try:
            data = os.read(self._reading, _READ_BYTES)
            self._incoming += self._without_login(self._decode(data))
            while (frame := take_frame(self._incoming, self._accepted)) is not None:
                self._receive(frame)
        except BlockingIOError:
            return False
        except (OSError, WireError) as error:
            self._end(str(error))
            return False
        if not data:
            self._end("")
        return bool(data)

    def read_rest(self) -> None:
        """Reads all available data and ends: the peer has exited, even if its end is still open elsewhere."""
        while self.read():
            continue
        self._end("")

    def close_writing(self) -> None:
        """Signals the end of the stream to the peer."""
        self._outgoing.close()

    def close(self) -> None:
        self._end("")
        self.close_writing()

    def _end(self, error: str) -> None:
        if not self.ended:
            self.watch(False)
            os.close(self._reading)
            self.ended = True
            self.error = error


class Outgoing:
    """An owned descriptor, and the bytes that its reader has not yet received."""

    def __init__(self, descriptor: int, selector: selectors.BaseSelector) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._watch = EventWatch(selector, descriptor, selectors.EVENT_WRITE, self._write)
        self._ends = False
        os.set_blocking(descriptor, False)

    @property
    def backlog(self) -> int:
        """Returns how many bytes have not been written yet."""
        return len(self._waiting)

    def send(self, data: bytes) -> None:
        """Writes as much as the reader takes now, and the rest later; nothing once it is closed."""
        if self._descriptor >= 0 and not self._ends:
            self._waiting += data
            self._write()

    def finish(self) -> None:
        """Closes the descriptor once everything is written."""
        self._ends = True
        if not self._waiting:
            self.close()

    def close(self) -> None:
        """Closes the descriptor; the rest is not written."""
        if self._descriptor >= 0:
            self._watch.set(False)
            os.close(self._descriptor)
            self._descriptor = -1
        self._waiting.clear()

    def _write(self) -> None:
        try:
            del self._waiting[: os.write(self._descriptor, self._waiting)]
        except BlockingIOError:
            pass
        except OSError:  # the reader has gone, as another descriptor reports
            self.close()
            return
        if self._ends and not self._waiting:
            self.close()
        else:
            self._watch.set(bool(self._waiting))
