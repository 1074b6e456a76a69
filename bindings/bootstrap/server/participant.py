"""A rank's part in the rendezvous, from its connection to the end of that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sirtaki.bindings.bootstrap.connection.message_kinds import Sender
from sirtaki.bindings.bootstrap.job import CALLS, Identity

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.server.collector_sessions import CollectorSession
    from sirtaki.bindings.bootstrap.server.connection_server import ServedConnection

_CALLS_GENERATION = -1  # of connections for calls, which belong to none


@dataclass(eq=False)
class Participant:
    """One client of the rendezvous, over a connection of its own or that of its host's collector."""

    line: ServedConnection | CollectorSession
    identity: Identity
    number: int | None = None  # the collector's, for this client; None: the connection is its own
    joined: bool = False
    initialised: bool = False
    rounds: int = 0  # the number of all-gathers that it has taken part in
    reports: int = 0  # that it has sent
    end_report: str = ""  # its report of its own end

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def generation(self) -> int:
        return _CALLS_GENERATION if self.calls else self.identity.generation

    @property
    def calls(self) -> bool:
        """Returns whether a rank asks the launcher's service over this connection."""
        return self.identity.channel == CALLS

    @property
    def sender(self) -> Sender:
        """Returns the sender of its next message."""
        if not self.joined:
            return Sender.NEWCOMER
        return Sender.CALLER if self.calls else Sender.RANK

    @property
    def numbers(self) -> list[int]:
        return [] if self.number is None else [self.number]
