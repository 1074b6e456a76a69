"""Works of the backend: asynchronous, with futures, limits and names of their own."""

from __future__ import annotations

import re
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import sirtaki.torch as hvd
from cases import case
from cases.torch_backend_groups import default_group, in_group, rank, same, size
from sirtaki.common.exceptions import DeadlineError


@case(least=2)
@in_group
def works_wait_in_any_order() -> None:
    """A work does not wait for the peers when it is started."""
    tensors = [torch.full((100,), float(number)) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number in reversed(range(20)):
        assert works[number].wait()
        same(tensors[number], torch.full((100,), float(number * size())))
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)


@case(least=2)
@in_group
def a_work_is_not_complete_before_the_others_have_called() -> None:
    tensor = torch.ones(3)
    if rank():
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
        hvd.broadcast(torch.ones(1), 1, name="go")
    else:
        hvd.broadcast(torch.ones(1), 1, name="go")
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    same(tensor, torch.full((3,), float(size())))
    same(work.result()[0], tensor)


@case(least=2)
@in_group
def futures_complete_by_themselves() -> None:
    tensor = torch.ones(3)
    chained = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    same(chained.wait(), torch.full((3,), 2.0 * size()))
    called = threading.Event()
    future = dist.barrier(async_op=True).get_future()
    future.add_done_callback(lambda _: called.set())
    assert called.wait(60)


@case()
@in_group
def futures_of_many_operations() -> None:
    """A future is complete when all tensors of its operation are, and those of fused operations are, too."""
    for _ in range(5):
        singles = [torch.full((2,), float(number)) for number in range(40)]
        several = [torch.full((3,), float(number)) for number in range(40)]
        futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in singles]
        together = dist.group.WORLD.allreduce_coalesced(several).get_future()
        for number, future in enumerate(futures):
            same(future.wait()[0], torch.full((2,), float(number * size())))
        for number, tensor in enumerate(together.wait()):
            same(tensor, torch.full((3,), float(number * size())))


@case()
@in_group
def callbacks_may_wait_for_other_operations() -> None:
    tensor, other = torch.ones(3), torch.ones(3)
    second = dist.all_reduce(other, async_op=True)

    def wait_for_the_other(done: object) -> float:
        second.wait()
        return float(other[0].item())

    first = dist.all_reduce(tensor, async_op=True).get_future().then(wait_for_the_other)
    assert first.wait() == size()


@case(least=2)
@in_group
def a_later_future_completes_first() -> None:
    late, early = torch.ones(2), torch.ones(2)
    if rank():
        first = dist.all_reduce(early, async_op=True)
        first.wait()
        hvd.broadcast(torch.ones(1), 0, name="early is done")
        dist.send(late, 0)
    else:
        waiting = dist.irecv(torch.zeros(2), 1)
        assert waiting is not None
        open_future = waiting.get_future()
        assert (dist.all_reduce(early, async_op=True).get_future().wait()[0] == size()).all()
        assert not open_future.done()
        hvd.broadcast(torch.ones(1), 0, name="early is done")
        same(open_future.wait()[0], late)
        for other in range(2, size()):
            dist.recv(late, other)


@case(least=2)
@in_group
def several_threads_wait_for_one_work() -> None:
    tensor, seen = torch.ones(1000), []
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()

    def wait() -> None:
        work.wait()
        seen.append(tensor[0].item())

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [float(size())] * 4
    assert future.wait()[0] is tensor or torch.equal(future.wait()[0], tensor)


@case(least=2)
@in_group
def limits() -> None:
    tensor = torch.ones(2)
    if rank():
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(DeadlineError, match=r"has not ended within 0\.05 s"):
            work.wait(timedelta(seconds=0.05))
        hvd.broadcast(torch.ones(1), 1, name="go")
        work.wait(timedelta(seconds=60))
    else:
        hvd.broadcast(torch.ones(1), 1, name="go")
        dist.all_reduce(tensor)
    same(tensor, torch.full((2,), float(size())))


@case(least=2)
def the_limit_of_a_group() -> None:
    with default_group(seconds=0.05):
        tensor = torch.ones(2)
        if rank():
            with pytest.raises(DeadlineError, match=r"has not ended within 0\.05 s"):
                dist.all_reduce(tensor)
            hvd.broadcast(torch.ones(1), 1, name="go")
        else:
            hvd.broadcast(torch.ones(1), 1, name="go")
            work = dist.all_reduce(tensor, async_op=True)
            work.wait(timedelta(seconds=60))
        hvd.barrier()


@case()
@in_group
def beside_horovods_calls() -> None:
    for number in range(10):
        ours, theirs = torch.full((4,), 1.0), torch.full((4,), 2.0)
        work = dist.all_reduce(ours, async_op=True)
        handle = hvd.allreduce_async_(theirs, op=hvd.Sum, name=f"theirs.{number}")
        handle.wait()
        work.wait()
        same(ours, torch.full((4,), 1.0 * size()))
        same(theirs, torch.full((4,), 2.0 * size()))


@case()
@in_group
def inference_mode() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        gathered = [torch.zeros(3) for _ in range(size())]
        future = dist.all_gather(gathered, torch.full((3,), float(rank())), async_op=True).get_future()
        future.wait()
    same(tensor.clone(), torch.full((3,), float(size())))
    assert [one[0].item() for one in gathered] == list(range(size()))


@case()
def again_after_its_end() -> None:
    for _ in range(3):
        with default_group():
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            same(tensor, torch.full((2,), float(size())))
    assert hvd.is_initialized()
    with pytest.raises(ValueError, match="the default group consists of all ranks"):
        dist.init_process_group("sirtaki", store=dist.HashStore(), rank=0, world_size=hvd.size() + 1)


@case(least=2)
@in_group
def the_profiler_shows_operations() -> None:
    """Those of the backend, of Horovod's calls and of an optimizer, with bytes and ranks; then none."""
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    pair = dist.new_group([0, 1])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(250))
        if rank() < 2:
            dist.broadcast(torch.ones(3), 0, group=pair, async_op=True).wait()
        hvd.allgather(torch.ones(2, dtype=torch.float64), name="profiled")
        hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(4), torch.ones(5)], name="both"))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    dist.all_reduce(torch.ones(251))
    shown = [event.name for event in profile.events() if event.name.startswith("sirtaki:")]
    assert "sirtaki:all_reduce, 1000 bytes, process set 0" in shown
    assert "sirtaki:all_gather, 16 bytes, process set 0" in shown
    assert "sirtaki:all_reduce, 36 bytes of 2 tensors, process set 0" in shown
    assert "sirtaki:all_reduce, 36 bytes of 2 tensors, process set 0, wait" in shown
    if rank() < 2:
        assert any(re.fullmatch(r"sirtaki:broadcast, 12 bytes, process set \d+, wait", one) for one in shown)
    steps = [name for name in shown if re.search("all_reduce.* (8|24|32) bytes", name)]
    assert any(name.endswith("wait") for name in steps)
    assert not [name for name in shown if "1004 bytes" in name]
