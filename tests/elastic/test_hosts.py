"""Elastic jobs on several hosts, over a stand-in for ssh: ranks and hosts are lost, join and leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from elastic.running import (
    FAILSAFE_SECONDS,
    QUICK,
    Ended,
    HostScript,
    RunningJob,
    check_exact,
    command,
    results_in,
    run_job,
    running_job,
)
from launching import is_running, stand_in_for_ssh, wait_until
from timelines import read_rows, slices_named

Hosts = Callable[..., Path]
Start = Callable[..., RunningJob]
TWO = ("-np", "4", "--min-np", "1", "-H", "localhost:2,hostB:2", *QUICK)


@pytest.fixture
def environment() -> dict[str, str]:
    return {"SIRTAKI_CPU_ALGORITHM": "direct", "PATH": os.environ["PATH"]}


@pytest.fixture
def hosts(tmp_path: Path, environment: dict[str, str]) -> Hosts:
    return stand_in_for_ssh(tmp_path / "hosts", environment)


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Iterator[Start]:
    with ExitStack() as started:

        def call(options: tuple[str, ...], *arguments: str | int | float, **more: str) -> RunningJob:
            line = command(options, "numpy_training.py", arguments)
            return started.enter_context(running_job(tmp_path, line, **environment, **more))

        yield call


def ssh_of(folder: Path, host: str) -> int:
    """Returns the process of the connection to a host."""
    return int((folder / host / "ssh.pid").read_text())


def agent_of(folder: Path, host: str) -> int:
    """Returns the agent on a host: the first process that the connection has started."""
    connection = ssh_of(folder, host)
    children = Path(f"/proc/{connection}/task/{connection}/children").read_text()
    return int(children.split()[0])


def descendants_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in map(int, children) for one in (child, *descendants_of(child))]


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("place", ["step", "exchanged", "written"])
def test_a_rank_of_another_host_is_lost_and_replaced(
    place: str, hosts: Hosts, environment: dict[str, str]
) -> None:
    hosts(hostB={})
    job = run_job(TWO, "numpy_training.py", 200, 0.0, f"3:{place}:5", HOLD="8:4", **environment)
    check_exact(job, 200, {0, 1, 2, 4})
    assert "rank 3 was lost: killed by signal 9 (SIGKILL)" in job.text
    replacement = next(result for result in job.results if result["worker"] == 4)
    assert replacement["local_rank"] == 1


def test_rank_0_is_lost_while_another_host_lives(hosts: Hosts, environment: dict[str, str]) -> None:
    hosts(hostB={})
    job = run_job(TWO, "numpy_training.py", 100, 0.0, "0:step:5", "1:written:7", **environment)
    check_exact(job, 100, {2, 3})


def test_each_line_of_another_host_names_its_slot(hosts: Hosts, environment: dict[str, str]) -> None:
    hosts(hostB={})
    job = run_job(TWO, "numpy_training.py", 40, 0.0, TALK="1", **environment)
    check_exact(job, 40, {0, 1, 2, 3})
    for label in ("[0]", "[1]", "[hostB:0]", "[hostB:1]"):
        assert f"{label} step 10" in job.text


def test_a_lost_host_costs_its_ranks_and_is_used_again(hosts: Hosts, start: Start) -> None:
    folder = hosts(hostB={})
    job = start(TWO, 100, 0.05, HOLD="15:4", TALK="1")
    job.says("[hostB:1] step 5")
    os.kill(ssh_of(folder, "hostB"), signal.SIGKILL)
    job.says("hostB was lost: the ssh process for it was killed by signal 9")
    ended = job.ended()
    check_exact(ended, 100, {0, 1, 4, 5})
    assert "2 ranks from commit" in ended.text
    assert "2 ranks join" in ended.text


def job_without_agent(number: int, hosts: Hosts, start: Start) -> Ended:
    """Returns a job that has gone on after its second host's agent got this signal."""
    folder = hosts(hostB={})
    job = start(TWO, 100, 0.05, TALK="1")
    job.says("[hostB:1] step 5")
    os.kill(agent_of(folder, "hostB"), number)
    ended = job.ended()
    check_exact(ended, 100, {0, 1})
    return ended


def test_a_lost_agent_is_a_lost_host(hosts: Hosts, start: Start) -> None:
    ended = job_without_agent(signal.SIGKILL, hosts, start)
    assert "hostB was lost" in ended.text


