"""Tables that servers serve beside the ranks (`hvdrun --servers`): their worlds, and the program of a server.

The part that knows the arrays of a framework is that framework's.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

from sirtaki.bindings.bootstrap import lifecycle
from sirtaki.bindings.bootstrap.job import END, RendezvousError, RendezvousTimeout
from sirtaki.bindings.bootstrap.tables import TableNews, count_servers, enter_table
from sirtaki.bindings.context import SHUTDOWN_MS, Context, using
from sirtaki.bindings.errors import (
    DeadlineError,
    HorovodInternalError,
    InitializationError,
    InternalError,
    OutOfMemoryError,
    SystemRefusedError,
)
from sirtaki.bindings.observing import user_code
from sirtaki.common.ops.objects import broadcast_object

# Serves the table of a world. Calls the function at the end, with the table's failure, from any thread.
Serve = Callable[[Context, Callable[[BaseException | None], None]], None]


def world_of_next_table(context: Context) -> Context | None:
    """Returns the world that the ranks of `context` share with the servers for another table.

    Returns None in a job without servers. All ranks must call it. `leave_table` ends the rank's part.

    Raises:
        DeadlineError: a rank or a server did not arrive in time.
        InitializationError: one has failed.
    """
    if not count_servers():
        return None
    try:
        table = enter_table(context.rank, lifecycle.next_table())
    except RendezvousTimeout as error:
        raise DeadlineError(f"rank {context.rank} could not make the table: {error}") from None
    except RendezvousError as error:
        raise InitializationError(f"rank {context.rank} could not make the table: {error}") from None
    lifecycle.note_table(table)
    with using(table):
        broadcast_object(sys.path)
    return table


def leave_table(table: Context, failure: BaseException | None) -> None:
    """Ends this rank's part in the world of a table. After a failure that world is kept, which tells why."""
    if failure is None:
        lifecycle.leave_table(table)


class TableServer:
    """The program of a server: it serves tables from the beginning of a job until its ranks have ended."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._news: SimpleQueue[Callable[[], None]] = SimpleQueue()  # things to do in the main thread
        self._open = 0  # tables
        self._has_ended = False
        self._connection = TableNews()

    def run(self) -> None:
        """Serves all tables until the ranks have ended. Raises SystemExit if a table has failed here."""
        threading.Thread(target=self._read, name="sirtaki tables", daemon=True).start()
        while self._open or not self._has_ended:
            self._news.get()()

    def _read(self) -> None:
        """Passes hvdrun's news to the main thread."""
        try:
            while (table := self._connection.next()) != END:
                self._news.put(lambda number=table: self._begin(number))  # type: ignore[misc]
            self._news.put(self._end)
        except (OSError, RendezvousError) as error:
            reason = f"a server of tables on {socket.gethostname()} has lost hvdrun: {error}"
            self._news.put(lambda: sys.exit(reason))

    def _end(self) -> None:
        self._has_ended = True

    def _begin(self, number: int) -> None:
        try:
            context = enter_table(self._connection.member, number)
        except RendezvousError:  # all ranks raise it, and end the job
            return
        self._open += 1
        try:
            with using(context):
                path = broadcast_object()
                sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]
            self._serve(context, lambda failure: self._leave(context, failure))
        except Exception as error:
            self._leave(context, error)

    def _leave(self, context: Context, failure: BaseException | None) -> None:
        """Ends this server's part in the world of a table; any thread may.

        A failure that another member has caused, or the early end of a rank, is told by hvdrun or by that
        rank. Any other ends the job: the table exists nowhere else.
        """
        if failure is None or (isinstance(failure, HorovodInternalError) and not _is_own(context, failure)):
            context.shutdown(SHUTDOWN_MS)
            self._news.put(self._close)
            return
        reason = lifecycle.reason_of(failure)
        self._connection.report_failure(reason)
        context.abort(reason)
        self._news.put(lambda: self._fail(failure))

    def _close(self) -> None:
        self._open -= 1

    def _fail(self, failure: BaseException) -> None:
        user_code.show(failure, sys.excepthook, is_from_sirtaki=False)
        sys.exit(1)


def _is_own(context: Context, failure: HorovodInternalError) -> bool:
    """Returns whether a failure of the core began in this process."""
    culprit = None if context.failure is None else context.failure.culprit
    is_of_machine = isinstance(failure, OutOfMemoryError | SystemRefusedError | InternalError)
    return is_of_machine and culprit in (None, context.rank)
