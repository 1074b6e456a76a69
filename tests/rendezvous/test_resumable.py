"""Frames are kept until the other side has confirmed them, which it does now and then."""

from __future__ import annotations

import pytest

from sirtaki.bindings.bootstrap.connection.wire import HEADER, Frame, MessageKind
from sirtaki.bindings.bootstrap.job import RendezvousError
from sirtaki.bindings.bootstrap.server.clients import CONFIRM_BYTES, ResumableFrames


def test_frames_are_kept_until_they_are_confirmed() -> None:
    frames = ResumableFrames()
    for owner, parts in ((1, (b"a", b"bc")), (2, (b"d",)), (1, (b"e",))):
        frames.keep(owner, *parts)
    assert list(frames.unconfirmed()) == [b"a", b"bc", b"d", b"e"]
    assert list(frames.confirm(0)) == []
    assert list(frames.confirm(2)) == [(1, 3), (2, 1)]
    assert list(frames.unconfirmed()) == [b"e"]
    for count in (1, 4):
        with pytest.raises(RendezvousError, match="has confirmed messages that were not sent"):
            list(frames.confirm(count))
    assert list(frames.confirm(3)) == [(1, 1)]
    assert list(frames.unconfirmed()) == []


def of_size(size: int) -> Frame:
    """Returns a frame of `size` bytes."""
    return Frame(MessageKind.SAID, payload=bytes(size - HEADER.size))


def test_what_is_received_is_confirmed_now_and_then() -> None:
    frames = ResumableFrames()
    empty = Frame(MessageKind.LEFT)
    assert frames.note_received(of_size(CONFIRM_BYTES - 1)) == b""
    for _ in range(2):
        assert frames.note_received(empty) == Frame(MessageKind.CONFIRM, number=frames.received).pack()
        assert frames.note_received(of_size(CONFIRM_BYTES - HEADER.size)) == b""
    assert frames.received == 5
