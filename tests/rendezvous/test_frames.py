"""The frames of all connections: any input gives whole frames of the kinds of its sender, or an error."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sirtaki.bindings.bootstrap.connection.wire import (
    FROM,
    NO_RANK,
    Form,
    Frame,
    MessageKind,
    Sender,
    WireError,
    take_frame,
)

SENDERS = st.sampled_from(list(Sender))


@st.composite
def frames(draw: st.DrawFn, sender: Sender) -> Frame:
    """Returns any frame that a sender may send."""
    kind = draw(st.sampled_from(sorted(FROM[sender])))
    payload = draw(st.binary(max_size=min(200, kind.limit)))
    return Frame(kind, draw(st.integers(NO_RANK, 2**31 - 1)), payload, draw(st.integers(0, 2**64 - 1)))


SAID = SENDERS.flatmap(lambda sender: st.tuples(st.just(sender), st.lists(frames(sender), max_size=10)))


def read(sender: Sender, data: bytes, step: int) -> list[Frame]:
    """Returns the frames of these bytes when they come in pieces."""
    found, buffer = [], bytearray()
    for start in range(0, len(data), step):
        buffer += data[start : start + step]
        while (frame := take_frame(buffer, FROM[sender])) is not None:
            found.append(frame)
    return found


@given(SAID, st.integers(1, 50))
@example((Sender.AGENT, [Frame(MessageKind.ALIVE)]), 7)
def test_frames_come_out_as_they_went_in(said: tuple[Sender, list[Frame]], step: int) -> None:
    sender, sent = said
    assert read(sender, b"".join(frame.pack() for frame in sent), step) == sent


@given(SENDERS, st.binary(max_size=300), st.integers(1, 50))
def test_anything_else_is_an_error_or_nothing(sender: Sender, data: bytes, step: int) -> None:
    try:
        read(sender, data, step)
    except WireError:
        return


@given(SAID, st.integers(0), st.integers(1, 255))
def test_frames_with_a_changed_byte(said: tuple[Sender, list[Frame]], place: int, change: int) -> None:
    """Each content of each kind has a form, or is an error."""
    sender, sent = said
    data = bytearray(b"".join(frame.pack() for frame in sent))
    if data:
        data[place % len(data)] ^= change
    try:
        for frame in read(sender, bytes(data), 1000):
            assert sender in frame.kind.senders
            assert len(frame.payload) <= frame.kind.limit
            assert isinstance(frame.values if frame.kind.form is Form.JSON else frame.text, dict | str)
    except WireError:
        return


def test_every_byte_of_the_magic_counts() -> None:
    data = Frame(MessageKind.ALIVE).pack()
    assert [frame.kind for frame in read(Sender.AGENT, data, 1)] == [MessageKind.ALIVE]
    for place in range(4):
        other = bytearray(data)
        other[place] ^= 1
        with pytest.raises(WireError, match="another process writes to the connection"):
            read(Sender.AGENT, bytes(other), 1000)


@pytest.mark.parametrize("kind", MessageKind, ids=lambda kind: kind.name)
def test_a_length_beyond_the_limit_is_refused_before_it_is_read(kind: MessageKind) -> None:
    header = Frame(kind).pack()[:-4] + (kind.limit + 1).to_bytes(4, "big")
    text = f"^{kind.name} has {kind.limit + 1} bytes where {kind.limit} are allowed$"
    with pytest.raises(WireError, match=text):
        read(kind.senders[0], header, 1000)
    with pytest.raises(WireError, match=text):
        Frame(kind, 0, bytes(kind.limit + 1)).pack()


@pytest.mark.parametrize("kind", MessageKind, ids=lambda kind: kind.name)
def test_a_kind_is_taken_of_its_senders_only(kind: MessageKind) -> None:
    frame = Frame(kind, 3, number=5)
    for sender in kind.senders:
        assert read(sender, frame.pack(), 1000) == [frame]
    for sender in set(Sender) - set(kind.senders):
        with pytest.raises(WireError, match=f"^{kind.name} is not expected now$"):
            read(sender, frame.pack()[:-4] + b"\xff\xff\xff\xff", 1000)


@pytest.mark.parametrize("payload", [b"", b"[]", b"3", b"\xff", b"{", b"[" * 10_000])
def test_values_that_make_no_sense(payload: bytes) -> None:
    with pytest.raises(WireError, match="ANSWER is malformed"):
        _ = Frame(MessageKind.ANSWER, 0, payload).values


FIELDS = {"name": str, "counts": list[int]}


@pytest.mark.parametrize("counts", [None, 3, {}, [True], [1.0], ["1"], [[1]]])
def test_other_fields_or_types_are_refused(counts: object) -> None:
    right = {"name": "x", "counts": [1, 2]}
    assert Frame.of(MessageKind.ORDER, right).fields(**FIELDS) == ["x", [1, 2]]
    for wrong in ({"name": "x", "counts": counts}, {"counts": [1]}, {**right, "more": 0}):
        with pytest.raises(WireError, match="ORDER is malformed"):
            Frame.of(MessageKind.ORDER, wrong).fields(**FIELDS)


def test_contents_come_out_as_they_went_in() -> None:
    odd = {"PATH": "/\udcff\n", "é": "ü"}  # os.environ represents bytes that are not UTF-8 like this
    assert Frame.of(MessageKind.START, odd).values == odd
    assert Frame.of(MessageKind.REFUSED, "é\n\x00", 3, 4) == Frame(
        MessageKind.REFUSED, 3, "é\n\x00".encode(), 4
    )
    assert Frame.of(MessageKind.REFUSED, "\udcff" + "x" * 100_000).text == "?" + "x" * 3999
