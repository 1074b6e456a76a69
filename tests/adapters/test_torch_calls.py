"""Receives from any rank of a process group: how a sender is found, and when none can be."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from sirtaki.bindings.errors import Failure, HorovodInternalError
from sirtaki.torch.backend import messages
from sirtaki.torch.backend.messages import OpenCall, OpenReceives, ReceiveFromAny, SentMessages

HOUR = timedelta(hours=1)


class Done:
    """A receive of a message that is here."""

    def __init__(self) -> None:
        self.future: Any = torch.futures.Future()
        self.future.set_result([])

    def get_future(self) -> Any:
        return self.future

    def wait(self, timeout: timedelta) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Sending:
    """A message, which is received when a test says so."""

    has_ended = False

    def is_completed(self) -> bool:
        return self.has_ended


class Rank:
    """A context, alive or dead."""

    rank, failure = 0, None


@pytest.fixture
def own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves every step to the test."""
    monkeypatch.setattr(messages.lookout, "watch", lambda _: None)
    monkeypatch.setattr(messages, "_FIRST_LOOK", 0.0)
    monkeypatch.setattr(messages, "_LAST_LOOK", 0.0)


@pytest.fixture
def call() -> OpenCall:
    store = torch.distributed.HashStore()
    return OpenCall(lambda: store, 0, 3)


def offers_of(accepted: set[int], seen: list[tuple[int, int]]) -> Callable[[int, int], Any]:
    """Returns a function that accepts these messages, and notes all that are offered."""

    def accept(sender: int, message: int) -> Any:
        seen.append((sender, message))
        return Done() if message in accepted else None

    return accept


@pytest.mark.usefixtures("own_steps")
def test_a_message_that_was_received_otherwise_is_refused_and_the_next_one_taken(call: OpenCall) -> None:
    context: Any = Rank()
    receives, sent, seen = OpenReceives(call, context), SentMessages(call, 2), []
    work = ReceiveFromAny(context, 3, HOUR)
    receives.add(work, offers_of({6}, seen))
    first, second = Sending(), Sending()
    for number, message in enumerate((first, second), 5):
        sent.add(number, message)  # type: ignore[arg-type]
    receives.look()
    sent.look()
    sent.look()  # and takes the same call only once
    receives.look()
    assert seen == [(2, 5)]
    assert not work.is_completed()
    first.has_ended = True
    sent.look()
    receives.look()
    assert seen == [(2, 5), (2, 6)]
    assert work.is_completed()
    assert work.wait()
    assert work._source_rank() == 2
    assert receives.is_idle
    assert call.opened() is None


@pytest.mark.usefixtures("own_steps")
def test_of_two_senders_one_is_taken_and_the_other_one_gets_the_next_call(call: OpenCall) -> None:
    context: Any = Rank()
    receives, seen = OpenReceives(call, context), []
    works = [ReceiveFromAny(context, 3, HOUR) for _ in range(2)]
    for work in works:
        receives.add(work, offers_of({0}, seen))
    senders = {number: SentMessages(call, number) for number in (1, 2)}
    for sender in senders.values():
        sender.add(0, Sending())  # type: ignore[arg-type]
    receives.look()
    for sender in senders.values():
        sender.look()
    receives.look()
    senders[1].add(1, Sending())  # type: ignore[arg-type]  # its first one is on its way
    senders[2].look()
    receives.look()
    assert seen == [(1, 0), (2, 0)]
    assert [work._source_rank() for work in works] == [1, 2]


@pytest.mark.usefixtures("own_steps")
def test_the_end_of_the_world_ends_all_receives(call: OpenCall) -> None:
    context: Any = Rank()
    receives = OpenReceives(call, context)
    works = [ReceiveFromAny(context, 3, HOUR) for _ in range(2)]
    for work in works:
        receives.add(work, offers_of(set(), []))
    receives.look()
    context.failure = Failure(1, "rank 1 on host a was lost", "peer_lost")
    receives.look()
    for work in works:
        assert work.is_completed()
        with pytest.raises(HorovodInternalError, match="rank 1 on host a was lost"):
            work.wait()
        with pytest.raises(HorovodInternalError, match="rank 1 on host a was lost"):
            work.get_future().wait()


class Gone(OpenCall):
    """Calls in a store that has ended."""

    def open(self, number: int | None) -> None:
        raise RuntimeError("the store is gone")


def test_a_store_that_is_gone_ends_receives_and_no_thread(call: OpenCall) -> None:
    context: Any = Rank()
    gone = Gone(lambda: None, 0, 3)  # type: ignore[arg-type,return-value]
    work = ReceiveFromAny(context, 3, HOUR)
    OpenReceives(gone, context).add(work, offers_of(set(), []))
    with pytest.raises(RuntimeError, match="the store is gone"):
        work.wait()
    later = ReceiveFromAny(context, 3, HOUR)
    OpenReceives(call, context).add(later, offers_of({4}, []))
    SentMessages(call, 1).add(4, Sending())  # type: ignore[arg-type]
    assert later.wait()


@pytest.mark.usefixtures("own_steps")
def test_messages_that_wait_for_long_look_less_often(call: OpenCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_FIRST_LOOK", 0.5)
    monkeypatch.setattr(messages, "_LAST_LOOK", 2.0)
    now, looks = [100.0], []
    monkeypatch.setattr(messages.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(OpenCall, "opened", lambda _: looks.append(now[0]))
    sent = SentMessages(call, 1)
    sent.add(0, Sending())  # type: ignore[arg-type]
    for step in range(70):
        now[0] = 100.0 + step / 10
        sent.look()
    assert looks == [100.5, 101.5, 103.5, 105.5]
    assert time.monotonic() == now[0]
