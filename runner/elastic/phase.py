"""The phases of a generation, and so of an elastic job."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """The phase of the current generation."""

    FORMING = "forming"  # workers enlist for the next one
    LINKING = "linking"  # its members link, and receive the state
    RUNNING = "running"
    OVER = "over"  # the job has ended
