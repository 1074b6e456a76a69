"""The agent alone, driven as by hvdrun: its answers, how much it sends, and when it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_conversation import KEY, Conversation, agents, ask, values
from launching import FAILSAFE_SECONDS, is_running, wait_until
from open_files import open_files, opened_since

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind
from sirtaki.runner.hosts import agent as agent_module
from sirtaki.runner.hosts.agent import AgentJob
from sirtaki.runner.hosts.agent_launcher import SrunOptions
from sirtaki.runner.hosts.channel import INITIAL_CREDIT, START_MARK
from sirtaki.runner.hosts.ssh import SshOptions, ssh_command
from sirtaki.runner.launch.reaper import Reaper


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[[], Conversation]]:
    with agents(tmp_path) as start:
        yield start


def test_it_answers_and_ends_with_its_input(agent: Callable[[], Conversation], tmp_path: Path) -> None:
    talk = agent()
    talk.say(ask())
    answer = talk.next(MessageKind.ANSWER).values
    assert (answer["version"], answer["problem"]) == (VERSION, "")
    assert talk.end() == (1, "")  # hvdrun has not announced the end
    assert list(tmp_path.iterdir()) == []


def test_it_starts_wherever_the_interpreter_lies(tmp_path: Path) -> None:
    """ssh passes the command to the shell of the other host as one text."""
    python = tmp_path / "my venv; exit 3" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    *options, mark, host, command = ssh_command("ssh", "hostA", SshOptions(), str(python))
    assert "-oBatchMode=yes" in options  # there is no user whom ssh could ask for a password
    assert (mark, host) == ("--", "hostA")  # a host is never an option, whatever its name
    ended = subprocess.run(
        ["/bin/sh", "-c", command], input=b"", capture_output=True, timeout=FAILSAFE_SECONDS
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, START_MARK, b"")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python cannot leave out the current folder")
def test_modules_of_the_home_folder_do_not_replace_those_of_python(tmp_path: Path) -> None:
    """ssh begins in the home folder, and srun in the folder of the job."""
    for name in ("queue", "random", "selectors"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user')\n")
    of_ssh = ["/bin/sh", "-c", ssh_command("ssh", "hostA", SshOptions())[-1]]
    of_srun = SrunOptions().command("srun", "node2")
    for command in (of_ssh, of_srun[of_srun.index("--") + 1 :]):
        ended = subprocess.run(
            command, input=b"", capture_output=True, timeout=FAILSAFE_SECONDS, cwd=tmp_path
        )
        assert (ended.returncode, ended.stderr) == (1, b"")


def test_a_rank_that_is_ordered_while_the_host_is_asked_to_end_is_refused(tmp_path: Path) -> None:
    """Has the signal be pending, as it is when it arrives while a rank is started: the other ranks go on."""
    start = {**values("/bin/true"), "placements": [], "slots": 1}
    frames: list[Frame] = []
    before = open_files()
    with Reaper() as reaper:
        job = AgentJob(start, 1, reaper)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            order = {"placement": [0, 1, 0, 1, 0, 1], "additions": {}}
            assert job.launch(0, order, frames.append) is None
        finally:
            signal.sigwait({signal.SIGTERM})
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    assert [(frame.kind, frame.rank) for frame in frames] == [(MessageKind.REFUSED, 0)]
    assert b"is to end" in frames[0].payload
    assert opened_since(before) == {}


def test_descriptors_for_the_pipes_and_connections_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each rank has two pipes, and up to three connections: two during a handshake, and one for calls."""
    allowed: list[int] = []
    monkeypatch.setattr(agent_module, "allow_descriptors", allowed.append)
    placements = [[rank, 3, rank, 3, 0, 1] for rank in range(3)]
    with Reaper() as reaper:
        job = AgentJob({**values("/bin/true"), "placements": placements}, 3, reaper)
        job.close_collector()
    assert allowed == [3 * (2 + 3)]


