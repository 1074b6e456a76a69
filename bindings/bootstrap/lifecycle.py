"""The life cycle of this process as a rank: init, shutdown, and unplanned ends.

An uncaught exception aborts the world before exit handlers run, so that the other ranks raise with its text.
A normal exit completes the operations in flight first. A process that a rank has forked or started is not a
rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sirtaki.bindings import variables
from sirtaki.bindings.bootstrap.connection.address import chosen_interfaces, restrict_nccl
from sirtaki.bindings.bootstrap.job import (
    DEBUGGED,
    KEY_ADVICE,
    WORKER,
    Identity,
    Job,
    RendezvousError,
    RendezvousTimeout,
)
from sirtaki.bindings.bootstrap.messages import RankEvent, describe
from sirtaki.bindings.bootstrap.providers import World, find_world
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.world_builder import WorldBuilder, single_rank_context
from sirtaki.bindings.context import SHUTDOWN_MS, Context, process
from sirtaki.bindings.errors import (
    DeadlineError,
    ForkedError,
    InitializationError,
)
from sirtaki.bindings.library import Config
from sirtaki.bindings.observing import observe, state_file, user_code

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer

# Set while this process is a rank: "job:rank:pid". It lets a child that inherits it report whose child it is.
_RANK_VARIABLE = "SIRTAKI_INITIALISED_BY"


@dataclass
class _Rank:
    """State that outlives a context: the number of init() calls, and the connection to the launcher."""

    generation: int = 0
    client: RendezvousClient | None = None
    server: RendezvousServer | None = None
    aborted: bool = False
    previous_hook: Any = None
    previous_thread_hook: Any = None
    has_lost_thread: bool = False  # and has reported it, in this world
    pid: int = 0  # the process that called init(); a forked child has another
    arguments: dict[str, Any] = field(default_factory=dict)  # those given to that call
    is_claimed: bool = False  # whether init() was called in this world, which a process group may have made
    last_table: int = 0  # number of tables that it has begun to share with servers
    tables: list[Context] = field(default_factory=list)  # the worlds that it shares with servers of tables


_rank = _Rank()


def check_repeated_init(arguments: Mapping[str, Any]) -> None:
    """Checks a repeated init() call by its arguments that are not None.

    Raises:
        ForkedError: this is a child of the process that called init() before.
        ValueError: an argument differs from the first call.
    """
    check_not_forked()
    context = process.context
    if context is None:
        return
    for name, value in arguments.items():
        if value is not None and value != _rank.arguments.get(name):
            first = ", ".join(f"{rank}={_shown(rank, given)}" for rank, given in _rank.arguments.items())
            raise ValueError(
                f"hvd.init() is called again, with {name}={_shown(name, value)}, but this process is rank "
                f"{context.rank} of {context.size} already, by hvd.init({first}); call hvd.shutdown() before"
            )
    _rank.is_claimed = True


def check_not_forked() -> None:
    """Raises ForkedError if this is a child of the process that called init()."""
    context = process.context
    if context is not None and _rank.pid != os.getpid():
        raise ForkedError(
            f"this process (pid {os.getpid()}) was forked from rank {context.rank} (pid {_rank.pid}), which "
            "had called hvd.init() before: only that process is a rank. Start further ones with hvdrun"
        )


def _shown(name: str, value: Any) -> str:
    return "..." if name == "key" else repr(value)


def store_arguments(arguments: Mapping[str, Any]) -> None:
    """Stores the arguments of init() for `check_repeated_init`."""
    _rank.pid, _rank.is_claimed = os.getpid(), True
    _rank.arguments = {name: value for name, value in arguments.items() if value is not None}


def start(
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    key: bytes | str | None = None,
    comm: Any = None,
) -> None:
    """Makes this process a rank of its world; does nothing if it is a rank already. All ranks must call it.

    Raises:
        ValueError: incomplete arguments, or a setting with a wrong value.
        DeadlineError: a rank did not arrive in time; the text names it.
        InitializationError: the ranks are inconsistent, or this process is a child of a rank.
    """
    if process.context is not None:
        return
    restrict_nccl()
    _wait_for_debugger()
    if WORKER in os.environ:
        from sirtaki.bindings.bootstrap.elastic import process as elastic

        elastic.attach()
        _install_exit_hooks()
        return
    enter(lambda: find_world(rank, size, address, key, comm))


def _wait_for_debugger() -> None:
    """Waits until a debugger has connected, if this rank is that of hvdrun's --debug-port."""
    rank, _, port = os.environ.get(DEBUGGED, "").partition(":")
    if not port or rank != os.environ.get("SIRTAKI_RANK"):
        return
    del os.environ[DEBUGGED]  # a later init() does not wait again
    try:
        import debugpy
    except ImportError:
        raise InitializationError(
            f"rank {rank} cannot wait for a debugger (--debug-port): pip install debugpy"
        ) from None
    debugpy.listen(("127.0.0.1", int(port)))
    where = f"port {port} of the loopback address of {socket.gethostname()}"
    sys.stderr.write(f"sirtaki: rank {rank} waits for a debugger at {where}\n")
    debugpy.wait_for_client()


