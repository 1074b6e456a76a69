"""The way of an agent's bytes to hvdrun: behind the output of the login, and as lines of text if need be.

The agent begins with START_MARK: output before it comes from the login and is ignored.

Slurm forwards the output of a task line by line, and holds back what does not end with a line feed. Frames
would stay in its buffers.
"""

from __future__ import annotations

import base64
import binascii

from sirtaki.bindings.bootstrap.connection.wire import WireError

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
