"""The protocol of hvdrun and an agent: any input gives whole frames or an error."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sirtaki.runner.hosts.frames import (
    LIMITS,
    MAX_BEFORE_MARK,
    START_MARK,
    Frame,
    FrameReader,
    MessageKind,
    WireError,
)

KINDS = st.sampled_from(list(MessageKind))
FRAMES = st.builds(Frame, KINDS, st.integers(-1, 2**31 - 1), st.binary(max_size=200))


def read(reader: FrameReader, data: bytes, step: int) -> list[Frame]:
    """Returns the frames that the reader makes of these bytes when they come in pieces."""
    return [frame for start in range(0, len(data), step) for frame in reader.take(data[start : start + step])]


@given(st.lists(FRAMES, max_size=10), st.integers(1, 50), st.binary(max_size=100))
@example([Frame(MessageKind.ALIVE)], 7, START_MARK[:-1])
def test_frames_come_out_as_they_went_in(frames: list[Frame], step: int, banner: bytes) -> None:
    assume((banner + START_MARK).index(START_MARK) == len(banner))
    data = banner + START_MARK + b"".join(frame.pack() for frame in frames)
    assert read(FrameReader(START_MARK), data, step) == frames


@given(st.binary(max_size=300), st.integers(1, 50))
def test_anything_else_is_an_error_or_nothing(data: bytes, step: int) -> None:
    try:
        read(FrameReader(), data, step)
    except WireError:
        return


def test_the_login_may_not_print_without_end() -> None:
    reader = FrameReader(START_MARK)
    with pytest.raises(WireError, match="the login there has printed more than 65536 bytes"):
        read(reader, b"x" * (MAX_BEFORE_MARK + 2), 1000)
    assert not reader.started


def test_every_byte_of_the_magic_counts() -> None:
    data = Frame(MessageKind.ALIVE).pack()
    assert [frame.kind for frame in FrameReader().take(data)] == [MessageKind.ALIVE]
    for place in range(4):
        other = bytearray(data)
        other[place] ^= 1
        with pytest.raises(WireError, match="another process writes to the connection"):
            list(FrameReader().take(bytes(other)))


def test_a_length_beyond_the_limit_is_refused_before_it_is_read() -> None:
    good = Frame(MessageKind.STDOUT, 0, b"x").pack()
    for kind in MessageKind:
        limit = LIMITS.get(kind, 64 * 1024 + 64)
        header = good[:4] + bytes([kind]) + good[5:9] + (limit + 1).to_bytes(4, "big")
        with pytest.raises(WireError, match=f"{kind.name} has {limit + 1} bytes where {limit} are allowed"):
            list(FrameReader().take(header))
        with pytest.raises(WireError, match=kind.name):
            Frame(kind, 0, bytes(limit + 1)).pack()


@pytest.mark.parametrize("payload", [b"", b"[]", b"3", b"\xff", b"{", b"[" * 10_000])
def test_values_that_make_no_sense(payload: bytes) -> None:
    with pytest.raises(WireError, match="ANSWER is malformed"):
        _ = Frame(MessageKind.ANSWER, 0, payload).values
    with pytest.raises(WireError, match="GRANT must contain a number"):
        _ = Frame(MessageKind.GRANT, 0, payload).number


def test_values_and_numbers_come_out_as_they_went_in() -> None:
    odd = {"PATH": "/\udcff\n", "é": "ü"}  # os.environ represents bytes that are not UTF-8 like this
    assert Frame.of_values(MessageKind.START, odd).values == odd
    assert Frame.of_number(MessageKind.GRANT, 1, 2**32 - 1).number == 2**32 - 1
    assert Frame.of_piece(MessageKind.WORKER_TIMELINE, 5, 7, b"[\n").numbered == (7, b"[\n")
    assert Frame.of_piece(MessageKind.WORKER_TIMELINE, 5, 7, b"").numbered == (7, b"")


@pytest.mark.parametrize("payload", [b"", b"123"])
def test_a_piece_without_its_number_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match="WORKER_TIMELINE must begin with a number"):
        _ = Frame(MessageKind.WORKER_TIMELINE, 0, payload).numbered
