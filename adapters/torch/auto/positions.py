"""Positions in the user's own code, for messages and for rules that belong to a line."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType

import sirtaki

_LIBRARIES = tuple(
    str(Path(path)) + "/"
    for path in (*sysconfig.get_paths().values(), *sirtaki.__path__)
    if Path(path).is_absolute() and path != sysconfig.get_path("data")
)

_SIRTAKI = tuple(f"{path}/" for path in sirtaki.__path__)


@cache
def is_library(filename: str) -> bool:
    """Returns whether a file is part of Python, of an installed package, or of sirtaki."""
    return filename.startswith("<") or str(Path(filename).absolute()).startswith(_LIBRARIES)


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """Returns the innermost frame of the user's code."""
    frame = frame or sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def loop_frame() -> FrameType | None:
    """Returns the innermost function of the user's code that calls, and is no generator."""
    frame = user_frame(sys._getframe(1))
    while frame is not None and frame.f_code.co_flags & 0x2A0:  # generators and coroutines
        frame = user_frame(frame.f_back) if frame.f_back else None
    return frame


def is_inside_module(frame: FrameType | None, until: FrameType | None) -> bool:
    """Returns whether a frame belongs to the call of a torch module that a function has made."""
    while frame is not None and frame is not until:
        if frame.f_code.co_name == "_call_impl":
            return True
        frame = frame.f_back
    return False


def is_inside_sirtaki(frame: FrameType | None) -> bool:
    """Returns whether a frame belongs to a call that sirtaki has made for the user's code."""
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_SIRTAKI):
            return True
        frame = frame.f_back
    return False


def place() -> str:
    """Returns file:line of the user's code that calls."""
    frame = user_frame(sys._getframe(1))
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"
