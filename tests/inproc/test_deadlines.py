"""All-reduces with a deadline: late ranks, the results that are kept for them, and misuse.

A rank is late because it waits for an event that another rank sets after the round. No time decides:
deadlines of 0 s are over at once, and those of a minute never are.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
from world import ENCRYPTED, TRANSPORTS, in_world, world

import sirtaki.numpy as hvd
from sirtaki.bindings.errors import HorovodInternalError, MismatchError, UnsupportedError

PATIENCE = 60.0
AT_ONCE: dict[str, Any] = {"deadline": 0.0, "quorum": 0.5}
ALL: dict[str, Any] = {"deadline": 60, "quorum": 1}


def mine(step: int) -> np.ndarray:
    return np.full(70_000, 10.0 * step + hvd.rank())


def assert_round(result: np.ndarray, step: int, ranks: list[int]) -> None:
    np.testing.assert_array_equal(result, np.full(70_000, 10.0 * step + sum(ranks) / len(ranks)))


@pytest.mark.parametrize(("size", "transport"), [(1, "shm"), *((3, transport) for transport in TRANSPORTS)])
def test_without_late_ranks_it_is_an_allreduce(size: int, transport: str) -> None:
    def body() -> None:
        everyone = list(range(size))
        for step in range(3):
            result, contributors = hvd.allreduce(mine(step), name="all", **ALL)
            assert contributors == everyone
            assert_round(result, step, everyone)
            total, contributors = hvd.allreduce(np.arange(5), op=hvd.Sum, **ALL)
            assert contributors == everyone
            np.testing.assert_array_equal(total, np.arange(5) * size)
        empty, contributors = hvd.allreduce(np.ones((0, 3)), **ALL)
        assert empty.shape == (0, 3)
        assert contributors == everyone

    with world(size, transport) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("transport", [*TRANSPORTS, ENCRYPTED])  # encrypted: rank 1 reports for rank 2
def test_a_late_rank_receives_the_results_that_it_has_missed(transport: str) -> None:
    go = threading.Event()

    def body() -> None:
        late = hvd.rank() == 1
        assert_round(hvd.allreduce(mine(0), name="x", **ALL)[0], 0, [0, 1, 2])
        if late:
            assert go.wait(PATIENCE)
        for step in range(1, 5):
            result, contributors = hvd.allreduce(mine(step), name="x", **AT_ONCE)
            assert contributors == [0, 2]
            assert_round(result, step, [0, 2])
        go.set()
        # Other operations have waited for nothing, and the next round has all ranks again.
        assert hvd.allreduce(np.ones(3), op=hvd.Sum)[0] == 3
        result, contributors = hvd.allreduce(mine(5), name="x", **ALL)
        assert contributors == [0, 1, 2]
        assert_round(result, 5, [0, 1, 2])

    with world(3, transport, control_fan_out="1") as ranks:
        ranks.run(body)


def test_names_have_rounds_of_their_own() -> None:
    go = threading.Event()

    def body() -> None:
        if hvd.rank() == 0:
            assert go.wait(PATIENCE)
        for name in ("x", "y", "x"):
            result, contributors = hvd.allreduce(mine(len(name)), name=name, **AT_ONCE)
            assert contributors == [1, 2]
            assert_round(result, 1, [1, 2])
        go.set()

    with world(3) as ranks:
        ranks.run(body)


def test_beyond_the_results_that_it_may_keep_a_late_rank_is_awaited() -> None:
    """Ranks 0 and 2 do not pass round 4 before rank 1 has begun it, for which it has waited long enough."""
    reached, order = threading.Barrier(2), list[str]()
    go = threading.Event()

    def body() -> None:
        for step in range(1, 5):
            if hvd.rank() == 1 and step == 1:
                assert go.wait(PATIENCE)
            if hvd.rank() == 1 and step == 4:
                order.append("rank 1 begins round 4")
            if hvd.rank() != 1 and step == 4:
                reached.wait(PATIENCE)
                go.set()
            _, contributors = hvd.allreduce(mine(step), name="x", **AT_ONCE)
            assert contributors == [0, 2] if step < 4 else 1 in contributors
            if hvd.rank() != 1 and step == 4:
                order.append("round 4 is over")

    with world(3, late_results="3") as ranks:
        ranks.run(body)
    assert order[0] == "rank 1 begins round 4"
    assert len(order) == 3


def test_a_late_rank_with_another_shape_is_told() -> None:
    go = threading.Event()

    def body() -> None:
        if hvd.rank():
            hvd.allreduce(mine(0), name="x", deadline=0, quorum=0.5)
            go.set()
        else:
            assert go.wait(PATIENCE)
            with pytest.raises(MismatchError, match="was decided without this rank, which was late"):
                hvd.allreduce(np.ones(3), name="x", deadline=0, quorum=0.5)
        assert hvd.allreduce(np.ones(3), op=hvd.Sum)[0] == 3

    with world(3) as ranks:
        ranks.run(body)


def test_a_rank_that_is_often_late_is_reported() -> None:
    go = threading.Event()
    read, write = os.pipe()

    def body() -> None:
        if hvd.rank() == 2:
            assert go.wait(PATIENCE)
        for step in range(5):
            hvd.allreduce(mine(step), name="x", **AT_ONCE)
        go.set()

    with world(3, late_report="2", log_descriptor=str(write)) as ranks:
        ranks.run(body)
    os.close(write)
    with os.fdopen(read) as log:
        lines = [line for line in log if "was late" in line]
    assert len(lines) == 2
    assert "rank 2" in lines[0]
    assert "on testhost" in lines[0]
    assert "was late for 'x' 2 times in a row" in lines[0]
    assert "was late for 'x' 4 times in a row" in lines[1]


def test_a_lost_rank_is_an_error() -> None:
    def body() -> None:
        if hvd.rank() == 1:
            raise_on_the_others()
            return
        with pytest.raises(HorovodInternalError, match="gives up"):
            hvd.allreduce(mine(0), name="x", **ALL)

    def raise_on_the_others() -> None:
        from sirtaki.bindings.context import current

        current().abort("rank 1 gives up")

    with world(3) as ranks:
        ranks.run(body)


@in_world(2)
def test_ranks_that_disagree_are_told() -> None:
    with pytest.raises(MismatchError, match="the same deadline and quorum"):
        hvd.allreduce(mine(0), name="x", deadline=50 + hvd.rank(), quorum=1)
    result, _ = hvd.allreduce(mine(0), name="x", **ALL)
    assert_round(result, 0, [0, 1])


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"deadline": -1}, ValueError, "deadline is -1"),
        ({"deadline": float("nan")}, ValueError, "deadline is nan"),
        ({"deadline": "soon"}, ValueError, "deadline is 'soon'"),
        ({"deadline": True}, ValueError, "deadline is True"),
        ({"deadline": 1e9}, ValueError, "the deadline is 1e"),
        ({"deadline": 1, "quorum": 0}, ValueError, "quorum is 0"),
        ({"deadline": 1, "quorum": 1.5}, ValueError, "quorum is 1.5"),
        ({"deadline": 1, "op": hvd.Max}, UnsupportedError, "op=Sum or op=Average"),
        ({"deadline": 1, "op": hvd.Adasum}, UnsupportedError, "op=Sum or op=Average"),
    ],
)
@in_world(2)
def test_mistakes_are_refused(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        hvd.allreduce(mine(0), **arguments)
    hvd.barrier()


@in_world(2)
def test_process_sets_and_joins_are_refused() -> None:
    some = hvd.add_process_set([0])
    with pytest.raises(ValueError, match="leave out process_set"):
        hvd.allreduce(mine(0), deadline=1, process_set=some)
    hvd.allreduce(mine(0), **ALL)
    with pytest.raises(ValueError, match="cannot be combined with operations that have a deadline"):
        hvd.join()
    hvd.barrier()
