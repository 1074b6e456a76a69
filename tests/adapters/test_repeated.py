"""The descriptions of repeated operations, which threads share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sirtaki.common.ops import collectives

THREADS, OPERATIONS = 4, 20_000


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Lets threads take turns as often as possible."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_threads_describe_operations_at_once(hasty_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_cache", {})
    batch: Any = object()

    def describe(thread: int) -> None:
        for number in range(OPERATIONS):
            collectives._cache_described((thread, number), batch)

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(describe, range(THREADS)):  # raises what a thread has raised
            pass
    assert len(collectives._cache) < collectives._MAX_CACHED + THREADS
