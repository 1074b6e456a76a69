"""Snapshots of a job: the last state of each of its ranks at a moment. Snapshots can be recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from sirtaki.runner.observe.state_shape import BOUNDS, Place, RankSample, sample_shape
from sirtaki.runner.observe.typed_json import fields_check

SCHEMA = 2
_own_fields = fields_check({"time": float, "since": float, "job": str}, BOUNDS)


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
        return Snapshot(**_own_fields(values), ranks=ranks)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no snapshot ({error})") from None
