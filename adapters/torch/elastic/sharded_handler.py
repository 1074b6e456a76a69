"""The handler of an optimizer with shard=. Copies on other ranks keep a lost host from losing state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sirtaki.common.elastic.slices import SliceCopies, allocated, opened
from sirtaki.common.ops.objects import gather_objects
from sirtaki.torch.elastic.optimizer_handler import OptimizerHandler, overwrite
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.training.parameters import options_of, set_options
from sirtaki.torch.training.sharded.optimizer import Sharded
from sirtaki.torch.training.sharded.whole_values import Elements, Part, described, whole_values


class ShardedOptimizerHandler(OptimizerHandler):
    """A handler of an optimizer with shard=.

    Replicated are the parameters and the options. Each rank has its slices of the state; a commit sends
    copies of the slices to another rank.
    """

    value: Sharded

    def __init__(self, value: Sharded) -> None:
        super().__init__(value)
        self._copies = SliceCopies("hvd.full_state_dict(optimizer)")

    def content(self) -> tuple[Any, Any]:
        return {"parameters": self.parameters()}, options_of(self.value)

    def load(self, replicas: Any, rest: Any) -> None:
        overwrite(self.parameters(), replicas["parameters"])
        set_options(self.value, rest)

    def land(self) -> None:
        scope = self.value._scope
        self._copies.exchange(scope.context, _name(scope), self.value.place, packed(self.value.parts()))

    def save(self) -> None:
        super().save()
        self._copies.complete()

    def restore(self) -> None:
        super().restore()
        payload = self._copies.payload_at(self.value.place)
        if payload is not None:
            self.value.return_to(unpacked(payload))

    def prepare_change(self) -> None:
        scope = self.value._scope
        self._copies.spread(scope.context, _name(scope))

    def divide(self) -> None:
        scope = self.value._scope.derived("divide")
        if not any(gather_objects(scope.context, self.value.awaits_state, scope.name, scope.process_set)):
            return
        provided = [unpacked(payload) for payload in self._copies.provided(scope.context, _name(scope))]
        self.value.take_state(whole_values(scope, provided, self.parameters()))


def _name(scope: CollectiveScope) -> str:
    assert scope.name is not None  # that of an optimizer
    return scope.name


# ---- The parts of a rank as bytes ----------------------------------------------------------------------


@torch.no_grad()
def packed(parts: Sequence[Part]) -> memoryview:
    """Returns a copy of parts as bytes in the memory of the host, also on a rank without elements."""
    tensors = [tensor for part in parts for tensor in _elements(part)]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    payload, targets = allocated(list(map(described, parts)), sizes)
    for tensor, target in zip(tensors, targets, strict=True):
        _tensor(target, tensor.dtype).copy_(tensor)
    return payload


def unpacked(payload: memoryview) -> list[Part]:
    """Returns the parts in these bytes; their elements are views."""
    parts, sources = opened(payload)
    remaining = iter(sources)
    return [
        Part(
            part.begin,
            part.end,
            part.strides,
            {
                key: Elements(value.dtype, _tensor(next(remaining), value.dtype))
                if isinstance(value, Elements)
                else value
                for key, value in part.values.items()
            },
        )
        for part in parts
    ]


def _tensor(memory: memoryview, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype) if len(memory) else torch.empty(0, dtype=dtype)


def _elements(part: Part) -> list[Tensor]:
    values = [value.tensor for value in part.values.values() if isinstance(value, Elements)]
    return [tensor for tensor in values if tensor is not None]
