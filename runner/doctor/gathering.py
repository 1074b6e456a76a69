"""Gathers the facts about this host, topic by topic, each with its own deadline."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.address import chosen_interfaces, host_identity, local_addresses
from sirtaki.bindings.bootstrap.job import RendezvousError, read_key
from sirtaki.runner.cli.command import code_words, module_words
from sirtaki.runner.doctor.decoding import MAX_ADDRESSES, line, redacted, shortened
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
from sirtaki.runner.doctor.probe import TOKEN_BYTES, Listener, measure, reach
from sirtaki.runner.launch.capacity import control_groups, count_gpus, read_memory, usable_cores
from sirtaki.runner.launch.child_process import ChildProcess
from sirtaki.runner.launch.environment import outside_of_a_rank

# ---- Trials of what is installed here, for `sirtaki doctor` and `hvdrun --check-build` -----------------


TRIAL_SECONDS = 120.0
_MAX_OUTPUT, _LAST_LINES = 64 * 1024, 2  # characters and lines, the last of a trial's output
# Optional functions of NCCL: communicators that are repaired after a loss instead of made again.
_SYMBOLS = ("ncclCommShrink", "ncclCommRevoke", "ncclCommGrow")
_FIND_GPU_LIBRARIES = f"""
import ctypes, json
from sirtaki.bindings.gpu import find_libraries
found = find_libraries()
nccl = ctypes.CDLL(found.nccl.path) if found.nccl.version else None
print(json.dumps({{
    "devices": found.devices,
    "cuda": [bool(found.cuda.version), found.cuda.path, found.cuda.text],
    "nccl": [bool(found.nccl.version), found.nccl.path, found.nccl.text],
    "symbols": [name for name in {_SYMBOLS} if nccl is not None and hasattr(nccl, name)],
    "missing": [name for name in {_SYMBOLS} if nccl is not None and not hasattr(nccl, name)],
}}))
"""
# A trial must not depend on GPUs, which are looked at by themselves, nor take their memory from a job.
_ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}


def run_python(
    arguments: Sequence[str], environment: Mapping[str, str], seconds: float = TRIAL_SECONDS
) -> tuple[int, str, str]:
    """Runs Python; returns its exit code, and the last lines of its output and of its standard error.

    Some trials need a process of their own, because a broken driver or framework may crash it.
    """
    deadline = time.monotonic() + seconds
    output, errors = deque[str](maxlen=_LAST_LINES), deque[str](maxlen=1)

    def take(text: str, kept: deque[str]) -> None:
        if text.strip():
            kept.append(text[-_MAX_OUTPUT:])

    command = [sys.executable, *arguments]
    child = ChildProcess(command, partial(take, kept=output), partial(take, kept=errors), environment)
    code = child.end(seconds)
    if code is None:
        return 1, "", f"it did not finish within {seconds:g} s"
    child.join(deadline - time.monotonic())
    last, *_ = [*errors, f"exit code {code}"]
    return code, "".join(output)[-_MAX_OUTPUT:], line(last)


def try_core() -> tuple[str, str]:
    """Opens the core; returns its path, and why it cannot be opened ("" if it can)."""
    try:
        from sirtaki.bindings import library
    except (ImportError, OSError) as error:
        return "", str(error)
    return str(library.PATH), ""


def try_memory() -> str:
    """Creates memory as ranks share it; returns why that fails, "" if it works."""
    try:
        from sirtaki.bindings.bootstrap.memory import create_memory
        from sirtaki.bindings.library import Config

        descriptor, refusal = create_memory(Config({}), 2)
    except (ImportError, OSError) as error:
        return str(error)
    if not refusal:
        os.close(descriptor)
    return refusal


def find_gpu_libraries(environment: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
    """Searches for the libraries of GPUs as ranks do; returns what was found, or None and the reason."""
    code, output, error = run_python(code_words(_FIND_GPU_LIBRARIES), environment)
    try:
        found = json.loads(output.splitlines()[-1]) if code == 0 else None
    except (ValueError, IndexError):
        found = None
    return (found, "") if isinstance(found, dict) else (None, error)


def find_framework(name: str) -> FrameworkFacts:
    """Looks for a framework and reads its version, without an import of either."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a folder of this name is no package
        return FrameworkFacts(name, "", "absent", f"{name} is not installed")
    version = _version(name)
    if name == "keras" and version.startswith("2."):  # as TensorFlow before 2.16 brings it along
        return FrameworkFacts(name, version, "unsupported", "sirtaki.keras serves Keras 3")
    return FrameworkFacts(name, version, "installed")


