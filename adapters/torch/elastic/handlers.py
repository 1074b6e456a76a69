"""Handlers: how `TorchState` saves, restores and exchanges an object of each type."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sirtaki.torch._private import forget_stages
from sirtaki.torch.data import DataLoader
from sirtaki.torch.elastic.sampler import ElasticSampler
from sirtaki.torch.ops.nested import Path, copied
from sirtaki.torch.ops.tensors import plain_name
from sirtaki.torch.training.overlapped.flight import land

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
