"""The tuner of a job: it measures the steps of rank 0, and changes settings for all ranks.

Every rank changes a setting with the same Decision of the coordinator, in the order of plans. So ranks need
no further agreement, and only rank 0 has a tuner.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from statistics import median

from sirtaki.bindings import live_settings
from sirtaki.bindings.context import Context
from sirtaki.bindings.step_counters import Stepper
from sirtaki.common.autotune import first_steps
from sirtaki.common.autotune.candidates import TUNED, candidates
from sirtaki.common.autotune.model import Counts, describe, judge, measure
from sirtaki.common.autotune.record import Log, paragraph
from sirtaki.common.autotune.search import Change, Findings, LeftOut, Settings, search

_FIRST_STEPS = 10  # that are in no block: programs and caches warm up
_UNUSUAL_STEPS = 3  # of these: they also compare parameters, and the model does not know them
_BLOCK_STEPS = 5  # measured in a block; a step with an evaluation or a checkpoint does not move their median
_UNUSED = (
    "autotune has measured nothing, and changed nothing: no distributed optimizer of all ranks has taken "
    f"more than {_FIRST_STEPS} steps; those inside tf.function cannot be measured, and those inside jax.jit "
    "only if one optimizer takes all steps"
)
_COMPILED = Stepper("steps of a compiled program")


class Tuner:
    """Measures steps, block by block, and applies what the search asks for.

    The first step of a block is not measured: it may still have used the settings of the last one.
    """

    def __init__(self, context: Context, clock: Callable[[], float] = time.perf_counter) -> None:
        """Creates it; reports the result to standard error, at the latest when the world is shut down.

        Args:
            context: rank 0 of a world with the setting autotune.
            clock: returns seconds.

        Raises:
            ValueError: the file of autotune_log cannot be written.
        """
        self.findings: Findings | None = None  # until the first steps are over
        self.has_ended = threading.Event()
        self._lock = threading.RLock()
        self._context, self._clock = weakref.ref(context), clock
        self._chunk_bytes = context.setting("chunk_bytes")
        self._log = Log(context.setting("autotune_log"), TUNED)
        self._optimizer: Stepper | None = None  # the one whose steps count
        self._steps, self._last_end = 0, clock()
        self._tuning = self._tune()
        next(self._tuning)
        context.steps.listener = self.stepped
        context.shutdown_callbacks.append(self._end)

    @property
    def is_over(self) -> bool:
        """Returns whether it changes nothing any more."""
        return self.has_ended.is_set()

    @property
    def needed(self) -> int:
        """Returns the number of measured steps before it changes settings next."""
        return _FIRST_STEPS if self.findings is None else _BLOCK_STEPS

    def stepped(self, optimizer: Stepper) -> None:
        """Records the end of a step of an optimizer. Only steps of the first one count."""
        with self._lock:
            self._optimizer = self._optimizer or optimizer
            if self.is_over or optimizer != self._optimizer:
                return
            now = self._clock()
            took, self._last_end = now - self._last_end, now
            self._steps += 1
            self._record([took])

    def compiled_steps_ended(self, number: int, seconds: Sequence[float]) -> bool:
        """Records the `needed` last steps of a compiled program, of which there were `number`.

        Returns whether it wants more: neither it nor the steps of another optimizer have ended that.
        """
        with self._lock:
            self._optimizer = self._optimizer or _COMPILED
            if self.is_over or self._optimizer != _COMPILED:
                return False
            self._steps = number
            self._record(seconds if self.findings is None else [0.0, *seconds])
            return not self.is_over

    def give_up(self) -> None:
        """Ends with what is proven, because steps of a compiled program mix with others."""
        with self._lock:
            if not self.is_over and self.findings is not None:
                self._use(self.findings.kept)
                self._end()

    def _record(self, seconds: Sequence[float]) -> None:
        """Passes durations of steps to the search."""
        try:
            for took in seconds:
                self._tuning.send(took)
        except StopIteration:
            self._end()

    def _tune(self) -> Generator[None, float, None]:
        """Runs the search. Is sent the duration of each step, in seconds, when it ends."""
        for _ in range(_UNUSUAL_STEPS):
            yield
        counts, times = [self._counts()], []
        for _ in range(_FIRST_STEPS - _UNUSUAL_STEPS):
            times.append((yield))
            counts.append(self._counts())
        start = self._in_use()
        self.findings = Findings(start, start)
        blocks = search(self.findings, self._select(self.findings, counts, times))
        with suppress(StopIteration):
            block = next(blocks)
            while True:
                self._use(block.settings)
                yield
                times = []
                for _ in range(_BLOCK_STEPS):
                    times.append((yield))
                self._log.block(self._steps, block, median(times))
                block = blocks.send(median(times))
        self._use(self.findings.kept)

    def _select(self, findings: Findings, counts: Sequence[Counts], seconds: Sequence[float]) -> list[Change]:
        """Returns the changes to be tried, in their order, and records why the others are not."""
        context, optimizer = self._context(), self._optimizer
        assert context is not None
        assert optimizer is not None
        changes = candidates(findings.start, optimizer.hands_over)
        if optimizer == _COMPILED:  # the counters have gone on since these steps
            return changes
        job, measures = first_steps.job_of(context, optimizer), measure(counts, seconds)
        if job is None or measures is None:
            return changes
        judgements = judge(measures, job, findings.start, changes)
        findings.measured = describe(measures)
        findings.left_out = [LeftOut(one.change, one.reason) for one in judgements if one.reason]
        self._log.model(self._steps, findings, median(seconds))
        return [one.change for one in judgements if not one.reason]

    def _counts(self) -> Counts:
        context = self._context()
        assert context is not None
        return first_steps.read(context)

    def _in_use(self) -> Settings:
        context = self._context()
        assert context is not None
        return {name: live_settings.in_use(context, name) for name in TUNED}

    def _use(self, settings: Settings) -> None:
        context = self._context()
        assert context is not None
        for name, value in settings.items():
            live_settings.change(context, name, value)

    def _to_load(self, findings: Findings) -> Settings:
        """Returns the settings with which another job starts with the result.

        An unchanged size of chunks is that of the settings, which may be 0: each host then has its own.
        """
        if findings.kept["chunk_bytes"] != findings.start["chunk_bytes"]:
            return findings.kept
        return {**findings.kept, "chunk_bytes": self._chunk_bytes}

    def _end(self) -> None:
        """Reports the result, once."""
        with self._lock:
            if self.is_over:
                return
            self.has_ended.set()
            self._tuning.close()
            self._report()

    def _report(self) -> None:
        if self.findings is None:
            self._log.close(self._steps, None)
            text = f"{_UNUSED}."
        else:
            self._log.close(self._steps, self._to_load(self.findings))
            text = paragraph(self.findings, self._steps)
        sys.stderr.write(f"sirtaki: {text}\n")
