"""Hosts with collectors, shared by the tests of the rendezvous."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from collected_hosts import CollectedHosts, Start


@pytest.fixture
def start() -> Iterator[Start]:
    """Returns a function that starts hosts, which end with the test."""
    started: list[CollectedHosts] = []

    def start_one(**options: object) -> CollectedHosts:
        started.append(CollectedHosts(**options))  # type: ignore[arg-type]
        return started[-1]

    yield start_one
    for hosts in started:
        hosts.close()
