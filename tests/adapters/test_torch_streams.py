"""Streams of torch's adapter: the host does not wait, and memory lives as long as a GPU uses it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from fake_gpu import needs_fake

torch = pytest.importorskip("torch")

from fake_gpu.tensors import PATIENCE, STREAMS, FakeTensors  # noqa: E402  # it imports torch
from world import in_world, world  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402
from sirtaki.bindings.context import Context, current  # noqa: E402
from sirtaki.bindings.request import ALLREDUCE, SUM, Batch  # noqa: E402
from sirtaki.bindings.topology import Peer, Topology  # noqa: E402
from sirtaki.common.ops.requests import Call, Reduction, describe  # noqa: E402
from sirtaki.torch import device  # noqa: E402
from sirtaki.torch.backend.work import StreamWork  # noqa: E402
from sirtaki.torch.ops.tensors import view  # noqa: E402

pytestmark = needs_fake


Record = tuple[int, int]  # a stream, and the address of a tensor that it uses


@pytest.fixture
def tensors() -> Iterator[FakeTensors]:
    with FakeTensors(2) as installed:
        yield installed


@pytest.fixture
def recorded(tensors: FakeTensors, monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """Returns the tensors that were recorded for a stream."""
    records: list[Record] = []

    def record(tensor: torch.Tensor, stream: Any) -> None:
        records.append((stream.cuda_stream, tensor.data_ptr()))

    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    return records


def end_detached(context: Context) -> None:
    """Waits until no operation is in flight."""
    deadline = time.monotonic() + PATIENCE
    while context._detached:
        assert time.monotonic() < deadline, "an operation does not end"
        context._detached.sweep()
        time.sleep(0.001)


def test_they_go_through_nccl(tensors: FakeTensors) -> None:
    def body() -> None:
        assert hvd.allreduce(torch.ones(100_000), op=hvd.Sum).unique().tolist() == [2.0]

    with world(2, gpu_backend="nccl") as ranks:
        before = tensors.fake.calls("ncclAllReduce")
        ranks.run(body)
        assert tensors.fake.calls("ncclAllReduce") == before + 2


def test_results_of_equal_parts_are_received_in_torchs_memory(
    tensors: FakeTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the result of unequal parts is allocated by the core, and copied."""
    copied: list[int] = []
    copy_of = device.copy_of
    monkeypatch.setattr(
        device, "copy_of", lambda output, gpu: (copied.append(output.bytes), copy_of(output, gpu))[1]
    )

    def body() -> None:
        own = torch.arange(6.0).view(3, 2) + 10 * hvd.rank()
        gathered = hvd.allgather(own)
        assert gathered.tolist() == [[0, 1], [2, 3], [4, 5], [10, 11], [12, 13], [14, 15]]
        received = hvd.alltoall(torch.arange(4.0) + 10 * hvd.rank())
        assert received.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][hvd.rank()]
        assert copied == []
        hvd.barrier()
        assert hvd.allgather(torch.ones(1 + hvd.rank())).tolist() == [1.0] * 3

    with world(2, gpu_backend="nccl") as ranks:
        ranks.run(body)
    assert copied == [12, 12]


def test_the_host_does_not_wait_and_memory_lives_until_the_gpu_is_done(
    tensors: FakeTensors, monkeypatch: pytest.MonkeyPatch, recorded: list[Record]
) -> None:
    """The core keeps what no stream waits for. Once a stream waits, torch keeps the memory for it."""
    waits: list[int] = []
    both_have_looked = threading.Barrier(2, timeout=PATIENCE)

    def body() -> None:
        tensor, unawaited = torch.ones(100_000), torch.ones(3)
        first, second = weakref.ref(tensor), weakref.ref(unawaited)
        hvd.allreduce_(tensor, name="first")  # its kernel does not end, and yet the call returns
        assert (tensors.driver.stream(hvd.rank()), tensor.data_ptr()) in recorded
        assert not hvd.allreduce_async_(unawaited, name="second").poll()
        del tensor, unawaited
        assert first() is None
        assert second() is not None
        both_have_looked.wait()
        current().abort("enough")
        with pytest.raises(hvd.HorovodInternalError, match="enough"):
            hvd.allreduce(torch.ones(3), name="third")
        end_detached(current())  # the core keeps nothing any more

    with world(2, gpu_backend="nccl") as ranks:
        ranks.run(lambda: hvd.allreduce(torch.ones(1)))
        tensors.fake.set("hang", 1)
        monkeypatch.setattr(tensors.driver, "follow", waits.append)
        ranks.run(body)
        tensors.fake.set("hang", 0)
    assert set(waits) == {tensors.driver.stream(0), tensors.driver.stream(1)}


