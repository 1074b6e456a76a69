"""A model of what a step exchanges: it says what each change of a setting could save at most.

It judges by upper bounds, and leaves out of the search what cannot make steps faster by the margin. Whether a
change is kept is decided by the measurements of the search alone. Has no I/O or clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median

from sirtaki.bindings.library import Config
from sirtaki.common.autotune.search import MARGIN, Judgement, SettingChange, Settings

_K, _M = 1 << 10, 1 << 20
# The values that matter. All of these settings can be changed while the ranks run, and none of them changes
# the bits of a sum. A chunk is at most as large as a slot of the shared region, 1 MiB.
_VALUES: dict[str, tuple[str, ...]] = {
    "hand_over": ("early", "late"),
    "chunk_bytes": (f"{128 * _K}", f"{256 * _K}", f"{512 * _K}", f"{_M}"),
    "fusion_threshold": (f"{64 * _M}", f"{4 * _M}"),
    "report_bytes": (f"{_M}", f"{16 * _M}"),
    "report_window": ("0.0003", "0.003"),
    "spin": ("0", "0.0002", "0.002"),
}
TUNED = tuple(_VALUES)


def candidates(start: Mapping[str, str], hands_over: bool = True) -> list[SettingChange]:
    """Returns the changes worth a trial: values that differ from the start.

    The size of a chunk is 0 where the ranks share no memory; then it does not matter. `hands_over`: whether
    the optimizer has a choice when to launch the reduction of gradients.
    """
    return [
        SettingChange(name, value)
        for name, values in _VALUES.items()
        for value in values
        if name != "chunk_bytes" or start[name] != "0"
        if name != "hand_over" or hands_over
        if number_of(name, value) != number_of(name, start[name])
    ]


def number_of(name: str, value: str) -> int:
    """Returns a setting's value as a number: of bytes, of nanoseconds, or of the choice."""
    return Config({name: value}).integer(name)


# ---- The bounds of what a change could save ------------------------------------------------------------

_NANOSECONDS = 1e-9
_WAKE_UP = 1e-4  # seconds after which a rank that sleeps has been woken, at the latest
_SUBMISSION = 2e-4  # seconds that it takes to submit gradients once more, at the latest
_SPARE = 2  # times the bytes of a step: those of two steps may be in flight at once
_SIZES = ("chunk_bytes", "fusion_threshold", "report_bytes")  # have no effect beyond the bytes of a step
_FEW = 2  # empty operations
_CLASS_BITS = 2  # a size class ends at four times its beginning
_MOST_CLASSES = 3  # that are described

# Operations of these kinds have the same bytes on all ranks, and in each step.
_EQUAL_KINDS = frozenset({"all-reduce", "broadcast"})
# Operations of these kinds may differ between ranks, or precede such ones: a rank's counters tell too little.
_UNEQUAL_KINDS = frozenset({"all-to-all", "send", "join", "add process set", "remove process set"})
_MOVES_NOTHING = "none"
_BACKENDS_WITHOUT_CHUNKS = frozenset({"links", "nccl", "single rank", _MOVES_NOTHING})


@dataclass(frozen=True)
class Counts:
    """The counters of rank 0 at the end of a step, since init(). Times are in seconds.

    Attributes:
        steps: of all optimizers, and of compiled programs.
        operations, failed, plans, bytes: as in `Statistics`.
        waiting, moving: as in `Statistics`.
        exposed: `Steps.exposed_seconds`.
        routes: the number of operations by kind and backend.
    """

    steps: int
    operations: int
    failed: int
    plans: int
    bytes: int
    waiting: float
    moving: float
    exposed: float | None
    routes: Mapping[tuple[str, str], int]

    @property
    def empty(self) -> int:
        """Returns the number of operations that have moved nothing."""
        return sum(number for (_, backend), number in self.routes.items() if backend == _MOVES_NOTHING)


@dataclass(frozen=True)
class StepDifference:
    """The differences of the counters over a step, and its duration.

    `empty`: the number of operations that moved nothing, such as operations absent on all ranks.
    """

    seconds: float
    operations: int
    plans: int
    bytes: int
    waiting: float
    moving: float
    exposed: float | None
    empty: int = 0

    @property
    def moving_plans(self) -> int:
        """Returns the number of plans that have moved something.

        The few empty operations of most steps, which are barriers and the news of an optimizer, are plans of
        their own. More of them may be fused: then all plans count.
        """
        return max(self.plans - self.empty, 1) if self.empty <= _FEW else self.plans


