"""Exchanges among process sets on ranks that may be lost or join, and reports what it saw.

One set is added before the training (ranks 1 and 2 of the first generation), and one in it (the even ranks).
In each generation, each rank reports the sums of its sets' worker numbers, or the error that names what has
become of a set. With HOLD=STEP:SIZE the training waits at that step until the world has that size.

Usage: process_sets.py STEPS [FAULT...]; a fault is WORKER:PLACE:STEP, and the place is "step" or
"other": the rank adds another set before the training. With REMOVE=STEP all ranks remove the first set there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import numpy as np
from replayed import hold

import sirtaki.numpy as hvd

STEPS = int(sys.argv[1])
WORKER = int(os.environ["SIRTAKI_WORKER"])
FAULTS = {tuple(fault.split(":")) for fault in sys.argv[2:]}
SEEN: list[dict[str, Any]] = []


def is_planned(place: str, step: int) -> bool:
    return (str(WORKER), place, str(step)) in FAULTS


def sum_in(process_set: Any, name: str) -> Any:
    """Returns the sum of the members' worker numbers; None on other ranks; a text if it cannot be used."""
    try:
        if not process_set.included():
            return None
        own = np.array([WORKER, 1], np.int64)
        return [int(value) for value in hvd.allreduce(own, op=hvd.Sum, name=name, process_set=process_set)]
    except ValueError as error:
        return str(error)


@hvd.elastic.run
def train(state: Any, following: Any) -> None:
    if "TIMELINE" in os.environ:
        hvd.start_timeline(os.environ["TIMELINE"])
    evens = hvd.add_process_set(range(0, hvd.size(), 2))
    while state.step < STEPS:
        hold(state, hvd.size)
        if is_planned("step", state.step):
            os.kill(os.getpid(), signal.SIGKILL)
        seen = {
            "workers": [int(one) for one in hvd.allgather(np.array([WORKER]), name="workers")],
            "rank": hvd.rank(),
            "following": sum_in(following, "following"),
            "following_ranks": following.ranks,
            "evens": sum_in(evens, "evens"),
            "evens_id": evens.process_set_id,
        }
        if not SEEN or SEEN[-1] != seen:
            SEEN.append(seen)
        if os.environ.get("REMOVE") == str(state.step):
            hvd.remove_process_set(following)
        state.step += 1
        state.commit()


def main() -> None:
    hvd.init()
    following = hvd.ProcessSet([1, 2] if not is_planned("other", 0) else [0, 2])
    hvd.add_process_set(following)
    before = []
    for question in (following.included, following.size, following.rank):
        try:
            question()
        except hvd.HorovodInternalError as error:
            before.append(str(error))
    train(hvd.elastic.ObjectState(step=0), following)
    changes = hvd.stats()["changes"]
    result = {"worker": WORKER, "before": before, "seen": SEEN, "changes": changes}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
