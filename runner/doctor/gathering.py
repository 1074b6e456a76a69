"""Gathers the facts about this host, topic by topic, each with its own deadline."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.interfaces import chosen_interfaces, local_addresses
from sirtaki.bindings.bootstrap.identity import host_identity
from sirtaki.bindings.bootstrap.job import RendezvousError, read_key
from sirtaki.runner.doctor.decoding import line, redacted
from sirtaki.runner.doctor.facts import (
    FRAMEWORKS,
    Cores,
    FrameworkFacts,
    Gpu,
    GpuFile,
    HostFacts,
    HostIdentity,
    HostMemory,
    Installation,
    Interface,
    Kernel,
    Limits,
    Network,
    Ssh,
    Variables,
)
from sirtaki.runner.doctor.trials import (
    TRIAL_SECONDS,
    find_framework,
    find_gpu_libraries,
    try_adapter,
    try_core,
    try_framework,
    try_memory,
)
from sirtaki.runner.launch.capacity import count_gpus, read_memory, usable_cores

# ---- Gatherers of facts about this host's names, addresses, interfaces and ssh -------------------------


_ROOT = Path("/")
_ELSEWHERE = "192.0.2.1"  # reserved for documentation: a route to it is the default route
_DISCARD = 9
_RESOLVE_SECONDS = 3.0


def gather_network(root: Path = _ROOT) -> Network:
    name = socket.gethostname()
    try:
        addresses: tuple[str, ...] = tuple(local_addresses(chosen_interfaces()))
        refusal = "" if addresses else "there are only loopback addresses"
    except RendezvousError as error:
        addresses, refusal = (), str(error)
    source = _source_address()
    reached = {source, *addresses}
    # Those that count come first, since another host takes a bounded number.
    interfaces = tuple(
        sorted(_interfaces(root), key=lambda interface: reached.isdisjoint(interface.addresses))
    )
    route = next((interface.name for interface in interfaces if source in interface.addresses), "")
    return Network(name, _resolve(name), interfaces, route, source, addresses, refusal)


def _interfaces(root: Path) -> tuple[Interface, ...]:
    import psutil  # not needed while all ranks are on one host

    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    return tuple(
        Interface(
            name,
            tuple(
                address.address
                for address in addresses[name]
                if address.family in (socket.AF_INET, socket.AF_INET6)
            ),
            states[name].mtu,
            _speed(root, name),
            states[name].isup,
        )
        for name in addresses
        if name in states and name != "lo"
    )


def _speed(root: Path, interface: str) -> int:
    try:
        return max(0, int((root / "sys/class/net" / interface / "speed").read_text()))
    except (OSError, ValueError):  # a virtual interface, or one without a cable
        return 0


def _source_address() -> str:
    """Returns this host's address on its default route, "" if it has no route. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((_ELSEWHERE, _DISCARD))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _resolve(name: str) -> tuple[str, ...]:
    """Returns the addresses of a name; none if it is unknown, or if its name server does not answer soon."""
    found, _ = answer_within(_RESOLVE_SECONDS, lambda: _look_up(name))
    return found or ()


def _look_up(name: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def gather_identity(root: Path = _ROOT) -> HostIdentity:
    boot, _, namespace = host_identity().partition("/")
    try:
        machine = (root / "etc/machine-id").read_bytes().strip()
    except OSError:
        machine = b""
    return HostIdentity(boot, namespace, hashlib.sha256(machine).hexdigest()[:16] if machine else "")


def gather_ssh() -> Ssh:
    path = shutil.which("ssh")
    if path is None:
        return Ssh("")
    done = subprocess.run([path, "-V"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=5)
    keys = [key for key in (Path.home() / ".ssh").glob("id_*") if key.suffix != ".pub"]
    has_agent = "SSH_AUTH_SOCK" in os.environ
    return Ssh(path, (done.stderr or done.stdout).strip()[:200], bool(keys) or has_agent)


# ---- Gatherers of facts about the machine and this process: Python, cores, memory, kernel, limits, GPUs


_PREFIXES = ("SIRTAKI_", "HOROVOD_", "NCCL_", "OMP_", "MKL_", "OPENBLAS_", "SLURM_NTASKS", "KERAS_BACKEND")


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


# ---- Gathers the facts about this host, one topic at a time, each with its own deadline ----------------


_SECONDS = 10.0
Note = Callable[[str], None]


class Topic(NamedTuple):
    """A topic's gatherer, and the seconds that it may take."""

    gather: Callable[[], object]
    seconds: float = _SECONDS


TOPICS = {
    "installation": Topic(gather_installation),
    "cores": Topic(gather_cores),
    "memory": Topic(gather_memory),
    "kernel": Topic(gather_kernel),
    "limits": Topic(gather_limits),
    "network": Topic(gather_network),
    "identity": Topic(gather_identity),
    "variables": Topic(gather_variables),
    "ssh": Topic(gather_ssh),
    "gpu": Topic(gather_gpu, TRIAL_SECONDS),
}


class Trial(Enum):
    """How frameworks are tried."""

    NONE = "none"  # their versions are read from the metadata of packages
    IMPORT = "import"
    JOB = "job"  # of two ranks


class Choice(NamedTuple):
    """The frameworks to look at, and how they are tried."""

    frameworks: Sequence[str] = FRAMEWORKS
    trial: Trial = Trial.JOB


def gather(choice: Choice = Choice(), note: Note = lambda text: None) -> HostFacts:  # noqa: B008
    """Returns all facts about this host; calls `note` with the name of each topic before it begins."""
    found: dict[str, Any] = {}
    missed: dict[str, str] = {}
    for name in (*TOPICS, "frameworks"):
        note(name)
        topic = TOPICS[name] if name in TOPICS else _frameworks(_possible(choice, found), note)
        found[name], reason = answer_within(topic.seconds, topic.gather)
        if reason:
            missed[name] = reason
    return HostFacts(version=VERSION, missed=missed, **found)


def _possible(choice: Choice, found: Mapping[str, Any]) -> Choice:
    """Returns what can work: no adapter without the core, and no job with a wrong setting."""
    installation, variables = found["installation"], found["variables"]
    if installation is not None and installation.broken:
        return Choice((), Trial.NONE)
    if variables is not None and variables.invalid and choice.trial is Trial.JOB:
        return Choice(choice.frameworks, Trial.IMPORT)
    return choice


_TRIALS = {Trial.NONE: find_framework, Trial.IMPORT: try_adapter, Trial.JOB: try_framework}


def _frameworks(choice: Choice, note: Note) -> Topic:
    def gather_frameworks() -> tuple[FrameworkFacts, ...]:
        found = []
        for name in choice.frameworks:
            note(f"sirtaki.{name}")
            found.append(_TRIALS[choice.trial](name))
        return tuple(found)

    return Topic(gather_frameworks, 2 * TRIAL_SECONDS * max(1, len(choice.frameworks)))


# ---- A deadline for a function that may hang -----------------------------------------------------------


_T = TypeVar("_T")


def answer_within(seconds: float, function: Callable[[], _T]) -> tuple[_T | None, str]:
    """Calls a function; returns its result, or None and the reason why there is none.

    A function that hangs, for example in a name server that does not answer, is left behind in its thread.
    """
    results: list[tuple[_T | None, str]] = []

    def work() -> None:
        try:
            results.append((function(), ""))
        except Exception as error:  # whatever a host does, the other topics count
            results.append((None, line(f"{type(error).__name__}: {error}")))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else (None, f"no answer within {seconds:g} s")