@dataclass(frozen=True)
class StepMeasures:
    """The exchange of some steps.

    Attributes:
        steps: the differences for each of them.
        routes: the kinds of operations in them, each with the backends that have moved it.
    """

    steps: Sequence[StepDifference]
    routes: frozenset[tuple[str, str]]


@dataclass(frozen=True)
class TunedJob:
    """The facts of a job that need no measurement.

    Attributes:
        ranks_per_core: of this host, rounded up.
        operations, bytes, parts: of a step of the optimizer, as in `Stepper`.
    """

    ranks_per_core: int
    operations: int = 0
    bytes: int = 0
    parts: int = 0

    def does_all(self, step: StepDifference) -> bool:
        """Returns whether the optimizer has made all operations of a step."""
        return self.operations > 0 and step.operations == self.operations


def measure(counts: Sequence[Counts], seconds: Sequence[float]) -> StepMeasures | None:
    """Returns the measures of steps, given the counts at the ends of subsequent steps.

    Returns None if they do not show what a step communicates: nothing was moved, an operation failed, other
    steps than the optimizer's were among them, or operations of which other ranks may have more.

    Args:
        counts: one more than there are steps.
        seconds: the duration of each step.
    """
    pairs = list(pairwise(counts))
    steps = [_step(*pair, took) for pair, took in zip(pairs, seconds, strict=True)]
    routes = frozenset(
        route
        for before, after in pairs
        for route, number in after.routes.items()
        if number > before.routes.get(route, 0)
    )
    is_clear = (
        all(after.steps == before.steps + 1 and after.failed == before.failed for before, after in pairs)
        and all(step.seconds > 0 for step in steps)
        and any(step.plans and step.bytes for step in steps)
        and _UNEQUAL_KINDS.isdisjoint(kind for kind, _ in routes)
    )
    return StepMeasures(steps, routes) if is_clear else None


def _step(before: Counts, after: Counts, seconds: float) -> StepDifference:
    exposed = None if after.exposed is None else after.exposed - (before.exposed or 0.0)
    return StepDifference(
        seconds,
        after.operations - before.operations,
        after.plans - before.plans,
        after.bytes - before.bytes,
        after.waiting - before.waiting,
        after.moving - before.moving,
        exposed,
        after.empty - before.empty,
    )


def judge(
    measures: StepMeasures | None, job: TunedJob, start: Settings, changes: Sequence[SettingChange]
) -> list[Judgement]:
    """Returns the judgement of each change, largest possible saving first: infinite without measures.

    Changes with the same bound keep their order.
    """
    if measures is None:
        return [Judgement(change, inf) for change in changes]
    savings = {change: _saving(measures, job, start, change) for change in changes}
    small = max((saving for saving in savings.values() if saving < MARGIN), default=0.0)
    judgements = []
    for change in changes:
        if reason := _useless(measures, job, start, changes[: changes.index(change)], change):
            judgements.append(Judgement(change, 0.0, reason))
        else:
            reason = f"no more than {small:.1%} of a step could be saved" if savings[change] < MARGIN else ""
            judgements.append(Judgement(change, savings[change], reason))
    return sorted(judgements, key=lambda judgement: -judgement.saving)


def _saving(measures: StepMeasures, job: TunedJob, start: Settings, change: SettingChange) -> float:
    """Returns the part of the median step that a change could have saved.

    It cannot save more than the time in which the program waits, and that in which an exchange takes the
    processor and the memory from the program meanwhile: while data moves, and while ranks poll. The search
    compares medians, too, so a few steps with long waits do not matter.
    """
    spin = number_of("spin", start["spin"]) * _NANOSECONDS
    shortest = []
    for step in measures.steps:
        seconds = _waits(step, job)
        if change != SettingChange("hand_over", "early"):  # which hides the exchange, and makes it no shorter
            seconds += step.moving + job.ranks_per_core * _wake_ups(step) * max(spin, _WAKE_UP)
        if change.setting == "hand_over" and change.value == "late":
            seconds += (job.parts or step.operations) * _SUBMISSION
        shortest.append(step.seconds - seconds)
    return 1 - median(shortest) / median(step.seconds for step in measures.steps)


