"""Jobs under MPICH's own launcher, mpiexec.hydra, with mpi4py over MPICH and without any MPI library.

`make test-full` installs MPICH into build/mpich, apart from the Python of the tests, whose mpi4py would
otherwise take it for the MPI of `mpirun`. Another MPICH is found on the PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .test_launchers import PATIENCE, THREE, WORLD
from .test_mpi_transport import EXACT, TWO_HOSTS

OWN = Path(__file__).parents[2] / "build" / "mpich"
NO_MPI4PY = "import sys; sys.modules['mpi4py'] = None\n"


@pytest.fixture
def mpiexec() -> Path:
    path = shutil.which("mpiexec.hydra", path=f"{OWN / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        pytest.skip("there is no mpiexec.hydra: `make test-full` installs MPICH")
    return Path(path)


def run(
    mpiexec: Path, count: int, script: Path, text: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    script.write_text(text)
    return subprocess.run(
        [mpiexec, "-n", str(count), sys.executable, script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE,
        text=True,
        env={**os.environ, **environment},
    )


def test_mpiexec_of_mpich_without_mpi4py(mpiexec: Path, tmp_path: Path) -> None:
    done = run(mpiexec, 3, tmp_path / "world.py", NO_MPI4PY + WORLD)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [THREE, THREE]


@pytest.fixture
def over_mpich(mpiexec: Path) -> dict[str, str]:
    """Returns the variables with which mpi4py uses MPICH."""
    pytest.importorskip("mpi4py")
    folder = mpiexec.parents[1] / "lib"
    if not (folder / "libmpi.so.12").exists():
        pytest.skip(f"there is no {folder}/libmpi.so.12, which mpi4py needs: `make test-full` installs it")
    return {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(folder)}


def test_mpiexec_of_mpich_with_mpi4py(mpiexec: Path, over_mpich: dict[str, str], tmp_path: Path) -> None:
    used = "from mpi4py import MPI; assert 'MPICH' in MPI.Get_library_version()\n"
    done = run(mpiexec, 3, tmp_path / "world.py", WORLD + used, **over_mpich)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [THREE, THREE]


def test_mpich_moves_the_data_between_hosts(
    mpiexec: Path, over_mpich: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "world.py"
    done = run(mpiexec, 4, script, TWO_HOSTS + EXACT, SIRTAKI_TRANSPORT="mpi", **over_mpich)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1:] for line in done.stdout.splitlines()] == [["True", "True"]] * 2


def test_a_failed_rank_ends_the_job(mpiexec: Path, tmp_path: Path) -> None:
    fails = f"{NO_MPI4PY}{WORLD}import os\nif os.environ['PMI_RANK'] == '1': sys.exit(7)\n"
    done = run(mpiexec, 2, tmp_path / "world.py", fails)
    assert done.returncode == 7, done.stderr


def test_ranks_that_wait_for_one_that_does_not_come(mpiexec: Path, tmp_path: Path) -> None:
    late = "import os\nif os.environ['PMI_RANK'] == '1': sys.exit()\n"
    done = run(mpiexec, 2, tmp_path / "world.py", NO_MPI4PY + late + WORLD, SIRTAKI_START_TIMEOUT="1")
    assert done.returncode != 0
    assert "the other ranks have not called init() in time" in done.stderr
