"""The error that keeps a job from starting."""

from __future__ import annotations


class LaunchError(Exception):
    """The job cannot start; the text gives the reason and the remedy, `exit_code` is hvdrun's exit code."""

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code