@in_world(2, gpu_backend="nccl")
def test_gradients_are_released_before_the_next_step(tensors: FakeTensors) -> None:
    model = torch.nn.Linear(100, 100)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for _ in range(3):
        model(torch.full((2, 100), 1.0 + hvd.rank())).sum().backward()
        gradients = [weakref.ref(one.grad) for one in model.parameters() if one.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert [one() for one in gradients] == [None, None]


@pytest.mark.parametrize("keeps_views", [False, True])
@pytest.mark.parametrize("has_places", [False, True])
def test_small_gradients_with_places_are_not_copied_by_the_driver(
    tensors: FakeTensors, has_places: bool, keeps_views: bool
) -> None:
    def body() -> None:
        sizes = [(20, 20)] * 11 + [(20, 1000)]  # the last weight is large
        model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), gradients_in_shared_memory=has_places
        )
        for _ in range(4):
            optimizer.zero_grad(set_to_none=not keeps_views)
            model(torch.full((2, 20), 1.0 + hvd.rank())).sum().backward()
            hvd.barrier()
            copied.append(tensors.fake.copied())
            hvd.barrier()
            optimizer.step()

    copied: list[int] = []
    with world(2, gpu_backend="nccl") as ranks:
        ranks.run(body)
    in_a_step = copied[-1] - copied[-3]  # of both ranks
    assert in_a_step == (0 if has_places else 2 * 2 * 4 * (11 * 20 * 20 + 11 * 20 + 1000))


@in_world(2, gpu_backend="nccl")
def test_a_gradient_that_was_moved_is_kept_for_the_stream(
    tensors: FakeTensors, recorded: list[Record]
) -> None:
    """Another stream may have made it, which could use its memory again at once."""
    model = torch.nn.Linear(100, 100)
    made: dict[torch.Tensor, int] = {}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda it: made.update({it: it.grad.data_ptr()}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), gradients_in_shared_memory=True)
    model(torch.ones(2, 100)).sum().backward()
    stream = tensors.driver.stream(hvd.rank())
    for parameter, address in made.items():
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() != address
        assert {(stream, address), (stream, parameter.grad.data_ptr())} <= set(recorded)
    optimizer.step()


def started_work(tensor: torch.Tensor) -> tuple[StreamWork, Batch]:
    """Starts a sum, in place."""
    context, batch = current(), Batch(1)
    describe(batch, ALLREDUCE, view(tensor), tensor.data_ptr(), Call("x", 0), 0, how=Reduction(SUM))
    batch.set_all_streams([device.current_stream(hvd.rank())])
    batch.keepalive[:] = [tensor]
    context.enqueue(batch)
    return StreamWork(context, batch, lambda *_: None, [tensor], timedelta(seconds=PATIENCE)), batch


@in_world(2, gpu_backend="nccl")
def test_works_of_process_groups_release_their_tensors(tensors: FakeTensors, recorded: list[Record]) -> None:
    tensor = torch.ones(5)
    work, batch = started_work(tensor)
    work.wait()
    assert tensor.tolist() == [2.0] * 5
    assert (tensors.driver.stream(hvd.rank()), tensor.data_ptr()) in recorded
    assert batch.keepalive == [None]


