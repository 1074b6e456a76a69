"""Frames of the user's own code, and calls that they have made."""

from __future__ import annotations

import sys
from types import FrameType

from sirtaki.bindings.observing.user_code import is_internal, is_own


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """Returns the innermost frame of the user's code."""
    frame = frame or sys._getframe(1)
    while frame is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def loop_frame() -> FrameType | None:
    """Returns the innermost function of the user's code that calls, and is no generator."""
    frame = user_frame(sys._getframe(1))
    while frame is not None and frame.f_code.co_flags & 0x2A0:  # generators and coroutines
        frame = user_frame(frame.f_back) if frame.f_back else None
    return frame


def is_inside_module(frame: FrameType | None) -> bool:
    """Returns whether a frame belongs to the call of a torch module."""
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            return True
        frame = frame.f_back
    return False


def is_inside_sirtaki(frame: FrameType | None) -> bool:
    """Returns whether a frame belongs to a call that sirtaki has made for the user's code."""
    while frame is not None and is_internal(frame.f_code.co_filename):
        if is_own(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
