"""Orders for recordings, from the page to the ranks of this host and of others, and the ranks' answers."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from launching import wait_until
from rank_samples import state_values
from world import world

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, WireError
from sirtaki.bindings.context import current
from sirtaki.bindings.observing import program_timeline
from sirtaki.bindings.observing.watch_marks import (
    ANSWER,
    FOLDER,
    RECORDER,
    TIMELINE,
    Order,
    is_watched,
    place_order,
    read_order,
    watch_for_now,
)
from sirtaki.runner.dashboard import server as module
from sirtaki.runner.dashboard.server import JobRecordings
from sirtaki.runner.observe.remote_states import RemoteStates, take_order

FIRST = Order(1, RECORDER, "/somewhere", 10.0)


class Ranks:
    """The ranks of a job in a folder, which answer when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.job, self.files = folder / "sirtaki-x", folder / "files"
        self.states = self.job / FOLDER
        self.states.mkdir(parents=True)
        self.files.mkdir()
        self.recordings = JobRecordings(self.job, self.files)

    def write(self, rank: int, **more: Any) -> None:
        values = state_values(rank, os.getpid(), host="hostB" if rank == 2 else "hostA", **more)
        (self.states / f"{rank}.new").write_text(json.dumps(values))
        (self.states / f"{rank}.new").replace(self.states / f"{rank}.json")

    def answer(self, rank: int, is_written: bool = True, **more: str) -> None:
        """Lets a rank answer the last order, after writing its file."""
        order = read_order(self.states, 0)
        assert order is not None
        file = order.file_of(rank)
        if is_written:
            file.touch()
        self.write(
            rank, **{ANSWER: {"number": order.number, "file": str(file), "note": "", "error": "", **more}}
        )

    def result(self) -> dict[str, Any]:
        wait_until(lambda: not (self.recordings.view or {})["is_running"], "the recording has ended")
        return self.recordings.view or {}


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    """Returns a job of three ranks, which have written their states."""
    made = Ranks(tmp_path)
    for rank in range(3):
        made.write(rank)
    return made


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks have a second for their answers."""
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 1.0)


@pytest.mark.parametrize(
    ("action", "what", "first", "last"),
    [
        (RECORDER, "the flight recorder", "rank0.json", "rank2.json"),
        (TIMELINE, "a timeline of 10 s", "timeline.json", "timeline.json.rank2"),
    ],
)
def test_all_ranks_write_into_one_folder(ranks: Ranks, action: str, what: str, first: str, last: str) -> None:
    assert ranks.recordings.view is None
    assert ranks.recordings.begin(action) == ""
    assert is_watched(ranks.states)
    folder = ranks.files / f"sirtaki-x-{action}1"
    running = {"action": action, "is_running": True, "problems": []}
    assert ranks.recordings.view == {**running, "text": f"{what} is being written by 3 ranks to {folder}"}
    for again in (RECORDER, TIMELINE):
        assert ranks.recordings.begin(again) == f"{what} is being written: wait until that has ended"
    for rank in range(3):
        ranks.answer(rank)
    text = f"3 of 3 ranks have written {what} to {folder}: sirtaki trace report {folder}"
    assert ranks.result() == {"action": action, "is_running": False, "text": text, "problems": []}
    assert (folder.stat().st_mode & 0o777, sorted(os.listdir(folder))[::2]) == (0o700, [first, last])
    assert ranks.recordings.begin(action) == ""
    assert (ranks.files / f"sirtaki-x-{action}2").is_dir()
    for rank in range(3):
        ranks.answer(rank)
    ranks.result()


def test_ranks_that_cannot_write_are_named(ranks: Ranks) -> None:
    ranks.write(0, size=4)
    assert ranks.recordings.begin(TIMELINE) == ""
    ranks.answer(0, note="its timeline ended after 3.0 s: its file has reached 64 MiB")
    ranks.answer(1, is_written=False, error="a timeline is being written already, to t.json")
    ranks.answer(2, is_written=False)
    folder = ranks.files / "sirtaki-x-timeline1"
    assert ranks.result()["problems"] == [
        "rank 0 on hostA: its timeline ended after 3.0 s: its file has reached 64 MiB",
        "rank 1 on hostA could not write: a timeline is being written already, to t.json",
        f"rank 2 wrote to {folder} of hostB, which this host cannot read: copy the files from there",
        "1 of 4 ranks have written no state, and were not asked",
    ]
    assert (ranks.recordings.view or {})["text"].startswith("2 of 4 ranks have written a timeline of 10 s to")


@pytest.mark.usefixtures("impatience")
def test_ranks_that_do_not_answer_are_named_and_leave_no_folder(ranks: Ranks) -> None:
    ranks.write(1, **{ANSWER: {"number": 7, "file": "", "note": "", "error": ""}})  # of another order
    assert ranks.recordings.begin(RECORDER) == ""
    result = ranks.result()
    assert result["text"] == "no rank has written the flight recorder"
    silent = "gave no answer: stopped, ended, or in a long call that holds Python's lock"
    assert result["problems"] == [f"ranks 0-1 on hostA {silent}", f"rank 2 on hostB {silent}"]
    assert os.listdir(ranks.files) == []


def test_a_recording_that_cannot_begin_is_refused(ranks: Ranks) -> None:
    elsewhere = JobRecordings(ranks.job, ranks.files / "none")
    reason = "cannot be made (No such file or directory): start hvdrun in a folder that you can write to"
    assert elsewhere.begin(RECORDER) == f"{ranks.files}/none/sirtaki-x-recorder1 {reason}"
    nobody = JobRecordings(ranks.files / "no job", ranks.files)
    assert nobody.begin(RECORDER) == (
        "no rank has written its state: they have not called init() yet, or have ended"
    )
    assert (elsewhere.view, nobody.view, os.listdir(ranks.files)) == (None, None, [])


@pytest.mark.usefixtures("impatience")
def test_the_recordings_of_a_job_are_bounded(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 1)
    assert ranks.recordings.begin(RECORDER) == ""
    ranks.result()
    refusal = "1 recordings have been made of this job, and there are no more"
    assert ranks.recordings.begin(RECORDER) == refusal


def test_an_order_is_read_once_and_not_when_it_is_old(tmp_path: Path) -> None:
    assert read_order(tmp_path, 0) is None
    place_order(tmp_path, FIRST)
    assert read_order(tmp_path, 0) == FIRST
    assert read_order(tmp_path, 1) is None
    old = time.time() - 60
    os.utime(tmp_path / "order", (old, old))
    assert read_order(tmp_path, 0) is None


@pytest.mark.parametrize("change", [{"number": 0}, {"action": "abort"}, {"seconds": 1e9}, {"folder": None}])
def test_a_malformed_order_is_ignored_or_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    values = {name: value for name, value in {**FIRST._asdict(), **change}.items() if value is not None}
    (tmp_path / "order").write_text(json.dumps(values))
    assert read_order(tmp_path, 0) is None
    with pytest.raises(WireError, match="ORDER is malformed"):
        take_order(tmp_path / "other", Frame.of(MessageKind.ORDER, values))
    assert not (tmp_path / "other").exists()


def test_hvdrun_passes_an_order_on_once(tmp_path: Path) -> None:
    sent: list[Frame] = []
    here, there = tmp_path / "here", tmp_path / "there"
    states = RemoteStates("hostB", here, sent.append)
    now = time.monotonic()
    watch_for_now(here)
    place_order(here, FIRST)
    states.poll(now)
    states.poll(now + 1.5)
    assert [frame.kind for frame in sent] == [MessageKind.ORDER, MessageKind.WATCH, MessageKind.WATCH]
    take_order(there, sent[0])
    assert is_watched(there)
    assert read_order(there, 0) == FIRST


def test_a_timeline_without_a_thread_to_watch_the_program_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> None:
        context, path = current(), str(tmp_path / "timeline.json")
        with monkeypatch.context() as patched:
            patched.setattr(program_timeline.ProgramWatch, "__init__", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                context.timeline.start(context, path, False)
        assert context.timeline.path == ""
        assert context.timeline.start(context, path, False, unless_running=True)
        context.timeline.stop(context)

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with world(1) as ranks:
        ranks.run(begin)
