"""The table of `sirtaki top`, for a terminal or as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sirtaki.runner.top.rows import FINE, NOTE, PROBLEM, Row
from sirtaki.runner.top.snapshot import Snapshot

_COLOURS = {FINE: "", NOTE: "yellow", PROBLEM: "bold red"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# The columns: the header, whether numbers are aligned at the right, and the text of a row.
COLUMNS = (
    ("rank", True, lambda row: str(row.rank)),
    ("host", False, lambda row: row.host),
    ("pid", True, lambda row: str(row.pid)),
    ("op/s", True, lambda row: f"{row.operations:.0f}"),
    ("data/s", True, lambda row: readable(row.bytes)),
    ("waits", True, lambda row: f"{row.waiting:.0%}"),
    ("moves", True, lambda row: f"{row.moving:.0%}"),
    ("late", True, lambda row: f"{row.late:.0%}"),
    ("cores", True, lambda row: f"{row.cores:.2f}"),
    ("memory", True, lambda row: readable(row.memory)),
    ("state", False, lambda row: row.state),
)
LEGEND = (
    "waits: share of the time in which it waited for other ranks; moves: in which data moved; late: in which "
    "all others waited for it alone"
)


def readable(size: float) -> str:
    """Returns a number of bytes with a unit: "1.5 MiB"."""
    place = 0
    while size >= 1000 and place < len(_UNITS) - 1:
        size, place = size / 1024, place + 1
    return f"{size:.0f} {_UNITS[place]}" if size >= 10 or not place else f"{size:.1f} {_UNITS[place]}"


def head_of(snapshot: Snapshot) -> list[str]:
    """Returns the lines above the table: the job, its ranks, and the last change of an elastic job."""
    up = [one for one in snapshot.ranks if one.is_up]
    hosts = sorted({one.host for one in snapshot.ranks})
    lines = [f"{snapshot.job}: {len(up)} of {snapshot.size} ranks are up on {', '.join(hosts) or 'no host'}"]
    newest = snapshot.newest
    if newest is not None and newest.last_change:
        lines.append(f"generation {newest.generation}: {newest.last_change}")
    if away := snapshot.ranks_away:
        lines.append(
            f"{away} of {snapshot.size} ranks are on other hosts, or have written nothing yet: "
            "run `sirtaki top` there, too"
        )
    return lines


def render(snapshot: Snapshot, rows: Sequence[Row]) -> Group:
    """Returns the table with its head, for rich."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header, is_number, _ in COLUMNS:
        is_last = header == "state"
        side: Literal["right", "left"] = "right" if is_number else "left"
        table.add_column(header, justify=side, no_wrap=not is_last, ratio=1 if is_last else None)
    for row in rows:
        table.add_row(*(Text(text(row)) for *_, text in COLUMNS), style=_COLOURS[row.level])
    return Group(*map(Text, head_of(snapshot)), "", table, "", Text(LEGEND, style="dim"))
