"""Each collective's result for torch tensors: dtypes, shapes, memory orders, in place and asynchronous."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import sirtaki.torch as hvd
from cases import case
from cases.warned import warnings_of_this_rank
from sirtaki.bindings.context import Context, current, using
from sirtaki.common.ops.tensor import DTYPE_CODES

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (70_001,)]
MOVABLE = {name: getattr(torch, name) for name in DTYPE_CODES if hasattr(torch, name)}
BITS_ONLY = [getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)]
REDUCIBLE = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
OPS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Sum": (hvd.Sum, lambda all_ranks: all_ranks.sum(0)),
    "Average": (hvd.Average, lambda all_ranks: all_ranks.sum(0) / all_ranks.shape[0]),
    "Min": (hvd.Min, lambda all_ranks: all_ranks.amin(0)),
    "Max": (hvd.Max, lambda all_ranks: all_ranks.amax(0)),
    "Product": (hvd.Product, lambda all_ranks: all_ranks.prod(0)),
}


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns small integers, which every dtype holds exactly; their sums are divisible by up to 4 ranks."""
    numbers = torch.arange(int(torch.Size(shape).numel())) * 5 + rank * 7
    small = (numbers % 2 * 12).reshape(shape)
    return small.to(torch.uint8).view(dtype) if dtype in BITS_ONLY else small.to(dtype)


def everyone(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.stack([values(rank, shape, dtype) for rank in range(hvd.size())])


def same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype in BITS_ONLY:
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(actual.to(torch.complex128), expected.to(torch.complex128))


@case(op=OPS)
def allreduce(op: str) -> None:
    code, combine = OPS[op]
    for name in REDUCIBLE:
        for shape in SHAPES:
            mine = values(hvd.rank(), shape, MOVABLE[name])
            expected = combine(everyone(shape, torch.float64)).to(MOVABLE[name])
            same(hvd.allreduce(mine, op=code), expected)
            same(hvd.allreduce_async(mine, op=code).wait(), expected)
            same(mine, values(hvd.rank(), shape, MOVABLE[name]))
            version = mine._version
            assert hvd.allreduce_(mine, op=code) is mine
            same(mine, expected)
            assert mine._version > version
            mine = values(hvd.rank(), shape, MOVABLE[name])
            handle = hvd.allreduce_async_(mine, op=code)
            assert hvd.synchronize(handle) is mine
            assert hvd.poll(handle)
            same(mine, expected)


@case()
def what_is_repeated_under_one_name() -> None:
    """Each call with the same name may pass another tensor, shape, dtype, order or operation."""
    for turn in range(3):
        for name in ("float32", "int64"):
            for shape in ((5,), (2, 3), (0,), ()):
                for op, (code, combine) in OPS.items():
                    mine = values(hvd.rank(), shape, MOVABLE[name]) + 12 * turn
                    expected = combine(everyone(shape, torch.float64) + 12 * turn).to(MOVABLE[name])
                    version = mine._version
                    assert hvd.allreduce_(mine, op=code, name="repeated") is mine
                    same(mine, expected)
                    assert mine._version > version, op
    for _ in range(2):
        turned = values(hvd.rank(), (3, 5), torch.float32).t()  # dense, in another order
        gapped = values(hvd.rank(), (3, 10), torch.float32)[:, ::2]
        negative = torch.complex(torch.ones(4), values(hvd.rank(), (4,), torch.float32)).conj().imag
        assert negative.is_neg()
        for mine in (turned, gapped, negative):
            expected = hvd.allreduce(mine.clone(), op=hvd.Sum)
            assert hvd.allreduce_(mine, op=hvd.Sum, name="repeated") is mine
            same(mine, expected)


@case(least=2)
def what_is_repeated_after_it_has_failed() -> None:
    for _ in range(3):
        mine = torch.ones(6)
        same(hvd.allreduce_(mine, op=hvd.Sum, name="repeated"), torch.full((6,), float(hvd.size())))
        wrong = torch.ones(6 if hvd.rank() else 7)
        with pytest.raises(hvd.MismatchError):
            hvd.allreduce_(wrong, op=hvd.Sum, name="repeated")
    with pytest.raises(ValueError, match="op is 17"):
        hvd.allreduce_(torch.ones(6), op=17, name="repeated")


@case()
def what_threads_repeat_at_the_same_time() -> None:
    """Threads run operations of one kind and shape, each with a name of its own and without a name."""

    def repeat(context: Context, thread: int) -> None:
        with using(context):
            for turn in range(20):
                mine = torch.full((9,), float(hvd.rank() + turn + thread))
                hvd.allreduce_(mine, op=hvd.Max, name=f"thread {thread}")
                same(mine, torch.full((9,), float(hvd.size() - 1 + turn + thread)))

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(repeat, current(), thread) for thread in range(3)]:
            done.result()


