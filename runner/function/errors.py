"""The errors of `sirtaki.run`, which otherwise raises the exception of the function itself."""

from __future__ import annotations


class RunError(RuntimeError):
    """There are no results: the job could not start, or a rank ended before it produced a result."""


class RemoteError(RunError):
    """An exception that the function has raised on a rank.

    It is raised itself if the exception cannot travel; otherwise it is the exception's `__cause__`.

    Attributes:
        rank, host, pid: the process that raised the exception.
        kind: the name of the exception's class.
        text: the exception's own text.
        traceback: its traceback there, as text.
    """

    def __init__(self, rank: int, host: str, pid: int, kind: str, text: str, traceback: str) -> None:
        super().__init__(rank, host, pid, kind, text, traceback)  # as `pickle` needs them
        self.rank, self.host, self.pid = rank, host, pid
        self.kind, self.text, self.traceback = kind, text, traceback

    def __str__(self) -> str:
        where = f"rank {self.rank} (pid {self.pid} on {self.host})"
        return f"{where} raised {self.kind}: {self.text}\n\n{self.traceback}".rstrip()
