"""Trains `SmallTraining` on ranks that may be lost or join, and dies where a test says so.

Usage: numpy_training.py SAMPLES SECONDS [FAULT...]; SECONDS is the pause after a step, and a fault is
WORKER:PLACE:STEP, where the place may begin with stop-, raise-, exit-, fail-, vanish-, orphan-, term-
or clean- instead of a kill.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
from replayed import hold, pace, pause
from small_training import WIDTH, SmallTraining

import sirtaki.numpy as hvd

SAMPLES, SECONDS = int(sys.argv[1]), float(sys.argv[2])
WORKER = os.environ.get("SIRTAKI_WORKER", "0")
CALLS: list[str] = []  # see `record_calls`
_HELD_SECONDS = 5.0  # for the end of a child that was killed
STARTS: list[int] = []  # the steps at which this process has begun
FAULTS = {tuple(fault.split(":")) for fault in sys.argv[3:]}


def fail_if_planned(place: str, step: int) -> None:
    """Carries out a fault that is planned for this worker, at this place and step."""
    if (WORKER, place, str(step)) in FAULTS:
        os.kill(os.getpid(), signal.SIGKILL)
    if (WORKER, f"stop-{place}", str(step)) in FAULTS:
        os.kill(os.getpid(), signal.SIGSTOP)
    if (WORKER, f"raise-{place}", str(step)) in FAULTS:
        raise RuntimeError("a planned mistake")
    if (WORKER, f"exit-{place}", str(step)) in FAULTS:
        sys.exit(0)
    if (WORKER, f"fail-{place}", str(step)) in FAULTS:
        sys.exit(3)
    if (WORKER, f"vanish-{place}", str(step)) in FAULTS:
        os._exit(0)
    if (WORKER, f"orphan-{place}", str(step)) in FAULTS:
        with open(os.environ["HELD_FILE"]) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # of this open file, which the child keeps
            subprocess.Popen(["sleep", "60"], pass_fds=[file.fileno()])
            os._exit(0)
    if (WORKER, f"term-{place}", str(step)) in FAULTS:
        os.kill(os.getpid(), signal.SIGTERM)
    if (WORKER, f"clean-{place}", str(step)) in FAULTS:  # as a program that cleans temporary files
        os.unlink(os.environ["SIRTAKI_KEY_FILE"])
    if (WORKER, f"child-{place}", str(step)) in FAULTS:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        child.start()
        child.terminate()
        child.join()


def fail_during_recoveries(state: Any) -> None:
    """Makes the worker fail while it links, or while it receives the state, in its N-th generation."""
    from sirtaki.bindings.bootstrap.world_builder import WorldBuilder

    counts = {"link": 0, "receive": 0}

    def counted(place: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[place] += 1
            fail_if_planned(place, counts[place])
            return function(*arguments, **options)

        return call

    WorldBuilder._link = counted("link", WorldBuilder._link)  # type: ignore[method-assign]
    state.receive = counted("receive", state.receive)


def record_calls(state: Any) -> None:
    """Records when this worker asks for a place, and when it returns to the last commit."""
    from sirtaki.bindings.bootstrap.elastic.worker import ElasticWorker

    def recorded(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            CALLS.append(name)
            return function(*arguments)

        return call

    ElasticWorker.enlist = recorded("enlist", ElasticWorker.enlist)  # type: ignore[method-assign]
    state.restore = recorded("restore", state.restore)


def check_not_held(path: str) -> None:
    """Raises RuntimeError if a child that a lost rank has left behind still lives."""
    until = time.monotonic() + _HELD_SECONDS
    with open(path) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:  # a rank that has just been killed, or another one that checks
                if time.monotonic() > until:
                    raise RuntimeError("the child of a lost rank lives") from None
                time.sleep(0.01)


@hvd.elastic.run
def train(state: Any, training: SmallTraining) -> None:
    STARTS.append(state.step)
    while (done := sum(state.sizes)) < training.samples:
        hold(state, hvd.size)
        fail_if_planned("step", state.step)
        own = training.gradient(state.w, done + hvd.rank())
        try:
            total = hvd.allreduce(own, op=hvd.Sum, name="gradient")
        except hvd.HorovodInternalError:
            if "SWALLOW" not in os.environ:
                raise
            total = own  # wrong, and must not become a commit
        fail_if_planned("exchanged", state.step)
        count = min(hvd.size(), training.samples - done)
        state.w = training.step(state.w, total, count)
        state.sizes = [*state.sizes, count]
        state.step += 1
        if "FENCE" in os.environ:
            hvd.elastic.fence()
        fail_if_planned("written", state.step)
        pause()
        state.commit()
        fail_if_planned("committed", state.step)
        pace(state.step)
        time.sleep(SECONDS)


def main() -> None:
    fail_if_planned("import", 0)
    hvd.init()
    fail_if_planned("init", 0)
    state = hvd.elastic.ObjectState(step=0, w=np.zeros(WIDTH, np.float32), sizes=[])
    fail_during_recoveries(state)
    record_calls(state)
    state.register_reset_callbacks([lambda: fail_if_planned("reset", 0)])
    if "RESET" in os.environ:
        state.register_reset_callbacks([lambda: hvd.allreduce(np.ones(1), name="reset")])
    if "CHECKPOINTS" in os.environ:
        state.keep_checkpoints(os.environ["CHECKPOINTS"], every=int(os.environ["EVERY"]))
    train(state, SmallTraining(SAMPLES))
    fail_if_planned("end", 0)
    if "HELD_FILE" in os.environ:
        check_not_held(os.environ["HELD_FILE"])
    if "FENCE" in os.environ:
        hvd.elastic.fence()
    if (WORKER, "slow-end", "0") in FAULTS:
        time.sleep(1.0)
    result = {
        "worker": int(WORKER),
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local_rank": hvd.local_rank(),
        "w": [float(value) for value in state.w],
        "sizes": state.sizes,
        "started_at": STARTS[0],
        "calls": CALLS,
        "changes": hvd.stats()["changes"],
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    if "CATCHES" in os.environ:
        with contextlib.suppress(RuntimeError):
            main()
    else:
        main()
