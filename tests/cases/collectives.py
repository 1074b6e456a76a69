"""The result of each collective, for every dtype, op and shape."""

from __future__ import annotations

import time

import numpy as np
import pytest

import sirtaki.numpy as hvd
from cases import case
from cases.data import (
    COMPLEX,
    FLOAT8,
    MOVABLE,
    OPS,
    REDUCIBLE,
    SHAPES,
    all_values,
    assert_same,
    combined,
    values,
)
from cases.warned import warnings_of_this_rank


@case(op=OPS)
def allreduce(op: str) -> None:
    for dtype in REDUCIBLE.values():
        for shape in SHAPES:
            expected = combined(all_values(shape, dtype), OPS[op])
            mine = values(hvd.rank(), shape, dtype)
            assert_same(hvd.allreduce(mine, op=OPS[op]), expected)
            assert_same(mine, values(hvd.rank(), shape, dtype))


@case(op=OPS)
def allreduce_in_place(op: str) -> None:
    for dtype in REDUCIBLE.values():
        for shape in SHAPES:
            mine = values(hvd.rank(), shape, dtype)
            result = hvd.allreduce_(mine, op=OPS[op])
            assert result is mine
            assert_same(mine, combined(all_values(shape, dtype), OPS[op]))


@case(least=2)
def calls_that_repeat_in_another_order() -> None:
    """The descriptions that calls leave to those that repeat them differ in one argument each."""
    size, rank = hvd.size(), hvd.rank()
    alone = hvd.add_process_set([size - 1])
    for step in range(3):
        for shape in ((2,), (2, 1), (4,)):
            for dtype in (np.float32, np.float64, np.int32):
                mine = np.full(shape, rank + step, dtype)
                everyone = [np.full(shape, other + step, dtype) for other in range(size)]
                for op, expected in (
                    (hvd.Sum, sum(everyone)),
                    (hvd.Max, everyone[-1]),
                    (hvd.Min, everyone[0]),
                ):
                    assert_same(hvd.allreduce(mine, op=op), expected)
                    assert_same(hvd.allreduce(mine, op=op, name="named"), expected)
                    for result in hvd.grouped_allreduce([mine, mine], op=op):
                        assert_same(result, expected)
                assert_same(hvd.allreduce(mine, op=hvd.Sum, postscale_factor=2), 2 * sum(everyone))
                assert_same(hvd.allgather(mine), np.concatenate(everyone))
                assert_same(
                    hvd.allgather(mine[: rank + 1]),
                    np.concatenate([part[: other + 1] for other, part in enumerate(everyone)]),
                )
                for root in range(size):
                    assert_same(hvd.broadcast(mine, root), everyone[root])
                    assert_same(hvd.broadcast_(mine.copy(), root), everyone[root])
                if rank == size - 1:
                    assert_same(hvd.allreduce(mine, op=hvd.Sum, process_set=alone), mine)
                    assert_same(hvd.allgather(mine, process_set=alone), mine)
        handles = [hvd.allgather_async(np.array([step, rank, index])) for index in range(5)]
        for index, handle in enumerate(handles):
            expected = np.array([[step, other, index] for other in range(size)]).ravel()
            assert_same(hvd.synchronize(handle), expected)
    for wrong in ([0], "0", 1.5):
        with pytest.raises((TypeError, ValueError)):
            hvd.broadcast(np.ones(2), wrong)
    with pytest.raises(ValueError, match="has to be text"):
        hvd.allgather(np.ones(2), name=["named"])
    hvd.remove_process_set(alone)


@case()
def what_is_repeated_under_one_name() -> None:
    """Each call with the same name may pass another array, shape, dtype or operation."""
    for _ in range(3):
        for dtype in (np.dtype("float32"), np.dtype("int64")):
            for shape in ((5,), (2, 3), (0,), ()):
                for op in OPS.values():
                    mine = values(hvd.rank(), shape, dtype)
                    assert hvd.allreduce_(mine, op=op, name="repeated") is mine
                    assert_same(mine, combined(all_values(shape, dtype), op))
        kept = values(hvd.rank(), (5,), np.dtype("float32"))
        kept.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            hvd.allreduce_(kept, op=hvd.Sum, name="repeated")


@case()
def allreduce_of_the_smallest_floats() -> None:
    for dtype in FLOAT8.values():
        for op in OPS.values():
            everyone = all_values((301,), dtype)
            assert_same(hvd.allreduce(everyone[hvd.rank()], op=op), combined(everyone, op))


