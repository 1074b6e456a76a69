"""The life of a worker's process: from `init()` through its generations to its end."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NoReturn

from sirtaki.bindings import variables
from sirtaki.bindings.bootstrap import lifecycle
from sirtaki.bindings.bootstrap.connection.address import is_own_address, resolve_all, split_address
from sirtaki.bindings.bootstrap.elastic.messages import End
from sirtaki.bindings.bootstrap.elastic.messages import World as Place
from sirtaki.bindings.bootstrap.elastic.spare import wait_for_place
from sirtaki.bindings.bootstrap.elastic.worker import ElasticWorker
from sirtaki.bindings.bootstrap.job import ARBITER, WORKER, Identity, Job, RendezvousError, job_of_workers
from sirtaki.bindings.bootstrap.providers.environment import key_of_launcher
from sirtaki.bindings.bootstrap.providers.world import VERSION, World, number_in
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.termination import end_children_on_sigterm
from sirtaki.bindings.bootstrap.world_builder import describe_process, topology_of
from sirtaki.bindings.context import SHUTDOWN_MS, Context, process
from sirtaki.bindings.errors import InitializationError, NotInitializedError
from sirtaki.bindings.library import Config
from sirtaki.bindings.observing import observe, user_code
from sirtaki.bindings.request import Batch
from sirtaki.bindings.survivors import Membership, Survivors
from sirtaki.bindings.topology import RankPlacement

_LINK_SECONDS = 10.0  # to link with the other members, which all are there
_LINK_SECONDS_PER_RANK = 0.1
# The longest wait for the driver's answer, which starts other workers meanwhile. Its end is noticed at once.
_ATTACH_SECONDS = 120.0
_NOTICE_SECONDS = 0.3  # for links to fail by themselves


@dataclass
class WorkerProcess:
    """This process in an elastic job: its worker, and what it carries from world to world."""

    worker: ElasticWorker
    survivors: Survivors
    job: Job
    folder: str
    has_run: bool = False  # whether `hvd.elastic.run` has been called
    unreachable: list[int] = field(default_factory=list)  # ranks of the world that it could not enter

    def enter(self, place: Place) -> Context:
        """Makes this process a rank of a generation; its survivors have yet to move. All members call it.

        Raises:
            InitializationError, DeadlineError: this rank and another could not link.
        """
        size = len(place.slots)
        job = Job(place.job, size, self.job.key, VERSION)
        seconds = _LINK_SECONDS + _LINK_SECONDS_PER_RANK * size
        self.unreachable = []

        def note_unreachable(addresses: Mapping[int, Sequence[str]]) -> None:
            one_of_each_host = {place.slots[rank].rpartition(":")[0]: rank for rank in addresses}
            self.unreachable = find_unreachable({rank: addresses[rank] for rank in one_of_each_host.values()})

        world = World(
            place.rank, job, place.address, seconds, folder=self.folder, on_no_link=note_unreachable
        )
        context = lifecycle.enter(lambda: world, counts=False)
        # A survivor keeps its slot, and so its local rank and its GPU, for life.
        slot = int(place.slots[place.rank].rpartition(":")[2])
        context.topology = replace(context.topology, local_rank=slot)
        context.survivors = self.survivors
        self.survivors.membership = Membership(place.generation, place.workers, place.initial)
        if (timeline := self.survivors.timeline) is not None and timeline.is_running:
            timeline.enter(context)
        return context

    def break_off(self, text: str) -> None:
        """Makes the operations of the current world fail soon: a rank that cannot be reached was lost.

        A rank that was killed has made them fail by then, with a text of their own. A host that is cut off is
        noticed on its links later than by hvdrun.
        """
        context = process.context

        def abort() -> None:
            if context is not None and not context.is_shut_down and context.failure is None:
                context.abort(text)

        timer = threading.Timer(_NOTICE_SECONDS, abort)
        timer.daemon = True
        timer.start()

    def leave(self) -> None:
        """Leaves the current world, if any: waits for operations in flight, unless it has failed."""
        if (context := process.context) is not None:
            # Nobody needs its last words: hvdrun tells all members that the world has ended.
            lifecycle.leave(context, SHUTDOWN_MS if context.failure is None else 0)


@dataclass(frozen=True)
class Assignment:
    """The part of a process in an elastic job, as its driver describes it.

    Attributes:
        number: the worker's.
        job: that of the rendezvous between workers and the arbiter, at the address `arbiter`.
        folder: the job's private folder on this host; "" if there is none.
        placement: the provisional rank.
    """

    number: int
    job: Job
    arbiter: str
    folder: str
    placement: RankPlacement

    @classmethod
    def of_environment(cls) -> Assignment:
        """Returns what hvdrun has set. Raises RendezvousError if that is incomplete."""
        key_file = os.environ.get("SIRTAKI_KEY_FILE", "")
        if not key_file:
            raise RendezvousError("SIRTAKI_KEY_FILE is not set: this process is a child of a worker, not one")
        job = Job(os.environ["SIRTAKI_JOB"], 1, key_of_launcher(key_file), VERSION)
        fields = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
        placement = RankPlacement(*(number_in(os.environ, f"SIRTAKI_{name.upper()}") for name in fields))
        number = number_in(os.environ, WORKER)
        return cls(number, job_of_workers(job), os.environ[ARBITER], os.path.dirname(key_file), placement)


@dataclass
class _State:
    process: WorkerProcess | None = None
    assignment: Assignment | None = None  # by an engine


_state = _State()


def find() -> WorkerProcess | None:
    """Returns this process as a worker of an elastic job; None outside an elastic job."""
    return _state.process


def assign(assignment: Assignment) -> None:
    """Makes `init()` in this process that of a worker of an engine's job. The key stays in this process."""
    _state.assignment = assignment
    os.environ |= {WORKER: str(assignment.number), "HOROVOD_ELASTIC": "1"}


