"""How many cores a job may use, and how its ranks share them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sirtaki.runner.cores import count_gpus, usable_cores
from sirtaki.runner.environment import thread_counts


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_affinity_alone(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/not/visible\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, 8),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/job\n1:memory:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
    ids=["v2", "less than one", "no quota", "of a parent", "hidden path", "nonsense", "v1", "v1 without"],
)
def test_the_quota_of_a_control_group(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    write(tmp_path, files)
    assert usable_cores(tmp_path) == cores


def test_threads_share_the_cores() -> None:
    expected = {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4"}
    assert thread_counts(2, 8, {}) == expected
    assert set(thread_counts(16, 8, {}).values()) == {"1"}


def test_what_the_user_has_set_stands() -> None:
    assert thread_counts(2, 8, {"OMP_NUM_THREADS": "3"}) == {}
    assert thread_counts(2, 8, {"MKL_NUM_THREADS": "3"}) == {
        "OMP_NUM_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "4",
    }


def test_gpus_are_counted(tmp_path: Path) -> None:
    assert count_gpus(tmp_path) == 0
    write(
        tmp_path,
        {f"dev/{name}": "" for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null")},
    )
    assert count_gpus(tmp_path) == 3
