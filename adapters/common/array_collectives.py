"""The forms of the collectives that numpy and torch have in common: asynchronous, in place, point to point.

The forms that wait and return new arrays are each library's own, and documented there: those of torch are
differentiable and compress.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from sirtaki.common.collectives import Collectives
from sirtaki.common.handles import Handle
from sirtaki.common.ops import Average, op_of_average, reduction
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.common.requests import (
    ALLGATHER,
    ALLREDUCE,
    ALLREDUCE_IN_PLACE,
    ALLTOALL,
    BROADCAST,
    BROADCAST_IN_PLACE,
    RECEIVE,
    REDUCESCATTER,
    SEND,
    CollectiveOptions,
)

Given = TypeVar("Given")
Array = TypeVar("Array")


class ArrayCollectives(Collectives, Generic[Given, Array]):
    """Public functions of an adapter, as methods: `Given` is the type of inputs, `Array` that of results.

    All ranks of the process set must call them. The errors are those of the waiting forms.
    """

    def allreduce_async(
        self,
        tensor: Given,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[Array]:
        """Works like `allreduce`, without waiting."""
        how = reduction(op, average, prescale_factor, postscale_factor)
        return self.start(ALLREDUCE, tensor, CollectiveOptions(name, process_set, how))

    def allreduce_(
        self,
        tensor: Array,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Array:
        """Works like `allreduce`, into the array itself, which is returned."""
        if average is not None:
            op = op_of_average(average, op)
        return self.allreduce_in_place(tensor, name, op, prescale_factor, postscale_factor, process_set)

    def allreduce_async_(
        self,
        tensor: Array,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[Array]:
        """Works like `allreduce_`, without waiting."""
        how = reduction(op, average, prescale_factor, postscale_factor)
        return self.start(ALLREDUCE_IN_PLACE, tensor, CollectiveOptions(name, process_set, how))

    def grouped_allreduce_async(
        self,
        tensors: Sequence[Given],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[list[Array]]:
        """Works like `grouped_allreduce`, without waiting."""
        how = reduction(op, average, prescale_factor, postscale_factor)
        return self.start_group(ALLREDUCE, tensors, CollectiveOptions(name, process_set, how))

    def grouped_allreduce_(
        self,
        tensors: Sequence[Array],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[Array]:
        """Works like `grouped_allreduce`, into the arrays themselves, which are returned."""
        how = reduction(op, average, prescale_factor, postscale_factor)
        return self.run_group(ALLREDUCE_IN_PLACE, tensors, CollectiveOptions(name, process_set, how))

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[Array],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[list[Array]]:
        """Works like `grouped_allreduce_`, without waiting."""
        how = reduction(op, average, prescale_factor, postscale_factor)
        return self.start_group(ALLREDUCE_IN_PLACE, tensors, CollectiveOptions(name, process_set, how))

    def reducescatter_async(
        self,
        tensor: Given,
        name: str | None = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle[Array]:
        """Works like `reducescatter`, without waiting."""
        how = reduction(op, None, prescale_factor, postscale_factor)
        return self.start(REDUCESCATTER, tensor, CollectiveOptions(name, process_set, how))

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[Given],
        name: str | None = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle[list[Array]]:
        """Works like `grouped_reducescatter`, without waiting."""
        how = reduction(op, None, prescale_factor, postscale_factor)
        return self.start_group(REDUCESCATTER, tensors, CollectiveOptions(name, process_set, how))

    def allgather_async(
        self, tensor: Given, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[Array]:
        """Works like `allgather`, without waiting."""
        return self.start(ALLGATHER, tensor, CollectiveOptions(name, process_set))

    def grouped_allgather_async(
        self, tensors: Sequence[Given], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[list[Array]]:
        """Works like `grouped_allgather`, without waiting."""
        return self.start_group(ALLGATHER, tensors, CollectiveOptions(name, process_set))

    def alltoall_async(
        self,
        tensor: Given,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[Array | tuple[Array, Array]]:
        """Works like `alltoall`, without waiting."""
        options = CollectiveOptions(name, process_set, splits=self._adapter.split_counts(splits))
        return self.start(ALLTOALL, tensor, options)

    def broadcast_async(
        self,
        tensor: Given,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[Array]:
        """Works like `broadcast`, without waiting."""
        return self.start(BROADCAST, tensor, CollectiveOptions(name, process_set, root=root_rank))

    def broadcast_(
        self,
        tensor: Array,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Array:
        """Works like `broadcast`, into the array itself, which is returned."""
        return self.run(BROADCAST_IN_PLACE, tensor, CollectiveOptions(name, process_set, root=root_rank))

    def broadcast_async_(
        self,
        tensor: Array,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[Array]:
        """Works like `broadcast_`, without waiting."""
        return self.start(BROADCAST_IN_PLACE, tensor, CollectiveOptions(name, process_set, root=root_rank))

    def send(
        self,
        tensor: Given,
        destination: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Sends an array to another rank, which has to call `recv`. Returns once it has arrived.

        Two ranks that send to each other at the same time have to use `send_async`, or one of them receives
        first.

        Args:
            tensor: an array of any dtype in the core's table.
            destination: a rank of the world.
            name: identifies the operation on both ranks; without a name they are numbered for each pair.
            process_set: a set to which both belong.

        Raises:
            ValueError: the rank is not in the set, or is this one.
            MismatchError: the two disagree about dtype or shape.
            PeerLostError: a rank died.
        """
        self.run(SEND, tensor, CollectiveOptions(name, process_set, peer=destination))

    def send_async(
        self,
        tensor: Given,
        destination: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[Given]:
        """Works like `send`, without waiting; `synchronize(handle)` returns the array."""
        return self.start(SEND, tensor, CollectiveOptions(name, process_set, peer=destination))

    def recv(
        self,
        tensor: Array,
        source: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Array:
        """Overwrites an array with the one that rank `source` sends by `send`, and returns it.

        Args:
            tensor: an array of the shape and dtype of the sent one.
            source: a rank of the world.
            name, process_set: as for `send`.

        Raises:
            ValueError: the rank is not in the set, or is this one; a read-only array.
            MismatchError: the two disagree about dtype or shape.
            PeerLostError: a rank died.
        """
        return self.run(RECEIVE, tensor, CollectiveOptions(name, process_set, peer=source))

    def recv_async(
        self,
        tensor: Array,
        source: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[Array]:
        """Works like `recv`, without waiting."""
        return self.start(RECEIVE, tensor, CollectiveOptions(name, process_set, peer=source))