@in_world(2, gpu_backend="nccl")
def test_a_stream_that_waits_for_a_work_comes_after_its_end(
    tensors: FakeTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A work that has ended before the wait has put its results in place in a stream of its own."""
    monkeypatch.setattr(tensors.driver, "follow", lambda stream: None)  # the host waits for none
    gpu, deadline = hvd.rank(), time.monotonic() + PATIENCE
    others = [torch.cuda.Stream(gpu).cuda_stream for _ in range(STREAMS)]
    hvd.allreduce_(torch.ones(1))  # connects the GPUs
    work, _ = started_work(torch.ones(5))
    for stream in others:
        tensors.fake.hold(stream, True)
    while work._end is None and time.monotonic() < deadline:
        assert not work.is_completed()
    work.wait()
    end = torch.cuda.current_stream(gpu).record_event()
    time.sleep(0.05)
    has_waited = not end.query()
    for stream in others:
        tensors.fake.hold(stream, False)
    while not (end.query() and work.is_completed()):
        assert time.monotonic() < deadline
    assert has_waited


@in_world(2, gpu_backend="nccl")
def test_what_is_waited_for_in_another_stream_is_kept_for_it(
    tensors: FakeTensors, recorded: list[Record]
) -> None:
    tensor = torch.ones(5)
    there = hvd.allreduce_async(tensor, name="there")
    stream = torch.cuda.Stream(hvd.rank())
    with torch.cuda.stream(stream):
        result = hvd.synchronize(there)
    found = [address for number, address in recorded if number == stream.cuda_stream]
    assert found == [tensor.data_ptr(), result.data_ptr()]


@in_world(1)
def test_a_rank_works_on_one_gpu(tensors: FakeTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    hvd.allreduce(torch.ones(1))
    monkeypatch.setattr(device, "ordinal", lambda tensor: 1)
    with pytest.raises(ValueError, match=r"torch.cuda.set_device\(hvd.local_rank\(\)\)"):
        hvd.allreduce(torch.ones(1))


@in_world(1)
def test_graphs_cannot_capture_operations(tensors: FakeTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="CUDA graph"):
        hvd.allreduce(torch.ones(1))


def test_gradients_of_several_streams_leave_when_the_pass_ends(
    tensors: FakeTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only at that point does the current stream wait for all of them."""
    streams = {gpu: [tensors.current_stream(gpu)] for gpu in (0, 1)}
    turns = {gpu: count() for gpu in streams}
    submitted: dict[int, list[int]] = {}
    enqueue: Callable[..., None] = Context.enqueue

    def in_turns(gpu: int) -> int:
        stream = streams[gpu][next(turns[gpu]) % len(streams[gpu])]
        for other in streams[gpu]:  # as autograd has streams wait for each other
            stream.wait_event(other.record_event())
        return stream.cuda_stream

    def note(context: Context, batch: Any, start: int = 0, number: int | None = None) -> None:
        if number is not None:  # gradients
            submitted[context.rank].append(number)
        enqueue(context, batch, start, number)

    def submitted_by_a_pass(model: torch.nn.Module, optimizer: Any) -> list[int]:
        submitted[hvd.rank()] = []
        model(torch.ones(2, 600)).sum().backward()
        optimizer.step()
        return submitted[hvd.rank()]

    def body() -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(6)))  # 1.4 MB each
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        assert submitted_by_a_pass(model, optimizer) == [12]  # nothing is known yet
        assert len(submitted_by_a_pass(model, optimizer)) > 1
        gpu = hvd.rank()
        streams[gpu].append(tensors.new_stream(gpu))
        assert submitted_by_a_pass(model, optimizer) == [12]

    with world(2, gpu_backend="nccl") as ranks:
        monkeypatch.setattr(Context, "enqueue", note)
        monkeypatch.setattr(device, "current_stream", in_turns)
        ranks.run(body)


@pytest.mark.parametrize(("ranks", "gpus", "warns"), [(2, 2, False), (4, 2, True)])
def test_crowded_gpus_are_warned_of_once(
    ranks: int, gpus: int, warns: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    peers = [Peer("host", 1, 0)] * ranks + [Peer("other", 1, 1)]
    for rank in range(ranks + 1):
        device.warn_if_crowded(Topology(rank, ranks + 1, rank, ranks, 0, 1, peers))
    texts = [str(one.message) for one in recwarn]
    assert len(texts) == warns
    assert all("4 ranks of this job run on one host, which has 2 GPU(s)" in text for text in texts)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    device.warn_if_crowded(Topology(0, ranks + 1, 0, ranks, 0, 1, peers))
    assert len(recwarn) == warns
