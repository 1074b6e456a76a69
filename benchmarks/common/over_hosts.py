"""Hosts for benchmarks: the network namespaces of the tests, and the commands that start ranks on them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.jobs import mpirun

sys.path.append(str(Path(__file__).parents[2] / "tests" / "hosts"))
from network import Network, missing, ranks_on

if TYPE_CHECKING:
    from network import Host

__all__ = ["Network", "missing", "mpirun_on", "ranks_on"]


def mpirun_on(hosts: Sequence[Host], ranks_each: int) -> list[str] | None:
    """Returns the start of Open MPI's command over the hosts' own ssh servers; None without Open MPI."""
    command = mpirun(len(hosts) * ranks_each)
    if command is None:
        return None
    network = ["--mca", "btl_tcp_if_include", "10.77.0.0/24", "--mca", "oob_tcp_if_include", "10.77.0.0/24"]
    slots = ",".join(f"{host.address}:{ranks_each}" for host in hosts)
    passed = [word for name in ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS") for word in ("-x", name)]
    return [*hosts[0].command(*command), "--mca", "plm_rsh_agent", "ssh", *network, *passed, "-H", slots]
