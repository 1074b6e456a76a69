"""The store that the ranks of several hosts share, made by ranks of one host."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import sirtaki.torch as hvd
from cases import case
from sirtaki.bindings.context import Context, current
from sirtaki.common.exceptions import InitializationError
from sirtaki.torch.backend import init_method

LIMIT = timedelta(seconds=60)


def new_store() -> Any:
    context = current()
    return init_method.store_of_all_ranks(context, context.next_number("stores of tests"), LIMIT)


@contextmanager
def candidates(addresses: Sequence[str]) -> Iterator[None]:
    """Gives the ranks other than 0 these addresses of rank 0 to try."""

    def chosen(context: Context, offered: Sequence[str]) -> list[str]:
        return list(addresses)

    before, init_method._candidates = init_method._candidates, chosen
    try:
        yield
    finally:
        init_method._candidates = before


@case()
def all_ranks_read_what_each_has_written() -> None:
    for _ in range(2):
        store = new_store()
        store.set(f"of rank {hvd.rank()}", f"{hvd.rank()} was here")
        for rank in range(hvd.size()):
            assert store.get(f"of rank {rank}") == f"{rank} was here".encode()
        assert store.timeout == LIMIT
        hvd.barrier()  # it ends with rank 0's


@case(least=2)
def addresses_that_do_not_answer_are_passed_over() -> None:
    with candidates(["127.0.0.2.invalid", "127.0.0.1"]):
        store = new_store()
    store.set("written", "yes")
    hvd.barrier()


@case(least=2)
def ranks_that_do_not_reach_it_are_named_on_all() -> None:
    last = hvd.size() - 1
    expected = pytest.raises(
        InitializationError, match=rf"which rank {last} on .* cannot reach: nowhere\.inv"
    )
    with candidates(["nowhere.invalid"] if hvd.rank() == last else ["127.0.0.1"]), expected:
        new_store()
    assert new_store() is not None
    hvd.barrier()


@case()
def another_store_is_not_taken_for_it() -> None:
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found, failure = init_method._connect(["127.0.0.1"], other.port, "sirtaki/mark")
    assert (found, failure) == (None, "127.0.0.1 (another program listens there)")
    other.set("sirtaki/mark", "")
    found, failure = init_method._connect(["127.0.0.1"], other.port, "sirtaki/mark")
    assert failure == ""
    found.set("through the one", "seen in the other")
    assert other.get("through the one") == b"seen in the other"


@case()
def a_closed_port_is_reported_at_once() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        found, failure = init_method._connect(["127.0.0.1"], bound.getsockname()[1], "sirtaki/mark")
    assert found is None
    assert "Connection refused" in failure
