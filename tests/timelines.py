"""The rules of a timeline: Chrome's Trace Event Format, as far as it is used."""

from __future__ import annotations

import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read_trace(path: Path) -> list[Event]:
    """Returns the events of a whole file; raises AssertionError if they break a rule of the format."""
    return check_trace(path.read_text())


def check_trace(text: str) -> list[Event]:
    events: list[Event] = json.loads(text, parse_float=Decimal)
    slices = defaultdict(list)
    for event in events:
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert event["name"], event
        assert event["ph"] in ("X", "M", "i", "s", "f"), event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            slices[event["pid"], event["tid"]].append(event)
        if event["ph"] != "M":
            assert event["ts"] > 0, event
    for track in slices.values():
        _check_nesting(track)
    _check_flows(events, slices)
    tracks = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert tracks.issuperset(slices), "a track without a name"
    return events


def _check_nesting(track: list[Event]) -> None:
    """Checks that slices of a track are nested or disjoint."""
    open_until: list[Decimal] = []
    for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1], event
        open_until.append(end)


def _check_flows(events: list[Event], slices: dict[tuple[int, int], list[Event]]) -> None:
    """Checks that each flow leads from a slice to one on another track, and not back in time."""
    ends: dict[str, dict[int, Event]] = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]], event
            ends[event["ph"]][event["id"]] = event
            track = slices[event["pid"], event["tid"]]
            assert any(one["ts"] <= event["ts"] <= one["ts"] + one["dur"] for one in track), event
    assert ends["s"].keys() == ends["f"].keys()
    for number, begin in ends["s"].items():
        end = ends["f"][number]
        assert begin["ts"] <= end["ts"], (begin, end)
        assert begin["pid"] != end["pid"], (begin, end)
        assert (begin["name"], begin["cat"], end["bp"]) == (end["name"], end["cat"], "e"), (begin, end)


def read_rows(path: Path) -> dict[str, list[Event]]:
    """Returns the events of each row of a merged file, by its name without the process, in their order."""
    events = read_trace(path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    orders = {
        event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"
    }
    assert orders == {pid: pid for pid in names}
    rows = {names[pid].partition(" (pid ")[0]: pid for pid in sorted(names)}
    assert len(rows) == len(names), "two rows have the same name"
    assert {event["pid"] for event in events} == set(names), "an event is in no row"
    return {name: [event for event in events if event["pid"] == pid] for name, pid in rows.items()}


def slices_named(events: list[Event], track: str) -> list[str]:
    """Returns the names of the slices on the tracks with one name, in order of time."""
    wanted = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == track
    }
    found = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) in wanted]
    return [event["name"] for event in sorted(found, key=lambda event: (event["ts"], -event["dur"]))]
