"""Verdicts of hvdrun after a failure: the rank that caused it, the user's line, each traceback once."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from process_world import run_program

HEAD = """
import os, signal, sys, threading, time
import numpy as np
import sirtaki.numpy as hvd

hvd.init()
rank, peers = hvd.rank(), hvd.allgather(np.array([os.getpid()]))

def average(name="loss", elements=3):
    return hvd.allreduce(np.ones(elements), name=name)

"""


def run(tmp_path: Path, body: str, ranks: int = 2, **environment: str) -> tuple[int, list[str]]:
    """Returns hvdrun's exit code, and the lines of its standard error."""
    ended = run_program(tmp_path, HEAD + textwrap.dedent(body), ranks, **environment)
    return ended.returncode, ended.stderr.splitlines()


def test_an_exception_is_shown_once_with_the_users_lines(tmp_path: Path) -> None:
    code, said = run(
        tmp_path,
        """
        def load():
            return {}["label 7"]

        if rank == 1:
            load()
        average()
        """,
    )
    assert code == 1
    assert re.fullmatch(
        r"hvdrun: rank 1 \(pid \d+\) failed with exit code 1: "
        r"KeyError: 'label 7' \(in load\(\) at train\.py:\d+\)",
        said[-1],
    )
    assert len([line for line in said if line.startswith("[1]") and "KeyError" in line]) == 1
    survivor = [line for line in said if line.startswith("[0]")]
    assert "left out of this traceback (SIRTAKI_FULL_TRACEBACKS=1 shows all)" in survivor[0]
    assert not [line for line in survivor if "sirtaki/bindings" in line]
    assert "gave up: KeyError: 'label 7' (in load() at train.py:" in survivor[-1]


def test_all_frames_are_shown_on_request(tmp_path: Path) -> None:
    _, said = run(tmp_path, "average(elements=3 + rank)", SIRTAKI_FULL_TRACEBACKS="1")
    assert [line for line in said if "context.py" in line]
    assert not [line for line in said if "left out" in line]


def test_every_rank_hears_that_they_disagree(tmp_path: Path) -> None:
    _, said = run(
        tmp_path,
        """
        for step in range(20):
            try:
                average(elements=3 + rank)
            except hvd.MismatchError:
                pass
        average("last", elements=3 + rank)
        """,
        ranks=3,
    )
    for rank in range(3):
        (line,) = [line for line in said if line.startswith(f"[{rank}] ") and "Error: " in line]
        assert "MismatchError: ranks disagree about 'last': rank 0 (pid " in line
    assert "ranks disagree about 'last'" in said[-1]


