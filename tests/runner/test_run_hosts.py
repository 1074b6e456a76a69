"""sirtaki.run over several hosts, by way of stand-ins for ssh and srun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launching import Hosts

import sirtaki

pytestmark = pytest.mark.usefixtures("functions_by_value")


@pytest.fixture
def reachable(hosts: Hosts, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """Returns `hosts`, whose ssh this process finds, too."""
    for name in ("PATH", "SSH_STAND_IN"):
        monkeypatch.setenv(name, environment[name])
    return hosts


@pytest.fixture
def allocated(nodes: Hosts, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """Returns a function that makes this process the batch script of a Slurm job, with these other nodes."""

    def allocate(**behaviours: object) -> Path:
        folder = nodes(**behaviours)
        for name, value in environment.items():
            if name.startswith(("SLURM", "SRUN")) or name == "PATH":
                monkeypatch.setenv(name, value)
        return folder

    return allocate


def work(data: bytes) -> tuple[int, str, str, bytes]:
    return int(os.environ["SIRTAKI_RANK"]), os.environ.get("HOSTNAME", ""), os.getcwd(), data[::-1]


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_functions_and_results_travel_between_hosts(reachable: Hosts, encrypt: str) -> None:
    reachable(hostB={}, hostC={})
    data = os.urandom(3 << 20)
    variables = {"SIRTAKI_ENCRYPT": encrypt, "SECRET_OF_USER": "x"}
    results = sirtaki.run(work, args=(data,), hosts=["hostB:2", "hostC:1"], env=variables)
    hosts = ["hostB", "hostB", "hostC"]
    assert results == [(rank, host, os.getcwd(), data[::-1]) for rank, host in enumerate(hosts)]


def test_the_exception_of_a_rank_elsewhere(reachable: Hosts) -> None:
    reachable(hostB={})

    def fail() -> None:
        if os.environ["SIRTAKI_RANK"] == "1":
            raise ZeroDivisionError("there")
        import time

        time.sleep(300)

    with pytest.raises(ZeroDivisionError, match=r"^there$") as raised:
        sirtaki.run(fail, hosts="localhost:1,hostB:1")
    cause = raised.value.__cause__
    assert isinstance(cause, sirtaki.RemoteError)
    assert cause.rank == 1


def test_a_host_that_nobody_knows(reachable: Hosts) -> None:
    reachable()
    with pytest.raises(
        sirtaki.RunError, match=r"^there is no host called hostX: check the name, or write its"
    ):
        sirtaki.run(work, hosts="hostX:1")


def test_a_host_with_another_version_of_python(reachable: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    reachable(hostB={})
    monkeypatch.setattr("sirtaki.runner.function.api.python_version", lambda: "CPython 3.99")
    with pytest.raises(
        sirtaki.RunError, match=r"^rank 0 on .* runs CPython 3\.\d+, but the function comes from"
    ):
        sirtaki.run(work, args=(b"",), hosts="hostB:1")


def test_srun_starts_a_rank_for_each_task(allocated: Hosts, capfd: pytest.CaptureFixture[str]) -> None:
    folder = allocated(node2={}, node3={})

    def describe(factor: float) -> tuple[int, str | None, float]:
        import sirtaki.numpy as hvd

        hvd.init()
        total = hvd.allreduce([factor * hvd.rank()], op=hvd.Sum)[0]
        return hvd.rank(), os.environ.get("HOSTNAME"), float(total)

    results = sirtaki.run(describe, args=(2.0,), launcher="srun")
    nodes = [os.environ.get("HOSTNAME"), "node2", "node2", "node3", "node3"]
    assert results == [(rank, node, 20.0) for rank, node in enumerate(nodes)]
    assert (folder / "node3" / "srun.json").exists()
    said = "hvdrun: the hosts are those of Slurm job 7: localhost:1,node2:2,node3:2 (--hosts names others)"
    assert said in capfd.readouterr().err.splitlines()


def test_srun_starts_ranks_on_the_nodes_that_are_named(allocated: Hosts) -> None:
    allocated(node2={}, node3={})
    results = sirtaki.run(work, args=(b"ab",), hosts="node3:2", launcher="srun")
    assert [result[:2] for result in results] == [(0, "node3"), (1, "node3")]


def test_srun_outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(sirtaki.RunError, match=r"^--launcher srun starts ranks on the nodes of a Slurm job"):
        sirtaki.run(work, np=1, launcher="srun")
