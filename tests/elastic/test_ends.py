"""The ends of an elastic job: by a mistake of the program, by its limits, at its user's request."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from elastic.running import (
    FAILSAFE_SECONDS,
    QUICK,
    HostScript,
    check_exact,
    command,
    run_job,
    run_source,
    running_job,
)
from launching import wait_until

NO_MORE = ("--blacklist-cooldown-range", "60", "60")  # no replacement joins
THREE = ("-np", "3", "--min-np", "1", *QUICK)
TRAINING = """
import threading, numpy, sirtaki.numpy as hvd
hvd.init()
@hvd.elastic.run
def train(state):
    {}
train(hvd.elastic.ObjectState())
"""


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("raise-step:5", 1, "rank 1 failed with exit code 1: RuntimeError: a planned mistake"),
        ("raise-init:0", 1, "RuntimeError: a planned mistake"),
        ("fail-step:5", 3, "rank 1 failed with exit code 3"),
        ("exit-init:0", 1, "has ended before it called the function of hvd.elastic.run"),
        ("vanish-step:5", 1, "rank 1 ended with exit code 0, but its training function has not returned"),
    ],
    ids=["exception", "exception before the first world", "error", "early end", "vanished"],
)
def test_a_mistake_of_a_rank_ends_the_job_and_names_it(fault: str, code: int, text: str) -> None:
    job = run_job(THREE, "numpy_training.py", 60, 0.01, f"1:{fault}")
    assert job.code == code
    assert text in job.text
    assert not job.results


@pytest.mark.parametrize("fault", ["raise-step:5", "fail-step:5"], ids=["exception", "error"])
def test_a_mistake_of_a_rank_is_survived_if_the_user_says_so(fault: str) -> None:
    options = (*THREE, "--elastic-survive", "exit")
    job = run_job(options, "numpy_training.py", 60, 0.01, f"1:{fault}")
    check_exact(job, 60, {0, 2})


def test_a_rank_that_vanishes_during_the_training_leaves_no_child_behind(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    options = (*THREE, "--elastic-survive", "exit")
    job = run_job(options, "numpy_training.py", 60, 0.01, "1:orphan-step:5", HELD_FILE=str(held))
    check_exact(job, 60, {0, 2})
    assert "rank 1 was lost: ended with exit code 0, but its training function has not returned" in job.text


def test_a_rank_that_returns_while_another_still_needs_it_is_named(tmp_path: Path) -> None:
    calls = "for _ in range(2 + hvd.rank()): hvd.allreduce(numpy.ones(3), name='loss')"
    job = run_source(tmp_path, TRAINING.format(calls))
    assert job.code == 1
    assert "returned from the training function while rank 1 still needed it for tensor 'loss'" in job.text
    assert "(in train() at train.py:6): the ranks made different numbers of calls" in job.text


def test_ranks_that_catch_an_exception_of_the_training_function_end_the_job_well() -> None:
    faults = [f"{rank}:raise-step:5" for rank in range(3)]
    job = run_job(THREE, "numpy_training.py", 60, 0.01, *faults, CATCHES="1")
    assert job.code == 0, job.text


def test_ranks_that_all_exit_with_code_0_inside_the_training_function_end_the_job_well() -> None:
    job = run_job(THREE, "numpy_training.py", 60, 0.01, *[f"{rank}:exit-step:5" for rank in range(3)])
    assert job.code == 0, job.text


def test_a_reset_callback_that_exits_with_code_0_ends_the_training() -> None:
    faults = ("1:step:5", "0:exit-reset:0", "2:exit-reset:0")
    job = run_job(("-np", "3", "--min-np", "1", *NO_MORE), "numpy_training.py", 60, 0.01, *faults)
    assert job.code == 0, job.text


def test_a_reset_callback_that_exits_with_an_error_is_a_loss_if_the_user_says_so() -> None:
    options = ("-np", "3", "--min-np", "1", "--elastic-survive", "exit", *NO_MORE)
    job = run_job(options, "numpy_training.py", 60, 0.01, "1:step:5", "2:fail-reset:0")
    check_exact(job, 60, {0})


def test_the_reset_limit_ends_the_job() -> None:
    options = (*THREE, "--reset-limit", "1")
    job = run_job(options, "numpy_training.py", 200, 0.02, "1:step:3", "2:step:6")
    assert job.code == 1
    assert "--reset-limit allows 1" in job.text


def test_too_few_ranks_end_the_job_after_the_timeout() -> None:
    cooldown = ("--blacklist-cooldown-range", "60", "60")
    options = ("-np", "2", "--min-np", "2", "--elastic-timeout", "8", *cooldown)  # Python starts within that
    job = run_job(options, "numpy_training.py", 200, 0.01, "1:step:3", "2:import:0")
    assert job.code == 1
    assert "2 ranks are needed, and 1 was there after 8 s" in job.text


def test_sigterm_lets_a_rank_leave_at_a_commit() -> None:
    job = run_job(THREE, "numpy_training.py", 300, 0.02, "1:term-step:5")
    check_exact(job, 300, {0, 2})
    assert "was lost" not in job.text
    assert "rank 1 leaves" in job.text


def test_a_rank_lost_after_its_training_fails_the_job_once_the_others_have_ended() -> None:
    job = run_job(THREE, "numpy_training.py", 40, 0.0, "1:end:0", "0:slow-end:0")
    assert job.code == 1
    assert "rank 1 was lost after its training had ended: killed by signal 9 (SIGKILL)" in job.text
    assert {result["worker"] for result in job.results} == {0, 2}


def test_a_child_process_of_a_rank_can_be_terminated() -> None:
    job = run_job(THREE, "numpy_training.py", 60, 0.01, "1:child-step:5")
    check_exact(job, 60, {0, 1, 2})
    assert "asked to end" not in job.text


def test_hvdrun_can_be_interrupted_while_no_rank_runs(tmp_path: Path) -> None:
    options = ("-np", "1", "--min-np", "1", *HostScript(tmp_path).options)
    with running_job(tmp_path, command(options, "numpy_training.py", (100, 0.01))) as job:
        job.says("waiting for more")
        job.process.send_signal(signal.SIGINT)
        assert job.ended().code == 130


@pytest.mark.parametrize("more", [("localhost:3",), ("localhost:2", "hostB:1")])
def test_output_of_a_new_slot_that_cannot_be_kept_ends_the_job(more: tuple[str, ...], tmp_path: Path) -> None:
    kept, script = tmp_path / "kept", HostScript(tmp_path, "localhost:2")
    options = ("-np", "2", "--min-np", "1", "--max-np", "3", *script.options, "--output-filename", str(kept))
    with running_job(tmp_path, command(options, "numpy_training.py", (100_000, 0.01)), TALK="1") as job:
        job.says("step 5")
        kept.rename(tmp_path / "elsewhere")
        kept.write_text("")
        script.name(*more)
        ended = job.ended()
    assert ended.code == 1
    assert "cannot keep the output of rank 2" in ended.text
    assert "Traceback" not in ended.text


def test_a_reader_that_leaves_ends_the_job_at_once() -> None:
    job = subprocess.Popen(
        command(
            THREE,
            "numpy_training.py",
            (100_000, 0.001),
        ),
        stdout=subprocess.PIPE,
        env={**os.environ, "TALK": "1"},
    )
    assert job.stdout is not None
    assert job.stdout.readline()
    job.stdout.close()
    assert job.wait(FAILSAFE_SECONDS) == 141


def test_a_failure_that_the_program_swallows_is_no_commit() -> None:
    job = run_job(THREE, "numpy_training.py", 60, 0.01, "1:step:5", SWALLOW="1")
    check_exact(job, 60, {0, 2})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_hvdrun_ends_all_ranks(number: signal.Signals, tmp_path: Path) -> None:
    with running_job(tmp_path, command(THREE, "numpy_training.py", (100_000, 0.01))) as job:
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children")
        wait_until(lambda: len(children.read_text().split()) >= 4, "the ranks have been started")
        pids = [int(pid) for pid in children.read_text().split()]
        job.process.send_signal(number)
        ended = job.ended()
    assert ended.code == 128 + number
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert not ended.results


def test_a_job_without_min_np_refuses_to_run_it() -> None:
    job = run_job(("-np", "2"), "numpy_training.py", 40, 0.0)
    assert job.code == 1
    assert "hvd.elastic.run needs a launcher that can replace ranks" in job.text
    assert "hvdrun -np 4 --min-np 2 python train.py" in job.text


def test_an_exception_that_ends_a_thread_is_told_at_the_end_of_the_job(tmp_path: Path) -> None:
    thread = "threading.Thread(target=lambda: [hvd.barrier(), 1 // (1 - hvd.rank())])"
    job = run_source(tmp_path, TRAINING.format(f"thread = {thread}; thread.start(); thread.join()"))
    assert job.code == 0
    last = job.text.splitlines()[-1]
    assert last.startswith("hvdrun: rank 1 went on after a failure, and ended with exit code 0: an exception")
    assert "ZeroDivisionError" in last


@pytest.mark.parametrize(
    ("script", "missing", "advice"),
    [
        ("", "hvd.init() or the function of", "call hvd.init() at the start of the script, and train in a"),
        ("import sirtaki.numpy as hvd; hvd.init()", "the function of", "train in a"),
    ],
)
def test_separate_runs_are_told_from_a_job(script: str, missing: str, advice: str, tmp_path: Path) -> None:
    job = run_source(tmp_path, script)
    assert job.code == 0
    notice = f"hvdrun: no rank called {missing} hvd.elastic.run: these were 2 separate runs, which exchanged"
    assert job.text.splitlines()[-1].startswith(notice)
    assert f"To train one model on all of them, {advice} function" in job.text


def test_one_process_without_a_training_function_ends_without_a_word(tmp_path: Path) -> None:
    job = run_source(tmp_path, "", ranks=1)
    assert (job.code, job.text) == (0, "")
