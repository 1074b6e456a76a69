"""Trains a state that holds an object of this program's own class, until a file says that it may end.

Usage: spare_training.py FOLDER SIZE; each process that runs this program leaves a file in the folder, named
by its pid. The training ends when the file `end` is there, and the world has that size.
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
from small_training import WIDTH, SmallTraining

import sirtaki.numpy as hvd

FOLDER, SIZE = Path(sys.argv[1]), int(sys.argv[2])
SAMPLES = 20_000  # more than are used
(FOLDER / f"ran-{os.getpid()}").touch()


class Count:
    """Counts steps, in a class that only this program defines."""

    def __init__(self) -> None:
        self.steps = 0


@hvd.elastic.run
def train(state: Any, training: SmallTraining) -> None:
    is_over = False
    while not is_over:
        own = np.array([(FOLDER / "end").exists() and hvd.size() == SIZE], np.float32)
        is_over = bool(hvd.allreduce(own, op=hvd.Sum, name="end")[0] > 0)
        gradient = training.gradient(state.w, sum(state.sizes) + hvd.rank())
        total = hvd.allreduce(gradient, op=hvd.Sum, name="gradient")
        state.w = training.step(state.w, total, hvd.size())
        state.sizes = [*state.sizes, hvd.size()]
        state.count.steps += 1
        state.commit()
        time.sleep(0.01)


if __name__ == "__main__":
    hvd.init()
    state = hvd.elastic.ObjectState(count=Count(), w=np.zeros(WIDTH, np.float32), sizes=[])
    train(state, SmallTraining(SAMPLES))
    assert type(pickle.loads(pickle.dumps(Count()))) is Count
    result = {
        "pid": os.getpid(),
        "worker": os.environ["SIRTAKI_WORKER"],
        "steps": state.count.steps,
        "w": [float(value) for value in state.w],
        "sizes": state.sizes,
    }
    print("RESULT " + json.dumps(result), flush=True)
