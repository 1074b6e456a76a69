"""The common part of objects that outlive their world in an elastic job."""

from __future__ import annotations

from typing import Any

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import NotInitializedError
from sirtaki.torch.wrapping import Wrapped


class Survivor:
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


class SeparateOptimizer(Survivor, Wrapped):
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

    def _unwrap(self) -> None:
        self._is_retired = False
        super()._unwrap()
