"""The descriptions of repeated operations, which threads share."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sirtaki.bindings.request import Batch
from sirtaki.common.ops import handles

THREADS, OPERATIONS = 4, 20_000


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Lets threads take turns as often as possible."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


class IdleContext:
    """A context as batches need it that have ended."""

    def __init__(self) -> None:
        self.described_batches: dict[Any, Batch] = {}

    def release(self, batch: Batch) -> None:
        pass


def test_threads_describe_operations_at_once(hasty_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "_pool", defaultdict(list))
    context: Any = IdleContext()

    def describe(thread: int) -> None:
        for number in range(OPERATIONS):
            key, batch = handles.described(context, (thread % 2, number % 300))
            if batch is None:
                batch = handles.pooled_batch()
            assert batch.key in (None, key)
            batch.key = key
            handles.recycle(context, batch)

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(describe, range(THREADS)):  # raises what a thread has raised
            pass
    assert len(context.described_batches) < handles._MOST_DESCRIBED + THREADS
    assert all(batch.key == key for key, batch in context.described_batches.items())
