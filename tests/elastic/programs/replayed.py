"""The parts that trainings with a replay have in common: samples, the pace of steps, and results.

The environment sets the pace: with TALK each step is printed, PAUSE is the mean of random pauses in seconds:
before and after each commit, and between the write of a step and a further exchange; and with HOLD=STEP:SIZE
the training waits at that step until the world has that size. With FAULT=WORKER:STEP that worker kills itself
after the commit of that step.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

FEATURES = 6
PAUSE = float(os.environ.get("PAUSE", "0"))
HOLD_STEP, HOLD_SIZE = map(int, os.environ.get("HOLD", "0:0").split(":"))
Steps = list[tuple[int, list[int]]]  # for each step its epoch and the samples of all ranks


def regression(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the samples of a regression and their targets, the same in every process."""
    x = np.random.default_rng(3).standard_normal((samples, FEATURES))
    return x, np.sin(x).sum(1, keepdims=True)


def weights(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Returns the first values of parameters, the same in every process."""
    source = np.random.default_rng(1)
    return [source.standard_normal(shape) * 0.3 for shape in shapes]


def next_samples(steps: Steps, samples: int, size: int) -> tuple[int, list[int]]:
    """Returns the epoch and the samples of the next step, one for each rank while there are enough."""
    epoch = steps[-1][0] if steps else 0
    done = sum(len(taken) for one, taken in steps if one == epoch)
    if done == samples:
        epoch, done = epoch + 1, 0
    order = np.random.default_rng((5, epoch)).permutation(samples)
    return epoch, order[done : done + size].tolist()


def own_part(taken: Sequence[int], rank: int, size: int) -> tuple[list[int], list[float]]:
    """Returns this rank's sample and its weight, with which the average over the ranks is that of samples."""
    if rank < len(taken):
        return [taken[rank]], [size / len(taken)]
    return [taken[0]], [0.0]


def equal_parts(taken: Sequence[int]) -> tuple[list[int], list[float]]:
    """Returns the samples of a step and their weights in one process."""
    return list(taken), [1.0 / len(taken)] * len(taken)


def merge(gathered: Sequence[Sequence[int]]) -> list[int]:
    """Returns the samples of all ranks."""
    return [one for part in gathered for one in part]


def hold(state: Any, size: Callable[[], int]) -> None:
    """Waits until the world is large enough, if this is the step at which a test wants that."""
    while state.step == HOLD_STEP and size() < HOLD_SIZE:
        time.sleep(0.01)
        state.check_host_updates()


def pause() -> None:
    """Pauses for a random time: ranks are then at different places of a step, or wait for one that pauses."""
    time.sleep(random.uniform(0.0, 2.0 * PAUSE))


def pace(step: int) -> None:
    """Prints the number of steps done or ends this process, if a test wants that, and pauses."""
    if os.environ.get("FAULT") == f"{os.environ['SIRTAKI_WORKER']}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)
    if "TALK" in os.environ:
        print("step", step, flush=True)
    pause()


def report(steps: Steps, found: Sequence[Any], expected: Sequence[Any], size: int) -> None:
    """Prints the result: the steps, and how far the parameters are from those of a replay."""
    arrays, replayed = [list(map(np.asarray, one)) for one in (found, expected)]
    result = {
        "worker": int(os.environ["SIRTAKI_WORKER"]),
        "size": size,
        "difference": max(_differences(arrays, replayed)),
        "digest": hashlib.sha256(b"".join(one.tobytes() for one in arrays)).hexdigest(),
        "steps": steps,
    }
    print("RESULT " + json.dumps(result), flush=True)


def _differences(arrays: Sequence[np.ndarray], replayed: Sequence[np.ndarray]) -> Iterator[float]:
    for one, other in zip(arrays, replayed, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype == np.float64
        yield float(np.abs(one - other).max())
