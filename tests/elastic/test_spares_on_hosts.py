"""Spares on other hosts, over a stand-in for ssh: they take places there, and never outlive their agent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from elastic.running import QUICK
from elastic.spare_job import Running, check_exact, running
from elastic.test_hosts import agent_of, ssh_of
from launching import is_running, stand_in_for_ssh, wait_until
from remote_processes import state_of, wait_for_their_end

OPTIONS = ("--min-np", "1", "--verbose", *QUICK)
TWO = ("-np", "2", "-H", "localhost:1,hostB:1", "--spares", "2", *OPTIONS)
MODES = pytest.mark.parametrize("mode", [(), ("--spares-run-script",)])


@pytest.fixture
def environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"]}


@pytest.fixture
def hosts(tmp_path: Path, environment: dict[str, str]) -> Path:
    return stand_in_for_ssh(tmp_path / "hosts", environment)(hostB={}, hostC={})


@MODES
@pytest.mark.usefixtures("hosts")
def test_a_spare_takes_the_place_of_a_killed_rank(
    mode: tuple[str, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    with running(tmp_path, (*TWO, *mode, "--output-filename", str(kept)), environment) as job:
        job.wait_for_spares("hostB")
        job.says("spare 0 waits, with")  # one on each host
        spare = job.spares("hostB")[0]
        os.kill(job.workers("hostB:0")[0], signal.SIGKILL)
        job.says("2 ranks from commit")
        job.wait_for_spares("hostB", 2)  # another one takes its place
        ended = job.end()
    check_exact(ended, 2)
    assert job.workers("hostB:0")[1] == spare
    assert next(result["worker"] for result in ended.results if result["pid"] == spare) == "2"
    assert "[hostB:0] RESULT" in ended.text
    assert f'"pid": {spare}' in (kept / "rank.1" / "stdout").read_text()
    assert "a spare on" not in ended.text
    wait_for_their_end([*job.spares(), *job.spares("hostB")])


@pytest.mark.usefixtures("hosts")
def test_spares_of_a_job_without_ranks_here_end_with_the_job(
    environment: dict[str, str], tmp_path: Path
) -> None:
    options = ("-np", "2", "-H", "hostB:1,hostC:1", "--spares", "2", *OPTIONS)
    with running(tmp_path, options, environment) as job:
        job.wait_for_spares("hostB")
        job.wait_for_spares("hostC")
        ended = job.end()
    check_exact(ended, 2)
    spares = [*job.spares("hostB"), *job.spares("hostC")]
    assert len(spares) == 2
    assert not any(map(is_running, spares))
    assert not job.ran() & set(spares)  # they have run nothing of the program
    assert "a spare on" not in ended.text


@pytest.mark.usefixtures("hosts")
def test_a_spare_that_is_killed_is_named_with_its_host_and_replaced(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with running(tmp_path, TWO, environment) as job:
        job.wait_for_spares("hostB")
        os.kill(job.spares("hostB")[0], signal.SIGKILL)
        job.wait_for_spares("hostB", 2)
        ended = job.end()
    check_exact(ended, 2)
    assert "a spare on hostB was killed by signal 9 (SIGKILL); another one starts in 1 s" in ended.text
    assert ended.text.count("a spare on") == 1
    assert "was lost" not in ended.text


def kill_connection(folder: Path) -> None:
    os.kill(ssh_of(folder, "hostB"), signal.SIGKILL)


def stop_connection(folder: Path) -> None:
    """Makes the host silent: its lease ends."""
    os.kill(ssh_of(folder, "hostB"), signal.SIGSTOP)


def kill_agent(folder: Path) -> None:
    os.kill(agent_of(folder, "hostB"), signal.SIGKILL)


@pytest.mark.parametrize("lose", [kill_connection, stop_connection, kill_agent])
def test_a_spare_is_lost_with_its_host(
    lose: Callable[[Path], None], hosts: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    with running(tmp_path, TWO, {**environment, "SIRTAKI_HEARTBEAT": "2"}) as job:
        job.wait_for_spares("hostB")
        lost = [*job.workers("hostB:0"), *job.spares("hostB")]
        lose(hosts)
        job.says("hostB was lost: ")
        wait_for_their_end(lost)
        job.says("2 ranks from commit")  # the host is used again
        job.wait_for_spares("hostB", 2)
        ended = job.end()
    check_exact(ended, 2)
    assert "a spare on" not in ended.text  # the line about the host says it all
    assert not set(lost) & {result["pid"] for result in ended.results}
    wait_for_their_end(job.spares("hostB"))


def test_a_spare_ends_when_its_agent_is_asked_to_end(
    hosts: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    away = (*TWO[:-3], "--blacklist-cooldown-range", "0.1", "600")  # the host does not come back
    with running(tmp_path, away, environment, size=1) as job:
        job.wait_for_spares("hostB")
        os.kill(agent_of(hosts, "hostB"), signal.SIGTERM)
        job.says("1 rank from commit")
        wait_for_their_end(job.spares("hostB"))
        job.says(" waits, with", 2)  # here, instead
        ended = job.end()
    check_exact(ended, 1)
    assert "a spare on" not in ended.text
    assert "0 ranks were lost" in ended.text


def end_by_interrupt(job: Running) -> None:
    job.process.send_signal(signal.SIGINT)
    assert job.ended().code == 130


def end_by_kill(job: Running) -> None:
    job.process.kill()
    assert job.ended().code == -signal.SIGKILL


@pytest.mark.parametrize("end", [end_by_interrupt, end_by_kill])
@pytest.mark.usefixtures("hosts")
def test_no_spare_outlives_hvdrun(
    end: Callable[[Running], None], environment: dict[str, str], tmp_path: Path
) -> None:
    with running(tmp_path, TWO, environment) as job:
        job.wait_for_spares("hostB")
        job.says("spare 0 waits, with")
        pids = [*job.spares(), *job.spares("hostB"), *job.ran()]
        assert len(pids) == 4
        end(job)
        wait_for_their_end(pids)
    assert "a spare on" not in job.text


def test_spares_go_on_waiting_while_the_job_is_stopped(
    hosts: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Stops hvdrun as Ctrl-Z does, for longer than a lease."""
    with running(tmp_path, TWO, {**environment, "SIRTAKI_HEARTBEAT": "1"}) as job:
        job.wait_for_spares("hostB")
        agent, spare = agent_of(hosts, "hostB"), job.spares("hostB")[0]
        job.process.send_signal(signal.SIGTSTP)
        wait_until(lambda: state_of(job.workers("hostB:0")[0]) == "T", "the rank there is stopped")
        time.sleep(2.0)
        assert is_running(agent)
        job.process.send_signal(signal.SIGCONT)
        wait_until(lambda: state_of(job.workers("hostB:0")[0]) != "T", "it goes on")
        os.kill(job.workers("hostB:0")[0], signal.SIGKILL)
        job.says("2 ranks from commit")
        ended = job.end()
    check_exact(ended, 2)
    assert job.workers("hostB:0")[1] == spare
