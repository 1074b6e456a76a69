"""How many cores this process may really use, and how many GPUs there are."""

from __future__ import annotations

import re
from pathlib import Path

from sirtaki._core.library import usable_cores

__all__ = ["count_gpus", "usable_cores"]


def count_gpus(root: Path = Path("/")) -> int:
    """How many GPUs of NVIDIA this host has."""
    return sum(1 for device in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", device.name))
