"""A fresh virtual environment, which holds only what a script installs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make", "nvcc", "mpicc")
PIP_OPTIONS = ["--quiet", "--disable-pip-version-check", "--no-warn-conflicts"]
FOR_TESTS = ["pytest", "hypothesis", "ml_dtypes", "psutil", "scikit-learn", "pyelftools"]
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
        """Runs a program of the environment; ends this process if it fails."""
        name, *arguments = map(str, command)
        done = subprocess.run(
            [str(self.bin / name), *arguments],
            env=self.environment,
            cwd=self.folder,  # a folder without sirtaki
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_SECONDS,
        )
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))} failed ({done.returncode})")

    def install(self, *arguments: str | Path) -> None:
        self.run("python", "-m", "pip", "install", *PIP_OPTIONS, *arguments)

    def test(self, *paths: Path) -> None:
        """Runs tests of the repository on the installed packages. They may use the system's programs."""
        self.environment["PATH"] += os.pathsep + os.environ["PATH"]
        self.install(*FOR_TESTS)
        self.run("python", "-m", "pytest", "-q", "--maxfail=10", "--rootdir", ROOT, *paths)


def timed(what: str, do: Callable[[], None]) -> None:
    """Runs `do`, and prints its duration."""
    start = time.perf_counter()
    do()
    print(f"{time.perf_counter() - start:7.1f} s  {what}", flush=True)
