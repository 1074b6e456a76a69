"""The operations of a process group between two ranks."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from sirtaki.bindings import request as core
from sirtaki.bindings.context import SLICE_MS, Context
from sirtaki.bindings.errors import DeadlineError, UnsupportedError
from sirtaki.bindings.waiting import failure_of_context
from sirtaki.torch.backend.submission import RequestPart, Submission, single, whole, written
from sirtaki.torch.backend.work import UNLIMITED, GroupWork, fail
from sirtaki.torch.ops.tensors import refuse_overlap


class Messages(Submission):
    """Sends and receives, which match in the order of calls per pair of ranks, direction and tag."""

    def __init__(self, context: Context, members: Sequence[int], timeout: timedelta, store: Any) -> None:
        """Creates a group of some of the ranks, in any order, which share a store."""
        super().__init__(context, members, timeout)
        self._store, self._calls_store = store, None
        self._sent: dict[tuple[int, int], SentMessages] = {}
        self._open: dict[int, OpenReceives] = {}
        self._lock = threading.Lock()

    def send(self, tensors: Sequence[Tensor], receiver: int, tag: int) -> Work:
        """Sends a tensor to a rank of the group."""
        tensor = single(tensors, "send")
        self._refuse_self(receiver)
        source = whole(tensor)
        own, other = self.context.rank, self.members[receiver]
        part = RequestPart(core.SEND, source, source.pointer, root=own, destination=other)
        series = self.names.messages(self.rank(), receiver, tag)
        work = self.submit(series, [part], [tensor])
        if source.device == core.CPU:
            key = receiver, tag
            if key not in self._sent:
                self._sent[key] = SentMessages(OpenCall(self._connect, receiver, tag), self.rank())
            self._sent[key].add(series.count - 1, work)
        return work

    def recv(self, tensors: Sequence[Tensor], sender: int, tag: int) -> Work:
        """Receives a tensor from a rank of the group."""
        tensor = single(tensors, "recv")
        self._refuse_self(sender)
        refuse_overlap(tensor)
        with self._lock:
            return self._receive(tensor, sender, tag)

    def _receive(self, tensor: Tensor, sender: int, tag: int) -> GroupWork:
        target = whole(tensor)

        def store(*_: Any) -> None:
            written(tensor, target.owner)

        own, other = self.context.rank, self.members[sender]
        part = RequestPart(core.SEND, target, target.pointer, store, root=other, destination=own)
        work = self.submit(self.names.messages(sender, self.rank(), tag), [part], [tensor])
        work.sender = sender
        return work

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        """Receives a CPU tensor from whichever rank of the group sends first."""
        tensor = single(tensors, "recv")
        if whole(tensor).device != core.CPU:
            raise UnsupportedError(
                "the process group backend sirtaki receives from any rank into tensors on the CPU only: pass "
                "src, or receive into a tensor on the CPU"
            )
        refuse_overlap(tensor)

        def accept(sender: int, message: int) -> GroupWork | None:
            with self._lock:
                if self.names.messages(sender, self.rank(), tag).count != message:
                    return None
                return self._receive(tensor, sender, tag)

        receive = ReceiveFromAny(self.context, tag, self.timeout)
        if tag not in self._open:
            self._open[tag] = OpenReceives(OpenCall(self._connect, self.rank(), tag), self.context)
        self._open[tag].add(receive, accept)
        return receive

    def _connect(self) -> Any:
        """Returns a separate connection to the store, as a wait on the shared connection may block it."""
        with self._lock:
            if self._calls_store is None:
                self._calls_store = self._store.clone()
            return self._calls_store

    def _refuse_self(self, other: int) -> None:
        if other == self.rank():
            raise ValueError(f"rank {other} of the group cannot send to itself, nor receive from itself")


# ---- Finds the senders of receives from any rank, through the group's store ----------------------------
# The core matches messages by names that both ranks know, so the sender has to be found first. The receiver
# opens a call in the store: a number, under its rank and the tag. A rank of which a message to it has waited
# for a while takes the call, and writes its rank and the number of that message. The receiver then receives
# from this rank, unless it has received that message in another way meanwhile: then it opens the next call.


# Seconds. A message looks for a call when it has waited for longer than most, and then ever less often: ranks
# of a pipeline wait for each other all the time, and must not flood the store.
_FIRST_LOOK, _LAST_LOOK = 0.05, 0.25
_STEP = 0.01

# Receives the message with this number from a rank; returns None if it was received in another way.
Accept = Callable[[int, int], GroupWork | None]


class Store(Protocol):
    """The part of torch's stores that is used here."""

    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


