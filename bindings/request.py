"""Batches: the requests of a rank in the core's format, created once and updated step by step.

A batch is an array of `srt_request` in memory. Describing a request costs about a microsecond; after that
only the values that change from step to step, pointers and flags, are written, for all requests at once.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from sirtaki.bindings.library import dtypes, ffi, lib

MAX_DIMENSIONS = 16
CPU = -1

_SIZE = ffi.sizeof("srt_request")
_UINT64_COUNT = _SIZE // 8
_UINT32_COUNT = _SIZE // 4
_INPUT = ffi.offsetof("srt_request", "input") // 8
_OUTPUT = ffi.offsetof("srt_request", "output") // 8
_FLAGS = ffi.offsetof("srt_request", "flags") // 4
_STREAM = ffi.offsetof("srt_request", "stream") // 8


class Batch:
    """An array of requests, their handles while in flight, and the objects that must stay alive until they
    end.

    A batch is used by one thread at a time, and must not change between `Context.enqueue` and its end.
    """

    __slots__ = (
        "_described",
        "_names",
        "_shapes",
        "_splits",
        "_uint32s",
        "_uint64s",
        "context",
        "count",
        "devices",
        "error",
        "handles",
        "keepalive",
        "key",
        "requests",
        "rows",
    )

    def __init__(self, count: int) -> None:
        self.context: Any = None  # the context it was queued in
        self.count = count
        self.requests: Any = ffi.new("srt_request[]", count)
        self.handles: Any = ffi.new("srt_handle[]", count)
        self.error: Any = ffi.new("srt_error *")
        self.keepalive: list[Any] = [None] * count
        self.devices = [CPU] * count  # per request: CPU, or the number of a GPU
        self.key: Any = None  # what distinguishes its requests, for a call that repeats them
        self.rows = [0] * count  # of the results, per request
        self._names: list[Any] = [None] * count
        self._splits: list[Any] = [None] * count
        self._described: list[Any] = [None] * count
        self._shapes: Any = ffi.new("int64_t[]", MAX_DIMENSIONS * count)
        view = memoryview(ffi.buffer(self.requests))
        self._uint64s = view.cast("Q")
        self._uint32s = view.cast("I")
        for index in range(count):
            request = self.requests[index]
            request.struct_size = _SIZE
            request.device = CPU
            request.prescale = request.postscale = 1.0

    def __del__(self) -> None:
        context = getattr(self, "context", None)  # a code tracer may create a batch without __init__
        if context is not None:
            context.adopt(self)

    @property
    def gpu(self) -> int:
        """Returns the GPU of its tensors, as a rank uses a single GPU; CPU if no tensor is on a GPU."""
        return self.devices[0] if self.count == 1 else max(self.devices, default=CPU)

    def set_request(
        self,
        index: int,
        kind: int,
        dtype: int,
        shape: Sequence[int],
        *,
        name: str | None = None,
        reduce_op: int = 0,
        root: int = 0,
        destination: int = 0,
        splits: Sequence[int] | None = None,
        layout: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wire_format: int = 0,
        process_set: int = 0,
        device: int = CPU,
        priority: int = 0,
        flags: int = 0,
        group: tuple[int, int] = (0, 0),
    ) -> None:
        """Describes request `index`; `group` is (id, number of members), `splits` an all-to-all's.

        `device` is the location of its memory: CPU, or the number of a GPU. `wire_format` is the core's code
        of the format in which an all-reduce sends its elements.

        Raises:
            ValueError: the tensor has more than 16 dimensions, or the name holds a NUL character.
        """
        split_key = None if splits is None else tuple(splits)
        numbers = (kind, dtype, reduce_op, root, destination, layout, process_set, device, priority, flags)
        described = (name, tuple(shape), numbers, split_key, prescale, postscale, wire_format, group)
        if described == self._described[index]:
            self.set_flags(index, flags)
            return  # a repeated request, as in a training step, is described once
        self._described[index] = None
        request = self.requests[index]
        request.kind = kind
        request.dtype = dtype
        request.reduce_op = reduce_op
        request.root = root
        request.destination = destination
        self._split(index, splits)
        request.process_set = process_set
        request.device = self.devices[index] = device
        request.priority = priority
        request.flags = flags
        request.group_id, request.group_size = group
        request.layout = layout
        request.prescale = prescale
        request.postscale = postscale
        request.wire_format = wire_format
        self.reshape(index, shape)
        self._names[index] = request.name = ffi.NULL if name is None else _c_name(name)
        self._described[index] = described

    def _split(self, index: int, splits: Sequence[int] | None) -> None:
        request = self.requests[index]
        kept = ffi.NULL if splits is None else ffi.new("int64_t[]", splits)
        self._splits[index] = request.splits = kept
        request.split_count = 0 if splits is None else len(splits)

    def set_process_set_request(
        self, index: int, kind: int, ranks: Sequence[int] = (), number: int = 0
    ) -> None:
        """Makes request `index` add a process set of these ranks, or remove the set with this number."""
        self.set_request(index, kind, 0, (), root=number)
        self._set_ranks(index, ranks)

    def set_member_set_request(self, index: int, ranks: Sequence[int], name: str) -> None:
        """Makes request `index` add a process set that only these ranks add, each with this name."""
        self.set_request(index, ADD_PROCESS_SET, 0, (), root=1, name=name)
        self._set_ranks(index, ranks)

    def _set_ranks(self, index: int, ranks: Sequence[int]) -> None:
        self._described[index] = None
        self._splits[index] = kept = ffi.new("int64_t[]", list(ranks))
        self.requests[index].shape = kept
        self.requests[index].dimensions = len(ranks)

    def reshape(self, index: int, shape: Sequence[int]) -> None:
        """Sets the shape of request `index` (elements along each dimension)."""
        dimensions = len(shape)
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(
                f"a tensor may have up to {MAX_DIMENSIONS} dimensions; this one has {dimensions}"
            )
        start = MAX_DIMENSIONS * index
        self._shapes[start : start + dimensions] = shape
        request = self.requests[index]
        request.shape, request.dimensions = self._shapes + start, dimensions

    def set_buffers(self, index: int, source: int, target: int) -> None:
        """Sets the addresses that request `index` reads and writes (0 for none)."""
        base = index * _UINT64_COUNT
        self._uint64s[base + _INPUT] = source
        self._uint64s[base + _OUTPUT] = target

    def offer_memory(self, index: int, byte_count: int) -> None:
        """Lets request `index`, an all-gather or all-to-all, write its result to its target, if it fits.

        `Context.is_in_place` returns whether it has.
        """
        self.requests[index].output_bytes = byte_count

    def set_all_buffers(self, sources: Sequence[int], targets: Sequence[int], start: int = 0) -> None:
        """Sets the buffer addresses of the requests from `start` on, given as a sequence per direction."""
        first, end = start * _UINT64_COUNT, (start + len(sources)) * _UINT64_COUNT
        self._uint64s[first + _INPUT : end : _UINT64_COUNT] = memoryview(array("Q", sources))
        self._uint64s[first + _OUTPUT : end : _UINT64_COUNT] = memoryview(array("Q", targets))

    def set_flags(self, index: int, flags: int) -> None:
        """Sets the flags of request `index` (SRT_REQUEST_*)."""
        self._uint32s[index * _UINT32_COUNT + _FLAGS] = flags

    def set_deadline(self, index: int, seconds: float, quorum: int) -> None:
        """Lets described request `index`, an all-reduce, be decided without ranks that are late.

        This happens `seconds` after the first rank's request, if `quorum` ranks are there.
        """
        request = self.requests[index]
        request.deadline, request.quorum = seconds, quorum
        self.set_flags(index, DEADLINE)

    def set_all_flags(self, flags: Sequence[int], start: int = 0) -> None:
        """Sets the flags of the requests from `start` on."""
        first, end = start * _UINT32_COUNT, (start + len(flags)) * _UINT32_COUNT
        self._uint32s[first + _FLAGS : end : _UINT32_COUNT] = memoryview(array("I", flags))

    def set_all_streams(self, streams: Sequence[int], start: int = 0) -> None:
        """Sets the CUDA streams that produce the inputs of the requests from `start` on."""
        first, end = start * _UINT64_COUNT, (start + len(streams)) * _UINT64_COUNT
        self._uint64s[first + _STREAM : end : _UINT64_COUNT] = memoryview(array("Q", streams))

    def copy(self, index: int, other: Batch, source: int) -> None:
        """Copies `other`'s request `source` to request `index`. `other` keeps owning its name and shape."""
        self._described[index] = None
        self.devices[index] = other.devices[source]
        size = _UINT64_COUNT
        copied = other._uint64s[source * size : (source + 1) * size]
        self._uint64s[index * size : (index + 1) * size] = copied


