"""Each call of torch.distributed that moves data, over the backend and over gloo: equal values.

Gloo gets contiguous tensors and calls that wait; the backend also tensors of other layouts and `async_op`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

from cases import case
from cases.torch_backend_groups import default_group
from cases.torch_backend_rank_order import keeps_order, orders

_never_destroyed: list[Any] = []  # see cases.torch_backend_groups

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.clone,
    "transposed": lambda tensor: tensor.clone().t().contiguous().t() if tensor.dim() == 2 else tensor.clone(),
    "strided": lambda tensor: torch.stack([tensor, -tensor], -1)[..., 0],
    "inside": lambda tensor: torch.cat([tensor.flatten()] * 3)[tensor.numel() : -tensor.numel() or None].view(
        tensor.shape
    ),
}
SHAPES = [(4, 3), (5,), ()]
DTYPES = [torch.float32, torch.int64, torch.bfloat16]


@dataclass
class Calls:
    """How a call is made.

    Attributes:
        group: the group, over one of the two backends.
        lay: gives a tensor its layout.
        starts: whether calls return a work, which is waited for.
        shape, dtype: of the tensors.
        results: the values that the calls have written, in their order.
    """

    group: Any
    lay: Callable[[Tensor], Tensor]
    starts: bool
    shape: tuple[int, ...] = (4, 3)
    dtype: torch.dtype = torch.float32
    results: list[Any] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return int(self.group.rank())

    @property
    def size(self) -> int:
        return int(self.group.size())

    @property
    def is_over_gloo(self) -> bool:
        return dist.get_backend(self.group) == "gloo"

    @property
    def named(self) -> dict[str, Any]:
        """The arguments of each collective."""
        return {"group": self.group, "async_op": self.starts}

    def mine(self, index: int = 0, shape: tuple[int, ...] | None = None) -> Tensor:
        """Returns values of this rank; those of all indices and ranks differ."""
        shape = self.shape if shape is None else shape
        values = torch.arange(int(torch.Size(shape).numel())) % 5 + 7 * self.rank + 2 * index + 1
        return self.lay(values.reshape(shape).to(self.dtype))

    def each(self, rows: int = 0) -> list[Tensor]:
        """Returns a tensor for each rank of the group; of `rows` more rows for each rank after the first."""
        shapes = [(rows * rank, 2) if rows else self.shape for rank in range(self.size)]
        return [self.mine(rank, shape) for rank, shape in enumerate(shapes)]

    def empty(self, shape: Sequence[int] | None = None) -> Tensor:
        return self.lay(torch.full(self.shape if shape is None else tuple(shape), -1).to(self.dtype))

    def ended(self, work: Any, *results: Any) -> None:
        """Waits, and keeps the results."""
        if work is not None:
            assert work.wait()
        self.results += results


def rooted(call: Callable[[Calls, int], None]) -> Callable[[Calls], None]:
    """Makes a call once for each root."""

    @functools.wraps(call)
    def run(calls: Calls) -> None:
        for root in range(calls.size):
            call(calls, root)

    return run


@rooted
def broadcast(calls: Calls, root: int) -> None:
    tensor = calls.mine()
    calls.ended(dist.broadcast(tensor, group_src=root, **calls.named), tensor)


def all_reduce(calls: Calls) -> None:
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
        tensor = calls.lay(calls.mine() % 3)  # whose products are exact
        calls.ended(dist.all_reduce(tensor, op, **calls.named), tensor)


@rooted
def reduce(calls: Calls, root: int) -> None:
    tensor = calls.mine()
    work = dist.reduce(tensor, group_dst=root, **calls.named)
    calls.ended(work, tensor if calls.rank == root else None)  # gloo leaves partial sums elsewhere


def all_gather(calls: Calls) -> None:
    outputs = [calls.empty() for _ in range(calls.size)]
    calls.ended(dist.all_gather(outputs, calls.mine(), **calls.named), outputs)


def all_gather_into_tensor(calls: Calls) -> None:
    """Into a tensor with as many rows, and into a stack, which gloo refuses."""
    for shape in ([4 * calls.size, 3], [calls.size, 4, 3]):
        output = calls.empty([4 * calls.size, 3] if calls.is_over_gloo else shape)
        work = dist.all_gather_into_tensor(output, calls.mine(shape=(4, 3)), **calls.named)
        calls.ended(work, output.view(shape) if calls.is_over_gloo else output)


def all_gather_coalesced(calls: Calls) -> None:
    inputs = [calls.mine(0), calls.mine(1, (2,)), calls.mine(2, (3, 2))]
    for count in (1, 2, 3):
        outputs = [[calls.empty(tensor.shape) for tensor in inputs[:count]] for _ in range(calls.size)]
        calls.ended(dist.all_gather_coalesced(outputs, inputs[:count], **calls.named), outputs)


def all_reduce_coalesced(calls: Calls) -> None:
    tensors = [calls.mine(0), calls.mine(1, (2,)), calls.mine(2, (3, 2))]
    calls.ended(dist.all_reduce_coalesced(tensors, **calls.named), tensors)


@rooted
def gather(calls: Calls, root: int) -> None:
    outputs = [calls.empty() for _ in range(calls.size)] if calls.rank == root else None
    calls.ended(dist.gather(calls.mine(), outputs, group_dst=root, **calls.named), outputs)


@rooted
def scatter(calls: Calls, root: int) -> None:
    output = calls.empty()
    inputs = calls.each() if calls.rank == root else None
    calls.ended(dist.scatter(output, inputs, group_src=root, **calls.named), output)


def reduce_scatter(calls: Calls) -> None:
    output = calls.empty()
    calls.ended(dist.reduce_scatter(output, calls.each(), **calls.named), output)


def reduce_scatter_tensor(calls: Calls) -> None:
    output = calls.empty((2, 3))
    source = calls.mine(shape=(2 * calls.size, 3))
    calls.ended(dist.reduce_scatter_tensor(output, source, ReduceOp.MAX, **calls.named), output)


def all_to_all_single(calls: Calls) -> None:
    output, source = calls.empty((2 * calls.size, 3)), calls.mine(shape=(2 * calls.size, 3))
    calls.ended(dist.all_to_all_single(output, source, **calls.named), output)
    sent = [calls.rank + 2 * other for other in range(calls.size)]
    received = [other + 2 * calls.rank for other in range(calls.size)]
    output, source = calls.empty((sum(received), 2)), calls.mine(shape=(sum(sent), 2))
    calls.ended(dist.all_to_all_single(output, source, received, sent, **calls.named), output)


def all_to_all(calls: Calls) -> None:
    inputs = calls.each(rows=1)
    outputs = [calls.empty((calls.rank, 2)) for _ in range(calls.size)]
    if calls.is_over_gloo:  # which has none: what all ranks send, by objects
        everyone: list[Any] = [None] * calls.size
        dist.all_gather_object(everyone, inputs, calls.group)
        calls.ended(None, [sent[calls.rank] for sent in everyone])
    else:
        calls.ended(dist.all_to_all(outputs, inputs, **calls.named), outputs)


def messages(calls: Calls) -> None:
    after, before = (calls.rank + 1) % calls.size, (calls.rank - 1) % calls.size
    for tag in (0, 3):
        output = calls.empty()
        sent = dist.isend(calls.mine(tag), group=calls.group, group_dst=after, tag=tag)
        if calls.starts:
            calls.ended(dist.irecv(output, group=calls.group, group_src=before, tag=tag), output)
        else:
            dist.recv(output, group=calls.group, group_src=before, tag=tag)
            calls.ended(None, output)
        calls.ended(sent)
    first, second = calls.empty(), calls.empty((2,))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, calls.mine(1), group=calls.group, group_peer=after),
            dist.P2POp(dist.irecv, first, group=calls.group, group_peer=before),
            dist.P2POp(dist.isend, calls.mine(2, (2,)), group=calls.group, group_peer=before),
            dist.P2POp(dist.irecv, second, group=calls.group, group_peer=after),
        ]
    )
    for work in works:
        calls.ended(work)
    calls.results += [first, second]


def objects(calls: Calls) -> None:
    mine, everyone = {"rank": calls.rank, "tensor": calls.mine()}, [None] * calls.size
    dist.all_gather_object(everyone, mine, calls.group)
    calls.results.append(everyone)
    for root in range(calls.size):
        listed = [mine, "x" * calls.rank]
        dist.broadcast_object_list(listed, group=calls.group, group_src=root)
        gathered = [None] * calls.size if calls.rank == root else None
        dist.gather_object(mine, gathered, group=calls.group, group_dst=root)
        scattered: list[Any] = [None]
        parts = [(root, rank) for rank in range(calls.size)] if calls.rank == root else None
        dist.scatter_object_list(scattered, parts, group=calls.group, group_src=root)
        calls.results += [listed, gathered, scattered]
    if calls.rank < 2 <= calls.size:
        received: list[Any] = [None, None]
        if calls.rank:
            dist.recv_object_list(received, group=calls.group, group_src=0)
        else:
            dist.send_object_list([mine, "text"], group=calls.group, group_dst=1)
        calls.results.append(received)


def coalescing_manager(calls: Calls) -> None:
    """Only the backend has the manager; gloo makes the calls one by one."""
    reduced = [calls.mine(0), calls.mine(1, (2,)), calls.mine(2, (0,))]
    inputs = [calls.mine(index, (count,)) for index, count in enumerate((1, 3))]
    gathered = [calls.empty([len(tensor) * calls.size]) for tensor in inputs]
    scattered = [calls.empty((3,)) for _ in range(2)]
    sources = [calls.mine(index, (3 * calls.size,)) for index in range(2)]

    def reduce_all() -> None:
        for tensor in reduced:
            dist.all_reduce(tensor, group=calls.group)

    def gather_all() -> None:
        for output, tensor in zip(gathered, inputs, strict=True):
            dist.all_gather_into_tensor(output, tensor, group=calls.group)

    def scatter_all() -> None:
        for output, tensor in zip(scattered, sources, strict=True):
            dist.reduce_scatter_tensor(output, tensor, group=calls.group)

    for body in (reduce_all, gather_all, scatter_all):
        if calls.is_over_gloo:
            body()
            continue
        with _coalescing_manager(calls.group, async_ops=calls.starts) as manager:
            body()
        if calls.starts:
            manager.wait()
    calls.results += [reduced, gathered, scattered]


def functional_collectives(calls: Calls) -> None:
    group, count = calls.group, calls.size
    tensors = [calls.mine(0, (2, 3)), calls.mine(1, (2,))]
    wide = [calls.mine(0, (2 * count, 3)), calls.mine(1, (2 * count,))]
    calls.results += [
        functional.all_reduce(tensors[0], "max", group),
        functional.all_reduce(tensors[0], "sum", group),
        functional.broadcast(tensors[0], 0, group),
        functional.all_gather_tensor(tensors[0], 0, group),
        functional.all_gather_tensor(tensors[0], 1, group),
        functional.reduce_scatter_tensor(wide[0], "sum", 0, group),
        functional.all_to_all_single(wide[0], None, None, group),
        functional.all_to_all_single(wide[0], [2] * count, [2] * count, group),
        functional.permute_tensor(tensors[1], [(rank + 1) % count for rank in range(count)], group),
        functional.all_reduce_coalesced(tensors, "sum", group),
    ]
    if calls.is_over_gloo:  # which has none for several tensors
        calls.results += [
            [functional.all_gather_tensor(tensor, 0, group) for tensor in tensors],
            [functional.reduce_scatter_tensor(tensor, "sum", 0, group) for tensor in wide],
        ]
    else:
        calls.results += [
            functional.all_gather_into_tensor_coalesced(tensors, group),
            functional.reduce_scatter_tensor_coalesced(wide, "sum", [0, 0], group),
        ]


def barrier(calls: Calls) -> None:
    calls.ended(dist.barrier(**calls.named))


TABLE = [
    *(broadcast, all_reduce, reduce, all_gather, all_gather_into_tensor, all_gather_coalesced),
    *(all_reduce_coalesced, gather, scatter, reduce_scatter, reduce_scatter_tensor, all_to_all_single),
    *(all_to_all, messages, objects, coalescing_manager, functional_collectives, barrier),
]


def plain(value: Any) -> Any:
    """Returns results as lists, which can be compared."""
    if isinstance(value, functional.AsyncCollectiveTensor):
        value = value.wait()
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), value.tolist()]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def without_warnings(call: Callable[[], Any]) -> None:
    """Calls; some calls of torch are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        call()


