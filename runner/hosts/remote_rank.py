"""A rank on another host, as the supervisor sees it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from sirtaki.bindings.bootstrap.connection.message_kinds import MessageKind
from sirtaki.bindings.bootstrap.connection.wire import Frame
from sirtaki.runner.supervise.failure_analysis import ExitStatus

if TYPE_CHECKING:
    from sirtaki.runner.hosts.remote import RemoteHost


class RemoteRank:
    """A rank on another host."""

    def __init__(self, rank: int, host: RemoteHost) -> None:
        self.rank = rank
        self.pid = 0  # 0 until the agent has reported it
        self.exit_status: ExitStatus | None = None  # set once `check` has returned it
        self._host = host
        self._noted: ExitStatus | None = None

    @property
    def is_awaited(self) -> bool:
        """Returns whether the agent has not yet reported that the rank has started, or why it has not."""
        return not self.pid and self._noted is None

    def check(self) -> ExitStatus | None:
        """Returns how the rank ended, if it has ended since the last call."""
        if self.exit_status is None and self._noted is not None:
            self.exit_status = self._noted
            return self.exit_status
        return None

    def signal(self, number: int) -> None:
        """Sends a signal to all processes in the rank's process group."""
        if self._noted is None:
            self._host.send(Frame(MessageKind.SIGNAL, self.rank, number=number))

    def reap(self) -> None:
        """Does nothing: the agent reaps the rank."""

    def clear(self) -> None:
        """Ends what the rank has left behind, which the agent does by itself for a rank that has failed."""
        if self._noted is not None and not self._noted.failed:
            self._host.send(Frame(MessageKind.SIGNAL, self.rank, number=signal.SIGKILL))

    def note(self, status: ExitStatus) -> bool:
        """Records how the rank ended; returns False if it was already known."""
        is_new = self._noted is None
        self._noted = self._noted or status
        return is_new
