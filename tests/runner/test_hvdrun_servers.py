"""Jobs with servers: their places, their ends, and the message if one fails or none was needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Hosts, Run

pytest.importorskip("torch")

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind
from sirtaki.bindings.bootstrap.job import Job
from sirtaki.bindings.bootstrap.messages import RankEvent
from sirtaki.runner.launch.hosts import Host, allocate, servers_of
from sirtaki.runner.launch.job import Stragglers
from sirtaki.runner.launch.servers import Servers
from sirtaki.runner.supervise.failure_analysis import ExitStatus, FailureAnalyzer

TRAIN = """
import os, signal, sys
import torch
import sirtaki.torch as hvd

class Broken(torch.optim.SGD):
    def step(self, closure=None):
        if FAULT == "raise":
            raise RuntimeError("the optimizer's reason")
        if FAULT == "kill" and "SIRTAKI_RANK" not in os.environ and os.environ["SIRTAKI_SERVER"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)

hvd.init()
params = [torch.zeros(3), torch.zeros(2)]
table = hvd.ParameterServer(params, lambda own: Broken(own, lr=1.0), staleness=0)
for step in range(3):
    table.pull()
    table.push([torch.full_like(one, 1.0 + hvd.rank()) for one in params])
updates = table.finish()
ranks = hvd.allgather_object((hvd.rank(), hvd.size(), table.optimizer))
print(updates, *(one.tolist() for one in params), ranks)
"""


@pytest.fixture
def train(tmp_path: Path) -> Callable[[str], str]:
    """Returns a function that writes the training with a fault of the optimizer, and returns its path."""

    def write(fault: str = "none") -> str:
        path = tmp_path / "train.py"
        path.write_text(TRAIN.replace("FAULT", repr(fault)))
        return str(path)

    return write


def test_the_ranks_are_all_that_a_script_sees(hvdrun: Run, train: Callable[..., str]) -> None:
    result = hvdrun("-np", "2", "--servers", "2", "python", train())
    expected = "3 [-4.5, -4.5, -4.5] [-4.5, -4.5] [(0, 2, None), (1, 2, None)]"
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] {expected}" for rank in range(2)], result.stderr
    assert result.returncode == 0
    assert "served nothing" not in result.stderr


def test_servers_of_other_hosts(hvdrun: Run, train: Callable[..., str], hosts: Hosts) -> None:
    hosts(hostB={})
    arguments = ("-H", "localhost:1,hostB:2", "--servers", "3", "--verbose", "python", train())
    result = hvdrun(*arguments)
    assert len(re.findall(r"3 \[-6.0, -6.0, -6.0\]", result.stdout)) == 3, result.stderr
    assert result.returncode == 0
    assert re.findall(r"server (\d) is pid \d+ on hostB", result.stderr) == ["1"]


def test_a_lost_server_is_named(hvdrun: Run, train: Callable[..., str]) -> None:
    result = hvdrun("-np", "1", "--servers", "2", "python", train("kill"))
    assert result.returncode == 137
    last = result.stderr.splitlines()[-1]
    assert re.match(r"hvdrun: server 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\)", last), result.stderr


def test_an_optimizer_that_raises_ends_the_job_with_its_reason(
    hvdrun: Run, train: Callable[..., str]
) -> None:
    result = hvdrun("-np", "2", "--servers", "1", "python", train("raise"))
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert re.match(r"hvdrun: server 0 \(pid \d+\) .*RuntimeError: the optimizer's reason", last), last
    assert re.search(r"\[server 0\] RuntimeError: the optimizer's reason", result.stderr)
    assert re.search(
        r"\[\d\] .*AbortedError: .*server 0\) gave up: RuntimeError: the optimizer's", result.stderr
    )


def test_a_job_without_tables_ends_normally(hvdrun: Run) -> None:
    result = hvdrun("-np", "2", "--servers", "1", "true")
    assert result.returncode == 0, result.stderr
    assert "hvdrun: the server has served nothing: no rank made an hvd.ParameterServer" in result.stderr
    assert "these were 2 separate runs" in result.stderr


@pytest.mark.parametrize("options", [("--min-np", "1"), ("--auto",)])
def test_servers_are_refused_where_they_have_no_meaning(hvdrun: Run, options: tuple[str, ...]) -> None:
    result = hvdrun("-np", "2", "--servers", "1", *options, "true")
    assert result.returncode != 0
    assert result.stderr.startswith("hvdrun: --servers cannot be used with ")
    assert result.stderr.count("\n") == 1


def test_a_dry_run_shows_the_places_of_servers(hvdrun: Run) -> None:
    result = hvdrun("-H", "localhost:2,hostB:1", "--servers", "3", "--dry-run", "true")
    assert "localhost: server 0 and server 2\n" in result.stdout
    assert "hostB: server 1\n" in result.stdout


def test_hosts_of_ranks_take_turns() -> None:
    allocations = allocate([Host("a", 4), Host("b", 1), Host("c", 1)], 5)
    found = [servers_of(allocation, allocations, range(5, 8)) for allocation in allocations]
    assert found == [[5, 7], [6]]


class Sent:
    """A rendezvous that notes messages."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, int]] = []

    def send_message(self, member: int, frame: Frame) -> None:
        self.messages.append((member, frame.number))


def test_each_server_hears_of_each_table_and_of_the_end_whenever_it_arrives() -> None:
    reported: list[RankEvent] = []
    servers, sent = Servers(2, Job("j", 3, b"", "0"), [], reported.append), Sent()
    servers.serve(sent)  # type: ignore[arg-type]
    servers.on_message(3, Frame(MessageKind.SERVES))
    for rank, table in ((1, 1), (0, 1), (3, 1), (2, 2)):
        servers.on_event(RankEvent("arrived", rank, table))
    assert sent.messages == [(3, 1), (3, 2)]
    servers.end()
    servers.on_message(4, Frame(MessageKind.SERVES))
    assert sent.messages[2:] == [(3, 0), (4, 1), (4, 2), (4, 0)]
    servers.on_event(RankEvent("aborted", 4, 0, "why"))
    assert [(event.rank, event.text) for event in reported] == [(4, "why")]


def test_servers_that_do_not_end_are_named() -> None:
    servers = Servers(1, Job("j", 1, b"", "0"), [], lambda event: None)
    servers.serve(Sent())  # type: ignore[arg-type]
    assert servers.overdue(1e12, ["server 0"]) == ""
    servers.end()
    assert servers.end_due is not None
    assert servers.overdue(servers.end_due - 1, ["server 0"]) == ""
    assert servers.overdue(servers.end_due, []) == ""
    text = servers.overdue(servers.end_due, ["server 0"])
    assert text == "all ranks have ended, but not server 0 within 60 s"


def test_hvdrun_waits_for_servers_without_a_report_of_ranks_that_is_due() -> None:
    said: list[str] = []
    stragglers = Stragglers(said.append)
    stragglers.note_exit()
    assert stragglers.due is not None
    stragglers.poll(stragglers.due, [])
    assert (stragglers.due, said) == (None, [])


def test_ranks_and_servers_that_are_lost_with_their_host_are_named() -> None:
    analyzer = FailureAnalyzer(4, 120)
    for number in (2, 3, 5):
        analyzer.note_start(number, 0, "hostB")
        analyzer.note_exit(ExitStatus(number, 0, 0, "hostB", "why"))
    text = "the host hostB was lost, and ranks 2 and 3 and server 1 with it: why"
    assert analyzer.failure().text == text
