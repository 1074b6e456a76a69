"""Trials of what is installed here, for `sirtaki doctor` and `hvdrun --check-build`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import IO, Any

from sirtaki.bindings._version import VERSION
from sirtaki.runner.cli.command import code_words, module_words
from sirtaki.runner.doctor.decoding import line
from sirtaki.runner.doctor.facts import FRAMEWORKS, FrameworkFacts
from sirtaki.runner.launch.capacity import count_gpus, usable_cores

TRIAL_SECONDS = 120.0
_MAX_OUTPUT = 64 * 1024
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
_OF_A_RANK = ("SIRTAKI_RANK", "SIRTAKI_SIZE", "SIRTAKI_JOB", "SIRTAKI_RENDEZVOUS")


def run_python(
    arguments: Sequence[str], environment: Mapping[str, str], seconds: float = TRIAL_SECONDS
) -> tuple[int, str, str]:
    """Runs Python; returns its exit code, its output, and the last line of its standard error.

    Some trials need a process of their own, because a broken driver or framework may crash it.
    """
    deadline = time.monotonic() + seconds
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
    )
    output, errors = _End(process.stdout), _End(process.stderr)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return 1, "", f"it did not finish within {seconds:g} s"
    last = (errors.text(deadline).strip().splitlines() or [f"exit code {code}"])[-1]
    return code, output.text(deadline), line(last)


class _End:
    """Reads a stream in a thread of its own and keeps the end of it only, so that its length is bounded."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        assert stream is not None
        self._stream = stream
        self._kept = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            while part := os.read(self._stream.fileno(), _MAX_OUTPUT):
                self._kept = (self._kept + part)[-_MAX_OUTPUT:]

    def text(self, deadline: float) -> str:
        """Returns the text at the end of the stream, or at the deadline if a process still has it open."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._kept.decode(errors="replace")


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
    environment = {key: value for key, value in os.environ.items() if key not in _OF_A_RANK} | _ON_CPU
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
