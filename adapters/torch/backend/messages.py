"""The operations of a process group between two ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Work

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.torch.backend.any_source import ReceiveFromAny
from sirtaki.torch.backend.calls import Call, OpenReceives, SentMessages
from sirtaki.torch.backend.submission import Part, Submission
from sirtaki.torch.backend.tensors import single, whole, written
from sirtaki.torch.backend.work import GroupWork
from sirtaki.torch.tensors import refuse_overlap


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
        part = Part(core.SEND, source, source.pointer, root=own, destination=other)
        series = self.names.messages(self.rank(), receiver, tag)
        work = self.submit(series, [part], [tensor])
        if source.device == core.CPU:
            key = receiver, tag
            if key not in self._sent:
                self._sent[key] = SentMessages(Call(self._connect, receiver, tag), self.rank())
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
        part = Part(core.SEND, target, target.pointer, store, root=other, destination=own)
        return self.submit(self.names.messages(sender, self.rank(), tag), [part], [tensor])

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        """Receives a tensor in the memory of the CPU from whichever rank of the group sends one first."""
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
            self._open[tag] = OpenReceives(Call(self._connect, self.rank(), tag), self.context)
        self._open[tag].add(receive, accept)
        return receive

    def _connect(self) -> Any:
        """Returns a connection to the store of its own, as a wait for the other one may block that."""
        with self._lock:
            if self._calls_store is None:
                self._calls_store = self._store.clone()
            return self._calls_store

    def _refuse_self(self, other: int) -> None:
        if other == self.rank():
            raise ValueError(f"rank {other} of the group cannot send to itself, nor receive from itself")
