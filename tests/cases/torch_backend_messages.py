"""Messages between two ranks over the backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cases import case
from cases.torch_backend_groups import FLOATS, INTEGERS, SHAPES, in_group, same, values
from sirtaki.common.exceptions import UnsupportedError


def rank() -> int:
    return dist.get_rank()


@case(least=2)
@in_group
def there_and_back() -> None:
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
        for shape in SHAPES:
            if rank() == 0:
                dist.send(values(0, shape, dtype), 1)
                answer = torch.zeros(shape, dtype=dtype)
                assert dist.recv(answer, 1) == 1
                same(answer, values(1, shape, dtype))
            elif rank() == 1:
                question = torch.zeros(shape, dtype=dtype)
                dist.recv(question, 0)
                same(question, values(0, shape, dtype))
                dist.send(values(1, shape, dtype), 0)


@case(least=2)
@in_group
def a_ring_of_all_ranks() -> None:
    size = dist.get_world_size()
    mine, received = values(rank(), (1000,), torch.float32), torch.zeros(1000)
    operations = [
        dist.P2POp(dist.irecv, received, (rank() - 1) % size),
        dist.P2POp(dist.isend, mine, (rank() + 1) % size),
    ]
    receive, _ = works = dist.batch_isend_irecv(operations)
    for work in works:
        work.wait()
    assert receive._source_rank() == (rank() - 1) % size
    same(received, values((rank() - 1) % size, (1000,), torch.float32))


@case(least=2)
@in_group
def many_in_flight() -> None:
    """More messages than names: they match in the order of calls, whichever is waited for first."""
    count = 100
    if rank() == 0:
        works = [dist.isend(torch.tensor([float(number)]), 1) for number in range(count)]
    elif rank() == 1:
        received = [torch.zeros(1) for _ in range(count)]
        works = [dist.irecv(one, 0) for one in received]
    else:
        works = []
    for work in reversed(works):
        assert work is not None
        work.wait()
    if rank() == 1:
        assert [one.item() for one in received] == list(range(count))


@case(least=2)
@in_group
def tags() -> None:
    """Messages with other tags overtake: each tag is a series of its own."""
    if rank() == 0:
        works = [dist.isend(torch.tensor([tag]), 1, tag=tag) for tag in (1, 2)]
        for work in works:
            assert work is not None
            work.wait()
    elif rank() == 1:
        for tag in (2, 1):
            received = torch.zeros(1, dtype=torch.int64)
            dist.recv(received, 0, tag=tag)
            assert received.item() == tag


@case(least=2)
@in_group
def one_tensor_to_two_ranks_and_a_strided_one() -> None:
    size = dist.get_world_size()
    if rank() == 0:
        mine = torch.arange(10.0)[::2]
        for work in [dist.isend(mine, other) for other in range(1, size)]:
            assert work is not None
            work.wait()
    else:
        base = torch.zeros(5, 2)
        dist.recv(base[:, 0], 0)
        same(base[:, 0], torch.arange(0.0, 10.0, 2))
        assert (base[:, 1] == 0).all()


@case(least=2)
@in_group
def objects_between_two_ranks() -> None:
    if rank() == 0:
        dist.send_object_list(["a", {"b": 1}], 1)
    elif rank() == 1:
        received = [None, None]
        dist.recv_object_list(received, 0)
        assert received == ["a", {"b": 1}]


@case()
@in_group
def refusals() -> None:
    with pytest.raises(ValueError, match="rank"):
        dist.send(torch.ones(1), rank())
    for call in (dist.group.WORLD.split_group, dist.group.WORLD.merge_remote_group):
        with pytest.raises(UnsupportedError, match="use new_group"):
            call([0])
