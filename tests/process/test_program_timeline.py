"""The doings of a program, as its timeline has them: lines, and the pauses that the kernel counts."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sirtaki.bindings.observing.program_timeline import NO_CORE, QUOTA, _counted_pauses, _Lines
from sirtaki.bindings.observing.user_code import line_of, stack_of

MILLISECOND = 1_000_000


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def schedstat(root: Path) -> Path:
    return root / f"proc/self/task/{threading.main_thread().native_id}/schedstat"


def test_the_time_without_a_core_is_counted_from_the_beginning(
    tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    file = write(schedstat(tmp_path), f"5 {7 * MILLISECOND} 3\n")
    (pause,) = _counted_pauses(opened, tmp_path)
    assert (pause.name, pause.look()) == (NO_CORE, 0)
    file.write_text(f"5 {10 * MILLISECOND} 3\n")
    assert pause.look() == 3 * MILLISECOND
    assert pause.look() == 0


def test_short_times_add_up_until_they_are_long_enough(tmp_path: Path, opened: contextlib.ExitStack) -> None:
    file = write(schedstat(tmp_path), "0 0 0\n")
    (pause,) = _counted_pauses(opened, tmp_path)
    for count, expected in ((0.6, 0.6), (1.2, 1.2), (1.8, 0.6)):
        file.write_text(f"0 {int(count * MILLISECOND)} 0\n")
        assert pause.look() == int(expected * MILLISECOND)


@pytest.mark.parametrize(
    ("memberships", "folder", "text"),
    [
        ("0::/jobs/one\n", "sys/fs/cgroup/jobs", "nr_periods 9\nthrottled_usec {ms}000\n"),
        ("4:cpu,cpuacct:/jobs/one\n0::/\n", "sys/fs/cgroup/cpu/jobs/one", "throttled_time {ms}000000\n"),
    ],
)
def test_a_quota_of_a_group_around_the_process_counts(
    tmp_path: Path, opened: contextlib.ExitStack, memberships: str, folder: str, text: str
) -> None:
    write(tmp_path / "proc/self/cgroup", memberships)
    file = write(tmp_path / folder / "cpu.stat", text.format(ms=40))
    (pause,) = _counted_pauses(opened, tmp_path)
    file.write_text(text.format(ms=65))
    assert (pause.name, pause.look()) == (QUOTA, 25 * MILLISECOND)


def test_a_file_that_says_nothing_is_no_pause(tmp_path: Path, opened: contextlib.ExitStack) -> None:
    write(schedstat(tmp_path), "")
    (pause,) = _counted_pauses(opened, tmp_path)
    assert pause.look() == 0


def test_a_line_is_the_users_below_a_library() -> None:
    def inner() -> str:
        return line_of(sys._getframe())

    assert line_of(None) == ""
    line = inner.__code__.co_firstlineno + 1
    assert inner() == f"in inner() at {os.path.basename(__file__)}:{line}"
    stack = [line_of(None), *stack_of(sys._getframe())]
    assert stack[1].startswith("in test_a_line_is_the_users_below_a_library() at test_program_timeline.py:")
    assert 2 < len(stack) <= 11, "pytest's frames, but not all"
    (found,) = ThreadPoolExecutor(1).map(lambda _: line_of(sys._getframe()), [0])
    assert found.startswith("in <lambda>() at ")


def test_a_line_lasts_from_the_first_look_to_the_next_one() -> None:
    lines = _Lines()
    assert list(lines.look(1000)) == []
    here = sys._getframe().f_lineno + 1
    found = [*lines.look(2000), *lines.look(3000, is_last=True)]
    names = [(name.rpartition(":")[2], began) for name, began in found]
    assert names[-1] == (str(here), 2000)
    assert names[0][1] == 1000
