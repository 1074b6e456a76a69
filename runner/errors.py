"""What keeps a job from starting."""

from __future__ import annotations


class LaunchError(Exception):
    """The job cannot start; the text says why and what to do, `exit_code` is what hvdrun ends with."""

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code
