"""The errors that keep a job, or a process of it, from starting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

NOT_EXECUTABLE, NOT_FOUND = 126, 127  # a shell's exit codes for programs that cannot be run


class LaunchError(Exception):
    """The job cannot start; the text gives the reason and the remedy, `exit_code` is hvdrun's exit code."""

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class CannotStart(LaunchError):
    """A process cannot be started. An elastic job goes on: its arbiter decides what follows."""

    def __init__(self, text: str) -> None:
        super().__init__(text, NOT_EXECUTABLE)


@contextlib.contextmanager
def explained(what: str, exit_code: int = 2) -> Iterator[None]:
    """Raises LaunchError for an OSError in the block: `what` has failed, such as "cannot write a.json"."""
    try:
        yield
    except OSError as error:
        raise LaunchError(f"{what}: {error.strerror or error}", exit_code) from None
