"""Timelines of ranks with chosen times, in the form in which the core writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

WALL_CLOCK = 1_700_000_000_000_000_000  # of the first host, minus its monotonic clock, in nanoseconds


class Call(NamedTuple):
    """An operation; times in µs of a clock that all ranks share. Without `started`, no data moves."""

    name: str
    plan: int
    submitted: int
    decided: int
    ended: int
    started: int = 0
    kind: str = "all-reduce"
    bytes: int = 4000
    fused: int = 1
    process_set: int = 0
    status: str = "ok"


class Did(NamedTuple):
    """A slice of the program, on a track that pauses are named as; times in µs of the same clock."""

    track: str
    what: str
    begin: int
    end: int


class Clock(NamedTuple):
    """A host's monotonic clock, which is `ahead` of the common time by so many nanoseconds."""

    host: str = "hosta"
    ahead: int = 0

    def microseconds(self, common: int) -> str:
        return f"{(own := common * 1000 + self.ahead) // 1000}.{own % 1000:03d}"


HERE = Clock()


def add_program(path: Path, rank: int, done: Sequence[Did], clock: Clock = HERE) -> None:
    """Adds to the file of a rank, as the core writes it, what the program did."""
    tracks = {name: 10**9 + number for number, name in enumerate(dict.fromkeys(one.track for one in done))}
    events = [
        json.dumps({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})
        for name, tid in tracks.items()
    ]
    for one in done:
        times = f'"ts": {clock.microseconds(one.begin)}, "dur": {one.end - one.begin}.000'
        place = f'"cat": "program", "pid": {rank}, "tid": {tracks[one.track]}'
        events.append(f'{{"ph": "X", "name": {json.dumps(one.what)}, {place}, {times}}}')
    text = path.read_text().removesuffix("\n]\n")
    path.write_text(text + ",\n" + ",\n".join(events) + "\n]\n")


def timeline(rank: int, calls: Sequence[Call], clock: Clock = HERE, size: int = 0) -> str:
    """Returns the file of a rank, of `size` ranks; by default it is the last one."""
    tracks = {name: number for number, name in enumerate(dict.fromkeys(call.name for call in calls), 1)}
    title = f"rank {rank} (pid {100 + rank} on {clock.host})"
    head = [("process_name", 0, {"name": title}), ("process_sort_index", 0, {"sort_index": rank})]
    head.append(("thread_name", 0, {"name": "Decisions"}))
    head.append(("world", 0, {"size": size or rank + 1}))
    head.append(("clock", 0, {"wall_minus_monotonic_ns": WALL_CLOCK - clock.ahead}))
    head += [("thread_name", number, {"name": name}) for name, number in tracks.items()]
    events = [
        json.dumps({"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args})
        for what, tid, args in head
    ]
    for call in calls:
        facts = {name: getattr(call, name) for name in ("bytes", "process_set", "plan", "fused", "status")}
        slices = [(call.kind, call.submitted, call.ended, f', "args": {json.dumps(facts)}')]
        slices.append(("NEGOTIATE", call.submitted, call.decided, ""))
        if call.started:
            slices += [("QUEUE", call.decided, call.started, ""), ("TRANSFER", call.started, call.ended, "")]
        events += [
            f'{{"ph": "X", "name": "{name}", "pid": {rank}, "tid": {tracks[call.name]}, '
            f'"ts": {clock.microseconds(begin)}, "dur": {end - begin}.000{more}}}'
            for name, begin, end, more in slices
            if end > begin
        ]
    return "[\n" + ",\n".join(events) + "\n]\n"


def write_job(folder: Path, ranks: Sequence[Sequence[Call]], clocks: Sequence[Clock] = ()) -> Path:
    """Writes the files of all ranks, as `hvd.start_timeline` does, and returns that of rank 0."""
    path = folder / "t.json"
    for rank, calls in enumerate(ranks):
        file = path.with_name(f"t.json.rank{rank}") if rank else path
        file.write_text(timeline(rank, calls, clocks[rank] if clocks else HERE, len(ranks)))
    return path


def gradients(
    plan: int, submitted: Sequence[int], decided: Sequence[int], ended: int
) -> list[tuple[Call, Call]]:
    """Returns a step of each rank: tensors "a" and "b", fused, "b" submitted 10 µs after "a"."""
    return [
        (
            Call("a", plan, first, known, ended, known, fused=2),
            Call("b", plan, first + 10, known, ended, known, fused=2),
        )
        for first, known in zip(submitted, decided, strict=True)
    ]


def three_ranks() -> list[list[Call]]:
    """Returns a job of four steps: one for each cause, and one without any."""
    steps = [
        gradients(1, (1000, 1500, 1100), (1520, 1525, 1530), 1600),  # rank 1 submits 400 µs after the others
        gradients(2, (2000, 2000, 2000), (2020, 2020, 2020), 4000),  # 1980 µs to move the data
        gradients(3, (4100, 4100, 4100), (4120, 4120, 5000), 5100),  # rank 2 is informed 880 µs late
        gradients(4, (9000, 9000, 9000), (9015, 9015, 9015), 9020),
    ]
    return [[call for step in steps for call in step[rank]] for rank in range(3)]


TWO_HOSTS = (HERE, HERE, Clock("hostb", 7_000_000_123))
