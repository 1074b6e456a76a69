"""init() without hvdrun: alone, and with explicit arguments."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time

import pytest
from process_world import PATIENCE, free_address, hvdrun

SCRIPT = """
import sys
import sirtaki.numpy as hvd
rank, size, address, key = sys.argv[1:]
hvd.init(rank=int(rank), size=int(size), address=address, key=key or None)
print(hvd.allgather_object(hvd.rank()))
hvd.shutdown()
hvd.init(rank=int(rank), size=int(size), address=address, key=key or None)
print(hvd.allreduce(1.0, op=hvd.Sum))
"""


def python(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    variables = [f"{name}={value}" for name, value in environment.items()]
    command = ["env", *variables, sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    return [(p.returncode, *texts) for p in processes for texts in [p.communicate(timeout=PATIENCE)]]


@pytest.mark.parametrize("key", ["", secrets.token_hex(32)], ids=["without key", "with key"])
def test_explicit_arguments(key: str) -> None:
    address = free_address()
    for code, out, err in ends([python(SCRIPT, str(rank), "3", address, key) for rank in range(3)]):
        assert code == 0, err
        assert out.split("\n")[:2] == ["[0, 1, 2]", "3.0"]


STALLS = """
import os
import sirtaki.numpy as hvd
from sirtaki.bindings.context import current

def heeded(**variables):
    os.environ.update(variables)
    hvd.init()
    found = tuple(float(current().setting(name)) for name in ("stall_report", "stall_deadline"))
    hvd.shutdown()
    for name in variables:
        del os.environ[name]
    return found

defaults = heeded()
assert heeded(HOROVOD_STALL_CHECK_TIME_SECONDS="7", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="90") == (7, 90)
assert heeded(HOROVOD_STALL_CHECK_TIME_SECONDS="7", SIRTAKI_STALL_REPORT="8") == (8, defaults[1])
assert heeded(HOROVOD_STALL_CHECK_DISABLE="1") == (86400, defaults[1])
assert heeded(HOROVOD_STALL_CHECK_DISABLE="0") == defaults
try:
    heeded(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="never")
except ValueError as error:
    assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS cannot be 'never'" in str(error), error
else:
    raise AssertionError("a time that is none was taken")
"""


def test_horovods_variables_for_stalls_are_heeded() -> None:
    [(code, _, err)] = ends([python(STALLS)])
    assert code == 0, err


@pytest.mark.parametrize("transport", ["auto", "socket"])
def test_one_rank_under_hvdrun(transport: str) -> None:
    script = "import sirtaki.numpy as hvd\nhvd.init()\nprint(hvd.size(), hvd.allreduce(7.0))"
    command = hvdrun(1, sys.executable, "-c", script, SIRTAKI_TRANSPORT=transport)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "1 7.0" in ended.stdout


def test_a_rank_that_does_not_come_is_named() -> None:
    code, _, err = ends([python(SCRIPT, "0", "2", free_address(), "", SIRTAKI_START_TIMEOUT="0.5")])[0]
    assert code == 1
    assert "1 of 2 ranks are here; waiting for rank 1" in err
    assert "DeadlineError" in err


# A rank whose links cannot be made; the others must neither wait for the start timeout nor be blamed.
BROKEN_LINKS = """
import errno, os, signal, sys, time
import sirtaki.numpy as hvd
from sirtaki.bindings.bootstrap import memory

def fail(*arguments):
    time.sleep(0.3)
    if "{how}" == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

if os.environ["SIRTAKI_RANK"] == "1":
    memory.MemoryLinks.exchange = fail
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
hvd.init()
"""


@pytest.mark.parametrize(
    ("how", "code", "verdict", "reason"),
    [
        ("out of files", 1, "rank 1 (pid", "rank 1 could not link to the others: Too many open files: raise"),
        ("killed", 137, "was killed by signal 9", "rank 1 "),
    ],
)
def test_a_rank_that_cannot_link_is_named_at_once(how: str, code: int, verdict: str, reason: str) -> None:
    command = hvdrun(3, sys.executable, "-c", BROKEN_LINKS.format(how=how))
    begun = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert time.monotonic() - begun < 60  # the start timeout is 120 s
    assert ended.returncode == code, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert "rank 1" in last
    assert verdict in last
    for rank in (0, 2):
        told = [line for line in ended.stderr.splitlines() if line.startswith(f"[{rank}]") and reason in line]
        assert told, ended.stderr
    assert "Broken pipe" not in ended.stderr


def test_another_key_is_refused() -> None:
    address = free_address()
    right = python(SCRIPT, "0", "2", address, secrets.token_hex(32), SIRTAKI_START_TIMEOUT="3")
    wrong = python(SCRIPT, "1", "2", address, secrets.token_hex(32), SIRTAKI_START_TIMEOUT="3")
    (code, _, _), (wrong_code, _, err) = ends([right, wrong])
    assert (code, wrong_code) == (1, 1)
    assert "key" in err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("rank=0", "size"),
        ("rank=2, size=2, address='127.0.0.1:1'", "rank"),
        ("rank=0, size=2", "address"),
        ("rank=0, size=2, address='nonsense'", "host:port"),
        ("comm=[0]", "comm"),
        ("process_sets=[[0]]", "process_sets"),
    ],
)
def test_arguments_that_make_no_sense(arguments: str, word: str) -> None:
    code, _, err = ends([python(f"import sirtaki.numpy as hvd\nhvd.init({arguments})")])[0]
    assert code == 1
    assert "ValueError" in err.splitlines()[-1]
    assert word in err.splitlines()[-1]


def test_alone() -> None:
    script = """
import sirtaki.numpy as hvd
hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size()) == (0, 1, 1, 1)
assert hvd.is_homogeneous() and hvd.allreduce(2.0) == 2.0
assert not hvd.mpi_built()
import threading
print(threading.active_count())
"""
    code, out, err = ends([python(script)])[0]
    assert code == 0, err
    assert out == "1\n"


def test_the_package_imports_no_framework() -> None:
    script = "import sys, sirtaki; print(sorted({'numpy', 'torch', 'cffi', 'asyncio'} & set(sys.modules)))"
    assert ends([python(script)])[0][1] == "[]\n"


AGAIN = """
import os, sirtaki.numpy as hvd
from sirtaki.bindings.errors import ForkedError

def told(*arguments, **options):
    try:
        hvd.init(*arguments, **options)
    except ValueError as error:
        print("told", error)

hvd.init(rank=0, size=1)
hvd.init()
hvd.init(rank=0, size=1)
hvd.init(process_sets="dynamic")
told(rank=0, size=2, address="127.0.0.1:1")
told(process_sets=[[0], [0, 1]])
told(comm=object())
child = os.fork()
if child == 0:
    try:
        hvd.init()
    except ForkedError as error:
        print("child", error, flush=True)
    hvd.shutdown()
    try:
        hvd.init(rank=0, size=1)
    except ForkedError as error:
        print("child", error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
assert hvd.allreduce(1.0) == 1.0
hvd.shutdown()
hvd.init()
print("again", hvd.size())
"""


def test_init_a_second_time() -> None:
    code, out, err = ends([python(AGAIN)])[0]
    assert code == 0, err
    told = [line for line in out.splitlines() if line.startswith("told")]
    assert "with size=2, but" in told[0]
    assert "rank 0 of 1 already, by hvd.init(rank=0, size=1)" in told[0]
    assert "call hvd.shutdown() before" in told[0]
    assert "with process_sets=[[0], [0, 1]], but" in told[1]
    assert "with comm=" in told[2]
    assert out.count("was forked from rank 0") == 2
    assert out.endswith("again 1\n")
