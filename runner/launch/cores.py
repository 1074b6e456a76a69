"""The number of cores that this process may use, and the number of GPUs."""

from __future__ import annotations

import re
from pathlib import Path


def usable_cores() -> int:
    """Returns the number of cores that affinity and control groups leave to this process, at least 1."""
    from sirtaki.bindings import library  # imported late, because the host has to report its version first

    return library.usable_cores()


def count_gpus(root: Path = Path("/")) -> int:
    """Returns the number of NVIDIA GPUs on this host."""
    return sum(1 for device in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", device.name))
