"""join(): ranks that have no more data take part with neutral elements."""

from __future__ import annotations

import numpy as np
import pytest

import sirtaki.numpy as hvd
from cases import case
from sirtaki.bindings import request
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import MismatchError
from sirtaki.bindings.request import Batch


@case()
def the_last_rank_is_told_to_all() -> None:
    for last in range(hvd.size()):
        if hvd.rank() == last:
            hvd.allreduce(np.ones(1))  # ends when all others have joined
        assert hvd.join() == last


@case(op=("Sum", "Average", "Min", "Max", "Product", "Adasum"))
def uneven_steps(op: str) -> None:
    """Rank r runs 2 r + 1 steps; ranks that have finished contribute neutral elements."""
    size, rank = hvd.size(), hvd.rank()
    code = getattr(hvd, op)
    for step in range(2 * rank + 1):
        active = [r for r in range(size) if step < 2 * r + 1]
        values = [r + 2.0 for r in active]
        result = hvd.allreduce(np.full(3, rank + 2.0), op=code, name="loss")
        expected = {
            "Sum": sum(values),
            "Average": sum(values) / size,
            "Min": min(values),
            "Max": max(values),
            "Product": float(np.prod(values)),
        }
        if op != "Adasum":
            np.testing.assert_array_equal(result, np.full(3, expected[op]))
        elif len(active) == 1:
            np.testing.assert_array_equal(result, np.full(3, values[0]))
    assert hvd.join() == size - 1
    assert hvd.allreduce(np.ones(()), op=hvd.Sum) == size


@case()
def unnamed_operations_after_a_join() -> None:
    """Rank r makes r unnamed calls of each form before the join; the calls after it match all the same."""
    size, rank = hvd.size(), hvd.rank()
    for _ in range(2):
        for _ in range(rank):
            hvd.allreduce(np.ones(2))
            hvd.grouped_allreduce([np.ones(2), np.ones(3)])
            hvd.allgather(np.ones(1))
        hvd.join()
        assert hvd.allreduce(np.ones(()), op=hvd.Sum) == size
        assert hvd.grouped_allreduce([np.ones(()), np.ones(2)], op=hvd.Sum)[0] == size
        assert hvd.allgather(np.array([rank])).tolist() == list(range(size))


@case(least=2)
def every_operation_goes_on_without_rank_0() -> None:
    size, rank = hvd.size(), hvd.rank()
    others = list(range(1, size))
    if rank:
        for _ in range(3):
            mine = np.full(2 * size + 1, rank)
            assert hvd.allgather(mine[:rank]).tolist() == np.repeat(others, others).tolist()
            scattered = hvd.reducescatter(mine, op=hvd.Sum)
            assert scattered.tolist() == [sum(others)] * len(np.array_split(mine, size)[rank])
            assert hvd.alltoall(mine[:size]).tolist() == others
            assert hvd.broadcast(mine, 1).tolist() == [1] * (2 * size + 1)
            results = hvd.grouped_allreduce([mine, mine * 2.0], op=hvd.Max)
            assert results[1].tolist() == [2.0 * (size - 1)] * (2 * size + 1)
            hvd.barrier()
            with pytest.raises(MismatchError, match="has joined"):
                hvd.broadcast(mine, 0)
            with pytest.raises(MismatchError, match="has joined"):
                hvd.send(mine, 0)
    hvd.join()
    assert hvd.allreduce(np.ones(()), op=hvd.Sum) == size


@case(least=3)
def a_joined_rank_submits_nothing() -> None:
    pair = hvd.add_process_set([0, 1])
    if hvd.rank():
        if hvd.rank() == 1:
            hvd.barrier(process_set=pair)
        hvd.join()
        return
    context, joining = current(), Batch(1)
    joining.set_request(0, request.JOIN, 0, ())
    context.enqueue(joining)
    for call in (lambda: hvd.allreduce(np.ones(2)), lambda: hvd.barrier(), lambda: hvd.join()):
        with pytest.raises(ValueError, match=r"has called join\(\)"):
            call()
    hvd.barrier(process_set=pair)  # rank 1 joins only after this barrier, so no rank's join ends before
    context.wait(joining)
    context.release(joining)


@case(least=2)
def join_of_a_set_leaves_the_others_alone() -> None:
    pair = hvd.add_process_set([0, 1]) if hvd.size() > 2 else hvd.add_process_set([0])
    if hvd.rank() in pair.ranks:
        if hvd.rank() != pair.ranks[0]:
            assert hvd.allreduce(np.array([5.0]), op=hvd.Sum, process_set=pair).tolist() == [5.0]
        assert hvd.join(process_set=pair) == pair.ranks[-1]
    assert hvd.allreduce(np.ones(()), op=hvd.Sum) == hvd.size()
    assert hvd.remove_process_set(pair)
