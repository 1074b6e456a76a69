"""Lines of ranks: complete, byte for byte, and the last lines are kept."""

from __future__ import annotations

import os
import selectors
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.runner.supervise import display
from sirtaki.runner.supervise.display import Pipe, Sink, Stream


class RecordingSink(Sink):
    """A sink that keeps its input instead of writing it."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write_line(self, prefix: bytes, line: bytes) -> None:
        self.lines.append(prefix + line)


def show(*parts: bytes) -> list[bytes]:
    """Returns the lines that appear when a rank writes these parts, one after the other."""
    sink = RecordingSink()
    reading, writing = os.pipe()
    pipe = Pipe(reading, Stream(b"[0] ", sink))
    for part in parts:
        os.write(writing, part)
        pipe.read()
    os.close(writing)
    assert pipe.read() == b""
    pipe.close()
    return sink.lines


def test_lines_are_whole_whatever_the_parts_are() -> None:
    assert show(b"on", b"e\ntw", b"o\n") == [b"[0] one\n", b"[0] two\n"]


def test_a_last_line_without_an_end_is_shown() -> None:
    assert show(b"one\nrest") == [b"[0] one\n", b"[0] rest\n"]


def test_bytes_that_are_no_text_pass() -> None:
    assert show(b"\xff\xfe\0\n") == [b"[0] \xff\xfe\0\n"]


def test_carriage_returns_of_progress_bars_pass() -> None:
    assert show(b" 10%\r", b" 20%\r", b" 30%\n") == [b"[0]  10%\r", b"[0]  20%\r", b"[0]  30%\n"]


def test_a_line_end_of_two_bytes_is_one_even_in_two_parts() -> None:
    assert show(b"one\r", b"\ntwo\r\n") == [b"[0] one\r\n", b"[0] two\r\n"]


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=20))
def test_nothing_is_lost(parts: list[bytes]) -> None:
    lines = show(*parts)
    shown = b"".join(line.removeprefix(b"[0] ") for line in lines)
    whole = b"".join(parts)
    assert shown in (whole, whole + b"\n")


def test_an_endless_line_is_broken_rather_than_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_LONGEST_LINE", 1000)
    lines = show(*[b"x" * 600] * 4)
    assert [len(line) for line in lines] == [1205, 1205]


def test_the_last_lines_are_remembered() -> None:
    reading, writing = os.pipe()
    pipe = Pipe(reading, Stream(b"", RecordingSink()))
    os.write(writing, b"".join(b"line %d\n" % number for number in range(50)) + b"bar 1\rbar 2\rend")
    os.close(writing)
    pipe.read()
    pipe.close()
    assert list(pipe.stream.tail) == [b"line %d\n" % number for number in range(31, 50)] + [b"end\n"]


def test_a_full_disk_is_told_once_and_the_rank_goes_on() -> None:
    sink = RecordingSink()
    reading, writing = os.pipe()
    with open("/dev/full", "wb", buffering=0) as full:
        pipe = Pipe(reading, Stream(b"", sink, full))
        for _ in range(3):
            os.write(writing, b"text\n")
            pipe.read()
    os.close(writing)
    pipe.close()
    assert sink.lines == [
        b"hvdrun: cannot write /dev/full: No space left on device; continuing without it\n",
        *[b"text\n"] * 3,
    ]


def test_a_sink_takes_no_more_when_its_reader_is_gone() -> None:
    selector = selectors.PollSelector()
    reading, writing = os.pipe()
    os.close(reading)
    sink = Sink(writing, selector)
    sink.write_line(b"", b"text\n")
    for key, _ in selector.select(0):
        key.data()
    assert isinstance(sink.error, BrokenPipeError)
    sink.write_line(b"", b"text\n")
    assert sink.empty
    os.close(writing)


def test_a_sink_that_nobody_reads_becomes_full_and_blocks_nobody() -> None:
    selector = selectors.PollSelector()
    reading, writing = os.pipe()
    sink = Sink(writing, selector)
    while not sink.full:
        sink.write_line(b"[0] ", b"x" * 1000 + b"\n")
    for _ in range(1000):
        for key, _ in selector.select(0):
            key.data()
    assert not sink.empty
    sink.drop()
    os.close(reading)
    os.close(writing)


def test_output_goes_to_a_plain_file_too(tmp_path: Path) -> None:
    selector = selectors.PollSelector()
    with open(tmp_path / "out", "wb") as file:
        sink = Sink(file.fileno(), selector)
        sink.write_line(b"[0] ", b"text\n")
        while not sink.empty:
            for key, _ in selector.select():
                key.data()
    assert (tmp_path / "out").read_bytes() == b"[0] text\n"
