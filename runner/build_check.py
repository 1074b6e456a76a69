"""--check-build: what is installed here, and whether it works."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

from sirtaki._core._version import VERSION

from .cores import count_gpus, usable_cores

_ADAPTERS = {"numpy": "sirtaki.numpy", "torch": "sirtaki.torch"}
_LAUNCHERS = {"ssh": "ranks on several hosts", "mpirun": "ranks as MPI's", "srun": "ranks as Slurm's"}
_IMPORT_SECONDS = 120.0


def check_build() -> int:
    """Prints it, one line for each, and returns 0, or 1 if sirtaki itself does not work here."""
    works = True
    for name, value, is_needed in _findings():
        works = works and not (is_needed and value.startswith("no:"))
        print(f"{name:<16} {value}")
    return 0 if works else 1


def _findings() -> Iterator[tuple[str, str, bool]]:
    """What was looked for, what was found ("no: " and why), and whether nothing works without it."""
    yield "sirtaki", VERSION, True
    yield "Python", f"{platform.python_version()} in {sys.executable}", True
    yield "system", f"{platform.system()} {platform.release()} on {platform.machine()}", True
    yield "cores, GPUs", f"{usable_cores()} usable cores, {count_gpus()} GPUs", True
    yield "core", _try_core(), True
    yield "shared memory", _try_memory(), False
    for framework, adapter in _ADAPTERS.items():
        yield f"sirtaki.{framework}", _try_adapter(framework, adapter), False
    for program, purpose in _LAUNCHERS.items():
        path = shutil.which(program)
        yield program, f"{path} ({purpose})" if path else "no: not on the PATH", False


def _try_core() -> str:
    try:
        from sirtaki._core import library
    except (ImportError, OSError) as error:
        return f"no: {error}"
    return f"works: {library.PATH}"


def _try_memory() -> str:
    try:
        from sirtaki._core.bootstrap.memory import create_memory
        from sirtaki._core.context import Config

        descriptor, refusal = create_memory(Config({}), 2)
    except (ImportError, OSError) as error:
        return f"no: {error}"
    if refusal:
        return f"no: {refusal}; ranks of one host exchange data over sockets"
    os.close(descriptor)
    return "works"


def _try_adapter(framework: str, adapter: str) -> str:
    """Imports it in a process of its own, which a broken framework may bring down."""
    try:
        version = importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return f"no: {framework} is not installed"
    try:
        result = subprocess.run(
            [sys.executable, "-c", f"import {adapter}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"no: {framework} {version} could not be imported in {_IMPORT_SECONDS:g} s"
    if result.returncode:
        last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        return f"no: {framework} {version}: {last}"
    return f"works with {framework} {version}"