def enter(find: Callable[[], World], counts: bool = True) -> Context:
    """Makes this process a rank of the world that `find` returns, and returns its context. Raises as `start`.

    The world's ranks have to agree on the number of worlds that they have been in, if it `counts`.
    """
    where = socket.gethostname()
    try:
        world = find()
        _reject_child_process(world)
        where = f"rank {world.rank} on {where}"
        context = _join(world, counts)
    except RendezvousTimeout as error:
        raise DeadlineError(f"{where} could not start: {error}") from None
    except RendezvousError as error:
        raise InitializationError(f"{where} could not start: {error}") from None
    process.context = context
    context.set_process_context()
    os.environ[_RANK_VARIABLE] = f"{world.job.id}:{world.rank}:{os.getpid()}"
    _install_exit_hooks()
    if _rank.client is not None:
        _rank.client.report("initialised")
    observe.start_timeline_of_environment(context)
    state_file.start_of_environment()
    return context


def enter_for_group(find: Callable[[], World], counts: bool) -> Context:
    """Makes this process a rank for a process group. A later init() shares the world. Raises as `start`."""
    context = enter(find, counts)
    _rank.pid, _rank.arguments, _rank.is_claimed = os.getpid(), {}, False
    return context


def leave_for_group() -> None:
    """Ends the world that `enter_for_group` has made, unless init() was called since."""
    if not _rank.is_claimed:
        stop()


def stop() -> None:
    """Completes the operations in flight, and ends this process's role as a rank. init() may follow.

    Does nothing if this process is not a rank.
    """
    if _rank.pid != os.getpid():  # a forked child: the rank keeps running
        return
    context = process.context
    if context is None:
        return
    process.was_shut_down = True
    leave(context)


def leave(context: Context, timeout_ms: int = SHUTDOWN_MS) -> None:
    """Completes the operations of a world, unless it has failed, and ends this process's part in it."""
    process.context = None
    os.environ.pop(_RANK_VARIABLE, None)
    context.clear_process_context()
    for table in list(_rank.tables):
        leave_table(table, timeout_ms)
    context.shutdown(timeout_ms)
    _close_client("finished")


def next_table() -> int:
    """Numbers tables from 1 for the whole life of this process, as their rendezvous does."""
    _rank.last_table += 1
    return _rank.last_table


def note_table(context: Context) -> None:
    """Adds a context that this rank shares with table servers; it ends with the rank's own world."""
    _rank.tables.append(context)


def leave_table(context: Context, timeout_ms: int = SHUTDOWN_MS) -> None:
    """Ends this rank's part in a world that it shares with servers."""
    if context in _rank.tables:
        _rank.tables.remove(context)
        context.shutdown(timeout_ms)


def forget() -> None:
    """Ends this process's part in its world, if any, and forgets its worlds.

    An engine may use the process again: the ranks of its next job have not been in the same worlds before.
    """
    context = process.context
    if context is not None and _rank.pid in (0, os.getpid()):
        leave(context, SHUTDOWN_MS if context.failure is None else 0)
    if _rank.server is not None:
        _rank.server.close()
    _rank.generation, _rank.server, _rank.aborted, _rank.is_claimed = 0, None, False, False
    _rank.pid, _rank.arguments = 0, {}
    process.was_shut_down = False


def _join(world: World, counts: bool) -> Context:
    variables.check()
    if world.rank == 0:
        # hvdrun has named the variables with which the process started.
        is_told = os.environ.get("SIRTAKI_LAUNCHER") == "hvdrun"
        for sentence in variables.unknown(variables.set_since_start() if is_told else os.environ):
            sys.stderr.write(f"sirtaki: {sentence}\n")
    config = Config(variables.values())
    if not world.address:
        return single_rank_context(config)
    if config.get("encrypt") == "1":
        world = replace(world, job=encrypted(world.job))
    _rank.generation = _rank.generation + 1 if counts else 1
    _rank.aborted = _rank.has_lost_thread = False
    address = _rendezvous(world)
    mine = Identity(world.rank, _rank.generation)
    _rank.client = RendezvousClient.connect(address, world.job, mine, world.start_timeout)
    try:
        return WorldBuilder(world, _rank.generation, _rank.client, config).run()
    except Exception as error:
        _close_client("peer_lost" if _rank.client.failure_reported else "aborted", str(error))
        raise
    except BaseException:
        _close_client("")
        raise


def encrypted(job: Job) -> Job:
    """Returns a job with encrypted connections between hosts. Raises RendezvousError if impossible."""
    if not job.key:
        raise RendezvousError(f"encryption needs a common key of all ranks: {KEY_ADVICE}")
    from sirtaki.bindings.bootstrap.connection.encryption import own_certificate  # opens OpenSSL

    own_certificate()
    return replace(job, encrypt=True)