def test_a_silent_host_is_given_up_when_its_lease_ends(hosts: Hosts, start: Start) -> None:
    """Stops the connection, as a network does that delivers nothing: the ranks there reach the others."""
    folder = hosts(hostB={})
    job = start(TWO, 400, 0.05, TALK="1", SIRTAKI_HEARTBEAT="2")
    job.says("[hostB:1] step 5")
    connection, agent = ssh_of(folder, "hostB"), agent_of(folder, "hostB")
    os.kill(connection, signal.SIGSTOP)
    job.says("hostB was lost: its agent has sent nothing for 2 s")
    wait_until(lambda: not Path(f"/proc/{agent}").exists(), "the agent there has ended its ranks, and itself")
    ended = job.ended()
    check_exact(ended, 400, {0, 1})
    # The ranks there end 2 s after the last answer to their agent, which asks every 0.4 s.
    losses = [change for result in ended.results for change in result["changes"] if change["lost"]]
    assert [change["lost"] for change in losses] == [[2, 3], [2, 3]]
    assert all(1.0 < change["detect_seconds"] < FAILSAFE_SECONDS for change in losses), losses


def test_ranks_do_not_outlive_the_lease_of_a_stopped_agent(hosts: Hosts, start: Start) -> None:
    folder = hosts(hostB={})
    job = start(TWO, 400, 0.05, TALK="1", SIRTAKI_HEARTBEAT="2")
    job.says("[hostB:1] step 5")
    agent = agent_of(folder, "hostB")
    ranks = [pid for pid in descendants_of(agent) if b"numpy_training.py" in command_of(pid)]
    assert len(ranks) == 2
    os.kill(agent, signal.SIGSTOP)
    wait_until(lambda: not any(map(is_running, ranks)), "the ranks there have ended")
    assert is_running(agent)
    ended = job.ended()
    check_exact(ended, 400, {0, 1})
    assert "hostB was lost: its agent has sent nothing for 2 s" in ended.text
    os.kill(agent, signal.SIGCONT)
    wait_until(lambda: not is_running(agent), "the agent has ended when it could")


def test_an_agent_that_is_asked_to_end_costs_nothing(hosts: Hosts, start: Start) -> None:
    ended = job_without_agent(signal.SIGTERM, hosts, start)
    assert "hostB was asked to end: its ranks leave at the next commit" in ended.text
    assert "0 ranks were lost" in ended.text


def test_an_agent_that_was_asked_to_end_leaves_with_its_ranks(hosts: Hosts, start: Start) -> None:
    folder = hosts(hostB={})
    job = start((*TWO[:-3], "--blacklist-cooldown-range", "1", "600"), 100, 0.1, TALK="1")
    job.says("[hostB:1] step 5")
    agent = agent_of(folder, "hostB")
    os.kill(agent, signal.SIGTERM)
    wait_until(lambda: not is_running(agent), "the agent has ended")
    assert not results_in(job.text)
    ended = job.ended()
    check_exact(ended, 100, {0, 1})
    assert "hostB was lost" not in ended.text


def test_a_host_without_ranks_survives_that_the_job_is_stopped(hosts: Hosts, start: Start) -> None:
    folder = hosts(hostB={})
    options = ("-np", "2", "--min-np", "1", "-H", "localhost:2,hostB:1", *QUICK)
    job = start(options, 200, 0.02, TALK="1", SIRTAKI_HEARTBEAT="1")
    job.says("[1] step 5")
    agent = agent_of(folder, "hostB")
    job.process.send_signal(signal.SIGTSTP)
    time.sleep(2.5)  # longer than a lease
    assert is_running(agent)
    job.process.send_signal(signal.SIGCONT)
    ended = job.ended()
    check_exact(ended, 200, {0, 1})
    assert "hostB was lost" not in ended.text


def discovering(script: HostScript) -> tuple[str, ...]:
    return ("-np", "2", "--min-np", "1", "--max-np", "4", *script.options, *QUICK)


def test_a_host_that_the_script_names_joins_and_leaves(hosts: Hosts, start: Start, tmp_path: Path) -> None:
    hosts(hostB={})
    script = HostScript(tmp_path, "localhost:2")
    job = start(discovering(script), 300, 0.05, TALK="1", HOLD="5:4")
    job.says("[0] step 5")
    script.name("localhost:2", "hostB:2")
    job.says("[hostB:1] step 10")
    script.name("localhost:2")
    ended = job.ended()
    check_exact(ended, 300, {0, 1})
    assert "2 ranks join" in ended.text
    assert "rank 2 leaves; rank 3 leaves" in ended.text
    assert "0 ranks were lost" in ended.text


def test_a_host_that_cannot_be_reached_is_told_once(hosts: Hosts, start: Start, tmp_path: Path) -> None:
    hosts(hostB={})
    job = start(discovering(HostScript(tmp_path, "localhost:2", "nowhere:2")), 200, 0.05, TALK="1")
    ended = job.ended()
    check_exact(ended, 200, {0, 1})
    assert ended.text.count("there is no host called nowhere") == 1, ended.text
    assert ended.text.count("[nowhere] ssh: Could not resolve hostname") == 1
    assert "the next attempt to use it is in" in ended.text


