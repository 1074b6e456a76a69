"""The all-reduce of all gradients of an optimizer: a single round per step.

The requests are described once. A round writes only the addresses of the gradients and which are absent, for
many of them at once, so that four hundred small gradients do not cost four hundred calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import BatchSkippedError
from sirtaki.bindings.library import setting_in_use, usable_cores
from sirtaki.bindings.request import ABSENT, ALLREDUCE, CPU
from sirtaki.common.ops.requests import Call
from sirtaki.common.ops.tensor import ROW_MAJOR
from sirtaki.common.training.prepared import PreparedRequests
from sirtaki.common.training.round_checks import RoundChecks
from sirtaki.torch import device
from sirtaki.torch.consistency import note_gradients
from sirtaki.torch.ops.compression import NoneCompressor
from sirtaki.torch.ops.sparse import SparseGradients
from sirtaki.torch.ops.tensors import (
    CODES,
    count_write,
    reducible_view,
    refuse_shared_gradients,
)
from sirtaki.torch.training.compressed.exchange import CompressedGradients
from sirtaki.torch.training.overlapped.flight import Flight
from sirtaki.torch.training.parameters import NamedParameter, store_gradient
from sirtaki.torch.training.sharded.exchange import ScatteredGradients
from sirtaki.torch.training.stage import ExchangeOptions, Gradients, Stage
from sirtaki.torch.training.timely.exchange import TimelyGradients

_LEAST_PRIORITY = -(1 << 30)  # the core negotiates requests with a priority above 0 in parts

_dtype_of = attrgetter("dtype")
_is_cpu = attrgetter("is_cpu")


class _Result(NamedTuple):
    """An exchanged tensor that is not the gradient itself: a copy, a compressed tensor, or a stand-in."""

    slot: int
    parameter_index: int
    gradient: Tensor | None
    tensor: Tensor
    undo: Any
    absent: bool


class GradientExchange(Gradients):
    """The exchange of gradients by the index of their parameter: each is submitted once per round."""

    def __init__(
        self, options: ExchangeOptions, named: Sequence[NamedParameter], checks: RoundChecks
    ) -> None:
        super().__init__(options, named)
        self._groups = [group for _, _, group in named]
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._devices = [device.ordinal(parameter) for parameter in self._parameters]
        self._sparse = SparseGradients(options, named)  # a stage once there is a sparse gradient
        self.stages = _stages_of(options, named)
        self._checks = checks
        count = len(named)
        self._requests = PreparedRequests(self._context, count, device)  # by parameter
        self._signatures: list[Any] = [None] * count
        self._converted = set(range(count))  # whose gradients are not sent unchanged, row by row
        # Those whose gradients may be conjugates or negatives of their memory: autograd keeps such views.
        self._lazy = {index for index, parameter in enumerate(self._parameters) if _may_be_lazy(parameter)}
        self._in_place: list[Tensor] = []
        self._results: list[_Result] = []
        self.is_continued = False  # whether another round of the same passes follows the last one
        for index, parameter in enumerate(self._parameters):
            if options.compression is NoneCompressor and parameter.is_contiguous():
                self._describe(index, parameter)

    @property
    def is_open(self) -> bool:
        """Returns whether a round has begun and not ended."""
        has_own = self._requests.filled > 0 or self._checks.is_open
        return has_own or any(stage.is_open for stage in self.stages)

    def close(self) -> None:
        """Releases the parameters."""
        for stage in self.stages:
            stage.close()

    def drop_earlier(self) -> None:
        """Forgets what earlier rounds have left to be added to these gradients: they are dropped."""
        for stage in self.stages:
            stage.drop_earlier()

    def submit(self, indices: list[int]) -> None:
        """Submits the gradients of these parameters.

        Raises:
            ValueError: a gradient cannot be exchanged, or its memory is in use.
        """
        if self._checks.wants_gradients:
            note_gradients(self._checks, indices, [self._parameters[index].grad for index in indices])
        for stage in self.stages:
            indices = stage.start(indices, absent=False)
        if not indices:
            return
        parameters = self._parameters
        gradients: list[Any] = [parameters[index].grad for index in indices]
        if self._are_direct(indices, gradients):
            addresses = list(map(Tensor.data_ptr, gradients))
            self._enqueue(indices, gradients, addresses, addresses, 0)
            self._in_place += gradients
        else:
            self._submit_results(indices, absent=False)

    def submit_rest(self, indices: list[int]) -> None:
        """Submits these gradients as not new: no more will be submitted in this round.

        If another rank's gradient is new, these count: unchanged, or as zeros.
        """
        if self._parameters:
            self._checks.start()
        for stage in self.stages:
            indices = stage.start(indices, absent=True)
            stage.start_rest()
        if indices:
            self._submit_results(indices, absent=True)

    def skip(self) -> None:
        """Makes `finish` raise BatchSkippedError on all ranks, for this rank lacks memory."""
        self._checks.mark(len(self._parameters), self._context.rank + 1)

    def announce_round(self) -> None:
        """Makes all ranks continue with another round after the present round: this rank's pass goes on."""
        self._checks.mark(len(self._parameters) + 1, 1)

    def finish(self) -> None:
        """Ends the round: waits for every submitted gradient, and puts the results in place.

        Raises:
            BatchSkippedError: a rank has called `skip`. The round has ended, with undefined gradients.
            HorovodInternalError: an exchange failed. The round has ended, with undefined gradients.
            KeyboardInterrupt: the wait was interrupted. The round is still open.
        """
        if not self.is_open:
            return
        if self._requests.gpu == CPU:
            with self._context.steps.exposed:
                self._finish()
        else:  # the GPU waits, and the program does not
            self._finish()

    def _finish(self) -> None:
        try:
            self._requests.wait()
            *marks, skipping, continuing = self._checks.finish() or (0, 0)
            self.is_continued = bool(continuing)
            if skipping:
                raise BatchSkippedError(skipped_by(self._context, skipping - 1))
            if any(marks) and self._sparse.learn(marks) and self._sparse not in self.stages:
                self.stages.insert(0, self._sparse)
            count_write(self._in_place)
            with torch.no_grad():
                stored = [result for result in self._results if self._store_result(result)]
            reduced = [*self._in_place, *(result.tensor for result in stored)]
            for stage in self.stages:
                reduced += stage.finish(reduced)
        except KeyboardInterrupt:
            raise
        except BaseException:
            self._discard_round()
            raise
        self._discard_round()

    def _discard_round(self) -> None:
        self._requests.end()
        self._checks.discard()
        for stage in self.stages:
            stage.discard()
        self._in_place = []
        self._results = []

    def _are_direct(self, indices: list[int], gradients: Sequence[Any]) -> bool:
        return (
            self._converted.isdisjoint(indices)
            and set(map(type, gradients)) == {Tensor}
            and self._are_on_described_devices(indices, gradients)
            and all(map(Tensor.is_contiguous, gradients))
            and list(map(_dtype_of, gradients)) == [self._dtypes[index] for index in indices]
            and list(map(Tensor.numel, gradients)) == [self._sizes[index] for index in indices]
            and not any(map(_is_lazy, map(self._parameters.__getitem__, self._lazy)))
        )

    def _are_on_described_devices(self, indices: list[int], gradients: Sequence[Any]) -> bool:
        if self._requests.gpu == CPU:
            return all(map(_is_cpu, gradients))
        return [device.ordinal(gradient) for gradient in gradients] == [
            self._devices[index] for index in indices
        ]

    def _submit_results(self, indices: list[int], absent: bool) -> None:
        """Submits tensors in the place of gradients: copies, compressed tensors, or stand-ins."""
        results = [
            self._prepare(slot, index, absent) for slot, index in enumerate(indices, self._requests.filled)
        ]
        tensors = [result.tensor for result in results]
        targets = list(map(Tensor.data_ptr, tensors))
        sources = [
            0 if absent and result.gradient is None else address
            for result, address in zip(results, targets, strict=True)
        ]
        self._enqueue(indices, tensors, sources, targets, ABSENT if absent else 0)
        self._results += results

    def _prepare(self, slot: int, index: int, absent: bool) -> _Result:
        """Describes the tensor to exchange for a gradient, and returns the result to put in place."""
        parameter = self._parameters[index]
        gradient = source = parameter.grad
        if source is None:  # the memory of an absent gradient is not read
            source = torch.empty_like(parameter) if absent else torch.zeros_like(parameter)
        elif source.is_sparse:
            self._sparse.mark(index, source, self._checks)
            source = source.to_dense()
        compressed, undo = self._compression.compress(source.detach())
        return _Result(slot, index, gradient, self._describe(index, compressed), undo, absent)

    def _describe(self, index: int, tensor: Tensor) -> Tensor:
        """Describes a gradient, unless it is unchanged; returns the tensor to exchange: itself or a copy."""
        view = reducible_view(tensor, self._names[index])
        signature = (view.dtype, tuple(view.shape), view.layout, view.device)
        if signature != self._signatures[index]:
            call = Call(self._names[index], self._set_number, self._groups[index])
            # By priority, the core fuses gradients in the order of their places on a GPU: gradient_memory.py.
            has_place = self._options.in_shared_memory and view.device != CPU
            priority = index + _LEAST_PRIORITY if has_place else 0
            self._requests.describe(index, ALLREDUCE, view, call, self._how, priority)
            self._signatures[index] = signature
            parameter = self._parameters[index]
            self._dtypes[index], self._sizes[index] = parameter.dtype, parameter.numel()
            self._devices[index] = device.ordinal(parameter)
            direct = (CODES.get(parameter.dtype), tuple(parameter.shape), ROW_MAJOR, self._devices[index])
            (self._lazy.add if _may_be_lazy(parameter) else self._lazy.discard)(index)
            (self._converted.discard if signature == direct else self._converted.add)(index)
        return view.owner

    def _enqueue(
        self, indices: list[int], tensors: Sequence[Any], sources: list[int], targets: list[int], flags: int
    ) -> None:
        try:
            self._requests.submit(indices, sources, targets, tensors, flags)
        except ValueError:  # the core knows the operations, and not the parameters
            contents = self._requests.contents(len(indices))
            refuse_shared_gradients(
                (self._names[index].removeprefix(f"{self._scope.name}."), tensor)
                for index, tensor in contents
            )
            raise

    def _store_result(self, result: _Result) -> bool:
        """Stores a result as the gradient. Returns whether there is a result: no if all ranks' are absent."""
        if result.absent and self._requests.is_untouched(result.slot):
            return False
        gradient, index = result.gradient, result.parameter_index
        is_dense = gradient is not None and gradient.layout is torch.strided
        dimensions = 0 if is_dense else self._sparse.dimensions(index)
        restored = self._compression.decompress(result.tensor, result.undo)
        store_gradient(self._parameters[index], gradient, restored, dimensions)
        return True


