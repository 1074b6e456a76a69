"""Trains on two ranks, of which one dies while the other computes, and goes on computing for a second.

Usage: late_leaver.py FOLDER; the ranks write files there, so that each knows where the other one is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import sirtaki.numpy as hvd

WORKER = os.environ.get("SIRTAKI_WORKER", "0")
FOLDER = Path(sys.argv[1])
SECONDS = 1.0  # from the death of the other rank to the end of the computation


def wait_for(file: Path) -> str:
    while not file.exists():
        time.sleep(0.01)
    return file.read_text()


def is_alive(process: int) -> bool:
    """Returns whether hvdrun has not collected the process yet."""
    return Path(f"/proc/{process}").exists()


def arrive() -> None:
    """Writes this rank's process, when it has committed the first step."""
    written = FOLDER / f"{WORKER}.part"
    written.write_text(str(os.getpid()))
    written.rename(FOLDER / WORKER)


def compute_beyond_the_death() -> None:
    arrive()
    other = int(wait_for(FOLDER / "1"))
    while is_alive(other):
        time.sleep(0.01)
    time.sleep(SECONDS)


def die_while_the_other_computes() -> None:
    arrive()
    wait_for(FOLDER / "0")
    os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state: Any) -> None:
    while state.step < 3:
        hvd.allreduce(np.ones(4), name="gradient")
        state.step += 1
        state.commit()
        if state.step == 1:
            {"0": compute_beyond_the_death, "1": die_while_the_other_computes}[WORKER]()


def main() -> None:
    hvd.init()
    train(hvd.elastic.ObjectState(step=0))
    print("RESULT " + json.dumps({"worker": int(WORKER), "changes": hvd.stats()["changes"]}), flush=True)


if __name__ == "__main__":
    main()
