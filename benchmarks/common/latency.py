"""Rows of measured latency: one implementation of one collective operation at one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.collectives import COLLECTIVES
from common.measure import Interval, median, medians, quantile, ratio
from common.report import optional, readable, show_rows

Blocks = Mapping[str, Sequence[Sequence[float]]]  # microseconds, by implementation and block


@dataclass
class Row:
    """The latency of one implementation; times in microseconds, of the slowest rank."""

    collective: str
    bytes: int
    who: str
    median: float
    p99: float
    algbw: float  # 10^9 bytes per second
    busbw: float
    cold: float | None = None
    slower: Interval | None = None  # its time as a multiple of that of sirtaki's same layer
    slower_than_core: Interval | None = None  # its time as a multiple of that of sirtaki's C functions
    speed: Interval | None = None  # the memory bound's time as a multiple of its own


def make_row(collective: str, size: int, who: str, ranks: int, times: Sequence[float]) -> Row:
    middle = median(times)
    algbw = size / middle / 1e3
    factor = COLLECTIVES[collective].bus_factor(ranks)
    return Row(collective, size, who, middle, quantile(times, 0.99), algbw, algbw * factor)


def make_rows(
    collective: str, size: int, ranks: int, blocks: Blocks, baselines: Mapping[str, str]
) -> list[Row]:
    """Summarizes blocks of calls. `baselines` names the implementation that each peer is compared with."""
    rows = []
    for who, measured in blocks.items():
        row = make_row(collective, size, who, ranks, [time for block in measured for time in block])
        row.slower = compare(blocks, who, baselines.get(who, ""))
        rows.append(row)
    return rows


def compare(blocks: Blocks, who: str, other: str) -> Interval | None:
    """Returns one's time as a multiple of the other's, by block; None if the other was not measured."""
    if other not in blocks:
        return None
    return ratio(medians(blocks[who]), medians(blocks[other]))


def show_latency(rows: Sequence[Row], ranks: int) -> None:
    """Prints a table for each collective."""
    for collective in dict.fromkeys(row.collective for row in rows):
        _show_collective([row for row in rows if row.collective == collective], ranks)


def _show_collective(rows: Sequence[Row], ranks: int) -> None:
    columns = [
        ("size", lambda row: readable(row.bytes) if row.bytes else ""),
        ("who", lambda row: row.who),
        ("median µs", lambda row: f"{row.median:,.1f}"),
        ("p99 µs", lambda row: f"{row.p99:,.1f}"),
        ("cold µs", lambda row: optional(row.cold, ".1f")),
        ("algbw GB/s", lambda row: f"{row.algbw:.3f}" if row.bytes else ""),
        ("busbw GB/s", lambda row: f"{row.busbw:.3f}" if row.bytes else ""),
        ("time / sirtaki's", lambda row: optional(row.slower, ".2f")),
    ]
    if all(row.cold is None for row in rows):
        columns = [column for column in columns if column[0] != "cold µs"]
    dtype = ", float32" if rows[0].bytes else ""
    title = f"{COLLECTIVES[rows[0].collective].title}{dtype}, {ranks} ranks"
    show_rows(title, columns, rows, text_columns=2, group=lambda row: row.bytes)


def least_ratio(rows: Sequence[Row], who: str, low: int, high: int) -> float | None:
    """Returns the lowest ratio of an implementation's time to sirtaki's, in a range of sizes."""
    found = [row.slower.median for row in rows if row.who == who and low <= row.bytes <= high and row.slower]
    return min(found, default=None)
