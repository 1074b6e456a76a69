"""Adds abilities to optimizers that stay instances of their class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import NotInitializedError, UnsupportedError
from sirtaki.bindings.observing.step_counters import Stepper
from sirtaki.common.training.groups import Groups
from sirtaki.torch.ops.autograd import CollectiveScope

Optimizer = torch.optim.Optimizer


class TorchSurvivor:
    """An object that `hvd.elastic.run` moves from world to world, or ends: `sirtaki.bindings.survivors`."""

    _is_retired = False

    def _register(self, context: Context) -> None:
        """Makes this object a survivor, if the job is elastic."""
        if context.survivors is not None:
            context.survivors.add(self)

    def move_to(self, context: Context) -> None:
        """Continues in another world. `hvd.elastic.run` calls it."""
        raise NotImplementedError

    def retire(self) -> None:
        """Ends the use of this object. `hvd.elastic.run` calls it."""
        self._is_retired = True

    def _check_use(self) -> None:
        """Raises NotInitializedError if this object has been retired."""
        if self._is_retired:
            raise NotInitializedError(
                f"this {type(self).__name__} was made inside the training function, by an execution of it "
                "that has ended when the ranks changed: make it before hvd.elastic.run, or use the new one"
            )


class Wrapped(TorchSurvivor, Optimizer):
    """An optimizer that `wrap` has extended by a mixin.

    Attributes:
        _technique: the call that has wrapped it, if its parameters cannot change afterwards; else "".
        _hooks: the hooks around its steps: `_before_own_step` is first, `_after_own_step` last.
        _listed: the parameters in its groups when it was wrapped, or as a technique has followed them.
        _inner_hooks: the last hook before its step and the first one after it, if its groups do not hold all
            parameters while it steps: hooks of the program see whole groups.
        _stepper: the optimizer, for autotune; None if its steps cannot be compared.
        _program_groups: the program's parameters of each group, while the groups hold others.
    """

    _technique = ""
    _hooks: Sequence[Any]
    _listed: ListedParameters
    _inner_hooks: tuple[Any, Any] | None
    _stepper: Stepper | None
    _program_groups: list[list[Tensor]] | None = None

    @property
    def _scope(self) -> CollectiveScope:
        """The optimizer's ranks for communication, and their world."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing: gradients stay on this rank until `step()`."""
        return nullcontext()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Does nothing: the gradients of any number of passes add up until `step()`."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Works like the optimizer's own. Raises ValueError if the technique needs all parameters at once."""
        if self._technique:
            raise ValueError(f"add the parameters before {self._technique}")
        super().add_param_group(param_group)

    def _refuse_other_parameters(self) -> None:
        """Raises UnsupportedError if the program has put other parameters into the groups itself."""
        self._listed.refuse_others(self.param_groups, self._technique)

    def _before_own_step(self, args: Any, kwargs: Any) -> Any:
        """Called before each step with its arguments, as a hook of torch: may return other arguments."""

    def _after_own_step(self, args: Any, kwargs: Any) -> None:
        """Called after each step with its arguments, as a hook of torch."""

    def _replace_groups(self) -> None:
        """Makes the groups hold what the optimizer's own step is to update, after all hooks before it."""

    def _swap_groups(self, groups: Sequence[list[Tensor]]) -> None:
        """Makes the groups hold other parameters, while the optimizer steps."""
        self._program_groups = [group["params"] for group in self.param_groups]
        for group, parameters in zip(self.param_groups, groups, strict=True):
            group["params"] = parameters

    def _put_parameters_back(self) -> None:
        """Makes the groups hold the program's parameters, also after a step that has raised."""
        if self._program_groups is not None:
            for group, parameters in zip(self.param_groups, self._program_groups, strict=True):
                group["params"] = parameters
            self._program_groups = None

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Works like the optimizer's own."""
        handle = super().register_step_pre_hook(hook)
        self._surround_hooks()
        return handle

    def _own_inner_hooks(self) -> tuple[Any, Any] | None:
        """Returns the inner hooks, after the hooks around its steps have been registered."""
        return None

    def _surround_hooks(self) -> None:
        """Keeps the inner hooks next to the step."""
        if self._inner_hooks is None:
            return
        earlier: Any = self._optimizer_step_pre_hooks  # both are an OrderedDict
        later: Any = self._optimizer_step_post_hooks
        before, after = self._inner_hooks
        earlier.move_to_end(before.id)
        later.move_to_end(after.id, last=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles as the plain optimizer: hooks and connections cannot be copied."""
        kind = self._plain_class()
        return kind.__new__, (kind,), self.__getstate__()

    def _plain_class(self) -> Any:
        optimizers = (kind for kind in type(self).__mro__ if issubclass(kind, Optimizer))
        return next(optimizer for optimizer in optimizers if not issubclass(optimizer, Wrapped))

    def _unwrap(self) -> None:
        """Turns it back into the plain optimizer."""
        self._is_retired = False
        for hook in self._hooks:
            hook.remove()
        self.__class__ = self._plain_class()


def make_plain(optimizer: Any) -> None:
    """Checks that an optimizer is not distributed; unwraps it if its world has ended.

    Raises:
        ValueError: it is no optimizer, or distributed already.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"the optimizer has to be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, Wrapped) and optimizer._scope.has_ended:
        optimizer._unwrap()
    if isinstance(optimizer, Wrapped):
        raise ValueError("this optimizer is distributed already: wrap it once")


def wrap(optimizer: Optimizer, mixin: type[Wrapped]) -> Any:
    """Swaps an optimizer's class for a subclass of it and the mixin, with the original name. Returns it."""
    kind = type(optimizer)
    wrapped: Any = optimizer
    wrapped.__class__ = type(
        kind.__name__, (mixin, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__}
    )
    wrapped._stepper = wrapped._inner_hooks = None
    wrapped._listed = ListedParameters(wrapped.param_groups)
    wrapped._hooks = [
        wrapped.register_step_pre_hook(mixin._before_own_step),
        wrapped.register_step_post_hook(_count_step),
        wrapped.register_step_post_hook(mixin._after_own_step),
    ]
    wrapped._inner_hooks = wrapped._own_inner_hooks()
    wrapped._surround_hooks()
    return wrapped


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the closure among the arguments of a hook around a step; None if there is no closure."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer._scope.context.steps.end(by=optimizer._stepper)


# ---- The parameters in an optimizer's groups, to notice new ones ---------------------------------------


class ListedParameters:
    """The parameters of each group at some time."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._lists: list[list[Tensor]] = [list(group["params"]) for group in groups]

    def are_in(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether groups have exactly these. Cheap: called in each step."""
        lists = self._lists
        if len(lists) != len(groups):
            return False
        for mine, group in zip(lists, groups, strict=True):
            present = group["params"]
            if len(mine) != len(present) or not all(map(is_, mine, present)):
                return False
        return True

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for parameters in self._lists for parameter in parameters)

    def refuse_others(self, groups: Sequence[Mapping[str, Any]], technique: str) -> None:
        """Raises UnsupportedError if groups have a parameter that is not among these. Cheap, as `are_in`."""
        if self.are_in(groups):
            return
        known = set(self)
        for number, group in enumerate(groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in known:
                    raise UnsupportedError(
                        f"the program has put a parameter into optimizer.param_groups[{number}]['params'] "
                        f"(index {place}, shape {tuple(parameter.shape)}) since the optimizer was wrapped, "
                        f"and with {technique} only the parameters of that time are exchanged: make a new "
                        "optimizer with the new parameters and wrap that"
                    )

    def heirs_of(self, earlier: ListedParameters) -> dict[Tensor, Tensor]:
        """Returns, by parameters that are gone, the new parameters at their positions."""
        before, now = set(earlier), set(self)
        return {
            old: new
            for theirs, mine in zip(earlier._lists, self._lists, strict=False)
            for old, new in zip(theirs, mine, strict=False)
            if old not in now and new not in before
        }

    def inherited_names(
        self, names: Mapping[Tensor, str], heirs: Mapping[Tensor, Tensor]
    ) -> dict[Tensor, str]:
        """Returns the names of these parameters; heirs inherit the names of the parameters before them."""
        there = set(self)
        found = {heirs.get(tensor, tensor): name for tensor, name in names.items()}
        return {tensor: name for tensor, name in found.items() if tensor in there}

    def inherited_groups(self, groups: Groups, heirs: Mapping[Tensor, Tensor]) -> Groups:
        """Returns the groups that are reduced together, with heirs in place of gone parameters."""
        if groups is None or isinstance(groups, int):
            return groups
        there = set(self)
        found = [[heirs.get(member, member) for member in group] for group in groups]
        return [[tensor for tensor in group if tensor in there] for group in found]


# ---- Optimizers that step with the rank's own gradients ------------------------------------------------


class SeparateOptimizer(Wrapped):
    """A wrapped optimizer that steps with the rank's own gradients.

    Its state, such as momenta, is the rank's own. Parameters are equal once the ranks have combined them.
    """

    @property
    def is_synchronized(self) -> bool:
        """Whether the parameters are equal on all ranks."""
        raise NotImplementedError

    def own_state(self) -> dict[str, Any]:
        """Returns the state of this rank's own steps: the plain optimizer's `state_dict()`."""
        return super().state_dict()

    def shared_state(self) -> Any:
        """Returns what is equal on all ranks besides the parameters; None if there is nothing."""
        return None

    def return_to(self, shared: Any, own: dict[str, Any]) -> None:
        """Returns to a time when the parameters were equal on all ranks: see `shared_state`, `own_state`."""
        super().load_state_dict(own)

    def memory_state(self) -> Any:
        """Returns what this rank has left out of what it has sent, without copies; None if nothing."""
        return None

    def load_memory_state(self, state: Any) -> None:
        """Returns to what `memory_state` has returned."""