def try_adapter(name: str) -> FrameworkFacts:
    """Imports the adapter of a framework in another process."""
    found = find_framework(name)
    if found.state != "installed":
        return found
    code, _, error = run_python(code_words(f"import sirtaki.{name}"), os.environ)
    return replace(found, state="no-import" if code else "imports", text=error if code else "")


def _version(module: str) -> str:
    """Returns a module's version, also if its package has another name, such as tensorflow-cpu."""
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        packages = importlib.metadata.packages_distributions().get(module, [])
        return importlib.metadata.version(packages[0]) if packages else "of unknown version"


def try_framework(name: str) -> FrameworkFacts:
    """Runs a job of two ranks that all-reduce an array of a framework, on the CPU."""
    found = try_adapter(name)
    if found.state != "imports":
        return found
    error = run_job(name, ["-np", "2", "-H", "localhost:2"])  # not on the hosts of an allocation
    return replace(found, state="no-job" if error else "works", text=error)


def run_job(framework: str, options: Sequence[str]) -> str:
    """Runs a job that all-reduces an array of a framework, with these options of hvdrun.

    Returns why it failed, "" if it did not.
    """
    environment = outside_of_a_rank(os.environ) | _ON_CPU
    program = [sys.executable, *module_words("sirtaki.runner.doctor.all_reduce"), framework]
    code, _, error = run_python([*module_words("sirtaki.runner"), *options, *program], environment)
    return error if code else ""


# ---- --check-build: prints what is installed here, and whether it works --------------------------------


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


# ---- The topics of facts -------------------------------------------------------------------------------


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
    quotas = []
    for group in control_groups(root):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
    return min(quotas, default=0.0)


def gather_memory() -> HostMemory:
    memory = read_memory()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return HostMemory(memory.total, memory.available, pages)


def gather_kernel() -> Kernel:
    memfd = _try(lambda: os.memfd_create("sirtaki-doctor", os.MFD_CLOEXEC))
    pidfd = _try(lambda: os.pidfd_open(os.getpid()))
    return Kernel(platform.release(), memfd, pidfd, try_memory(), _seccomp())


def _try(opens: Callable[[], int]) -> str:
    """Calls what opens a descriptor; returns why that fails, "" if it works."""
    try:
        os.close(opens())
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


# ---- The answers of a doctor on another host -----------------------------------------------------------
# Each line of output begins with MARK, because the shell of a login may print, too.


MARK = "sirtaki-doctor: "
_MAX_QUESTION = 64 * 1024
_IDLE_SECONDS = 1800.0  # the first question waits for the facts of the slowest host


def answer_questions(choice: Choice) -> int:
    """Writes the version, then the facts, then an answer to each line of standard input, until that ends."""
    output = os.dup(1)
    os.dup2(2, 1)  # whatever else prints, must not come between the lines

    def write(**values: object) -> None:
        data = f"{MARK}{json.dumps(values)}\n".encode()
        while data:
            data = data[os.write(output, data) :]

    write(hello=VERSION)
    write(facts=shortened(asdict(gather(choice, lambda text: write(note=text)))))
    while question := _next_question():
        number = 0
        try:
            values = json.loads(question)
            number = int(values["number"])
            write(number=number, answer=_QUESTIONS[values["ask"]](values))
        except (OSError, ValueError, KeyError, TypeError, RendezvousError) as error:
            write(number=number, error=f"{type(error).__name__}: {error}")
    return 0


def _next_question() -> bytes:
    """Returns the next line of input, b"" at its end. This process ends if none comes for a long time."""
    signal.setitimer(signal.ITIMER_REAL, _IDLE_SECONDS)
    question = sys.stdin.buffer.readline(_MAX_QUESTION)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return question


def _listen(values: Mapping[str, Any]) -> object:
    listener = Listener(_token(values))
    return {"port": listener.port, "addresses": local_addresses(chosen_interfaces())[:MAX_ADDRESSES]}


def _reach(values: Mapping[str, Any]) -> object:
    found = reach(list(values["addresses"]), int(values["port"]), _token(values), float(values["seconds"]))
    return [asdict(attempt) for attempt in found]


def _measure(values: Mapping[str, Any]) -> object:
    return asdict(measure(str(values["address"]), int(values["port"]), _token(values)))


def _token(values: Mapping[str, Any]) -> bytes:
    token = bytes.fromhex(values["token"])
    if len(token) != TOKEN_BYTES:
        raise ValueError("the token has a wrong size")
    return token


_QUESTIONS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "clock": lambda _: time.time(),
    "listen": _listen,
    "reach": _reach,
    "measure": _measure,
}
