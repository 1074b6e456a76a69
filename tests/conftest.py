"""Worlds of processes, one a size, shared by all tests of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from process_world import ProcessWorld


@pytest.fixture(scope="session")
def run_case() -> Iterator[Callable[[int, str], None]]:
    """Runs a case on so many ranks. After a failure the next case gets new processes."""
    worlds: dict[int, ProcessWorld] = {}

    def run(size: int, name: str) -> None:
        if size not in worlds:
            worlds[size] = ProcessWorld(size)
        try:
            worlds[size].run(name)
        except BaseException:
            worlds.pop(size).close()
            raise

    yield run
    for world in worlds.values():
        world.close()
