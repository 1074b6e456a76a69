"""Jobs under other launchers: mpirun and torchrun themselves, not only their variables."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

PATIENCE = 120.0  # seconds: far longer than any correct run

WORLD = """
import numpy as np, sirtaki.numpy as hvd
for turn in range(2):  # a second world after the first, in the same processes
    hvd.init()
    places = hvd.allgather_object((hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()))
    assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
    if hvd.rank() == 0:
        print(places)
    hvd.shutdown()
"""
THREE = str([(rank, rank, 3, 1) for rank in range(3)])


def run(command: list[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE,
        text=True,
        env={**os.environ, **environment},
    )


def mpirun(
    count: int, script: Path, program: Sequence[str] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    path = shutil.which("mpirun", path="/usr/bin:/usr/local/bin")
    if path is None:
        pytest.skip("there is no mpirun (on Debian: apt install openmpi-bin)")
    flags = ["--allow-run-as-root", "--oversubscribe", "-np", str(count)]
    return run([path, *flags, *program, script])


@pytest.fixture
def world(tmp_path: Path) -> Path:
    script = tmp_path / "world.py"
    script.write_text(WORLD)
    return script


def test_mpirun(world: Path) -> None:
    pytest.importorskip("mpi4py")
    done = mpirun(3, world)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [THREE, THREE]


def test_a_part_of_mpis_ranks(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    script = tmp_path / "part.py"
    script.write_text(
        """
import numpy as np, sirtaki.numpy as hvd
from mpi4py import MPI
world = MPI.COMM_WORLD
part = world.Split(color=world.rank % 2, key=-world.rank)
hvd.init(comm=part)
assert hvd.size() == part.size and hvd.rank() == part.rank
total = hvd.allreduce(float(world.rank), op=hvd.Sum)
assert total == sum(range(world.rank % 2, world.size, 2)), total
"""
    )
    done = mpirun(4, script)
    assert done.returncode == 0, done.stderr


def test_mpirun_without_mpi4py(world: Path, tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    done = mpirun(2, world)  # the script's own folder is searched first
    assert done.returncode != 0
    assert "mpirun has started 2 processes, but mpi4py cannot be imported (broken on purpose)" in done.stderr
    assert "pip install mpi4py" in done.stderr


def test_mpirun_with_an_address_instead_of_mpi4py(tmp_path: Path) -> None:
    script = tmp_path / "world.py"
    script.write_text(f"import sys; sys.modules['mpi4py'] = None\n{WORLD}")
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = ("env", f"SIRTAKI_RENDEZVOUS=127.0.0.1:{port}", sys.executable)
    done = mpirun(3, script, program=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [THREE, THREE]


def test_torchrun(world: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    done = run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", world])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [THREE, THREE]
