"""Gatherers of facts about the machine and this process: Python, cores, memory, kernel, limits, GPUs."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from sirtaki.bindings.bootstrap.connection.key import read_key
from sirtaki.bindings.bootstrap.job import RendezvousError
from sirtaki.runner.doctor.decoding import redacted
from sirtaki.runner.doctor.facts import (
    Cores,
    Gpu,
    GpuFile,
    HostMemory,
    Installation,
    Kernel,
    Limits,
    Variables,
)
from sirtaki.runner.doctor.trials import find_gpu_libraries, try_core, try_memory
from sirtaki.runner.launch.capacity import read_memory
from sirtaki.runner.launch.cores import count_gpus, usable_cores

_PREFIXES = ("SIRTAKI_", "HOROVOD_", "NCCL_", "OMP_", "MKL_", "OPENBLAS_", "SLURM_NTASKS", "KERAS_BACKEND")
_ROOT = Path("/")


def gather_installation() -> Installation:
    path, broken = try_core()
    system = f"{platform.system()} {platform.release()}"
    return Installation(platform.python_version(), sys.executable, system, platform.machine(), path, broken)


def gather_cores(root: Path = _ROOT, environment: Mapping[str, str] = os.environ) -> Cores:
    affinity = len(os.sched_getaffinity(0))
    try:
        usable = usable_cores()
    except ImportError:  # the core cannot be opened, which is a finding of its own
        usable = affinity
    threads = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    count = int(threads) if threads.isascii() and threads.isdecimal() else 0
    return Cores(os.cpu_count() or affinity, affinity, usable, _quota(root), count)


def _quota(root: Path) -> float:
    """Returns the cores that control groups (version 2) leave; 0.0 if there is no limit."""
    path = (root / "proc/self/cgroup").read_text().partition("0::")[2].partition("\n")[0].lstrip("/")
    top = root / "sys/fs/cgroup"
    quotas = []
    for group in (top / path, *(top / path).parents):
        if not group.is_relative_to(top):
            break
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
    return min(quotas, default=0.0)


def gather_memory() -> HostMemory:
    memory = read_memory()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return HostMemory(memory.total, memory.available, pages)


def gather_kernel() -> Kernel:
    return Kernel(platform.release(), _try_memfd(), _try_pidfd(), try_memory(), _seccomp())


def _try_memfd() -> str:
    try:
        os.close(os.memfd_create("sirtaki-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return str(error)
    return ""


def _try_pidfd() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return str(error)
    return ""


def _seccomp() -> int:
    status = Path("/proc/self/status").read_text()
    return next(
        (int(line.split()[1]) for line in status.splitlines() if line.startswith("Seccomp:")),
        -1,
    )


def gather_limits() -> Limits:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(soft, hard, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def gather_variables(environment: Mapping[str, str] = os.environ) -> Variables:
    chosen = {name: value for name, value in environment.items() if name.startswith(_PREFIXES)}
    unknown: list[str] = []
    invalid = ""
    with contextlib.suppress(ImportError):  # the core cannot be opened, which is a finding of its own
        from sirtaki.bindings import variables

        unknown = variables.unknown(environment)
        try:
            variables.check(environment)
        except ValueError as error:
            invalid = str(error)
    has_key = "SIRTAKI_KEY" in environment
    return Variables(redacted(chosen), tuple(unknown), invalid, _check_key_file(environment), has_key)


def _check_key_file(environment: Mapping[str, str]) -> str:
    path = environment.get("SIRTAKI_KEY_FILE")
    if not path:
        return ""
    try:
        read_key(path)
    except RendezvousError as error:
        return str(error)
    return ""


def driver_version(root: Path = _ROOT) -> str:
    """Returns the version of NVIDIA's driver, "" if there is no driver."""
    try:
        first, _, _ = (root / "proc/driver/nvidia/version").read_text().partition("\n")
    except OSError:
        return ""
    return " ".join(first.removeprefix("NVRM version:").split())


def gather_gpu() -> Gpu:
    driver = driver_version()
    devices = count_gpus()
    infiniband = any(Path("/sys/class/infiniband").glob("*"))
    found, reason = find_gpu_libraries(os.environ)
    if found is None:
        refused = GpuFile(False, "", reason)
        return Gpu(devices, driver, refused, refused, infiniband=infiniband)
    return Gpu(
        devices,
        driver,
        GpuFile(*found["cuda"]),
        GpuFile(*found["nccl"]),
        tuple(found["symbols"]),
        tuple(found["missing"]),
        infiniband,
    )
