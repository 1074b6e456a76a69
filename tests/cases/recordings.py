"""Recordings of a rank that somebody who watches the job has ordered."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from timelines import read_trace, slices_named

import sirtaki.numpy as hvd
from cases import case
from sirtaki.bindings.context import current
from sirtaki.bindings.observing import state_file
from sirtaki.bindings.observing.watch_marks import RECORDER, TIMELINE, Order, place_order

LONG = 60.0  # more seconds than any of these recordings lasts


@contextmanager
def ordered(action: str, seconds: float = LONG) -> Iterator[tuple[state_file.Recordings, Path]]:
    """Orders a recording of this rank, which has begun to look for it; yields it and its folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place_order(folder, Order(1, action, str(folder / "files"), seconds))
        found = state_file.Recordings(folder)
        found.look(current())
        yield found, folder / "files"
        found.stop()


def answer_of(found: state_file.Recordings) -> dict[str, Any]:
    wait_for(lambda: found.answer is not None)
    assert found.answer is not None
    return found.answer


def wait_for(condition: Any) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def file_of(folder: Path) -> Path:
    return folder / (f"timeline.json.rank{hvd.rank()}" if hvd.rank() else "timeline.json")


@case(least=2)
def a_recorder_is_written_while_operations_wait() -> None:
    hvd.allreduce(np.ones(10, np.float32), name="ended")
    hvd.barrier()
    handle = hvd.allreduce_async(np.ones(3), name="waiting") if hvd.rank() == 0 else None
    with ordered(RECORDER) as (found, folder):
        file = folder / f"rank{hvd.rank()}.json"
        assert answer_of(found) == {"number": 1, "file": str(file), "note": "", "error": ""}
        values = json.loads(file.read_text())
    hvd.barrier()
    handle = handle or hvd.allreduce_async(np.ones(3), name="waiting")
    assert list(handle.wait()) == [1, 1, 1]
    assert (values["rank"], values["size"], values["status"]) == (hvd.rank(), hvd.size(), "ok")
    assert (values["culprit"], values["reason"]) == (-1, "")
    (ended,) = [one for one in values["finished"] if one["name"] == "ended"]
    assert (ended["kind"], ended["state"], ended["bytes"]) == ("all-reduce", "ok", 40)
    waiting = [one["name"] for one in values["unfinished"]]
    assert waiting == (["waiting"] if hvd.rank() == 0 else [])


@case()
def a_recorder_has_more_operations_than_a_failure_report() -> None:
    for step in range(300):
        hvd.allreduce(1.0, name=f"{step}")
    with ordered(RECORDER) as (found, folder):
        assert answer_of(found)["error"] == ""
        values = json.loads((folder / f"rank{hvd.rank()}.json").read_text())
    assert [one["name"] for one in values["finished"]] == [f"{step}" for step in range(300)]
    hvd.barrier()


@case()
def a_timeline_is_recorded_for_its_time() -> None:
    with ordered(TIMELINE, 0.5) as (found, folder):
        context = current()
        expected = {"number": 1, "file": str(file_of(folder)), "note": "", "error": ""}
        assert answer_of(found) == expected
        assert context.timeline.path == ""
        hvd.allreduce(np.ones(10), name="after")
        assert not slices_named(read_trace(file_of(folder)), "after")
    hvd.barrier()


@case()
def a_timeline_that_becomes_too_large_ends() -> None:
    most = state_file.MAX_BYTES
    hvd.barrier()
    try:
        state_file.MAX_BYTES = 1
        with ordered(TIMELINE) as (found, folder):
            assert answer_of(found)["note"].endswith(" s: its file has reached 0 MiB")
            assert current().timeline.path == ""
            read_trace(file_of(folder))
        hvd.barrier()
    finally:
        state_file.MAX_BYTES = most


@case()
def a_timeline_of_the_program_is_not_replaced() -> None:
    context = current()
    with tempfile.TemporaryDirectory() as name:
        hvd.start_timeline(Path(name) / "own")
        with ordered(TIMELINE) as (found, folder):
            path = context.timeline.path
            error = f"a timeline is being written already, to {path}"
            assert answer_of(found)["error"] == error
            assert (context.timeline.path, list(folder.iterdir())) == (path, [])
        hvd.allreduce(np.ones(10), name="own")
        hvd.stop_timeline()
        assert slices_named(read_trace(Path(path)), "own")[0] == "all-reduce"


@case()
def a_timeline_that_the_program_starts_meanwhile_goes_on() -> None:
    context = current()
    with tempfile.TemporaryDirectory() as name, ordered(TIMELINE) as (found, folder):
        wait_for(lambda: context.timeline.path == str(file_of(folder)))
        hvd.start_timeline(Path(name) / "own")
        path = context.timeline.path
        assert answer_of(found)["note"].endswith(" s: the program has started or stopped a timeline")
        hvd.allreduce(np.ones(10), name="own")
        assert context.timeline.path == path
        hvd.stop_timeline()
        assert slices_named(read_trace(Path(path)), "own")[0] == "all-reduce"
        read_trace(file_of(folder))


@case()
def a_rank_that_leaves_ends_its_recording() -> None:
    with ordered(TIMELINE) as (found, folder):
        wait_for(lambda: current().timeline.path == str(file_of(folder)))
        found.stop()
        assert answer_of(found)["note"].endswith(" s: the rank has left its world")


@case()
def a_folder_that_others_could_have_made_is_not_written_to() -> None:
    with ordered(RECORDER) as (found, folder):
        answer_of(found)
        elsewhere = folder.parent / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        (folder.parent / "link").symlink_to(elsewhere)
        (folder.parent / "open").mkdir()
        (folder.parent / "open").chmod(0o777)
        for number, name in enumerate(("link", "open"), 2):
            place_order(folder.parent, Order(number, RECORDER, str(folder.parent / name), LONG))
            found.answer = None
            wait_for(lambda: not found.is_recording)
            found.look(current())
            assert "is not a folder of this user's own" in answer_of(found)["error"]
            assert list((folder.parent / name).iterdir()) == []
