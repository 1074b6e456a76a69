"""Ends of worlds: shutdown, abort, deadlines, and their effect on operations in flight."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
from launching import wait_until
from world import TRANSPORTS, in_world, world

import sirtaki.numpy as hvd
from sirtaki.bindings import context as context_module
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import (
    AbortedError,
    DeadlineError,
    HorovodInternalError,
    MismatchError,
    NotInitializedError,
    PeerFinishedError,
    ShutDownError,
)

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


def test_an_abort_ends_what_every_rank_has_in_flight(transport: str) -> None:
    begun = threading.Barrier(3)

    def body() -> None:
        context = current()
        if context.rank == 1:
            begun.wait(60)
            context.abort("ValueError: boom (in train.py:88)")
            return
        handle = hvd.allreduce_async(np.ones(3), name="loss")
        begun.wait(60)
        with pytest.raises(AbortedError, match=r"boom \(in train.py:88\)"):
            handle.wait()
        with pytest.raises(AbortedError, match="boom"):
            handle.wait()
        with pytest.raises(HorovodInternalError, match="boom"):
            hvd.allreduce(1.0)

    with world(3, transport) as ranks:
        ranks.run(body)


@in_world(2)
def test_a_rank_that_has_finished_is_named_by_those_who_need_it(transport: str) -> None:
    context = current()
    hvd.barrier()
    if context.rank == 1:
        context.shutdown()
        with pytest.raises(HorovodInternalError):
            hvd.barrier()
        return
    with pytest.raises(PeerFinishedError, match=r"rank 1.*loss"):
        hvd.allreduce(1.0, name="loss")
    with pytest.raises(PeerFinishedError, match="rank 1"):
        hvd.barrier()


def test_a_shutdown_right_after_a_caught_mismatch_hides_it_from_nobody(transport: str) -> None:
    """Every rank gets the error, in whatever order, also ranks that have not made the call yet."""

    def body(odd: int, latest: int) -> None:
        context = current()
        time.sleep(0.002 * (context.rank == latest))
        with pytest.raises(MismatchError, match="loss"):
            hvd.allreduce(np.ones(3 + (context.rank == odd)), name="loss")
        context.shutdown()

    for odd, latest in itertools.product(range(3), range(3)):
        with world(3, transport) as ranks:
            ranks.run(body, odd, latest)


def test_a_rank_that_never_comes_is_named_at_the_deadline(transport: str) -> None:
    asked = threading.Event()

    def body() -> None:
        if hvd.rank() == 1:
            asked.wait(60)
            return
        try:
            with pytest.raises(DeadlineError, match=r"rank 1.*evaluate|evaluate.*rank 1"):
                hvd.allreduce(1.0, name="evaluate")
        finally:
            asked.set()

    with world(2, transport, stall_report="0.1", stall_deadline="0.3", log_descriptor="-1") as ranks:
        ranks.run(body)


@in_world(2, stall_report="0.5", log_descriptor="-1")
def test_a_stall_counts_on_the_rank_that_others_wait_for(transport: str) -> None:
    if hvd.rank() == 1:
        wait_until(lambda: hvd.stats()["stalls"] > 0, "the stall has been reported")
    hvd.allreduce(1.0, name="loss")
    if hvd.rank() == 0:
        assert hvd.stats()["stalls"] == 0


@in_world(3)
def test_shutdown_lets_what_is_in_flight_end(transport: str) -> None:
    context = current()
    mine = np.full(50_000, hvd.rank() + 1.0)
    handle = hvd.allreduce_async_(mine, op=hvd.Sum)
    context.shutdown()
    handle.wait()
    assert (mine == sum(range(1, context.size + 1))).all()


@in_world(3, log_descriptor="-1")
def test_shutdown_does_not_wait_for_what_no_rank_will_submit(transport: str) -> None:
    context = current()
    lonely = hvd.allreduce_async(np.ones(3), name=f"of rank {context.rank}")
    mine = np.full(50_000, hvd.rank() + 1.0)
    handle = hvd.allreduce_async_(mine, op=hvd.Sum)
    context.shutdown(10**7)  # ms; if it does wait, the test's timeout ends it with an AbortedError
    with pytest.raises((ShutDownError, PeerFinishedError)):  # this rank was the first to leave, or was not
        lonely.wait()
    handle.wait()
    assert (mine == sum(range(1, context.size + 1))).all()


@in_world(2)
def test_shutdown_twice_and_calls_after_it(transport: str) -> None:
    context = current()
    hvd.barrier()
    context.shutdown()
    context.shutdown()
    with pytest.raises(ShutDownError):
        hvd.allreduce(1.0)


def test_results_outlive_their_world(transport: str) -> None:
    with world(2, transport) as ranks:
        gathered = ranks.run(lambda: hvd.allgather(np.full(10_000, hvd.rank())))
    del ranks
    gc.collect()
    for array in gathered:
        assert array.tolist() == [0] * 10_000 + [1] * 10_000


def test_a_result_that_ends_after_its_context_is_not_released(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may finalize the core's context before a result that ends with it."""
    with world(2, transport) as ranks:
        gathered = ranks.run(lambda: (hvd.allgather(np.ones(4)), current()._native))
    released: list[Any] = []
    monkeypatch.setattr(context_module, "_srt_release", lambda *arguments: released.append(arguments))
    for _, native in gathered:
        native.__del__()
    del gathered
    gc.collect()
    assert not released


def test_without_a_world_every_call_says_so(transport: str) -> None:
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_rank, lambda: hvd.allreduce(1.0), hvd.barrier):
        with pytest.raises(NotInitializedError, match=r"hvd\.init\(\)") as caught:
            call()
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, HorovodInternalError)


def test_worlds_beside_each_other_do_not_meet(transport: str) -> None:
    with world(2, transport) as one, world(3, transport) as other:
        assert one.run(lambda: float(hvd.allreduce(1.0, op=hvd.Sum, name="x"))) == [2.0] * 2
        assert other.run(lambda: float(hvd.allreduce(1.0, op=hvd.Sum, name="x"))) == [3.0] * 3


@in_world(3)
def test_a_set_goes_on_when_rank_0_has_left(transport: str) -> None:
    context = current()
    rest = hvd.add_process_set([1, 2])
    if context.rank == 0:
        context.shutdown()
        return
    for step in range(30):
        assert hvd.allreduce(np.array(step), op=hvd.Sum, process_set=rest) == 2 * step
    with pytest.raises(PeerFinishedError, match="rank 0"):
        hvd.allreduce(np.ones(2))
    context.shutdown()
