"""Warnings that point at the line of the user's program instead of a library's."""

from __future__ import annotations

import sys
import warnings

_LIBRARIES = ("sirtaki", "torch", "tensorflow", "keras", "jax", "contextlib")


def hint(text: str) -> None:
    """Warns about something that the program should do differently."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
