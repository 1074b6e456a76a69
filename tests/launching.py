"""Shared helpers of tests that start hvdrun as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle

HVDRUN = (sys.executable, "-m", "sirtaki.runner")
FAILSAFE_SECONDS = 180.0

# The types of fixtures.
Run = Callable[..., subprocess.CompletedProcess[str]]  # runs hvdrun with these arguments
Start = Callable[..., subprocess.Popen[bytes]]  # starts hvdrun with these arguments
Script = Callable[[str], str]  # writes a script with this body, and returns its path
Hosts = Callable[..., Path]  # sets the behaviour of hosts, and returns the folder of their home folders

# The code that a rank needs to use the rendezvous as `init` does, without the core; `{}` is for the test's
# lines.
RANK_SCRIPT = """
import os, signal, sys, time
from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.job import RendezvousError, Identity, Job
from sirtaki.bindings.bootstrap.job import read_key
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient

rank, size = int(os.environ["SIRTAKI_RANK"]), int(os.environ["SIRTAKI_SIZE"])

def connect(generation=1):
    job = Job(os.environ["SIRTAKI_JOB"], size, read_key(os.environ["SIRTAKI_KEY_FILE"]), VERSION)
    timeout = float(os.environ["SIRTAKI_START_TIMEOUT"])
    address, mine = os.environ["SIRTAKI_RENDEZVOUS"], Identity(rank, generation)
    return RendezvousClient.connect(address, job, mine, timeout)

def init(generation=1):
    client = connect(generation)
    client.all_gather(b"")
    client.report("initialised")
    return client

{}
"""


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Sets default handlers inside."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def pickled_by_value(name: str) -> Iterator[None]:
    """Makes cloudpickle treat a module of tests like a user's script inside: ranks cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[name])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[name])


# The last rank computes until the file "go" exists, while the others wait for it; then all go on until the
# file "end" exists.
TRAINING = """
import os, pathlib, sys, time
import numpy
import sirtaki.numpy as hvd

hvd.init()
folder, rank = pathlib.Path(sys.argv[1]), hvd.rank()
(folder / f"{{rank}}.pid").write_text(f"{{os.getpid()}}\\n")
while rank == hvd.size() - 1 and not (folder / "go").exists():
    time.sleep(0.02)
while hvd.allreduce(numpy.float32(not (folder / "end").exists()), name="loss") > 0.5:
    time.sleep(0.001)
{}
"""


def script_writer(path: Path, template: str) -> Callable[[str], str]:
    """Returns a function that writes a script, the template with the given body, and returns its path."""

    def write(body: str) -> str:
        path.write_text(template.format(body))
        return str(path)

    return write


def deadline() -> float:
    """Returns a moment at which a test has failed."""
    return time.monotonic() + FAILSAFE_SECONDS


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Waits until `condition()` is true; fails with `what` after a long time."""
    last = deadline()
    while not condition():
        assert time.monotonic() < last, f"waited in vain until {what}"
        time.sleep(0.01)


def read_pids(folder: Path, count: int) -> list[int]:
    """Returns the process ids that `count` ranks, or their children, have written to files in `folder`."""

    def complete() -> list[Path]:
        files = [file for file in folder.glob("*.pid") if file.read_text().endswith("\n")]
        return files if len(files) == count else []

    wait_until(complete, f"{count} processes have written their numbers")
    return [int(file.read_text()) for file in complete()]


def is_running(pid: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def read_terminal(descriptor: int) -> bytes:
    """Returns all output to a terminal until its last writer closes it; `descriptor` is the other side."""
    data = b""
    while True:
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # the terminal's signal that all writers have closed it
            return data
        if not part:
            return data
        data += part


def stand_in_for_ssh(folder: Path, environment: dict[str, str]) -> Callable[..., Path]:
    """Puts a stand-in for ssh on the PATH of this environment.

    Returns a function that sets the behaviour of each host, as `runner/ssh_stand_in.py` says, and returns
    the folder with their home folders, named after them.
    """
    return _stand_in_for("ssh", folder, environment)


def stand_in_for_srun(folder: Path, environment: dict[str, str]) -> Callable[..., Path]:
    """Puts a stand-in for srun on the PATH of this environment, which becomes that of a batch script.

    Returns a function that sets the nodes of the job with their behaviour, as `runner/srun_stand_in.py` says,
    and returns the folder of their home folders.
    """
    write = _stand_in_for("srun", folder, environment)

    def allocate(**behaviours: object) -> Path:
        nodes = ",".join(["node1", *behaviours])
        environment.update(
            SLURM_JOB_ID="7", SLURM_JOB_NODELIST=nodes, SLURMD_NODENAME="node1", SLURM_LABELIO="1"
        )
        environment["SLURM_TASKS_PER_NODE"] = f"1,2(x{len(behaviours)})"
        return write(**behaviours)

    return allocate


def _stand_in_for(name: str, folder: Path, environment: dict[str, str]) -> Callable[..., Path]:
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / name
    stand_in = Path(__file__).parent / "runner" / f"{name}_stand_in.py"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in} "$@"\n')
    program.chmod(0o755)
    environment["PATH"] = f"{folder / 'bin'}:{environment.get('PATH', os.defpath)}"
    environment[f"{name.upper()}_STAND_IN"] = str(folder / "hosts.json")

    def write(**behaviours: object) -> Path:
        (folder / "hosts.json").write_text(json.dumps(behaviours))
        return folder

    return write
