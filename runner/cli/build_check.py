"""--check-build: prints what is installed here, and whether it works."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from sirtaki.bindings._version import VERSION
from sirtaki.runner.doctor.facts import FRAMEWORKS, FrameworkFacts
from sirtaki.runner.doctor.trials import find_gpu_libraries, try_adapter, try_core, try_memory
from sirtaki.runner.launch.cores import count_gpus, usable_cores

_LAUNCHERS = {"ssh": "ranks on several hosts", "mpirun": "ranks as MPI's", "srun": "ranks as Slurm's"}


def check_build(settings_of_core: Mapping[str, str]) -> int:
    """Prints a line for each finding; returns 0, or 1 if sirtaki itself does not work here.

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
    path, broken = try_core()
    yield "core", f"no: {broken}" if broken else f"works: {path}", True
    refusal = try_memory()
    sockets = "ranks of one host exchange data over sockets"
    yield "shared memory", f"no: {refusal}; {sockets}" if refusal else "works", False
    yield from ((name, value, False) for name, value in _try_gpu_libraries(environment))
    with ThreadPoolExecutor(usable_cores()) as pool:
        for adapter in pool.map(try_adapter, FRAMEWORKS):
            yield f"sirtaki.{adapter.name}", _describe_adapter(adapter), False
    for program, purpose in _LAUNCHERS.items():
        found = shutil.which(program)
        yield program, f"{found} ({purpose})" if found else "no: not on the PATH", False


def _try_gpu_libraries(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    found, error = find_gpu_libraries(environment)
    for name in ("cuda", "nccl"):
        works, _, text = found[name] if found is not None else (False, "", error)
        yield f"lib{name}", f"{'works' if works else 'no'}: {text}"


def _describe_adapter(framework: FrameworkFacts) -> str:
    if framework.state == "imports":
        return f"works with {framework.name} {framework.version}"
    return (
        f"no: {framework.text}"
        if framework.state == "absent"
        else f"no: {framework.name} {framework.version}: {framework.text}"
    )
