"""The actions of the page of `hvdrun --dashboard`: who may ask for them, and what ranks write."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from dashboards import KINDS, NO_JOB, Served, address_in, cookie_of, events_of, request, serve, start_summing
from launching import TRAINING, Hosts, Start, read_pids, script_writer
from timelines import check_trace

Command = Callable[..., subprocess.CompletedProcess[str]]
HOST = socket.gethostname()
NO_STATE = b"no rank has written its state: they have not called init() yet, or have ended\n"


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(lambda: iter(()), NO_JOB) as found:
        yield found


@pytest.mark.parametrize("action", ["recorder", "timeline"])
def test_an_action_needs_the_cookie_and_the_token_of_the_page(served: Served, action: str) -> None:
    def post(**headers: str) -> HTTPResponse:
        return served.get(f"/actions/{action}", "POST", **headers)

    cookie, token = served.cookie(), served.action_token
    page = served.get("/", Cookie=cookie).read().decode()
    assert page.count(token) == 1
    assert f'<meta name="token" content="{token}">' in page
    refused = [
        post(),
        post(X_Sirtaki_Token=token),
        post(Cookie=cookie),
        post(Cookie=cookie, X_Sirtaki_Token=""),
        post(Cookie=cookie, X_Sirtaki_Token=f"{token}x"),
        post(Cookie=cookie, X_Sirtaki_Token="é"),
        post(Cookie=cookie, X_Sirtaki_Token=token, Host="evil.example"),
    ]
    assert [answer.status for answer in refused] == [403] * len(refused)
    assert not any(token in answer.read().decode() for answer in refused)
    asked = post(Cookie=cookie, X_Sirtaki_Token=token)
    assert (asked.status, asked.read()) == (409, NO_STATE)


def test_actions_are_not_links_and_there_are_no_others(served: Served) -> None:
    cookie, token = served.cookie(), served.action_token
    assert served.get("/actions/recorder", Cookie=cookie, X_Sirtaki_Token=token).status == 404
    other = served.get("/actions/abort", "POST", Cookie=cookie, X_Sirtaki_Token=token)
    assert (other.status, other.getheader("Allow")) == (405, "GET")


class Page:
    """The page of a job, as its script uses it."""

    def __init__(self, output: Path) -> None:
        self._port, token = address_in(output)
        self._cookie = cookie_of(request(self._port, f"/?token={token}"))
        text = request(self._port, "/", Cookie=self._cookie).read().decode()
        self._token = text.partition('name="token" content="')[2].partition('"')[0]
        self._events = events_of(request(self._port, "/events", Cookie=self._cookie))

    def post(self, action: str) -> tuple[int, str]:
        headers = {"Cookie": self._cookie, "X_Sirtaki_Token": self._token}
        answer = request(self._port, f"/actions/{action}", "POST", **headers)
        return answer.status, answer.read().decode()

    def look(self, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        return next(look for kind, look in self._events if kind == "look" and is_wanted(look))

    def recording(self, action: str) -> dict[str, Any]:
        """Asks both ranks for a recording; returns the page's view of it when it has ended."""
        self.look(lambda look: look["ranks_up"] == 2)
        assert self.post(action)[0] == 202
        look = self.look(lambda look: (look["recording"] or {"is_running": True})["is_running"] is False)
        found: dict[str, Any] = look["recording"]
        assert found["action"] == action
        return found


def report(sirtaki: Command, folder: Path) -> dict[str, Any]:
    done = sirtaki("trace", "report", "--json", folder)
    assert done.returncode == 0, done
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def folder_of(found: dict[str, Any], count: int, what: str, place: Path) -> Path:
    """Returns the only folder that recordings have made in `place`, which the page has named."""
    (folder,) = place.glob("sirtaki-*-*1")
    text = f"{count} of 2 ranks have written {what} to {folder}: sirtaki trace report {folder}"
    assert found["text"] == text
    return folder


@pytest.mark.parametrize("kind", ["fixed", "elastic", "elsewhere"])
def test_all_ranks_write_their_recorders(
    start_hvdrun: Start, sirtaki: Command, hosts: Hosts, tmp_path: Path, kind: str
) -> None:
    hosts(hostB={})
    (place := tmp_path / "place").mkdir()
    options = ("-np", "2", *KINDS[kind], "--dashboard")
    job, errors = start_summing(start_hvdrun, tmp_path, *options, kind=kind, cwd=place)
    found = Page(errors).recording("recorder")
    assert found["problems"] == []
    folder = folder_of(found, 2, "the flight recorder", place)
    assert sorted(os.listdir(folder)) == ["rank0.json", "rank1.json"]
    measured = report(sirtaki, folder)
    (tensor,) = [one for one in measured["tensors"] if one["name"] == "loss"]
    assert tensor["count"] > 0
    endings = [(one["rank"], one["status"], one["reason"]) for one in measured["endings"]]
    assert endings == [(0, "ok", ""), (1, "ok", "")]
    (tmp_path / "end").touch()
    assert job.wait() == 0, errors.read_text()
    assert sorted(os.listdir(folder)) == ["rank0.json", "rank1.json"]


