"""Handlers: how `TorchState` saves, restores and exchanges an object of each type."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sirtaki.common.elastic.slices import SliceCopies, allocated, opened
from sirtaki.common.ops.objects import gather_objects
from sirtaki.torch._private import forget_stages, without_subclasses
from sirtaki.torch.data import DataLoader
from sirtaki.torch.elastic.sampler import ElasticSampler
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.nested import Path, copied, placed
from sirtaki.torch.ops.tensors import plain_name
from sirtaki.torch.training.optimizer import drop_round
from sirtaki.torch.training.overlapped.flight import land
from sirtaki.torch.training.overlapped.optimizer import Overlapped
from sirtaki.torch.training.parameters import options_of, parameters_of, set_options, set_state, state_of
from sirtaki.torch.training.sharded.optimizer import Elements, Part, Sharded, described, whole_values
from sirtaki.torch.training.wrapping import Optimizer, SeparateOptimizer, closure_of

Names = Mapping[int, str]  # of parameters, by their id()
Entries = list[tuple[str, str]]  # names and descriptions


class Handler:
    """Saves and restores a single object of a state.

    Attributes:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Saves the object, for `restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Returns the object to the state that was saved last, in place."""
        raise NotImplementedError


class StateHandler(Handler):
    """The base class of custom handlers, with Horovod's methods; see `set_handler_registry`.

    Example:
        class BufferHandler(hvd.elastic.StateHandler):  # of an object with a list of samples
            def save(self): self.saved = list(self.value.samples)
            def restore(self): self.value.samples = list(self.saved)
            def sync(self):
                self.value.samples = hvd.broadcast_object(self.value.samples)
                self.save()
    """

    def sync(self) -> None:
        """Copies rank 0's object to all ranks, and saves it. All ranks call it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replaces the object by another, and saves that."""
        self.value = value
        self.save()


class ContentHandler(Handler):
    """A handler of an object with content that can be read and written as nested values with tensors.

    The content has two parts: replicas, which training keeps equal on all ranks, and the rest. When a rank
    lacks the state, both are exchanged; replicas are also compared.
    """

    is_replicated = True  # whether a rank that joins gets rank 0's content
    keeps_rest = False  # whether a rank that has the commit keeps its own rest

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved: Any = None

    def content(self) -> tuple[Any, Any]:
        """Returns the replicas and the rest, without a copy."""
        raise NotImplementedError

    def load(self, replicas: Any, rest: Any) -> None:
        """Overwrites the object's content in place. Tensors without a counterpart are taken over."""
        raise NotImplementedError

    def save(self) -> None:
        self._saved = copied(self.content(), self._saved)

    def restore(self) -> None:
        self.load(*copied(self._saved))

    def land(self) -> None:
        """Prepares for saving, together with all ranks: waits for updates that are due.

        Raises:
            HorovodInternalError: they cannot be made. Nothing has been saved.
        """

    def prepare_change(self) -> None:
        """Prepares for a change of the ranks on which they have agreed. All ranks call it, after `save`."""

    def divide(self) -> None:
        """Divides among the ranks what is not replicated, if the ranks have changed. All ranks call it."""

    def require_commit(self) -> None:
        """Raises ValueError if the object is in no state that could be committed."""

    def parameters(self) -> list[Tensor]:
        """Returns the parameters that are part of this object, and of no module of the state."""
        return []

    def drop_gradients(self) -> None:
        """Drops the gradients, and what has been accumulated in them."""

    def entries(self, key: str, names: Names) -> Entries:
        """Describes the parts of the object that have to be alike on all ranks; `key` is its name."""
        return [(key, type(self.value).__name__)]

    def label(self, key: str, path: Path, names: Names) -> str:
        """Returns the name of a tensor of the replicas, for messages."""
        return ".".join(map(str, (key, *path)))


class ModelStateHandler(ContentHandler):
    """A handler of a module. Parameters of optimizers in the same state are left to the optimizers' handlers.

    Attributes:
        elsewhere: the `id()` of each of those parameters.
    """

    def __init__(self, value: nn.Module) -> None:
        for name, tensor in value.state_dict(keep_vars=True).items():
            if is_lazy(tensor):
                raise ValueError(
                    f"{name!r} belongs to a lazy module and has no shape yet: pass a batch through the model "
                    "before it becomes part of a state"
                )
        super().__init__(value)
        self.elsewhere: Collection[int] = ()
        self._saved: tuple[Any, Any] = ({}, {})
        self._versions: dict[str, tuple[int, int]] = {}

    def content(self) -> tuple[Any, Any]:
        state = self.value.state_dict(keep_vars=True)
        parameters = {name: item for name, item in state.items() if isinstance(item, nn.Parameter)}
        return (
            {
                name: parameter
                for name, parameter in parameters.items()
                if id(parameter) not in self.elsewhere
            },
            {name: item for name, item in state.items() if name not in parameters},
        )

    def load(self, replicas: Any, rest: Any) -> None:
        state = self.value.state_dict(keep_vars=True)
        state.update(replicas | rest)
        self.value.load_state_dict(state)

    def land(self) -> None:
        for parameter in self.value.parameters():
            land(parameter)

    def save(self) -> None:
        """Copies the content; of a frozen parameter only if it has changed."""
        replicas, rest = self.content()
        before, saved = self._versions, self._saved
        self._versions = {
            name: version for name, replica in replicas.items() if (version := _version(replica))
        }
        same = {name for name, version in self._versions.items() if before.get(name) == version}
        copies = {
            name: saved[0][name] if name in same else copied(replica, saved[0].get(name))
            for name, replica in replicas.items()
        }
        self._saved = copies, copied(rest, saved[1])

    def drop_gradients(self) -> None:
        self.value.zero_grad(set_to_none=True)

    def entries(self, key: str, names: Names) -> Entries:
        state = self.value.state_dict(keep_vars=True)
        tensors = {name: item for name, item in state.items() if isinstance(item, Tensor)}
        return [(f"{key}.{name}", kind_of(tensor)) for name, tensor in tensors.items()]


def _version(parameter: Tensor) -> tuple[int, int] | None:
    """Returns the identity and version of a frozen parameter, to detect changes; None if it is trainable."""
    if parameter.requires_grad or parameter.is_inference():
        return None
    return id(parameter), parameter._version


def kind_of(tensor: Tensor) -> str:
    """Describes a tensor's dtype and shape."""
    return f"{plain_name(tensor.dtype)} of shape {list(tensor.shape)}"


class SamplerStateHandler(ContentHandler):
    """A handler of an ElasticSampler. It needs no world: the last world may have ended."""

    value: ElasticSampler

    def content(self) -> tuple[Any, Any]:
        return {}, self.value.state_dict()

    def load(self, replicas: Any, rest: Any) -> None:
        self.value._take_account(rest)


class GeneratorStateHandler(ContentHandler):
    """A handler of a random generator. Each rank has its own random numbers."""

    is_replicated = False
    value: torch.Generator

    def content(self) -> tuple[Any, Any]:
        return {}, self.value.get_state()

    def load(self, replicas: Any, rest: Any) -> None:
        self.value.set_state(rest)


@runtime_checkable
class Stateful(Protocol):
    """An object with `state_dict()` and `load_state_dict()`, such as a scheduler or a GradScaler."""

    def state_dict(self) -> Any:
        """Returns the content."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Replaces the content."""
        ...


class StatefulStateHandler(ContentHandler):
    """A handler of any other object with `state_dict()` and `load_state_dict()`."""

    value: Stateful

    def content(self) -> tuple[Any, Any]:
        return {}, self.value.state_dict()

    def load(self, replicas: Any, rest: Any) -> None:
        self.value.load_state_dict(rest)
        if isinstance(self.value, torch.amp.GradScaler):
            forget_stages(self.value)


class LoaderStateHandler(StatefulStateHandler):
    """A handler of an hvd.DataLoader, which then continues at the commit in every world."""

    value: DataLoader

    def __init__(self, value: DataLoader) -> None:
        super().__init__(value)
        value._progress.follows_state = True


# ---- The handler of an optimizer: copies what its steps write only when a copy is needed ---------------


class OptimizerHandler(ContentHandler):
    """The common part of the handlers of optimizers: their parameters, of which each has a name."""

    value: Optimizer

    def parameters(self) -> list[Tensor]:
        return parameters_of(self.value)

    def drop_gradients(self) -> None:
        drop_round(self.value)
        for parameter in self.parameters():
            parameter.grad = None

    def entries(self, key: str, names: Names) -> Entries:
        return [
            (key, type(self.value).__name__),
            *(
                (f"{key}.{group}.{index}", names.get(id(parameter), kind_of(parameter)))
                for group, settings in enumerate(self.value.param_groups)
                for index, parameter in enumerate(settings["params"])
            ),
        ]

    def label(self, key: str, path: Path, names: Names) -> str:
        part, index, *_ = path
        parameters = self.parameters()
        if part != "parameters" or not isinstance(index, int) or index >= len(parameters):
            return super().label(key, path, names)
        return names.get(id(parameters[index]), f"{key} parameter {index}")


class OptimizerStateHandler(OptimizerHandler):
    """A handler of an optimizer: of its parameters, their state, and the options of its groups.

    `save` copies the options only. What a step writes, the parameters and their state, is copied by `copy`.
    """

    def __init__(self, value: Optimizer) -> None:
        super().__init__(value)
        self._copy: Any = None
        self._copied_parameters: list[Tensor] = []  # those of the copy, in its order
        self._groups: list[list[Tensor]] = []  # those of the last commit
        self._versions: list[int] = []
        self._hook: Any = None
        self._watched: type | None = None

    def content(self) -> tuple[Any, Any]:
        return {"parameters": parameters_of(self.value), "state": state_of(self.value)}, options_of(
            self.value
        )

    def load(self, replicas: Any, rest: Any) -> None:
        parameters = parameters_of(self.value)
        overwrite(parameters, replicas["parameters"])
        set_state(self.value, placed(replicas["state"], state_of(self.value)), parameters)
        set_options(self.value, rest)

    def land(self) -> None:
        if isinstance(self.value, Overlapped):
            self.value.finish_updates()

    def save(self) -> None:
        if isinstance(self.value, SeparateOptimizer | Sharded):
            raise ValueError(
                "LocalSGD, DiLoCo, op=Adasum or shard= has wrapped an optimizer that was in this elastic "
                "state already: make the state after it"
            )
        self._saved = copied(options_of(self.value), self._saved)
        self._groups = [list(group["params"]) for group in self.value.param_groups]

    def restore(self) -> None:
        """Restores the groups and their options; `restore_copy` restores the rest."""
        groups = self.value.param_groups
        del groups[len(self._groups) :]
        for group, parameters in zip(groups, self._groups, strict=True):
            group["params"][:] = parameters
        set_options(self.value, copied(self._saved))

    def note_versions(self) -> None:
        """Records the parameters' current versions as the versions of the commit."""
        self._versions = self._versions_now()

    @property
    def is_untouched(self) -> bool:
        """Returns whether no operation of torch has written to the parameters since the commit.

        Steps of fused optimizers, and writes to `parameter.data`, do not show here.
        """
        return self._versions == self._versions_now()

    def _versions_now(self) -> list[int]:
        with without_subclasses():  # parameters in flight stay there: their world may have failed
            return [tensor._version for group in self._groups for tensor in group]

    @property
    def exchanges_first(self) -> bool:
        """Returns whether a step exchanges nothing once it has begun to write."""
        return not isinstance(self.value, Overlapped)

    def copy(self) -> None:
        """Copies what a step writes, to the memory of the last copy where that fits.

        Parameters in flight whose update is not due yet are copied there: the step goes on without a wait.
        """
        replicas, _ = self.content()
        self._copied_parameters = replicas["parameters"]
        with without_subclasses() if isinstance(self.value, Overlapped) else nullcontext():
            self._copy = copied(replicas, self._copy)

    def drop_copy(self) -> None:
        """Frees the memory of the copy."""
        self._copy, self._copied_parameters = None, []

    def restore_copy(self) -> None:
        """Returns to the copy. State that did not exist then is removed."""
        overwrite(self._copied_parameters, self._copy["parameters"])
        state = copied(self._copy["state"], state_of(self.value))
        set_state(self.value, state, self._copied_parameters)

    def watch(self, before_write: Callable[[bool], None]) -> None:
        """Calls `before_write(has_closure)` in each step, once the gradients have been exchanged.

        With overlap_forward, the gradients may still be exchanged. Hooks run in the order of their
        registration, so this one is registered again if the optimizer has become distributed since.
        """
        if type(self.value) is self._watched:
            return
        self.unwatch()

        def hook(_: Any, args: Any, kwargs: Any) -> None:
            before_write(closure_of(args, kwargs) is not None)

        self._hook, self._watched = self.value.register_step_pre_hook(hook), type(self.value)

    def unwatch(self) -> None:
        """Ends the calls."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._watched = None

    def label(self, key: str, path: Path, names: Names) -> str:
        part, index, *rest = path
        if part == "parameters" or not isinstance(index, int) or index >= len(self.parameters()):
            return super().label(key, path, names)
        return f"{super().label(key, ('parameters', index), names)} ({'.'.join(map(str, rest))})"


@torch.no_grad()
def overwrite(tensors: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        if tensor is not value:
            tensor.copy_(value)


# ---- The handler of an optimizer that steps with the rank's own gradients ------------------------------


class SeparateOptimizerHandler(OptimizerHandler):
    """A handler of an optimizer of LocalSGD or DiLoCo, or with op=Adasum.

    Replicated are the parameters, and DiLoCo's copy of them with the state of the outer optimizer. The state
    of a rank's own steps, such as momenta, is its own; a rank that joins begins with rank 0's. What a rank's
    compression has left out is never sent; a rank that joins begins with nothing left out.
    """

    keeps_rest = True
    value: SeparateOptimizer

    def __init__(self, value: SeparateOptimizer) -> None:
        super().__init__(value)
        self._memory: Any = None

    def save(self) -> None:
        super().save()
        self._memory = copied(self.value.memory_state(), self._memory)

    def restore(self) -> None:
        super().restore()
        self.value.load_memory_state(self._memory)

    def content(self) -> tuple[Any, Any]:
        replicas = {"parameters": self.parameters(), "state": self.value.shared_state()}
        return replicas, self.value.own_state()

    def load(self, replicas: Any, rest: Any) -> None:
        overwrite(self.parameters(), replicas["parameters"])
        self.value.return_to(replicas["state"], rest)

    def require_commit(self) -> None:
        if not self.value.is_synchronized:
            raise ValueError(
                "a commit needs parameters that are equal on all ranks, but this rank has taken steps since "
                "the last synchronization: commit when optimizer.is_synchronized is true, for example after "
                "optimizer.synchronize()"
            )


# ---- The handler of an optimizer with shard=: copies on other ranks keep a lost host from losing state -


WHOLE_STATE = "hvd.full_state_dict(optimizer)"  # the call for what its slices are parts of


class ShardedOptimizerHandler(OptimizerHandler):
    """A handler of an optimizer with shard=.

    Replicated are the parameters and the options. Each rank has its slices of the state; a commit sends
    copies of the slices to another rank.
    """

    value: Sharded

    def __init__(self, value: Sharded) -> None:
        super().__init__(value)
        self._copies = SliceCopies(WHOLE_STATE)

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

    def taken(value: Elements) -> Elements:
        return Elements(value.dtype, _tensor(next(remaining), value.dtype))

    return [replace(part, values=part.changed(taken, lambda value: value)) for part in parts]


def _tensor(memory: memoryview, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype) if len(memory) else torch.empty(0, dtype=dtype)


def _elements(part: Part) -> list[Tensor]:
    values = [value.tensor for value in part.values.values() if isinstance(value, Elements)]
    return [tensor for tensor in values if tensor is not None]


# ---- The registry of handlers, by the types of the objects that they handle ----------------------------


Registry = Sequence[tuple[Any, Callable[[Any], Handler]]]

_registry: Registry = [
    (nn.Module, ModelStateHandler),
    (SeparateOptimizer, SeparateOptimizerHandler),
    (Sharded, ShardedOptimizerHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (DataLoader, LoaderStateHandler),
    (torch.Generator, GeneratorStateHandler),
    (Stateful, StatefulStateHandler),
]


def get_handler_registry() -> Registry:
    """Returns pairs of a type and its handler class; the first pair with a matching type counts.

    Example:
        registry = hvd.elastic.get_handler_registry()
        handler = next(handler for kind, handler in registry if isinstance(model, kind))
    """
    return list(_registry)


def set_handler_registry(registry: Registry) -> None:
    """Replaces the registry. States that exist keep their handlers.

    For example `set_handler_registry([(MyType, MyHandler), *get_handler_registry()])`, where `MyHandler` is a
    subclass of `StateHandler`.

    Example:
        class Buffer(list): ...
        class BufferHandler(hvd.elastic.StateHandler): ...  # with save, restore and sync
        hvd.elastic.set_handler_registry([(Buffer, BufferHandler), *hvd.elastic.get_handler_registry()])
    """
    global _registry
    _registry = list(registry)


def handler_of(value: Any) -> Handler | None:
    """Returns a handler for an object; None if it is a plain value."""
    if isinstance(value, type):
        return None
    return next((make(value) for kind, make in _registry if isinstance(value, kind)), None)
