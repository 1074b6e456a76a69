"""Reduce-scatter, all-to-all, send and receive, and grouped forms: exact results for every shape and cut."""

from __future__ import annotations

import numpy as np
import pytest

import sirtaki.numpy as hvd
from cases import case
from cases.data import MOVABLE, OPS, REDUCIBLE, all_values, assert_same, combined, values

CUTS = [(0,), (1,), (2, 3), (5,), (7, 2), (12, 0), (12, 5), (70_003,), (40_001, 3)]


def own_part(whole: np.ndarray) -> np.ndarray:
    """Returns this rank's rows of a reduce-scatter."""
    return np.array_split(whole, hvd.size())[hvd.rank()]


@case(op=OPS)
def reducescatter(op: str) -> None:
    for dtype in REDUCIBLE.values():
        for shape in CUTS:
            expected = own_part(combined(all_values(shape, dtype), OPS[op]))
            mine = values(hvd.rank(), shape, dtype)
            assert_same(hvd.reducescatter(mine, op=OPS[op]), expected)
            assert_same(mine, values(hvd.rank(), shape, dtype))


@case()
def reducescatter_with_factors_and_of_any_memory_order() -> None:
    everyone = all_values((9, 4), np.float32)
    mine = np.asfortranarray(everyone[hvd.rank()])
    result = hvd.reducescatter(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=4.0)
    assert_same(result, own_part(8 * combined(everyone, hvd.Sum)))


@case()
def grouped_reducescatter() -> None:
    for _ in range(3):  # the second time from the cache
        tensors = [values(hvd.rank(), shape, np.float32) for shape in CUTS]
        handle = hvd.grouped_reducescatter_async(tensors, op=hvd.Sum)
        for result, shape in zip(hvd.synchronize(handle), CUTS, strict=True):
            assert_same(result, own_part(combined(all_values(shape, np.float32), hvd.Sum)))


def splits_of(rank: int, size: int, unit: int) -> list[int]:
    """Returns the number of rows that a rank sends to each: different for every pair, zero for some."""
    return [(rank + 2 * other) % 3 * unit for other in range(size)]


@case(unit=(1, 5, 30_011))
def alltoall(unit: int) -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in (np.float32, np.uint8, np.complex128) if unit > 5 else MOVABLE.values():
        sent = [values(r, (sum(splits_of(r, size, unit)), 3), dtype) for r in range(size)]
        result, received = hvd.alltoall(sent[rank], splits_of(rank, size, unit))
        parts = []
        for r in range(size):
            cuts = np.cumsum([0, *splits_of(r, size, unit)])
            parts.append(sent[r][cuts[rank] : cuts[rank + 1]])
        assert_same(result, np.concatenate(parts))
        assert received.dtype == np.int32
        assert received.tolist() == [len(part) for part in parts]


@case()
def alltoall_in_equal_parts() -> None:
    size, rank = hvd.size(), hvd.rank()
    for rows in (0, 1, 4):
        everyone = all_values((rows * size, 2), np.int64)
        result = hvd.synchronize(hvd.alltoall_async(everyone[rank]))
        expected = [part[rank * rows : (rank + 1) * rows] for part in everyone]
        assert_same(result, np.concatenate(expected))


@case()
def alltoall_of_less_than_everything_and_of_nothing() -> None:
    size, rank = hvd.size(), hvd.rank()
    mine = values(rank, (size + 4, 2), np.float32)
    result, received = hvd.alltoall(mine, [1] * size)  # the last rows are not sent
    assert_same(result, np.stack([values(r, (size + 4, 2), np.float32)[rank] for r in range(size)]))
    result, received = hvd.alltoall(mine, [0] * size)
    assert result.shape == (0, 2)
    assert received.tolist() == [0] * size


@case()
def splits_that_change_from_step_to_step() -> None:
    size, rank = hvd.size(), hvd.rank()
    for step in range(20):
        count = (step // 3 + rank) % 3
        result, received = hvd.alltoall(
            np.full((count * size,), rank, np.int32), [count] * size, name="tokens"
        )
        expected = [(step // 3 + r) % 3 for r in range(size)]
        assert received.tolist() == expected
        assert_same(result, np.repeat(np.arange(size, dtype=np.int32), expected))


@case(least=2)
def send_and_receive() -> None:
    size, rank = hvd.size(), hvd.rank()
    for count in (0, 1, 1_000, 400_003):
        ahead, behind = (rank + 1) % size, (rank - 1) % size
        sending = hvd.send_async(values(rank, (count,), np.float32), ahead)
        mine = np.zeros(count, np.float32)
        assert hvd.recv(mine, behind) is mine
        assert_same(mine, values(behind, (count,), np.float32))
        hvd.synchronize(sending)


@case(least=3)
def pairs_do_not_wait_for_others() -> None:
    for round_ in range(20):
        if hvd.rank() == 0:
            hvd.send(np.array([round_]), 1, name="token")
        elif hvd.rank() == 1:
            mine = np.zeros(1, np.int64)
            hvd.recv(mine, 0, name="token")
            assert mine[0] == round_
    hvd.barrier()


@case()
def grouped_allreduce() -> None:
    shapes = [(3,), (), (70_000,), (0,), (2, 2)]
    dtypes = [np.float32, np.int64, np.float32, np.float16, np.float64]
    for _ in range(3):
        tensors = [values(hvd.rank(), shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        expected = [combined(all_values(s, d), hvd.Sum) for s, d in zip(shapes, dtypes, strict=True)]
        for results in (
            hvd.grouped_allreduce(tensors, op=hvd.Sum),
            hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="both")),
            hvd.grouped_allreduce_(tensors, op=hvd.Sum),
        ):
            for result, wanted in zip(results, expected, strict=True):
                assert_same(result, wanted)
        assert_same(tensors[2], expected[2])


@case()
def grouped_allgather() -> None:
    for rows in (1, 2, 2):
        shapes = [(hvd.rank() * rows, 2), (1,), (rows,)]
        results = hvd.grouped_allgather([values(hvd.rank(), shape, np.float32) for shape in shapes])
        for index, result in enumerate(results):
            parts = [values(r, [(r * rows, 2), (1,), (rows,)][index], np.float32) for r in range(hvd.size())]
            assert_same(result, np.concatenate(parts))


@case()
def many_small_operations_of_every_kind_at_once() -> None:
    size, rank = hvd.size(), hvd.rank()
    for step in range(5):
        gathers = [hvd.allgather_async(np.full(i % 3, rank), name=f"gather.{i}") for i in range(20)]
        scatters = [hvd.reducescatter_async(np.full(size, i), op=hvd.Sum, name=f"s.{i}") for i in range(20)]
        exchanges = [hvd.alltoall_async(np.full(size, rank + i), name=f"exchange.{i}") for i in range(20)]
        casts = [hvd.broadcast_async(np.full(3, rank + step), i % size, name=f"cast.{i}") for i in range(20)]
        for i in range(20):
            assert_same(hvd.synchronize(gathers[i]), np.repeat(np.arange(size), i % 3))
            assert hvd.synchronize(scatters[i]).tolist() == [i * size]
            assert_same(hvd.synchronize(exchanges[i]), np.arange(size) + i)
            assert hvd.synchronize(casts[i]).tolist() == [i % size + step] * 3


@case()
def no_adasum() -> None:
    """Horovod's users catch a RuntimeError."""
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match=r"does not support op=Adasum; use op=Average or op=Sum"):
            hvd.reducescatter(np.ones(4), op=hvd.Adasum)
