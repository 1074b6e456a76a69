"""Elastic jobs on real hosts, with the real ssh: a host is cut off, and encryption."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from elastic.running import PROGRAMS, RunningJob, check_exact, command
from launching import wait_until

from .network import Host, Network

HEARTBEAT = 3.0  # seconds
PROMISED = HEARTBEAT + 1.0
FAILSAFE = 30.0  # a machine with other work takes its time


class Job(RunningJob):
    """A job whose hvdrun runs on the first host."""

    def __init__(
        self, network: Network, folder: Path, *options: str, samples: int, **environment: str
    ) -> None:
        output, script = folder / "output", folder / "job.sh"
        output.touch()
        words = command(("--min-np", "1", *options), "numpy_training.py", (samples, 0.02))
        script.write_text(f"exec {shlex.join(words)} >'{output}' 2>&1\n")
        settings = {"SIRTAKI_CPU_ALGORITHM": "direct", "SIRTAKI_HEARTBEAT": f"{HEARTBEAT:g}", "TALK": "1"}
        super().__init__(network.hosts[0].start("sh", script, **settings, **environment), output)

    def steps(self, label: str) -> int:
        """Returns how many steps a slot has done."""
        return self.text.count(f"[{label}] step")


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Job]:
    return lambda network, *options, **rest: Job(network, tmp_path, *options, **rest)


def ranks_on(host: Host) -> list[int]:
    """Returns the processes of a host that run the training."""
    found = []
    for pid in host.processes():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if words[1:2] == [os.fsencode(PROGRAMS / "numpy_training.py")]:
            found.append(pid)
    return found


def test_survivors_go_on_when_a_host_is_cut_off(fragile: Network, start: Callable[..., Job]) -> None:
    job = start(fragile, "-np", "4", "-H", "hosta:2,hostb:2", samples=3000)
    job.says("[hostb:1] step 20")
    assert len(ranks_on(fragile.hosts[1])) == 2
    cut = time.monotonic()
    fragile.hosts[1].cut()
    job.says("hostb was lost: its agent has sent nothing for 3 s")
    assert not ranks_on(fragile.hosts[1]), "ranks run on a host whose lease has ended"
    job.says("2 ranks from commit")
    before = job.steps("0")
    wait_until(lambda: job.steps("0") > before, "the survivors train")
    seconds = time.monotonic() - cut
    assert seconds < FAILSAFE, f"{seconds:.1f} s where {PROMISED:g} s are promised"
    ended = job.ended()
    check_exact(ended, 3000, {0, 1})
    print(f"survivors trained {seconds:.2f} s after the cut, with a heartbeat of {HEARTBEAT:g} s")


def test_two_hosts_that_do_not_reach_each_other_cost_one_of_them(
    start: Callable[..., Job],
) -> None:
    with Network(3) as network:
        job = start(network, "-np", "4", "-H", "hosta:2,hostb:1,hostc:1", samples=2000)
        job.says("[hostc:0] step 20")
        cut = time.monotonic()
        network.hosts[1].cut_from(network.hosts[2])
        text = "hostc is left out: it and hostb do not reach each other, although hvdrun reaches both"
        job.says("3 ranks from commit")
        assert text in job.text
        before = job.steps("0")
        wait_until(lambda: job.steps("0") > before, "the others train")
        print(f"the others trained {time.monotonic() - cut:.1f} s after the cut")
        ended = job.ended()
        check_exact(ended, 2000, {0, 1})  # hosts are reached at the same time: hostb's is 2 or 3
        assert "[hostb:0] RESULT" in ended.text


def test_encryption_between_the_hosts_of_an_elastic_job(network: Network, start: Callable[..., Job]) -> None:
    job = start(network, "-np", "3", "--encrypt", "-H", "hosta:1,hostb:2", samples=60)
    check_exact(job.ended(), 60, {0, 1, 2})