def test_what_makes_no_sense_ends_it(agent: Callable[[], Conversation]) -> None:
    talk = agent()
    talk.process.stdin.write(b"GET / HTTP/1.0\r\n\r\n")  # type: ignore[union-attr]
    assert talk.end() == (1, "sirtaki's agent: another process writes to the connection\n")
    talk = agent()
    talk.say(Frame(MessageKind.SIGNAL, 0, number=signal.SIGTERM))
    assert talk.end() == (1, "sirtaki's agent: SIGNAL is not expected now\n")
    talk = agent()
    talk.say(Frame.of(MessageKind.START, {**values("/bin/true"), "placements": "x"}))
    exit_code, errors = talk.end()
    assert exit_code == 1
    assert errors.startswith("sirtaki's agent: the ranks cannot be started: ")
    assert KEY.hex() not in errors


def test_a_rank_from_its_start_to_its_end(agent: Callable[[], Conversation], tmp_path: Path) -> None:
    talk = agent()
    script = 'cat "$SIRTAKI_KEY_FILE"; sleep 300 & exit 3'
    talk.say(ask(), Frame.of(MessageKind.START, values("/bin/sh", "-c", script)))
    assert talk.next(MessageKind.STARTED).rank == 0
    assert talk.next(MessageKind.STDOUT).payload == f"{KEY.hex()}\n".encode()
    assert talk.next(MessageKind.ENDED).values == {"code": 3, "killed_by": 0}
    talk.say(Frame(MessageKind.FINISH))
    talk.next(MessageKind.DONE)
    assert talk.end() == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_from_outside_does_not_end_it_but_one_of_hvdrun_reaches_the_rank(
    agent: Callable[[], Conversation],
) -> None:
    """Slurm sends the signal of `--signal=USR1` to all steps of a job."""
    talk = agent()
    script = "trap 'echo noted; exit 7' USR1; echo ready; while :; do sleep 0.05; done"
    talk.say(ask(), Frame.of(MessageKind.START, values("/bin/sh", "-c", script)))
    assert talk.next(MessageKind.STDOUT).payload == b"ready\n"
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        talk.process.send_signal(number)
    talk.next(MessageKind.ALIVE)
    talk.say(Frame(MessageKind.SIGNAL, 0, number=signal.SIGUSR1))
    assert talk.next(MessageKind.STDOUT).payload == b"noted\n"
    assert talk.next(MessageKind.ENDED).values == {"code": 7, "killed_by": 0}


def test_sigkill_reaches_what_a_rank_has_left_behind(agent: Callable[[], Conversation]) -> None:
    talk = agent()
    talk.say(ask(), Frame.of(MessageKind.START, values("/bin/sh", "-c", "sleep 300 & echo $!")))
    child = int(talk.next(MessageKind.STDOUT).payload)
    assert talk.next(MessageKind.ENDED).values == {"code": 0, "killed_by": 0}
    assert is_running(child)
    talk.say(Frame(MessageKind.SIGNAL, 0, number=signal.SIGKILL))
    wait_until(lambda: not is_running(child), "the child has ended")


def test_no_more_output_comes_than_there_is_room_for_but_all_else_does(
    agent: Callable[[], Conversation], tmp_path: Path
) -> None:
    talk = agent()
    script = "echo $$ > $TMPDIR/pid; exec yes"
    talk.say(ask(), Frame.of(MessageKind.START, values("/bin/sh", "-c", script)))
    received = 0
    while received < INITIAL_CREDIT:
        received += len(talk.next(MessageKind.STDOUT).payload)
    assert received == INITIAL_CREDIT
    assert sum(len(frame.payload) for frame in talk.until(MessageKind.ALIVE)) == 0
    talk.say(Frame(MessageKind.GRANT, 1, number=1000))
    assert sum(len(frame.payload) for frame in talk.until(MessageKind.ALIVE)) == 1000
    talk.say(Frame(MessageKind.SIGNAL, 0, number=signal.SIGKILL))
    assert talk.next(MessageKind.ENDED).values == {"code": 0, "killed_by": signal.SIGKILL}


def test_its_ranks_end_when_it_is_killed(agent: Callable[[], Conversation], tmp_path: Path) -> None:
    talk = agent()
    talk.say(ask(), Frame.of(MessageKind.START, values("/bin/sleep", "300")))
    pid = talk.next(MessageKind.STARTED).number
    assert is_running(pid)
    talk.process.kill()
    wait_until(lambda: not is_running(pid), "the rank has ended")
    wait_until(lambda: not list(tmp_path.iterdir()), "the key has been removed")
