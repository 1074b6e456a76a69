"""The operations of users' programs, over two hosts: with one rank on each, and with two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cases import Case
from process_world import LatestWorld
from tiers import in_worlds

from .network import Network, ranks_on

PORT = 29_430
WORLDS = [(2, "hosts"), (4, "hosts")]


@pytest.fixture(scope="module")
def run_over_hosts(
    network: Network, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int, str], None]]:
    """Returns a function that runs a case on a number of ranks, half of them on each of two hosts."""
    key = tmp_path_factory.mktemp("hosts") / "key"
    key.touch(mode=0o600)
    key.write_text("a5" * 32)

    def launcher(size: int) -> list[str]:
        return ranks_on(network.hosts[:2], size // 2, Path(key), PORT + size // 2)

    with LatestWorld(launcher) as latest:
        yield latest.run


@pytest.mark.parametrize(("size", "kind", "case"), in_worlds(WORLDS, main=(), every=3))
def test_body(size: int, kind: str, case: Case, run_over_hosts: Callable[[int, str], None]) -> None:
    run_over_hosts(size, case.name)
