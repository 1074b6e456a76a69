"""LocalSGD and DiLoCo: the ranks exchange parameters once in many steps, instead of all gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sirtaki.bindings.context import Context, current
from sirtaki.bindings.library import WireFormat
from sirtaki.bindings.request import SUM
from sirtaki.common.ops.handles import Handle
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import ALLREDUCE_IN_PLACE, Reduction
from sirtaki.common.training.combinations import refuse_combinations
from sirtaki.common.training.stateful_compression import Quantised, StatefulCompression, TopK
from sirtaki.torch import device
from sirtaki.torch.consistency import check_parameters
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.compression import Compression, Compressor, NoneCompressor
from sirtaki.torch.training.compressed.exchange import METHODS, Agreement
from sirtaki.torch.training.compressed.method import Link, TensorSlot, compute_dtype
from sirtaki.torch.training.compressed.quantised import can_encode, hint_at_shared_memory, wire_format_of
from sirtaki.torch.training.compressed.state import CompressionState, plain_and_memory
from sirtaki.torch.training.other_reducers import refuse_other_reducers
from sirtaki.torch.training.parameters import all_named, parameters_of
from sirtaki.torch.training.periodic.updates import AverageRule, OuterStep, ParameterAveraging
from sirtaki.torch.training.wrapping import Optimizer, SeparateOptimizer, make_plain, wrap


class Format(NamedTuple):
    """A format. Without a memory, what rounding leaves out of an average is lost.

    Attributes:
        compressor: makes the tensors that are exchanged instead.
        wire_format: the core's format for tensors of 32 and 16 bits; None: they are exchanged exactly.
        memory: of a compression that has one; None otherwise.
    """

    compressor: type[Compressor] = NoneCompressor
    wire_format: WireFormat | None = None
    memory: CompressionState | None = None

    def encodes(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is sent in the core's format."""
        return self.wire_format is not None and can_encode(tensor, self.wire_format)

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns the tensor to exchange, and what `decompress` needs."""
        if self.encodes(tensor):
            return tensor.to(torch.float32), tensor.dtype
        return self.compressor.compress(tensor)

    def decompress(self, tensor: Tensor, undo: Any) -> Tensor:
        """Returns an exchanged tensor in its original form."""
        if self.encodes(tensor):
            return tensor.to(undo)
        return self.compressor.decompress(tensor, undo)

    def for_ranks_of(self, scope: CollectiveScope, parameters: Iterable[Tensor]) -> Format:
        """Returns the format for these ranks: exact, with a warning, if all of them share memory.

        Raises:
            UnsupportedError: a parameter is on a GPU, for which the core has no such format.
        """
        if self.wire_format is None:
            return self
        for parameter in parameters:
            self.encodes(parameter)
        context = scope.context
        if context.is_provisional:  # its ranks do not exist yet
            return EXACT
        if context.has_wire_format(scope.process_set.number(context)):
            return self
        if context.rank == 0:
            hint_at_shared_memory(self.wire_format)
        return EXACT


EXACT = Format()


def format_of(compression: Any) -> Format:
    """Returns the format that the argument `compression` of DiLoCo asks for.

    Raises:
        ValueError: not a compression.
    """
    plain, memory = plain_and_memory(compression)
    if isinstance(compression, Quantised):  # the core rounds differences once, and nothing is fed back
        return Format(wire_format=wire_format_of(compression))
    return Format(plain, memory=memory)


def memory_of_gradients(compression: Any) -> str:
    """Returns the name of a compression with memory for gradients only; "" for other compressions."""
    can_average = isinstance(compression, TopK) or (
        isinstance(compression, Quantised) and not compression.start
    )
    has_memory = isinstance(compression, StatefulCompression)
    return str(compression) if has_memory and not can_average else ""


# ---- The schedule, and the fragments of the parameters -------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Steps between two synchronizations.

    Attributes:
        every: steps between two synchronizations of the same parameters.
        fragments: parts of the parameters, which are synchronized one after another within these steps.
        overlap: steps that a rank takes while an average is under way.
        format: the format of the exchange.
    """

    every: int
    fragments: int = 1
    overlap: int = 0
    format: Format = EXACT

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}, but it has to be a number of steps, 1 or more")
        if not 1 <= self.fragments <= self.every:
            raise ValueError(
                f"fragments is {self.fragments}, but each needs a step of its own: 1 to every={self.every}"
            )
        if not 0 <= self.overlap < max(1, self.every // self.fragments):
            raise ValueError(
                f"overlap is {self.overlap}, but an average has to end before the next one begins: less than "
                f"every // fragments = {self.every // self.fragments}"
            )

    def is_due(self, fragment: int, steps: int) -> bool:
        """Returns whether the average of a fragment begins after this number of steps."""
        return steps % self.every == (fragment + 1) * self.every // self.fragments % self.every


@dataclass
class Fragment:
    """Parameters that are synchronized together.

    Attributes:
        parameters: these parameters.
        buffers: floating buffers of the model, which are averaged with them.
        steps: this rank's steps since the last average began.
    """

    parameters: list[Tensor]
    buffers: list[Tensor] = field(default_factory=list)
    steps: int = 0


class Synchronizer:
    """Counts the steps of a rank, and averages a fragment when it is due.

    A rank whose data has ended, or which has skipped steps, is behind the others. No rank waits for that: all
    ranks average the fragments in the same cyclic order, and a rank at its end (`synchronize`) takes part in
    the others' averages, with the weight of the steps that it has taken since the last one.
    """

    def __init__(
        self, scope: CollectiveScope, schedule: Schedule, fragments: Sequence[Fragment], update: AverageRule
    ) -> None:
        self._schedule, self.fragments, self.update = schedule, fragments, update
        self.memory = schedule.format.memory
        self.move_to(scope)

    def move_to(self, scope: CollectiveScope) -> None:
        """Continues in the world of this scope: see `restart`.

        Raises:
            UnsupportedError: a parameter is on a GPU, for which the core has no such format.
        """
        self.scope = scope
        parameters = [parameter for fragment in self.fragments for parameter in fragment.parameters]
        self._format = self._schedule.format.for_ranks_of(scope, parameters)
        self._agreement = Agreement(self.memory, scope) if self.memory is not None else None
        self.restart()

    def restart(self) -> None:
        """Forgets the steps since the parameters were equal on all ranks, and an average under way."""
        self._steps = 0
        self._is_rewritten = False  # whether the program has changed the parameters since then
        self._next = 0  # the fragment that is averaged next
        self._in_flight: tuple[int, Fragment, AverageInFlight] | None = None  # with the step at which it ends
        for fragment in self.fragments:
            fragment.steps = 0

    @property
    def is_synchronized(self) -> bool:
        """Returns whether this rank has taken no step since the parameters were equal on all ranks."""
        return self._steps == 0

    def agree(self) -> None:
        """Makes the number of compressed averages equal on all ranks. All ranks have to call it.

        Raises:
            ValueError: the ranks have different compressions.
        """
        if self._agreement is not None and not self.scope.has_no_peers:
            self._agreement.start()
            self._agreement.finish()

    def begin(self) -> None:
        """Prepares for a step."""
        for fragment in self.fragments:
            self.update.begin(fragment.parameters)

    def follow(self) -> None:
        """Continues from parameters that the program has set, between a synchronization and the next step."""
        if self.is_synchronized:
            changes = [self.update.follow(fragment.parameters) for fragment in self.fragments]
            self._is_rewritten |= any(changes)

    def stepped(self) -> None:
        """Counts a step, and synchronizes what is due."""
        self._steps += 1
        for fragment in self.fragments:
            fragment.steps += 1
        if self._in_flight is not None and self._in_flight[0] == self._steps:
            self._finish()
        if self._schedule.is_due(self._next, self._steps):
            self._start(has_ended=False)
            if not self._schedule.overlap:
                self._finish()
                if len(self.fragments) == 1 and self.update.equalizes:
                    self._steps = 0

    def synchronize(self) -> None:
        """Synchronizes all parameters once no rank has steps left. All ranks have to call it."""
        self.begin()
        if self._in_flight is not None:
            self._finish()
        all_have_ended = False
        while not all_have_ended:
            self._start(has_ended=True)
            all_have_ended = self._finish()
        for _ in self.fragments[1:]:
            self._start(has_ended=True)
            self._finish()
        self._steps = self._next = 0

    def _start(self, has_ended: bool) -> None:
        fragment, scope = self.fragments[self._next], self.scope.derived(str(self._next))
        self._next = (self._next + 1) % len(self.fragments)
        own = Contribution(fragment.steps / self._schedule.every, has_ended, self._is_rewritten)
        fragment.steps, self._is_rewritten = 0, False
        buffers = [buffer.clone() for buffer in fragment.buffers]
        parts = AverageTensors(self.update.contributions(fragment.parameters), buffers, fragment.parameters)
        average = AverageInFlight(scope, parts, own, self._format)
        self._in_flight = self._steps + self._schedule.overlap, fragment, average

    @torch.no_grad()
    def _finish(self) -> bool:
        assert self._in_flight is not None
        _, fragment, in_flight = self._in_flight
        with device.exposed(self.scope.context, fragment.parameters):
            average = in_flight.wait()
        self._in_flight = None
        count, averages = len(fragment.parameters), average.tensors
        own = averages if averages is None else averages[:count]
        self.update.apply(fragment.parameters, own, average.all_have_ended)
        if averages is not None:
            for buffer, value in zip(fragment.buffers, averages[count:], strict=True):
                buffer.copy_(value)
        return average.all_have_ended


def fragments_of(parameters: Sequence[Tensor], count: int) -> list[Fragment]:
    """Cuts parameters into fragments of similar size, in their order.

    Raises:
        ValueError: there are fewer parameters than fragments.
    """
    if count > len(parameters):
        raise ValueError(f"fragments is {count}, but there are only {len(parameters)} parameters")
    total = sum(parameter.nbytes for parameter in parameters)
    fragments: list[Fragment] = [Fragment([])]
    done = 0
    for place, tensor in enumerate(parameters):
        is_full = done >= total * len(fragments) / count or len(parameters) - place == count - len(fragments)
        if fragments[-1].parameters and is_full and len(fragments) < count:
            fragments.append(Fragment([]))
        fragments[-1].parameters.append(tensor)
        done += tensor.nbytes
    return fragments


def with_buffers(fragments: Sequence[Fragment], model: torch.nn.Module | None) -> list[Fragment]:
    """Adds the floating buffers of a model's state to the last fragment.

    Buffers that are no part of it, such as masks, are constants.
    """
    if model is None:
        return list(fragments)
    state = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point() and id(buffer) in state]
    return [*fragments[:-1], replace(fragments[-1], buffers=buffers)]


