"""The looks at a job: a thread takes a look per second for all readers, while there are any."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from sirtaki.bindings.bootstrap.job import join_names
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.observe.state_shape import RankSample
from sirtaki.runner.top.jobs import INTERVAL_SECONDS
from sirtaki.runner.top.rows import RankRow, missing_ranks, progress_of, rows_of
from sirtaki.runner.top.snapshot import Snapshot
from sirtaki.runner.top.table import Column, columns_of, legend_of, progress_texts, readable, significant

HISTORY = 120  # looks whose lateness a new page gets
_SILENT_SECONDS = 5.0  # after which a reader is sent a comment, by which one that has gone is noticed


class Feed:
    """The last look, and the history of the ranks' lateness.

    A reader that is slow misses looks; none is kept for it.
    """

    def __init__(
        self,
        source: Callable[[], Iterator[Snapshot]],
        begin: float,
        recording: Callable[[], dict[str, Any] | None],
    ) -> None:
        """`source` begins to watch the job, and raises LaunchError while that is impossible.

        `begin` is when the job has begun, in Unix time; `recording` returns the last one, if there was one.
        """
        self._source = source
        self._recording = recording
        self._begin = begin
        self._changed = threading.Condition()
        self._readers = 0
        self._number = 0  # of the last look
        self._look: dict[str, Any] | None = None
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._is_over = False
        self._has_failed = False  # at some look
        threading.Thread(target=self._run, name="sirtaki feed", daemon=True).start()

    def end(self) -> None:
        """Wakes all readers: the job has ended."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait_for_readers(self, seconds: float) -> None:
        """Waits until no reader is left, or the time has passed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._readers, seconds)

    def events(self) -> Generator[str, None, None]:
        """Yields Server-Sent Events until the job ends. A reader that stops closes the generator."""
        with self._changed:
            self._readers += 1
            self._changed.notify_all()
        try:
            yield from self._events()
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def _events(self) -> Iterator[str]:
        seen, is_over = 0, False
        while not is_over:
            with self._changed:
                self._changed.wait_for(partial(self._has_news_since, seen), _SILENT_SECONDS)
                history = [] if seen else list(self._history)
                is_new, look = self._number > seen, self._look
                seen, is_over = self._number, self._is_over
            if history:
                yield _event("history", history)
            yield _event("look", look) if is_new else ": nothing new\n\n"
        yield _event("end", None)

    def _has_news_since(self, number: int) -> bool:
        return self._is_over or self._number > number

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._readers)
            try:
                self._watch()
            except LaunchError:  # the ranks have not started, or have ended
                pass
            except Exception:  # states that make no sense: later ones may
                if not self._has_failed:
                    traceback.print_exc()
                self._has_failed = True
            time.sleep(INTERVAL_SECONDS)

    def _watch(self) -> None:
        """Takes looks until nobody reads them, or the job is over."""
        before: Snapshot | None = None
        for snapshot in self._source():
            if before is not None and before.ranks and not snapshot.ranks:
                return  # the states have been removed: the look before is the last one
            self._publish(look_of(before, snapshot))
            before = snapshot
            if not self._readers:
                return

    def _publish(self, look: dict[str, Any]) -> None:
        late = {str(row["rank"]): row["late"] for row in look["rows"] if row["late"] is not None}
        with self._changed:
            more = {"elapsed": look["time"] - self._begin, "recording": self._recording()}
            self._look = {**look, **more}
            self._history.append({"time": look["time"], "late": late})
            self._number += 1
            self._changed.notify_all()


def _event(kind: str, content: object) -> str:
    return f"event: {kind}\ndata: {json.dumps(content)}\n\n"


# ---- Looks: a snapshot as the page shows it, as JSON. The texts are those of `sirtaki top` -------------

SCHEMA = 1


def look_of(before: Snapshot | None, now: Snapshot) -> dict[str, Any]:
    """Returns a look at a snapshot; rates are since the previous snapshot, and 0 without it."""
    rows = rows_of(before, now)
    columns = columns_of(rows)
    newest = now.newest
    times = {rank.place: rank.time for rank in before.ranks} if before is not None else {}
    renewed = {rank.rank for rank in now.ranks if rank.time > times.get(rank.place, rank.time)}
    return {
        "schema": SCHEMA,
        "job": now.job,
        "time": now.time,
        "ranks_up": sum(rank.is_up for rank in now.ranks),
        "size": now.size,
        "hosts": sorted({rank.host for rank in now.ranks}),
        "ranks_away": now.ranks_away,
        "generation": newest.generation if newest is not None else 1,
        "last_change": newest.last_change if newest is not None else "",
        "operations": f"{_mean([row.operations for row in rows]):.0f}",
        "data": readable(_mean([row.bytes for row in rows])),
        "progress": progress_texts(progress_of(now, rows)),
        "stalls": _stalls(before, now),
        "columns": [{"name": name, "is_number": is_number} for name, is_number, _ in columns],
        "rows": [
            {**_row(row, columns, row.rank in renewed), "stack": rank.stack}
            for rank, row in zip(now.ranks, rows, strict=True)
        ],
        "legend": legend_of(rows),
        "tensors": tensors_of(now),
        "links": links_of(before, now),
    }


def _row(row: RankRow, columns: Sequence[Column], has_rates: bool) -> dict[str, Any]:
    """Returns a row; its lateness is None, not 0, if the rank has no earlier state, or no new state."""
    cells = [text(row) for *_, text in columns]
    late = round(row.late, 3) if has_rates else None
    return {"rank": row.rank, "level": row.level, "late": late, "cells": cells}


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0


def _stalls(before: Snapshot | None, now: Snapshot) -> list[str]:
    """Returns a sentence for each operation that waits for ranks that certainly have not submitted it."""
    earlier = {rank.place: rank for rank in before.ranks} if before is not None else {}
    waiting: dict[tuple[str, str], list[RankSample]] = {}
    missing: dict[tuple[str, str], set[int]] = {}
    for sample in now.ranks:
        if ranks := missing_ranks(sample, now.ranks, earlier):
            operation = sample.activity["kind"], sample.activity["name"]
            waiting.setdefault(operation, []).append(sample)
            missing.setdefault(operation, set()).update(ranks)
    return [
        _sentence(operation, samples, sorted(missing[operation])) for operation, samples in waiting.items()
    ]


def _sentence(operation: tuple[str, str], waiting: list[RankSample], missing: list[int]) -> str:
    kind, name = operation
    seconds = max(sample.activity["seconds"] for sample in waiting)
    ranks = "1 rank has" if len(waiting) == 1 else f"{len(waiting)} ranks have"
    wanted = join_names([f"rank {rank}" for rank in missing])
    return f"{ranks} waited {seconds:.1f} s for {wanted} to submit the {kind} '{name}'"


# Views of the page beside the ranks: the tensors that cost the most time, and the links between hosts.


MOST_TENSORS = 10
MOST_LINKS = 20
_CONTROL = "ring"  # a transport of control messages only, within a host


def tensors_of(now: Snapshot) -> dict[str, Any]:
    """Returns the tensors with the longest exposed time, or the longest wait where no rank measures that.

    Times are milliseconds of one operation, on average over the ranks that have the tensor among their
    slowest ones.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    ranks: dict[str, int] = defaultdict(int)
    samples = [row for rank in now.ranks if rank.is_up for row in rank.tensors]
    is_measured = any(row[2] is not None for row in samples)
    for name, *numbers in samples:
        ranks[name] += 1
        sums[name] = [total + (number or 0) for total, number in zip(sums[name], numbers, strict=True)]
    cost = 1 if is_measured else 2
    slowest = sorted(sums, key=lambda name: (-sums[name][cost] / ranks[name], name))[:MOST_TENSORS]
    names = ("exposed", "wait", "transfer") if is_measured else ("wait", "transfer")
    most = max((sums[name][cost] / ranks[name] for name in slowest), default=0.0)
    rows = []
    for name in slowest:
        operations, *seconds = sums[name]
        cells = [name, f"{operations / ranks[name]:.0f}"]
        cells += [significant(1000 * duration / operations) for duration in seconds[-len(names) :]]
        rows.append(_costs(cells, sums[name][cost] / ranks[name], most))
    return _view(("tensor", "operations", *names), 1, rows)


