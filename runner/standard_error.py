"""Analyses the last lines of a rank's standard error: a Python exception, and log lines of libraries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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
        from sirtaki.bindings.user_code import format_location, is_internal
    except ImportError:  # the core is not built here
        return ""
    own = [frame for frame in frames if not is_internal(frame["file"])]
    if not own:
        return ""
    return format_location(own[-1]["function"] or "<module>", own[-1]["file"], int(own[-1]["line"]))
