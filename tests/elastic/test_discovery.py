"""The host discovery script: ranks join and leave as its answer changes; a bad answer changes nothing."""

from __future__ import annotations

import itertools
import socket
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from elastic.running import QUICK, check_exact, run_job
from launching import wait_until

from sirtaki.runner.elastic import discovery as discovery_module
from sirtaki.runner.elastic.arbiter.model import Slot
from sirtaki.runner.elastic.discovery import Discovery
from sirtaki.runner.launch.errors import LaunchError


def script(folder: Path, body: str) -> Path:
    """Writes an executable shell script."""
    path = folder / "discover.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def options(path: Path) -> tuple[str, ...]:
    return ("-np", "2", "--min-np", "1", "--max-np", "4", "--host-discovery-script", str(path), *QUICK)


def test_ranks_join_when_the_script_names_more_slots(tmp_path: Path) -> None:
    count = tmp_path / "count"
    path = script(
        tmp_path, f"echo run >> {count}; [ $(wc -l < {count}) -gt 2 ] && echo localhost:3 || echo localhost:2"
    )
    job = run_job(options(path), "numpy_training.py", 60, 0.0, HOLD="5:3")
    check_exact(job, 60, {0, 1, 2})
    assert "1 rank joins" in job.text
    assert "0 ranks were lost" in job.text


def test_ranks_leave_when_the_script_names_fewer_slots(tmp_path: Path) -> None:
    """The slot goes once both ranks train: before that, a job of two ranks would wait for another slot."""
    kept = tmp_path / "checkpoints"
    path = script(tmp_path, f'[ -n "$(ls -A {kept} 2> /dev/null)" ] && echo localhost:1 || echo localhost:2')
    job = run_job(options(path), "numpy_training.py", 400, 0.02, CHECKPOINTS=str(kept), EVERY="5")
    check_exact(job, 400, {0})
    assert [result["worker"] for result in job.results] == [0]
    assert "rank 1 leaves" in job.text


@pytest.mark.parametrize("answer", ["echo ::::", "exit 3"])
def test_a_bad_answer_changes_nothing_and_is_told_once(answer: str, tmp_path: Path) -> None:
    count = tmp_path / "count"
    path = script(
        tmp_path,
        f"echo run >> {count}; [ $(wc -l < {count}) -gt 1 ] && {{ {answer}; exit; }}; echo localhost:2",
    )
    job = run_job(options(path), "numpy_training.py", 200, 0.03)
    check_exact(job, 200, {0, 1})
    assert job.text.count("the hosts stay as they are") == 1


def test_a_failure_of_the_first_run_ends_the_job(tmp_path: Path) -> None:
    job = run_job(options(script(tmp_path, "exit 7")), "numpy_training.py", 20, 0.0)
    assert job.code != 0
    assert "failed with exit code 7" in job.text


def test_a_script_that_does_not_end_is_killed(tmp_path: Path) -> None:
    said: list[str] = []
    discovery = Discovery(script(tmp_path, "echo localhost:1; exec sleep 1000"), 1, said.append)
    assert not list(discovery.poll(100.0))  # starts it
    assert not list(discovery.poll(105.0))
    assert not list(discovery.poll(111.0))
    discovery.close()
    assert said == ["the host discovery script has not ended within 10 s; the hosts stay as they are"]


def test_a_script_that_was_killed_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stuck in a file system ends later; until then, no other run is started."""
    discovery = Discovery(script(tmp_path, "exec sleep 1000"), 1, lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", refuse)
        assert not list(discovery.poll(100.0))
        stuck = discovery._process
        assert stuck is not None
        patch.setattr(stuck, "poll", lambda: None)
        assert not list(discovery.poll(111.0))
        assert not list(discovery.poll(112.0))
        assert discovery._process is None
    stuck.wait()
    assert not list(discovery.poll(113.0))
    assert discovery._process is not None
    discovery.close()


def test_names_are_looked_up_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that does not answer would keep hvdrun from answering the leases of other hosts."""
    for name in ("getaddrinfo", "getfqdn"):
        monkeypatch.setattr(socket, name, refuse)
    lines = "\\n".join(["127.0.0.1:1", f"{socket.gethostname()}:1", "203.0.113.1:1"])
    discovery = Discovery(script(tmp_path, f"printf '{lines}\\n'"), 1, print)
    assert discovery.first() == [Slot("localhost", 0), Slot("localhost", 1), Slot("203.0.113.1", 0)]
    discovery.close()


def test_a_name_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = tmp_path / "answer"
    answer.write_text("203.0.113.1:1\n203.0.113.2:1\n")
    discovery = Discovery(script(tmp_path, f"cat {answer}"), 1, print)
    discovery.first()
    asked = tmp_path / "asked"
    monkeypatch.setattr(discovery_module, "_COMMAND", ("sh", "-c", f"cat > {asked}"))
    answer.write_text("203.0.113.2:2\n")
    assert discovery.first() == [Slot("203.0.113.2", 0), Slot("203.0.113.2", 1)]
    assert not asked.exists()
    answer.write_text("203.0.113.2:1\n203.0.113.3:1\n")
    assert discovery.first() == [Slot("203.0.113.2", 0), Slot("203.0.113.3", 0)]
    assert asked.read_text() == "203.0.113.3\n"
    discovery.close()


def test_a_look_up_without_an_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names then count as those of other machines, as with a name that only ssh knows."""
    monkeypatch.setattr(discovery_module, "_COMMAND", ("sleep", "1000"))
    monkeypatch.setattr(discovery_module, "_LIMIT_SECONDS", 1e9)  # of the script: the moments are not real
    discovery = Discovery(script(tmp_path, "echo 203.0.113.1:1"), 1, refuse)
    moments = itertools.count(100.0, 0.06)
    later = itertools.count(500.0, 0.06)
    answers: list[Sequence[Slot]] = []

    def has_begun() -> bool:
        assert not list(discovery.poll(next(moments)))
        return discovery._hosts is not None

    def has_been_given_up() -> bool:
        answers.extend(discovery.poll(next(later)))
        return bool(answers)

    wait_until(has_begun, "the look-up has begun")
    wait_until(has_been_given_up, "the look-up has been given up")
    assert answers == [[Slot("203.0.113.1", 0)]]
    discovery.close()


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("hvdrun's only thread must not wait for this")


def test_a_host_without_a_number_has_the_slots_of_the_option(tmp_path: Path) -> None:
    discovery = Discovery(script(tmp_path, "echo localhost"), 3, print)
    assert discovery.first() == [Slot("localhost", index) for index in range(3)]
    discovery.close()


def test_a_script_that_cannot_run_ends_the_job(tmp_path: Path) -> None:
    path = script(tmp_path, "")
    path.write_text("no script")
    discovery = Discovery(path, 1, lambda text: None)
    with pytest.raises(LaunchError, match="cannot be run"):
        discovery.first()
    discovery.close()
