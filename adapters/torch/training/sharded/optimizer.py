"""The abilities of an optimizer that updates only this rank's slices of the parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from sirtaki.bindings import request as core
from sirtaki.bindings.errors import HorovodInternalError, UnsupportedError
from sirtaki.bindings.request import CPU, Batch
from sirtaki.common.ops.handles import wait_in_stream
from sirtaki.common.ops.objects import gather_objects
from sirtaki.common.ops.requests import ALLGATHER, Call, describe
from sirtaki.common.training.groups import Place
from sirtaki.torch import device
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.tensors import count_write, from_output, view
from sirtaki.torch.training.parameters import all_named, group_sizes, parameters_of
from sirtaki.torch.training.sharded.gradient import ShardedGradient
from sirtaki.torch.training.sharded.kinds import needs_whole_parameters
from sirtaki.torch.training.sharded.slices import Partition, Slice, flat, has_gaps, in_order_of, orders_differ
from sirtaki.torch.training.wrapping import Optimizer, Wrapped, closure_of


@dataclass(frozen=True)
class Part:
    """The state of consecutive elements of a parameter.

    Attributes:
        begin, end: the elements, in the order of the parameter's memory.
        strides: those of the parameter in that order.
        values: those of the optimizer, by key: `Elements`, or a value that belongs to the whole parameter.
    """

    begin: int
    end: int
    strides: tuple[int, ...]
    values: Mapping[str, Any]

    def changed(self, elements: Callable[[Elements], Any], other: Callable[[Any], Any]) -> dict[str, Any]:
        """Returns the values, each changed by the function for its kind."""
        return {
            key: elements(value) if isinstance(value, Elements) else other(value)
            for key, value in self.values.items()
        }


class Elements(NamedTuple):
    """A value with an element for each element of its part, in the same order; described without them."""

    dtype: torch.dtype
    tensor: Tensor | None


class _Copy(NamedTuple):
    """A tensor of another size, such as a counter of steps, on its way to other ranks."""

    tensor: Tensor
    is_on_gpu: bool


def part_of(slice_: Slice, values: Mapping[str, Any]) -> Part:
    """Returns the state of a slice, without copies where its memory has the order of the parameter's."""
    return Part(
        slice_.begin,
        slice_.end,
        slice_.strides,
        {
            key: Elements(value.dtype, _in_memory_order(slice_, value)) if slice_.is_part(value) else value
            for key, value in values.items()
        },
    )


@torch.no_grad()
def _in_memory_order(slice_: Slice, value: Tensor) -> Tensor:
    if slice_.is_empty:
        return value[:0].reshape(-1)
    if not slice_.is_whole:
        return value.contiguous()
    if value.stride() != slice_.strides:
        shape, where = slice_.parameter.shape, value.device
        value = torch.empty_strided(shape, slice_.strides, dtype=value.dtype, device=where).copy_(value)
    return flat(value)


def values_of(slice_: Slice, part: Part) -> dict[str, Any]:
    """Returns the state of a slice as copies of a part of the same elements."""
    parameter = slice_.parameter

    def own(value: Elements) -> Tensor:
        assert value.tensor is not None  # only a part that is sent as an object lacks its elements
        return slice_.shaped(value.tensor.to(parameter.device, copy=True))

    return part.changed(own, lambda value: _placed(value, parameter))


def described(part: Part) -> Part:
    """Returns a part without elements, to be sent as an object."""
    return replace(part, values=part.changed(lambda value: Elements(value.dtype, None), _portable))


def whole_values(
    scope: CollectiveScope, held: Sequence[Sequence[Part]], parameters: Sequence[Tensor]
) -> Iterator[dict[str, Any]]:
    """Gathers the state of each parameter, as the plain optimizer has it. All ranks must exhaust it.

    Args:
        scope: the ranks.
        held: what this rank contributes: lists with a part of each parameter. All lists of all ranks together
            have each element once.
        parameters: the parameters, equal on all ranks.
    """
    mine = [list(map(described, parts)) for parts in held]
    of_ranks = gather_objects(scope.context, mine, scope.derived("values").name, scope.process_set)
    lists = [parts for of_rank in of_ranks for parts in of_rank]  # in the order in which elements arrive
    for index, parameter in enumerate(parameters):
        arriving = [parts[index] for parts in lists]
        own = [parts[index].values for parts in held]
        known: Mapping[str, Any] = next((part.values for part in arriving if part.values), {})
        whole: dict[str, Any] = {}
        for key, value in known.items():
            if isinstance(value, Elements):
                elements = _gathered(scope, parameter, [values.get(key) for values in own], value.dtype)
                whole[key] = _joined(parameter, [part for part in arriving if key in part.values], elements)
            else:
                whole[key] = _placed(value, parameter)
        yield whole


