"""The all-gather of parameters, of which each rank has updated its slice."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.bindings.request import ALLGATHER, CPU, Batch
from sirtaki.common.ops import Call, describe
from sirtaki.torch import device
from sirtaki.torch.autograd import CollectiveScope
from sirtaki.torch.sharded.slices import Slice, flat
from sirtaki.torch.tensors import count_write, from_output, view


class ParameterGathering:
    """Gathers the slices of all ranks into the memory of the parameters.

    The requests are described again only if a parameter's memory has been replaced.
    """

    def __init__(self, scope: CollectiveScope) -> None:
        self._context = scope.context
        self._set_number = scope.process_set.number(scope.context)
        self._name = scope.derived("parameters").name
        self._batch = Batch(1)
        self._addresses: list[int] = []
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._copied: list[int] | None = None  # requests whose results are not written in place

    def run(self, named: Sequence[tuple[str, Slice]]) -> None:
        """Makes the parameters equal on all ranks, which have to call it for the same ones.

        Raises:
            HorovodInternalError: an exchange failed, or a rank has no slices.
        """
        parameters = [one.parameter for _, one in named]
        addresses = list(map(Tensor.data_ptr, parameters))
        if not parameters:
            return
        if addresses != self._addresses:
            self._describe(named)
            self._addresses = addresses
        try:
            self._exchange()
        except BaseException:
            self._batch, self._addresses = Batch(1), []  # what is in flight keeps the old one
            raise
        is_complete = self._store(parameters)
        (self._context.release if self._batch.gpu == CPU else self._context.detach)(self._batch)
        if not is_complete:
            self._copied = None
            raise HorovodInternalError(
                "an optimizer with shard= has stepped without the slices of some rank, as if that rank had "
                "called hvd.join(): give all ranks the same number of steps, or leave out shard"
            )
        count_write(parameters)

    def _exchange(self) -> None:
        context, batch = self._context, self._batch
        if batch.gpu == CPU:
            with context.steps.exposed:
                context.run(batch)
            return
        device.refuse_capture()
        stream = device.current_stream(batch.gpu)
        batch.set_all_streams([stream] * batch.count)
        batch.keepalive[:] = self._kept  # `detach` takes it
        context.enqueue(batch)
        context.wait_in_stream(batch, stream)

    def _describe(self, named: Sequence[tuple[str, Slice]]) -> None:
        self._batch, self._copied, self._kept = Batch(len(named)), None, []
        for index, (name, one) in enumerate(named):
            own, target = flat(one.parameter)[one.begin : one.end], flat(one.parameter)
            call = Call(f"{self._name}.{name}", self._set_number)
            describe(self._batch, ALLGATHER, view(own), target.data_ptr(), call, index)
            self._batch.offer_memory(index, target.numel() * target.element_size())
            self._kept.append((own, target))
        self._batch.keepalive[:] = self._kept

    def _store(self, parameters: Sequence[Tensor]) -> bool:
        """Puts the results in place. Returns whether they have the slices of all ranks.

        A rank has all of its slices or none, and a result that was written in place once has been again, so
        that most results need not be looked at.
        """
        context, batch = self._context, self._batch
        if self._copied is None:
            self._copied = [index for index in range(batch.count) if not context.is_in_place(batch, index)]
        checked = self._copied or ([] if context.is_in_place(batch, 0) else [0])
        for index in checked:
            result = from_output(context, batch, index)
            if result.numel() != parameters[index].numel():
                return False
            flat(parameters[index]).copy_(result)
        return True
