"""The tuner of a job: it measures the steps of rank 0, and changes settings for all ranks.

Every rank changes a setting with the same Decision of the coordinator, in the order of plans. So ranks need
no further agreement, and only rank 0 has a tuner.
"""

from __future__ import annotations

import csv
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from statistics import median
from typing import IO

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.bindings.library import change_setting, setting_in_use, usable_cores
from sirtaki.bindings.observing.observe import statistics
from sirtaki.bindings.observing.step_counters import Stepper
from sirtaki.common.autotune.model import TUNED, Counts, TunedJob, candidates, describe, judge, measure
from sirtaki.common.autotune.search import (
    MARGIN,
    PROOF_PAIRS,
    PROOF_WINS,
    Block,
    Findings,
    Judgement,
    SettingChange,
    Settings,
    search,
)

_FIRST_STEPS = 10  # that are in no block: programs and caches warm up
_UNUSUAL_STEPS = 3  # of these: they also compare parameters, and the model does not know them
_BLOCK_STEPS = 5  # measured in a block; a step with an evaluation or a checkpoint does not move their median
_MOST_OTHERS = 1000  # steps of other optimizers, as OptimizerSteps::most_others of the core
_UNUSED = (
    "autotune has measured nothing, and changed nothing: no distributed optimizer of all ranks has taken "
    f"more than {_FIRST_STEPS} steps that could be measured; those inside tf.function, and those of Keras in "
    "compiled programs, cannot"
)
_TOO_SHORT = "autotune has changed nothing: the training ended before it could compare any change"
_NO_MORE_STEPS = "its optimizer took no more steps"  # why a search ends
_COMPILED = Stepper("steps of a compiled program")  # in the place of any optimizer of one


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
        self._compiled = 0  # its number in the core, if they end in compiled programs
        self._others = 0  # the number of steps of others since its last one
        self._last_end = clock()
        self._begin(None)
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
        """Records the end of a step of an optimizer. Only steps of the first optimizer count."""
        with self._lock:
            self._optimizer = self._optimizer or optimizer
            if self.is_over or (optimizer != self._optimizer and not self._replaces(optimizer)):
                return
            now = self._clock()
            took, self._last_end = now - self._last_end, now
            self._steps += 1
            self._others = 0
            self._record([took])

    def compiled_steps_ended(self, optimizer: int, number: int, latest: Sequence[float]) -> bool:
        """Records the `needed` last steps of an optimizer with steps that end in compiled programs.

        Such an optimizer is preferred to an optimizer with steps that Python can time, if that has made fewer
        than the first steps.

        Args:
            optimizer: its number in the core.
            number: the number of its steps.
            latest: the durations of its last steps, or of more than these.

        Returns:
            Whether further steps may count.
        """
        with self._lock:
            if self._optimizer != _COMPILED and self.findings is None:
                self._begin(_COMPILED)
            if self.is_over or (self._optimizer != _COMPILED and not self._replaces(_COMPILED, self.needed)):
                return not self.is_over
            self._steps, self._compiled = number, optimizer
            self._others = 0
            needed = latest[-self.needed :]
            self._record(needed if self.findings is None else [0.0, *needed])
            return not self.is_over

    def compiled_steps_stopped(self, end: str = _NO_MORE_STEPS) -> None:
        """Ends with what is proven if steps of compiled programs count, of which none follow. `end`: why."""
        with self._lock:
            if self._optimizer == _COMPILED:
                self._give_up(end)

    def _begin(self, optimizer: Stepper | None) -> None:
        """Begins with the first steps of an optimizer, of which none has been measured."""
        self._optimizer, self._steps, self._others = optimizer, 0, 0
        self._tuning = self._tune()
        next(self._tuning)

    def _replaces(self, other: Stepper, number: int = 1) -> bool:
        """Notes steps of another optimizer. Returns whether its steps count from now on.

        That is the case if the one before takes no steps any more, and has not taken the first ones.
        """
        context = self._context()
        is_compiled = self._optimizer == _COMPILED
        if is_compiled and context is not None and context.steps.read().optimizer == self._compiled:
            return False  # the core counts for how long
        self._others += number
        if self._others < _MOST_OTHERS:
            return False
        if self.findings is not None:
            self._give_up()
            return False
        self._begin(other)
        return True

    def _give_up(self, end: str = _NO_MORE_STEPS) -> None:
        """Ends with what is proven. `end`: what has happened before all was compared."""
        if not self.is_over and self.findings is not None:
            self.findings.end = end
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
        counts, times = [read(self._world)], []
        for _ in range(_FIRST_STEPS - _UNUSUAL_STEPS):
            times.append((yield))
            counts.append(read(self._world))
        start = {name: setting_in_use(self._world, name) for name in TUNED}
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

    def _select(
        self, findings: Findings, counts: Sequence[Counts], seconds: Sequence[float]
    ) -> list[SettingChange]:
        """Returns the changes to try, in order, and records why other changes are left out."""
        optimizer = self._optimizer
        assert optimizer is not None
        changes = candidates(findings.start, optimizer.hands_over)
        if optimizer == _COMPILED:  # the counters have gone on since these steps
            return changes
        job, measures = job_of(self._world, optimizer), measure(counts, seconds)
        if job is None or measures is None:
            return changes
        judgements = judge(measures, job, findings.start, changes)
        findings.measured = describe(measures)
        findings.left_out = [judgement for judgement in judgements if judgement.reason]
        self._log.model(self._steps, findings, median(seconds))
        return [judgement.change for judgement in judgements if not judgement.reason]

    @property
    def _world(self) -> Context:
        """The world that is tuned, while it takes steps."""
        context = self._context()
        assert context is not None
        return context

    def _use(self, settings: Settings) -> None:
        for name, value in settings.items():
            change_setting(self._world, name, value)

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
        context = self._context()
        if self._optimizer == _COMPILED and context is not None:
            counted = context.steps.read()
            if counted.optimizer == self._compiled:  # others may have followed
                self._steps = counted.optimizer_steps
        if self.findings is None:
            self._log.close(self._steps, None)
            is_short = context is not None and context.steps.read().optimizer_steps >= _FIRST_STEPS
            text = f"{_TOO_SHORT if is_short else _UNUSED}."
        else:
            self._log.close(self._steps, self._to_load(self.findings))
            text = paragraph(self.findings, self._steps)
        sys.stderr.write(f"sirtaki: {text}\n")


