"""Messages between workers and the arbiter: each arrives as it was sent, and nothing malformed is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.bindings.bootstrap.connection.wire import FROM, Frame, MessageKind, Sender, take_frame
from sirtaki.bindings.bootstrap.elastic import messages
from sirtaki.bindings.bootstrap.elastic.messages import Enlist, World, pack, unpack
from sirtaki.bindings.bootstrap.job import RendezvousError

EXAMPLES = [
    Enlist(3, "lost", 17, True, 2, "peer_lost", "rank 2 is gone", True, [2, 4]),
    messages.Received(3),
    messages.Counted(3, 1, 9),
    messages.Returned(3),
    messages.Drain(0),
    messages.Fence(3, 1),
    World(
        4,
        1,
        ["localhost:0", "localhost:2"],
        [0, 5],
        2,
        "job.4",
        "unix:@x",
        17,
        [0],
        1,
        "rank 2 was lost",
        1_500_000,
    ),
    messages.Change(4, 1),
    messages.LeaveAt(4, 10),
    messages.Over(4, "rank 1 was lost"),
    messages.Standing(3, 1, False),
    messages.End(1, "the job was ended"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda one: type(one).__name__)
def test_a_message_arrives_as_it_was_sent(message: messages.Message) -> None:
    assert unpack(pack(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda one: type(one).__name__)
def test_a_message_of_the_other_direction_is_refused(message: messages.Message) -> None:
    frame = pack(message)
    other = Sender.LAUNCHER if Sender.RANK in frame.kind.senders else Sender.RANK
    with pytest.raises(RendezvousError, match=f"{frame.kind.name} is not expected now"):
        take_frame(bytearray(frame.pack()), FROM[other])


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda one: type(one).__name__)
def test_a_field_of_another_type_or_a_missing_one_is_refused(message: messages.Message) -> None:
    kind, values = pack(message).kind, pack(message).values
    for name in values:
        for wrong in (None, 1.5, {}, [None], [[]]):
            with pytest.raises(RendezvousError):
                unpack(Frame.of(kind, {**values, name: wrong}))
        fewer = {other: value for other, value in values.items() if other != name}
        with pytest.raises(RendezvousError):
            unpack(Frame.of(kind, fewer))
    with pytest.raises(RendezvousError):
        unpack(Frame.of(kind, {**values, "unknown": 1}))


@given(
    st.sampled_from(MessageKind),
    st.binary(max_size=200) | st.text(max_size=50).map(str.encode) | st.just(b"[" * 100_000),
)
def test_bytes_that_are_no_message_are_refused(kind: MessageKind, payload: bytes) -> None:
    with pytest.raises(RendezvousError):
        unpack(Frame(kind, payload=payload))


def test_a_long_text_is_cut() -> None:
    message = unpack(pack(Enlist(1, "lost", 0, True, 0, "peer_lost", "x" * 100_000)))
    assert isinstance(message, Enlist)
    assert message.text == "x" * 4000
