"""torch's CPU tensors that pose as tensors on GPUs of the fake libcuda, whose memory is the host's.

The host executes torch's operations on them at once, where a stream of a GPU would do so later. So the host
waits wherever the real stream would, in a way that orders nothing. For the fake's check of the order, a
stream reads a request's tensors where it is submitted, and where the stream has waited for it.

`torch.cuda` has streams and events of the fake libcuda meanwhile, so that the functions of
`sirtaki.torch.device` run as they are, but for two that need memory of a GPU.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_gpu import FOLDER, FakeGpu
from sirtaki.bindings import waiting
from sirtaki.bindings.context import Context, find
from sirtaki.bindings.request import Batch, DeviceOutput
from sirtaki.torch import _private, device
from sirtaki.torch.backend import work

PATIENCE = 120  # seconds: far beyond anything that works
NOT_READY = 600
STREAMS = 3  # that torch.cuda.Stream() returns in turn, on each GPU


class Event:
    """The part of torch.cuda.Event that is used."""

    def __init__(self, driver: Driver, gpu: int, stream: int) -> None:
        self._driver, self._gpu, self.cuda_event = driver, gpu, ctypes.c_void_p()
        driver.call(gpu, "cuEventCreate", ctypes.byref(self.cuda_event), 2)
        driver.events.append((gpu, self.cuda_event))
        driver.call(gpu, "cuEventRecord", self.cuda_event, ctypes.c_void_p(stream))

    def query(self) -> bool:
        return self._driver.call(self._gpu, "cuEventQuery", self.cuda_event, may_be=NOT_READY) == 0


class Stream:
    """The part of torch.cuda.Stream that is used."""

    def __init__(self, driver: Driver, gpu: int, cuda_stream: int) -> None:
        self._driver, self.gpu, self.cuda_stream = driver, gpu, cuda_stream

    def record_event(self) -> Event:
        return Event(self._driver, self.gpu, self.cuda_stream)

    def wait_event(self, event: Event) -> None:
        stream = ctypes.c_void_p(self.cuda_stream)
        self._driver.call(self.gpu, "cuStreamWaitEvent", stream, event.cuda_event, 0)
        self._driver.follow(self.cuda_stream)


class Driver:
    """The part of CUDA that torch would use: a stream of its own on each GPU."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(FOLDER / "libcuda.so.1"))
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._streams: dict[int, int] = {}
        self._made: list[tuple[int, int]] = []  # GPU and stream
        self.events: list[tuple[int, ctypes.c_void_p]] = []  # GPU and event

    def stream(self, gpu: int) -> int:
        """Returns this GPU's stream."""
        if gpu not in self._streams:
            self._streams[gpu] = self.new_stream(gpu)
        return self._streams[gpu]

    def new_stream(self, gpu: int) -> int:
        """Creates another stream."""
        made = ctypes.c_void_p()
        self.call(gpu, "cuStreamCreateWithPriority", ctypes.byref(made), 1, 0)
        self._made.append((gpu, made.value or 0))
        return made.value or 0

    def finish(self) -> None:
        """Waits for the work that is in all streams now."""
        for gpu, stream in self._made:
            self.wait_for(gpu, stream)

    def close(self) -> None:
        """Destroys the events, and the streams; each has a thread."""
        for gpu, event in self.events:
            self.call(gpu, "cuEventDestroy_v2", event)
        for gpu, stream in self._made:
            self.call(gpu, "cuStreamDestroy_v2", ctypes.c_void_p(stream))
        self.events.clear()
        self._made.clear()
        self._streams.clear()
        for gpu in self._contexts:
            assert self._library.cuDevicePrimaryCtxRelease_v2(gpu) == 0
        self._contexts.clear()

    def follow(self, stream: int) -> None:
        """Waits until a stream is idle; for the fake, nothing comes after its work for that."""
        ended = self._library.fake_gpu_await_tasks(ctypes.c_void_p(stream), PATIENCE)
        assert ended, "the stream does not end"

    def wait_for(self, gpu: int, stream: int) -> None:
        """Waits for the work that is in a stream now."""
        event = ctypes.c_void_p()
        self.call(gpu, "cuEventCreate", ctypes.byref(event), 2)
        self.call(gpu, "cuEventRecord", event, ctypes.c_void_p(stream))
        deadline = time.monotonic() + PATIENCE
        while self.call(gpu, "cuEventQuery", event, may_be=NOT_READY):
            assert time.monotonic() < deadline, "the stream does not end"
            time.sleep(20e-6)
        self.call(gpu, "cuEventDestroy_v2", event)

    def call(self, gpu: int, function: str, *arguments: Any, may_be: int = 0) -> int:
        if gpu not in self._contexts:
            made = ctypes.c_void_p()
            assert self._library.cuDevicePrimaryCtxRetain(ctypes.byref(made), gpu) == 0
            self._contexts[gpu] = made
        assert self._library.cuCtxPushCurrent_v2(self._contexts[gpu]) == 0
        result = int(getattr(self._library, function)(*arguments))
        assert self._library.cuCtxPopCurrent_v2(None) == 0
        assert result in (0, may_be), f"{function} returned {result}"
        return result