def test_a_job_without_ranks_here(hosts: Hosts, environment: dict[str, str]) -> None:
    hosts(hostB={}, hostC={})
    options = ("-np", "2", "--min-np", "1", "-H", "hostB:1,hostC:1", *QUICK)
    job = run_job(options, "numpy_training.py", 60, 0.0, "0:step:5", **environment)
    check_exact(job, 60, {1})


def test_named_hosts_have_to_be_there(hosts: Hosts, environment: dict[str, str]) -> None:
    hosts(hostB={})
    options = ("-np", "2", "--min-np", "1", "-H", "localhost:1,nowhere:1")
    job = run_job(options, "numpy_training.py", 60, 0.0, **environment)
    assert job.code == 1
    assert "there is no host called nowhere: check the name" in job.text


def test_a_worker_ends_with_the_agent_of_its_host(hosts: Hosts, start: Start) -> None:
    """Ends hvdrun: nothing may be left on any host."""
    folder = hosts(hostB={})
    job = start(TWO, 10_000, 0.05, TALK="1")
    job.says("[hostB:1] step 5")
    agent = agent_of(folder, "hostB")
    job.process.send_signal(signal.SIGINT)
    assert job.ended().code == 130
    assert not Path(f"/proc/{agent}").exists()


def test_the_output_of_a_slot_goes_on_with_its_next_worker(
    hosts: Hosts, environment: dict[str, str], tmp_path: Path
) -> None:
    hosts(hostB={})
    options = (*TWO, "--output-filename", str(tmp_path / "out"))
    job = run_job(
        options, "numpy_training.py", 200, 0.0, "1:step:5", "3:step:5", HOLD="8:4", TALK="1", **environment
    )
    check_exact(job, 200, {0, 2, 4, 5})
    for lane in (1, 3):
        kept = (tmp_path / "out" / f"rank.{lane}" / "stdout").read_text().splitlines()
        assert kept[0] == "step 1"
        assert kept[-1].startswith("RESULT ")


def test_an_agent_that_refuses_its_ranks_costs_no_rank(hosts: Hosts, environment: dict[str, str]) -> None:
    """Names more slots than the host can have ranks."""
    hosts(hostB={})
    options = ("-np", "3", "--min-np", "2", "-H", "localhost:2,hostB:9000", *QUICK)
    job = run_job((*options, "--elastic-timeout", "3"), "numpy_training.py", 60, 0.0, **environment)
    check_exact(job, 60, {0, 1})
    assert "hostB was lost: hvdrun's agent there ended with exit code 1" in job.text
    assert "0 ranks were lost" in job.text or "ranks were lost" not in job.text


def test_workers_of_other_hosts_are_in_the_timeline(
    hosts: Hosts, environment: dict[str, str], tmp_path: Path
) -> None:
    """Has each worker write more than the agent sends at a time."""
    hosts(hostB={})
    path = tmp_path / "t.json"
    options = (*TWO, "--timeline-filename", str(path))
    job = run_job(options, "numpy_training.py", 1000, 0.0, "3:step:5", HOLD="8:4", **environment)
    check_exact(job, 1000, {0, 1, 2, 4})
    assert f"the timeline of 5 workers in 3 generations is in {path}" in job.text
    rows = read_rows(path)
    generations = {0: [1, 2, 3], 1: [1, 2, 3], 2: [1, 2, 3], 3: [1], 4: [3]}
    steps = {2: 3, 3: len(job.results[0]["sizes"]) - 8}
    found = {name.partition(": ")[0]: events for name, events in rows.items()}
    for worker, numbers in generations.items():
        changes = slices_named(found.pop(f"worker {worker}"), "Changes of the ranks")
        assert [name for name in changes if name.startswith("GENERATION")] == [
            f"GENERATION {number}" for number in numbers
        ]
        for number in numbers:
            row = found.pop(f"worker {worker}, generation {number}")
            count = slices_named(row, "gradient").count("all-reduce")
            # The last ones of a killed process may not have been written; a failed one counts, if queued.
            assert count in ((range(6) if worker == 3 else (5, 6)) if number == 1 else (steps[number],))
    assert not found
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hosts", "t.json"]


def test_the_files_of_a_lost_host_are_missing_in_the_timeline(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    folder, path = hosts(hostB={}), tmp_path / "t.json"
    job = start((*TWO, "--timeline-filename", str(path)), 100, 0.05, HOLD="15:4", TALK="1")
    job.says("[hostB:1] step 5")
    os.kill(ssh_of(folder, "hostB"), signal.SIGKILL)
    ended = job.ended()
    check_exact(ended, 100, {0, 1, 4, 5})
    workers = {int(name.split()[1].strip(",:")) for name in read_rows(path)}
    assert workers == {0, 1, 4, 5}
    assert "the timeline of 4 workers in 3 generations is in" in ended.text
