"""Ranks that are late, stopped or killed while others wait, and leftovers of a job after its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from process_world import PATIENCE, run_program

HEAD = """
import os, signal, sys, threading, time
import numpy as np
import sirtaki.numpy as hvd

def stop_for_a_while(pid, seconds):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)

hvd.init()
pids = hvd.allgather(np.array([os.getpid()]), name="pids")
"""


def run(tmp_path: Path, body: str, ranks: int, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_program(tmp_path, HEAD + textwrap.dedent(body), ranks, **environment)


def lines_with(ended: subprocess.CompletedProcess[str], *words: str) -> list[str]:
    return [line for line in ended.stderr.splitlines() if all(word in line for word in words)]


@pytest.mark.parametrize(("ranks", "late"), [(2, 0), (3, 1)])
def test_a_rank_that_does_not_submit_is_named_after_five_seconds(
    tmp_path: Path, ranks: int, late: int
) -> None:
    ended = run(
        tmp_path,
        f"""
        if hvd.rank() == {late}:
            time.sleep(7)
        assert hvd.allreduce(1.0, name="loss", op=hvd.Sum) == {ranks}
        """,
        ranks,
    )
    assert ended.returncode == 0, ended
    (line,) = lines_with(ended, "has not submitted")
    assert "after 5 s, rank" in line
    assert re.search(
        rf"'loss'; rank {late} \(pid \d+ on .+\) has not submitted it and is at train\.py:\d+", line
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_and_may_go_on(tmp_path: Path, victim: int) -> None:
    ended = run(
        tmp_path,
        f"""
        if hvd.rank() != {victim}:
            threading.Thread(target=stop_for_a_while, args=(int(pids[{victim}]), 5)).start()
            time.sleep(0.3)
        else:
            time.sleep(0.1)
        for _ in range(3):
            assert hvd.allreduce(1.0, name="loss", op=hvd.Sum) == 2
        """,
        2,
        SIRTAKI_STALL_REPORT="1",
    )
    assert ended.returncode == 0, ended
    assert lines_with(ended, f"rank {victim} (pid ", "'loss'"), ended.stderr
    assert victim == 0 or lines_with(ended, "rank 1 (pid ", "does not answer"), ended.stderr


def test_a_rank_that_is_stopped_in_the_middle_of_an_operation_is_given_up(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        data = np.ones(1 << 20, np.float32)
        if hvd.rank() == 0:
            threading.Timer(0.5, os.kill, (int(pids[1]), signal.SIGSTOP)).start()
        try:
            while True:
                hvd.allreduce_(data, name="weights", op=hvd.Max)
        except hvd.HorovodInternalError as error:
            print(f"heard: {error}", flush=True)
            os.kill(int(pids[1]), signal.SIGKILL)
        """,
        2,
        SIRTAKI_STALL_REPORT="0.5",
        SIRTAKI_STALL_DEADLINE="2",
        SIRTAKI_PROGRESS_DEADLINE="2",
    )
    (line,) = [line for line in ended.stdout.splitlines() if "heard: " in line]
    assert "rank 1 (pid " in line
    assert "'weights'" in line
    assert lines_with(ended, "rank 1 (pid ", "weights"), ended.stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_is_noticed_while_its_loaders_live(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("torch")
    ended = run(
        tmp_path,
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        def outlive(_):  # torch raises in the rank when a signal ends one of its workers
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

        loader = DataLoader(TensorDataset(torch.zeros(10_000, 1)), num_workers=2, worker_init_fn=outlive)
        try:
            for step, _ in enumerate(loader):
                if hvd.rank() == 1 and step == 20:
                    os.kill(os.getpid(), signal.SIGKILL)
                hvd.allreduce(1.0, name="loss")
        except hvd.PeerLostError as error:
            print(f"heard: {error}", flush=True)
            os._exit(1)
        """,
        ranks,
    )
    assert ended.returncode == 128 + 9, ended
    heard = [line for line in ended.stdout.splitlines() if "heard: " in line]
    assert len(heard) == ranks - 1, ended
    assert all("rank 1 (pid " in line and "was lost" in line for line in heard)


def test_nothing_is_left_of_a_world(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        hvd.shutdown()
        def facts():
            return (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")),
                    sum("sirtaki" in line and "memfd" in line for line in open("/proc/self/maps")))
        before = facts()
        for _ in range(5):
            hvd.init()
            hvd.allreduce(np.ones(1000), name="x")
            hvd.join()
            hvd.shutdown()
        assert facts() == before, (before, facts())
        """,
        3,
    )
    assert ended.returncode == 0, ended


def test_nothing_is_left_of_a_killed_job(tmp_path: Path) -> None:
    folder = tmp_path / "folder"  # other tests run at the same time
    folder.mkdir()
    ended = run(
        tmp_path,
        """
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        print("pid", os.getpid(), os.environ["TMPDIR"], flush=True)
        time.sleep(60)
        """,
        3,
        TMPDIR=str(folder),
    )
    assert ended.returncode == 128 + 9, ended
    assert str(folder) in ended.stdout
    for pid in re.findall(r"pid (\d+) ", ended.stdout):
        assert not Path("/proc", pid).exists()
    assert list(folder.iterdir()) == []
    assert not [name for name in os.listdir("/dev/shm") if "sirtaki" in name]


def test_an_environment_that_outlived_its_job_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sirtaki.numpy as hvd\nhvd.init()\n")
    stale = {
        "SIRTAKI_RANK": "1",
        "SIRTAKI_SIZE": "2",
        "SIRTAKI_JOB": "0123456789abcdef",
        "SIRTAKI_RENDEZVOUS": "unix:@sirtaki-0123456789abcdef",
        "SIRTAKI_START_TIMEOUT": "1",
    }
    environment = {**os.environ, **stale}
    command = [sys.executable, script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert ended.returncode == 1
    message = ended.stderr.splitlines()[-1]
    assert "SIRTAKI_RENDEZVOUS" in message or "hvdrun" in message, message
