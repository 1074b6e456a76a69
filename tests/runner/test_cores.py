"""The number of cores that a job may use, and its distribution over the ranks."""

from __future__ import annotations

import os
from pathlib import Path

from sirtaki.runner.launch.capacity import count_gpus, usable_cores
from sirtaki.runner.launch.environment import thread_counts


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_affinity_counts() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= usable_cores() <= len(before)


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
