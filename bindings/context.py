"""The context of a rank: owns the core's context, and every operation in flight on it."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from sirtaki.bindings.errors import Failure, NotInitializedError, error_of, status_name
from sirtaki.bindings.library import Config, call, ffi, lib, text
from sirtaki.bindings.observing.step_counters import CompressionCounters, StepCounters
from sirtaki.bindings.request import Batch, DeviceOutput, Output, profiled

if TYPE_CHECKING:
    from sirtaki.bindings.observing.program_timeline import ProgramWatch
    from sirtaki.bindings.survivors import Survivor, Survivors
    from sirtaki.bindings.topology import SharedMemory, Topology

# Waits are cut into slices, so that Ctrl-C is noticed. It ends the wait, not the operation.
SLICE_MS = 100
SHUTDOWN_MS = 30_000

_OK: int = lib.SRT_OK
_IN_PROGRESS: int = lib.SRT_IN_PROGRESS
_UNTOUCHED: int = lib.SRT_RESULT_UNTOUCHED
_OFFERED: int = lib.SRT_RESULT_OFFERED
_srt_enqueue, _srt_run, _srt_wait = lib.srt_enqueue, lib.srt_run, lib.srt_wait
_srt_poll, _srt_release = lib.srt_poll, lib.srt_release


class _Native:
    """The core's context. It outlives shutdown while a result that it allocated is in use."""

    __slots__ = ("__weakref__", "pid", "pointer")

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self.pid = os.getpid()

    def __del__(self, destroy: Any = lib.srt_destroy, getpid: Any = os.getpid) -> None:
        if self.pid == getpid():
            self.pid = 0  # garbage that ends with it, such as a result, must not use the context any more
            destroy(self.pointer)


def _shape_of(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape[0 : tensor.dimensions])


