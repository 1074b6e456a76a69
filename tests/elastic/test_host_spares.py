"""The spares of one host, and hvdrun's side of those of another host."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import is_running, wait_until
from open_files import open_files

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, WireError
from sirtaki.bindings.bootstrap.elastic.loaded_modules import list_path
from sirtaki.bindings.bootstrap.elastic.spare import SPARE
from sirtaki.runner.elastic.spares.host_spares import HostSpares, SpareProcess
from sirtaki.runner.elastic.spares.job_spares import JobSpares
from sirtaki.runner.hosts.remote import RemoteHost, RemoteJob
from sirtaki.runner.hosts.ssh import SshOptions
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.reaper import Reaper

LANE = -2


class News:
    """Records the reports about spares."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.waiting: list[int] = []
        self.ends: list[tuple[int, str]] = []

    def started(self, lane: int, pid: int) -> None:
        self.pids[lane] = pid

    def waits(self, lane: int, modules: int, seconds: float) -> None:
        self.waiting.append(lane)

    def ended(self, lane: int, why: str) -> None:
        self.ends.append((lane, why))


class Held:
    """The spares of this host, in a folder."""

    def __init__(self, folder: Path, reaper: Reaper) -> None:
        self.news = News()
        self.selector = selectors.PollSelector()
        self.list = Path(list_path(str(folder)))
        self.environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.processes: list[SpareProcess] = []

        def start() -> SpareProcess:
            command = [sys.executable, "-c", "print('here')"]
            self.processes.append(SpareProcess(command, self.environment, folder, False, reaper))
            return self.processes[-1]

        self.spares = HostSpares(start, lambda process: None, folder, self.selector, self.news)

    def start(self) -> None:
        """Starts a spare, and waits until it waits."""
        self.list.write_text("json")
        self.spares.start(LANE)
        self.spares.advance(time.monotonic())
        wait_until(self._serve, "the spare waits")

    def _serve(self) -> list[int]:
        for key, _ in self.selector.select(0):
            key.data()
        return self.news.waiting


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    with Reaper() as reaper:
        yield Held(tmp_path, reaper)


def kill(spare: SpareProcess) -> None:
    """Kills a spare, and waits until all its threads have ended, which have its connection open."""
    os.kill(spare.pid, signal.SIGKILL)
    wait_until(lambda: spare.poll() is not None, "the spare has ended")


def test_a_spare_starts_when_a_rank_has_written_its_modules(held: Held) -> None:
    assert held.spares.due is None
    held.spares.start(LANE)
    assert held.spares.due == 0.0
    held.spares.advance(10.0)
    assert (held.processes, held.spares.due) == ([], 10.5)
    held.list.write_text("json")
    held.spares.advance(10.4)
    assert held.processes == []
    held.spares.advance(10.5)
    assert held.news.pids == {LANE: held.processes[0].pid}
    assert (held.processes[0].rank, held.spares.due) == (LANE, None)


@pytest.mark.parametrize(
    "leave", [lambda spares: spares.take(LANE, 0, {}), lambda spares: spares.dismiss(LANE)]
)
def test_a_spare_that_is_taken_or_dismissed_before_it_starts_never_does(
    held: Held, leave: Callable[[HostSpares], object]
) -> None:
    held.spares.start(LANE)
    assert leave(held.spares) is None
    held.list.write_text("json")
    held.spares.advance(10.0)
    assert held.processes == []
    assert held.news.ends == []


def test_a_spare_that_takes_a_place_is_no_longer_held(held: Held) -> None:
    held.start()
    process = held.spares.take(LANE, 3, held.environment)
    assert process is held.processes[0]
    assert process.rank == 3
    assert held.spares.take(LANE, 3, held.environment) is None
    held.spares.reap()
    with open(process.stdout) as output:
        assert output.read() == "here\n"
    held.spares.check()
    assert held.news.ends == []


def test_a_spare_that_has_just_ended_takes_no_place(held: Held) -> None:
    held.start()
    kill(held.processes[0])
    assert held.spares.take(LANE, 3, held.environment) is None
    assert held.news.ends == []
    held.spares.check()
    assert held.news.ends == [(LANE, "was killed by signal 9 (SIGKILL)")]


def test_spares_that_are_not_needed_leave_and_their_end_is_reported_once(held: Held) -> None:
    held.start()
    held.spares.dismiss(LANE)
    held.spares.dismiss(LANE)
    wait_until(lambda: held.processes[0].poll() is not None, "the spare has left")
    held.spares.check()
    held.spares.check()
    assert held.news.ends == [(LANE, "has ended before it called hvd.init()")]


