"""The page of `hvdrun --dashboard`: who may read it, and what it is sent."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import socket
import threading
from collections.abc import Iterator

import pytest
from dashboards import LOOPBACK, TOKEN, Served, events_of, serve, snapshot
from launching import wait_until
from rank_samples import NOW, pending, sample, stepped
from rich.console import Console

from sirtaki.runner.dashboard.feed import look_of
from sirtaki.runner.dashboard.server import MAX_CLIENTS
from sirtaki.runner.observe.bounded_server import hosts_of
from sirtaki.runner.top.rows import rows_of
from sirtaki.runner.top.snapshot import Snapshot
from sirtaki.runner.top.table import render

STRANGE = "<img src=x onerror=alert(1)>"
STEPS = stepped(11, 5.0, exposed_seconds=0.25, productive_seconds=90.0)
BEFORE = snapshot(-1, sample(time=NOW - 1), sample(1, time=NOW - 1, host="hostB"))
AFTER = snapshot(
    0,
    sample(operations=30, bytes=5000, activity=pending(3.2, name=STRANGE), steps=STEPS),
    sample(1, operations=30, late_seconds=0.5, host="hostB", steps=STEPS),
)


@pytest.fixture
def served() -> Iterator[Served]:
    """Serves a job with two looks, after which nothing is new."""
    end = threading.Event()

    def source() -> Iterator[Snapshot]:
        yield BEFORE
        yield AFTER
        end.wait()

    with serve(source) as found:
        yield found
        end.set()


def test_the_token_works_once_and_becomes_a_cookie(served: Served) -> None:
    assert served.get("/?token=another").status == 403
    assert served.get(f"/?token={TOKEN}", "HEAD").status == 405
    first = served.get(f"/?token={TOKEN}")
    assert (first.status, first.getheader("Location"), first.read()) == (303, "/", b"")
    cookie, *attributes = (first.getheader("Set-Cookie") or "").split("; ")
    assert attributes == ["HttpOnly", "SameSite=Strict", "Path=/"]
    assert cookie.startswith(f"sirtaki_{served.port}=")
    assert TOKEN not in cookie
    again = served.get(f"/?token={TOKEN}")
    assert again.status == 403
    assert "one browser can do so once" in again.read().decode()
    page = served.get("/", Cookie=f'other="[; {cookie}')
    assert (page.status, page.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
    reopened = served.get(f"/?token={TOKEN}", Cookie=cookie)
    assert (reopened.status, reopened.getheader("Location")) == (303, "/")


@pytest.mark.parametrize("path", ["/", "/events", "/page.html"])
def test_nothing_is_served_without_the_cookie(served: Served, path: str) -> None:
    own = served.cookie().partition("=")[0]
    for cookie in ("", f"{own}=", f"{own}=wrong", 'broken="', f"{own}=é"):
        answer = served.get(path, **({"Cookie": cookie} if cookie else {}))
        assert answer.status == 403
        assert answer.read().decode().startswith("Open the address that hvdrun has printed")


def test_other_paths_do_not_exist(served: Served) -> None:
    assert served.get("/../page.html", Cookie=served.cookie()).status == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", ""])
def test_names_of_others_are_refused(served: Served, host: str) -> None:
    cookie = served.cookie()
    foreign = served.get("/", Cookie=cookie, Host=host.format(port=served.port))
    assert (foreign.status, foreign.read()) == (403, b"This is not the address of the page.\n")


def test_loopback_names_are_the_pages_own(served: Served) -> None:
    cookie = served.cookie()
    for host in ("127.0.0.1", "LocalHost", "[::1]"):
        assert served.get("/", Cookie=cookie, Host=f"{host}:{served.port}").status == 200


def test_two_hosts_in_one_request_are_refused(served: Served) -> None:
    lines = ["GET / HTTP/1.0", *[f"Host: 127.0.0.1:{served.port}"] * 2, f"Cookie: {served.cookie()}", "", ""]
    with socket.create_connection((LOOPBACK, served.port)) as client:
        client.sendall("\r\n".join(lines).encode())
        assert b" 403 " in client.makefile("rb").readline()


def test_a_page_for_all_interfaces_knows_the_names_of_its_host() -> None:
    own = socket.gethostname().lower()
    assert {f"{own}:8080", "localhost:8080", "[::1]:8080"} <= hosts_of("0", "0.0.0.0", 8080)
    assert {own, f"{own}:80", "127.0.0.1"} <= hosts_of("0.0.0.0", "0.0.0.0", 80)


def test_a_page_has_the_name_and_the_number_of_its_address() -> None:
    loopback = {"127.0.0.1:8080", "localhost:8080", "[::1]:8080"}
    assert hosts_of("HostA", "192.0.2.7", 8080) == {"hosta:8080", "192.0.2.7:8080", *loopback}
    assert "[2001:db8::1]:8080" in hosts_of("2001:DB8:0:0::1", "2001:db8::1", 8080)


@pytest.mark.parametrize("method", ["POST", "PUT", "HEAD", "OPTIONS", "DELETE", "TRACE"])
def test_only_get_is_served(served: Served, method: str) -> None:
    answer = served.get("/", method, Cookie=served.cookie())
    assert (answer.status, answer.getheader("Allow")) == (405, "GET")


def test_every_answer_has_the_strict_headers(served: Served) -> None:
    cookie = served.cookie()
    page = served.get("/", Cookie=cookie)
    text = page.read().decode()
    others = [served.get("/"), served.get("/x", Cookie=cookie), served.get("/", "POST", Cookie=cookie)]
    for answer in (page, *others, served.get("/events", Cookie=cookie)):
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert answer.getheader("Referrer-Policy") == "no-referrer"
        assert answer.getheader("Cache-Control") == "no-store"
        assert answer.getheader("Content-Security-Policy") == page.getheader("Content-Security-Policy")
        assert answer.getheader("Server") == "sirtaki"
    parts = (page.getheader("Content-Security-Policy") or "").split("; ")
    policy = dict(part.split(" ", 1) for part in parts)
    hashes = {
        tag: base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        for tag, content in re.findall(r"<(script|style)>(.*?)</\1>", text, re.DOTALL)
    }
    assert policy == {
        "default-src": "'none'",
        "script-src": f"'sha256-{hashes['script']}'",
        "style-src": f"'sha256-{hashes['style']}'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)  # it needs no other server


def test_clients_that_say_nothing_keep_nobody_out(served: Served) -> None:
    cookie = served.cookie()
    idle = [socket.create_connection((LOOPBACK, served.port)) for _ in range(3 * MAX_CLIENTS)]
    assert served.get("/", Cookie=cookie).status == 200
    readers = [events_of(served.get("/events", Cookie=cookie)) for _ in range(MAX_CLIENTS)]
    for reader in readers:
        next(reader)  # it is being served
    with pytest.raises(ConnectionError):
        served.get("/", Cookie=cookie)
    for connection in idle:
        connection.close()
    assert next(readers[0])  # no reader was dropped


def test_a_thread_that_cannot_start_costs_no_place(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    cookie = served.cookie()
    starts = threading.Thread.start

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    for _ in range(MAX_CLIENTS + 1):
        with pytest.raises(ConnectionError):
            served.get("/", Cookie=cookie)
    monkeypatch.setattr(threading.Thread, "start", starts)
    assert served.get("/", Cookie=cookie).status == 200


def test_looks_have_the_rows_of_sirtaki_top(served: Served) -> None:
    events = events_of(served.get("/events", Cookie=served.cookie()))
    look = next(content for kind, content in events if kind == "look" and content["time"] == NOW)
    assert look == {**look_of(BEFORE, AFTER), "elapsed": 60.0, "recording": None}
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(render(AFTER, rows_of(BEFORE, AFTER)))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert " ".join(column["name"] for column in look["columns"]) in lines
    assert {" ".join(row["cells"]) for row in look["rows"]} <= set(lines)
    assert [row["level"] for row in look["rows"]] == ["fine", "note"]
    assert [row["late"] for row in look["rows"]] == [0.0, 0.5]
    sentence = f"1 rank has waited 3.2 s for rank 1 to submit the all-reduce '{STRANGE}'"
    assert look["stalls"] == [sentence]
    assert (look["ranks_up"], look["size"], look["ranks_away"]) == (2, 3, 1)
    assert look["progress"] == {"step": "11", "steps/s": "2.00", "goodput": "90%"}
    assert (look["operations"], look["data"], look["hosts"]) == ("20", "2.0 KiB", ["hostA", "hostB"])


def test_a_new_page_gets_the_lateness_of_the_past(served: Served) -> None:
    cookie = served.cookie()
    first = events_of(served.get("/events", Cookie=cookie))
    assert any(kind == "look" and content["time"] == NOW for kind, content in first)
    later = events_of(served.get("/events", Cookie=cookie))
    (kind, history), (following, _) = next(later), next(later)
    assert (kind, following) == ("history", "look")
    assert history == [
        {"time": NOW - 1, "late": {}},  # not known without a look before
        {"time": NOW, "late": {"0": 0.0, "1": 0.5}},
    ]


def test_the_lateness_of_a_rank_without_a_new_state_is_unknown() -> None:
    now = snapshot(9, sample(time=NOW + 9), sample(1), sample(2, time=NOW + 9))
    look = look_of(snapshot(0, sample(), sample(1)), now)
    assert [row["late"] for row in look["rows"]] == [0.0, None, None]


def test_nobody_looks_at_the_job_unless_a_page_is_open() -> None:
    looks: list[str] = []

    def source() -> Iterator[Snapshot]:
        looks.append("begin")
        try:
            while True:
                yield AFTER
                threading.Event().wait(0.01)
        finally:
            looks.append("end")

    with serve(source) as served:
        cookie = served.cookie()
        assert served.get("/", Cookie=cookie).status == 200
        assert looks == []
        stream = served.get("/events", Cookie=cookie)
        assert next(events_of(stream))[0] == "history"
        assert looks == ["begin"]
        stream.close()
        wait_until(lambda: looks == ["begin", "end"], "the watch has ended with its page")


def test_a_page_hears_that_the_job_has_ended(served: Served) -> None:
    events = events_of(served.get("/events", Cookie=served.cookie()))
    assert any(kind == "look" for kind, _ in events)
    served.feed.end()
    assert list(events)[-1] == ("end", None)
    served.feed.wait_for_readers(60)