class Context:
    """One rank: created, linked to its peers, started, used, shut down. A process may have several.

    Every method may be called from any thread. The exceptions are those of sirtaki.bindings.errors.
    """

    is_provisional = False  # whether the ranks do not exist yet: between init() and hvd.elastic.run

    def __init__(self, topology: Topology, config: Config) -> None:
        self.topology, self.rank, self.size = topology, topology.rank, topology.size
        self.is_shut_down, self._config = False, config
        self.survivors: Survivors | None = None  # in an elastic job
        self.timeline = _TimelineFile()
        self.refused_batches = 0  # number that could not be queued
        self.compression = CompressionCounters()
        self.member_sets: dict[tuple[int, ...], Any] = {}  # process sets that only their ranks have added
        self.described_batches: dict[Any, Batch] = {}  # unused, by what distinguishes their requests
        self.joins: dict[int, Any] = {}  # by the number of the process set
        self.is_stopping = False  # whether the ranks have agreed to end their training early
        self.epochs: dict[int, Any] = {}  # by thread: epoch and index of the last batch, number read
        self._numbers: Counter[str] = Counter()
        self._progress_callbacks: deque[Callable[[], bool]] = deque()
        self._progress_lock = threading.Lock()
        self.shutdown_callbacks: list[Callable[[], None]] = []  # called first by `shutdown`
        self.end_callbacks: list[Callable[[], None]] = []  # called last by it
        hosts = [ffi.new("char[]", peer.host.encode()) for peer in topology.peers]
        peers = ffi.new(
            "srt_peer[]", [(host, p.pid, p.host_index) for host, p in zip(hosts, topology.peers, strict=True)]
        )
        described = ffi.new("srt_topology *", {"struct_size": ffi.sizeof("srt_topology"), "peers": peers})
        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
            setattr(described, name, getattr(topology, name))
        out = ffi.new("srt_context **")
        call(lib.srt_create, config.pointer, described, out)
        self._native = _Native(out[0])
        self._pointer = out[0]
        self.steps = StepCounters(self._native)
        self._detached = DetachedOperations(out[0])
        _live.add(self)

    def link_socket(self, peer: int, descriptor: int) -> None:
        """Passes the core a connected stream socket to a peer. The core takes ownership of the descriptor."""
        call(lib.srt_link_socket, self._pointer, peer, descriptor)

    def link_tls(self, peer: int, descriptor: int, session: Any) -> None:
        """Works like `link_socket`, for a socket with an established TLS session; takes over the session."""
        call(lib.srt_link_tls, self._pointer, peer, descriptor, session)

    def link_memory(self, memory: SharedMemory) -> None:
        """Passes the core the shared memory of this host's ranks. The descriptors are duplicated."""
        described, _alive = memory.as_struct()
        call(lib.srt_link_memory, self._pointer, described)

    def start(self) -> None:
        """Starts negotiation. All ranks of the world must call it."""
        call(lib.srt_start, self._pointer)

    @profiled(part=0)
    def enqueue(self, batch: Batch, start: int = 0, count: int | None = None) -> None:
        """Queues requests `start` to `start + count` of a batch, all or none.

        `batch.keepalive` stays alive until they end.
        """
        if self._detached:
            self._detached.sweep()
        number = batch.count - start if count is None else count
        batch.context = self
        requests, handles = batch.requests + start, batch.handles + start
        status = _srt_enqueue(self._pointer, requests, number, handles, batch.error)
        if status != _OK:
            self._reject(status, batch)

    @profiled()
    def begin(self, batch: Batch) -> bool:
        """Queues a whole batch, and waits for up to SLICE_MS; returns whether it has ended successfully.

        Unlike after `enqueue`, the caller's thread drives the engine, whose own thread is not woken.
        """
        if self._detached:
            self._detached.sweep()
        batch.context = self
        status = _srt_run(self._pointer, batch.requests, batch.count, SLICE_MS, batch.handles, batch.error)
        if status != _OK and not batch.handles[0]:
            self._reject(status, batch)
        return bool(status == _OK)

    def run(self, batch: Batch) -> None:
        """Queues a whole batch and waits for it. Afterwards, `release` it or take its outputs."""
        if not self.begin(batch):
            self.wait(batch)

    def _reject(self, status: int, batch: Batch) -> NoReturn:
        self.refused_batches += 1
        raise error_of(status, text(batch.error.text))

    @profiled(", wait", part=0)
    def wait(self, batch: Batch, start: int = 0, count: int | None = None) -> None:
        """Waits until requests `start` to `start + count` have ended; raises the first error.

        Failed requests are released. A Ctrl-C ends the wait only: operations stay in flight.
        """
        number = batch.count - start if count is None else count
        handles = batch.handles + start
        if self._progress_callbacks:
            self.run_progress_callbacks()
        while True:
            status = _srt_wait(self._pointer, handles, number, SLICE_MS)
            if status == _OK:
                return
            if status != _IN_PROGRESS:
                self._fail(status, batch, start, number, self.release)
            self.run_progress_callbacks()

    @profiled(", wait", part=1)
    def wait_in_stream(self, batch: Batch, stream: int, start: int = 0, count: int | None = None) -> None:
        """Works like `wait`, for requests on a GPU: makes a CUDA stream wait for them, and not the host.

        Afterwards their results may be used in that stream, and what is kept alive for them may be reused by
        its work; release them with `detach`. After `wait_on_host` the host waits, too.
        """
        number = batch.count - start if count is None else count
        handles = batch.handles + start
        while True:
            if self._progress_callbacks:
                self.run_progress_callbacks()
            status = lib.srt_wait_on_stream(self._pointer, handles, number, stream, SLICE_MS)
            if status == _OK:
                return
            if status != _IN_PROGRESS:
                self._fail(status, batch, start, number, self.detach)

    def wait_on_host(self) -> None:
        """Makes `wait_in_stream` wait until operations have ended, so that it raises every failure."""
        lib.srt_wait_on_host(self._pointer)

    def add_progress_callback(self, step: Callable[[], bool]) -> None:
        """Calls `step` repeatedly during any wait of this rank, until it returns True.

        This advances an operation with a second phase, for which another rank may already be waiting.
        """
        self._progress_callbacks.append(step)

    def run_progress_callbacks(self) -> None:
        """Advances the operations that have added a callback; every wait of this rank calls it."""
        if not self._progress_lock.acquire(blocking=False):  # another thread does, or a step that waits
            return
        try:
            for _ in range(len(self._progress_callbacks)):
                step = self._progress_callbacks.popleft()
                if not step():
                    self._progress_callbacks.append(step)
        finally:
            self._progress_lock.release()

    def poll(self, batch: Batch, index: int = 0) -> bool:
        """Returns whether request `index` has ended, successfully or not."""
        return _srt_poll(self._pointer, batch.handles[index]) != _IN_PROGRESS

    def untouched(self, batch: Batch, index: int = 0) -> bool:
        """Returns whether completed request `index` was absent on all ranks: its output was not written."""
        return bool(lib.srt_result(self._pointer, batch.handles[index]) & _UNTOUCHED)

    def output(self, batch: Batch, index: int = 0) -> Output:
        """Takes ownership of the result of request `index`, which the core allocated."""
        handle, tensor = batch.handles[index], self._result(batch, index)
        batch.handles[index] = 0
        native = self._native

        def release(_: Any) -> None:
            if native.pid == os.getpid():
                _srt_release(native.pointer, ffi.new("srt_handle[]", [handle]), 1)

        memory = ffi.gc(ffi.cast("char *", tensor.data), release)
        return Output(ffi.buffer(memory, tensor.bytes), tensor.dtype, _shape_of(tensor))

    def is_in_place(self, batch: Batch, index: int = 0) -> bool:
        """Returns whether the result of request `index` is in the memory that was offered for it."""
        return bool(lib.srt_result(self._pointer, batch.handles[index]) & _OFFERED)

    def device_output(self, batch: Batch, index: int = 0) -> DeviceOutput:
        """Returns the result of request `index`, which the core allocated on a GPU."""
        tensor = self._result(batch, index)
        return DeviceOutput(tensor.data, tensor.bytes, tensor.dtype, _shape_of(tensor))

    def _result(self, batch: Batch, index: int) -> Any:
        handle, tensor = batch.handles[index], ffi.new("srt_tensor *")
        status = lib.srt_output(self._pointer, handle, tensor)
        if status != _OK:
            raise error_of(status, text(lib.srt_handle_error(self._pointer, handle)))
        return tensor

    def result_number(self, batch: Batch, index: int = 0) -> int:
        """Returns the number from completed request `index`: a new set's number, the last rank to join."""
        return int(lib.srt_result_number(self._pointer, batch.handles[index]))

    def received_splits(self, batch: Batch, index: int = 0) -> list[int]:
        """Returns how many rows completed all-to-all `index` received from each member, in their order."""
        handle = batch.handles[index]
        count = lib.srt_result_splits(self._pointer, handle, ffi.NULL, 0)
        splits = ffi.new("int64_t[]", count)
        lib.srt_result_splits(self._pointer, handle, splits, count)
        return list(splits)

    def contributors(self, batch: Batch, index: int = 0) -> list[int]:
        """Returns the ranks that contributed data to the result of request `index`, which has a deadline."""
        ranks = ffi.new("int32_t[]", self.size)
        count = lib.srt_result_contributors(self._pointer, batch.handles[index], ranks, self.size)
        return list(ranks[0:count])

    def members(self, process_set: int) -> list[int]:
        """Returns the ranks of a process set, ascending.

        Raises:
            ValueError: no such set exists.
        """
        count = lib.srt_process_set(self._pointer, process_set, ffi.NULL, 0)
        if count < 0:
            raise ValueError(f"there is no process set {process_set}")
        ranks = ffi.new("int32_t[]", count)
        lib.srt_process_set(self._pointer, process_set, ranks, count)
        return list(ranks)

    def own_rows(self, process_set: int, rows: int) -> int:
        """Returns how many of `rows` rows this rank gets of what a set divides; 0 if it is no member."""
        return int(lib.srt_own_rows(self._pointer, process_set, rows))

    def has_wire_format(self, process_set: int) -> bool:
        """Returns whether wire formats affect this rank's all-reduces: not all of the set share memory."""
        return bool(lib.srt_has_wire_format(self._pointer, process_set))

    def release(self, batch: Batch, start: int = 0, count: int | None = None) -> None:
        """Releases requests that have ended."""
        handles = batch.handles
        if batch.count == 1:
            _srt_release(self._pointer, handles, 1)
            handles[0], batch.keepalive[0] = 0, None
            return
        number = batch.count - start if count is None else count
        _srt_release(self._pointer, handles + start, number)
        handles[start : start + number] = [0] * number
        batch.keepalive[start : start + number] = [None] * number

    def next_number(self, kind: str) -> int:
        """Numbers objects of a kind from 0, for names. Equal on ranks that create them in the same order."""
        number = self._numbers[kind]
        self._numbers[kind] += 1
        return number

    def count_of(self, kind: str) -> int:
        """Returns how many objects of a kind `next_number` has numbered."""
        return self._numbers[kind]

    def setting(self, name: str) -> str:
        """Returns the value of a setting of the core, as text."""
        return self._config.get(name)

    def setting_integer(self, name: str) -> int:
        """Returns the value of a setting of the core that is a count or a number of bytes."""
        return self._config.integer(name)

    def flush(self) -> None:
        """Negotiates queued operations now, without waiting for more."""
        lib.srt_flush(self._pointer)

    def abort(self, reason: str) -> None:
        """Aborts the world: every operation in flight, on every rank, ends with this text."""
        lib.srt_abort(self._pointer, reason.encode("utf-8", "replace").replace(b"\0", b" "))

    def shutdown(self, timeout_ms: int = SHUTDOWN_MS) -> None:
        """Completes the operations in flight, and sends goodbye to the peers. A second call does nothing."""
        if not self.is_shut_down:
            self.timeline.end_watch()
            self.is_shut_down = True
            for callback in self.shutdown_callbacks:
                callback()
            lib.srt_shutdown(self._pointer, timeout_ms)
            self._detached.clear()
            for callback in self.end_callbacks:
                callback()
            self.shutdown_callbacks.clear()  # callbacks that refer to this context would keep it alive
            self.end_callbacks.clear()

    def set_process_context(self) -> None:
        """Makes this the context for operations inside programs that a framework has compiled."""
        lib.srt_set_process_context(self._pointer)

    def clear_process_context(self) -> None:
        """Reverts `set_process_context`, once no such operation is being queued; later operations fail."""
        if self._native.pid == os.getpid():
            lib.srt_set_process_context(ffi.NULL)

    @property
    def pointer(self) -> Any:
        """Returns the core's context, for calls of the core that have no method here."""
        return self._pointer

    @property
    def failure(self) -> Failure | None:
        """Returns why the context is dead; None while it is alive."""
        culprit = ffi.new("int32_t *")
        status = lib.srt_context_failure(self._pointer, culprit)
        if status == _OK:
            return None
        return Failure(culprit[0], text(lib.srt_context_error(self._pointer)), status_name(status))

    @property
    def has_missed_peer(self) -> bool:
        """Returns whether an operation has failed because a rank that it needs had finished."""
        return bool(lib.srt_has_missed_peer(self._pointer))

    def adopt(self, batch: Batch) -> None:
        """Keeps the in-flight operations of a dropped batch alive until they end."""
        if not self.is_shut_down:
            self._detached.add(batch.handles, batch.keepalive)
            self._detached.sweep()

    def detach(self, batch: Batch, start: int = 0, count: int | None = None) -> None:
        """Releases requests that may still be in flight on a GPU; their memory stays alive until they end."""
        end = batch.count if count is None else start + count
        self._detached.add(batch.handles[start:end], batch.keepalive[start:end])
        batch.handles[start:end] = [0] * (end - start)
        batch.keepalive[start:end] = [None] * (end - start)

    def _fail(
        self, status: int, batch: Batch, start: int, count: int, release: Callable[[Batch, int, int], None]
    ) -> NoReturn:
        """Raises the error of the first failed request, else the context's; then releases all requests."""
        try:
            for handle in batch.handles[start : start + count]:
                ended = _srt_poll(self._pointer, handle)
                if ended not in (_OK, _IN_PROGRESS):
                    raise error_of(ended, text(lib.srt_handle_error(self._pointer, handle)))
            raise error_of(status, text(lib.srt_context_error(self._pointer)))
        finally:
            release(batch, start, count)

    def _close_in_child(self) -> None:
        lib.srt_fork_child(self._pointer)
        self.timeline.forget_in_child()


