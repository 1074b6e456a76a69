"""The agent alone, driven as by hvdrun: the spares that it holds."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_conversation import Conversation, agents, ask, values
from launching import is_running, wait_until

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind
from sirtaki.bindings.bootstrap.elastic.loaded_modules import list_path

LANE = -2


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[[], Conversation]]:
    with agents(tmp_path) as start:
        yield start


def spare_values(**more: Any) -> dict[str, Any]:
    return {"placement": [0, 1, 0, 1, 0, 1], "additions": {}, "runs_script": False, **more}


def begin(talk: Conversation, folder: Path, *command: str, lease: float = 0.0) -> None:
    """Begins a job, on whose host a rank has written its modules."""
    start = {
        **values(*command),
        "placements": [],
        "slots": 1,
        "lease": lease,
        "environment": dict(os.environ),
    }
    talk.say(ask(), Frame.of(MessageKind.START, start))
    talk.next(MessageKind.ALIVE)
    (key,) = folder.glob("*/key")
    Path(list_path(str(key.parent))).write_text("json")


def test_a_spare_of_an_agent_becomes_a_rank(agent: Callable[[], Conversation], tmp_path: Path) -> None:
    talk = agent()
    begin(talk, tmp_path, sys.executable, "-c", "import os; os.write(1, os.environb[b'PLACE'])")
    talk.say(Frame.of(MessageKind.SPARE, spare_values(), LANE))
    started, waits = talk.next(MessageKind.STARTED), talk.next(MessageKind.SPARE_WAITS)
    assert (started.rank, waits.rank, waits.values["modules"]) == (LANE, LANE, 1)
    launch = {**spare_values(additions={"PLACE": "seven"}), "spare": LANE}
    talk.say(Frame.of(MessageKind.LAUNCH, launch, 7))
    assert talk.next(MessageKind.STARTED) == Frame(MessageKind.STARTED, 7, number=started.number)
    assert talk.next(MessageKind.STDOUT) == Frame(MessageKind.STDOUT, 7, b"seven")
    ended = talk.next(MessageKind.ENDED)
    assert (ended.rank, ended.values) == (7, {"code": 0, "killed_by": 0})
    talk.say(Frame(MessageKind.FINISH))
    assert talk.next(MessageKind.DONE).kind == MessageKind.DONE
    assert talk.end() == (0, "")


def test_an_agent_starts_a_process_where_the_spare_has_just_ended(
    agent: Callable[[], Conversation], tmp_path: Path
) -> None:
    talk = agent()
    begin(talk, tmp_path, sys.executable, "-c", "import os; os.write(1, b'here')")
    talk.say(Frame.of(MessageKind.SPARE, spare_values(), LANE))
    pid = talk.next(MessageKind.STARTED).number
    talk.next(MessageKind.SPARE_WAITS)
    os.kill(pid, signal.SIGKILL)
    # Its reader's thread, which ends last, has the connection open.
    threads = Path(f"/proc/{pid}/task")
    wait_until(lambda: not is_running(pid) and len([*threads.glob("*")]) <= 1, "the spare has ended")
    talk.say(Frame.of(MessageKind.LAUNCH, {**spare_values(), "spare": LANE}, 0))
    started = talk.next(MessageKind.STARTED)
    assert started.rank == 0
    assert started.number != pid
    assert talk.next(MessageKind.SPARE_ENDED) == Frame(
        MessageKind.SPARE_ENDED, LANE, b"was killed by signal 9 (SIGKILL)"
    )
    assert talk.next(MessageKind.STDOUT) == Frame(MessageKind.STDOUT, 0, b"here")


def test_spares_end_with_the_lease_of_their_agent(agent: Callable[[], Conversation], tmp_path: Path) -> None:
    talk = agent()
    begin(talk, tmp_path, sys.executable, "-c", "pass", lease=3.0)  # which is never renewed
    talk.say(Frame.of(MessageKind.SPARE, spare_values(), LANE))
    pid = talk.next(MessageKind.STARTED).number
    assert talk.process.wait() == 1
    assert not is_running(pid)


def test_an_agent_ends_the_spares_that_are_left(agent: Callable[[], Conversation], tmp_path: Path) -> None:
    talk = agent()
    begin(talk, tmp_path, sys.executable, "-c", "pass")
    for lane in (LANE, LANE - 1):
        talk.say(Frame.of(MessageKind.SPARE, spare_values(), lane))
        talk.next(MessageKind.SPARE_WAITS)
    pids = [talk.next(MessageKind.STARTED).number for _ in range(2)]
    talk.say(Frame(MessageKind.DISMISS, LANE))
    ended = talk.next(MessageKind.SPARE_ENDED)
    assert (ended.rank, ended.payload) == (LANE, b"has ended before it called hvd.init()")
    assert not is_running(pids[0])
    talk.say(Frame(MessageKind.FINISH))
    assert talk.next(MessageKind.DONE).kind == MessageKind.DONE
    assert talk.end() == (0, "")
    assert not is_running(pids[1])


def test_an_agent_starts_no_spare_of_a_command_that_python_does_not_run(
    agent: Callable[[], Conversation], tmp_path: Path
) -> None:
    """A script may begin with another line than that on hvdrun's host."""
    talk = agent()
    begin(talk, tmp_path, "/bin/sleep", "300")
    talk.say(Frame.of(MessageKind.SPARE, spare_values(), LANE))
    ended = talk.next(MessageKind.SPARE_ENDED)
    assert ended.rank == LANE
    assert ended.payload.startswith(
        b"cannot be started: --spares needs a command that Python runs, but 'sleep'"
    )


def test_an_agent_refuses_malformed_orders_about_spares(
    agent: Callable[[], Conversation], tmp_path: Path
) -> None:
    talk = agent()
    begin(talk, tmp_path, sys.executable, "-c", "pass")
    talk.say(Frame.of(MessageKind.SPARE, {"placement": "x"}, LANE))
    exit_code, errors = talk.end()
    assert exit_code == 1
    assert errors.startswith("sirtaki's agent: a spare cannot be started: ")
    talk = agent()
    talk.say(ask(), Frame(MessageKind.DISMISS, LANE))
    assert talk.end() == (1, "sirtaki's agent: DISMISS is not expected now\n")