def _c_name(name: str) -> Any:
    if not isinstance(name, str):
        raise ValueError(f"name is {name!r}, but it has to be text; pass other arguments by keyword")
    encoded = name.encode()
    if b"\0" in encoded:
        raise ValueError(
            f"the name {name!r} holds a NUL character; names are text without control characters"
        )
    return ffi.new("char[]", encoded)


# The core's codes under the names that Python uses.
ALLREDUCE: int = lib.SRT_ALLREDUCE
BROADCAST: int = lib.SRT_BROADCAST
ALLGATHER: int = lib.SRT_ALLGATHER
BARRIER: int = lib.SRT_BARRIER
REDUCESCATTER: int = lib.SRT_REDUCESCATTER
ALLTOALL: int = lib.SRT_ALLTOALL
SEND: int = lib.SRT_SEND
ADD_PROCESS_SET: int = lib.SRT_ADD_PROCESS_SET
REMOVE_PROCESS_SET: int = lib.SRT_REMOVE_PROCESS_SET
JOIN: int = lib.SRT_JOIN
KIND_NAMES = {  # for profilers
    ALLREDUCE: "all_reduce",
    BROADCAST: "broadcast",
    ALLGATHER: "all_gather",
    BARRIER: "barrier",
    REDUCESCATTER: "reduce_scatter",
    ALLTOALL: "all_to_all",
    SEND: "message",
    ADD_PROCESS_SET: "add_process_set",
    REMOVE_PROCESS_SET: "remove_process_set",
    JOIN: "join",
}
SUM: int = lib.SRT_SUM
AVERAGE: int = lib.SRT_AVERAGE
MIN: int = lib.SRT_MIN
MAX: int = lib.SRT_MAX
PRODUCT: int = lib.SRT_PRODUCT
ADASUM: int = lib.SRT_ADASUM
WIRE_EXACT: int = lib.SRT_WIRE_EXACT  # sirtaki.bindings.library.wire_formats lists the others
ABSENT: int = lib.SRT_REQUEST_ABSENT
DEADLINE: int = lib.SRT_REQUEST_DEADLINE
QUEUE_SAME_NAME: int = lib.SRT_REQUEST_QUEUE_SAME_NAME