def divide_again(
    scope: CollectiveScope, state: Mapping[Tensor, dict[str, Any]], slices: Sequence[Slice]
) -> None:
    """Cuts slices and their state in the present order of the parameters' memory. All ranks must call it."""
    held = [part_of(slice_, state.get(slice_.tensor, {})) for slice_ in slices]
    values = whole_values(scope, [held], [slice_.parameter for slice_ in slices])
    for slice_, whole in zip(slices, values, strict=True):
        own = state.get(slice_.tensor, {})
        divided = [key for key, value in own.items() if slice_.is_part(value)]
        slice_.cut_again()
        own.update({key: slice_.part(whole[key]) for key in divided})


def _portable(value: Any) -> Any:
    return _Copy(value.detach().cpu(), not value.is_cpu) if isinstance(value, Tensor) else value


def _placed(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, _Copy):
        return value
    return value.tensor.to(parameter.device) if value.is_on_gpu else value.tensor.clone()


def _gathered(
    scope: CollectiveScope, parameter: Tensor, own: Sequence[Elements | None], dtype: torch.dtype
) -> Tensor:
    """Returns the elements of all ranks, in the order of ranks and of each rank's parts."""
    where = parameter.device
    found = [value.tensor.to(where) for value in own if value is not None and value.tensor is not None]
    mine = found[0] if len(found) == 1 else torch.cat([torch.empty(0, dtype=dtype, device=where), *found])
    elements: Tensor = scope.run(ALLGATHER, mine.detach())
    return elements


def _joined(parameter: Tensor, parts: Sequence[Part], elements: Tensor) -> Tensor:
    """Returns a value with the shape and the order of the parameter, made of the elements of its parts."""
    whole = torch.empty(parameter.numel(), dtype=elements.dtype, device=elements.device)
    counts = [part.end - part.begin for part in parts]
    for part, own in zip(parts, elements.split(counts), strict=True):
        whole[part.begin : part.end] = own
    strides = parts[0].strides
    shaped = whole.as_strided(parameter.shape, strides)
    if orders_differ(parameter.shape, parameter.stride(), strides):
        return in_order_of(parameter, shaped)
    return whole.as_strided(parameter.shape, parameter.stride())


# ---- The optimizer, with this rank's slices in the place of parameters ---------------------------------