def _stages_of(options: ExchangeOptions, named: Sequence[NamedParameter]) -> list[Stage]:
    """Returns the stage of gradients that are not simply all-reduced, if there is any."""
    if options.deadline is not None:
        return [TimelyGradients(options.deadline, options, named)]
    if not named:
        return []
    if options.partition is not None:
        return [ScatteredGradients(options.partition, options, named)]
    if options.memory is not None:
        return [CompressedGradients(options.memory, options, named)]
    return [Flight(options, named)] if options.overlaps_forward else []


def skipped_by(context: Context, rank: int) -> str:
    return (
        f"{context.topology.label(rank)} ran out of memory and skips this batch, so no rank may use it: put "
        "the whole step, on all ranks, inside `with hvd.skip_if_out_of_memory(optimizer):`"
    )


def _may_be_lazy(parameter: Tensor) -> bool:
    """Returns whether a gradient may be an uncopied conjugate or negative view of another gradient.

    A negative is a view of imaginary parts, which has gaps unless it has one element.
    """
    return parameter.is_complex() or parameter.numel() == 1


def _is_lazy(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return gradient is not None and (gradient.is_conj() or gradient.is_neg())


# ---- Whether gradients are submitted during a backward pass, or at its end: the setting hand_over ------


# A pass that sleeps for at least half of the time leaves its core free for an exchange.
_IDLE_SHARE = 0.5
_EARLY_BYTES = 1 << 20  # submitted at once during a pass; submitting less costs more than the overlap saves
# The same with overlap_forward, if the pass leaves its core free: the next one needs the last ones first.
_EARLY_URGENT_BYTES = 64 << 10
_NANOSECONDS = 1e-9
_AUTO, _EARLY = "auto", "early"  # choices of the setting hand_over; the other one is "late"


class Overlap:
    """The decision, from pass to pass, whether gradients are submitted early.

    The exchange needs a core while it runs. If the ranks of a host have cores to spare, or a GPU computes, it
    overlaps with the backward pass. Otherwise the two take turns on one core, and switching between them
    costs more than the overlap saves, unless the pass itself waits for something other than the processor.
    """

    def __init__(
        self,
        *,
        has_spare_core: bool,
        is_urgent: bool = False,
        clocks: Callable[[], tuple[float, float]] | None = None,
        wish: Callable[[], str] = lambda: _AUTO,
    ) -> None:
        """Creates it.

        Args:
            has_spare_core: whether there is a core that no backward pass needs.
            is_urgent: whether the next forward pass begins while gradients are exchanged.
            clocks: returns seconds: elapsed, and those in which this thread was runnable.
            wish: returns the setting hand_over: "early", "late", or "auto", which leaves the decision here.
        """
        self._wish = wish
        self._has_spare_core, self._is_urgent = has_spare_core, is_urgent
        self._clocks = clocks or _clocks
        self._begun: tuple[float, float] | None = None
        self._is_worth_it, self._is_idle = has_spare_core, False

    @property
    def is_worth_it(self) -> bool:
        """Returns whether the next pass should submit gradients early, judging by the last pass."""
        wish = self._wish()
        return self._is_worth_it if wish == _AUTO else wish == _EARLY

    @property
    def early_bytes(self) -> int:
        """Returns how many bytes of gradients the next pass submits at once, if it submits them early."""
        return least_early_bytes(self._is_urgent and self._is_idle)

    def begin(self) -> None:
        """Records that a pass has made its first gradient, in this thread."""
        if self._begun is None and (self._is_urgent or not self._has_spare_core):
            self._begun = self._clocks()

    def end(self) -> None:
        """Records that the pass has ended, in the same thread."""
        if self._begun is not None:
            (begun, runnable_before), self._begun = self._begun, None
            now, runnable = self._clocks()
            self._is_idle = runnable - runnable_before < (1 - _IDLE_SHARE) * (now - begun)
            self._is_worth_it = self._has_spare_core or self._is_idle

    def drop(self) -> None:
        """Records that the pass has raised."""
        self._begun = None


def least_early_bytes(overlaps_forward: bool) -> int:
    """Returns how many bytes of gradients are submitted at once during a pass, at least."""
    return _EARLY_URGENT_BYTES if overlaps_forward else _EARLY_BYTES


def overlap_of(exchange_options: ExchangeOptions, named: Sequence[NamedParameter]) -> Overlap:
    """Returns the decision for the parameters of an optimizer, in the world of its ranks."""
    context = exchange_options.scope.context
    is_on_gpu = any(device.ordinal(parameter) != core.CPU for _, parameter, _ in named)
    has_spare_core = is_on_gpu or context.topology.local_size < usable_cores()
    is_urgent = exchange_options.overlaps_forward
    return Overlap(has_spare_core=has_spare_core, is_urgent=is_urgent, wish=_wish_in(context))


def _wish_in(context: Context) -> Callable[[], str]:
    """Returns a function that returns the setting hand_over, which changes during the job with autotune."""
    if context.setting("autotune") == "1":
        return lambda: setting_in_use(context, "hand_over")
    fixed = context.setting("hand_over")
    return lambda: fixed


def _clocks() -> tuple[float, float]:
    """Returns the elapsed seconds, and the seconds in which this thread ran or waited for a core."""
    return time.monotonic(), time.thread_time() + _run_queue_seconds()


def _run_queue_seconds() -> float:
    """Returns how long this thread was ready to run but did not run; 0 where Linux does not count it."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as statistics:
            return int(statistics.read().split()[1]) * _NANOSECONDS
    except (OSError, ValueError, IndexError):
        return 0.0