def _wake_ups(step: StepDifference) -> float:
    """Returns how often a rank that waits for peers is woken: by plans, by the end, and once per second."""
    return step.plans + 1 + step.seconds


def _waits(step: StepDifference, job: TunedJob) -> float:
    """Returns a bound of the time in which the program has waited.

    The exposed time is that of the optimizer. Where there are other operations, for which the program may
    wait elsewhere, the bound is the time in which any was in flight.
    """
    if step.exposed is not None and job.does_all(step):
        return step.exposed
    return step.waiting + step.moving


def _useless(
    measures: StepMeasures,
    job: TunedJob,
    start: Settings,
    earlier: Sequence[SettingChange],
    change: SettingChange,
) -> str:
    """Returns why a change has no effect, or no more than an earlier change; "" if it may have an effect."""
    is_alone = all(job.does_all(step) for step in measures.steps)
    backends = {backend for _, backend in measures.routes}
    name = change.setting
    if name == "hand_over" and job.parts == 1 and is_alone:
        return "the gradients of a step are too few to be handed over in parts"
    if name == "chunk_bytes" and backends <= _BACKENDS_WITHOUT_CHUNKS:
        return "no tensor goes through shared memory"
    if name == "fusion_threshold" and max(step.operations for step in measures.steps) <= 1:
        return "a step exchanges one tensor"
    if name not in _SIZES or not _has_known_sizes(measures, is_alone):
        return ""
    largest = max(*(step.bytes for step in measures.steps), job.bytes)
    enough = _SPARE * largest + 1  # all larger values do the same
    value = min(number_of(name, change.value), enough)
    if value == min(number_of(name, start[name]), enough):
        return "a step has fewer bytes than both values"
    for other in earlier:
        if other.setting == name and value == min(number_of(name, other.value), enough):
            return f"a step has fewer bytes than this and {other}"
    return ""


def _has_known_sizes(measures: StepMeasures, is_alone: bool) -> bool:
    """Returns whether the bytes of a step are known, and the same on all ranks.

    The counters have no bytes of tensors that were absent on all ranks: only an optimizer knows its own.
    """
    routes = {(kind, backend) for kind, backend in measures.routes if kind != "barrier"}
    return all(kind in _EQUAL_KINDS and (is_alone or backend != _MOVES_NOTHING) for kind, backend in routes)


def describe(measures: StepMeasures) -> str:
    """Returns the bytes and plans of a step, the time of a plan by its size, and the bytes per second."""
    steps = [step for step in measures.steps if step.plans and step.bytes]
    size, plans = median(step.bytes for step in steps), median(step.moving_plans for step in steps)
    texts = [f"{describe_bytes(size)} in {plans:g} {'plan' if plans == 1 else 'plans'} a step"]
    classes = Counter(_class_of(step) for step in steps)
    for begin, _ in sorted(classes.most_common(_MOST_CLASSES)):
        same = [step for step in steps if _class_of(step) == begin]
        each = sum(step.moving for step in same) / sum(step.moving_plans for step in same)
        end = begin << _CLASS_BITS
        texts.append(f"{_digits(each * 1e3)} ms a plan of {describe_bytes(begin)} to {describe_bytes(end)}")
    moving = sum(step.moving for step in steps)
    if moving > 0:
        rate = sum(step.bytes for step in steps) / moving
        texts.append(f"{_digits(rate / 1e9)} GB/s" if rate >= 1e8 else f"{_digits(rate / 1e6)} MB/s")
    return "; ".join(texts)


def _class_of(step: StepDifference) -> int:
    """Returns where the size class of a step's mean plan begins: a power of four."""
    bits = max(step.bytes // step.moving_plans, 1).bit_length() - 1
    return 1 << (bits - bits % _CLASS_BITS)


def _digits(number: float) -> str:
    return f"{number:.2g}" if number < 99.5 else f"{number:.0f}"


def describe_bytes(size: float) -> str:
    """Returns a number of bytes as text, with three digits."""
    units = ["bytes", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.3g} {units[0]}" if size < 1000 else f"{size:.0f} {units[0]}"
