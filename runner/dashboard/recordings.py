"""The recordings that the page of a job offers: all ranks write their recorders, or a timeline, to files."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sirtaki.bindings.recording_orders import ANSWER, RECORDER, TIMELINE, Order, place_order
from sirtaki.bindings.watch_marks import FOLDER, watch_for_now
from sirtaki.runner.states import RankState, read_job
from sirtaki.runner.trace.formats import ranks_text

TIMELINE_SECONDS = 10.0
MOST = 20  # recordings of a job: each may take 64 MiB a rank
_ANSWER_SECONDS = 10.0  # for all ranks to begin, and to say that they have ended
_LOOK_SECONDS = 0.25
_NAMES = {RECORDER: "the flight recorder", TIMELINE: f"a timeline of {TIMELINE_SECONDS:g} s"}


class Recordings:
    """The recordings of one job, one at a time. Files come into folders beside hvdrun's own files."""

    def __init__(self, job: Path, parent: Path) -> None:
        """`job` is the job's private folder; folders are made in `parent`."""
        self._job, self._states, self._parent = job, job / FOLDER, parent
        self._lock = threading.Lock()
        self._count = 0
        self._view: dict[str, Any] | None = None

    @property
    def view(self) -> dict[str, Any] | None:
        """The last recording as the page shows it, as JSON; None if there was none."""
        return self._view

    def begin(self, action: str) -> str:
        """Has all ranks record; returns "" or why that cannot be."""
        with self._lock:
            if self._view is not None and self._view["is_running"]:
                return f"{_NAMES[self._view['action']]} is being written: wait until that has ended"
            if self._count >= MOST:
                return f"{MOST} recordings have been made of this job, and there are no more"
            ranks = {state.values["rank"]: state for state in read_job(self._states) if state.is_up}
            if not ranks:
                return "no rank has written its state: they have not called init() yet, or have ended"
            folder = self._parent / f"{self._job.name}-{action}{self._count + 1}"
            order = Order(self._count + 1, action, str(folder), TIMELINE_SECONDS)
            try:
                folder.mkdir(mode=0o700)
                watch_for_now(self._states)
                place_order(self._states, order)
            except OSError as error:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                advice = "start hvdrun in a folder that you can write to"
                return f"{folder} cannot be made ({error.strerror}): {advice}"
            self._count += 1
            text = f"{_NAMES[action]} is being written by {len(ranks)} ranks to {folder}"
            self._view = {"action": action, "is_running": True, "text": text, "problems": []}
        arguments = (order, ranks)
        threading.Thread(target=self._follow, args=arguments, name="sirtaki recording", daemon=True).start()
        return ""

    def _follow(self, order: Order, ranks: Mapping[int, RankState]) -> None:
        """Waits until the ranks have answered, and shows what they say."""
        text, problems = "their answers cannot be read", list[str]()
        try:
            text, problems = self._outcome(order, ranks)
        finally:
            self._view = {"action": order.action, "is_running": False, "text": text, "problems": problems}

    def _outcome(self, order: Order, ranks: Mapping[int, RankState]) -> tuple[str, list[str]]:
        """Returns what the ranks have written, and sentences about those that have not."""
        duration = order.seconds if order.action == TIMELINE else 0.0
        end = time.monotonic() + duration + _ANSWER_SECONDS
        answers: dict[int, dict[str, Any]] = {}
        while answers.keys() != ranks.keys() and time.monotonic() < end and self._job.exists():
            time.sleep(_LOOK_SECONDS)
            with contextlib.suppress(OSError):  # the job has ended
                watch_for_now(self._states)
            answers |= _answers(read_job(self._states), order.number, ranks)
        folder = Path(order.folder)
        written = [rank for rank in sorted(answers) if not answers[rank]["error"]]
        size = max(state.values["size"] for state in ranks.values())
        text = f"no rank has written {_NAMES[order.action]}"
        if written:
            text = f"{len(written)} of {size} ranks have written {_NAMES[order.action]} to {folder}"
            text += f": sirtaki trace report {shlex.quote(str(folder))}"
        problems = [*_problems(order, ranks, answers)]
        if len(ranks) < size:
            problems.append(f"{size - len(ranks)} of {size} ranks have written no state, and were not asked")
        with contextlib.suppress(OSError):  # it has files
            folder.rmdir()
        return text, problems


def _answers(
    states: list[RankState], number: int, ranks: Mapping[int, RankState]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the answers of ranks to the order with this number."""
    for state in states:
        rank, answer = state.values["rank"], state.values.get(ANSWER)
        if rank in ranks and isinstance(answer, dict) and answer.get("number") == number:
            yield rank, {name: str(answer.get(name, "")) for name in ("file", "note", "error")}


def _problems(
    order: Order, ranks: Mapping[int, RankState], answers: Mapping[int, Mapping[str, str]]
) -> Iterator[str]:
    """Yields sentences about ranks that have written nothing, less, or on other hosts."""
    found = defaultdict(list)
    for rank, state in sorted(ranks.items()):
        host = state.values["host"]
        if (answer := answers.get(rank)) is None:
            found[
                f"on {host} gave no answer: stopped, ended, or in a long call that holds Python's lock"
            ].append(rank)
        elif answer["error"]:
            found[f"on {host} could not write: {answer['error']}"].append(rank)
        elif not os.path.exists(answer["file"]):
            text = (
                f"wrote to {order.folder} of {host}, which this host cannot read: copy the files from there"
            )
            found[text].append(rank)
        elif answer["note"]:
            found[f"on {host}: {answer['note']}"].append(rank)
    for text, numbers in found.items():
        yield f"{ranks_text(numbers)} {text}"
