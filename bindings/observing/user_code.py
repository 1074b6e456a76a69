"""Finds the user's own lines in a stack: frames of sirtaki and of installed packages are internal.

Errors, abort reasons and tracebacks point at the innermost frame that is not internal.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

from sirtaki.bindings.errors import HorovodInternalError, MismatchError, PeerFinishedError
from sirtaki.bindings.library import lib

FULL_TRACEBACKS = "SIRTAKI_FULL_TRACEBACKS"  # 1: internal frames are shown, too
_LONG_MESSAGE = 12  # lines
_DEEP_STACK, _LONG_LINE = 10, 80  # frames, characters
_OWN_FOLDER = f"{Path(__file__).parents[2]}{os.sep}"
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/([^/.]+)")
_FRAMEWORKS = frozenset(["jax", "jaxlib", "keras", "tensorflow", "torch"])
_KNOWN_FILES = 4096


def is_own(file: str) -> bool:
    """Returns whether a Python file belongs to sirtaki."""
    return file.startswith(_OWN_FOLDER)


@lru_cache(_KNOWN_FILES)
def is_internal(file: str) -> bool:
    """Returns whether a Python file belongs to sirtaki, the standard library or an installed package."""
    return is_own(file) or bool(lib.srt_is_library(os.fsencode(file)))


@lru_cache(_KNOWN_FILES)
def _is_plumbing(file: str) -> bool:
    """Returns whether an internal file says nothing about a mistake: sirtaki's, Python's or a framework's."""
    package = _PACKAGES.match(file)
    return is_internal(file) and (is_own(file) or package is None or package[1] in _FRAMEWORKS)


class CallSite(NamedTuple):
    """A point in a program. Its line is looked up only when a message needs it."""

    code: CodeType
    instruction: int  # offset in bytes

    def __str__(self) -> str:
        """Formats "in step() at train.py:12"."""
        lines = (line for start, end, line in self.code.co_lines() if start <= self.instruction < end)
        return format_location(self.code.co_name, self.code.co_filename, next(lines, None))


def call_site() -> CallSite | None:
    """Returns the innermost running frame outside sirtaki, or None. Takes under a microsecond."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FOLDER):
        frame = frame.f_back
    return None if frame is None else CallSite(frame.f_code, frame.f_lasti)


def program_sites() -> list[CallSite]:
    """Returns where the program called a framework: the library's point, if any, and the user's innermost."""
    sites: list[CallSite] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not is_internal(code.co_filename):
            return [*sites, CallSite(code, frame.f_lasti)]
        if not sites and not _is_plumbing(code.co_filename):
            sites.append(CallSite(code, frame.f_lasti))
        frame = frame.f_back
    return sites


def with_call_site(error: Exception, sites: Sequence[CallSite | None]) -> Exception:
    """Adds the lines that started an operation to an error about it; its traceback shows the wait."""
    places = ", called ".join(str(site) for site in sites if site is not None)
    if not places or type(error) not in (MismatchError, PeerFinishedError):
        return error
    return type(error)(f"{error} (this rank started it {places})")


def line_of(frame: FrameType | None) -> str:
    """Formats the user's innermost line as "in load() at train.py:4"; "" if there is none."""
    while frame is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _location_of_frame(frame)


def user_line() -> str:
    """Returns the user's innermost line that runs, with the path of its file: "/home/ann/train.py:4"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def stack_of(frame: FrameType | None) -> list[str]:
    """Formats a stack's innermost frames, the innermost first, without sirtaki's."""
    lines: list[str] = []
    while frame is not None and len(lines) < _DEEP_STACK:
        if not is_own(frame.f_code.co_filename):
            lines.append(_location_of_frame(frame)[:_LONG_LINE])
        frame = frame.f_back
    return lines


def frame_of_main_thread() -> FrameType | None:
    """Returns what the main thread executes now; None if it has ended."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _location_of_frame(frame: FrameType) -> str:
    return format_location(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)