_live: weakref.WeakSet[Context] = weakref.WeakSet()


def _after_fork() -> None:
    for context in list(_live):
        context._close_in_child()


os.register_at_fork(after_in_child=_after_fork)


# ---- Detached operations, which nobody waits for -------------------------------------------------------


class DetachedOperations:
    """Detached operations of a context: batches of handles, with the memory that each batch uses.

    They belong to handles that were dropped, or to handles for which a GPU stream waits instead of the host.
    Every method may be called from any thread.
    """

    def __init__(self, context: Any) -> None:
        """Creates an empty collection. `context` is the core's."""
        self._context = context
        self._batches: deque[tuple[list[int], list[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, handles: Sequence[int], keepalive: list[Any]) -> None:
        """Holds `keepalive` until all these handles have ended."""
        left = [handle for handle in handles if handle]
        if left:
            self._batches.append((left, keepalive))

    def sweep(self) -> None:
        """Releases the operations that have ended, with their tensors."""
        for _ in range(len(self._batches)):
            try:
                handles, keepalive = self._batches.popleft()
            except IndexError:  # another thread sweeps, too
                return
            if any(_srt_poll(self._context, handle) == _IN_PROGRESS for handle in handles):
                self._batches.append((handles, keepalive))
            else:
                self._release(handles)

    def clear(self) -> None:
        """Releases everything: the context has shut down, so nothing is in flight any more.

        Results that the core has allocated on a GPU are freed with the context only if they were released.
        """
        for _ in range(len(self._batches)):
            try:
                handles, _keepalive = self._batches.popleft()
            except IndexError:  # another thread sweeps
                return
            self._release(handles)

    def _release(self, handles: list[int]) -> None:
        _srt_release(self._context, ffi.new("srt_handle[]", handles), len(handles))


# ---- The file of a context's timeline, which the core writes, and the watch of the program for it ------


class _TimelineFile:
    """The file in progress, if any. Threads may start and stop it at the same time.

    Attributes:
        path: the file that is being written; "" if there is none.
    """

    def __init__(self) -> None:
        self.path = ""
        self._watch: ProgramWatch | None = None
        self._lock = threading.Lock()

    def start(self, context: Context, path: str, mark_decisions: bool, unless_running: bool = False) -> bool:
        """Starts a file, after completing any file in progress. Raises OSError.

        With `unless_running` it returns False instead, and changes nothing, if there is one in progress.
        """
        with self._lock:
            if self.path and unless_running:
                return False
            self.end_watch()
            self.path = ""
            call(lib.srt_timeline_start, context.pointer, os.fsencode(path), mark_decisions)
            from sirtaki.bindings.observing.program_timeline import ProgramWatch  # other jobs need none of it

            try:
                self._watch = ProgramWatch(context)
            except BaseException:  # there may be no further thread
                lib.srt_timeline_stop(context.pointer)
                raise
            self.path = path
            return True

    def stop(self, context: Context, path: str = "") -> None:
        """Completes the file; does nothing if there is no file, or if its path is not `path`."""
        with self._lock:
            if path in ("", self.path):
                self.end_watch()
                self.path = ""
                lib.srt_timeline_stop(context.pointer)

    def forget_in_child(self) -> None:
        """Forgets the file in a forked child, where nobody writes it, and no thread gives the lock back."""
        self.path, self._watch, self._lock = "", None, threading.Lock()

    def end_watch(self) -> None:
        """Ends the watch of the program, if there is any. Takes no lock: a forked child may call it."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()


# ---- The calling code's context: the process's own, unless a thread has selected another ---------------
# Only module-level functions (`hvd.allreduce`, …) look it up. Objects that live longer, such as handles and
# optimizers, keep the context that they were created with: autograd calls them from other threads.


@dataclass
class _Process:
    """The context that init() made in this process."""

    context: Context | None = None
    was_shut_down: bool = False
    after_init: list[Callable[[Context], None]] = field(default_factory=list)  # what frameworks do then


process = _Process()
_thread_context: ContextVar[Context | None] = ContextVar("sirtaki_context", default=None)


def find() -> Context | None:
    """Returns the current context; None before init() and after shutdown()."""
    return _thread_context.get() or process.context


def current() -> Context:
    """Returns the current context.

    Raises:
        NotInitializedError: no context is current.
    """
    context = _thread_context.get() or process.context
    if context is None:
        state = "already shut down" if process.was_shut_down else "not initialised"
        when = "again before" if process.was_shut_down else "in every rank, before"
        raise NotInitializedError(f"sirtaki is {state} in this process: call hvd.init() {when} anything else")
    return context


@contextmanager
def using(context: Context) -> Iterator[Context]:
    """Makes a context current for this thread (or asyncio task), as when ranks are threads."""
    token = _thread_context.set(context)
    try:
        yield context
    finally:
        _thread_context.reset(token)


# ---- Objects that are used in several worlds of an elastic job -----------------------------------------


def is_elastic() -> bool:
    """Returns whether the ranks of this job may change. Worlds of a single rank then communicate, too."""
    context = find()
    return context is not None and context.survivors is not None


def add_survivor(survivor: Survivor) -> None:
    """Registers an object that has to act when the ranks change; does nothing in other jobs."""
    context = find()
    if context is not None and context.survivors is not None:
        context.survivors.add(survivor)


def reserve_number(context: Context, kind: str, number: int) -> None:
    """Makes objects of a kind that a world creates later get higher numbers than this number.

    An object keeps its number, and so its names, from world to world: compiled programs contain them.
    """
    while context.count_of(kind) <= number:
        context.next_number(kind)
