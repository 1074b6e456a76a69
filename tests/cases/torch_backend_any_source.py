"""Receives from any rank over the backend, into tensors on the CPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cases import case
from cases.torch_backend_groups import in_group
from cases.torch_backend_messages import rank
from sirtaki.common.exceptions import DeadlineError


def receive_from_any(tag: int = 0) -> tuple[Any, torch.Tensor]:
    """Begins a receive from any rank; returns it and its tensor."""
    received = torch.zeros(2)
    return dist.irecv(received, tag=tag), received


@case(least=2)
@in_group
def from_any_rank() -> None:
    """Each rank sends to rank 0, which finds out who they are."""
    size = dist.get_world_size()
    if rank() == 0:
        found = {}
        for _ in range(2 * (size - 1)):
            received = torch.zeros(2)
            sender = dist.recv(received)
            found.setdefault(sender, []).append(received.tolist())
        assert found == {other: [[other, 0.0], [other, 1.0]] for other in range(1, size)}
    else:
        for number in range(2):
            dist.send(torch.tensor([float(rank()), float(number)]), 0)


@case(least=2)
@in_group
def from_any_rank_while_it_does_something_else() -> None:
    """Sender and receiver wait for another operation before they wait for their message."""
    if rank() == 0:
        work, received = receive_from_any()
        dist.barrier()
        assert work.wait()
        assert work.is_completed()
        assert work._source_rank() == 1
        assert received.tolist() == [4.0, 5.0]
        assert work.get_future().wait()[0] is received
    elif rank() == 1:
        sending = dist.isend(torch.tensor([4.0, 5.0]), 0)
        dist.barrier()
        assert sending is not None
        sending.wait()
    else:
        dist.barrier()


@case(least=2)
@in_group
def from_any_rank_and_from_one() -> None:
    """Receives that are open at once, from any rank and from a named one, get each message once."""
    last = dist.get_world_size() - 1
    sent = {last: [9.0]} | {1: [1.0, 2.0, 3.0, 4.0]}
    if rank() == 0:
        open_ones = [receive_from_any() for _ in range(2 + (last > 1))]
        named = torch.zeros(2), torch.zeros(2)
        for one in named:
            dist.recv(one, 1)
        for work, _ in open_ones:
            work.wait()
        found = [one[0].item() for one in named] + [received[0].item() for _, received in open_ones]
        assert sorted(found) == sorted(value for values in sent.values() for value in values)
        assert named[0][0] < named[1][0]
    else:
        for value in sent.get(rank(), []):
            dist.send(torch.full((2,), value), 0)


@case(least=2)
@in_group
def from_any_rank_with_a_tag() -> None:
    if rank() == 0:
        (first, of_tag_7), (second, of_tag_8) = receive_from_any(7), receive_from_any(8)
        second.wait()
        first.wait()
        assert (of_tag_7[0].item(), of_tag_8[0].item()) == (7.0, 8.0)
    elif rank() == 1:
        works = [dist.isend(torch.full((2,), float(tag)), 0, tag=tag) for tag in (8, 7)]
        for work in works:
            assert work is not None
            work.wait()


@case(least=2)
@in_group
def nobody_sends() -> None:
    if rank() == 0:
        work, received = receive_from_any()
        with pytest.raises(DeadlineError, match="no rank of the process group has sent a tensor with tag 0"):
            work.wait(timedelta(milliseconds=200))
        dist.barrier()
        work.wait()
        assert received.tolist() == [3.0, 3.0]
    else:
        dist.barrier()
        if rank() == 1:
            dist.send(torch.full((2,), 3.0), 0)
