"""The shape of a rank's state (`observing.state_file`), by which its readers check a file, a frame or a line.

A state may come from another host, or from a file that another process has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, get_type_hints

from sirtaki.bindings.observing.observe import Activity, Durations, OperationCount, SentBytes, Steps
from sirtaki.bindings.observing.watch_marks import ANSWER
from sirtaki.runner.observe.typed_json import Bounds, Check, check_of, fields_check

BOUNDS = Bounds(entries=100_000, text=2000, least=0)
_MAX_POSITIVE = (1 << 31) - 1
Place = tuple[int, str, int]  # rank, host and process


@dataclass(frozen=True)
class RankSample:
    """The state of a rank. The counters and their units are as in `hvd.stats()`.

    Attributes:
        time: when the rank began to read its counters for it, in Unix time.
        look_seconds: how long it took to read them.
        is_up: whether the rank belongs to the job's world.
        is_stopped: whether its process is stopped, as by Ctrl-Z.
        begin: when its process has begun, in Unix time; 0 if that has ended.
        steps: its training steps (`bindings.observe.Steps`).
        activity: its operations that have not ended (`bindings.observe.Activity`).
        line: of the user's program, the innermost in its main thread; "" without one.
        stack: all frames there, the innermost first.
        sent: the bytes that it has sent over links, by host and transport (`bindings.observe.SentBytes`); of
            a rank on another host the largest ones.
        tensors: those that have cost it the most time lately: name, operations, and seconds in all that were
            exposed (None: not measured), of waiting for other ranks, and of the transfer.
        late_times, late_seconds: how often, and how long in all, the others waited for this rank alone.
        last_change: the reason of the last change of the ranks of an elastic job.
    """

    time: float
    look_seconds: float
    rank: int
    size: int
    host: str
    pid: int
    generation: int
    is_up: bool
    is_stopped: bool
    begin: float
    operations: int
    failed: int
    bytes: int
    waiting_seconds: float
    moving_seconds: float
    stalls: int
    late_times: int
    late_seconds: float
    last_change: str
    activity: Activity
    line: str
    stack: Sequence[str]
    steps: Steps
    cpu_seconds: float
    memory_bytes: int
    sent: Sequence[SentBytes] = field(default_factory=list)
    tensors: Sequence[tuple[str, int, float | None, float, float]] = field(default_factory=list)

    @property
    def place(self) -> Place:
        """Returns the key of a rank's process; the host is included, as hosts number their own processes."""
        return self.rank, self.host, self.pid


class _NumberedAnswer(TypedDict):
    number: int


class RecordingAnswer(_NumberedAnswer, total=False):
    """Answer to an order for a recording (`observing.state_file`)."""

    file: str
    note: str
    error: str


_SAMPLE = get_type_hints(RankSample)
_PROCESS = {"cpu_seconds": float, "memory_bytes": int, "is_stopped": bool, "begin": float}  # ProcessState
# Values that stay on the rank's host, where its metrics are served.
OF_METRICS: dict[str, Any] = {
    "by_backend": list[OperationCount],
    **dict.fromkeys(("wait", "transfer"), Durations),
    "recoveries": dict[str, list[float]],
    **dict.fromkeys(("plans", "cache_hits", "cache_misses", "ranks_lost"), int),
}
_STATE = {name: hint for name, hint in _SAMPLE.items() if name not in {*_PROCESS, "is_up"}}
_STATE |= {"is_member": bool, ANSWER: RecordingAnswer}


def _state_check(hints: Mapping[str, Any], optional: Collection[str]) -> Check:
    """Returns the check for a state; its readers rely on the numbers of bounds and of operations."""
    check_fields = fields_check(hints, BOUNDS, optional)

    def check_state(value: Any) -> dict[str, Any]:
        found: dict[str, Any] = check_fields(value)
        durations: dict[str, Durations] = {"steps": found["steps"]["times"]}
        durations |= {name: found[name] for name in ("wait", "transfer") if name in found}
        for name, times in durations.items():
            if len(times["counts"]) != len(times["bounds"]) + 1:
                raise ValueError(f"{name}: it has not one count more than bounds")
        positive = {"pid": [found["pid"]], "tensors": [row[1] for row in found.get("tensors", ())]}
        for name, numbers in positive.items():
            if not all(0 < number <= _MAX_POSITIVE for number in numbers):
                raise ValueError(f"{name}: it is no positive number")
        return found

    return check_state


sample_shape = _state_check(_SAMPLE, ("sent", "tensors"))
remote_state = _state_check(_STATE, (ANSWER,))
own_state = _state_check({**_STATE, **OF_METRICS}, (ANSWER,))
process_shape = fields_check(_PROCESS, BOUNDS)
moment = check_of(float, BOUNDS)