def test_a_spare_that_does_not_leave_is_killed(held: Held) -> None:
    held.start()
    held.processes[0].signal(signal.SIGSTOP)
    held.spares.reap()
    assert not is_running(held.processes[0].pid)


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        Frame(MessageKind.SPARE_WAITS, payload=b"[]").pack(),
        Frame.of(MessageKind.SPARE_WAITS, {"modules": 3, "seconds": "x"}).pack(),
        Frame(MessageKind.SPARE_WAITS).pack()[:-4] + b"\xff\xff\xff\xff",
        Frame.of(MessageKind.PLACE, {}).pack(),
    ],
)
def test_a_spare_whose_program_writes_to_its_connection_is_killed(held: Held, data: bytes) -> None:
    held.list.write_text("json")
    program = f"import json, os; os.write(json.loads(os.environ['{SPARE}'])['descriptor'], {data!r})"
    command = [sys.executable, "-S", "-c", f"{program}; import time; time.sleep(60)"]
    with Reaper() as reaper:
        process = SpareProcess(command, held.environment, held.list.parent, False, reaper)
        held.spares = HostSpares(lambda: process, lambda _: None, held.list.parent, held.selector, held.news)
        held.spares.start(LANE)
        held.spares.advance(time.monotonic())
        wait_until(lambda: held._serve() or process.poll() is not None, "it has ended")
        held.spares.check()
    assert held.news.waiting == []
    assert held.news.ends == [(LANE, "was killed by signal 9 (SIGKILL)")]


def test_spares_are_killed_with_the_lease_of_their_host(held: Held) -> None:
    held.start()
    held.spares.kill()
    wait_until(lambda: held.processes[0].poll() is not None, "the spare has ended")
    held.spares.check()
    assert held.news.ends == [(LANE, "was killed by signal 9 (SIGKILL)")]


def test_a_spare_that_has_ended_keeps_the_loop_no_longer_busy(held: Held) -> None:
    held.start()
    kill(held.processes[0])
    held._serve()
    assert held.selector.select(0) == []


def test_no_descriptor_is_left_of_a_spare(held: Held) -> None:
    def lose() -> None:
        kill(held.processes[-1])
        held.spares.check()

    def replace() -> None:
        process = held.spares.take(LANE, 0, held.environment)
        assert process is not None
        process.clear()

    held.start()
    lose()
    before = len(open_files())
    for end in (lose, replace, lose):
        held.news.waiting.clear()
        held.start()
        end()
        for descriptor in (held.processes[-1].stdout, held.processes[-1].stderr):
            os.close(descriptor)  # as at the end of what is read
        assert len(open_files()) <= before  # other tests may have left some that are closed meanwhile


def test_a_spare_that_has_ended_leaves_no_process_behind(held: Held) -> None:
    started = "subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    command = [sys.executable, "-S", "-c", f"import subprocess; print({started}.pid)"]
    held.list.write_text("json")
    with Reaper() as reaper:
        process = SpareProcess(command, held.environment, held.list.parent, False, reaper)
        held.spares = HostSpares(lambda: process, lambda _: None, held.list.parent, held.selector, held.news)
        held.spares.start(LANE)
        held.spares.advance(time.monotonic())
        with open(process.stdout) as output:
            child = int(output.readline())
        wait_until(lambda: process.poll() is not None, "the spare has ended")
        assert is_running(child)
        held.spares.check()
        wait_until(lambda: not is_running(child), "its child has ended")


def test_a_spare_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    def start() -> SpareProcess:
        raise LaunchError("there is no room")

    news = News()
    Path(list_path(str(tmp_path))).touch()
    with selectors.PollSelector() as selector:
        spares = HostSpares(start, lambda process: None, tmp_path, selector, news)
        spares.start(LANE)
        spares.advance(0.0)
    assert news.ends == [(LANE, "cannot be started: there is no room")]


# ---- hvdrun's side of another host -----------------------------------------------------------------------


