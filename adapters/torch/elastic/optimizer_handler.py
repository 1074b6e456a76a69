"""The handler of an optimizer: copies what its steps write only when a copy is needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from sirtaki.torch._private import without_subclasses
from sirtaki.torch.elastic.handlers import ContentHandler, Entries, Names, kind_of
from sirtaki.torch.ops.nested import Path, copied, placed
from sirtaki.torch.training.optimizer import drop_round
from sirtaki.torch.training.overlapped.optimizer import Overlapped
from sirtaki.torch.training.parameters import options_of, parameters_of, set_options, set_state, state_of
from sirtaki.torch.training.sharded.optimizer import Sharded
from sirtaki.torch.training.wrapping import Optimizer, SeparateOptimizer, closure_of


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