def test_a_recorder_tells_for_whom_a_rank_waits_and_a_stopped_rank_is_named(
    start_hvdrun: Start, sirtaki: Command, tmp_path: Path
) -> None:
    script = script_writer(tmp_path / "training.py", TRAINING)("")
    errors, place = tmp_path / "errors", tmp_path / "place"
    place.mkdir()
    with errors.open("wb") as file:
        job = start_hvdrun("-np", "2", "--dashboard", "python", script, str(tmp_path), stderr=file, cwd=place)
    read_pids(tmp_path, 2)
    page = Page(errors)
    page.look(lambda look: look["ranks_up"] == 2)
    pid = int((tmp_path / "1.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        found = page.recording("recorder")
    finally:
        os.kill(pid, signal.SIGCONT)
    silent = "gave no answer: stopped, ended, or in a long call that holds Python's lock"
    assert found["problems"] == [f"rank 1 on {HOST} {silent}"]
    folder = folder_of(found, 1, "the flight recorder", place)
    text = sirtaki("trace", "report", folder).stdout
    assert "when the recorder was written:\n  rank 0 (pid" in text
    assert "waited for other ranks to submit 'loss' (all-reduce)" in text
    assert "at training.py:" in text
    merged = tmp_path / "merged.json"
    assert sirtaki("trace", "merge", folder, "-o", merged).returncode == 0
    names = {event["name"] for event in check_trace(merged.read_text()) if event["ph"] == "i"}
    assert names == {"the recorder was written"}
    for name in ("go", "end"):
        (tmp_path / name).touch()
    assert job.wait() == 0, errors.read_text()


def test_all_ranks_record_a_timeline_one_at_a_time(
    start_hvdrun: Start, sirtaki: Command, tmp_path: Path
) -> None:
    (place := tmp_path / "place").mkdir()
    job, errors = start_summing(start_hvdrun, tmp_path, "-np", "2", "--dashboard", cwd=place)
    page = Page(errors)
    page.look(lambda look: look["ranks_up"] == 2)
    assert page.post("timeline")[0] == 202
    refusal = "a timeline of 10 s is being written: wait until that has ended\n"
    assert [page.post(action) for action in ("recorder", "timeline")] == [(409, refusal)] * 2
    found = page.look(lambda look: (look["recording"] or {}).get("is_running") is False)["recording"]
    assert found["problems"] == []
    folder = folder_of(found, 2, "a timeline of 10 s", place)
    merged = tmp_path / "merged.json"
    done = sirtaki("trace", "merge", folder, "-o", merged)
    assert done.returncode == 0, done
    sums = [one for one in check_trace(merged.read_text()) if one["name"] == "all-reduce"]
    assert {event["pid"] for event in sums} == {0, 1}
    begins = [float(event["ts"]) for event in sums if event["pid"] == 0]
    assert 5e6 < max(begins) - min(begins) < 60e6  # microseconds; the end of 10 s may be noticed late
    (tmp_path / "end").touch()
    assert job.wait() == 0, errors.read_text()


def test_a_timeline_of_the_user_is_not_touched(start_hvdrun: Start, sirtaki: Command, tmp_path: Path) -> None:
    (place := tmp_path / "place").mkdir()
    timeline = tmp_path / "t.json"
    options = ("-np", "2", "--dashboard", "--timeline-filename", str(timeline))
    job, errors = start_summing(start_hvdrun, tmp_path, *options, cwd=place)
    page = Page(errors)
    found = page.recording("timeline")
    assert found["text"] == "no rank has written a timeline of 10 s"
    already = "could not write: a timeline is being written already, to"
    assert found["problems"] == [
        f"rank 0 on {HOST} {already} {timeline}",
        f"rank 1 on {HOST} {already} {timeline}.rank1",
    ]
    assert os.listdir(place) == []
    count = page.look(lambda look: look["operations"] != "0")["time"]
    page.look(lambda look: look["time"] > count + 1)
    (tmp_path / "end").touch()
    assert job.wait() == 0, errors.read_text()
    assert len(report(sirtaki, timeline)["ranks"]) == 2
