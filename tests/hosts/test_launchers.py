"""Other launchers over several hosts: real mpirun and torchrun, and the variables of Slurm and Kubernetes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from .network import Network, finish, python

WORLD = """
import numpy as np, sirtaki.numpy as hvd
hvd.init()
assert hvd.allreduce(np.ones(1000), op=hvd.Sum).tolist() == [hvd.size()] * 1000
places = hvd.allgather_object((hvd.local_rank(), hvd.cross_rank()))
if hvd.rank() == 0:
    print(places)
"""
TWO_HOSTS = str([(0, 0), (0, 1)])


def expect_two_hosts(started: Sequence[subprocess.Popen[str]]) -> None:
    """Expects that a rank on each of two hosts has found the other."""
    ended = finish(started)
    for code, _, errors in ended:
        assert code == 0, errors
    assert ended[0][1].strip() == TWO_HOSTS


def slurm(number: int, network: Network, key_file: Path) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(number),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": ",".join(host.name for host in network.hosts[:2]),
        "SIRTAKI_KEY_FILE": str(key_file),
    }


def indexed_job_of_kubernetes(number: int, network: Network, key_file: Path) -> dict[str, str]:
    return {
        "JOB_COMPLETION_INDEX": str(number),
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "SIRTAKI_SIZE": "2",
        "SIRTAKI_RENDEZVOUS": f"{network.hosts[0].name}:29410",
        "SIRTAKI_KEY": key_file.read_text(),
    }


@pytest.mark.parametrize("variables", [slurm, indexed_job_of_kubernetes])
def test_variables(variables: Callable[..., dict[str, str]], network: Network, key_file: Path) -> None:
    hosts = enumerate(network.hosts[:2])
    expect_two_hosts(
        [host.start(*python(WORLD), **variables(number, network, key_file)) for number, host in hosts]
    )


def test_mpirun(network: Network, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    path = shutil.which("mpirun", path="/usr/bin:/usr/local/bin")
    if path is None:
        pytest.skip("there is no mpirun (on Debian: apt install openmpi-bin)")
    script = tmp_path / "world.py"
    script.write_text(WORLD)
    hosts = ",".join(host.address for host in network.hosts[:2])
    subnet = ["--mca", "btl_tcp_if_include", "10.77.0.0/24", "--mca", "oob_tcp_if_include", "10.77.0.0/24"]
    flags = ["--allow-run-as-root", "--mca", "plm_rsh_agent", "ssh", *subnet, "-np", "2", "-H", hosts]
    code, output, errors = network.hosts[0].run(path, *flags, sys.executable, script)
    assert code == 0, errors
    assert output.strip() == TWO_HOSTS


def test_torchrun(network: Network, key_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "world.py"
    script.write_text(WORLD)
    hosts = network.hosts[:2]
    flags = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        hosts[0].address,
        "--master-port",
        "29420",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *flags]
    expect_two_hosts(
        [
            host.start(*command, "--node-rank", str(number), script, SIRTAKI_KEY_FILE=str(key_file))
            for number, host in enumerate(hosts)
        ]
    )