# ---- The weighted average of a few tensors over all ranks, which may take place beside further steps ----


class Contribution(NamedTuple):
    """The contribution of a rank to an average.

    Attributes:
        weight: its weight, 1.0 for a complete window of steps.
        has_ended: whether this rank has no steps left, and waits for the others.
        is_rewritten: whether the program has set the parameters since the last average, as on all ranks.
    """

    weight: float
    has_ended: bool
    is_rewritten: bool = False


class AverageTensors(NamedTuple):
    """The tensors of a rank.

    Attributes:
        parameters: parameters or their differences, which may be compressed.
        buffers: exchanged exactly.
        owners: the parameters themselves, by which a memory knows their differences.
    """

    parameters: Sequence[Tensor]
    buffers: Sequence[Tensor] = ()
    owners: Sequence[Tensor] = ()


class Average(NamedTuple):
    """The result, equal on all ranks.

    Attributes:
        tensors: the averages of parameters, then of buffers; None if no rank had any weight.
        all_have_ended: whether no rank has steps left.
    """

    tensors: list[Tensor] | None
    all_have_ended: bool


class AverageInFlight:
    """An average that has been started. All ranks start the same averages, in the same order."""

    def __init__(
        self, scope: CollectiveScope, parts: AverageTensors, own: Contribution, exchange_format: Format
    ) -> None:
        """Starts it. The tensors belong to the average from now on: it overwrites them."""
        self._own, self._format = own, exchange_format
        self._handles: list[Handle[list[Tensor]]] = []
        self._compressed: _CompressedSums | None = None
        self._tensors = [*parts.parameters, *parts.buffers]
        if scope.has_no_peers:
            return
        if exchange_format.memory is not None:
            self._compressed = _CompressedSums(scope, exchange_format.memory, parts, own.weight)
            parts = parts._replace(parameters=self._compressed.others)
        tensors, count = [*parts.parameters, *parts.buffers], len(parts.parameters)
        # The third number counts the ranks that take part: those that have joined contribute zeros.
        header = torch.tensor([own.weight, own.has_ended, 1.0, own.is_rewritten], dtype=torch.float64)
        # Divided by the number of ranks, no sum of weighted values leaves the range of 16 bits.
        self._shares = [1.0 / len(scope.ranks) if tensor.element_size() == 2 else 1.0 for tensor in tensors]
        pairs = zip(tensors, self._shares, strict=True)
        weighted = [_weighted(tensor, own.weight * share) for tensor, share in pairs]
        small = [self._format.compress(tensor) for tensor in weighted[:count]]
        self._undo = [undo for _, undo in small]
        sent = [tensor for tensor, _ in small]
        self._sums = [header, *sent, *weighted[count:]]  # once the all-reduces in place have ended
        exact = [tensor for tensor in sent if not self._format.encodes(tensor)]
        encoded = [tensor for tensor in sent if self._format.encodes(tensor)]
        self._handles.append(scope.start_group(ALLREDUCE_IN_PLACE, [header, *exact, *weighted[count:]]))
        if encoded:
            assert self._format.wire_format is not None
            how = Reduction(SUM, wire_format=self._format.wire_format.code)
            self._handles.append(scope.derived("encoded").start_group(ALLREDUCE_IN_PLACE, encoded, how))

    def wait(self) -> Average:
        """Blocks until all ranks have started it, and returns the result.

        Raises:
            ValueError: the program has set the parameters on some ranks only.
        """
        if not self._handles:
            return Average(self._tensors if self._own.weight else None, self._own.has_ended)
        for handle in self._handles:
            handle.wait()
        header, *sums = self._sums
        compressed = self._compressed.wait() if self._compressed is not None else {}
        weight, ended, present, rewritten = header.tolist()
        if 0 < rewritten < present:
            raise ValueError(
                f"the program has set the parameters between two synchronizations on {rewritten:.0f} of "
                f"{present:.0f} ranks, {'also' if self._own.is_rewritten else 'not'} on this one: set them "
                "to the same values on all ranks, as hvd.broadcast_parameters(model.state_dict(), 0) does"
            )
        if weight == 0:
            return Average(None, ended == present)
        for index, undo in enumerate(self._undo):
            sums[index] = self._format.decompress(sums[index], undo)
        pairs = zip(sums, self._shares, strict=True)
        averages = [tensor.div_(weight * share) for tensor, share in pairs]
        for index, slot in compressed.items():  # in ascending order
            averages.insert(index, slot.values.div_(weight).to(slot.parameter.dtype))
        return Average(averages, ended == present)


