"""Python objects between ranks."""

from __future__ import annotations

import functools
import threading

import pytest

import sirtaki.numpy as hvd
from cases import case
from sirtaki.bindings.errors import HorovodInternalError


@case()
def broadcast_object() -> None:
    for root in range(hvd.size()):
        mine = {"rank": hvd.rank(), "big": "x" * 300_000, "function": functools.partial(pow, root)}
        got = hvd.broadcast_object(mine, root_rank=root)
        assert got["rank"] == root
        assert len(got["big"]) == 300_000
        assert got["function"](2) == root**2
        assert (got is mine) == (hvd.rank() == root)


@case()
def broadcast_none_and_nothing() -> None:
    assert hvd.broadcast_object(None, 0, name="nothing") is None
    assert hvd.broadcast_object(b"", 0, name="nothing") == b""


@case()
def an_object_that_cannot_be_pickled() -> None:
    if hvd.rank() == 0:
        with pytest.raises(TypeError):
            hvd.broadcast_object(threading.Lock(), 0)
    else:
        with pytest.raises(HorovodInternalError, match="pickle"):
            hvd.broadcast_object(None, 0)
    assert hvd.allreduce(1.0, op=hvd.Sum) == hvd.size()


@case()
def allgather_object() -> None:
    got = hvd.allgather_object({"rank": hvd.rank(), "text": "é" * hvd.rank()}, name="facts")
    assert got == [{"rank": rank, "text": "é" * rank} for rank in range(hvd.size())]


@case()
def rank_0_does_it_for_all() -> None:
    calls = []

    def download(name: str, *, size: int) -> str:
        calls.append(name)
        return name * size

    assert hvd.on_root(download, "data", size=2) == "datadata"
    assert calls == (["data"] if hvd.is_root() else [])
    assert hvd.is_root() == (hvd.rank() == 0)


@case()
def rank_0_fails_for_all() -> None:
    def save() -> None:
        raise OSError("the disk is full")

    if hvd.is_root():
        with pytest.raises(OSError, match="the disk is full"):
            hvd.on_root(save)
    else:
        with pytest.raises(HorovodInternalError, match=r"save\(\) has failed on rank 0: OSError: the disk"):
            hvd.on_root(save)
    assert hvd.on_root(lambda: 7) == 7
