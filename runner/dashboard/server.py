"""The process that serves the page of a job.

Usage: python -m sirtaki.runner.dashboard.server FOLDER HOST

Standard input is the listening socket. FOLDER is the job's private folder, with the token in a file, which is
removed here. HOST is the name or the address that the user has given. Recordings come into folders of the
working directory, which is hvdrun's. SIGTERM means that the job has ended.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.resources
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from sirtaki.bindings.observing.watch_marks import (
    ANSWER,
    FOLDER,
    RECORDER,
    TIMELINE,
    Order,
    place_order,
    watch_for_now,
)
from sirtaki.runner.dashboard.access import ACTION_HEADER, TOKEN_FILE, Access
from sirtaki.runner.dashboard.feed import Feed
from sirtaki.runner.observe.bounded_server import CLIENT_SECONDS, BoundedServer
from sirtaki.runner.observe.states import RankState, read_job
from sirtaki.runner.top.jobs import WatchedJob
from sirtaki.runner.top.snapshot import Snapshot
from sirtaki.runner.trace.formats import ranks_text

MAX_CLIENTS = 16  # at once
_GOODBYE_SECONDS = 2.5  # to tell pages that the job has ended
_REFUSAL = "Open the address that hvdrun has printed; one browser can do so once, and reload the page then.\n"
_TEXTS = {
    403: "This is not the address of the page.\n",
    404: "There is no such page.\n",
    405: "Only GET is served, and POST for the actions of the page.\n",
}
_ACTIONS = {f"/actions/{action}": action for action in (RECORDER, TIMELINE)}


class Page:
    """The page, and the policy that lets it run its own script and style, and nothing else."""

    def __init__(self, action_token: str) -> None:
        text = importlib.resources.files("sirtaki.runner.dashboard").joinpath("page.html").read_text("utf-8")
        self.content = text.replace(
            'name="token" content=""', f'name="token" content="{action_token}"'
        ).encode()
        script, style = (_hash_of(text, tag) for tag in ("script", "style"))
        self.policy = (
            f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )


def _hash_of(page: str, tag: str) -> str:
    """Returns the hash of the only element of this name, as Content-Security-Policy has it."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


class _Handler(BaseHTTPRequestHandler):
    server: DashboardServer
    timeout = CLIENT_SECONDS

    def do_GET(self) -> None:
        access = self.server.access
        path, _, query = self.path.partition("?")
        if not access.is_own_address(self.headers.get_all("Host", [])):
            self._answer(403, _TEXTS[403])
        elif path == "/" and query.startswith("token=") and (cookie := access.redeem(query[6:])):
            self._answer(303, "", {"Location": "/", "Set-Cookie": cookie})
        elif not access.admits("; ".join(self.headers.get_all("Cookie", []))):
            self._answer(403, _REFUSAL)
        elif path == "/" and query:
            self._answer(303, "", {"Location": "/"})
        elif path == "/":
            self._answer(200, self.server.page.content, {}, "text/html")
        elif path == "/events":
            self._stream()
        else:
            self._answer(404, _TEXTS[404])

    def do_POST(self) -> None:
        access, action = self.server.access, _ACTIONS.get(self.path)
        if not access.is_own_address(self.headers.get_all("Host", [])):
            self._answer(403, _TEXTS[403])
        elif not access.admits("; ".join(self.headers.get_all("Cookie", []))):
            self._answer(403, _REFUSAL)
        elif action is None:
            self._answer(405, _TEXTS[405])
        elif not access.may_act(self.headers.get_all(ACTION_HEADER, [])):
            self._answer(403, "Use the buttons of the page, and reload it if it is an old one.\n")
        elif refusal := self.server.recordings.begin(action):
            self._answer(409, f"{refusal}\n")
        else:
            self._answer(202, "The ranks have been asked; the page shows their answers.\n")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers a request that the standard library refuses, without a word of it."""
        code = 405 if code == 501 else code  # as it answers other methods
        self._answer(code, _TEXTS.get(code, "This request cannot be read.\n"))

    def version_string(self) -> str:
        return "sirtaki"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Logs nothing: standard error is that of hvdrun, and the first request has the token."""

    def _answer(
        self, code: int, content: str | bytes, headers: dict[str, str] | None = None, kind: str = "text/plain"
    ) -> None:
        body = content.encode() if isinstance(content, str) else content
        self._begin(code, kind, {"Content-Length": str(len(body)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self, code: int, kind: str, headers: dict[str, str]) -> None:
        self.send_response(code)
        common = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Security-Policy": self.server.page.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
            **({"Allow": "GET"} if code == 405 else {}),
        }
        for name, value in {**common, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self) -> None:
        self.server.keep_open(self.connection)
        self._begin(200, "text/event-stream", {})
        with contextlib.closing(self.server.feed.events()) as events:
            for event in events:
                self.wfile.write(event.encode())


class DashboardServer(BoundedServer):
    """Serves the page and its looks to whoever has the token."""

    def __init__(
        self, listener: socket.socket, access: Access, feed: Feed, recordings: JobRecordings
    ) -> None:
        super().__init__(listener, _Handler, MAX_CLIENTS)
        self.access = access
        self.feed = feed
        self.recordings = recordings
        self.page = Page(access.action_token)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # of all threads, until the end waits for it
    folder, host = Path(sys.argv[1]), sys.argv[2]
    listener = socket.socket(fileno=0)
    token = folder / TOKEN_FILE
    access = Access(token.read_text(), host, listener.getsockname()[:2])
    token.unlink()

    def watch() -> Iterator[Snapshot]:
        return WatchedJob(folder).snapshots()

    recordings = JobRecordings(folder, Path.cwd())
    feed = Feed(watch, time.time(), lambda: recordings.view)
    server = DashboardServer(listener, access, feed, recordings)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.sigwait({signal.SIGTERM})
    server.feed.end()
    server.feed.wait_for_readers(_GOODBYE_SECONDS)


# ---- The recordings that the page of a job offers ------------------------------------------------------
# All ranks write their recorders, or a timeline, to files.


TIMELINE_SECONDS = 10.0
MOST = 20  # recordings of a job: each may take 64 MiB a rank
_ANSWER_SECONDS = 10.0  # for all ranks to begin, and to say that they have ended
_LOOK_SECONDS = 0.25
_NAMES = {RECORDER: "the flight recorder", TIMELINE: f"a timeline of {TIMELINE_SECONDS:g} s"}


class JobRecordings:
    """The recordings of a job, made in sequence, in folders beside hvdrun's own files."""

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
        """Returns a text about the recordings that ranks wrote, and sentences about ranks that wrote none."""
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


if __name__ == "__main__":
    main()
