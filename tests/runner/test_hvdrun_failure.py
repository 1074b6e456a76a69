"""The first failing rank ends the job; hvdrun names it, shows its last lines and exits with its exit code."""

from __future__ import annotations

import re
from typing import Any

import pytest
from launching import Run, Script


def test_the_first_failure_ends_the_job(hvdrun: Run, place: Any) -> None:
    script = "[ $SIRTAKI_RANK = 1 ] && echo reason >&2 && exit 3; exec sleep 300"
    result = hvdrun(*place.options, "sh", "-c", script)
    assert result.returncode == 3
    lines = result.stderr.splitlines()
    assert re.fullmatch(rf"hvdrun: rank 1 \(pid \d+{place.on}\) failed with exit code 3", lines[-1])
    assert lines[-3:-1] == ["hvdrun: the last lines that rank 1 wrote to its standard error:", "[1] reason"]


def test_only_the_last_lines_are_shown_again(hvdrun: Run) -> None:
    result = hvdrun("-np", "1", "sh", "-c", "for i in $(seq 1 50); do echo line $i >&2; done; exit 1")
    again = result.stderr.split("wrote to its standard error:\n")[1].splitlines()
    assert again[:-1] == [f"[0] line {number}" for number in range(31, 51)]


@pytest.mark.parametrize(
    ("name", "exit_code", "text"),
    [
        ("KILL", 137, r"was killed by signal 9 \(SIGKILL\): often the machine ran out of memory"),
        ("SEGV", 139, r"was killed by signal 11 \(SIGSEGV\)"),
        ("TERM", 143, r"was killed by signal 15 \(SIGTERM\)"),
    ],
)
def test_a_rank_that_is_killed(hvdrun: Run, place: Any, name: str, exit_code: int, text: str) -> None:
    script = f"[ $SIRTAKI_RANK = 1 ] && kill -{name} $$; exec sleep 300"
    result = hvdrun(*place.options, "sh", "-c", script)
    assert result.returncode == exit_code
    assert re.search(rf"hvdrun: rank 1 \(pid \d+{place.on}\) {text}$", result.stderr.rstrip())


@pytest.mark.parametrize("options", [(), ("--min-np", "1", "--reset-limit", "1")], ids=["static", "elastic"])
@pytest.mark.parametrize(("end", "is_cause"), [("kill -SEGV $$", False), ("exit 3", True)])
def test_an_exception_is_no_cause_of_a_death_by_a_signal(
    hvdrun: Run, options: tuple[str, ...], end: str, is_cause: bool
) -> None:
    """Has a rank write a traceback of an exception that it handles, and go on."""
    error = 'Traceback (most recent call last):\n  File "train.py", line 4, in read\nKeyError: 7\nstep 900\n'
    result = hvdrun("-np", "1", *options, "sh", "-c", f"printf '{error}' >&2; {end}")
    last = result.stderr.splitlines()[-1]
    assert last.endswith("KeyError: 7 (in read() at train.py:4)") == is_cause, result.stderr
    assert ("the last lines that" in result.stderr) != is_cause


def test_ranks_that_do_not_heed_sigterm_are_killed(hvdrun: Run) -> None:
    result = hvdrun(
        "-np", "2", "sh", "-c", "[ $SIRTAKI_RANK = 1 ] && exit 3; trap '' TERM; while :; do sleep 1; done"
    )
    assert result.returncode == 3


LOST = """
client = init()
if rank == 0:
    client.report('peer_lost', 'rank 1 was lost')
    sys.exit(1)
time.sleep(0.05)
os._exit(5)
"""
ABORTED = """
client = init()
if rank == 1:
    client.report('aborted', 'ValueError: no data')
    client.all_gather(b'')
    time.sleep(0.05)
    sys.exit(4)
client.all_gather(b'')
sys.exit(1)
"""


@pytest.mark.parametrize(("body", "exit_code"), [(LOST, 5), (ABORTED, 4)], ids=["lost", "aborted"])
def test_the_rank_at_fault_is_blamed_and_not_the_one_that_ends_first(
    hvdrun: Run, rank_script: Script, body: str, exit_code: int
) -> None:
    result = hvdrun("-np", "2", "python", rank_script(body))
    assert result.returncode == exit_code
    assert re.search(rf"rank 1 \(pid \d+\) failed with exit code {exit_code}", result.stderr)


def test_a_rank_that_never_calls_init_is_named(hvdrun: Run, rank_script: Script, place: Any) -> None:
    script = rank_script("if rank == 1: time.sleep(300)\ninit()")
    result = hvdrun("--start-timeout", "0.5", *place.options, "python", script)
    assert result.returncode == 1
    assert "[0] sirtaki.bindings.bootstrap.job.RendezvousTimeout: 1 of 2 ranks are here" in result.stderr
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(
        rf"hvdrun: rank 1 \(pid \d+{place.on}\) has not called hvd.init\(\); "
        r"another rank has waited for 0.5 s.*",
        last,
    )


def test_a_rank_that_ends_without_init_while_others_wait_is_named_at_once(
    hvdrun: Run, rank_script: Script
) -> None:
    result = hvdrun("-np", "3", "python", rank_script("if rank != 2: init()"))
    assert result.returncode == 1
    assert re.search(
        r"hvdrun: rank 2 \(pid \d+\) has ended \(exit code 0\) without calling hvd.init\(\) while",
        result.stderr,
    )


def test_a_rank_that_fails_in_init_is_blamed_and_not_those_that_wait(
    hvdrun: Run, rank_script: Script
) -> None:
    script = rank_script(
        "if rank == 1:\n    connect().close()\n    time.sleep(0.05)\n    sys.exit(7)\ninit()"
    )
    result = hvdrun("-np", "2", "python", script)
    assert result.returncode == 7
    assert "but rank 1 has gone" in result.stderr


def test_a_wrong_key_in_one_rank(hvdrun: Run, rank_script: Script) -> None:
    script = rank_script(
        "job = Job(os.environ['SIRTAKI_JOB'], size, b'wrong', VERSION)\n"
        "RendezvousClient.connect(os.environ['SIRTAKI_RENDEZVOUS'], job, Identity(rank, 1))"
    )
    result = hvdrun("-np", "1", "--verbose", "python", script)
    assert result.returncode == 1
    report = "hvdrun: the rendezvous reports that it refused a client: a process that claims to be rank 0"
    assert report in result.stderr
    assert "its key or its job is another one" in result.stderr
