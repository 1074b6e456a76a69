"""Searches for the key of a running job in places where it must not be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Rank 1 fails once the test has searched, so that everything is written that a failed job leaves behind.
SCRIPT = """
import os, pathlib, sys, time
import sirtaki.numpy as hvd
import numpy as np

hvd.init()
hvd.allreduce(np.ones(4), name="first")
folder = pathlib.Path(sys.argv[1])
(folder / f"ready{hvd.rank()}").write_text(os.environ["SIRTAKI_KEY_FILE"])
while not (folder / "go").exists():
    time.sleep(0.01)
if hvd.rank() == 1:
    raise ValueError("enough")
hvd.allreduce(np.ones(4), name="second")
"""


def secrets_in(data: bytes, key: bytes) -> bool:
    """Returns whether the data contains the key, as bytes or as digits of either case."""
    return key in data or key.hex().encode() in data.lower()


def processes() -> Iterator[tuple[Path, bytes]]:
    """Returns what every user may read of each process on this machine, and what its owner may read."""
    for folder in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ", "comm"):
            try:
                yield folder / name, (folder / name).read_bytes()
            except OSError:  # the process has just ended, or is another user's
                continue
