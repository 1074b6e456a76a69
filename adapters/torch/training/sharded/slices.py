"""The slices of parameters: which elements of a parameter are updated by which rank.

Every parameter is cut in the order of its memory, so ranks have equal parts of each, and no parameter has to
be copied into a bucket. Cuts are at multiples of a block, so that the vector instructions of a processor meet
the same elements together as in the whole parameter, and results have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.ops.tensor import dense_layout
from sirtaki.common.training.groups import Place

BLOCK = 64  # elements


def flat(tensor: Tensor) -> Tensor:
    """Returns a view of a dense tensor's elements in the order of its memory."""
    tensor = tensor.detach()
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def in_order_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy, with the memory order of the parameter."""
    if tensor.stride() == parameter.stride() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor.detach())


def has_gaps(tensor: Tensor) -> bool:
    """Returns whether the elements of a tensor do not fill its memory."""
    return dense_layout(tensor.shape, tensor.stride()) is None


def orders_differ(shape: Sequence[int], first: Sequence[int], second: Sequence[int]) -> bool:
    """Returns whether dense tensors of a shape have their elements in different orders of memory."""
    return first != second and dense_layout(shape, first) != dense_layout(shape, second)


def bounds(elements: int, ranks: int, position: int) -> tuple[int, int]:
    """Returns the first element of a rank's slice, and the first after it.

    The blocks are divided as the core divides the rows of a result.
    """
    blocks = -(-elements // BLOCK)
    each, more = divmod(blocks, ranks)
    first = position * each + min(position, more)
    last = first + each + (position < more)
    return min(first * BLOCK, elements), min(last * BLOCK, elements)


class Slice:
    """The elements of a parameter that this rank updates.

    Attributes:
        parameter: the whole parameter.
        begin, end: the elements, in the order of the parameter's memory.
        strides: those of the parameter when the slice was cut.
        tensor: a view of them, which the optimizer updates instead of the parameter. It has the shape of the
            parameter if it has all of its elements, else one dimension.
    """

    def __init__(self, parameter: Tensor, begin: int, end: int) -> None:
        self.parameter, self.begin, self.end = parameter, begin, end
        self.strides, self.tensor = parameter.stride(), self.of(parameter)

    @property
    def is_empty(self) -> bool:
        """Returns whether all elements are other ranks'. Every rank has a parameter without elements."""
        return self.begin == self.end and not self.is_whole

    @property
    def is_whole(self) -> bool:
        """Returns whether the slice has all elements."""
        return self.end - self.begin == self.parameter.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """Returns a view of these elements of a tensor like the parameter.

        Elements of a tensor whose memory has another order are copied.
        """
        if self.is_whole:
            return tensor.detach()
        return flat(in_order_of(self.parameter, tensor))[self.begin : self.end]

    def shaped(self, elements: Tensor) -> Tensor:
        """Returns these elements, given in the order of memory, with the shape of `tensor`."""
        if not self.is_whole:
            return elements
        return elements.as_strided(self.parameter.shape, self.parameter.stride())

    def follow(self) -> None:
        """Makes `tensor` a view of the parameter's memory, if that has been replaced."""
        start = self.parameter.data_ptr() + self.begin * self.parameter.element_size()
        is_same = self.is_empty or self.tensor.data_ptr() == start
        if not is_same or self.tensor.dtype != self.parameter.dtype:
            self.tensor.data = self.of(self.parameter)

    @property
    def has_other_order(self) -> bool:
        """Returns whether the parameter's memory order has changed, and with it the elements of the slice."""
        return orders_differ(self.parameter.shape, self.parameter.stride(), self.strides)

    def cut_again(self) -> None:
        """Makes `tensor` the elements at these positions of the parameter's present order.

        Raises:
            UnsupportedError: the parameter does not fill its memory any more.
        """
        if has_gaps(self.parameter):
            raise UnsupportedError(
                f"a parameter of shape {list(self.parameter.shape)} does not fill its memory any more, so "
                "shard= cannot cut it into slices: assign parameter.data.contiguous() to parameter.data"
            )
        self.strides, self.tensor.data = self.parameter.stride(), self.of(self.parameter)

    def part(self, value: Any) -> Any:
        """Returns this rank's part of a value of the whole parameter's state, which may then be freed."""
        if not isinstance(value, Tensor) or value.shape != self.parameter.shape or self.is_whole:
            return value
        return self.of(value).clone()

    def is_part(self, value: Any) -> bool:
        """Returns whether a value of the state has an element for each element of the slice."""
        return isinstance(value, Tensor) and value.shape == self.tensor.shape


class Partition:
    """The division of parameters among ranks: in slices, or each whole parameter to a single rank.

    Attributes:
        place: this rank's.
    """

    def __init__(self, place: Place, *, has_whole: bool) -> None:
        self.place = place
        self._has_whole = has_whole
        self._loads = [0] * place.ranks  # bytes of the whole parameters that each rank has
        self._slices: dict[Tensor, Slice] = {}

    def slice_of(self, parameter: Tensor) -> Slice:
        """Returns this rank's slice of a parameter. All ranks ask for new parameters in the same order."""
        found = self._slices.get(parameter)
        if found is None:
            found = self._slices[parameter] = Slice(parameter, *self._bounds(parameter))
        return found

    def _bounds(self, parameter: Tensor) -> tuple[int, int]:
        count = parameter.numel()
        if not self._has_whole:
            return bounds(count, self.place.ranks, self.place.position)
        owner = self._loads.index(min(self._loads))
        self._loads[owner] += count * parameter.element_size()
        return (0, count) if owner == self.place.position else (0, 0)