WAYS = {
    "wraps": "raise SystemError('my own') from None",
    "exits": "sys.exit(3)",
    "leaves": "os._exit(3)",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_rank_is_named_whatever_the_others_make_of_it(tmp_path: Path, way: str) -> None:
    code, said = run(
        tmp_path,
        f"""
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            average()
        except hvd.HorovodInternalError:
            {WAYS[way]}
        """,
    )
    assert code == 137
    assert re.match(r"hvdrun: rank 1 \(pid \d+\) was killed by signal 9", said[-1])


@pytest.mark.parametrize("way", WAYS)
def test_a_late_rank_is_named_with_what_it_does_instead(tmp_path: Path, way: str) -> None:
    _, said = run(
        tmp_path,
        f"""
        def evaluate():
            time.sleep(300)

        if rank == 1:
            evaluate()
        try:
            average()
        except hvd.HorovodInternalError:
            {WAYS[way]}
        """,
        SIRTAKI_STALL_DEADLINE="1",
    )
    assert re.fullmatch(
        r"hvdrun: rank 1 \(pid \d+\) kept other ranks waiting for too long: given up after \d seconds "
        r"\(stall_deadline\): rank 0 \(.+\) waits for 'loss'; "
        r"rank 1 \(.+\) has not submitted it and is in evaluate\(\) at train\.py:\d+",
        said[-1],
    )


@pytest.mark.parametrize("reaction", ["say", "stop"])
def test_a_value_that_is_not_finite_is_named_with_the_line(tmp_path: Path, reaction: str) -> None:
    _, said = run(
        tmp_path,
        """
        def step(number):
            value = float("nan") if rank == 1 and number == 2 else 1.0
            return hvd.allreduce(np.full(3, value), name="loss")

        for number in range(5):
            step(number)
        raise SystemExit(3)
        """,
        SIRTAKI_NON_FINITE=reaction,
    )
    named = r"rank 1 \(pid \d+ on .+\) adds a NaN to the sum of 'loss' over 2 ranks, .+ at train\.py:\d+"
    if reaction == "stop":
        assert re.search(named + r"\. The job ends before another rank receives it", said[-1]), said
    else:  # hvdrun may repeat the last lines of a rank that has failed
        told = {line for line in said if " adds " in line}
        assert len(told) == 1
        assert re.match(rf"\[1\] sirtaki: {named}\. The sum carries it", told.pop())
        assert "exit code 3" in said[-1]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named(tmp_path: Path, stopped: int) -> None:
    """This includes the coordinator, although no rank can query its position."""
    _, said = run(
        tmp_path,
        f"""
        if rank == {stopped}:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.3)
        average()
        """,
        SIRTAKI_STALL_REPORT="0.5",
        SIRTAKI_STALL_DEADLINE="2",
    )
    assert re.match(rf"hvdrun: rank {stopped} \(pid \d+\) kept other ranks waiting for too long: ", said[-1])
    assert "Is that process stopped?" in said[-1]
    other = [line for line in said if line.startswith(f"[{1 - stopped}] ") and "DeadlineError" in line]
    assert len(other) == 1
    assert f"rank {stopped} (pid " in other[0]
    ends = r"Is that process stopped\? If nothing changes, the job ends in \d s \(stall_deadline\)"
    assert any(re.search(ends, line) for line in said), said


def test_a_stopped_coordinator_is_named_while_the_others_go_on_submitting(tmp_path: Path) -> None:
    _, said = run(
        tmp_path,
        """
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        for step in range(600):
            hvd.allreduce_async(np.ones(1), name=f"step {step}")
            time.sleep(0.1)
        print("nothing was noticed", file=sys.stderr)
        """,
        SIRTAKI_STALL_REPORT="0.5",
        SIRTAKI_STALL_DEADLINE="2",
    )
    assert re.match(r"hvdrun: rank 0 \(pid \d+\) kept other ranks waiting for too long: ", said[-1])
    assert not any("nothing was noticed" in line for line in said)


def test_a_job_that_goes_well_says_nothing_about_itself(tmp_path: Path) -> None:
    """Every warning is an error; a call after shutdown() is distinguished from one before init()."""
    body = """
    hvd.shutdown()
    try:
        hvd.rank()
    except ValueError as error:
        assert "already shut down in this process: call hvd.init() again" in str(error)
    """
    source, strict = HEAD + textwrap.dedent(body), ("-W", "error")
    ended = run_program(tmp_path, source, options=strict, OMP_NUM_THREADS="1")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_the_end_of_a_stall_is_told(tmp_path: Path) -> None:
    code, said = run(
        tmp_path,
        """
        if rank == 1:
            time.sleep(1.5)
        average()
        """,
        SIRTAKI_STALL_REPORT="0.5",
    )
    assert code == 0
    ends = [line for line in said if "came after" in line]
    assert len(ends) == 1
    assert re.search(r"sirtaki: rank 1 \(pid \d+ on .+\) came after 1 s: 'loss' can go on", ends[0])


def test_of_ranks_with_different_numbers_of_calls_the_one_that_ended_is_named(tmp_path: Path) -> None:
    code, said = run(tmp_path, "if rank == 0: average()")
    assert code == 1
    assert re.match(
        r"hvdrun: rank 1 \(pid \d+ on .+\) ended with exit code 0 while rank 0 \(pid \d+\) still needed it "
        r"for tensor 'loss' \(in average\(\) at train\.py:\d+\): the ranks made different numbers of calls",
        said[-1],
    )


THREAD = """
    def work():
        average()
        if rank == 1:
            raise KeyError("label 7")
        sys.exit(3)  # ends this thread only, without a word

    def in_thread(target):
        thread = threading.Thread(target=target, name="loader")
        thread.start()
        thread.join()
"""


def test_an_exception_that_ends_a_thread_is_told_at_the_end_of_the_job(tmp_path: Path) -> None:
    many = THREAD + "\n    for _ in range(20): in_thread(work)\n    average('last')\n"
    code, said = run(tmp_path, many)
    assert code == 0, said
    notice = (
        r"hvdrun: rank 1 \(pid \d+\) went on after a failure, and ended with exit code 0: an exception "
        r"ended its thread 'loader': KeyError: 'label 7' \(in work\(\) at train\.py:\d+\)"
    )
    assert re.fullmatch(notice, said[-1])
    assert not [line for line in said if line.startswith("[0]")]


def test_a_traceback_of_a_thread_has_the_users_lines_only(tmp_path: Path) -> None:
    body = (
        "def work(): average(elements=3 + rank)\n\n    thread = threading.Thread(target=work, name='loader')"
    )
    code, said = run(tmp_path, f"    {body}\n    thread.start()\n    thread.join()")
    assert code == 0
    shown = [line for line in said if line.startswith("[1]")]
    assert "frames of libraries left out" in shown[0]
    assert shown[1:3] == ["[1] Exception in thread loader:", "[1] Traceback (most recent call last):"]
    files = [line for line in shown if "  File " in line]
    assert len(files) == 2
    assert all("train.py" in line for line in files)
    assert "MismatchError" in shown[-1]


def test_frames_of_libraries_that_called_are_shown(tmp_path: Path) -> None:
    """A mistake of a trainer is at the trainer's line; frames that called the user's function are hidden."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "trainer.py").write_text(
        "import numpy as np, sirtaki.numpy as hvd\n"
        "def fit(step): step()\n"
        "def gather(elements): hvd.allreduce(np.ones(elements))\n"
    )
    body = """
    sys.path.append("site-packages")
    import trainer

    def step(): trainer.gather(3 + rank)

    trainer.fit(step)
    """
    code, said = run(tmp_path, body)
    assert code == 1
    frames = re.findall(r'^\[1\]   File ".*/(\w+)\.py", line \d+, in (\S+)$', "\n".join(said), re.MULTILINE)
    assert frames == [("train", "<module>"), ("train", "step"), ("trainer", "gather")]
