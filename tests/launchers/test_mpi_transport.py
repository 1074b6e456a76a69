"""Jobs whose data MPI moves between hosts. The ranks of one machine pretend to be on two hosts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from .test_launchers import mpirun

TWO_HOSTS = """
import hashlib, sys
import numpy as np
from mpi4py import MPI
from sirtaki.bindings.bootstrap import world_builder
world = MPI.COMM_WORLD
world_builder.host_identity = lambda: f"host {world.rank * 2 // world.size}"
import sirtaki.numpy as hvd
"""
EXACT = """
for turn in range(2):  # a second world after the first, in the same processes
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert (size, hvd.cross_size()) == (4, 2)
    bits = hashlib.sha256()
    for count in (1, 1000, 700_001):
        values = np.random.default_rng(rank).standard_normal(count).astype(np.float32)
        bits.update(hvd.allreduce(values, op=hvd.Sum).tobytes())
        numbers = np.arange(count) * (rank + 1)
        assert np.array_equal(hvd.allreduce(numbers, op=hvd.Sum), np.arange(count) * 10)
        assert np.array_equal(hvd.broadcast(numbers, 3), np.arange(count) * 4)
        parts = np.repeat(np.arange(size) + 10 * rank, count)
        received, _ = hvd.alltoall(parts, [count] * size)
        assert np.array_equal(received, np.repeat(np.arange(size) * 10 + rank, count))
        if rank == 0:
            hvd.send(numbers, 3)
        if rank == 3:
            assert np.array_equal(hvd.recv(np.empty_like(numbers), 0), np.arange(count))
    sent = {}
    for row in hvd.stats()["sent"]:
        sent[row["transport"]] = sent.get(row["transport"], 0) + row["bytes"]
    everything = hvd.allgather_object((bits.hexdigest(), sent.get("mpi", 0), sent.get("tcp", 0)))
    if rank == 0:
        digests, over_mpi, over_tcp = zip(*everything)
        assert len(set(digests)) == 1
        print(digests[0], min(over_mpi) > 1_000_000, max(over_tcp) < 100_000, flush=True)
    hvd.shutdown()
"""


@pytest.fixture
def over_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("SIRTAKI_TRANSPORT", "mpi")
    monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")  # as between hosts


def write(folder: Path, text: str) -> Path:
    script = folder / "world.py"
    script.write_text(text)
    return script


@pytest.mark.usefixtures("over_mpi")
def test_operations_over_mpi_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = write(tmp_path, TWO_HOSTS + EXACT)
    done = mpirun(4, script)
    assert done.returncode == 0, done.stderr
    assert "and over MPI between hosts" in done.stderr
    monkeypatch.setenv("SIRTAKI_TRANSPORT", "auto")
    beside = mpirun(4, script)
    assert beside.returncode == 0, beside.stderr
    digest = beside.stdout.split()[0]
    assert done.stdout.splitlines() == [f"{digest} True True"] * 2
    assert beside.stdout.splitlines() == [f"{digest} False False"] * 2


@pytest.mark.usefixtures("over_mpi")
def test_the_ranks_of_a_communicator(tmp_path: Path) -> None:
    text = """
part = world.Split(color=world.rank % 2, key=-world.rank)
hvd.init(comm=part)
assert (hvd.rank(), hvd.cross_size()) == (part.rank, 2)
numbers = np.arange(100_000) + world.rank
expected = sum(np.arange(100_000) + one for one in range(world.rank % 2, world.size, 2))
assert np.array_equal(hvd.allreduce(numbers, op=hvd.Sum), expected)
assert any(row["transport"] == "mpi" for row in hvd.stats()["sent"])
part.Barrier()  # the program's own messages
hvd.shutdown()
part.Free()
"""
    done = mpirun(4, write(tmp_path, TWO_HOSTS + text))
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("over_mpi")
def test_a_rank_that_raises_is_named_by_those_that_wait(tmp_path: Path) -> None:
    text = """
hvd.init()
hvd.allreduce(np.ones(1000))
world.Barrier()
try:
    if hvd.rank() == 2:
        raise ValueError("on purpose")
    hvd.allreduce(np.ones(1_000_000), name="late")
except hvd.HorovodInternalError as error:
    print(error, flush=True)
    world.send(None, 2)
except ValueError as error:
    from sirtaki.bindings.bootstrap import lifecycle
    lifecycle.abort(error)
    for other in (0, 1, 3):
        world.recv(source=other)
