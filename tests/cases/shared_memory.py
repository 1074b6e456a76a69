"""Arrays in memory that the ranks of a host share: the same results as with any other arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sirtaki.numpy as hvd
from cases import case
from cases.data import OPS, REDUCIBLE, SHAPES, Array, all_values, assert_same, combined, values

MANY = (65_539,)  # elements: in every dtype more bytes than are worth an offer


def shared(rank: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns a rank's data in shared memory."""
    array = hvd.empty(shape, dtype)
    array[...] = values(rank, shape, dtype)
    return array


@case()
def new_arrays_are_zeros() -> None:
    for shape in SHAPES:
        array = hvd.empty(shape, np.int16)
        assert_same(array, np.zeros(shape, np.int16))
        array[...] = 5
        del array  # its memory is used again
        assert_same(hvd.empty(shape, np.int16), np.zeros(shape, np.int16))
    assert hvd.empty(3).shape == (3,)
    assert hvd.empty(3).dtype == np.float64


@case(op=OPS)
def allreduce_in_place(op: str) -> None:
    for dtype in REDUCIBLE.values():
        for shape in SHAPES:
            mine = shared(hvd.rank(), shape, dtype)
            assert hvd.allreduce_(mine, op=OPS[op]) is mine
            assert_same(mine, combined(all_values(shape, dtype), OPS[op]))


@case(least=2)
def only_some_ranks_share() -> None:
    """The ranks need not agree, and may change their minds about a name."""
    for sharing in range(1 << min(hvd.size(), 3)):
        make = shared if sharing >> hvd.rank() & 1 else values
        mine = make(hvd.rank(), MANY, np.float32)
        hvd.allreduce_(mine, op=hvd.Sum, name="some")
        assert_same(mine, combined(all_values(MANY, np.float32), hvd.Sum))


@case()
def parts_of_arrays() -> None:
    """Tensors may lie at other places on each rank, and what lies beside them is left alone."""
    skipped = 3 * hvd.rank() + 1
    whole = hvd.empty(MANY[0] + skipped + 5, np.float32)
    whole[...] = -1
    part = whole[skipped : skipped + MANY[0]]
    part[...] = values(hvd.rank(), MANY, np.float32)
    hvd.allreduce_(part, op=hvd.Sum)
    assert_same(part, combined(all_values(MANY, np.float32), hvd.Sum))
    assert (whole[:skipped] == -1).all()
    assert (whole[skipped + MANY[0] :] == -1).all()


@case()
def an_array_between_two_elements() -> None:
    """A view may begin where no element of its dtype would, if its memory comes from another dtype."""
    whole = hvd.empty(2 * MANY[0] + 1, np.float32)
    part = whole[1:].view(np.float64)
    part[...] = values(hvd.rank(), MANY, np.float64)
    hvd.allreduce_(part, op=hvd.Sum)
    assert_same(part, combined(all_values(MANY, np.float64), hvd.Sum))


@case()
def fused_arrays_of_every_size() -> None:
    shapes = [(1,), (7,), (4_099,), (3, 5), (65_539,), (0,), (131_077,)]
    arrays = [shared(hvd.rank(), shape, np.float32) for shape in shapes]
    for result, shape in zip(hvd.grouped_allreduce_(arrays, op=hvd.Average), shapes, strict=True):
        assert_same(result, combined(all_values(shape, np.float32), hvd.Average))


@case()
def one_of_the_fused_arrays_is_not_shared() -> None:
    arrays = [shared(hvd.rank(), MANY, np.float32), values(hvd.rank(), MANY, np.float32)]
    for result in hvd.grouped_allreduce_(arrays, op=hvd.Sum):
        assert_same(result, combined(all_values(MANY, np.float32), hvd.Sum))


@case()
def many_in_flight() -> None:
    arrays = [shared(hvd.rank() + i, MANY, np.int32) for i in range(6)]
    handles = [hvd.allreduce_async_(array, op=hvd.Sum, name=f"{i}") for i, array in enumerate(arrays)]
    for i, handle in reversed(list(enumerate(handles))):
        expected = combined([values(rank + i, MANY, np.int32) for rank in range(hvd.size())], hvd.Sum)
        assert_same(hvd.synchronize(handle), expected)


@case()
def what_is_not_in_place() -> None:
    """Results in another array, scales before the sum, and other collectives go the usual way."""
    mine = shared(hvd.rank(), MANY, np.float32)
    expected = combined(all_values(MANY, np.float32), hvd.Sum)
    assert_same(hvd.allreduce(mine, op=hvd.Sum), expected)
    assert_same(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0), 2 * expected)
    assert_same(hvd.broadcast(mine, 0), values(0, MANY, np.float32))
    assert_same(hvd.allgather(mine), np.concatenate(all_values(MANY, np.float32)))
    assert_same(mine, values(hvd.rank(), MANY, np.float32))


@case()
def scales_after_the_sum() -> None:
    mine = shared(hvd.rank(), MANY, np.float64)
    hvd.allreduce_(mine, op=hvd.Sum, postscale_factor=0.5)
    assert_same(mine, combined(all_values(MANY, np.float64), hvd.Sum) / 2)


@case(least=3)
def a_process_set() -> None:
    members = [0, hvd.size() - 1]
    some = hvd.add_process_set(members)
    if hvd.rank() in members:
        mine = shared(hvd.rank(), MANY, np.float32)
        hvd.allreduce_(mine, op=hvd.Sum, process_set=some)
        assert_same(mine, combined([values(rank, MANY, np.float32) for rank in members], hvd.Sum))
    hvd.remove_process_set(some)


@case(least=2)
def a_rank_that_has_joined() -> None:
    if hvd.rank():
        mine = shared(hvd.rank(), MANY, np.float32)
        hvd.allreduce_(mine, op=hvd.Sum, name="rest")
        assert_same(mine, combined(all_values(MANY, np.float32)[1:], hvd.Sum))
    hvd.join()


@case()
def more_than_there_is() -> None:
    if hvd.size() > 1:
        with pytest.raises(MemoryError):
            hvd.empty(1 << 50)
    assert_same(hvd.empty(2), np.zeros(2))
