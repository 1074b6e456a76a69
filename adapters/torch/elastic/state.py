"""The state of an elastic training with torch."""

from __future__ import annotations

from typing import Any

import torch

from sirtaki.bindings.context import Context
from sirtaki.bindings.default_context import current, using
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.common.elastic.state import ObjectState, Start
from sirtaki.torch.consistency import plain_options_of
from sirtaki.torch.elastic.handlers import (
    ContentHandler,
    Handler,
    ModelStateHandler,
    StateHandler,
    kind_of,
)
from sirtaki.torch.elastic.optimizer_handler import OptimizerStateHandler
from sirtaki.torch.elastic.receiving import Content, Description, are_equal, received
from sirtaki.torch.elastic.registry import handler_of
from sirtaki.torch.elastic.sampler import ElasticSampler
from sirtaki.torch.elastic.writes import Writes
from sirtaki.torch.nested import Path, copied, mapped, tensors_of

_ATTRIBUTES = "(attributes)"  # the key of the plain attributes in the content; no keyword has this name
_COPY = ("auto", "always")
_DIRTY = (
    "this rank cannot return to its last commit: an optimizer has changed the parameters since, and there is "
    'no copy of them; give the state copy="always", or commit after every step'
)


class TorchState(ObjectState):
    """The state of an elastic training with torch. Its keywords become attributes.

    For example `TorchState(model, optimizer, sampler=sampler, scheduler=scheduler, epoch=0, batch=0)`.
    Modules, optimizers, samplers (`ElasticSampler`), random generators, and everything else that has
    `state_dict()` and `load_state_dict()`, such as schedulers and GradScalers, are restored in place. All
    other values are copied and sent as they are. An attribute may be assigned again, also to another object.

    Replicated on all ranks: parameters, buffers, optimizer state, all that has a `state_dict()`, and plain
    values. A random generator stays each rank's own: it is restored, but never sent. After a change of the
    ranks, gradients are None, and accumulation begins anew.

    **What a commit costs.** Everything except parameters of optimizers and their state is copied at each
    commit. These are copied with `copy="auto"` only before the first step after a commit, and not at all once
    the training has committed after every step for a while: the loss of a rank shows in the exchange of
    gradients, before the optimizer writes. Other forms of training always take that copy: several steps for
    each commit, operations between a step and its commit, several optimizers, closures, op=Adasum and
    overlap_forward. If a training that commits after every step does one of these for once, the loss of a
    rank in this very moment costs the commit, and the job ends if no rank has it any more. `copy="always"`
    takes a copy at each commit. A commit waits for all updates of overlap_forward.

    **Changes that cannot be seen.** Between a commit and the next step, the program should change parameters
    and optimizer state only through torch's operations on the parameters themselves, such as
    `parameter.mul_()` under `torch.no_grad()`: then the commit counts as changed. A write to
    `parameter.data`, to optimizer state, or by a replayed CUDA graph is not seen, and would become part of
    the commit. If the program does that, say `copy="always"`.

    Args:
        model: a module, whose parameters may be on any device. It has to have its shapes already.
        optimizer: its optimizer, distributed or not.
        copy: "auto" or "always".
        kwargs: further objects and values.

    Raises:
        ValueError: another value for `copy`, or a lazy module.
    """

    def __init__(
        self, model: Any = None, optimizer: Any = None, *, copy: str = "auto", **kwargs: Any
    ) -> None:
        import cloudpickle  # noqa: F401  # loaded now, and not during the first recovery

        if copy not in _COPY:
            raise ValueError(f'copy is {copy!r}, but it has to be "auto" or "always"')
        self._handlers: dict[str, Handler] = {}
        self._writes = Writes(copies_always=copy == "always")
        values = {"model": model, "optimizer": optimizer, **kwargs}
        for name, value in values.items():
            if (handler := handler_of(value)) is not None:
                self._handlers[name] = handler
                super().__setattr__(name, value)
        super().__init__(**{name: value for name, value in values.items() if name not in self._handlers})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", ()):
            self._replace(name, value)
        elif name in self.__dict__.get("_saved_state", ()) and (handler := handler_of(value)) is not None:
            del self._saved_state[name]
            self._add(name, handler)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Saves the state: copies what is small, and the rest only if that is needed.

        Raises:
            ValueError: an ElasticSampler that was made before the training function has recorded samples, and
                is not part of this state.
            HorovodInternalError: the world has failed before all updates of overlap_forward were made; this
                rank's last commit is still intact.
        """
        self._require_commit()
        self._land()
        super().save()
        self._assign_parameters()
        for handler in self._handlers.values():
            handler.save()
        self._writes.commit(self._optimizers)
        if self._commits is not None:
            _check_samplers(current())

    def _require_commit(self) -> None:
        for handler in self._content_handlers.values():
            handler.require_commit()

    def _land(self) -> None:
        """Waits for updates that are due, before anything is saved: their world may fail."""
        for handler in (*self._optimizers, *self._models.values()):
            handler.land()

    def can_restore(self) -> bool:
        """Returns whether parameters and optimizer state have not been written since, or were copied."""
        return self._writes.can_restore

    def restore(self) -> None:
        """Returns all objects to the last commit, in place, and drops the gradients. Sends nothing.

        Raises:
            RuntimeError: `can_restore()` is False.
        """
        if not self.can_restore():
            raise RuntimeError(_DIRTY)
        self._writes.restore()
        optimizers = self._optimizers
        for handler in self._handlers.values():
            if handler not in optimizers:
                handler.restore()
        for optimizer in optimizers:  # last, because schedulers may set their options
            optimizer.restore()
        super().restore()
        self._drop_gradients()
        self._writes.note_restored()

    def sync(self) -> None:
        """Copies the state of rank 0 to all ranks, and saves it. All ranks call it.

        Raises:
            ParametersDifferError: the ranks' states have other names, shapes or dtypes.
            PeerLostError: a rank died; this rank's state is unchanged.
        """
        context = current()
        self._receive(context, is_current=context.rank == 0, all_current=False)

    def receive(self, start: Start) -> None:
        """Takes the commit's state from rank 0, if any rank lacks it. All ranks call it.

        If all ranks have it, parameters, optimizer state and options are compared, unless the setting
        check_parameters is 0. If they differ, all ranks get rank 0's state, and rank 0 warns.

        Raises:
            ParametersDifferError: as for `sync`.
            PeerLostError: a rank died; this rank's last commit is still intact.
        """
        with using(start.context):
            self._receive(start.context, start.is_current, start.all_current)

    def checkpoint(self) -> Any:
        """Returns copies of everything that is replicated, on the devices where it is."""
        content = self._content()
        return copied((content.replicas, content.rest))

    def load_checkpoint(self, content: Any) -> None:
        """Loads what `checkpoint` has returned, in place.

        Raises:
            HorovodInternalError: it was made of other objects.
        """
        own = self._content()
        gpu = next((tensor.device for tensor in tensors_of(own.replicas).values() if tensor.is_cuda), None)
        replicas, rest = mapped(content, lambda _, leaf: _moved(leaf, gpu))
        theirs, ours = _kinds(replicas, rest), _kinds(own.replicas, own.rest)
        if differing := sorted(name for name in theirs.keys() | ours if theirs.get(name) != ours.get(name)):
            raise HorovodInternalError(
                f"the checkpoint was made of other objects than this state: {differing[0]!r} is "
                f"{theirs.get(differing[0], 'missing')} there, and {ours.get(differing[0], 'missing')} here. "
                "Delete the checkpoints, or train with the same model"
            )
        self._load(Content(replicas, rest, {}, self._writes.regularity))
        self.save()

    # ---- Objects and their handlers --------------------------------------------------------------------

    @property
    def _optimizers(self) -> list[OptimizerStateHandler]:
        return [handler for handler in self._handlers.values() if isinstance(handler, OptimizerStateHandler)]

    @property
    def _models(self) -> dict[str, ModelStateHandler]:
        return {
            key: handler for key, handler in self._handlers.items() if isinstance(handler, ModelStateHandler)
        }

    def _assign_parameters(self) -> None:
        """Makes each parameter part of either an optimizer or a model."""
        handlers = self._content_handlers.values()
        of_optimizers = {id(parameter) for handler in handlers for parameter in handler.parameters()}
        for model in self._models.values():
            model.elsewhere = of_optimizers

    def _replace(self, name: str, value: Any) -> None:
        handler = self._handlers[name]
        if value is handler.value:
            return
        other = handler_of(value)
        if isinstance(handler, StateHandler) and type(other) is type(handler):
            handler.set_value(value)
            return
        if isinstance(handler, OptimizerStateHandler):
            handler.unwatch()
        del self._handlers[name]
        if other is None:
            self._saved_state[name] = value
            self._writes.change(self._optimizers)
        else:
            self._add(name, other)

    def _add(self, name: str, handler: Handler) -> None:
        """Adds an object, whose present state becomes part of the last commit."""
        self._handlers[name] = handler
        self._assign_parameters()
        self._land()
        handler.save()
        self._writes.change(self._optimizers)

    def _drop_gradients(self) -> None:
        for handler in self._content_handlers.values():
            handler.drop_gradients()

    # ---- Exchange --------------------------------------------------------------------------------------

    @property
    def _content_handlers(self) -> dict[str, ContentHandler]:
        return {
            key: handler for key, handler in self._handlers.items() if isinstance(handler, ContentHandler)
        }

    def _receive(self, context: Context, is_current: bool, all_current: bool) -> None:
        if context.size > 1 and not (all_current and context.setting("check_parameters") == "0"):
            self._assign_parameters()
            content = self._content()
            description = self._description(content)
            if not are_equal(context, content, description, all_current):
                own, content = content, received(context, content, description, is_current)
                self._sync_others(all_current)
                if context.rank != 0:
                    self._load(content, own if is_current else None)
                    self._writes.note_received(None if is_current else content.commits)
        self._drop_gradients()
        self.save()

    def _sync_others(self, all_current: bool) -> None:
        """Syncs the objects of handlers that exchange their objects themselves."""
        others = [handler for handler in self._handlers.values() if isinstance(handler, StateHandler)]
        try:
            for handler in others if not all_current else ():
                handler.sync()
        except BaseException:
            for handler in others:
                handler.restore()
            raise

    def _load(self, content: Content, own: Content | None = None) -> None:
        """Loads a content; a rank that has the commit keeps parts of its `own`."""
        for key, handler in self._content_handlers.items():
            if handler.is_replicated:
                rest = own.rest if own is not None and handler.keeps_rest else content.rest
                handler.load(content.replicas[key], rest[key])
        self._set(content.rest[_ATTRIBUTES])

    def _content(self) -> Content:
        contents = {
            key: handler.content() for key, handler in self._content_handlers.items() if handler.is_replicated
        }
        rest: dict[str, Any] = {key: rest for key, (_, rest) in contents.items()}
        rest[_ATTRIBUTES] = self._values()
        options = {
            key: plain_options_of(handler.value)
            for key, handler in self._content_handlers.items()
            if isinstance(handler, OptimizerStateHandler)
        }
        replicas = {key: replicas for key, (replicas, _) in contents.items()}
        return Content(replicas, rest, options, self._writes.regularity)

    def _description(self, content: Content) -> Description:
        handlers = self._content_handlers
        names = {
            id(one): f"{key}.{name}"
            for key, handler in self._models.items()
            for name, one in handler.value.named_parameters()
        }
        entries = [entry for key, handler in handlers.items() for entry in handler.entries(key, names)]
        entries += [(name, "an attribute") for name in self._saved_state]

        def label(path: Path) -> str:
            key, *rest = path
            return handlers[key].label(key, tuple(rest), names)

        tensors = tensors_of(content.replicas).values()
        return Description(
            entries, label, next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        )


def _check_samplers(context: Context) -> None:
    """Raises ValueError if a sampler that outlives a change of the ranks is not part of the commit."""
    kept = context.survivors.kept if context.survivors is not None else []
    if any(isinstance(one, ElasticSampler) and one.is_unsaved for one in kept):
        raise ValueError(
            f"rank {context.rank} has recorded batches of an ElasticSampler that is not part of the state: "
            "after a change of the ranks, each would go on at another place of its epoch. Give it to the "
            "state: hvd.elastic.TorchState(..., sampler=sampler)"
        )


def _kinds(replicas: Any, rest: Any) -> dict[str, str]:
    """Describes objects, attributes and parameters; an optimizer's state may come into being later."""
    found = dict.fromkeys(rest, "an object") | dict.fromkeys(rest[_ATTRIBUTES], "an attribute")
    tensors = {path: tensor for path, tensor in tensors_of(replicas).items() if "state" not in path}
    return found | {".".join(map(str, path)): kind_of(tensor) for path, tensor in tensors.items()}


def _moved(leaf: Any, gpu: torch.device | None) -> Any:
    return leaf.to(gpu) if isinstance(leaf, torch.Tensor) and leaf.is_cuda and gpu is not None else leaf