class OpenCall:
    """A key of the store: a receiver opens calls for messages with a tag there, and senders answer them."""

    def __init__(self, connect: Callable[[], Store], receiver: int, tag: int) -> None:
        self._connect, self._prefix = connect, f"sirtaki/call/{receiver}/{tag}"

    @cached_property
    def _store(self) -> Store:
        return self._connect()

    def open(self, number: int | None) -> None:
        """Opens call `number`, which replaces the call before; None: no call is open any more."""
        self._store.set(self._prefix, "" if number is None else str(number))

    def opened(self) -> int | None:
        """Returns the number of the open call; None if there is none."""
        if not self._store.check([self._prefix]):
            return None
        value = self._store.get(self._prefix)
        return int(value) if value else None

    def take(self, number: int, sender: int, message: int) -> None:
        """Answers a call with a sender's message, unless a sender has already answered."""
        self._store.compare_set(f"{self._prefix}/{number}", "", f"{sender} {message}")

    def answer(self, number: int) -> tuple[int, int] | None:
        """Returns the sender and the message that were offered for a call, once; None if none was."""
        key = f"{self._prefix}/{number}"
        if not self._store.check([key]):
            return None
        sender, message = self._store.get(key).split()
        self._store.delete_key(key)
        return int(sender), int(message)


class OpenReceives:
    """A rank's receives from any rank with the same tag, in their order."""

    def __init__(self, call: OpenCall, context: Context) -> None:
        self._call, self._context = call, context
        self._waiting: deque[tuple[ReceiveFromAny, Accept]] = deque()
        self._number = 0
        self._is_open = False

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def add(self, receive: ReceiveFromAny, accept: Accept) -> None:
        """Begins to look for a sender; `accept` receives the sender's rank and message number."""
        self._waiting.append((receive, accept))
        lookout.watch(self)

    def look(self) -> None:
        """Opens a call for the oldest receive, or starts that receive if a sender has answered."""
        failure = failure_of_context(self._context)
        if failure is not None:
            self.fail(failure)
        elif not self._is_open:
            self._call.open(self._number)
            self._is_open = True
        elif (answer := self._call.answer(self._number)) is not None:
            self._take(*answer)

    def _take(self, sender: int, message: int) -> None:
        receive, accept = self._waiting[0]
        accepted = accept(sender, message)
        if accepted is not None:
            self._waiting.popleft()
            receive.start(sender, accepted)
        self._number += 1
        self._is_open = bool(self._waiting)
        self._call.open(self._number if self._is_open else None)

    def fail(self, failure: Exception) -> None:
        """Ends all receives with an error."""
        while self._waiting:
            self._waiting.popleft()[0].fail(failure)


class SentMessages:
    """A rank's messages with the same tag to another rank that have not been received yet, in their order."""

    def __init__(self, call: OpenCall, sender: int) -> None:
        self._call, self._sender = call, sender
        self._waiting: deque[tuple[int, GroupWork]] = deque()
        self._taken: int | None = None  # the last call that was taken
        self._pause = _FIRST_LOOK
        self._next_look = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def add(self, message: int, work: GroupWork) -> None:
        """Watches a message from now on: a receive from any rank may ask for it."""
        if not self._waiting:
            self._next_look = time.monotonic() + self._pause
        self._waiting.append((message, work))
        lookout.watch(self)

    def look(self) -> None:
        """Forgets the messages that were received; answers an open call with the oldest remaining message."""
        before = len(self._waiting)
        while self._waiting and self._waiting[0][1].is_completed():
            self._waiting.popleft()
        now = time.monotonic()
        if len(self._waiting) < before:
            self._next_look = now + self._pause
        if not self._waiting or now < self._next_look:
            return
        number = self._call.opened()
        self._pause = _FIRST_LOOK if number is not None else min(2 * self._pause, _LAST_LOOK)
        self._next_look = now + self._pause
        if number is not None and number != self._taken:
            self._taken = number
            self._call.take(number, self._sender, self._waiting[0][0])

    def fail(self, failure: Exception) -> None:
        """Stops looking: the store is gone, and with it whoever could have opened a call."""
        self._waiting.clear()


