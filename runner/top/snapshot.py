"""Snapshots of a job: the last state of each of its ranks at a moment. Snapshots can be recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sirtaki.runner.observe.state_shape import real, sample_shape, text

SCHEMA = 2
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
    activity: Mapping[str, Any]
    line: str
    stack: Sequence[str]
    steps: Mapping[str, Any]
    cpu_seconds: float
    memory_bytes: int
    sent: Sequence[Mapping[str, Any]] = field(default_factory=list)
    tensors: Sequence[Sequence[Any]] = field(default_factory=list)

    @property
    def place(self) -> Place:
        """Returns the key of a rank's process; the host is included, as hosts number their own processes."""
        return self.rank, self.host, self.pid


@dataclass(frozen=True)
class Snapshot:
    """A job at a moment.

    Attributes:
        time: that moment, in Unix time.
        since: when its ranks were asked to write their states; older states were written for somebody else.
        job: its name.
        ranks: those that have written states, ascending.
    """

    time: float
    since: float
    job: str
    ranks: tuple[RankSample, ...]

    @property
    def newest(self) -> RankSample | None:
        """Returns a rank of the newest world, if there is any."""
        return max(self.ranks, key=lambda rank: rank.generation, default=None)

    @property
    def size(self) -> int:
        """Returns the number of ranks of the job, as its newest world has them."""
        return self.newest.size if self.newest is not None else 0

    @property
    def ranks_away(self) -> int:
        """Returns the number of ranks without a state here; 0 while an older, larger world ends."""
        return max(0, self.size - len(self.ranks))

    def is_newer_than(self, moments: Mapping[Place, float]) -> bool:
        """Returns whether every running rank of the job has written a state that is newer than its moment.

        A rank without a moment needs a state after `since`. Stopped and ended ranks do not count.
        """
        able = [rank for rank in self.ranks if rank.is_up and not rank.is_stopped]
        return 0 < self.size <= len(self.ranks) and all(
            sample.time > moments.get(sample.place, self.since) for sample in able
        )

    def as_line(self) -> str:
        """Returns a line of JSON, from which `from_line` makes the same snapshot."""
        return json.dumps({"schema": SCHEMA, **asdict(self)})


def from_line(line: str) -> Snapshot:
    """Returns the snapshot of a line. Raises ValueError."""
    try:
        values = json.loads(line)
        if values["schema"] != SCHEMA:
            raise ValueError(f"it has the schema {values['schema']}, not {SCHEMA}")
        ranks = tuple(RankSample(**sample_shape(rank)) for rank in values["ranks"])
        return Snapshot(real(values["time"]), real(values["since"]), text(values["job"]), ranks)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no snapshot ({error})") from None
