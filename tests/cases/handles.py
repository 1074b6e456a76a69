"""Operations in flight: many at once, in any order, dropped, polled."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np

import sirtaki.numpy as hvd
from cases import case
from cases.data import assert_same, combined, values

PATIENCE = 120.0


@case()
def many_in_flight_in_another_order_on_each_rank() -> None:
    count = 60
    order = [(index + 7 * hvd.rank()) % count for index in range(count)]
    handles = {}
    for index in order:
        mine = values(hvd.rank() + index, (index * 50,), np.float32)
        handles[index] = hvd.allreduce_async(mine, op=hvd.Sum, name=f"tensor {index}")
    for index in reversed(order):
        expected = combined(
            [values(r + index, (index * 50,), np.float32) for r in range(hvd.size())], hvd.Sum
        )
        assert_same(hvd.synchronize(handles[index]), expected)


@case()
def kinds_mix() -> None:
    mine = np.full(1_000, hvd.rank() + 1, np.int32)
    rotated = [(index + hvd.rank()) % 3 for index in range(3)]
    start = [
        lambda: hvd.allreduce_async(mine, op=hvd.Max, name="a"),
        lambda: hvd.broadcast_async(mine, 0, name="b"),
        lambda: hvd.allgather_async(mine[: hvd.rank()], name="c"),
    ]
    handles = {index: start[index]() for index in rotated}
    assert (hvd.synchronize(handles[0]) == hvd.size()).all()
    assert (hvd.synchronize(handles[1]) == 1).all()
    expected = np.concatenate([np.full(rank, rank + 1, np.int32) for rank in range(hvd.size())])
    assert_same(hvd.synchronize(handles[2]), expected)


@case()
def in_place_handles_return_the_array_itself() -> None:
    mine = np.ones(5, np.float64)
    handle = hvd.allreduce_async_(mine, op=hvd.Sum)
    assert hvd.synchronize(handle) is mine
    assert (mine == hvd.size()).all()
    handle = hvd.broadcast_async_(mine, 0)
    assert handle.wait() is mine


@case()
def poll_becomes_true_without_a_wait() -> None:
    handle = hvd.allreduce_async(np.ones(10), op=hvd.Sum)
    end = time.monotonic() + PATIENCE
    while not hvd.poll(handle):
        assert time.monotonic() < end, "the operation did not end by itself"
        time.sleep(0.001)
    assert (hvd.synchronize(handle) == hvd.size()).all()
    assert hvd.poll(handle)


@case()
def a_second_wait_returns_the_same_result() -> None:
    handle = hvd.allgather_async(np.array([hvd.rank()]))
    first = handle.wait()
    assert handle.wait() is first
    assert first.tolist() == list(range(hvd.size()))


@case()
def dropped_handles_finish_by_themselves() -> None:
    for index in range(30):
        hvd.allreduce_async(np.full(20_000, index, np.float32), op=hvd.Sum, name=f"dropped {index}")
        hvd.allgather_async(np.full(100, index), name=f"dropped {index}")
    gc.collect()
    assert hvd.allreduce(1.0, op=hvd.Sum) == hvd.size()


@case()
def slices_of_one_array_may_be_in_flight_together() -> None:
    whole = np.full(1_000, hvd.rank(), np.int64)
    handles = [
        hvd.allreduce_async_(whole[i : i + 100], op=hvd.Sum, name=f"{i}") for i in range(0, 1_000, 100)
    ]
    for handle in handles:
        handle.wait()
    assert (whole == sum(range(hvd.size()))).all()


@case()
def one_array_may_be_read_by_several_at_once() -> None:
    mine = np.full(500, 2.0)
    handles = [hvd.allreduce_async(mine, op=hvd.Sum, name=f"{i}") for i in range(5)]
    for handle in handles:
        assert (handle.wait() == 2 * hvd.size()).all()


@case(least=2)
def several_threads_wait_for_one_handle() -> None:
    """Later operations are apart from each other: none shares the memory of its request with another."""
    mine = np.full(5, hvd.rank() + 1.0)
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(mine, op=hvd.Sum, name="awaited")
        threads = [threading.Thread(target=handle.wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)  # all of them wait
        hvd.barrier()
        for thread in threads:
            thread.join()
        result = handle.wait()
    else:
        hvd.barrier()
        result = hvd.allreduce(mine, op=hvd.Sum, name="awaited")
    assert result.tolist() == [sum(range(1, hvd.size() + 1))] * 5
    handles = [hvd.allreduce_async(np.full(5, float(i)), op=hvd.Sum, name=f"later {i}") for i in range(8)]
    for i, later in enumerate(handles):
        assert later.wait().tolist() == [i * hvd.size()] * 5
