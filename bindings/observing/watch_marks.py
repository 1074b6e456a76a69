"""The marks by which a watcher of a job asks its ranks for their states. Opening them needs no core."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = "states"  # in a job's private folder
REMOTE = "remote"  # in that folder: one with the states of other hosts' ranks
ALWAYS = "always"  # the mark of a watcher that stays until the job ends: a file in the folder
FOR_NOW = "for now"  # that of a watcher that renews it
FOR_NOW_SECONDS = 10.0
INTERVAL_SECONDS = 1.0  # between two looks at the marks, and between two states


def is_watched(folder: Path) -> bool:
    """Returns whether the folder has a watcher's mark."""
    return is_watched_for_now(folder) or (folder / ALWAYS).exists()


def is_watched_for_now(folder: Path) -> bool:
    """Returns whether the folder has the mark of a watcher that renews it."""
    try:
        age = time.time() - os.stat(folder / FOR_NOW).st_mtime
    except OSError:
        age = FOR_NOW_SECONDS
    return abs(age) < FOR_NOW_SECONDS


def watch_for_now(folder: Path) -> None:
    """Sets or renews the mark. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / FOR_NOW).touch()


def replace_file(path: Path, text: str) -> None:
    """Writes a file of the folder as a whole, so that no reader sees a part. Raises OSError."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)


# ---- Orders for recordings: somebody who watches a job has its ranks write what they do to files -------
# An order is a file in the folder of the ranks' states (`watch_marks`), which the ranks of this host
# read. hvdrun passes it on to other hosts. Placing one needs no core.


RECORDER, TIMELINE = "recorder", "timeline"
ANSWER = "recording"  # the name of a rank's answer in its state
_FILE = "order"
_FRESH_SECONDS = 5.0  # in which ranks look for an order several times


class Order(NamedTuple):
    """A recording that all ranks are to make.

    Attributes:
        number: counts the orders of a job, from 1.
        action: RECORDER, for the last operations and those in flight, or TIMELINE.
        folder: where each rank writes its file, on its own host.
        seconds: how long a timeline is recorded.
    """

    number: int
    action: str
    folder: str
    seconds: float

    def file_of(self, rank: int) -> Path:
        """Returns the path of a rank's file, named so that `sirtaki trace` finds the other ranks' files."""
        name = (
            f"rank{rank}.json"
            if self.action == RECORDER
            else "timeline.json" + (f".rank{rank}" if rank else "")
        )
        return Path(self.folder) / name


def parse_order(values: Mapping[str, Any]) -> Order:
    """Returns the order with these values. Raises KeyError, TypeError or ValueError if they are malformed."""
    order = Order(
        int(values["number"]), str(values["action"]), str(values["folder"]), float(values["seconds"])
    )
    if order.number < 1 or order.action not in (RECORDER, TIMELINE) or not 0 <= order.seconds <= 60:
        raise ValueError("no order of this version")
    return order


def place_order(states: Path, order: Order) -> None:
    """Has the ranks of this host record. Raises OSError."""
    replace_file(states / _FILE, json.dumps(order._asdict()))


def read_order(states: Path, after: int) -> Order | None:
    """Returns the order of this moment if its number is above `after`."""
    try:
        file = states / _FILE
        if abs(time.time() - os.stat(file).st_mtime) > _FRESH_SECONDS:
            return None
        order = parse_order(json.loads(file.read_text()))
    except (OSError, KeyError, TypeError, ValueError):  # in most cases there is none
        return None
    return order if order.number > after else None
