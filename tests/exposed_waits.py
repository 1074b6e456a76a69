"""Checks of the time in which a program waits for the exchanges of its steps, for any framework."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import sirtaki.numpy as hvd
from sirtaki.bindings.context import current
from sirtaki.bindings.observing import observe

PAUSE = 0.5  # seconds


def exposed_seconds() -> float | None:
    return hvd.stats()["steps"]["exposed_seconds"]


def assert_exposed(prefix: str, count: int) -> None:
    """Checks that the program has waited for operations of `count` such names for as long as they took."""
    rows = [row for row in observe.slowest_tensors(current(), 100) if row["name"].startswith(prefix)]
    assert len(rows) == count, rows
    for row in rows:
        in_flight = row["wait_seconds"] + row["transfer_seconds"]
        assert row["exposed_seconds"] == pytest.approx(in_flight, abs=1e-6)
        assert in_flight > 0
    seconds = exposed_seconds()
    assert seconds is not None
    assert seconds >= max(row["wait_seconds"] + row["transfer_seconds"] for row in rows) - 1e-6


def assert_late_rank_is_waited_for(step: Callable[[], object]) -> None:
    """Checks that all ranks wait for the last one, which begins its step later and does not wait."""
    late = hvd.size() - 1
    before = exposed_seconds() or 0.0
    hvd.barrier()
    if hvd.rank() == late:
        time.sleep(PAUSE)
    step()
    waits = hvd.allgather_object((exposed_seconds() or 0.0) - before)
    assert min(waits[:late]) > PAUSE / 2
    assert waits[late] < min(waits[:late])