@case()
def average_and_factors() -> None:
    mine = torch.full((3,), float(hvd.rank()))
    assert hvd.allreduce(mine).tolist() == [(hvd.size() - 1) / 2] * 3
    with warnings_of_this_rank() as texts:
        assert hvd.allreduce(mine, average=False).tolist() == [hvd.size() * (hvd.size() - 1) / 2] * 3
    assert any("average" in text for text in texts), texts
    scaled = hvd.allreduce(mine + 1, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert scaled.tolist() == [hvd.size() * (hvd.size() + 1)] * 3


@case(name=["fp16", "bf16"])
def compression(name: str) -> None:
    mine = torch.full((5,), float(hvd.rank() + 1))
    result = hvd.allreduce(mine, op=hvd.Sum, compression=getattr(hvd.Compression, name))
    same(result, torch.full((5,), hvd.size() * (hvd.size() + 1) / 2))
    whole = hvd.allreduce(torch.tensor([2**40 + 1]), op=hvd.Max, compression=getattr(hvd.Compression, name))
    assert whole.tolist() == [2**40 + 1]


@case()
def broadcast() -> None:
    for root in range(hvd.size()):
        for name, dtype in MOVABLE.items():
            for shape in SHAPES[:-1]:
                expected = values(root, shape, dtype)
                mine = values(hvd.rank(), shape, dtype)
                same(hvd.broadcast(mine, root), expected)
                same(hvd.broadcast_async(mine, root, name=f"{name}{shape}").wait(), expected)
                assert hvd.broadcast_(mine, root) is mine
                same(mine, expected)
                mine = values(hvd.rank(), shape, dtype)
                assert hvd.broadcast_async_(mine, root).wait() is mine
                same(mine, expected)


@case()
def allgather() -> None:
    for dtype in MOVABLE.values():
        mine = values(hvd.rank(), (hvd.rank() + 1, 3), dtype)
        expected = torch.cat([values(rank, (rank + 1, 3), dtype) for rank in range(hvd.size())])
        same(hvd.allgather(mine), expected)
        same(hvd.allgather_async(mine).wait(), expected)
    some = torch.zeros(hvd.rank() % 2, 2)
    assert hvd.allgather(some).shape == (hvd.size() // 2, 2)
    assert hvd.allgather(torch.zeros(0, 3)).shape == (0, 3)


@case()
def gathered_tensors_can_be_written_and_outlive_their_handles() -> None:
    results = [hvd.allgather(torch.full((1000,), float(hvd.rank()))) for _ in range(3)]
    results[0].add_(1)
    assert results[1].sum() == 1000 * hvd.size() * (hvd.size() - 1) / 2
    assert results[0].sum() == results[1].sum() + 1000 * hvd.size()


@case()
def memory_in_any_order() -> None:
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float64).view(2, 3, 4, 5) * (hvd.rank() + 1)
    total = torch.arange(120, dtype=torch.float64).view(2, 3, 4, 5) * hvd.size() * (hvd.size() + 1) / 2
    orders = {
        "channels_last": (base.contiguous(memory_format=torch.channels_last), total),
        "transposed": (base.transpose(0, 3), total.transpose(0, 3)),
        "with gaps": (base[:, :, ::2, 1:4], total[:, :, ::2, 1:4]),
        "expanded": (base[:1].expand(4, 3, 4, 5), total[:1].expand(4, 3, 4, 5)),
        "permuted gaps": (base[..., 1:].permute(3, 1, 0, 2), total[..., 1:].permute(3, 1, 0, 2)),
    }
    for name, (mine, expected) in orders.items():
        same(hvd.allreduce(mine, op=hvd.Sum, name=name), expected)
        same(hvd.allgather(mine)[: mine.shape[0]], hvd.broadcast(mine, 0))
        if name != "expanded":
            gaps = name == "with gaps"
            writable = (
                base.clone()[:, :, ::2, 1:4] if gaps else mine.clone(memory_format=torch.preserve_format)
            )
            same(hvd.allreduce_(writable, op=hvd.Sum), expected)
            same(hvd.broadcast_(writable, 0), expected)
    assert hvd.allreduce(orders["channels_last"][0]).is_contiguous(memory_format=torch.channels_last)


@case()
def lazily_negated_and_conjugated_tensors() -> None:
    pair = torch.tensor([1 + 2j, 3 - 4j])
    same(hvd.broadcast(pair.conj(), 0), torch.tensor([1 - 2j, 3 + 4j]))
    negated = pair.conj().imag
    assert negated.is_neg()
    same(hvd.allreduce(negated, op=hvd.Max), torch.tensor([-2.0, 4.0]))
    target = pair.clone()
    hvd.allreduce_(target.conj().imag, op=hvd.Sum)
    same(target, torch.complex(torch.tensor([1.0, 3.0]), torch.tensor([2.0, -4.0]) * hvd.size()))


@case()
def tensors_with_gradients_in_place() -> None:
    parameter = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    assert hvd.broadcast_(parameter, 0) is parameter
    assert parameter.tolist() == [0.0] * 3
    with torch.no_grad():
        assert not hvd.allreduce(parameter).requires_grad
    assert not hvd.allreduce_async(parameter).wait().requires_grad


@case()
def many_at_once_and_a_barrier() -> None:
    handles = [
        hvd.allreduce_async(torch.full((10,), float(number)), op=hvd.Sum, name=f"many.{number}")
        for number in range(100)
    ]
    hvd.barrier()
    for number, handle in enumerate(handles):
        assert hvd.synchronize(handle).tolist() == [number * hvd.size()] * 10
