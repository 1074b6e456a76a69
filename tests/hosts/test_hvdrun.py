"""hvdrun over several hosts, with the real ssh and sshd."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from key_search import SCRIPT, processes, secrets_in
from launching import FAILSAFE_SECONDS, is_running, wait_until
from timelines import read_trace, slices_named

from .network import Network, finish

WORLD = """
import os, signal, sys, time
import numpy as np, sirtaki.numpy as hvd
hvd.init()
place = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
told = tuple(int(os.environ[f"SIRTAKI_{{name}}"]) for name in names)
assert place == told, (place, told)
for step in range(3):
    total = hvd.allreduce(np.arange(1000.0), op=hvd.Sum, name="gradient")
    assert (total == hvd.size() * np.arange(1000.0)).all()
{}
"""


def hvdrun(network: Network, *arguments: str | Path) -> tuple[int, str, str]:
    """Runs hvdrun on the first host."""
    return network.hosts[0].run(sys.executable, "-m", "sirtaki.runner", *arguments)


def script(tmp_path: Path, ending: str = "print('total is right')") -> Path:
    path = tmp_path / "world.py"
    path.write_text(WORLD.format(ending))
    return path


def test_ranks_on_three_hosts(network: Network, tmp_path: Path) -> None:
    hosts = "hosta:1,hostb:2,10.77.0.3:1"
    code, output, errors = hvdrun(network, "-H", hosts, "python", script(tmp_path))
    assert code == 0, errors
    assert sorted(output.splitlines()) == [f"[{rank}] total is right" for rank in range(4)]


def test_a_hostfile_without_this_host(network: Network, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two others\nhostb slots=1\nhostc:1\n")
    code, output, errors = hvdrun(network, "--hostfile", tmp_path / "hosts", "python", script(tmp_path))
    assert code == 0, errors
    assert sorted(output.splitlines()) == [f"[{rank}] total is right" for rank in range(2)]


def test_a_network_interface_that_is_not_there(network: Network, tmp_path: Path) -> None:
    options = ["-H", "hosta:1,hostb:1", "--network-interfaces", "no-such"]
    code, output, errors = hvdrun(network, *options, "echo", "started")
    assert (code, output) == (1, "")
    assert "hvdrun: there is no network interface 'no-such' on hosta" in errors


def test_one_timeline_of_all_hosts(network: Network, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    code, _, errors = hvdrun(
        network, "-H", "hosta:1,hostb:2", "--timeline-filename", timeline, "python", script(tmp_path)
    )
    assert code == 0, errors
    assert f"hvdrun: the timeline of 3 ranks is in {timeline}" in errors
    events = read_trace(timeline)
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert slices_named(events, "gradient").count("all-reduce") == 9
    assert [path.name for path in tmp_path.glob("timeline*")] == ["timeline.json"]


def test_a_failure_on_another_host_is_told_with_what_all_ranks_did(network: Network, tmp_path: Path) -> None:
    death = "if hvd.rank() == 2: time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"
    ending = f"{death}\nhvd.allreduce(1.0, name='loss')"
    code, _, errors = hvdrun(network, "-H", "hosta:1,hostb:2", "python", script(tmp_path, ending))
    assert code == 137, errors
    said = [line for line in errors.splitlines() if line.startswith("hvdrun: ")]
    assert re.search(r"rank 2 \(pid \d+ on hostb\) was killed by signal 9", said[-1])
    for rank, host in ((0, "hosta"), (1, "hostb")):
        assert any(
            re.search(rf"rank {rank} \(pid \d+ on {host}\) waited for other ranks to submit 'loss'", line)
            for line in said
        ), errors


def test_hosts_that_do_not_let_hvdrun_in(network: Network, tmp_path: Path) -> None:
    hosts = "nobody@hostb:1,hostx:1,hosta:1"
    code, output, errors = hvdrun(network, "-H", hosts, "echo", "started")
    assert (code, output) == (1, "")
    assert "hvdrun: nobody@hostb does not let you in without a password" in errors
    assert "`ssh-copy-id nobody@hostb` puts your key there" in errors
    assert "hvdrun: there is no host called hostx" in errors
    code, _, errors = hvdrun(network, "-H", "hostb:1", "-p", "1", "echo", "started")
    assert code == 1
    assert "hvdrun: hostb cannot be reached by ssh" in errors


def test_a_host_whose_key_is_not_known(fragile: Network) -> None:
    Path("/etc/netns", fragile.hosts[0].namespace, "ssh", "known_hosts").write_text("")
    code, output, errors = hvdrun(fragile, "-H", "hostb:1", "echo", "started")
    assert (code, output) == (1, "")
    assert "hvdrun: ssh does not know the host key of hostb yet" in errors
    assert "run `ssh hostb` once, compare the fingerprint" in errors


def start_and_wait(network: Network, tmp_path: Path) -> subprocess.Popen[str]:
    """Starts a job on both hosts that runs until it is ended."""
    ready = tmp_path / "ready"
    ending = f"if hvd.rank() == 1: open({str(ready)!r}, 'w').close()\ntime.sleep(300)"
    command = [sys.executable, "-m", "sirtaki.runner", "-H", "hosta:1,hostb:2", "python"]
    process = network.hosts[0].start(*command, script(tmp_path, ending))
    wait_until(lambda: ready.exists() or process.poll() is not None, "the ranks have met")
    assert process.poll() is None, process.communicate()
    return process


def test_a_host_that_dies_is_named(fragile: Network, tmp_path: Path) -> None:
    process = start_and_wait(fragile, tmp_path)
    fragile.hosts[1].signal_all(signal.SIGKILL)
    ((code, _, errors),) = finish([process])
    assert code == 1
    assert "hvdrun: the host hostb was lost, and ranks 1 and 2 with it: the ssh connection" in errors


def test_kill_9_of_hvdrun_leaves_no_process_on_any_host(fragile: Network, tmp_path: Path) -> None:
    def running() -> list[int]:
        return [pid for host in fragile.hosts for pid in host.processes() if is_running(pid)]

    before = set(running())
    process = start_and_wait(fragile, tmp_path)
    process.kill()  # hvdrun itself: its parent processes have replaced themselves with it by exec
    finish([process])
    wait_until(lambda: set(running()) <= before, "all processes have ended")


def test_kill_9_of_an_agent_ends_the_job_and_leaves_no_process(fragile: Network, tmp_path: Path) -> None:
    def running() -> list[int]:
        return [pid for host in fragile.hosts for pid in host.processes() if is_running(pid)]

    before = set(running())
    process = start_and_wait(fragile, tmp_path)
    agents = [
        pid for pid in fragile.hosts[1].processes() if b"sirtaki.runner.hosts.agent" in command_line(pid)
    ]
    assert agents
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    ((code, _, errors),) = finish([process])
    assert code != 0
    assert "hostb" in errors
    wait_until(lambda: set(running()) <= before, "all processes have ended")


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_the_key_is_on_no_command_line_of_any_host(network: Network, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = ["--verbose", "-H", "hosta:1,hostb:1", "python", tmp_path / "script.py", tmp_path]
    hvdrun = network.hosts[0].start(sys.executable, "-m", "sirtaki.runner", *arguments)
    try:
        ready = [tmp_path / f"ready{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in ready), "both ranks are ready")
        keys = {bytes.fromhex(Path(file.read_text()).read_text()) for file in ready}
        looked_at = dict(processes())  # the processes of all hosts, which are this machine
        (tmp_path / "go").touch()
        said = "".join(hvdrun.communicate(timeout=FAILSAFE_SECONDS)).encode()
    finally:
        hvdrun.kill()
    assert len(keys) == 1
    commands = [data for path, data in looked_at.items() if path.name == "cmdline"]
    assert any(b"ssh" in line and b"hostb" in line for line in commands)
    assert not [path for path, data in looked_at.items() if any(secrets_in(data, key) for key in keys)]
    assert b"ValueError: enough" in said
    assert not any(secrets_in(said, key) for key in keys)
