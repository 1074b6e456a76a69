"""The common part of objects that outlive their world in an elastic job."""

from __future__ import annotations

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import NotInitializedError


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