def links_of(before: Snapshot | None, now: Snapshot) -> dict[str, Any]:
    """Returns the pairs of hosts with the bytes a second since the snapshot before, the busiest first."""
    earlier = {rank.place: rank for rank in before.ranks} if before is not None else {}
    rates: dict[tuple[str, str, str], float] = defaultdict(float)
    for sample in now.ranks:
        if (then := earlier.get(sample.place)) is not None and sample.time > then.time:
            for (peer, transport), grown in _sent_since(then, sample).items():
                rates[sample.host, peer, transport] += grown / (sample.time - then.time)
    busiest = sorted(rates, key=lambda link: (-rates[link], link))[:MOST_LINKS]
    most = rates[busiest[0]] if busiest else 0.0
    rows = [
        _costs([f"{link[0]} → {link[1]}", link[2], readable(rates[link])], rates[link], most)
        for link in busiest
    ]
    return _view(("link", "transport", "data/s"), 2, rows)


def _sent_since(then: RankSample, now: RankSample) -> dict[tuple[str, str], int]:
    """Returns the bytes that a rank has sent since `then`, by host and transport, without control messages.

    Rows that are new, or smaller than before, are left out.
    """
    sent = {(row["peer_host"], row["transport"]): row["bytes"] for row in then.sent}
    return {
        link: row["bytes"] - sent[link]
        for row in now.sent
        if (link := (row["peer_host"], row["transport"])) in sent
        and row["transport"] != _CONTROL
        and row["bytes"] >= sent[link]  # less in a new generation
    }


def _costs(cells: list[str], cost: float, most: float) -> dict[str, Any]:
    """Returns a row; `share`, from 0 to 1, is its cost relative to `most`."""
    return {"cells": cells, "share": round(cost / most, 3) if most else 0.0}


def _view(names: Sequence[str], first_number: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a table; its columns from index `first_number` on are numbers."""
    columns = [{"name": name, "is_number": place >= first_number} for place, name in enumerate(names)]
    return {"columns": columns, "rows": rows}
