"""Installs a wheel where there is no compiler and no sirtaki, and sums over two ranks with it.

    python tests/install/try_wheel.py dist/*.whl [--torch torch==2.4.0] [--adapters]

Everything happens in a fresh virtual environment, which is all that PATH names. With a version of torch, that
is installed without CUDA's libraries (see empty_cuda.py) and sums, too; with --adapters, all tests of
sirtaki.torch run on it. Prints how long each took.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import empty_cuda
import floor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make", "nvcc", "mpicc")
SUM = HERE / "sum_over_ranks.py"
BESIDE_TORCH = ["filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions"]
FOR_TESTS = ["pytest", "hypothesis", "ml_dtypes", "psutil", "scikit-learn", "pyelftools"]
PIP_OPTIONS = ["--quiet", "--disable-pip-version-check", "--no-warn-conflicts"]
LIMIT_SECONDS = 900


class Place:
    """A virtual environment in a folder, and nothing else."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.folder, self.bin = folder, folder / "bin"
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PIP_") or name in ("HOME", "LANG", "LC_ALL", "TMPDIR")
        }
        self.environment["PATH"] = str(self.bin)
        found = [name for name in COMPILERS if shutil.which(name, path=self.environment["PATH"])]
        if found:
            sys.exit(f"there is a compiler in the virtual environment: {', '.join(found)}")

    def run(self, *command: str | Path) -> None:
        """Runs a program of the environment; ends this one if it fails."""
        name, *arguments = map(str, command)
        done = subprocess.run(
            [str(self.bin / name), *arguments],
            env=self.environment,
            cwd=self.folder,  # where no sirtaki lies
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_SECONDS,
        )
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))} failed ({done.returncode})")

    def install(self, *arguments: str | Path) -> None:
        self.run("python", "-m", "pip", "install", *PIP_OPTIONS, *arguments)

    def add_torch(self, requirement: str) -> None:
        """torch as PyPI has it, and empty libraries where it wants CUDA's."""
        self.install("--no-deps", requirement)
        self.install(*BESIDE_TORCH)
        torch = next(self.folder.glob("lib/python*/site-packages/torch"))
        empty_cuda.build_all(torch, self.folder / "cuda")
        self.environment["LD_LIBRARY_PATH"] = str(self.folder / "cuda")


def main() -> None:
    options = arguments()
    wheel = options.wheel.resolve()
    dependencies = [*floor.table("project")["dependencies"], "numpy"]
    with tempfile.TemporaryDirectory(prefix="sirtaki-wheel-") as folder:
        place = Place(Path(folder, "venv"))
        timed("the registry's packages that it needs", lambda: place.install(*dependencies))
        timed("the wheel", lambda: place.install("--no-deps", "--no-index", wheel))
        timed("import sirtaki", lambda: place.run("python", "-c", "import sirtaki"))
        timed("hvdrun, two ranks, numpy", lambda: place.run("hvdrun", "-np", "2", "python", SUM, "numpy"))
        if options.torch:
            timed(options.torch, lambda: place.add_torch(options.torch))
            timed("hvdrun, two ranks, torch", lambda: place.run("hvdrun", "-np", "2", "python", SUM, "torch"))
        if options.adapters:
            place.install(*FOR_TESTS)
            timed("the tests of sirtaki.torch", lambda: test_adapters(place))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", metavar="REQUIREMENT", help="install it, and sum with it")
    parser.add_argument("--adapters", action="store_true", help="run tests/adapters, too")
    return parser.parse_args()


def test_adapters(place: Place) -> None:
    """All tests of sirtaki.torch. torch.compile may use the system's compiler."""
    place.environment["PATH"] += os.pathsep + os.environ["PATH"]
    place.run("python", "-m", "pytest", "-q", "--maxfail=10", "--rootdir", ROOT, ROOT / "tests" / "adapters")


def timed(what: str, do: Callable[[], None]) -> None:
    start = time.perf_counter()
    do()
    print(f"{time.perf_counter() - start:7.1f} s  {what}", flush=True)


if __name__ == "__main__":
    main()
