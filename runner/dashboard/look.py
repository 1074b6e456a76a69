"""Looks: a snapshot as the page shows it, as JSON. The texts are those of `sirtaki top`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from sirtaki.runner.dashboard.views import links_of, tensors_of
from sirtaki.runner.rendezvous.rendezvous_state import join_names
from sirtaki.runner.top.rows import Row, missing_ranks, progress_of, rows_of
from sirtaki.runner.top.snapshot import RankSample, Snapshot
from sirtaki.runner.top.table import Column, columns_of, legend_of, progress_texts, readable

SCHEMA = 1


def look_of(before: Snapshot | None, now: Snapshot) -> dict[str, Any]:
    """Returns a look at a snapshot; rates are those since the one before, and 0 without it."""
    rows = rows_of(before, now)
    columns = columns_of(rows)
    newest = now.newest
    times = {one.place: one.time for one in before.ranks} if before is not None else {}
    renewed = {one.rank for one in now.ranks if one.time > times.get(one.place, one.time)}
    return {
        "schema": SCHEMA,
        "job": now.job,
        "time": now.time,
        "ranks_up": sum(one.is_up for one in now.ranks),
        "size": now.size,
        "hosts": sorted({one.host for one in now.ranks}),
        "ranks_away": now.ranks_away,
        "generation": newest.generation if newest is not None else 1,
        "last_change": newest.last_change if newest is not None else "",
        "operations": f"{_mean([row.operations for row in rows]):.0f}",
        "data": readable(_mean([row.bytes for row in rows])),
        "progress": progress_texts(progress_of(now, rows)),
        "stalls": _stalls(before, now),
        "columns": [{"name": name, "is_number": is_number} for name, is_number, _ in columns],
        "rows": [
            {**_row(row, columns, row.rank in renewed), "stack": one.stack}
            for one, row in zip(now.ranks, rows, strict=True)
        ],
        "legend": legend_of(rows),
        "tensors": tensors_of(now),
        "links": links_of(before, now),
    }


def _row(row: Row, columns: Sequence[Column], has_rates: bool) -> dict[str, Any]:
    """Returns a row; its lateness is None, not 0, if the rank has no state before, or no new one."""
    cells = [text(row) for *_, text in columns]
    late = round(row.late, 3) if has_rates else None
    return {"rank": row.rank, "level": row.level, "late": late, "cells": cells}


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0


def _stalls(before: Snapshot | None, now: Snapshot) -> list[str]:
    """Returns a sentence for each operation that waits for ranks that certainly have not submitted it."""
    earlier = {one.place: one for one in before.ranks} if before is not None else {}
    waiting: dict[tuple[str, str], list[RankSample]] = {}
    missing: dict[tuple[str, str], set[int]] = {}
    for one in now.ranks:
        if ranks := missing_ranks(one, now.ranks, earlier):
            operation = one.activity["kind"], one.activity["name"]
            waiting.setdefault(operation, []).append(one)
            missing.setdefault(operation, set()).update(ranks)
    return [
        _sentence(operation, samples, sorted(missing[operation])) for operation, samples in waiting.items()
    ]


def _sentence(operation: tuple[str, str], waiting: list[RankSample], missing: list[int]) -> str:
    kind, name = operation
    seconds = max(one.activity["seconds"] for one in waiting)
    ranks = "1 rank has" if len(waiting) == 1 else f"{len(waiting)} ranks have"
    wanted = join_names([f"rank {rank}" for rank in missing])
    return f"{ranks} waited {seconds:.1f} s for {wanted} to submit the {kind} '{name}'"