def end() -> None:
    """Ends this process's part in its job: completes operations in flight, and closes its connection."""
    if _state.process is not None:
        _state.process.leave()
        _state.process.worker.close()


def attach() -> None:
    """Connects this process to the arbiter, and gives it the provisional rank that its driver has named.

    Raises InitializationError if the arbiter is gone, or does not accept it.
    """
    if _state.process is not None:
        raise InitializationError(
            "hvd.shutdown() has ended this rank's part in the job: in a job with --min-np, a process takes "
            "part once, from hvd.init() to the end of hvd.elastic.run"
        )
    wait_for_place()
    variables.check()
    config = Config(variables.values())
    try:
        mine = _state.assignment or Assignment.of_environment()
        job = mine.job
        if config.get("encrypt") == "1":
            job = lifecycle.encrypted(job)
        client = RendezvousClient.connect(mine.arbiter, job, Identity(mine.number), _ATTACH_SECONDS)
        client.report("initialised")
    except RendezvousError as error:
        raise InitializationError(f"this process cannot reach the driver that started it: {error}") from None
    survivors = Survivors()
    worker = ElasticWorker(client, mine.number)
    _state.process = WorkerProcess(worker, survivors, job, mine.folder)
    worker.on_over(_state.process.break_off)
    process.context = context = ProvisionalContext(mine.placement, config, survivors)
    observe.start_timeline_of_environment(context)
    drain_on_sigterm(worker)


def _after_fork() -> None:
    """Makes a forked child no worker: its parent is."""
    if _state.process is not None:
        _state.process.worker.close()
        _state.process = None


os.register_at_fork(after_in_child=_after_fork)


# ---- SIGTERM to a worker: it asks to leave at the next commit, and its children end as ever ------------


@dataclass
class _Draining:
    """Handles SIGTERM in a worker process."""

    worker: ElasticWorker
    parent: int = field(default_factory=os.getppid)  # hvdrun or its agent, as a rule
    is_asked: threading.Event = field(default_factory=threading.Event)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Asks the arbiter for this rank's departure.

        A second signal ends the process, and so does the first signal if the job has ended: hvdrun sends it
        after its message. If hvdrun, or the agent of this host, is gone, the kernel sends it.
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.is_asked.set()
        if _is_final(self.worker.end) or os.getppid() != self.parent:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        sys.stderr.write("sirtaki: asked to end (SIGTERM): this rank leaves at the next commit\n")
        # A thread of its own: the interrupted code may be sending, too.
        threading.Thread(target=self.worker.drain, name="sirtaki drain", daemon=True).start()

    def end(self, message: End) -> None:
        """Ends the process if the message of the job's end has come after the signal."""
        if self.is_asked.is_set() and _is_final(message):
            os.kill(os.getpid(), signal.SIGTERM)


