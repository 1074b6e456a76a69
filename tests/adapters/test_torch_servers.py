"""The cases of the parameter server, in jobs whose tables are served by processes beside the ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from process_world import LatestWorld

pytest.importorskip("torch")

import torch
from cases import Case
from tiers import in_worlds
from world import world

import sirtaki.torch as hvd
from sirtaki.bindings.errors import InitializationError

pytestmark = pytest.mark.xdist_group("torch_servers")  # one process of pytest starts each job
MODULES = ("torch_parameter_server",)


def with_servers(size: int, servers: str) -> list[str]:
    """Returns the start of a command that runs the rest on so many ranks, beside servers."""
    return [sys.executable, "-m", "sirtaki.runner", "-np", str(size), "--servers", servers]


@pytest.fixture(scope="module")
def jobs() -> Iterator[LatestWorld]:
    with LatestWorld(with_servers) as worlds:
        yield worlds


WORLDS = [(2, "2"), (1, "4"), (3, "1"), (4, "3")]  # ranks, and servers beside them


@pytest.mark.parametrize(("size", "servers", "case"), in_worlds(WORLDS, {(2, "2")}, MODULES))
def test_tables_of_servers(jobs: LatestWorld, size: int, servers: str, case: Case) -> None:
    """Compares the tables with those of one process, bit for bit; more worlds than one have tables."""
    jobs.run(size, case.name, servers=servers)


def test_servers_that_hvdrun_has_not_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_table() -> None:
        with pytest.raises(InitializationError, match="is not set, which hvdrun --servers sets"):
            hvd.ParameterServer([torch.ones(1)], lambda own: torch.optim.SGD(own, lr=1.0))

    monkeypatch.setenv("SIRTAKI_SERVERS", "1")
    with world(1, "shm") as ranks:
        ranks.run(make_table)
