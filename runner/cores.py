"""How many cores this process may really use, and how many GPUs there are."""

from __future__ import annotations

import re
from pathlib import Path


def usable_cores() -> int:
    """The number of cores that affinity and control groups leave to this process, at least 1."""
    from sirtaki._core import library  # not before a host has said which version it has

    return library.usable_cores()


def count_gpus(root: Path = Path("/")) -> int:
    """How many GPUs of NVIDIA this host has."""
    return sum(1 for device in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", device.name))
