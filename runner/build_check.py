"""--check-build: prints what is installed here, and whether it works."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from sirtaki.bindings._version import VERSION
from sirtaki.runner.cores import count_gpus, usable_cores

_ADAPTERS = ("numpy", "torch", "tensorflow", "keras", "jax")  # each is named like its framework
_LAUNCHERS = {"ssh": "ranks on several hosts", "mpirun": "ranks as MPI's", "srun": "ranks as Slurm's"}
_TIMEOUT_SECONDS = 120.0  # seconds
_FIND_GPU_LIBRARIES = """
from sirtaki.bindings.gpu import find_libraries
found = find_libraries()
for library in (found.cuda, found.nccl):
    print("works:" if library.version else "no:", library.text)
"""


def check_build(settings_of_core: Mapping[str, str]) -> int:
    """Prints the findings, one per line; returns 0, or 1 if sirtaki itself does not work here.

    The settings are environment variables, in the form in which ranks receive them.
    """
    works = True
    for name, value, is_needed in _findings({**os.environ, **settings_of_core}):
        works = works and not (is_needed and value.startswith("no:"))
        print(f"{name:<16} {value}")
    return 0 if works else 1


def _findings(environment: Mapping[str, str]) -> Iterator[tuple[str, str, bool]]:
    """Yields what was checked, the finding ("no: " and the reason), and whether it is required."""
    yield "sirtaki", VERSION, True
    yield "Python", f"{platform.python_version()} in {sys.executable}", True
    yield "system", f"{platform.system()} {platform.release()} on {platform.machine()}", True
    yield "cores, GPUs", f"{usable_cores()} usable cores, {count_gpus()} GPUs", True
    yield "core", _try_core(), True
    yield "shared memory", _try_memory(), False
    yield from ((name, value, False) for name, value in _try_gpu_libraries(environment))
    with ThreadPoolExecutor(usable_cores()) as pool:
        for framework, value in zip(_ADAPTERS, pool.map(_try_adapter, _ADAPTERS), strict=True):
            yield f"sirtaki.{framework}", value, False
    for program, purpose in _LAUNCHERS.items():
        path = shutil.which(program)
        yield program, f"{path} ({purpose})" if path else "no: not on the PATH", False


def _try_core() -> str:
    try:
        from sirtaki.bindings import library
    except (ImportError, OSError) as error:
        return f"no: {error}"
    return f"works: {library.PATH}"


def _try_memory() -> str:
    try:
        from sirtaki.bindings.config import Config
        from sirtaki.runner.rendezvous.memory import create_memory

        descriptor, refusal = create_memory(Config({}), 2)
    except (ImportError, OSError) as error:
        return f"no: {error}"
    if refusal:
        return f"no: {refusal}; ranks of one host exchange data over sockets"
    os.close(descriptor)
    return "works"


def _try_gpu_libraries(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Opens the GPU libraries in a process of its own, because a broken driver may crash it."""
    code, out, error = _try_python(_FIND_GPU_LIBRARIES, environment)
    lines = out.splitlines() if code == 0 else []
    for name in ("libcuda", "libnccl"):
        yield name, lines.pop(0) if lines else f"no: {error}"


def _try_adapter(framework: str) -> str:
    """Imports the adapter in a process of its own, because a broken framework may crash it."""
    try:
        version = importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return f"no: {framework} is not installed"
    code, _, error = _try_python(f"import sirtaki.{framework}", os.environ)
    return f"no: {framework} {version}: {error}" if code else f"works with {framework} {version}"


def _try_python(script: str, environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Runs a script; returns its exit code, its output, and the last line of its standard error."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"it did not finish within {_TIMEOUT_SECONDS:g} s"
    last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
    return result.returncode, result.stdout, last
