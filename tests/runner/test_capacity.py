"""Jobs without enough memory on a host are rejected, or aborted before the machine thrashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, Run

from sirtaki.runner.launch.capacity import RANKS_PER_CORE, Capacity, Memory, read_memory
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.supervise.signals import refuse_to_start_after_a_signal

GIB = 1 << 30


def plenty() -> Memory:
    return Memory(64 * GIB, 60 * GIB)


def test_more_ranks_than_cores_can_bear_are_refused() -> None:
    Capacity(2 * RANKS_PER_CORE, 2, plenty).check()
    with pytest.raises(
        LaunchError, match=r"33 ranks on 2 usable cores are more than 16 per core: start fewer"
    ):
        Capacity(2 * RANKS_PER_CORE + 1, 2, plenty).check()


def test_ranks_that_memory_cannot_hold_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"20 ranks need at least 640 MiB .* only 512 MiB are available"):
        Capacity(20, 64, lambda: Memory(4 * GIB, GIB // 2)).check()


def test_a_start_that_uses_up_memory_is_given_up() -> None:
    left = [GIB]
    capacity = Capacity(40, 64, lambda: Memory(24 * GIB, left[0]))
    assert capacity.shortage(10) == ""
    left[0] = 300 << 20
    words = (
        "starting 40 ranks uses up the memory of this host: only 300 MiB of 24.0 GiB are left with 11 of them"
    )
    assert capacity.shortage(11).startswith(words)


def test_memory_is_watched_until_all_ranks_are_there() -> None:
    left = [GIB]
    capacity = Capacity(2, 64, lambda: Memory(24 * GIB, left[0]))
    assert capacity.poll(time.monotonic() + 60) == ""  # watching has not started
    capacity.watch(60)
    assert capacity.poll(time.monotonic()) == ""
    left[0] = 0
    assert capacity.due is not None
    assert capacity.poll(capacity.due) != ""
    capacity.note_initialised(0)
    assert capacity.due is not None
    capacity.note_initialised(1)
    assert capacity.due is None


@pytest.mark.parametrize(
    ("limit", "available"), [("max", 8 * GIB), (str(3 * GIB), 3 * GIB - 2 * GIB + GIB // 2)]
)
def test_a_control_group_may_have_less_than_the_host(tmp_path: Path, limit: str, available: int) -> None:
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n"
    )
    (group / "memory.max").write_text(limit)
    (group / "memory.current").write_text(str(2 * GIB))
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 2}\n")
    assert read_memory(tmp_path).available == available


def test_a_control_group_around_that_of_the_process_may_have_less(tmp_path: Path) -> None:
    """Kubernetes and Slurm may set the limit of the pod, or of the job, and none below."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step/task\n")
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n"
    )
    for name, limit in (("job", str(3 * GIB)), ("job/step", str(5 * GIB)), ("job/step/task", "max")):
        group = tmp_path / "sys/fs/cgroup" / name
        group.mkdir(parents=True)
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text(str(2 * GIB))
        (group / "memory.stat").write_text("anon 1\ninactive_file 0\n")
    assert read_memory(tmp_path) == Memory(3 * GIB, GIB)


def test_this_host_has_memory() -> None:
    memory = read_memory()
    assert 0 < memory.available <= memory.total


def test_hvdrun_asks_before_it_starts_that_many(hvdrun: Run) -> None:
    many = str(RANKS_PER_CORE * (os.cpu_count() or 1) + 1)
    refused = hvdrun("-np", many, "true")
    assert refused.returncode == 2
    assert "per core: start fewer ranks with -np, or use --oversubscribe" in refused.stderr
    assert hvdrun("-np", many, "--oversubscribe", "true").returncode == 0


@pytest.fixture
def held_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    yield
    while signal.sigpending() & {signal.SIGTERM, signal.SIGINT}:
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("held_signals")
def test_a_signal_ends_the_start() -> None:
    """Signals are blocked while ranks start one by one, which takes minutes if memory is short."""
    refuse_to_start_after_a_signal()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    with pytest.raises(LaunchError, match=r"terminated .* before all ranks were started") as caught:
        refuse_to_start_after_a_signal()
    assert caught.value.exit_code == 143


def test_sigterm_while_many_ranks_start(tmp_path: Path, environment: dict[str, str]) -> None:
    """The first rank ends hvdrun, which has hundreds more to start."""
    script = tmp_path / "end.py"
    script.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(300)\n")
    command = [sys.executable, "-m", "sirtaki.runner", "-np", "300", "--oversubscribe", sys.executable, "-S"]
    ended = subprocess.run(
        [*command, str(script)], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=FAILSAFE_SECONDS,
    )  # fmt: skip
    assert ended.returncode == 143, ended.stderr
    assert "terminated (SIGTERM)" in ended.stderr


def test_servers_take_room_beside_the_ranks() -> None:
    Capacity(RANKS_PER_CORE, 1, plenty).check()
    with pytest.raises(LaunchError, match=f"{RANKS_PER_CORE + 1} ranks and servers on 1 usable core"):
        Capacity(RANKS_PER_CORE, 1, plenty, servers=1).check()