class Sharded(Wrapped):
    """An optimizer with slices in the place of parameters while it steps.

    Its state is keyed by the slices. Between steps its groups hold the parameters, as the program has given
    them.
    """

    _partition: Partition
    _gathering: ParameterGathering
    _parameter_names: dict[Tensor, str]
    _named_slices: list[tuple[str, Slice]]
    awaits_state = False  # since a change of the ranks, until the elastic state has divided it anew

    def _adopt_slices(self, partition: Partition, names: dict[Tensor, str]) -> None:
        """Divides the state that the optimizer has."""
        self._partition, self._parameter_names = partition, names
        self._gathering, self._named_slices = ParameterGathering(self._scope), []
        self._divide_state()

    def _slices(self) -> list[Slice]:
        """Returns the slices of all parameters, in the order of the groups."""
        return [self._partition.slice_of(parameter) for parameter in parameters_of(self)]

    @property
    def place(self) -> Place:
        """Returns this rank's place among the ranks that divide the parameters."""
        return self._partition.place

    def take_state(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Replaces the state by this rank's part of each parameter's, in the order of the groups."""
        self._set_state(
            {} if slice_.is_empty else {key: slice_.part(value) for key, value in whole.items()}
            for slice_, whole in zip(self._slices(), values, strict=True)
        )
        self.awaits_state = False

    @torch.no_grad()
    def return_to(self, parts: Sequence[Part]) -> None:
        """Replaces the state by copies of these parts."""
        self._set_state(values_of(slice_, part) for slice_, part in zip(self._slices(), parts, strict=True))

    def _set_state(self, values: Iterable[dict[str, Any]]) -> None:
        """Replaces the state by that of each slice, in the order of the groups; {}: it has none."""
        pairs = zip(self._slices(), values, strict=True)
        self.state = defaultdict(dict, {slice_.tensor: own for slice_, own in pairs if own})

    def parts(self) -> list[Part]:
        """Returns this rank's part of the state of each parameter, in the order of the groups."""
        return [part_of(slice_, self.state.get(slice_.tensor, {})) for slice_ in self._slices()]

    def _divide_state(self) -> None:
        """Keeps this rank's part of state that belongs to whole parameters."""
        for slice_ in self._slices():
            if slice_.has_other_order:
                slice_.cut_again()
            whole = self.state.pop(slice_.parameter, None)
            if whole is not None and not slice_.is_empty:
                self.state[slice_.tensor] = {key: slice_.part(value) for key, value in whole.items()}

    # ---- A step ----------------------------------------------------------------------------------------

    def _own_inner_hooks(self) -> tuple[Any, Any]:
        after = self._hooks[-1]
        before = self.register_step_pre_hook(type(self)._divide_groups)
        self._hooks = [*self._hooks, before]
        return before, after

    def _divide_groups(self, args: Any, kwargs: Any) -> None:
        if closure_of(args, kwargs) is None:  # with a closure, after that has reduced the gradients
            self._replace_groups()

    def _replace_groups(self) -> None:
        """Puts the slices into the groups, with their gradients."""
        if self.awaits_state:
            raise UnsupportedError(
                "the ranks have changed, and this optimizer with shard= is not part of the elastic state, so "
                "its state belongs to slices that this rank does not have any more: make the state with it, "
                "hvd.elastic.TorchState(model, optimizer)"
            )
        slices = self._slices()
        moved = [slice_ for slice_ in slices if slice_.has_other_order]
        if moved:  # on all ranks, in the same step
            divide_again(self._scope.derived("new order"), self.state, moved)
        for slice_ in slices:
            slice_.follow()
            slice_.tensor.grad = _own_gradient(slice_)
        tensors = iter([slice_.tensor for slice_ in slices])
        self._swap_groups([list(islice(tensors, size)) for size in group_sizes(self)])

    def _end_update(self) -> None:
        """Gathers what the ranks have updated."""
        self._put_parameters_back()
        if self._scope.has_no_peers:
            return
        if len(self._named_slices) != len(parameters_of(self)):
            named = all_named(self, self._parameter_names)
            self._named_slices = [(name, self._partition.slice_of(tensor)) for name, tensor in named]
        self._gathering.run([pair for pair in self._named_slices if _is_trained(pair[1].parameter)])

    def _put_parameters_back(self) -> None:
        for parameter in parameters_of(self) if self._program_groups is not None else ():
            parameter.grad = None
        super()._put_parameters_back()

    # ---- Calls of the program --------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Works like the optimizer's own."""
        self._put_parameters_back()
        super().zero_grad(set_to_none)

    def state_dict(self) -> NoReturn:
        """Raises UnsupportedError: a rank alone has only slices of the state."""
        raise UnsupportedError(
            "with shard= this rank has only slices of the optimizer's state, which would look like all of "
            "it: call hvd.full_state_dict(optimizer) on all ranks, and save what it returns"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Works like the optimizer's own, with the state of all ranks: each keeps its slices of it."""
        self._put_parameters_back()
        super().load_state_dict(state_dict)
        self._divide_state()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises UnsupportedError: a copy would be an optimizer without most of its state."""
        raise UnsupportedError(
            "an optimizer with shard= cannot be copied, because this rank has only slices of its state: save "
            "hvd.full_state_dict(optimizer), and load it into another one"
        )

    def _unwrap(self) -> None:
        raise ValueError(
            "the state of this optimizer is in slices that belong to a world that has ended: make a new "
            "optimizer, and load what hvd.full_state_dict(optimizer) has returned before"
        )

    def _full_state_dict(self, state: dict[Tensor, dict[str, Any]]) -> dict[str, Any]:
        """Returns the `state_dict()` of the plain optimizer with this state."""
        self._put_parameters_back()
        own, self.state = self.state, defaultdict(dict, state)
        try:
            return super().state_dict()
        finally:
            self.state = own


def partition_for(optimizer: Optimizer, scope: CollectiveScope) -> Partition | None:
    """Returns a division of the optimizer's parameters; None if this rank has no peer, and never gets any.

    Raises:
        ValueError: a parameter cannot be cut into slices.
    """
    for parameter in parameters_of(optimizer):
        if has_gaps(parameter):
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} does not fill its memory, so shard= cannot "
                "cut it into slices: make it with parameter.contiguous()"
            )
    if scope.has_no_peers and scope.context.survivors is None:  # otherwise ranks may join
        return None
    place = Place(scope.ranks.index(scope.context.rank), len(scope.ranks))
    if scope.context.is_provisional:  # its ranks do not exist yet
        place = Place(0, 1)
    return Partition(place, has_whole=needs_whole_parameters(optimizer))


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad or parameter.grad is not None


def _own_gradient(slice_: Slice) -> Tensor | None:
    gradient = slice_.parameter.grad
    if gradient is None:
        return None
    if isinstance(gradient, ShardedGradient):
        if not gradient.fits(slice_.parameter):
            raise UnsupportedError(
                f"the dtype or the order of memory of a parameter of shape {list(slice_.parameter.shape)} "
                "has changed since its gradient was divided among the ranks: call optimizer.zero_grad() "
                "before you change it"
            )
        return None if slice_.is_empty else gradient.own
    if gradient.layout is not torch.strided:
        raise UnsupportedError(
            "a gradient is sparse, and shard= divides dense ones only: make the layer with sparse=False, or "
            "leave out shard"
        )
    return None if slice_.is_empty else slice_.of(gradient)


# ---- The all-gather of parameters, of which each rank has updated its slice ----------------------------


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
        """Makes the parameters equal on all ranks, which must pass the same parameters.

        Raises:
            HorovodInternalError: an exchange failed, or a rank has no slices.
        """
        parameters = [slice_.parameter for _, slice_ in named]
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
        batch.set_all_streams([device.current_stream(batch.gpu)] * batch.count)
        batch.keepalive[:] = self._kept  # the wait releases it
        context.enqueue(batch)
        wait_in_stream(context, batch, device)

    def _describe(self, named: Sequence[tuple[str, Slice]]) -> None:
        self._batch, self._copied, self._kept = Batch(len(named)), None, []
        for index, (name, slice_) in enumerate(named):
            own, target = flat(slice_.parameter)[slice_.begin : slice_.end], flat(slice_.parameter)
            call = Call(f"{self._name}.{name}", self._set_number)
            describe(self._batch, core.ALLGATHER, view(own), target.data_ptr(), call, index)
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


# ---- The whole state of an optimizer, made of the slices of all ranks ----------------------------------


def full_state_dict(optimizer: torch.optim.Optimizer, root_rank: int | None = None) -> dict[str, Any]:
    """Returns an optimizer's whole state, as the plain optimizer's `state_dict()`. All ranks must call it.

    It loads into the plain optimizer, and with `optimizer.load_state_dict()` into one with shard= on any
    number of ranks. For an optimizer without shard= it is `optimizer.state_dict()`.

    Args:
        optimizer: the optimizer.
        root_rank: the only rank that gets the state, so that the others need no memory for it; they get an
            empty dictionary. None: all ranks get it.

    Raises:
        PeerLostError: a rank died.

    Example:
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), shard="state")
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        state = hvd.full_state_dict(optimizer, root_rank=0)  # on all ranks
        if hvd.is_root():
            torch.save({"model": model.state_dict(), "optimizer": state}, "checkpoint.pt")
    """
    if not isinstance(optimizer, Sharded):
        return optimizer.state_dict()
    scope = optimizer._scope.derived("full state")
    slices = optimizer._slices()
    values = whole_values(scope, [optimizer.parts()], [slice_.parameter for slice_ in slices])
    state: dict[Tensor, dict[str, Any]] = {}
    is_kept = root_rank is None or scope.context.rank == root_rank
    for slice_, whole in zip(slices, values, strict=True):
        if whole and is_kept:
            state[slice_.parameter] = whole
    return optimizer._full_state_dict(state) if is_kept else {}