@case()
def allreduce_of_truth_values() -> None:
    everyone = np.array([[rank != place for place in range(5)] for rank in range(hvd.size())])
    mine = everyone[hvd.rank()]
    for op in (hvd.Min, hvd.Product):
        assert_same(hvd.allreduce(mine, op=op), everyone.all(axis=0))
    assert_same(hvd.allreduce(mine, op=hvd.Max), everyone.any(axis=0))


@case()
def allreduce_of_complex_numbers() -> None:
    for dtype in COMPLEX.values():
        everyone = [np.arange(9).astype(dtype) * (2 + 3j) * (rank + 1) for rank in range(hvd.size())]
        mine = everyone[hvd.rank()]
        total = np.sum(everyone, axis=0, dtype=dtype)
        assert_same(hvd.allreduce(mine, op=hvd.Sum), total)
        assert_same(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5), total)
        np.testing.assert_allclose(hvd.allreduce(mine), total / hvd.size(), rtol=1e-6)


@case()
def average_is_the_default_and_average_false_means_sum() -> None:
    everyone = all_values((9,), np.float32)
    mine = everyone[hvd.rank()]
    assert_same(hvd.allreduce(mine), combined(everyone, hvd.Average))
    with warnings_of_this_rank():
        assert_same(hvd.allreduce(mine, average=False), combined(everyone, hvd.Sum))
        assert_same(hvd.allreduce(mine, average=True), combined(everyone, hvd.Average))


@case()
def integer_average_truncates_toward_zero() -> None:
    total = 2 * hvd.size() - 1  # the average is just below 2
    for sign in (1, -1):
        mine = np.array([sign * (total if hvd.rank() == 0 else 0)], np.int64)
        assert hvd.allreduce(mine, op=hvd.Average)[0] == sign


@case(name=["float32", "float64", "float16", "bfloat16"])
def scales(name: str) -> None:
    dtype = REDUCIBLE[name]
    everyone = all_values((1_001,), dtype)
    mine = everyone[hvd.rank()]
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert_same(scaled, (combined(everyone, hvd.Sum).astype(np.float64) * 2).astype(dtype))


@case()
def factors_may_change_from_step_to_step() -> None:
    for before, after in ((1.0, 1.0), (1.0, 2.0), (4.0, 2.0), (4.0, 1.0), (1.0, 1.0)):
        factors = {"prescale_factor": before, "postscale_factor": after}
        for result in (
            hvd.allreduce(np.ones(5), op=hvd.Sum, name="changing", **factors),
            hvd.allreduce_(np.ones(5), op=hvd.Sum, name="changing", **factors),
        ):
            assert_same(result, np.full(5, hvd.size() * before * after))


@case()
def scales_of_integers_are_computed_in_floating_point() -> None:
    mine = np.array([10, -10], np.int32)
    result = hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.25 / hvd.size())
    assert result.tolist() == [2, -2]


@case(name=["float16", "bfloat16", "float32", "float64"])
def minimum_and_maximum_pass_nan_on(name: str) -> None:
    mine = np.arange(6).astype(REDUCIBLE[name])
    mine[hvd.rank() % 6] = np.nan
    expected = np.arange(6).astype(REDUCIBLE[name])
    for rank in range(hvd.size()):
        expected[rank % 6] = np.nan
    for op in (hvd.Min, hvd.Max):
        assert_same(hvd.allreduce(mine, op=op), expected)


@case()
def infinities_survive() -> None:
    mine = np.array([np.inf, -np.inf, 1.0], np.float32)
    for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Average):
        assert hvd.allreduce(mine, op=op)[:2].tolist() == [np.inf, -np.inf]


@case()
def memory_in_any_order() -> None:
    base = values(hvd.rank(), (4, 6, 10), np.float32)
    everyone = all_values((4, 6, 10), np.float32)
    total = combined(everyone, hvd.Sum)
    views = {
        "fortran": (np.asfortranarray(base), total),
        "transposed": (base.transpose(0, 2, 1), total.transpose(0, 2, 1)),
        "strided": (base[::2, :, ::3], total[::2, :, ::3]),
        "reversed": (base[::-1], total[::-1]),
        "broadcast": (np.broadcast_to(base[0, 0], (3, 10)), np.broadcast_to(total[0, 0], (3, 10))),
    }
    for array, expected in views.values():
        assert_same(hvd.allreduce(array, op=hvd.Sum), expected)
        if array.flags.writeable:
            assert_same(hvd.allreduce_(array.copy(order="K"), op=hvd.Sum), expected)
        gathered = hvd.allgather(array)
        start = hvd.rank() * array.shape[0]
        assert_same(gathered[start : start + array.shape[0]], np.ascontiguousarray(array))


