"""Rows of the table: rates of ranks between two snapshots, and their states now. Nothing reads a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sirtaki.runner.rendezvous.rendezvous_state import join_names
from sirtaki.runner.top.snapshot import RankSample, Snapshot

SILENT_SECONDS = 5.0  # after which a rank that writes once a second counts as silent
LONG_SECONDS = 1.0  # an operation of this age is named; shorter ones come and go between two snapshots
STUCK_SECONDS = 10.0  # a wait of this age is a problem
FINE, NOTE, PROBLEM = "fine", "note", "problem"  # levels


@dataclass(frozen=True)
class Row:
    """A rank between two snapshots.

    Attributes:
        state: what it does, for people: "runs", "waits 3.2 s for rank 1 to submit 'loss'".
        level: FINE; NOTE if others wait for it; PROBLEM if it is not in the world or silent, or if it waits,
            or others wait for it, for long.
        operations, bytes: a second.
        waiting, moving, late: shares of the time in which it waited for others, moved data, and all others
            waited for it alone; from 0 to 1.
        cores: processor time divided by the time.
        memory: resident, in bytes.
    """

    rank: int
    host: str
    pid: int
    state: str
    level: str
    operations: float
    bytes: float
    waiting: float
    moving: float
    late: float
    cores: float
    memory: int


def rows_of(before: Snapshot | None, now: Snapshot) -> list[Row]:
    """Returns a row for each rank of a snapshot. Rates are 0 for ranks that the one before does not have."""
    earlier = {one.pid: one for one in before.ranks} if before is not None else {}
    missing = {one.rank: missing_ranks(one, now.ranks, earlier) for one in now.ranks}
    wanted: dict[int, float] = {}  # how long others have waited for a rank
    for one in now.ranks:
        for rank in missing[one.rank]:
            wanted[rank] = max(wanted.get(rank, 0.0), one.activity["seconds"])
    return [
        _row(one, earlier.get(one.pid), *_state(one, now.time, missing[one.rank], wanted.get(one.rank, 0.0)))
        for one in now.ranks
    ]


def missing_ranks(
    waiting: RankSample, ranks: tuple[RankSample, ...], earlier: Mapping[int, RankSample]
) -> list[int]:
    """Returns ranks that have certainly not submitted what a rank waits for.

    These are those that were seen with no operation at all while it was waiting. Others may be missing, too;
    operations of a part of the ranks are left out, because it is not known which ranks belong to it.
    """
    pending = waiting.activity
    if not (waiting.is_up and pending["operations"]) or pending["is_agreed"] or pending["process_set"]:
        return []
    if pending["kind"] == "send" or pending["seconds"] < LONG_SECONDS:
        return []
    begin, end = waiting.time - pending["seconds"], waiting.time
    return [
        one.rank
        for one in ranks
        if one.is_up
        and any(
            begin <= seen.time <= end and not seen.activity["operations"]
            for seen in (one, earlier.get(one.pid))
            if seen is not None
        )
    ]


def _row(one: RankSample, before: RankSample | None, state: str, level: str) -> Row:
    seconds = one.time - before.time if before is not None else 0.0

    def rate(counter: str) -> float:
        grown = getattr(one, counter) - getattr(before, counter) if before is not None else 0.0
        return max(0.0, grown / seconds) if seconds > 0 else 0.0

    return Row(
        rank=one.rank,
        host=one.host,
        pid=one.pid,
        state=state,
        level=level,
        operations=rate("operations"),
        bytes=rate("bytes"),
        waiting=min(1.0, rate("waiting_seconds")),
        moving=min(1.0, rate("moving_seconds")),
        late=min(1.0, rate("late_seconds")),
        cores=rate("cpu_seconds"),
        memory=one.memory_bytes,
    )


def _state(one: RankSample, now: float, missing: list[int], wanted: float) -> tuple[str, str]:
    """Returns what a rank does, and the level; others have waited for it for `wanted` seconds."""
    silence, pending = now - one.time, one.activity
    if not one.is_up:
        return "has ended, or left its world", PROBLEM
    if one.is_stopped:
        return "is stopped: continue it with `kill -CONT`", PROBLEM
    if silence > SILENT_SECONDS:
        return f"silent for {silence:.0f} s: in code that holds Python's GIL, or without a core", PROBLEM
    if not pending["operations"]:
        return (f"computes; others wait {wanted:.1f} s", _level(wanted, NOTE)) if wanted else ("runs", FINE)
    age = pending["seconds"]
    if age < LONG_SECONDS:
        return "runs", FINE
    if pending["is_agreed"]:
        return f"in {pending['kind']} '{pending['name']}' for {age:.1f} s", _level(age, FINE)
    who = join_names([f"rank {rank}" for rank in missing]) if missing else "other ranks"
    return f"waits {age:.1f} s for {who} to submit '{pending['name']}'", _level(age, FINE)


def _level(seconds: float, below: str) -> str:
    return below if seconds < STUCK_SECONDS else PROBLEM