# ---- The counters that the model of autotune reads at the ends of the first steps, on rank 0 -----------


_MOST_SETS = 64  # numbers of process sets that are looked up


def read(context: Context) -> Counts:
    """Returns the counters now. Other ranks need not call it."""
    counted = statistics(context)
    routes = {(row["kind"], row["backend"]): row["operations"] for row in counted["by_backend"]}
    return Counts(
        steps=counted["steps"]["count"],
        operations=counted["operations"],
        failed=counted["failed"],
        plans=counted["plans"],
        bytes=counted["bytes"],
        waiting=counted["waiting_seconds"],
        moving=counted["moving_seconds"],
        exposed=counted["steps"]["exposed_seconds"],
        routes=routes,
    )


def job_of(context: Context, optimizer: Stepper) -> TunedJob | None:
    """Returns what is known of a job.

    Returns None if it has process sets: the other ranks may do something in them that rank 0 cannot count.
    """
    if any(_exists(context, number) for number in range(1, _MOST_SETS)):
        return None
    ranks, cores = context.topology.local_size, usable_cores()
    return TunedJob(-(-ranks // cores), optimizer.operations, optimizer.bytes, optimizer.parts)


def _exists(context: Context, process_set: int) -> bool:
    try:
        return bool(context.members(process_set))
    except ValueError:
        return False


# ---- The record of a search: a CSV file, and a paragraph that explains the result ----------------------
# The file has a line for what the first steps have exchanged, one for each change that is left out, and
# one for each block of steps, with the settings and the time of a step. The last line has the verdict
# "kept", and the settings that were kept: `hvdrun --autotune-load` reads these.


KEPT, LEFT_OUT = "kept", "left out"  # verdicts
_begun: set[str] = set()  # the files that this process has written: another world of it appends


class Log:
    """The CSV file. Each line is complete when it is written: a killed job leaves all lines before.

    The worlds of a process follow each other in the same file; the last result counts.
    """

    def __init__(self, path: str, names: Sequence[str]) -> None:
        """Creates or overwrites the file, with columns for the settings of these names; "": writes none. A
        file of an earlier world of this process is continued.

        Raises:
            ValueError: it cannot be written.
        """
        self._file: IO[str] | None = None
        if not path:
            return
        try:
            file = os.path.abspath(path)
            mode = "a" if file in _begun else "w"
            self._file = open(file, mode, newline="", buffering=1)  # noqa: SIM115  # until the search ends
            self._lines = csv.writer(self._file, lineterminator="\n")
            if self._file.tell() == 0:
                self._lines.writerow(["step", "purpose", *names, "step_seconds", "verdict"])
            _begun.add(file)
        except OSError as error:
            raise ValueError(f"autotune_log: cannot write {path}: {error.strerror}") from None

    def block(self, step: int, block: Block, seconds: float) -> None:
        """Records a block of steps that ended with `step`."""
        self._write(step, block.purpose, *block.settings.values(), f"{seconds:.6f}", "")

    def model(self, step: int, findings: Findings, seconds: float) -> None:
        """Records what the steps before `step` have exchanged, and each change that is left out."""
        self._write(step, f"model: {findings.measured}", *findings.start.values(), f"{seconds:.6f}", "")
        for left_out in findings.left_out:
            settings = left_out.change.of(findings.start).values()
            self._write(step, f"{left_out.change}: {left_out.reason}", *settings, "", LEFT_OUT)

    def close(self, step: int, kept: Settings | None) -> None:
        """Records the result, if there is any, and completes the file."""
        if kept is not None:
            self._write(step, "result", *kept.values(), "", KEPT)
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _write(self, *row: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # a full disk is no reason to end a training
                self._lines.writerow(row)


def paragraph(findings: Findings, steps: int) -> str:
    """Explains a search: what was tried, what was kept, and why."""
    sentences = [_extent(findings, steps)]
    if findings.measured:
        sentences.append(f"The first steps exchanged {findings.measured}")
    if findings.left_out:
        sentences.append(_omissions(findings.left_out, len(findings.left_out) + findings.tried))
    kept = {change.setting for change in findings.changes}
    for verdict in findings.verdicts:
        change, share = verdict.change, f"{verdict.ratio:.0%} of the time of those without it"
        if verdict.is_kept and change.setting in kept:
            before = findings.start[change.setting]
            sentences.append(f"Kept {change} (before: {before}): steps took {share}")
        elif verdict.is_kept:
            sentences.append(f"Reverted {change}, although steps took {share} at first")
        else:
            sentences.append(
                f"Not kept: {change}, because steps took {share}, and less in {verdict.wins} of "
                f"{PROOF_PAIRS} comparisons: less than {1 - MARGIN:.0%}, and less in {PROOF_WINS}, would do"
            )
    if findings.whole_ratio is not None:
        sentences.append(f"With all changes, steps took {findings.whole_ratio:.0%} of the time of the start")
    if findings.tried or not findings.left_out:
        sentences.append(_advice(findings.changes))
    return ". ".join(sentences) + "."


def _extent(findings: Findings, steps: int) -> str:
    if findings.left_out and not findings.tried:
        return (
            f"autotune has tried no change of settings, because the first {steps} steps have shown that none "
            f"can make steps faster by {MARGIN:.0%}"
        )
    state = "" if findings.is_finished else f", and {findings.end} before all were compared"
    return (
        f"autotune has tried {findings.tried} changes of settings in {steps} steps, in turns with the "
        f"settings without them{state}"
    )


def _omissions(left_out: Sequence[Judgement], most: int) -> str:
    """Says which changes were left out of `most`, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for rejected in left_out:
        by_reason.setdefault(rejected.reason, []).append(str(rejected.change))
    clauses = [
        f"{', '.join(changes) if len(changes) < most else 'all'}, because {reason}"
        for reason, changes in by_reason.items()
    ]
    return f"{len(left_out)} changes were left out: {'; '.join(clauses)}"


def _advice(kept: Sequence[SettingChange]) -> str:
    if not kept:
        return f"The settings stay as they were: no change made steps faster by {MARGIN:.0%} or more"
    options = " ".join(f"--{change.setting.replace('_', '-')} {change.value}" for change in kept)
    return f"To start with this result: hvdrun {options}, or --autotune-load with the file of --autotune-log"


# ---- The steps of compiled programs --------------------------------------------------------------------
# A block of them begins with the step after the one that runs when settings change, and lasts until enough
# have ended. Settings travel with the next Decision that says anything, which may be that of this step:
# then it was submitted with those before, and the median leaves it out. The thread may be late: then
# further steps with the same settings end before the block does. Blocks end an even number of steps after
# each other: else the medians of two would differ where steps of two lengths take turns, such as the two
# steps of a program.


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