def run(call: Callable[[Calls], None], calls: Calls) -> Any:
    """Returns the results of calls, as lists."""
    without_warnings(lambda: call(calls))
    return plain(calls.results)


def pairs_of_groups() -> list[tuple[Any, Any]]:
    """Returns groups of this rank over gloo and over sirtaki: all ranks, other orders, some ranks."""
    size = dist.get_world_size()
    named = {"sort_ranks": False} if keeps_order() else {}
    found = []
    for order in (list(range(size)), *orders(), list(range(min(size, 3)))):
        ours, theirs = (dist.new_group(order, backend=backend, **named) for backend in ("sirtaki", "gloo"))
        _never_destroyed.append(theirs)
        if dist.get_rank() in order:
            place = (order if named else sorted(order)).index(dist.get_rank())
            assert (ours.rank(), ours.size()) == (place, len(order))
            found.append((theirs, ours))
    return found


@case(least=2)
def every_call() -> None:
    with default_group():
        variants = [(layout, starts) for layout in LAYOUTS for starts in (False, True)]
        for number, (over_gloo, over_sirtaki) in enumerate(pairs_of_groups()):
            for call in TABLE:
                expected = run(call, Calls(over_gloo, Tensor.clone, False))
                for layout, starts in variants if number == 0 else variants[-1:]:
                    what = f"{call.__name__}, {layout}, async_op={starts}, group {number}"
                    assert run(call, Calls(over_sirtaki, LAYOUTS[layout], starts)) == expected, what


@case(least=2)
def every_shape_and_dtype() -> None:
    with default_group():
        for over_gloo, over_sirtaki in pairs_of_groups()[:1]:
            for call in (broadcast, all_reduce, all_gather, gather, scatter, all_gather_coalesced, messages):
                for shape in SHAPES:
                    for dtype in DTYPES:
                        expected = run(call, Calls(over_gloo, Tensor.clone, False, shape, dtype))
                        found = run(call, Calls(over_sirtaki, Tensor.clone, True, shape, dtype))
                        assert found == expected, (call.__name__, shape, dtype)