class _CompressedSums:
    """Weighted sums of differences that each rank compresses, adding to them what it has left out before.

    What is left out has no weight: a rank multiplies what it sends. A rank without weight sends zeros, and
    keeps what it has left out. (Sarfi et al., SparseLoCo, arXiv 2508.15706.)

    Attributes:
        others: the differences that are not compressed.
    """

    def __init__(
        self, scope: CollectiveScope, memory: CompressionState, parts: AverageTensors, weight: float
    ) -> None:
        self._memory, self._weight = memory, weight
        self._method = METHODS[type(memory.compression)](
            memory, Link(scope.derived("compressed"), Reduction(SUM))
        )
        is_exact = memory.exchanges < memory.compression.start
        memory.exchanges += 1
        self.others: list[Tensor] = []
        self._slots: dict[int, TensorSlot] = {}
        for index, (owner, difference) in enumerate(zip(parts.owners, parts.parameters, strict=True)):
            if is_exact or not self._method.compresses(owner):
                self.others.append(difference)
            else:
                self._slots[index] = self._slot(owner, difference)
        self._phased = self._method.start(self._slots) if self._slots else None

    def _slot(self, owner: Tensor, difference: Tensor) -> TensorSlot:
        dtype = compute_dtype(owner.dtype)
        values = difference.to(dtype).contiguous()
        residual = self._memory.residual(owner, dtype)
        if residual is not None:
            values += residual
        return TensorSlot(owner, _weighted(values, self._weight), is_new=True)

    def wait(self) -> Mapping[int, TensorSlot]:
        """Returns the sums by the indices of their parameters, once all ranks have started them.

        If a value is not finite on any rank, this rank keeps what it has left out before.
        """
        if self._phased is None:
            return {}
        keeps = self._phased.wait() and self._weight > 0
        for slot in self._method.end(self._slots, keeps):
            residual = self._memory.residuals.get(slot.parameter) if keeps else None
            if residual is not None and self._weight != 1:
                residual.div_(self._weight)
        return self._slots