def drain_on_sigterm(worker: ElasticWorker) -> None:
    """Makes SIGTERM ask for a place to leave, unless the program handles it itself."""
    draining = _Draining(worker)
    try:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, draining.handle)
    except ValueError:  # init() was called outside of the main thread
        return
    worker.on_end(draining.end)
    end_children_on_sigterm(draining.handle)


def _is_final(message: End | None) -> bool:
    """Returns whether the job has ended, and not only this worker's part in it."""
    return message is not None and message.code != 0


# ---- Finds the hosts that cannot be reached from here, for a rank that could not link to the others ----


_SECONDS = 2.0  # TCP repeats its first packet after one second
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)  # the host has answered, whether or not a rank listens
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # nothing was sent


def find_unreachable(addresses: Mapping[int, Sequence[str]]) -> list[int]:
    """Returns the ranks of which no address answers: neither accepts nor refuses a connection.

    Args:
        addresses: by rank; all of them are tried at the same time. Those that this host has, too, prove
            nothing: a container's bridge has the same address on many hosts. A rank that cannot be tried,
            because this process may open no more files, is not among the returned ones.
    """
    try:
        return _find_unreachable(addresses)
    except OSError:  # not even one can be tried
        return []


def _find_unreachable(addresses: Mapping[int, Sequence[str]]) -> list[int]:
    with contextlib.ExitStack() as cleanup:
        selector = cleanup.enter_context(selectors.DefaultSelector())
        unreached = set(addresses)
        for rank, own in addresses.items():
            for address in own:
                if _begin(address, rank, selector, cleanup):
                    unreached.discard(rank)
        deadline = time.monotonic() + _SECONDS
        while unreached and selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                connection, rank = key.fileobj, key.data
                assert isinstance(connection, socket.socket)
                selector.unregister(connection)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                    unreached.discard(rank)
    return sorted(unreached)


def _begin(address: str, rank: int, selector: selectors.BaseSelector, cleanup: contextlib.ExitStack) -> bool:
    """Begins to connect; returns whether the host has answered already, or cannot be tried."""
    try:
        for family, sockaddr in resolve_all(*split_address(address)):
            if is_own_address(family, (sockaddr[0], 0, *sockaddr[2:])):
                continue
            connection = cleanup.enter_context(socket.socket(family))
            connection.setblocking(False)
            code = connection.connect_ex(sockaddr)
            if code in _ANSWERS or code in _EXHAUSTED:
                return True
            if code == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, rank)
    except OSError as error:  # or an address of a kind that this host does not have
        return error.errno in _EXHAUSTED
    return False


# ---- The context of a worker that is not a rank yet: it has a rank and a size, but nobody to talk to ---


class ProvisionalContext(Context):
    """The context between `hvd.init()` and `hvd.elastic.run`; operations raise.

    Its rank and size are those with which hvdrun has started the worker. They serve to make optimizers and
    samplers, which move to the first world when it exists.
    """

    is_provisional = True

    def __init__(self, placement: RankPlacement, config: Config, survivors: Survivors) -> None:
        alone = topology_of(0, [describe_process("", {})])
        super().__init__(alone, config)
        self.start()
        self.topology = replace(
            alone,
            rank=placement.rank,
            size=placement.size,
            local_rank=placement.local_rank,
            local_size=placement.local_size,
            cross_rank=placement.cross_rank,
            cross_size=placement.cross_size,
            peers=[alone.peers[0]] * placement.size,
        )
        self.rank, self.size = placement.rank, placement.size
        self.survivors = survivors

    def enqueue(self, batch: Batch, start: int = 0, count: int | None = None) -> None:
        self._refuse()

    def run(self, batch: Batch) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotInitializedError(
            f"rank {self.rank} exchanges data outside of hvd.elastic.run{_place()}: in a job with --min-np, "
            "ranks exist only inside the function that @hvd.elastic.run decorates. Move this call into it; "
            "the state is sent to all ranks before it starts"
        )


@contextmanager
def closed(context: Context, why: str) -> Iterator[None]:
    """Refuses all exchanges inside, with this reason: other ranks would not take part."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotInitializedError(f"rank {context.rank} exchanges data{_place()}, but {why}")

    context.clear_process_context()
    context.enqueue = context.run = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        del context.enqueue, context.run
        context.set_process_context()


def _place() -> str:
    """Returns the user's innermost line, in parentheses; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and user_code.is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return f" ({user_code.CallSite(frame.f_code, frame.f_lasti)})" if frame is not None else ""
