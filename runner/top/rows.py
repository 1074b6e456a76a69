"""Rows of the table: rates of ranks between two snapshots, and their states now. Nothing reads a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from sirtaki.bindings.bootstrap.job import join_names
from sirtaki.runner.observe.state_shape import Place, RankSample
from sirtaki.runner.top.snapshot import Snapshot

SILENT_SECONDS = 5.0  # after which a rank that writes once a second counts as silent
LONG_SECONDS = 1.0  # an operation of this age is named; shorter ones come and go between two snapshots
STUCK_SECONDS = 10.0  # a wait of this age is a problem
FINE, NOTE, PROBLEM = "fine", "note", "problem"  # levels


@dataclass(frozen=True)
class RankRow:
    """A rank between two snapshots.

    Attributes:
        state: what it does, for people: "runs", "waits 3.2 s for rank 1 to submit 'loss'".
        level: FINE; NOTE if others wait for it; PROBLEM if it is not in the world or silent, or if it waits,
            or others wait for it, for long.
        operations, bytes: a second. 0 if it has written no state since the snapshot before.
        step: the number of its last training step; 0: none is known.
        step_seconds: the duration of the steps since the snapshot before, or else of the last one, or of the
            present one if that already takes longer; None before the second one.
        exposed: share of the time in which its program waited for the exchange of a step; None: not measured.
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
    step: int
    step_seconds: float | None
    exposed: float | None
    waiting: float
    moving: float
    late: float
    cores: float
    memory: int


@dataclass(frozen=True)
class TrainingProgress:
    """The training of a job.

    Attributes:
        step: the number of the last step.
        rate: steps a second; None before the second one.
        goodput: the share of steps, in an elastic job of committed ones, in the life of the oldest process.
    """

    step: int
    rate: float | None
    goodput: float | None


def rows_of(before: Snapshot | None, now: Snapshot) -> list[RankRow]:
    """Returns a row for each rank of a snapshot; rates are 0 for ranks that `before` does not contain."""
    earlier = {rank.place: rank for rank in before.ranks} if before is not None else {}
    elapsed = now.time - before.time if before is not None else 0.0
    missing = {rank.rank: missing_ranks(rank, now.ranks, earlier) for rank in now.ranks}
    wanted: dict[int, float] = {}  # how long others have waited for a rank
    for sample in now.ranks:
        for rank in missing[sample.rank]:
            wanted[rank] = max(wanted.get(rank, 0.0), sample.activity["seconds"])
    return [
        _row(
            rank,
            earlier.get(rank.place),
            elapsed,
            *_state(rank, now, missing[rank.rank], wanted.get(rank.rank, 0.0)),
        )
        for rank in now.ranks
    ]


def missing_ranks(
    waiting: RankSample, ranks: tuple[RankSample, ...], earlier: Mapping[Place, RankSample]
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
    begin = waiting.time + waiting.look_seconds - pending["seconds"]
    return [
        rank.rank
        for rank in ranks
        if rank.is_up
        and not rank.activity["operations"]  # or it may have submitted this one meanwhile
        and any(
            begin <= seen.time
            and seen.time + seen.look_seconds <= waiting.time
            and not seen.activity["operations"]
            for seen in (rank, earlier.get(rank.place))
            if seen is not None
        )
    ]


def _row(
    rank_sample: RankSample, before: RankSample | None, elapsed: float, state: str, level: str
) -> RankRow:
    """Returns a row. Counters are as old as the rank's state; its processor time is that of the snapshot."""
    seconds = rank_sample.time - before.time if before is not None else 0.0

    def grown(counter: str) -> float:
        return (
            max(0.0, getattr(rank_sample, counter) - getattr(before, counter)) if before is not None else 0.0
        )

    def rate(counter: str) -> float:
        return grown(counter) / seconds if seconds > 0 else 0.0

    return RankRow(
        rank=rank_sample.rank,
        host=rank_sample.host,
        pid=rank_sample.pid,
        state=state,
        level=level,
        operations=rate("operations"),
        bytes=rate("bytes"),
        step=rank_sample.steps["number"],
        step_seconds=_step_seconds(rank_sample, before),
        exposed=_exposed(rank_sample, before, seconds),
        waiting=min(1.0, rate("waiting_seconds")),
        moving=min(1.0, rate("moving_seconds")),
        late=min(1.0, rate("late_seconds")),
        cores=grown("cpu_seconds") / elapsed if elapsed > 0 else 0.0,
        memory=rank_sample.memory_bytes,
    )


def _step_seconds(rank_sample: RankSample, before: RankSample | None) -> float | None:
    steps = rank_sample.steps
    if steps["count"] < 2:
        return None
    now, recent = steps["times"], steps["last_seconds"]
    if before is not None and before.generation == rank_sample.generation:
        then = before.steps["times"]
        if (number := sum(now["counts"]) - sum(then["counts"])) > 0:
            recent = (now["total_seconds"] - then["total_seconds"]) / number
    return float(max(recent, steps["age_seconds"]))


def _exposed(rank_sample: RankSample, before: RankSample | None, seconds: float) -> float | None:
    now = rank_sample.steps["exposed_seconds"]
    if now is None:
        return None
    then = before.steps["exposed_seconds"] or 0.0 if before is not None else now
    return min(1.0, max(0.0, now - then) / seconds) if seconds > 0 else 0.0


def progress_of(now: Snapshot, rows: Sequence[RankRow]) -> TrainingProgress | None:
    """Returns how far the training is, by the states of the ranks that are up; None if no step is known."""
    known = [rank for rank in now.ranks if rank.is_up and rank.steps["count"]]
    if not known:
        return None
    oldest = min(known, key=lambda sample: sample.begin)
    life = oldest.time - oldest.begin
    times = [row.step_seconds for row in rows if row.step_seconds]
    return TrainingProgress(
        step=max(sample.steps["number"] for sample in known),
        rate=1 / median(times) if times else None,
        goodput=min(1.0, oldest.steps["productive_seconds"] / life) if oldest.begin and life > 0 else None,
    )


def _state(rank_sample: RankSample, now: Snapshot, missing: list[int], wanted: float) -> tuple[str, str]:
    """Returns what a rank does, and the level; `wanted` is how many seconds other ranks waited for it."""
    silence, pending = now.time - max(rank_sample.time, now.since), rank_sample.activity
    if not rank_sample.is_up:
        return "has ended, or left its world", PROBLEM
    if rank_sample.is_stopped:
        return "is stopped: continue it with `kill -CONT`", PROBLEM
    if silence > SILENT_SECONDS:
        return (
            f"silent for {silence:.0f} s: in code that holds Python's GIL, without a core, or ending",
            PROBLEM,
        )
    if not pending["operations"]:
        place = f", {rank_sample.line}" if rank_sample.line else ""
        text = f"computes{place}; others wait {wanted:.1f} s"
        return (text, _level(wanted, NOTE)) if wanted else ("runs", FINE)
    age = pending["seconds"]
    if age < LONG_SECONDS:
        return "runs", FINE
    if pending["is_agreed"]:
        return f"in {pending['kind']} '{pending['name']}' for {age:.1f} s", _level(age, FINE)
    who = join_names([f"rank {rank}" for rank in missing]) if missing else "other ranks"
    level = FINE if missing else _level(age, FINE)  # the problem is where the named ranks are
    return f"waits {age:.1f} s for {who} to submit '{pending['name']}'", level


def _level(seconds: float, below: str) -> str:
    return below if seconds < STUCK_SECONDS else PROBLEM
