"""States of ranks as `sirtaki top` reads them, made up."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from sirtaki.bindings.observing.observe import Activity, Durations, OperationCount, Steps
from sirtaki.runner.observe.state_shape import RankSample

NOW, SINCE = 1000.0, 900.0
IDLE = Activity(operations=0, name="", kind="", process_set=0, is_agreed=False, seconds=0.0)
NO_STEPS = Steps(
    count=0,
    number=0,
    times=Durations(bounds=[1.0], counts=[0, 0], total_seconds=0.0),
    last_seconds=0.0,
    age_seconds=0.0,
    exposed_seconds=None,
    productive_seconds=0.0,
)
BASE = RankSample(
    time=NOW,
    look_seconds=0.0,
    rank=0,
    size=3,
    host="hostA",
    pid=100,
    generation=1,
    is_up=True,
    is_stopped=False,
    begin=NOW - 100,
    operations=10,
    failed=0,
    bytes=1000,
    waiting_seconds=1.0,
    moving_seconds=1.0,
    stalls=0,
    late_times=0,
    late_seconds=0.0,
    last_change="",
    activity=IDLE,
    line="",
    stack=[],
    steps=NO_STEPS,
    cpu_seconds=5.0,
    memory_bytes=1 << 20,
)

METRICS: dict[str, Any] = {
    "by_backend": [
        OperationCount(
            kind="all-reduce", backend="cpu", operations=10, failed=0, bytes=1000, algorithm="direct"
        )
    ],
    **dict.fromkeys(("wait", "transfer"), NO_STEPS["times"]),
    "recoveries": {"detect": [0.5]},
    **dict.fromkeys(("plans", "cache_hits", "cache_misses", "ranks_lost"), 3),
}


def sample(rank: int = 0, **changes: Any) -> RankSample:
    return replace(BASE, rank=rank, pid=100 + rank, **changes)


def pending(seconds: float, **changes: Any) -> dict[str, Any]:
    found = {**IDLE, "operations": 1, "name": "loss", "kind": "all-reduce", "seconds": seconds}
    return {**found, **changes}


def stepped(count: int, total: float, **changes: Any) -> Steps:
    """Returns so many steps, of which all but the first have taken this long together."""
    times = Durations(bounds=[1.0], counts=[count - 1, 0], total_seconds=total)
    found = {**NO_STEPS, "count": count, "number": count, "times": times, "productive_seconds": total}
    return Steps(**{**found, **changes})  # type: ignore[typeddict-item]


def state_values(rank: int, pid: int, **changes: Any) -> dict[str, Any]:
    """Returns what a rank writes: a sample without what its process adds, and values for metrics."""
    of_process = ("is_up", "is_stopped", "begin", "cpu_seconds", "memory_bytes")
    values = {name: value for name, value in asdict(BASE).items() if name not in of_process}
    return {**values, **METRICS, "rank": rank, "pid": pid, "is_member": True, **changes}
