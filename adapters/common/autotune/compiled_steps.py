"""Steps inside compiled programs, which end without Python: a thread of rank 0 looks at the core's counters.

A block of them begins with the step after the one that runs when settings change, and lasts until enough have
ended. The thread may be late: then further steps with the same settings end before the block does.
"""

from __future__ import annotations

import threading

from sirtaki.bindings.step_counters import StepCounters
from sirtaki.common.autotune.tuner import Tuner

_LEAST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05  # seconds between two looks


class CompiledSteps:
    """Passes the tuner the steps of the only optimizer of a program, if they end in compiled code."""

    def __init__(self, steps: StepCounters, tuner: Tuner) -> None:
        self._steps, self._tuner = steps, tuner
        self._target = tuner.needed
        self._optimizer = 0  # the number of the optimizer, once its steps have been passed

    def start(self) -> None:
        """Starts the thread, which ends with the tuner."""
        threading.Thread(target=self._watch, name="sirtaki-autotune", daemon=True).start()

    def _watch(self) -> None:
        pause = _LEAST_PAUSE
        while not self._tuner.has_ended.wait(pause):
            found = self.look()
            if found is None:
                return
            pause = min(max(found, _LEAST_PAUSE), _LONGEST_PAUSE)

    def look(self) -> float | None:
        """Looks once. Returns the seconds until the next look is worthwhile; None: no look is any more."""
        counted = self._steps.read()
        if not counted.number:
            return _LONGEST_PAUSE
        if not counted.by or (self._optimizer and counted.by != self._optimizer):
            if self._optimizer:
                self._tuner.give_up()
            return None
        missing = self._target - counted.number
        if missing > 0:
            return float(missing * counted.last)
        self._optimizer = counted.by
        latest = list(counted.latest)[-self._tuner.needed :]
        if not self._tuner.compiled_steps_ended(counted.number, latest):
            return None
        self._target = self._steps.read().number + 1 + self._tuner.needed
        return _LEAST_PAUSE
