"""Lines of text in columns, as NVIDIA's nccl-tests print them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

NONE = "N/A"  # as nccl-tests prints a column that does not apply


class Column(NamedTuple):
    """A column: its width, its head, and the unit below."""

    width: int
    head: str
    unit: str = ""


def peer_columns(peers: Sequence[str]) -> list[Column]:
    """Returns a column for each peer's time, as a multiple of sirtaki's."""
    return [Column(8, name, "(x)") for name in peers]


def heads(columns: Sequence[Column]) -> Iterator[str]:
    for cells in ([column.head for column in columns], [column.unit for column in columns]):
        yield "#" + line(cells, columns)[1:]


def line(cells: Sequence[str], columns: Sequence[Column]) -> str:
    return "".join(f" {cell:>{column.width - 1}}" for cell, column in zip(cells, columns, strict=True))


def duration(microseconds: float) -> str:
    """Formats a time with the digits that nccl-tests prints."""
    digits = 2 if microseconds < 100 else 1 if microseconds < 10_000 else 0
    return f"{microseconds:.{digits}f}"
