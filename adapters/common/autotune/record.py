"""The record of a search: a CSV file, and a paragraph that explains the result.

The file has a line for what the first steps have exchanged, one for each change that is left out, and one for
each block of steps, with the settings and the time of a step. The last line has the verdict "kept", and the
settings that were kept: `hvdrun --autotune-load` reads these.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from sirtaki.common.autotune.search import MARGIN, PROOF_PAIRS, PROOF_WINS, Block, Findings, LeftOut, Settings

KEPT, LEFT_OUT = "kept", "left out"  # verdicts
_begun: set[str] = set()  # the files that this process has written: another world of it appends


class Log:
    """The CSV file. Each line is complete when it is written: a job that is killed leaves those before.

    The worlds of a process follow each other in one file, whose last result counts.
    """

    def __init__(self, path: str, names: Sequence[str]) -> None:
        """Creates or overwrites the file, with columns for the settings of these names; "": writes none. A
        file of an earlier world of this process is continued.

        Raises:
            ValueError: it cannot be written.
        """
        self._file: IO[str] | None = None
        if not path:
            return
        try:
            file = os.path.abspath(path)
            mode = "a" if file in _begun else "w"
            self._file = open(file, mode, newline="", buffering=1)  # noqa: SIM115  # until the search ends
            self._lines = csv.writer(self._file, lineterminator="\n")
            if self._file.tell() == 0:
                self._lines.writerow(["step", "purpose", *names, "step_seconds", "verdict"])
            _begun.add(file)
        except OSError as error:
            raise ValueError(f"autotune_log: cannot write {path}: {error.strerror}") from None

    def block(self, step: int, block: Block, seconds: float) -> None:
        """Records a block of steps that ended with `step`."""
        if self._file is not None:
            with suppress(OSError):  # a full disk is no reason to end a training
                self._lines.writerow([step, block.purpose, *block.settings.values(), f"{seconds:.6f}", ""])

    def model(self, step: int, findings: Findings, seconds: float) -> None:
        """Records what the steps before `step` have exchanged, and each change that is left out."""
        if self._file is None:
            return
        with suppress(OSError):
            purpose = f"model: {findings.measured}"
            self._lines.writerow([step, purpose, *findings.start.values(), f"{seconds:.6f}", ""])
            for one in findings.left_out:
                settings = one.change.of(findings.start).values()
                self._lines.writerow([step, f"{one.change}: {one.reason}", *settings, "", LEFT_OUT])

    def close(self, step: int, kept: Settings | None) -> None:
        """Records the result, if there is one, and completes the file."""
        if self._file is None:
            return
        with suppress(OSError):
            if kept is not None:
                self._lines.writerow([step, "result", *kept.values(), "", KEPT])
        with suppress(OSError):
            self._file.close()


def paragraph(findings: Findings, steps: int) -> str:
    """Explains a search: what was tried, what was kept, and why."""
    sentences = [_extent(findings, steps)]
    if findings.measured:
        sentences.append(f"The first steps exchanged {findings.measured}")
    if findings.left_out:
        sentences.append(_omissions(findings.left_out, len(findings.left_out) + findings.tried))
    kept = {change.setting for change in findings.changes}
    for verdict in findings.verdicts:
        change, share = verdict.change, f"{verdict.ratio:.0%} of the time of those without it"
        if verdict.is_kept and change.setting in kept:
            before = findings.start[change.setting]
            sentences.append(f"Kept {change} (before: {before}): steps took {share}")
        elif verdict.is_kept:
            sentences.append(f"Reverted {change}, although steps took {share} at first")
        else:
            sentences.append(
                f"Not kept: {change}, because steps took {share}, and less in {verdict.wins} of "
                f"{PROOF_PAIRS} comparisons: less than {1 - MARGIN:.0%}, and less in {PROOF_WINS}, would do"
            )
    if findings.whole_ratio is not None:
        sentences.append(f"With all changes, steps took {findings.whole_ratio:.0%} of the time of the start")
    if findings.tried or not findings.left_out:
        sentences.append(_advice(findings.start, findings.kept))
    return ". ".join(sentences) + "."


def _extent(findings: Findings, steps: int) -> str:
    if findings.left_out and not findings.tried:
        return (
            f"autotune has tried no change of settings, because the first {steps} steps have shown that none "
            f"can make steps faster by {MARGIN:.0%}"
        )
    state = "" if findings.is_finished else f", and {findings.end} before all were compared"
    return (
        f"autotune has tried {findings.tried} changes of settings in {steps} steps, in turns with the "
        f"settings without them{state}"
    )


def _omissions(left_out: Sequence[LeftOut], most: int) -> str:
    """Says which changes were left out of `most`, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for one in left_out:
        by_reason.setdefault(one.reason, []).append(str(one.change))
    clauses = [
        f"{', '.join(changes) if len(changes) < most else 'all'}, because {reason}"
        for reason, changes in by_reason.items()
    ]
    return f"{len(left_out)} changes were left out: {'; '.join(clauses)}"


def _advice(start: Settings, kept: Settings) -> str:
    changed = {name: value for name, value in kept.items() if start[name] != value}
    if not changed:
        return f"The settings stay as they were: no change made steps faster by {MARGIN:.0%} or more"
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changed.items())
    return f"To start with this result: hvdrun {options}, or --autotune-load with the file of --autotune-log"
