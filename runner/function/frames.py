"""Tracebacks that travel as objects, so that a debugger shows a rank's frames; they need tblib."""

from __future__ import annotations

import importlib
import traceback
from types import TracebackType
from typing import Any

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