class Lookout:
    """The thread of a process that looks after messages and receives, while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: set[Any] = set()
        self._is_needed = threading.Event()
        self._is_running = False

    def watch(self, messages: OpenReceives | SentMessages) -> None:
        """Looks after these until they are idle."""
        with self._lock:
            self._watched.add(messages)
            self._is_needed.set()
            if self._is_running:
                return
            self._is_running = True
        # A program may end while a peer never answers: the thread does not keep it from doing so.
        threading.Thread(target=self._run, name="sirtaki-lookout", daemon=True).start()

    def _run(self) -> None:
        while self._is_needed.wait():
            time.sleep(_STEP)
            with self._lock:
                watched = list(self._watched)
            for value in watched:
                try:
                    value.look()
                except Exception as failure:
                    value.fail(failure)
            with self._lock:
                self._watched = {value for value in self._watched if not value.is_idle}
                if not self._watched:
                    self._is_needed.clear()


lookout = Lookout()


# ---- A receive from any rank of a group, as torch.distributed shows it: its `Work` ---------------------


class ReceiveFromAny(Work):
    """A receive from a sender that is not known yet.

    Any thread may wait for it. Failures are those of a receive; see `GroupWork`.
    """

    def __init__(self, context: Context, tag: int, timeout: timedelta) -> None:
        super().__init__()
        self._context, self._tag, self._timeout = context, tag, timeout
        self._is_decided = threading.Event()
        self._receive: GroupWork | None = None
        self._failure: Exception | None = None
        self._sender = -1
        self._future: Any = torch.futures.Future()

    def start(self, sender: int, receive: GroupWork) -> None:
        """Goes on as the receive from a rank of the group."""
        self._sender, self._receive = sender, receive
        self._is_decided.set()
        receive.get_future().add_done_callback(self._complete)

    def fail(self, failure: Exception) -> None:
        """Ends with an error: no sender can be found."""
        self._failure = failure
        self._is_decided.set()
        fail(self._future, failure)

    def _complete(self, ended: Any) -> None:
        try:
            self._future.set_result(ended.value())
        except Exception as failure:
            fail(self._future, failure)

    def wait(self, timeout: timedelta = UNLIMITED) -> bool:
        """Waits for the message, at most for `timeout`, or for that of the group. Returns True.

        Raises:
            DeadlineError: no rank has sent one in time. The receive is still open: its tensor is not free.
            HorovodInternalError: it failed.
        """
        limit = (timeout if timeout > UNLIMITED else self._timeout).total_seconds()
        deadline = time.monotonic() + limit
        while not self._is_decided.wait(min(SLICE_MS / 1000, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"rank {self._context.rank}: no rank of the process group has sent a tensor with tag "
                    f"{self._tag} within {limit:g} s; the receive is still open, so its tensor cannot be used"
                )
        if self._failure is not None:
            raise copy.copy(self._failure)
        receive: Any = self._receive
        return bool(receive.wait(timedelta(seconds=max(0.001, deadline - time.monotonic()))))

    def is_completed(self) -> bool:
        """Returns whether the message is here, or the receive has failed. Never waits."""
        if self._receive is None:
            return self._failure is not None
        return self._receive.is_completed()

    def get_future(self) -> Any:
        """Returns a future of the tensors."""
        return self._future

    def _source_rank(self) -> int:
        """Returns the rank of the group that has sent the message; torch calls it after `wait`."""
        return self._sender