@case()
def in_place_into_a_strided_view() -> None:
    base = np.zeros((5, 8), np.float64)
    view = base[:, 1::2]
    view[...] = hvd.rank() + 1
    assert hvd.allreduce_(view, op=hvd.Sum) is view
    total = sum(range(1, hvd.size() + 1))
    assert (base[:, 1::2] == total).all()
    assert (base[:, 0::2] == 0).all()
    view[...] = hvd.rank()
    hvd.broadcast_(view, hvd.size() - 1)
    assert (base[:, 1::2] == hvd.size() - 1).all()


@case(name=MOVABLE)
def broadcast(name: str) -> None:
    dtype = MOVABLE[name]
    for root in range(hvd.size()):
        for shape in SHAPES:
            mine = values(hvd.rank(), shape, dtype)
            expected = values(root, shape, dtype)
            assert_same(hvd.broadcast(mine, root), expected)
            assert_same(mine, values(hvd.rank(), shape, dtype))
            assert hvd.broadcast_(mine, root) is mine
            assert_same(mine, expected)


@case(name=MOVABLE)
def allgather(name: str) -> None:
    dtype = MOVABLE[name]
    for shape in [(0,), (1,), (7,), (3, 5), (2, 0, 4), (65_539,)]:
        mine = values(hvd.rank(), shape, dtype)
        assert_same(hvd.allgather(mine), np.concatenate(all_values(shape, dtype)))


@case()
def allgather_of_different_lengths() -> None:
    for length in (
        lambda r: r,
        lambda r: 3 - r % 3,
        lambda r: 0,
        lambda r: 70_001 * r,
        lambda r: 5 if r == 0 else 0,
    ):
        everyone = [values(r, (length(r), 2), np.int32) for r in range(hvd.size())]
        assert_same(hvd.allgather(everyone[hvd.rank()]), np.concatenate(everyone))


@case()
def allgather_lengths_may_change_from_step_to_step() -> None:
    for step in range(12):
        everyone = [values(r, ((r + step) % 4,), np.float32) for r in range(hvd.size())]
        assert_same(hvd.allgather(everyone[hvd.rank()], name="changing"), np.concatenate(everyone))


@case()
def a_gathered_array_outlives_its_handle_and_is_writable() -> None:
    kept = [hvd.allgather(np.full(1_000, hvd.rank(), np.int64)) for _ in range(20)]
    for array in kept:
        array += 1
        assert array[::1_000].tolist() == [rank + 1 for rank in range(hvd.size())]


@case()
def barrier() -> None:
    for late in range(hvd.size()):
        if hvd.rank() == late:
            time.sleep(0.05)
        came = time.monotonic()
        hvd.barrier()
        times = hvd.allgather(np.array([[came, time.monotonic()]]))
        assert times[:, 1].min() >= times[:, 0].max()  # no rank left before the last rank arrived


@case()
def steps_repeat_with_the_same_names() -> None:
    for step in range(50):
        mine = np.full(10, hvd.rank() + step, np.float32)
        result = hvd.allreduce(mine, op=hvd.Sum, name="gradient")
        assert (result == sum(range(hvd.size())) + step * hvd.size()).all()


@case()
def one_name_may_serve_different_kinds_and_shapes_in_turn() -> None:
    for shape in [(3,), (4, 2), (3,), ()]:
        everyone = all_values(shape, np.float32)
        assert_same(hvd.allreduce(everyone[hvd.rank()], op=hvd.Sum, name="x"), combined(everyone, hvd.Sum))
        assert_same(hvd.broadcast(everyone[hvd.rank()], 0, name="x"), everyone[0])


@case()
def python_numbers_and_lists_are_arrays() -> None:
    assert hvd.allreduce(1.5, op=hvd.Sum) == 1.5 * hvd.size()
    assert hvd.allreduce([1, 2], op=hvd.Max).tolist() == [1, 2]
    assert hvd.broadcast(hvd.rank(), 0) == 0


@case()
def averages_are_rounded_once() -> None:
    """A third has no exact binary form: the quotient is rounded, not a factor of it."""
    for dtype in (np.float32, np.float64):
        mine = (np.arange(3000) * (hvd.rank() + 1) % 1009).astype(dtype)
        whole = sum((np.arange(3000) * (rank + 1) % 1009) for rank in range(hvd.size()))
        expected = (whole / np.float64(hvd.size())).astype(dtype)
        np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Average), expected)


@case()
def complex_numbers_of_many_members() -> None:
    for dtype in (np.complex64, np.complex128):
        mine = np.full(1001, complex(hvd.rank() + 1, -3 * hvd.rank()), dtype)
        total = sum(complex(rank + 1, -3 * rank) for rank in range(hvd.size()))
        np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum), np.full(1001, total, dtype))
