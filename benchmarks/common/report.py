"""Presentation of results: tables, targets met or missed, and JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from common.measure import Interval

Row = TypeVar("Row")
UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


@dataclass(frozen=True)
class Target:
    """A goal, and the measured value."""

    what: str
    target: str
    measured: str
    met: bool


def at_least(what: str, bound: float, value: float, unit: str = "×") -> Target:
    """Returns a target that is met from `bound` on."""
    return Target(what, f"≥ {bound:g} {unit}", f"{value:.3g} {unit}", value >= bound)


def at_most(what: str, bound: float, value: float, unit: str) -> Target:
    """Returns a target that is met up to `bound`."""
    return Target(what, f"≤ {bound:.3g} {unit}", f"{value:.3g} {unit}", value <= bound)


def show_targets(targets: Sequence[Target]) -> None:
    """Prints each target with its measured value, if there are any."""
    rows = [[one.what, one.target, one.measured, "met" if one.met else "MISSED"] for one in targets]
    if rows:
        show_table("Targets", ["what", "target", "measured", ""], rows, text_columns=4)


def show_versions(versions: Mapping[str, str]) -> None:
    for name, version in versions.items():
        print(f"{name}: {version}")


def show_rows(
    title: str,
    columns: Sequence[tuple[str, Callable[[Row], str]]],
    rows: Sequence[Row],
    *,
    text_columns: int = 1,
    group: Callable[[Row], Any] | None = None,
) -> None:
    """Prints a table with one line per row, and a line between rows of different groups.

    `columns` holds the head of each column and the function that formats a row's cell.
    """
    table: list[list[str]] = []
    for before, row in zip([None, *rows], rows, strict=False):
        if group and before is not None and group(before) != group(row):
            table.append([])
        table.append([cell(row) for _, cell in columns])
    show_table(title, [head for head, _ in columns], table, text_columns)


def show_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> None:
    """Prints a table; the first columns hold text, the others numbers. An empty row is a line between."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _show_plain(title, head, rows)
        return
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index < text_columns else "right", no_wrap=True)
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    wanted = Console(width=10_000).measure(table).maximum  # a truncated figure is useless
    Console(width=max(Console().width, wanted)).print(table)


def _show_plain(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [list(head), *([*row] for row in rows if row)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def readable(size: int) -> str:
    """Formats a number of bytes for people."""
    divisor, unit = next((divisor, unit) for divisor, unit in UNITS if size >= divisor)
    return f"{size / divisor:g} {unit}"


def optional(value: float | Interval | None, form: str) -> str:
    """Formats a value; returns an empty cell without one."""
    return "" if value is None else format(value, form)


def machine() -> dict[str, Any]:
    """Describes the machine. The load shows whether anything else was running."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    return {
        "processor": model,
        "cores": cores,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def show_machine() -> None:
    """Prints the machine's description."""
    here = machine()
    print(f"{here['processor']}, {here['cores']} cores, load {here['load']:.1f}, Python {here['python']}")
    if here["load"] > 1:
        print("something else is running: figures, and even ratios, will be worse than they could be")


def save(path: Path | None, results: dict[str, Any], targets: Sequence[Target]) -> None:
    """Writes everything as JSON, if a path is given."""
    if path is not None:
        whole = {"command": sys.argv, "machine": machine(), **results, "targets": targets}
        path.write_text(json.dumps(whole, indent=2, default=asdict) + "\n")
