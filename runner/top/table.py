"""The table of `sirtaki top`, for a terminal or as plain text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sirtaki.runner.top.rows import FINE, NOTE, PROBLEM, RankRow, TrainingProgress, progress_of
from sirtaki.runner.top.snapshot import Snapshot

Column = tuple[str, bool, Callable[[RankRow], str]]
_COLOURS = {FINE: "", NOTE: "yellow", PROBLEM: "bold red"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# The columns: the header, whether numbers are aligned at the right, and the text of a row, "" if unknown.
COLUMNS: tuple[Column, ...] = (
    ("rank", True, lambda row: str(row.rank)),
    ("host", False, lambda row: row.host),
    ("pid", True, lambda row: str(row.pid)),
    ("op/s", True, lambda row: f"{row.operations:.0f}"),
    ("data/s", True, lambda row: readable(row.bytes)),
    ("step", True, lambda row: str(row.step) if row.step else ""),
    ("ms/step", True, lambda row: "" if row.step_seconds is None else significant(1000 * row.step_seconds)),
    ("exposed", True, lambda row: "" if row.exposed is None else f"{row.exposed:.0%}"),
    ("waits", True, lambda row: f"{row.waiting:.0%}"),
    ("moves", True, lambda row: f"{row.moving:.0%}"),
    ("late", True, lambda row: f"{row.late:.0%}"),
    ("cores", True, lambda row: f"{row.cores:.2f}"),
    ("memory", True, lambda row: readable(row.memory)),
    ("state", False, lambda row: row.state),
)
# The columns with shares of the time, in which that is true of a rank.
_SHARES = {
    "exposed": "its program waited for the exchange of a step",
    "waits": "it waited for other ranks",
    "moves": "data moved",
    "late": "all others waited for it alone",
}


def readable(size: float) -> str:
    """Returns a number of bytes with a unit: "1.5 MiB"."""
    place = 0
    while size >= 1000 and place < len(_UNITS) - 1:
        size, place = size / 1024, place + 1
    return f"{size:.0f} {_UNITS[place]}" if size >= 10 or not place else f"{size:.1f} {_UNITS[place]}"


def significant(number: float) -> str:
    """Returns a positive number with three digits or more: "0.0123", "12.3", "1230"."""
    places = 2 - math.floor(math.log10(number)) if number > 0 else 0
    return f"{number:.{min(max(places, 0), 4)}f}"


def columns_of(rows: Sequence[RankRow]) -> list[Column]:
    """Returns the columns of which something is known."""
    return [column for column in COLUMNS if any(column[2](row) for row in rows)]


def legend_of(rows: Sequence[RankRow]) -> str:
    """Returns the meaning of the columns with shares."""
    known = {name for name, *_ in columns_of(rows)}
    found = [f"{name}: in which {text}" for name, text in _SHARES.items() if name in known]
    return f"shares of the time. {'; '.join(found)}" if found else ""


def progress_texts(progress: TrainingProgress | None) -> dict[str, str]:
    """Returns what is known of a training, by names."""
    if progress is None:
        return {}
    rate, goodput = progress.rate, progress.goodput
    return {
        "step": str(progress.step),
        **({"steps/s": significant(rate)} if rate is not None else {}),
        **({"goodput": f"{goodput:.0%}"} if goodput is not None else {}),
    }


def head_of(snapshot: Snapshot, progress: TrainingProgress | None = None) -> list[str]:
    """Returns the lines above the table: the job, its ranks, its training, and the last change of an elastic
    job.
    """
    up = [rank for rank in snapshot.ranks if rank.is_up]
    hosts = sorted({rank.host for rank in snapshot.ranks})
    lines = [f"{snapshot.job}: {len(up)} of {snapshot.size} ranks are up on {', '.join(hosts) or 'no host'}"]
    if texts := progress_texts(progress):
        lines.append(", ".join(f"{name} {text}" for name, text in texts.items()))
    newest = snapshot.newest
    if newest is not None and newest.last_change:
        lines.append(f"generation {newest.generation}: {newest.last_change}")
    if away := snapshot.ranks_away:
        lines.append(
            f"{away} of {snapshot.size} ranks have written nothing yet, or are on other hosts: "
            "`sirtaki top` on hvdrun's host shows those of all"
        )
    return lines


def render(snapshot: Snapshot, rows: Sequence[RankRow]) -> Group:
    """Returns the table with its head, for rich."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = columns_of(rows)
    for header, is_number, _ in columns:
        is_last = header == "state"
        side: Literal["right", "left"] = "right" if is_number else "left"
        table.add_column(header, justify=side, no_wrap=not is_last, ratio=1 if is_last else None)
    for row in rows:
        table.add_row(*(Text(text(row)) for *_, text in columns), style=_COLOURS[row.level])
    head = head_of(snapshot, progress_of(snapshot, rows))
    return Group(*map(Text, head), "", table, "", Text(legend_of(rows), style="dim"))
