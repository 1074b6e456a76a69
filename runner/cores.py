"""How many cores this process may really use: what its affinity allows, and its control groups' quotas; how
many GPUs there are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """The number of cores, at least 1. `root` is where proc and sys are looked for."""
    cores = float(len(os.sched_getaffinity(0)))
    return max(1, int(min([cores, *_quotas(root)])))


def count_gpus(root: Path = Path("/")) -> int:
    """How many GPUs of NVIDIA this host has."""
    return sum(1 for device in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", device.name))


def _quotas(root: Path) -> Iterator[float]:
    """The quotas, in cores, of the control groups that this process is in, parents included."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers == "":
            folder = mount
        elif "cpu" in controllers.split(","):
            folder = mount / "cpu"
        else:
            continue
        inside = (folder / path.lstrip("/")).resolve()
        for group in [inside, *inside.parents]:
            if (quota := _quota(group)) is not None:
                yield quota


def _quota(group: Path) -> float | None:
    """A control group's quota in cores, as version 2 or version 1 writes it; None without one."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return None
