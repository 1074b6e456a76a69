"""Presentation of results: tables, targets met or missed, and JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.measure import Interval

Row = dict[str, Any]
Columns = Mapping[str, str | Callable[[Row], str]]  # by head: the form of a row's cell, or its function
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


def targets_table(targets: Sequence[Target]) -> Table:
    """Returns each target with its measured value."""
    rows = [[one.what, one.target, one.measured, "met" if one.met else "MISSED"] for one in targets]
    return Table("Targets", ["what", "target", "measured", ""], rows, text_columns=4)


@dataclass(frozen=True)
class Table:
    """A table; the first columns hold text, the other columns numbers. An empty row is a line between."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1

    def print(self) -> None:
        """Prints the table in colours on a terminal, else as Markdown: for a log that becomes a record."""
        if not sys.stdout.isatty() or find_spec("rich") is None:
            print(f"\n{self.markdown(is_aligned=True)}")
            return
        from rich.console import Console
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, title_justify="left", header_style="bold")
        for index, name in enumerate(self.head):
            justify = "left" if index < self.text_columns else "right"
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for row in self.rows:
            if row:
                table.add_row(*row)
            else:
                table.add_section()
        wanted = Console(width=10_000).measure(table).maximum  # a truncated figure is useless
        Console(width=max(Console().width, wanted)).print(table)

    def markdown(self, is_aligned: bool = False) -> str:
        lines = [self.head, ["---"] * len(self.head), *filter(None, self.rows)]
        if is_aligned:
            widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
            lines = [self._aligned(line, widths) for line in lines]
        return "\n".join([f"{self.title}:", "", *(f"| {' | '.join(line)} |" for line in lines)])

    def _aligned(self, line: Sequence[str], widths: Sequence[int]) -> list[str]:
        """Fills up the cells of a line: text to the right, numbers to the left."""
        return [
            cell.ljust(width) if index < self.text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]


def make_table(
    title: str, columns: Columns, rows: Sequence[Row], group: str = "", text_columns: int = 1
) -> Table:
    """Returns a table with one line per row, and a line between rows that differ in the value `group`."""
    cells: list[list[str]] = []
    for before, row in zip([None, *rows], rows, strict=False):
        if group and before is not None and before[group] != row[group]:
            cells.append([])
        cells.append(
            [form.format(**row) if isinstance(form, str) else form(row) for form in columns.values()]
        )
    return Table(title, list(columns), cells, text_columns)


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


def describe_machine() -> list[str]:
    """Returns lines about the machine."""
    here = machine()
    lines = [f"{here['processor']}, {here['cores']} cores, load {here['load']:.1f}, Python {here['python']}"]
    if here["load"] > 1:
        lines.append("something else is running: figures, and even ratios, will be worse than they could be")
    return lines


def as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, default=asdict)


def save(path: Path | None, results: dict[str, Any], targets: Sequence[Target]) -> None:
    """Writes everything as JSON, if a path is given."""
    if path is not None:
        whole = {"command": sys.argv, "machine": machine(), **results, "targets": targets}
        path.write_text(as_json(whole) + "\n")
