"""Views of the page beside the ranks: the tensors that cost the most time, and the links between hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sirtaki.runner.top.snapshot import RankSample, Snapshot
from sirtaki.runner.top.table import readable, significant

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
    samples = [row for one in now.ranks if one.is_up for row in one.tensors]
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
        cells += [significant(1000 * one / operations) for one in seconds[-len(names) :]]
        rows.append(_row(cells, sums[name][cost] / ranks[name], most))
    return _view(("tensor", "operations", *names), 1, rows)


def links_of(before: Snapshot | None, now: Snapshot) -> dict[str, Any]:
    """Returns the pairs of hosts with the bytes a second since the snapshot before, the busiest first."""
    earlier = {one.place: one for one in before.ranks} if before is not None else {}
    rates: dict[tuple[str, str, str], float] = defaultdict(float)
    for one in now.ranks:
        if (then := earlier.get(one.place)) is not None and one.time > then.time:
            for (peer, transport), grown in _sent_since(then, one).items():
                rates[one.host, peer, transport] += grown / (one.time - then.time)
    busiest = sorted(rates, key=lambda link: (-rates[link], link))[:MOST_LINKS]
    most = rates[busiest[0]] if busiest else 0.0
    rows = [
        _row([f"{link[0]} → {link[1]}", link[2], readable(rates[link])], rates[link], most)
        for link in busiest
    ]
    return _view(("link", "transport", "data/s"), 2, rows)


def _sent_since(then: RankSample, now: RankSample) -> dict[tuple[str, str], int]:
    """Returns what a rank has sent, by host and transport. A row without one before has no rate yet."""
    sent = {(row["peer_host"], row["transport"]): row["bytes"] for row in then.sent}
    return {
        link: row["bytes"] - sent[link]
        for row in now.sent
        if (link := (row["peer_host"], row["transport"])) in sent
        and row["transport"] != _CONTROL
        and row["bytes"] >= sent[link]  # less in a new generation
    }


def _row(cells: list[str], cost: float, most: float) -> dict[str, Any]:
    """Returns a row; its share, from 0 to 1, is that of the first one."""
    return {"cells": cells, "share": round(cost / most, 3) if most else 0.0}


def _view(names: Sequence[str], first_number: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a table whose columns are numbers from `first_number` on."""
    columns = [{"name": name, "is_number": place >= first_number} for place, name in enumerate(names)]
    return {"columns": columns, "rows": rows}
