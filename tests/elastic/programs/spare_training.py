"""Trains a state that holds an object of this program's own class, until a file says that it may end.

Usage: spare_training.py FOLDER; each process that runs this program leaves a file there, named by its pid.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import sirtaki.numpy as hvd

FOLDER = Path(sys.argv[1])
(FOLDER / f"ran-{os.getpid()}").touch()


class Count:
    """Counts steps, in a class that only this program defines."""

    def __init__(self) -> None:
        self.steps = 0


@hvd.elastic.run
def train(state: Any) -> None:
    is_over = False
    while not is_over:
        own = np.array([(FOLDER / "end").exists() and hvd.size() == 2], np.float32)
        is_over = bool(hvd.allreduce(own, op=hvd.Sum, name="end")[0] > 0)
        state.count.steps += 1
        state.commit()
        time.sleep(0.01)


if __name__ == "__main__":
    hvd.init()
    state = hvd.elastic.ObjectState(count=Count())
    train(state)
    assert type(pickle.loads(pickle.dumps(Count()))) is Count
    result = {"pid": os.getpid(), "steps": state.count.steps, "worker": os.environ["SIRTAKI_WORKER"]}
    print("RESULT " + json.dumps(result), flush=True)
