"""The exchange of gradients by reduce-scatter: each rank receives its slices only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.request import CPU, MAX, REDUCESCATTER, Batch
from sirtaki.common.handles import Handle, start
from sirtaki.common.ops import Call, Reduction, describe
from sirtaki.common.requests import ALLREDUCE_IN_PLACE
from sirtaki.common.tensor import ROW_MAJOR, TensorView
from sirtaki.torch import device
from sirtaki.torch.autograd import COLLECTIVES, CollectiveScope
from sirtaki.torch.compression import Compressor
from sirtaki.torch.parameters import NamedParameter, trainable
from sirtaki.torch.sharded.gradient import ShardedGradient
from sirtaki.torch.sharded.slices import BLOCK, Partition, Slice, flat, in_order_of
from sirtaki.torch.tensors import code_of

_NOTHING: Any = None


class _Result(NamedTuple):
    """A slice in flight: the number of its parameter, its elements, and how to undo their compression."""

    number: int
    elements: Tensor
    undo: Any


class ScatteredGradients:
    """The exchange of an optimizer's gradients, by the numbers of their parameters.

    A gradient that has been exchanged is replaced by a `ShardedGradient`. If another pass adds to it, the
    new gradient is exchanged alone, and its slice is added.
    """

    def __init__(
        self,
        partition: Partition,
        scope: CollectiveScope,
        how: Reduction,
        compression: type[Compressor],
        named: Sequence[NamedParameter],
    ) -> None:
        self._context, self._scope, self._compression = scope.context, scope, compression
        self._names = [one.name for one in named]
        self._parameters = [one.parameter for one in named]
        self._slices: list[Slice] = [partition.slice_of(one) for one in self._parameters]
        self._how, self._set_number = how, scope.process_set.number(scope.context)
        count = len(named)
        self._described, self._described_as = Batch(count), [_NOTHING] * count  # by parameter
        self._batch, self._order = Batch(count), [-1] * count  # in the order of submission
        self._marks_scope = scope.derived("(marks of new slices)")
        self._marks: Handle[Tensor] | None = None
        self._new: set[int] = set()  # on this rank, in this round
        self._results: list[_Result] = []
        self._stand_ins: dict[int, ShardedGradient] = {}
        self._earlier: dict[int, Tensor] = {}  # slices to which the next ones are added
        self._nodes: list[Any] = []  # held so that they live
        self._hooks: list[Any] = []
        for index, parameter in enumerate(self._parameters):
            self._watch(index, parameter)

    @property
    def is_open(self) -> bool:
        """Returns whether a round has begun and not ended."""
        return bool(self._results) or self._marks is not None

    def close(self) -> None:
        """Releases the parameters."""
        while self._hooks:
            self._hooks.pop().remove()
        self._nodes.clear()

    def drop_earlier(self) -> None:
        """Forgets what earlier passes have left: the gradients are dropped."""
        self._earlier.clear()

    def _watch(self, index: int, parameter: Tensor) -> None:
        def before_growth(_: Any) -> None:
            gradient = parameter.grad
            if gradient is None:
                self._earlier.pop(index, None)
            elif isinstance(gradient, ShardedGradient):
                self._earlier[index] = gradient.own
                parameter.grad = None

        with trainable(parameter):
            node = get_gradient_edge(parameter).node
        self._nodes.append(node)
        self._hooks.append(node.register_prehook(before_growth))

    def start(self, numbers: list[int], absent: bool) -> list[int]:
        """Submits these gradients, as new ones or not. Returns those that it leaves to others: none."""
        sent = [at for at in numbers if self._takes_part(at)] if absent else numbers
        if not sent:
            return []
        with torch.no_grad():
            pairs = [self._compression.compress(self._elements(at)) for at in sent]
            results = [
                _Result(at, self._room(at, one), undo) for at, (one, undo) in zip(sent, pairs, strict=True)
            ]
        self._enqueue(sent, [one for one, _ in pairs], [result.elements for result in results])
        self._results += results
        if not absent:
            self._new.update(sent)
        return []

    def _enqueue(self, sent: list[int], sources: list[Tensor], targets: list[Tensor]) -> None:
        batch, begin, count = self._batch, len(self._results), len(sent)
        for at, source in zip(sent, sources, strict=True):
            if self._described_as[at] != (source.dtype, device.ordinal(source)):
                self._describe(at, source)
        if self._order[begin : begin + count] != sent:
            for slot, at in enumerate(sent, begin):
                batch.copy(slot, self._described, at)
            self._order[begin : begin + count] = sent
        addresses = [list(map(Tensor.data_ptr, tensors)) for tensors in (sources, targets)]
        batch.set_all_buffers(addresses[0], addresses[1], begin)
        batch.keepalive[begin : begin + count] = zip(sources, targets, strict=True)
        if batch.gpu != CPU:
            device.refuse_capture()
            batch.set_all_streams([device.current_stream(batch.gpu)] * count, begin)
        self._context.enqueue(batch, begin, count)

    def _describe(self, at: int, source: Tensor) -> None:
        """Describes the reduce-scatter of a gradient whose elements lie in memory like these."""
        blocks = -(-self._parameters[at].numel() // BLOCK)
        kind = TensorView(0, (blocks, BLOCK), code_of(source), ROW_MAJOR, None, device.ordinal(source))
        call = Call(f"{self._names[at]} (slices)", self._set_number)
        describe(self._described, REDUCESCATTER, kind, 0, call, at, how=self._how)
        self._described_as[at] = source.dtype, device.ordinal(source)
        self._order = [-1] * len(self._order)

    def start_phases(self) -> None:
        """Tells the other ranks which gradients are new here: all of this round have been submitted."""
        if self._marks is None and self._parameters:
            context, options = self._scope.context, self._marks_scope.options(Reduction(MAX))
            marks = torch.tensor([at in self._new for at in range(len(self._parameters))], dtype=torch.uint8)
            self._marks = start(context, COLLECTIVES.single(context, ALLREDUCE_IN_PLACE, marks, options))

    def finish(self, exact: Iterable[Tensor]) -> None:
        """Waits for the slices, and puts a `ShardedGradient` in the place of each gradient.

        Raises:
            HorovodInternalError: an exchange failed.
        """
        if self._results and self._batch.gpu == CPU:
            self._context.wait(self._batch, 0, len(self._results))
        elif self._results:
            stream = device.current_stream(self._batch.gpu)
            self._context.wait_in_stream(self._batch, stream, 0, len(self._results))
            device.record_stream(self._batch.gpu, self._batch.keepalive[: len(self._results)])
        if self._marks is not None:
            is_new = self._marks.wait().tolist()
            with torch.no_grad():
                for at, elements, undo in self._results:
                    self._store(at, self._compression.decompress(elements, undo), bool(is_new[at]))
        self.discard()

    def discard(self) -> None:
        """Ends the round, whether it has succeeded or not."""
        if count := len(self._results):
            discard = self._context.release if self._batch.gpu == CPU else self._context.detach
            discard(self._batch, 0, count)
            self._batch.keepalive[:count] = [None] * count  # whole gradients
        self._results, self._marks, self._new = [], None, set()

    def _takes_part(self, at: int) -> bool:
        """Returns whether a gradient that is not new here is exchanged: ranks have frozen the same ones."""
        parameter = self._parameters[at]
        return parameter.requires_grad or parameter.grad is not None

    def _elements(self, at: int) -> Tensor:
        """Returns a tensor whose memory holds the elements in whole blocks: the gradient, if possible."""
        parameter, gradient = self._parameters[at], self._parameters[at].grad
        count = parameter.numel()
        missing = -count % BLOCK
        if gradient is None or isinstance(gradient, ShardedGradient):
            return torch.zeros(count + missing, dtype=parameter.dtype, device=parameter.device)
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"the gradient of {self._names[at]!r} is sparse, and shard= divides dense ones only: make "
                "the layer with sparse=False, or leave out shard"
            )
        gradient = in_order_of(parameter, gradient)
        return torch.nn.functional.pad(flat(gradient), (0, missing)) if missing else gradient

    def _room(self, at: int, source: Tensor) -> Tensor:
        """Returns memory for this rank's blocks."""
        one = self._slices[at]
        blocks = -(-(one.end - one.begin) // BLOCK)
        return torch.empty(blocks * BLOCK, dtype=source.dtype, device=source.device)

    def _store(self, at: int, elements: Tensor, is_new: bool) -> None:
        parameter, one = self._parameters[at], self._slices[at]
        earlier = self._earlier.pop(at, None)
        if isinstance(parameter.grad, ShardedGradient):
            earlier = parameter.grad.own
        if is_new:
            count = one.end - one.begin
            own = one.shaped(elements if elements.numel() == count else elements[:count])
            if earlier is not None:
                own += earlier
        elif earlier is not None:
            own = earlier
        else:
            return
        parameter.grad = self._stand_in(at, own)

    def _stand_in(self, at: int, own: Tensor) -> ShardedGradient:
        found, parameter = self._stand_ins.get(at), self._parameters[at]
        if found is None or not found.fits(parameter):
            found = self._stand_ins[at] = ShardedGradient.make(parameter, self._scope)
        found.own = own
        return found
