"""The servers of a job, as hvdrun sees them: processes beside the ranks that serve tables (`--servers`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind
from sirtaki.bindings.bootstrap.job import END, SERVERS, SIZE, TABLES, Job, job_of_tables, join_names
from sirtaki.bindings.bootstrap.messages import RankEvent
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer
from sirtaki.runner.launch.hosts import HostAllocation, servers_of

_END_SECONDS = 60.0  # for a server to end when the ranks have: it may still import its modules


class Servers:
    """The table servers of a job, from the start of their rendezvous to their end.

    They begin a table when a rank arrives at the rendezvous for it, and end when all ranks have. The thread
    of the rendezvous calls `on_event` and `on_message`, hvdrun's main loop everything else. `report` receives
    the failures of servers. hvdrun knows a server by its number in the worlds of tables, after the ranks.
    """

    def __init__(
        self,
        count: int,
        job: Job,
        hosts: Sequence[HostAllocation],
        report: Callable[[RankEvent], None],
    ) -> None:
        self.job = job_of_tables(job, count)
        self.numbers = range(job.size, self.job.size)
        self.on_host = {host.host.name: servers_of(host, hosts, self.numbers) for host in hosts}
        self.end_due: float | None = None  # when they have to have ended (time.monotonic())
        self._ranks = job.size
        self._report = report
        self._tables: list[int] = []  # that have begun
        self._present: set[int] = set()  # servers that wait for tables
        self._is_over = False
        self._rendezvous: RendezvousServer | None = None

    def serve(self, rendezvous: RendezvousServer) -> None:
        """Sets the rendezvous of the tables, which calls this object's methods; this object closes it."""
        self._rendezvous = rendezvous

    def start(self) -> None:
        """Starts the thread of the rendezvous: all processes of this host have been forked."""
        self._server.start()

    def variables(self, reachable: Callable[[str], str] = str) -> dict[str, str]:
        """Returns variables for ranks and servers; `reachable` chooses among the addresses."""
        address = reachable(self._server.address)
        return {SERVERS: str(len(self.numbers)), TABLES: address, SIZE: str(self._ranks)}

    def on_event(self, event: RankEvent) -> None:
        """Announces a table when the first rank arrives for it, and passes failures on."""
        if event.kind == "arrived" and event.rank < self._ranks and event.generation not in self._tables:
            self._tables.append(event.generation)
            self._announce(self._present, [event.generation])
        elif event.kind in ("aborted", "refused"):
            self._report(event)

    def on_message(self, member: int, _: Frame) -> None:
        """Records that a server is connected, and announces to it the tables that exist so far."""
        self._present.add(member)
        self._announce([member], [*self._tables, *([END] if self._is_over else [])])

    def rank_ended(self, rank: int, reason: str) -> None:
        """Records that a rank, or a server, takes part in nothing any more."""
        self._server.rank_ended(rank, reason)

    def end(self) -> None:
        """Announces the end to the servers: all ranks have ended.

        A server that receives the message twice reads it once.
        """
        if not self._is_over:
            self._is_over = True
            self.end_due = time.monotonic() + _END_SECONDS
            self._announce(list(self._present), [END])

    def overdue(self, now: float, running: Iterable[str]) -> str:
        """Returns a sentence about the servers that have not ended in time; "" if it is not yet time.

        `running` are the names of the processes that still run.
        """
        late = list(running)
        if self.end_due is None or now < self.end_due or not late:
            return ""
        return f"all ranks have ended, but not {join_names(late)} within {_END_SECONDS:g} s"

    def close(self) -> None:
        """Ends the rendezvous: all processes have ended."""
        self.end_due = None
        self._server.close()

    @property
    def notice(self) -> str:
        """Returns a notice after a successful job: "", or that the servers were not needed."""
        if self._tables:
            return ""
        count = len(self.numbers)
        servers = "the server has" if count == 1 else f"the {count} servers have"
        return f"{servers} served nothing: no rank made an hvd.ParameterServer (--servers)"

    @property
    def _server(self) -> RendezvousServer:
        assert self._rendezvous is not None
        return self._rendezvous

    def _announce(self, members: Sequence[int] | set[int], tables: Sequence[int]) -> None:
        for member in members:
            for table in tables:
                self._server.send_message(member, Frame(MessageKind.TABLE, number=table))
