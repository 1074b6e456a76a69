"""Steps inside compiled programs, which end without Python: a thread of rank 0 looks at the core's counters.

A block of them begins with the step after the one that runs when settings change, and lasts until enough have
ended. Settings travel with the next Decision that says anything, which may be that of this step: then it was
submitted with those before, and the median leaves it out. The thread may be late: then further steps with the
same settings end before the block does. Blocks end an even number of steps after each other: else the medians
of two would differ where steps of two lengths take turns, such as the two steps of a program.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.common.autotune.tuner import Tuner

_LEAST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05  # seconds between two looks
_UNMEASURABLE = "its steps could not be measured any more"  # why a search ends
_LONGEST_END = 5.0  # seconds; a look takes less than one of them


class CompiledSteps:
    """Passes the tuner the steps of the first optimizer that ends them in compiled programs."""

    def __init__(self, context: Context, tuner: Tuner) -> None:
        self._context, self._tuner = weakref.ref(context), tuner
        self._target = tuner.needed
        self._optimizer = 0  # the number of the optimizer whose steps count
        self._thread = threading.Thread(target=self._watch, name="sirtaki-autotune", daemon=True)

    def start(self) -> None:
        """Starts the thread, which ends with the tuner, or with the context."""
        context = self._context()
        assert context is not None
        self._thread.start()
        context.shutdown_callbacks.append(self._join)  # after that which ends the tuner

    def _join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(_LONGEST_END)

    def _watch(self) -> None:
        pause = _LEAST_PAUSE
        while not self._tuner.has_ended.wait(pause):
            try:
                found = self.look()
            except HorovodInternalError:  # the world has failed, which the program is told by its operations
                return
            except BaseException:
                with suppress(HorovodInternalError):
                    self._tuner.compiled_steps_stopped(_UNMEASURABLE)  # no setting on trial stays
                raise
            if found is None:
                return
            pause = min(max(found, _LEAST_PAUSE), _LONGEST_PAUSE)

    def look(self) -> float | None:
        """Looks once. Returns the seconds until the next look is worthwhile; None: no look is any more."""
        context = self._context()
        if context is None or self._tuner.is_over:
            return None
        counted = context.steps.read()
        if counted.optimizer != self._optimizer:
            if self._optimizer:
                self._tuner.compiled_steps_stopped()
            self._optimizer, self._target = counted.optimizer, self._tuner.needed
        if not counted.optimizer:
            return _LONGEST_PAUSE
        beyond, latest = counted.optimizer_steps - self._target, list(counted.latest)
        if beyond < 0:
            return float(-beyond * latest[-1])
        number = self._target + beyond // 2 * 2
        latest = latest[: len(latest) - beyond % 2]
        if not self._tuner.compiled_steps_ended(counted.optimizer, number, latest):
            return None
        first = context.steps.read().optimizer_steps + 1
        self._target = first + self._tuner.needed
        self._target += (self._target - number) % 2
        return _LEAST_PAUSE
