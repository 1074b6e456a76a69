"""Prints the table of a script's steps, writes them to results.json, and ends with 1 if a step has failed.

Usage: table.py FOLDER

The folder has a file `steps`, with a line `NAME EXIT_CODE START END LIMIT` for each step, and a log NAME.log.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from card import FIGURE, SKIPPED

TABLES = re.compile(r"^[^\n]+:\n\n(?:\|[^\n]*\n)+", re.MULTILINE)  # of a benchmark: a title, and Markdown
TESTS = re.compile(r"\d+ (?:passed|failed|skipped|error)[^=\n]*", re.MULTILINE)


@dataclass
class Step:
    """The result of a step: `outcome` is passed, failed or skipped, `note` the reason or pytest's summary."""

    name: str
    outcome: str
    seconds: float
    note: str
    figures: dict[str, Any] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)


def read(folder: Path) -> list[Step]:
    return [judge(folder, *line.split()) for line in (folder / "steps").read_text().splitlines()]


def judge(folder: Path, name: str, code: str, started: str, ended: str, limit: str) -> Step:
    log = (folder / f"{name}.log").read_text(errors="replace")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    tests = TESTS.findall(log)
    skipped = [line.partition(SKIPPED)[2] for line in lines if SKIPPED in line]
    step = Step(name, "passed", round(float(ended) - float(started), 1), tests[-1] if tests else "")
    step.tables = TABLES.findall(log)
    for line in lines:
        if FIGURE in line:
            step.figures.update(json.loads(line.partition(FIGURE)[2]))
    last = lines[-1] if lines else ""
    if int(code) and step.seconds >= float(limit):
        step.outcome, step.note = "failed", f"over its limit of {limit} s; last line: {last}"
    elif int(code):
        step.outcome, step.note = "failed", step.note or f"exit code {code}: {last}"
    elif skipped:
        step.outcome, step.note = "skipped", skipped[0].strip()
    elif tests and "passed" not in step.note:
        step.outcome = "skipped"
    return step


def show(steps: list[Step]) -> None:
    print(f"\n{'step':20} {'':8} {'seconds':>7}  result")
    for step in steps:
        print(f"{step.name:20} {step.outcome:8} {step.seconds:7.1f}  {step.note}")
        for name, value in step.figures.items():
            print(f"{'':38}{name}: {value}")
    for step in steps:
        for table in step.tables:
            print(f"\n{table}", end="")


def main() -> None:
    folder = Path(sys.argv[1])
    steps = read(folder)
    show(steps)
    (folder / "results.json").write_text(json.dumps([asdict(step) for step in steps], indent=1) + "\n")
    print(f"\nlogs and results.json: {folder}")
    sys.exit(any(step.outcome == "failed" for step in steps))


if __name__ == "__main__":
    main()