def _weighted(tensor: Tensor, weight: float) -> Tensor:
    """Multiplies in place. Elements that are not finite count as zero in a rank that has no weight."""
    if weight == 0:
        return tensor.zero_()
    return tensor if weight == 1 else tensor.mul_(weight)


# ---- LocalSGD and DiLoCo -------------------------------------------------------------------------------

# The keys of a state_dict(): the outer optimizer, and what this rank has left out of its differences.
_OUTER, _MEMORY = "outer", "compression"


def LocalSGD(  # noqa: N802  # a function like DistributedOptimizer
    optimizer: Optimizer,
    every: int,
    model: nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes each rank step with its own gradients, and averages the parameters after `every` steps.

    All ranks must call it, with equal parameters before the first step, which is checked. The data that are
    exchanged per step are divided by `every`. (Stich, Local SGD converges fast and communicates little, arXiv
    1805.09767.)

    The optimizer's own state, such as momenta, stays each rank's. A rank with fewer steps since the last
    average has less weight in it. Call `synchronize()` when the data end. In an elastic job, commit at
    synchronizations: `if optimizer.is_synchronized: state.commit()`.

    Args:
        optimizer: any torch optimizer over dense parameters. It may have been used before.
        every: steps between two averages, 1 or more.
        model: the model, if its floating buffers, such as the statistics of BatchNorm layers, are to be
            averaged with the parameters; without it they stay each rank's own.
        process_set: the ranks that take part.

    Returns:
        The same optimizer, which now also has `synchronize()` and `is_synchronized`.

    Raises:
        ValueError: wrong arguments, an optimizer that is distributed already, parameters that DDP or FSDP
            exchanges, or a process set in an elastic job.
        NotInitializedError: init() has not been called.

    Example:
        optimizer = hvd.LocalSGD(optimizer, every=10)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
        optimizer.synchronize()
    """
    return _periodic(optimizer, Schedule(every), ParameterAveraging(), model, {}, process_set)


def DiLoCo(  # noqa: N802  # a function like DistributedOptimizer
    model: nn.Module,
    inner: Optimizer,
    outer: Optimizer | None = None,
    every: int = 500,
    fragments: int = 1,
    overlap: int = 0,
    alpha: float = 0.0,
    compression: type[Compressor] | Quantised | TopK = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes each rank step with its own gradients, and an outer optimizer step with the average changes.

    All ranks must call it, with equal parameters before the first step, which is checked. After `every`
    steps, the differences between a global copy of the parameters and each rank's parameters are averaged.
    The outer optimizer takes them as the gradient of the global copy, which becomes the parameters of all
    ranks. The floating buffers of the model are averaged. Call `synchronize()` when the data end. (DiLoCo,
    arXiv 2311.08105; fragments and overlap: Streaming DiLoCo, arXiv 2501.18512.)

    Args:
        model: the model.
        inner: the optimizer of its parameters.
        outer: an optimizer of the same parameters; None: SGD with a learning rate of 0.7 and Nesterov's
            momentum of 0.9, as in the paper. With SGD(lr=1) the parameters are averaged.
        every: steps between two averages of the same parameters.
        fragments: parts of the parameters, averaged one after another within `every` steps.
        overlap: steps that are taken while an average is under way, less than every // fragments.
        alpha: the share of a rank's own values that it keeps at an average, 0 to 1, for use with overlap.
        compression: Compression.fp16 or Compression.bf16 to exchange the differences in 16 bits;
            Compression.int8() or Compression.fp8() in 8 bits between hosts, without error feedback.
            Compression.topk(fraction, start=0) sends the largest differences only, and each rank adds what
            it leaves out to its next differences (SparseLoCo, arXiv 2508.15706, whose outer optimizer has
            no momentum); the first `start` averages are exact.
        process_set: the ranks that take part.

    Returns:
        The inner optimizer, which now also has `synchronize()` and `is_synchronized`. Its `state_dict()`
        includes the outer optimizer, and what this rank has left out.

    Raises:
        ValueError: wrong arguments, an inner optimizer that is distributed already, an outer one of other
            parameters, another compression with a memory, or a process set in an elastic job.
        UnsupportedError: parameters on a GPU with a compression to 8 bits.
        NotInitializedError: init() has not been called.

    Example:
        optimizer = hvd.DiLoCo(model, torch.optim.AdamW(model.parameters()), every=100)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
        optimizer.synchronize()
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}, but it is a share of a rank's own values: 0 to 1")
    parameters = parameters_of(inner)
    if outer is None:
        outer = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
    elif set(map(id, parameters_of(outer))) != set(map(id, parameters)):
        raise ValueError("the outer optimizer has other parameters than the inner one; give both the same")
    refuse_combinations({"diloco": True, "memory_of_gradients": memory_of_gradients(compression)})
    schedule = Schedule(every, fragments, overlap, format_of(compression))
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return _periodic(inner, schedule, OuterStep(outer, alpha), model, names, process_set)


def _periodic(
    optimizer: Optimizer,
    schedule: Schedule,
    update: AverageRule,
    model: nn.Module | None,
    names: dict[Tensor, str],
    process_set: ProcessSet,
) -> Any:
    make_plain(optimizer)
    context = current()
    refuse_combinations(
        {
            "elastic": context.survivors is not None,
            "process_set": process_set is not global_process_set,
        }
    )
    named = dict(all_named(optimizer, names))
    refuse_other_reducers(named.items())
    fragments = with_buffers(fragments_of(list(named.values()), schedule.fragments), model)
    scope = CollectiveScope.numbered(context, "periodic", process_set)
    synchronizer = Synchronizer(scope, schedule, fragments, update)
    wrapped = wrap(optimizer, PeriodicOptimizer)
    wrapped._synchronizer, wrapped._named, wrapped._is_checked = synchronizer, named, False
    wrapped._register(context)
    return wrapped


class PeriodicOptimizer(SeparateOptimizer):
    """The abilities of such an optimizer besides its own class. Hooks surround its own step."""

    _technique = "LocalSGD or DiLoCo"
    _synchronizer: Synchronizer
    _named: dict[str, Tensor]
    _is_checked: bool

    @property
    def _scope(self) -> CollectiveScope:
        return self._synchronizer.scope

    def move_to(self, context: Context) -> None:
        """Continues in another world, from equal parameters. `hvd.elastic.run` calls it."""
        scope = self._scope
        self._synchronizer.move_to(CollectiveScope.numbered(context, "periodic", scope.process_set))
        self._is_checked = False

    def shared_state(self) -> Any:
        """Returns the outer optimizer's state and its copy of the parameters."""
        return self._synchronizer.update.state_dict()

    def return_to(self, shared: Any, own: dict[str, Any]) -> None:
        self._synchronizer.restart()
        self._synchronizer.update.load_state_dict(shared)
        super().return_to(shared, own)

    def memory_state(self) -> Any:
        memory = self._synchronizer.memory
        return memory.content([*self._named.values()]) if memory is not None else None

    def load_memory_state(self, state: Any) -> None:
        if self._synchronizer.memory is not None:
            self._synchronizer.memory.load(state, [*self._named.values()])

    @property
    def is_synchronized(self) -> bool:
        """Whether the parameters are equal on all ranks: no step was taken since the last synchronization."""
        return self._synchronizer.is_synchronized

    def synchronize(self) -> None:
        """Makes the parameters equal on all ranks, the last incomplete window included.

        All ranks must call it, at the end of their data: a rank that has fewer steps waits here, and takes
        part in the averages of the others until they call it, too. Training may continue afterwards.
        """
        self._prepare()
        self._synchronizer.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Works like the optimizer's own; with DiLoCo, it includes the outer optimizer and its copy.

        With a compression that has a memory, it includes what this rank has left out, too.
        """
        state, outer, memory = self.own_state(), self.shared_state(), self.memory_state()
        if outer is not None:
            state[_OUTER] = outer
        if memory is not None:
            state[_MEMORY] = {"rank": self._scope.context.rank, **memory}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Works like the optimizer's own. All ranks must load the same state, or broadcast it afterwards.

        What a rank has left out is loaded from the state of the same rank only; with another state, the rank
        begins with nothing left out.

        Raises:
            ValueError: steps have been taken since the last synchronization, or another compression has left
                out what the state has.
        """
        if not self.is_synchronized:
            raise ValueError(
                "load_state_dict needs parameters that are equal on all ranks, but this rank has taken steps "
                "since the last synchronization: call it when optimizer.is_synchronized is true, for example "
                "after optimizer.synchronize()"
            )
        own = dict(state_dict)
        left_out = own.pop(_MEMORY, None)
        if (memory := self._synchronizer.memory) is not None:
            known = left_out or CompressionState(memory.compression).content(())
            is_own = known.get("rank") == self._scope.context.rank
            self.load_memory_state(known if is_own else {**known, "residuals": {}})
        self.return_to(own.pop(_OUTER, None), own)
        self._is_checked = False

    def _before_own_step(self, args: Any, kwargs: Any) -> None:
        self._prepare()

    def _after_own_step(self, args: Any, kwargs: Any) -> None:
        self._synchronizer.stepped()

    def _prepare(self) -> None:
        """Makes sure, before the first step, that all ranks begin with the same parameters."""
        self._check_use()
        scope = self._scope
        scope.check_world("wrap it again")
        self._refuse_other_parameters()
        if self._is_checked:
            self._synchronizer.follow()
            return
        self._is_checked = True
        refuse_other_reducers(self._named.items())
        if not scope.has_no_peers and scope.context.setting("check_parameters") != "0":
            tensors = self._named | self._synchronizer.update.tensors()
            if (memory := self._synchronizer.memory) is not None:  # a name that ranks without it lack
                tensors[f"compression={memory.compression!r}"] = torch.zeros(0)
            check_parameters(tensors.items(), scope.process_set)
        self._synchronizer.agree()
        self._synchronizer.begin()