class Shown:
    """A display that keeps lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.details: list[str] = []
        self.output: list[tuple[int, int, bytes]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def detail(self, text: str) -> None:
        self.details.append(text)

    def add_spare(self, lane: int, label: str) -> None:
        self.output.append((lane, 0, label.encode()))

    def take(self, lane: int, number: int, data: bytes) -> None:
        self.output.append((lane, number, data))


class Remote:
    """Another host with spares: a connection without an agent, which keeps the orders."""

    def __init__(self, selector: selectors.BaseSelector, folder: Path, wanted: int = 1) -> None:
        self.shown = Shown()
        self.orders: list[Frame] = []
        self.is_there = True
        self.spares = JobSpares(wanted, self._start, self._find, folder, selector, self.shown)  # type: ignore[arg-type]
        self.host = RemoteHost("hostB", SshOptions(), selector, self.shown)  # type: ignore[arg-type]
        self.host._job = RemoteJob({}, None, lambda *_: None, lambda: None, spares=self.spares)
        self.host.send = self.orders.append  # type: ignore[method-assign]

    def _start(self) -> SpareProcess:
        raise AssertionError("no spare is to start here")

    def _find(self, name: str) -> Remote | None:
        assert name == "hostB"
        return self if self.is_there else None

    def start(self, lane: int) -> None:
        self.host.start_spare(lane, {})

    def dismiss(self, lane: int) -> None:
        self.host.dismiss_spare(lane)

    def advance(self) -> list[MessageKind]:
        self.spares.advance({"hostB": 1} if self.is_there else {}, True, time.monotonic())
        kinds = [frame.kind for frame in self.orders]
        self.orders.clear()
        return kinds

    def receive(self, kind: MessageKind, payload: bytes, lane: int = LANE) -> None:
        self.host._receive(Frame(kind, lane, payload))


WAITS = b'{"modules": 3, "seconds": 0.5}'


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    with selectors.PollSelector() as selector:
        yield Remote(selector, tmp_path)


def test_the_arbiter_knows_on_which_other_hosts_a_spare_waits(remote: Remote) -> None:
    assert remote.advance() == [MessageKind.SPARE]
    assert "hostB" not in remote.spares  # it still imports
    remote.receive(MessageKind.STDERR, b"importing\n")
    remote.receive(MessageKind.SPARE_WAITS, WAITS)
    assert "hostB" in remote.spares
    assert "localhost" not in remote.spares
    remote.is_there = False  # it is lost, and a spare there cannot take a place
    assert "hostB" not in remote.spares
    assert remote.advance() == []
    remote.is_there = True
    assert remote.advance() == [MessageKind.SPARE]
    assert "hostB" not in remote.spares
    assert remote.shown.details == ["spare 0 waits on hostB, with 3 modules after 0.5 s"]
    labels = [(LANE, 0, b"hostB:spare"), (LANE, 2, b"importing\n"), (LANE - 1, 0, b"hostB:spare")]
    assert remote.shown.output == labels


def test_one_spare_of_another_host_is_chosen_once(remote: Remote) -> None:
    remote.advance()
    assert remote.spares.choose("hostB", time.monotonic()) == LANE
    assert remote.spares.choose("hostB", time.monotonic()) is None
    remote.receive(MessageKind.SPARE_ENDED, b"was killed by signal 9 (SIGKILL)")
    assert remote.shown.lines == [
        "a spare on hostB was killed by signal 9 (SIGKILL) just before it took a place"
    ]


def test_the_failure_of_a_spare_is_one_line_and_the_end_of_a_dismissed_one_none(remote: Remote) -> None:
    remote.advance()
    remote.receive(MessageKind.SPARE_ENDED, b"has failed\n\x1b[2J with exit code 1")
    assert len(remote.shown.lines) == 1
    assert remote.shown.lines[0].startswith("a spare on hostB has failed")
    assert "\x1b" not in remote.shown.lines[0]
    assert "\n" not in remote.shown.lines[0]
    assert remote.advance() == []  # the next one starts after a pause
    assert remote.spares.due is not None


def test_the_end_of_the_job_dismisses_the_spares_of_other_hosts(remote: Remote) -> None:
    remote.advance()
    remote.spares.end()
    assert [(frame.kind, frame.rank) for frame in remote.orders] == [(MessageKind.DISMISS, LANE)]
    remote.receive(MessageKind.SPARE_ENDED, b"has ended before it called hvd.init()")
    assert remote.shown.lines == []
    assert remote.spares.due is None
    assert remote.advance() == [MessageKind.DISMISS]  # none starts again


@pytest.mark.parametrize(
    ("kind", "lane", "payload"),
    [
        (MessageKind.SPARE_WAITS, LANE - 1, WAITS),  # there is no such spare
        (MessageKind.SPARE_WAITS, LANE, b'{"modules": "many", "seconds": 0.5}'),
        (MessageKind.SPARE_WAITS, LANE, b'{"modules": 3}'),
        (
            MessageKind.SPARE_WAITS,
            LANE,
            b'{"modules": 3, "seconds": 1' + b"0" * 400 + b"}",
        ),  # no float is so large
        (MessageKind.SPARE_WAITS, LANE, b"[]"),
        (MessageKind.REPORT, LANE, b"{}"),
        (MessageKind.ENDED, LANE, b'{"code": 0, "killed_by": 0}'),
    ],
)
def test_malformed_reports_of_an_agent_are_refused(
    kind: MessageKind, lane: int, payload: bytes, remote: Remote
) -> None:
    remote.advance()
    with pytest.raises(WireError):
        remote.receive(kind, payload, lane)