def _rendezvous(world: World) -> str:
    """Returns the address of the rendezvous. Rank 0 serves it, unless a launcher does."""
    address = world.address
    if world.serves:
        if _rank.server is not None and _rank.server.job != world.job:
            _rank.server.close()
            _rank.server = None
        if _rank.server is None:
            from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer

            interfaces = chosen_interfaces()
            server = RendezvousServer(address, world.job, world.start_timeout, print_rejections, interfaces)
            _rank.server = server.start()
        address = _rank.server.address
    return world.announce(address) if world.announce else address


def print_rejections(event: RankEvent) -> None:
    """Reports a connection that the rendezvous of rank 0 has refused."""
    if event.kind == "refused":
        sys.stderr.write(f"sirtaki: the rendezvous of rank 0 reports that {describe(event)}\n")


def _close_client(event: str, text: str = "") -> None:
    client, _rank.client = _rank.client, None
    if client is not None:
        if event and not _rank.aborted:
            client.report(event, text)
        client.close()


def _reject_child_process(world: World) -> None:
    job, _, process = os.environ.get(_RANK_VARIABLE, "").partition(":")
    rank, _, pid = process.partition(":")
    if world.address and pid and job == world.job.id and pid != str(os.getpid()):
        raise RendezvousError(
            f"this process (pid {os.getpid()}) is a worker of rank {rank} (pid {pid}), not a rank of its "
            "own; it ran the training script again: put training under `if __name__ == '__main__':`"
        )


def _install_exit_hooks() -> None:
    if sys.excepthook is not _abort_on_exception:
        _rank.previous_hook = sys.excepthook
        sys.excepthook = _abort_on_exception
    if threading.excepthook is not _report_thread:
        _rank.previous_thread_hook = threading.excepthook
        threading.excepthook = _report_thread
    # Exit handlers run last in, first out: a framework that was imported before init() still works here.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _at_exit() -> None:
    stop()
    if _rank.server is not None:
        _rank.server.close()
        _rank.server = None


def abort(error: BaseException) -> bool:
    """Ends this rank's world, if any, because of an exception: the other ranks raise with its text.

    Returns whether the world had failed before.
    """
    context = process.context
    if context is None or _rank.aborted:
        return False
    reason = reason_of(error)
    _rank.aborted = True
    if _rank.client is not None:
        _rank.client.report("peer_lost" if _is_caused_elsewhere(context) else "aborted", reason)
    had_failed = context.failure is not None
    for world in (context, *_rank.tables):
        world.abort(reason)
    return had_failed


def report_can_stop() -> None:
    """Reports to the launcher that this rank hears of requests to stop, and need not be ended by a signal."""
    if _rank.client is not None:
        _rank.client.report("can_stop")


def is_failure_caused_elsewhere() -> bool:
    """Returns whether this rank's world has failed because of another rank."""
    context = process.context
    return context is not None and _is_caused_elsewhere(context)


def _abort_on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    is_from_sirtaki = abort(error.with_traceback(trace))
    user_code.show(error, _rank.previous_hook, is_from_sirtaki)


def _report_thread(ended: threading.ExceptHookArgs) -> None:
    """Shows and reports an exception that has ended a thread, without which Python lets the process go on."""
    error, context = ended.exc_value, process.context
    if error is None or isinstance(error, SystemExit):
        _rank.previous_thread_hook(ended)
        return
    if _rank.client is not None and not (_rank.aborted or _rank.has_lost_thread):
        _rank.has_lost_thread = True
        name = "unknown" if ended.thread is None else ended.thread.name
        _rank.client.report("thread_failed", f"an exception ended its thread {name!r}: {reason_of(error)}")
    has_failed = context is not None and context.failure is not None
    user_code.show_in_thread(ended, _rank.previous_thread_hook, has_failed)


def _is_caused_elsewhere(context: Context) -> bool:
    """Returns whether another rank caused the failure of this rank.

    The exception's class does not show this, because frameworks and users wrap sirtaki's exceptions in their
    own.
    """
    failures = [world.failure for world in (context, *_rank.tables)]
    if culprits := [failure.culprit for failure in failures if failure is not None]:
        return culprits[0] != context.rank
    return any(world.has_missed_peer for world in (context, *_rank.tables))


def reason_of(error: BaseException) -> str:
    """Returns the reason for other ranks: the exception's last line, and the user's line that raised it."""
    with contextlib.suppress(Exception):
        what, place = user_code.summary_of(error), user_code.location_of(error.__traceback__)
        return f"{what} ({place})" if place else what
    return type(error).__name__


def _after_fork() -> None:
    if _rank.client is not None:
        _rank.client.close()
        _rank.client = None


os.register_at_fork(after_in_child=_after_fork)