class FakeTensors:
    """GPUs for torch's tensors, for one test. Each rank has its own GPU."""

    def __init__(self, gpus: int) -> None:
        self.fake = FakeGpu()
        self.fake.reset()
        self.fake.set("devices", gpus)
        self.driver = Driver()
        self._gpus = gpus
        self._lent: dict[int, Any] = {}  # storages, by their addresses: the fake knows them until the end
        self._patch = pytest.MonkeyPatch()
        self._current: Any = threading.local()  # what `torch.cuda.stream` has entered
        self._streams: dict[int, Iterator[Stream]] = {}

    def __enter__(self) -> FakeTensors:
        for name in ("ordinal", "copy_of"):
            self._patch.setattr(device, name, getattr(self, name))
        self._patch.setattr(_private, "current_raw_stream", lambda gpu: self.current_stream(gpu).cuda_stream)
        self._patch.setattr(torch.cuda, "current_stream", self.current_stream)
        self._patch.setattr(torch.cuda, "Stream", self.new_stream)
        self._patch.setattr(torch.cuda, "stream", self.entered)
        self._patch.setattr(torch.cuda, "device_count", lambda: self._gpus)
        self._patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        create = torch.futures.Future.__init__  # which knows GPUs only in builds for CUDA
        self._patch.setattr(torch.futures.Future, "__init__", lambda future, *, devices=None: create(future))
        self._patch.setattr(Tensor, "record_stream", self.record_stream, raising=False)
        enqueue, wait_in_stream = Context.enqueue, Context.wait_in_stream

        def lend_first(context: Context, batch: Batch, start: int = 0, count: int | None = None) -> None:
            self.lend(batch.keepalive, self._gpu_of(context))
            for index in range(start, batch.count if count is None else start + count):
                self.read(batch.keepalive[index], batch.requests[index].stream)
            enqueue(context, batch, start, count)

        def wait_there(context: Context, batch: Batch, stream: int, *which: int) -> None:
            wait_in_stream(context, batch, stream, *which)
            start, count = which or (0, batch.count)
            self.read(batch.keepalive[start : start + count], stream)
            self.driver.follow(stream)

        self._patch.setattr(Context, "enqueue", lend_first)
        self._patch.setattr(Context, "wait_in_stream", wait_there)
        launched = waiting.wait_for_launch

        def wait_for_launch(context: Context, batch: Batch, stream: int, seconds: float) -> bool:
            found = launched(context, batch, stream, seconds)
            if found:
                self.read(batch.keepalive, stream)
                self.driver.follow(stream)
            return found

        self._patch.setattr(work, "wait_for_launch", wait_for_launch)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        self.driver.finish()
        for address in self._lent:
            self.fake.take_back(address)
        self.driver.close()
        assert self.fake.misuse() == ""

    def lend(self, keepalive: Any, gpu: int) -> None:
        """Tells the fake that the memory of these tensors is on a GPU."""
        if isinstance(keepalive, Tensor):
            memory = keepalive.untyped_storage()
            if memory.nbytes():
                self._lent[memory.data_ptr()] = memory
                self.fake.lend(memory.data_ptr(), memory.nbytes(), gpu)
        elif isinstance(keepalive, tuple | list):
            for one in keepalive:
                self.lend(one, gpu)

    def read(self, keepalive: Any, stream: int) -> None:
        """Adds a read of these tensors to a stream."""
        if isinstance(keepalive, Tensor):
            if stream and keepalive.nbytes and keepalive.is_contiguous():
                self.fake.read(stream, keepalive.data_ptr(), keepalive.nbytes)
        elif isinstance(keepalive, tuple | list):
            for one in keepalive:
                self.read(one, stream)

    def ordinal(self, tensor: Tensor) -> int:
        context = find()
        return self._gpu_of(context) if tensor.is_cpu and context is not None else tensor.get_device()

    def _gpu_of(self, context: Context) -> int:
        """Returns a rank's GPU. In an elastic job that of its slot, which it keeps when the ranks change."""
        is_elastic = context.survivors is not None
        return (context.topology.local_rank if is_elastic else context.rank) % self._gpus

    def current_stream(self, gpu: int) -> Stream:
        stream = getattr(self._current, "stream", None)
        return stream if stream and stream.gpu == gpu else Stream(self.driver, gpu, self.driver.stream(gpu))

    def new_stream(self, gpu: int) -> Stream:
        """Returns a stream of this GPU's pool, as torch does."""
        if gpu not in self._streams:
            made = [Stream(self.driver, gpu, self.driver.new_stream(gpu)) for _ in range(STREAMS)]
            self._streams[gpu] = cycle(made)
        return next(self._streams[gpu])

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        before = getattr(self._current, "stream", None)
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    @staticmethod
    def record_stream(tensor: Tensor, stream: Stream) -> None:
        """Does nothing else: all memory that was lent stays alive until the end."""
        assert isinstance(stream, Stream)

    def copy_of(self, output: DeviceOutput, gpu: int) -> Tensor:
        self.fake.read(device.current_stream(gpu), output.address, output.bytes)
        return torch.tensor(bytearray(ctypes.string_at(output.address, output.bytes)), dtype=torch.uint8)
