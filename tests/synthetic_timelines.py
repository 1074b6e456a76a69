"""Timelines of ranks with chosen times, as the core writes them, and what `sirtaki trace` makes of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from timelines import check_trace

from sirtaki.runner.cli import commands
from sirtaki.runner.trace.reading import read_trace
from sirtaki.runner.trace.sources import find_sources
from sirtaki.runner.trace.trace import Trace

WALL_CLOCK = 1_700_000_000_000_000_000  # of the first host, minus its monotonic clock, in nanoseconds


class Call(NamedTuple):
    """An operation; times in µs of a clock that all ranks share. Without `started`, no data moves.

    `error` is that of a mismatch, and `line` the line of train.py at which the rank learnt of it.
    """

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
    error: str = ""
    line: int = 0

    @property
    def refusal(self) -> dict[str, Any]:
        """The values that files have of a mismatch."""
        frames = [{"function": "<module>", "file": "/home/u/train.py", "line": self.line, "library": False}]
        return {"error": self.error, "stack": frames if self.line else []} if self.error else {}


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
        return f"{(own := self.nanoseconds(common)) // 1000}.{own % 1000:03d}"

    def nanoseconds(self, common: int) -> int:
        return common * 1000 + self.ahead


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
        args = json.dumps(facts | call.refusal)
        slices = [(call.kind, call.submitted, call.ended, f', "args": {args}')]
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


def failure_report(
    rank: int,
    size: int,
    calls: Sequence[Call],
    moment: int,
    clock: Clock = HERE,
    why: str = "rank 1 was lost",
) -> str:
    """Returns the failure report of a rank, written at `moment`: calls that end later are in flight."""

    def described(call: Call) -> dict[str, Any]:
        times = {
            "submitted": call.submitted,
            "agreed": call.decided,
            "moved": call.started,
            "ended": call.ended,
        }
        known = {name: time for name, time in times.items() if time and time <= moment}
        facts = {name: getattr(call, name) for name in ("name", "kind", "bytes", "process_set")}
        plan = {"plan": call.plan, "fused": call.fused} if call.plan else {}
        return {
            **facts,
            "state": call.status if call.ended <= moment else "waiting for other ranks",
            "submitted_seconds_ago": (moment - call.submitted) / 1e6,
            **{f"{name}_ns": clock.nanoseconds(time) for name, time in known.items()},
            **(plan if call.ended <= moment else {}),
            **call.refusal,
        }

    clocks = {
        "monotonic_ns": clock.nanoseconds(moment),
        "wall_minus_monotonic_ns": WALL_CLOCK - clock.ahead,
    }
    values = {
        "rank": rank,
        "size": size,
        "host": clock.host,
        "pid": 100 + rank,
        "clock": clocks,
        "status": "peer_lost",
        "culprit": 1,
        "reason": why,
        "stack": [],
        "unfinished": [described(call) for call in calls if call.ended > moment],
        "finished": [described(call) for call in calls if call.ended <= moment],
    }
    return json.dumps(values)


def write_reports(
    folder: Path, ranks: Sequence[Sequence[Call] | None], moment: int, clocks: Sequence[Clock] = ()
) -> Path:
    """Writes the failure reports of ranks, except for None, into a folder, which is returned."""
    folder.mkdir(exist_ok=True)
    for rank, calls in enumerate(ranks):
        if calls is not None:
            text = failure_report(rank, len(ranks), calls, moment, clocks[rank] if clocks else HERE)
            (folder / f"rank{rank}.json").write_text(text)
    return folder


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


def opened(*paths: Path) -> Trace:
    return read_trace(find_sources(paths))


def merged(*paths: Path, into: Path) -> list[dict[str, Any]]:
    """Runs `sirtaki trace merge`, and returns the events of its output, which keep the format's rules."""
    assert commands.main(["trace", "merge", *map(str, paths), "-o", str(into)]) == 0
    data = into.read_bytes()
    return check_trace((gzip.decompress(data) if into.suffix == ".gz" else data).decode())


def report(capsys: pytest.CaptureFixture[str], *paths: Path, code: int = 0) -> dict[str, Any]:
    """Runs `sirtaki trace report`, which ends with this exit code, and returns the report as JSON."""
    capsys.readouterr()
    assert commands.main(["trace", "report", *map(str, paths), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["exit_code"]) == (1, code)
    return found


def rules(found: dict[str, Any]) -> dict[str, str]:
    """Returns the rules that have found something, with their evidence."""
    return {one["rule"]: one["evidence"] for one in found["findings"]}
