"""The form in which an agent's bytes travel to hvdrun where they cannot travel as they are: lines of text.

Slurm forwards the output of a task line by line, and holds back what does not end with a line feed. Frames
would stay in its buffers.
"""

from __future__ import annotations

import base64
import binascii

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


def _decode(line: bytes) -> bytes:
    if line.startswith(_BEGINNING):
        try:
            return base64.b64decode(line[len(_BEGINNING) :], validate=True)
        except binascii.Error:  # the reader of the frames reports it
            return line
    return line + b"\n"
