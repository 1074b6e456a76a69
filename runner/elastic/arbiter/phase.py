"""The phases of a generation; docs/design/elastic_protocol.md, section 3."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """The phase of the current generation."""

    FORMING = "forming"  # workers enlist for the next one
    LINKING = "linking"  # its members link, and receive the state
    RUNNING = "running"
    OVER = "over"  # the job has ended
