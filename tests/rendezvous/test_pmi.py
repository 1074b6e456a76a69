"""Ranks that exchange the key and the address over PMI-1, with a launcher of the test's own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sirtaki.bindings.bootstrap.job import RendezvousError
from sirtaki.bindings.bootstrap.providers import World, find_world, pmi

ROUND = """
import os, sys
sys.modules["mpi4py"] = None  # no MPI here
import numpy as np, sirtaki.numpy as hvd
for turn in range(2):
    hvd.init()
    print(hvd.rank(), hvd.size(), hvd.allreduce(np.float64(hvd.rank() + turn), op=hvd.Sum))
    hvd.shutdown()
"""


class Launcher:
    """A launcher that serves PMI-1 to `size` processes, each over a socket of its own."""

    def __init__(self, size: int, longest: int = 256) -> None:
        self.values: dict[str, str] = {}
        self.commands: list[list[str]] = [[] for _ in range(size)]
        self._longest = longest
        self._barrier = threading.Barrier(size)
        pairs = [socket.socketpair() for _ in range(size)]
        self.ends = [pair[1] for pair in pairs]
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, pair[0]), daemon=True)
            for rank, pair in enumerate(pairs)
        ]
        for thread in self._threads:
            thread.start()

    def environment(self, rank: int) -> dict[str, str]:
        return {
            "PMI_FD": str(self.ends[rank].fileno()),
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(len(self.ends)),
        }

    def close(self) -> None:
        self._barrier.abort()
        for end in self.ends:
            end.close()
        for thread in self._threads:
            thread.join()

    def _serve(self, rank: int, connection: socket.socket) -> None:
        with connection, connection.makefile("r") as lines:
            for line in lines:
                fields = dict(field.partition("=")[::2] for field in line.split())
                self.commands[rank].append(fields["cmd"])
                try:
                    connection.sendall(f"{self._answer(fields)}\n".encode())
                except (threading.BrokenBarrierError, BrokenPipeError):
                    return

    def _answer(self, fields: dict[str, str]) -> str:
        if fields["cmd"] == "put":
            assert len(fields["value"]) < self._longest
            self.values[fields["key"]] = fields["value"]
            return "cmd=put_result rc=0 msg=success"
        if fields["cmd"] == "get":
            if fields["key"] not in self.values:
                return "cmd=get_result rc=-1 msg=key_not_found"
            return f"cmd=get_result rc=0 msg=success value={self.values[fields['key']]}"
        if fields["cmd"] == "barrier_in":
            self._barrier.wait()
        return {
            "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_my_kvsname": "cmd=my_kvsname kvsname=kvs_1",
            "get_maxes": f"cmd=maxes kvsname_max=64 keylen_max=64 vallen_max={self._longest}",
            "barrier_in": "cmd=barrier_out rc=0",
            "finalize": "cmd=finalize_ack",
        }[fields["cmd"]]


@pytest.fixture(autouse=True)
def fresh_wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets each test have a wire of its own, without mpi4py, and without a goodbye at the end of pytest."""
    monkeypatch.setattr("sirtaki.bindings.bootstrap.providers.pmi.atexit.register", lambda function: function)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    pmi._wire_of.cache_clear()
    yield
    pmi._wire_of.cache_clear()


def find_both(launcher: Launcher) -> list[World]:
    """Returns the worlds of ranks 0 and 1, which have to look for it at the same time."""
    found: dict[int, World] = {}

    def find(rank: int) -> None:
        world = find_world(environment=launcher.environment(rank))
        assert world.announce is not None
        address = world.announce("10.0.0.1:4000,[fe80::1%eth0]:4000" if rank == 0 else "")
        assert address == "10.0.0.1:4000,[fe80::1%eth0]:4000"
        found[rank] = world

    threads = [threading.Thread(target=find, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in (0, 1)]


@pytest.mark.parametrize("longest", [24, 1024])
def test_the_ranks_of_a_launcher_share_a_key(longest: int) -> None:
    with closing(Launcher(2, longest)) as launcher:
        first, second = find_both(launcher)
    assert first.job == second.job
    assert (first.rank, first.serves, second.rank, second.serves) == (0, True, 1, False)
    assert len(first.job.key) == 32
    assert first.job.size == 2
    assert first.address == "*:0"


def test_two_worlds_after_each_other_in_real_processes(tmp_path: Path) -> None:
    script = tmp_path / "round.py"
    script.write_text(ROUND)
    with closing(Launcher(2)) as launcher:
        started = [
            subprocess.Popen(
                [sys.executable, script],
                env={**os.environ, **launcher.environment(rank)},
                pass_fds=[launcher.ends[rank].fileno()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        ended = [process.communicate(timeout=120) for process in started]
    for rank, (output, errors) in enumerate(ended):
        assert output.splitlines() == [f"{rank} 2 1.0", f"{rank} 2 3.0"], errors
    for commands in launcher.commands:
        assert (commands[0], commands[-1]) == ("init", "finalize")
        assert (commands.count("init"), commands.count("finalize")) == (1, 1)


def test_a_rank_that_does_not_come() -> None:
    with (
        closing(Launcher(2)) as launcher,
        pytest.raises(RendezvousError, match=r"the other ranks have not called init\(\) in time"),
    ):
        find_world(environment={**launcher.environment(0), "SIRTAKI_START_TIMEOUT": "0.2"})


def test_a_value_that_is_missing() -> None:
    with (
        closing(Launcher(1)) as launcher,
        pytest.raises(RendezvousError, match=r"refused `get` of PMI: .*rc=-1"),
    ):
        find_world(environment={**launcher.environment(0), "PMI_RANK": "1", "PMI_SIZE": "2"})


def test_a_launcher_that_is_gone() -> None:
    launcher = Launcher(2)
    ours, theirs = socket.socketpair()
    with closing(launcher), ours:
        theirs.close()
        with pytest.raises(RendezvousError, match="PMI"):
            find_world(environment={**launcher.environment(0), "PMI_FD": str(ours.fileno())})


def test_a_single_process_needs_none() -> None:
    assert pmi.find({"PMI_FD": "999", "PMI_RANK": "0", "PMI_SIZE": "1"}) is None
    assert pmi.find({"PMI_RANK": "0", "PMI_SIZE": "2"}) is None
