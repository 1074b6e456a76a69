"""Random numbers in a proof: the part of a batch draws those that the whole batch draws for the same rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sirtaki.torch._private import DispatchMode
from sirtaki.torch.auto.job import LoadedBatch


class Drawing(DispatchMode):
    """Draws numbers for all rows of a batch, and gives those of this rank's rows.

    It sees the operations below autograd, so dropout inside of layers is among them. An operation that it
    does not know draws as always; the gradients then differ, and the step is refused.
    """

    def __init__(self, batch: LoadedBatch) -> None:
        super().__init__()
        self._count, self._total, self._rows = batch.count, batch.share.total, batch.rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return self._dropout(func, args, kwargs)
        if args and isinstance(args[0], Tensor):
            return self._like(func, name, args, kwargs)
        return self._made(func, args, kwargs)

    def _axis(self, shape: Any) -> tuple[int, int]:
        """Returns the axis of the rows, and how many elements each has there; (-1, 0): there is none."""
        if shape and self._count > 1 and shape[0] and shape[0] % self._count == 0:
            return 0, shape[0] // self._count
        return next(((axis, 1) for axis, size in enumerate(shape) if size == self._count), (-1, 0))

    def _enlarged(self, shape: Any) -> list[int]:
        axis, each = self._axis(shape)
        return [each * self._total if place == axis else size for place, size in enumerate(shape)]

    def _own(self, whole: Tensor, shape: Any) -> Tensor:
        axis, each = self._axis(shape)
        if axis < 0:
            return whole
        return whole.narrow(axis, self._rows.start * each, self._count * each).contiguous()

    def _like(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        own = args[0]
        if any(isinstance(argument, Tensor) for argument in args[1:]) or name in (
            "bernoulli",
            "multinomial",
            "normal",
        ):
            return func(*args, **kwargs)
        # Numbers are drawn in the order of the memory.
        order = sorted(range(own.dim()), key=own.stride, reverse=True)
        whole = torch.empty_permuted(self._enlarged(own.shape), order, dtype=own.dtype)
        drawn = func(whole, *args[1:], **kwargs)
        if name.endswith("_"):
            return own.copy_(self._own(drawn, own.shape))
        return self._own(drawn, own.shape)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        place = next(
            (index for index, argument in enumerate(args) if isinstance(argument, list | tuple)), None
        )
        if place is None:
            return func(*args, **kwargs)
        whole = func(*args[:place], self._enlarged(args[place]), *args[place + 1 :], **kwargs)
        return self._own(whole, args[place])

    def _dropout(self, func: Any, args: Any, kwargs: Any) -> Any:
        own = args[0]
        whole, mask = func(own.new_ones(self._enlarged(own.shape)), *args[1:], **kwargs)
        return own * self._own(whole, own.shape), self._own(mask, own.shape)
