"""Hosts for benchmarks: the network namespaces of the tests, and the commands that start ranks on them."""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from common.jobs import make_key, mpirun
from common.options import Option, number

sys.path.append(str(Path(__file__).parents[2] / "tests" / "hosts"))
from network import Network, missing, ranks_on

if TYPE_CHECKING:
    from network import Host

__all__ = ["Network", "hosts_of", "missing", "mpirun_on", "ranks_on"]

HOST_OPTIONS = [
    number("--hosts", 2, "how many hosts"),
    Option("--rate", default="1gbit", help="of each host's link (1gbit), or none"),
]


@contextmanager
def hosts_of(options: Namespace) -> Iterator[tuple[list[Host], Path]]:
    """Creates the hosts of HOST_OPTIONS for a block; yields them, and the file of a key for their jobs."""
    if lack := missing():
        raise SystemExit(f"this benchmark makes hosts of its own, but {lack}")
    with tempfile.TemporaryDirectory() as folder, Network(options.hosts) as network:
        if options.rate != "none":
            for host in network.hosts:
                host.limit(options.rate)
        yield network.hosts, make_key(Path(folder))


def mpirun_on(hosts: Sequence[Host], ranks_each: int, *variables: str) -> list[str] | None:
    """Returns the start of Open MPI's command over the hosts' own ssh servers; None without Open MPI.

    It passes these variables on to the ranks, and those of every benchmark.
    """
    command = mpirun(len(hosts) * ranks_each)
    if command is None:
        return None
    network = ["--mca", "btl_tcp_if_include", "10.77.0.0/24", "--mca", "oob_tcp_if_include", "10.77.0.0/24"]
    slots = ",".join(f"{host.address}:{ranks_each}" for host in hosts)
    names = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", *variables)
    passed = [word for name in names for word in ("-x", name)]
    return [*hosts[0].command(*command), "--mca", "plm_rsh_agent", "ssh", *network, *passed, "-H", slots]
