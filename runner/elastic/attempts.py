"""Generations that fail one after the other although no rank was lost: such a job ends at last."""

from __future__ import annotations

_MOST = 10


class Attempts:
    """The generations in a row that have begun with the same commit, without any news in between.

    Their ranks cannot link to each other, or link, and fail at the same place of the program each time.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._commit = -1

    def note(self, commit: int, has_news: bool) -> None:
        """Notes that a generation is to begin with this commit. `has_news`: the ranks have changed."""
        self._failures = 0 if has_news or commit > self._commit else self._failures + 1
        self._commit = commit

    def verdict(self, why: str) -> str:
        """Returns why the job ends; "" if it may try again. `why` is the last failure."""
        if self._failures < _MOST:
            return ""
        begun = f"begun {_MOST} times from commit {self._commit}, and none of them was lost"
        return f"the training gets no further: the ranks have {begun}: {why}"
