"""The lanes of hvdrun's output: each process's lines are shown under its own name."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator

import pytest

from sirtaki.runner.supervise.display import STDOUT, Display

SPARE = -2


@pytest.fixture
def display() -> Iterator[Display]:
    with selectors.PollSelector() as selector:
        shown = Display(selector)
        for rank in (0, 1):
            shown.add(rank, str(rank), None, 2)
        shown.add_spare(SPARE, "spare")
        yield shown
        shown.close_streams()
        serve(shown)


def serve(display: Display) -> None:
    """Shows what has been written."""
    display.balance()
    while ready := display._selector.select(0):
        for key, _ in ready:
            key.data()


def start(display: Display, lane: int) -> tuple[int, int]:
    """Shows the output of a process in this lane; returns the ends to which it writes."""
    (stdout, ours_out), (stderr, ours_err) = os.pipe(), os.pipe()
    display.read_rank(lane, stdout, stderr)
    return ours_out, ours_err


def test_the_output_of_a_spare_moves_with_it(display: Display, capfd: pytest.CaptureFixture[str]) -> None:
    streams = start(display, SPARE)
    os.write(streams[0], b"imported\nwith no end")
    serve(display)
    display.move_spare(SPARE, 0)
    os.write(streams[0], b"step 1\n")
    for stream in streams:
        os.close(stream)
    serve(display)
    shown = capfd.readouterr()
    assert shown.err == "[spare] imported\n[spare] with no end\n"
    assert shown.out == "[0] step 1\n"


def test_a_spare_that_has_closed_its_output_takes_nobody_elses(
    display: Display, capfd: pytest.CaptureFixture[str]
) -> None:
    """Has the output of a rank use the descriptors that a spare's had, which it has closed."""
    for stream in start(display, SPARE):
        os.close(stream)
    serve(display)
    streams = start(display, 1)
    display.move_spare(SPARE, 0)
    os.write(streams[0], b"step 1\n")
    for stream in streams:
        os.close(stream)
    serve(display)
    assert capfd.readouterr().out == "[1] step 1\n"


def test_an_unfinished_line_of_a_rank_elsewhere_is_not_continued_by_the_next_one(
    display: Display, capfd: pytest.CaptureFixture[str]
) -> None:
    display.take(1, STDOUT, b"step 1\nste")
    display.end_lines(1)
    display.take(1, STDOUT, b"step 1\n")
    serve(display)
    assert capfd.readouterr().out == "[1] step 1\n[1] ste\n[1] step 1\n"
