"""Builds and runs the native part: drivers in C++, and the memory-bound prototype."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
FOLDER = BENCHMARKS.parent / "build" / "benchmarks"
DRIVER_SECONDS = 600
MOST_WITH_LINKS = 4096  # simulated ranks, of which each has the tables of its links in memory


def build(target: str) -> Path:
    """Builds a target with what it needs, as far as that is outdated. Returns the folder."""
    cmake, ninja = _tool("cmake"), _tool("ninja")
    settings = [f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DCMAKE_BUILD_TYPE=Release"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ninja does not protect one folder from two concurrent builds
        for step in (
            ["-S", str(BENCHMARKS / "native"), "-B", str(FOLDER), "-G", "Ninja", *settings],
            ["--build", str(FOLDER), "--target", target],
        ):
            done = subprocess.run([cmake, *step], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                sys.exit(f"the native part of the benchmarks could not be built:\n{done.stdout}")
    return FOLDER


def run(driver: str, **numbers: int) -> dict[str, Any]:
    """Builds a driver if need be, and runs it with these numbers. Returns the JSON object that it prints."""
    command = [str(build(driver) / driver), *(f"{name}={value}" for name, value in numbers.items())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DRIVER_SECONDS, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _tool(name: str) -> str:
    beside = Path(sysconfig.get_path("scripts"), name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"the benchmarks need {name} to build their native part: pip install cmake ninja")
    return found
