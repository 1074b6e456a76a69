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
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from sirtaki.bindings.recording_orders import RECORDER, TIMELINE
from sirtaki.runner.bounded_server import CLIENT_SECONDS, BoundedServer
from sirtaki.runner.dashboard.access import ACTION_HEADER, TOKEN_FILE, Access
from sirtaki.runner.dashboard.feed import Feed
from sirtaki.runner.dashboard.recordings import Recordings
from sirtaki.runner.top.jobs import Job
from sirtaki.runner.top.snapshot import Snapshot

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

    def __init__(self, listener: socket.socket, access: Access, feed: Feed, recordings: Recordings) -> None:
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
        return Job(folder).snapshots()

    recordings = Recordings(folder, Path.cwd())
    feed = Feed(watch, time.time(), lambda: recordings.view)
    server = DashboardServer(listener, access, feed, recordings)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.sigwait({signal.SIGTERM})
    server.feed.end()
    server.feed.wait_for_readers(_GOODBYE_SECONDS)


if __name__ == "__main__":
    main()