"""
    done = mpirun(4, write(tmp_path, TWO_HOSTS + text))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gave up: ValueError: on purpose") == 3, done.stdout
    assert done.stdout.count("rank 2 (") == 3, done.stdout


@pytest.mark.usefixtures("over_mpi")
def test_one_host_needs_nothing_of_mpi(tmp_path: Path) -> None:
    text = """
import numpy as np, sirtaki.numpy as hvd
hvd.init()
assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [2.0] * 3
assert not any(row["transport"] == "mpi" for row in hvd.stats()["sent"])
"""
    done = mpirun(2, write(tmp_path, text))
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("over_mpi")
@pytest.mark.parametrize(
    ("before", "variables", "message"),
    [
        ("", {"SIRTAKI_ENCRYPT": "1"}, "sirtaki cannot encrypt what MPI sends: set only one"),
        (
            "import mpi4py; mpi4py.rc.thread_level = 'serialized'\n",
            {},
            "needs MPI's thread level MPI_THREAD_MULTIPLE",
        ),
    ],
)
def test_what_mpi_cannot_do_is_refused(
    before: str, variables: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    text = """
try:
    hvd.init()
except RuntimeError as error:
    print(error, flush=True)
"""
    done = mpirun(2, write(tmp_path, before + TWO_HOSTS + text))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(message) == 2, done.stdout  # mpirun may join the ranks' lines


@pytest.mark.usefixtures("over_mpi")
def test_a_rank_leaves_once_its_messages_are_received(tmp_path: Path) -> None:
    text = """
import time
hvd.init()
numbers = np.arange(100_000.0)
if hvd.rank() == 0:
    hvd.broadcast_async(numbers, 0)
else:
    time.sleep(2)  # the messages of rank 0 wait for longer than other links are given at the end
    assert np.array_equal(hvd.broadcast(np.zeros_like(numbers), 0), numbers)
hvd.shutdown()
"""
    done = mpirun(2, write(tmp_path, TWO_HOSTS + text))
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("over_mpi")
def test_ranks_agree_on_a_tag_after_one_has_missed_a_world(tmp_path: Path) -> None:
    text = """
from sirtaki.bindings.bootstrap import mpi_links
hvd.init()
if world.rank == 1:
    world.Get_attr(mpi_links._keyval()).worlds += 1
hvd.shutdown()
hvd.init()
assert hvd.allreduce(np.ones(1000), op=hvd.Sum).tolist() == [2.0] * 1000
hvd.shutdown()
"""
    done = mpirun(2, write(tmp_path, TWO_HOSTS + text))
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("over_mpi")
def test_a_communicator_that_one_rank_has_not_duplicated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import os
from sirtaki.bindings.bootstrap import mpi_links
link = mpi_links.link
def fails(*_):
    raise OSError("on purpose")
if world.rank == 1:
    mpi_links.link = fails
try:
    hvd.init()
except RuntimeError as error:
    assert "rank 1 could not link to the others: on purpose" in str(error) or world.rank == 1, error
mpi_links.link = link
os.environ.pop("SIRTAKI_START_TIMEOUT")
if world.rank == 0:
    world.send(None, 1)
else:
    world.recv(source=0)
try:
    hvd.init()
except RuntimeError as error:
    assert "rank 1 failed before the others: pass another" in str(error), error
else:
    raise AssertionError
if world.rank == 0:
    world.Get_attr(mpi_links._keyval()).pending.Wait()
else:
    made, request = world.Idup()
    request.Wait()
hvd.init(comm=MPI.COMM_WORLD.Dup())
assert hvd.allreduce(np.ones(1000), op=hvd.Sum).tolist() == [2.0] * 1000
hvd.shutdown()
"""
    monkeypatch.setenv("SIRTAKI_START_TIMEOUT", "3")
    done = mpirun(2, write(tmp_path, TWO_HOSTS + text))
    assert done.returncode == 0, done.stderr


def test_ranks_that_mpi_does_not_know_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from .test_launchers import run

    script = write(tmp_path, "import sirtaki.numpy as hvd; hvd.init()\n")
    monkeypatch.setenv("SIRTAKI_TRANSPORT", "mpi")
    command = [sys.executable, "-m", "sirtaki.runner", "-np", "2", sys.executable, script]
    done = run(command, **os.environ)
    assert done.returncode != 0
    assert "transport is mpi, but this job's ranks have no communicator of MPI" in done.stderr + done.stdout
    assert "mpirun -n 2 python train.py" in done.stderr + done.stdout
