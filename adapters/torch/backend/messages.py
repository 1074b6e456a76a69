"""The operations of a process group between two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import Work

from sirtaki.bindings import request as core
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.torch.backend.submission import Part, Submission
from sirtaki.torch.backend.tensors import single, whole, written
from sirtaki.torch.tensors import refuse_overlap


class Messages(Submission):
    """Sends and receives, which match in the order of calls per pair of ranks, direction and tag."""

    def send(self, tensors: Sequence[Tensor], receiver: int, tag: int) -> Work:
        """Sends a tensor to a rank of the group."""
        tensor = single(tensors, "send")
        self._refuse_self(receiver)
        source = whole(tensor)
        own, other = self.context.rank, self.members[receiver]
        part = Part(core.SEND, source, source.pointer, root=own, destination=other)
        return self.submit(self.names.messages(self.rank(), receiver, tag), [part], [tensor])

    def recv(self, tensors: Sequence[Tensor], sender: int, tag: int) -> Work:
        """Receives a tensor from a rank of the group."""
        tensor = single(tensors, "recv")
        self._refuse_self(sender)
        refuse_overlap(tensor)
        target = whole(tensor)

        def store(*_: Any) -> None:
            written(tensor, target.owner)

        own, other = self.context.rank, self.members[sender]
        part = Part(core.SEND, target, target.pointer, store, root=other, destination=own)
        return self.submit(self.names.messages(sender, self.rank(), tag), [part], [tensor])

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        """Raises UnsupportedError."""
        raise UnsupportedError(
            "the process group backend sirtaki receives from a rank that is named: pass src"
        )

    def _refuse_self(self, other: int) -> None:
        if other == self.rank():
            raise ValueError(f"rank {other} of the group cannot send to itself, nor receive from itself")