def location_of(trace: TracebackType | None) -> str:
    """Formats "in load() at train.py:4": the user's innermost frame, else that of all; "" without frames."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not is_internal(frame.filename)]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return format_location(frame.name, frame.filename, frame.lineno)


def format_location(function: str, file: str, line: int | None) -> str:
    """Formats "in load() at train.py:4"; "at train.py:4" for code outside of any function."""
    within = "" if function == "<module>" else f"in {function}() "
    return f"{within}at {os.path.basename(file)}:{line}"


def hide_internal_frames(error: BaseException, is_from_sirtaki: bool) -> int:
    """Removes internal frames from the tracebacks of an error and of its causes; returns how many.

    An error of the user's own loses sirtaki's frames only. An error that sirtaki raised, or that a framework
    derived from it (`is_from_sirtaki`), loses all internal frames, except those of libraries other than
    frameworks that the user's innermost frame has called. A traceback with nothing else stays as it is.
    """
    if os.environ.get(FULL_TRACEBACKS, "0") not in ("", "0"):
        return 0
    chain = list(chain_of(error))
    is_from_sirtaki = is_from_sirtaki or any(map(_is_raised_by_sirtaki, chain))
    return sum(map(_remove_internal_frames if is_from_sirtaki else _remove_own_frames, chain))


def show(error: BaseException, hook: Callable[..., object], is_from_sirtaki: bool) -> None:
    """Shows an uncaught exception like `hook`, an excepthook, but without internal frames."""
    hidden = hide_internal_frames(error, is_from_sirtaki)
    note = _note_of(hidden)
    if hook is sys.__excepthook__ and sys.stderr is not None:  # in one write: other ranks write, too
        sys.stderr.write(note + "".join(_format_traceback(error, shortens=bool(hidden))))
        sys.stderr.flush()
        return
    if note and sys.stderr is not None:
        sys.stderr.write(note)
    hook(type(error), error, error.__traceback__)


def show_in_thread(
    ended: threading.ExceptHookArgs, hook: Callable[[threading.ExceptHookArgs], object], is_from_sirtaki: bool
) -> None:
    """Shows an exception that has ended a thread like `hook`, an excepthook of threads, as `show` does."""
    error = ended.exc_value
    if error is not None:
        if (note := _note_of(hide_internal_frames(error, is_from_sirtaki))) and sys.stderr is not None:
            sys.stderr.write(note)
        shown = (ended.exc_type, error, error.__traceback__, ended.thread)
        ended = threading.ExceptHookArgs(shown)
    hook(ended)


def _note_of(hidden: int) -> str:
    frames = "1 frame" if hidden == 1 else f"{hidden} frames"
    note = f"sirtaki: {frames} of libraries left out of this traceback ({FULL_TRACEBACKS}=1 shows all)\n"
    return note * bool(hidden)


def _format_traceback(error: BaseException, shortens: bool) -> list[str]:
    """Returns the lines of a traceback; replaces a message longer than a screen by its summary."""
    if shortens and len(str(error).splitlines()) > _LONG_MESSAGE:
        frames = traceback.format_tb(error.__traceback__)
        return ["Traceback (most recent call last):\n", *frames, f"{summary_of(error)}\n"]
    return traceback.format_exception(error)


def summary_of(error: BaseException) -> str:
    """Returns an exception's class and message in a line: the first line of a longer message.

    If the message announces more lines (TensorFlow's "Graph execution error:"), the last line that is not
    indented is included: it is the operation's own.
    """
    lines = traceback.format_exception_only(error)  # a syntax error has its source before, notes after it
    first, *more = next(line for line in lines if not line.startswith(" ")).strip().splitlines()
    if not first.endswith(":"):
        return first
    return " ".join([first, *[line for line in more if line and not line[0].isspace()][-1:]])


def _is_raised_by_sirtaki(error: BaseException) -> bool:
    """Returns whether an error was raised inside a call of sirtaki's, perhaps by a framework called there."""
    files = [_file_of(entry) for entry in _entries(error.__traceback__)]
    user_frames = [index for index, file in enumerate(files) if not is_internal(file)]
    after_user = files[user_frames[-1] + 1 if user_frames else 0 :]
    return isinstance(error, HorovodInternalError) or any(map(is_own, after_user))


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception and its causes."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        pending_error = pending.pop()
        if pending_error is not None and id(pending_error) not in seen:
            seen.add(id(pending_error))
            yield pending_error
            pending += [pending_error.__cause__, pending_error.__context__]


def _remove_own_frames(error: BaseException) -> int:
    entries = list(_entries(error.__traceback__))
    return _keep_frames(error, entries, [entry for entry in entries if not is_own(_file_of(entry))])


def _remove_internal_frames(error: BaseException) -> int:
    entries = list(_entries(error.__traceback__))
    users = [index for index, entry in enumerate(entries) if not is_internal(_file_of(entry))]
    innermost = users[-1] if users else -1
    called = [entry for entry in entries[innermost + 1 :] if not _is_plumbing(_file_of(entry))]
    return _keep_frames(error, entries, [*(entries[index] for index in users), *called])


def _file_of(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _keep_frames(error: BaseException, entries: list[TracebackType], kept: list[TracebackType]) -> int:
    if not kept:
        return 0
    shorter: TracebackType | None = None
    for item in reversed(kept):
        shorter = TracebackType(shorter, item.tb_frame, item.tb_lasti, item.tb_lineno)
    error.__traceback__ = shorter
    return len(entries) - len(kept)


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