# ---- Results that the core has allocated ---------------------------------------------------------------


class Output(NamedTuple):
    """A result that the core allocated. The buffer owns it: the memory lives as long as the buffer does."""

    buffer: Any
    dtype: int
    shape: tuple[int, ...]


class DeviceOutput(NamedTuple):
    """A result that the core allocated on a GPU. The core owns its memory until the request is released."""

    address: int
    bytes: int
    dtype: int
    shape: tuple[int, ...]


# ---- Spans of operations in the profilers of frameworks: their queueing, and the waits for them --------
# A span belongs to the thread that makes the call. An operation that is waited for later has two: what lies
# between them, the program does beside it.


_Function = TypeVar("_Function", bound=Callable[..., Any])


class Profiler(Protocol):
    """A framework's profiler."""

    @property
    def is_running(self) -> Callable[[], bool]:
        """A function that returns whether it records now. Called for each operation, so it has to be fast."""
        ...

    def span(self, name: str) -> AbstractContextManager[object]:
        """Returns a context manager; its duration is shown under this name."""
        ...


_profilers: list[Profiler] = []


def register_profiler(profiler: Profiler) -> None:
    """Shows all operations of this process in a profiler, from now on."""
    _profilers.append(profiler)


def profiled(phase: str = "", part: int | None = None) -> Callable[[_Function], _Function]:
    """Decorates a function of a caller and a batch: while a profiler runs, each call is a span.

    Its name is like "sirtaki:all_reduce, 4096 bytes of 2 tensors, process set 0", followed by the `phase`.
    `part` is the index, after the batch, of the arguments `start` and `count`; None: it has none.
    """

    def decorate(call: _Function) -> _Function:
        @functools.wraps(call)
        def run(caller: Any, batch: Batch, *arguments: Any) -> Any:
            for profiler in _profilers:
                if profiler.is_running():
                    extent = () if part is None else arguments[part : part + 2]
                    name = f"{_name_of(batch, *extent)}{phase}"
                    return _in_spans(name, call, caller, batch, *arguments)
            return call(caller, batch, *arguments)

        return cast(_Function, run)

    return decorate


def _in_spans(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    with ExitStack() as spans:
        for profiler in _profilers:
            if profiler.is_running():
                spans.enter_context(profiler.span(name))
        return call(*arguments)


@functools.cache
def _sizes() -> dict[int, int]:
    return {dtype.code: dtype.size for dtype in dtypes()}


def _name_of(batch: Batch, start: int = 0, count: int | None = None) -> str:
    """Describes requests `start` to `start + count` of a batch, which are alike."""
    requests = batch.requests[start : batch.count if count is None else start + count]
    if not len(requests):
        return "sirtaki:nothing"
    name = f"sirtaki:{KIND_NAMES[requests[0].kind]}"
    if requests[0].kind in (ADD_PROCESS_SET, REMOVE_PROCESS_SET):
        return name  # their shape is a list of ranks
    byte_count = sum(map(_bytes_of, requests))
    tensors = "" if len(requests) == 1 else f" of {len(requests)} tensors"
    return f"{name}, {byte_count} bytes{tensors}, process set {requests[0].process_set}"


def _bytes_of(request: Any) -> int:
    """Returns the size of a request's input."""
    return math.prod(request.shape[0 : request.dimensions]) * _sizes()[request.dtype]
