"""Skips tests that need a real GPU where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from process_world import ProcessWorld, hvdrun


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many GPUs there are."""
    torch = pytest.importorskip("torch")
    count = torch.cuda.device_count()
    if not count:
        pytest.skip("no GPU here")
    return count


@pytest.fixture(scope="session")
def run_on_gpus(gpus: int) -> Iterator[Callable[..., None]]:
    """Runs a case on so many ranks, which share GPUs if there are fewer."""
    worlds: dict[object, ProcessWorld] = {}

    def run(size: int, name: str, **environment: str) -> None:
        key = (size, *sorted(environment.items()))
        if key not in worlds:
            worlds[key] = ProcessWorld(size, hvdrun(size, **environment))
        try:
            worlds[key].run(name)
        except BaseException:
            worlds.pop(key).close()
            raise

    yield run
    for world in worlds.values():
        world.close()
