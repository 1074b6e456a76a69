"""Spares: processes that have imported their modules, and take the places of lost ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from elastic.running import FAILSAFE_SECONDS, QUICK, run_job
from elastic.spare_job import check_exact, running
from launching import is_running, wait_until

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind
from sirtaki.bindings.bootstrap.elastic import loaded_modules, spare
from sirtaki.runner.elastic.arbiter.model import Slot
from sirtaki.runner.elastic.arbiter.policy import Slots
from sirtaki.runner.elastic.spares.job_spares import REPLENISH_SECONDS, SparePool
from sirtaki.runner.elastic.spares.spare_command import why_no_spare

TWO = ("-np", "2", "--min-np", "1", "--verbose", "--spares", "1", *QUICK)
MODES = pytest.mark.parametrize("mode", [(), ("--spares-run-script",)])


# ---- Jobs ----------------------------------------------------------------------------------------------


@MODES
def test_a_spare_takes_the_place_of_a_killed_rank(mode: tuple[str, ...], tmp_path: Path) -> None:
    with running(tmp_path, (*TWO, *mode)) as job:
        job.says("spare 0 waits")
        os.kill(job.workers()[0], signal.SIGKILL)
        job.says("2 ranks from commit")
        ended = job.end()
    check_exact(ended, 2)
    assert job.workers()[1] == job.spares()[0]
    # The program has also pickled an object of a class of its own, which __main__ defines in a spare too.
    results = {result["pid"]: result for result in ended.results}
    assert results[job.spares()[0]]["worker"] == "2"
    assert "[1] RESULT" in ended.text


def test_a_spare_that_waits_at_the_end_runs_nothing_of_the_program(tmp_path: Path) -> None:
    with running(tmp_path, TWO) as job:
        job.says("spare 0 waits")
        ended = job.end()
    assert ended.code == 0, ended.text
    assert job.ran() == {result["pid"] for result in ended.results}
    assert len(ended.results) == 2
    assert not is_running(job.spares()[0])
    assert "a spare on" not in ended.text  # it was told to end, which is no failure


def test_a_spare_that_runs_the_script_goes_no_further_than_init(tmp_path: Path) -> None:
    with running(tmp_path, (*TWO, "--spares-run-script")) as job:
        job.says("spare 0 waits")
        ended = job.end()
    assert ended.code == 0, ended.text
    assert job.spares()[0] in job.ran()
    assert job.spares()[0] not in {result["pid"] for result in ended.results}
    assert not is_running(job.spares()[0])


def test_a_spare_that_fails_is_replaced_and_the_ranks_go_on(tmp_path: Path) -> None:
    with running(tmp_path, TWO) as job:
        job.says("spare 0 waits")
        os.kill(job.spares()[0], signal.SIGKILL)
        job.says("spare 1 waits")
        ended = job.end()
    assert ended.code == 0, ended.text
    assert "a spare on localhost was killed by signal 9 (SIGKILL); another one starts in 1 s" in ended.text
    assert "was lost" not in ended.text
    assert len(ended.results) == 2


def test_a_killed_hvdrun_leaves_no_spare_behind(tmp_path: Path) -> None:
    with running(tmp_path, TWO) as job:
        job.says("spare 0 waits")
        pids = [*job.ran(), *job.spares()]
        assert len(pids) == 3
        job.process.kill()
        wait_until(lambda: not any(is_running(pid) for pid in pids), "all processes have ended")
    assert job.process.returncode == -signal.SIGKILL


def test_a_command_that_is_not_python_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sirtaki.runner", "-np", "1", "--min-np", "1", "--spares", "1", "/bin/true"],
        capture_output=True,
        text=True,
        timeout=FAILSAFE_SECONDS,
    )
    assert done.returncode == 2
    assert "--spares needs a command that Python runs, but 'true' is not Python" in done.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("-np", "2", "--spares", "1"), "--spares"),
        (("-np", "2", "--min-np", "1", "--spares-run-script"), "give their number with --spares"),
    ],
)
def test_options_without_the_one_that_they_need_are_refused(options: tuple[str, ...], sentence: str) -> None:
    job = run_job(options, "numpy_training.py", 10, 0.0)
    assert job.code != 0
    assert sentence in job.text
    assert not job.results


def test_a_spare_may_get_its_place_while_it_still_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setenv("PLACE", "old")
    orders = spare.SpareOrders(json.loads(spare.instructions(theirs.detach(), "", False)))
    ours.sendall(Frame.of(MessageKind.PLACE, {"PLACE": "new"}).pack())
    ours.close()
    orders.report_ready(3, 0.5)  # nobody listens any more
    orders.wait()
    assert os.environ["PLACE"] == "new"


# ---- The pool ------------------------------------------------------------------------------------------


def test_spares_start_only_while_the_ranks_train_and_are_spread_over_hosts() -> None:
    pool, hosts = SparePool(4), {"a": 1, "b": 2, "c": 0}
    assert pool.advance(hosts, False, 0.0) == ([], [])
    started, _ = pool.advance(hosts, True, 0.0)
    assert [spare.host for spare in started] == ["b", "a", "b", "a"]  # none where no rank runs
    assert pool.advance(hosts, True, 1.0) == ([], [])


def test_a_host_keeps_its_spare_while_it_has_no_rank() -> None:
    pool = SparePool(1)
    pool.advance({"a": 2, "b": 1}, True, 0.0)
    assert pool.advance({"a": 0, "b": 1}, False, 1.0) == ([], [])
    assert pool.take("a", 1.0) == 0


def test_a_host_that_joins_gets_its_share_of_the_spares() -> None:
    pool = SparePool(3)
    pool.advance({"a": 2}, True, 0.0)
    pool.note_ready(2, 1.0)
    started, ended = pool.advance({"a": 2, "b": 2}, True, 2.0)
    assert [(spare.number, spare.host) for spare in started] == [(3, "b")]
    assert [spare.number for spare in ended] == [1]  # the newest of those that still import
    assert pool.note_end(1, "has ended", 2.0) == ""
    assert pool.advance({"a": 2, "b": 2}, True, 3.0) == ([], [])


def test_a_host_whose_spare_has_failed_gets_its_share_after_the_pause() -> None:
    pool, hosts = SparePool(2), {"a": 1, "b": 1}
    pool.advance(hosts, True, 0.0)
    pool.note_end(1, "has failed", 0.0)
    started, _ = pool.advance(hosts, True, 0.5)
    assert [spare.host for spare in started] == ["a"]
    assert pool.due == 1.0
    started, ended = pool.advance(hosts, True, 1.0)
    assert [spare.host for spare in started] == ["b"]
    assert [spare.host for spare in ended] == ["a"]
    assert pool.due is None


def test_the_oldest_waiting_spare_of_the_host_is_taken_and_replaced_after_a_pause() -> None:
    pool = SparePool(2)
    pool.advance({"a": 2}, True, 0.0)
    assert not pool.has_ready("a")
    pool.note_ready(1, 1.0)
    assert pool.has_ready("a")
    assert not pool.has_ready("b")
    assert pool.take("b", 2.0) is None
    assert pool.take("a", 2.0) == 1  # 0 still imports
    assert pool.take("a", 2.0) == 0
    assert pool.take("a", 2.0) is None
    assert pool.advance({"a": 2}, True, 2.5) == ([], [])
    assert pool.due == 2.0 + REPLENISH_SECONDS
    started, _ = pool.advance({"a": 2}, True, 2.0 + REPLENISH_SECONDS)
    assert [spare.number for spare in started] == [2, 3]


def test_spares_of_a_host_that_leaves_are_ended() -> None:
    pool = SparePool(1)
    pool.advance({"a": 1}, True, 0.0)
    started, gone = pool.advance({"b": 1}, True, 1.0)
    assert [spare.host for spare in gone] == ["a"]
    assert [spare.host for spare in started] == ["b"]
    assert pool.note_end(gone[0].number, "has ended", 2.0) == ""


def test_pauses_grow_with_failures_until_a_host_gets_no_more_spares() -> None:
    pool, now = SparePool(1), 0.0
    texts = []
    for _ in range(10):
        ((started,), _) = pool.advance({"a": 1}, True, now)
        texts.append(pool.note_end(started.number, "has failed", now))
        assert pool.advance({"a": 1}, True, now) == ([], [])
        now = pool.due or now + 1000.0
    assert texts[:2] == [
        "a spare on a has failed; another one starts in 1 s",
        "a spare on a has failed; another one starts in 2 s",
    ]
    assert texts[-1] == "a spare on a has failed: the last one there, because 10 have failed"
    assert pool.due is None
    assert pool.advance({"a": 1}, True, now + 1000.0) == ([], [])


def test_the_first_pause_of_a_slot_is_left_out_where_a_spare_waits() -> None:
    slots = [Slot("a", 0), Slot("b", 0)]
    pausing = Slots(slots, (2.0, 60.0), {"a"})
    for slot in slots:
        pausing.note_loss(slot, 10.0)
    assert list(pausing.startable((), 10.0)) == [Slot("a", 0)]
    pausing.note_loss(Slot("a", 0), 11.0)  # the second one pauses as ever
    assert list(pausing.startable((), 12.9)) == [Slot("b", 0)]
    assert list(pausing.startable((), 13.0)) == slots


# ---- Commands and modules ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["/usr/bin/python3", "train.py", "-S"], ""),
        (["/usr/bin/python3.12", "-u", "-m", "package.train"], ""),
        (["/usr/bin/python", "-X", "dev", "-W", "error", "train.py"], ""),
        (["/usr/bin/python", "-Wignore", "-c", "pass"], ""),
        (["/usr/bin/python", "-I", "train.py"], "Python's option -I ignores PYTHONPATH"),
        (["/usr/bin/python", "-uE", "train.py"], "Python's option -E ignores PYTHONPATH"),
        (["/usr/bin/python", "-S", "train.py"], "Python's option -S leaves out the module site"),
        (["/usr/bin/python", "-i", "train.py"], "Python's option -i waits for input after the program"),
        (["/usr/bin/python", "-V"], "'python -V' runs no program"),
        (["/usr/bin/python", "-u"], "it names no program"),
        (["/usr/bin/bash", "train.sh"], "'bash' is not Python"),
    ],
)
def test_commands_that_can_be_spares(arguments: list[str], reason: str) -> None:
    assert why_no_spare(arguments) == reason


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ("#!/usr/bin/python3", ""),
        ("#!/usr/bin/env python3", ""),
        ("#!/usr/bin/python3 -I", "Python's option -I ignores PYTHONPATH"),
        ("#!/bin/sh", "'train' is not Python"),
        ("\x7fELF", "'train' is not Python"),
    ],
)
def test_scripts_are_judged_by_their_first_line(first: str, reason: str, tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text(f"{first}\n")
    assert why_no_spare([str(script)]) == reason


def test_the_list_has_installed_modules_and_none_of_the_program(tmp_path: Path) -> None:
    names = loaded_modules.installed_modules(sys.modules)
    assert {"json", "numpy", "sirtaki.runner.elastic.spares.job_spares"} <= set(names)
    assert not {"__main__", "launching", "elastic.running"} & set(names)
    loaded_modules.write_list(str(tmp_path))
    path = loaded_modules.list_path(str(tmp_path))
    assert set(names) <= set(loaded_modules.read_list(path))
    loaded_modules.remove_from_list(path, "numpy")
    assert "numpy" not in loaded_modules.read_list(path)
