"""The report of an outcome: JSON values about a rank's result or exception, beside the pickled object.

A report says its `kind`: returned, raised or exited; of an exception also its class (`type`), `text`,
`traceback` and, with tblib, `frames`.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn

from sirtaki.runner.function.errors import RemoteError, RunError

RETURNED: dict[str, Any] = {"kind": "returned"}
_LONGEST_TEXT, _LONGEST_TRACEBACK = 20_000, 50_000  # characters: one message holds a whole report


def exit_code(end: SystemExit) -> int:
    """Returns the exit code of a process that this exception ends."""
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def report_of(error: BaseException, kind: str) -> dict[str, Any]:
    """Returns the report of an exception; removes internal frames from its traceback."""
    from sirtaki.bindings.context import process  # imported late: they open the core
    from sirtaki.bindings.observing.user_code import hide_internal_frames, is_own

    context = process.context
    hide_internal_frames(error, context is not None and context.failure is not None)
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if all(map(is_own, files)):  # sirtaki's own frames say nothing to users
        error.__traceback__ = None
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return {
        "kind": kind,
        "type": type(error).__qualname__,
        "text": _text_of(error)[:_LONGEST_TEXT],
        "traceback": "".join(lines)[-_LONGEST_TRACEBACK:],
        "frames": pack_frames(error.__traceback__),
    }


def raise_reported(
    rank: int, host: str, pid: int, report: Mapping[str, Any], load: Callable[[], object]
) -> NoReturn:
    """Raises what a rank has reported. `load` unpickles the rank's exception; it may raise.

    Raises:
        The rank's exception, whose `__cause__` is a RemoteError.
        RemoteError: that exception cannot be pickled, or cannot be made here.
        RunError: the rank called sys.exit().
    """
    if report["kind"] == "exited":
        called = f"rank {rank} (pid {pid} on {host}) called sys.exit({report['text']})"
        raise RunError(f"{called} instead of returning a result\n\n{report['traceback']}".rstrip())
    remote = RemoteError(rank, host, pid, report["type"], report["text"], report["traceback"])
    error = _exception_of(load)
    if error is None:
        raise remote
    raise error.with_traceback(unpack_frames(report["frames"])) from remote


def _exception_of(load: Callable[[], object]) -> BaseException | None:
    try:
        error = load()
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


# ---- Tracebacks that travel as objects, so that a debugger shows a rank's frames; they need tblib ------

_MOST_FRAMES = 500  # one message holds them


def pack_frames(trace: TracebackType | None) -> dict[str, Any] | None:
    """Returns a traceback as JSON values; None if it is too long, or without tblib."""
    tblib = _import_tblib()
    if tblib is None or trace is None or len(list(traceback.walk_tb(trace))) > _MOST_FRAMES:
        return None
    packed: dict[str, Any] = tblib.Traceback(trace).to_dict()
    return packed


def unpack_frames(packed: dict[str, Any] | None) -> TracebackType | None:
    """Returns the traceback; None if there is none, or without tblib."""
    tblib = _import_tblib()
    return None if tblib is None or packed is None else tblib.Traceback.from_dict(packed).as_traceback()


def _import_tblib() -> Any:
    try:
        return importlib.import_module("tblib")
    except ImportError:
        return None
