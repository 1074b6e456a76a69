"""The handler of an optimizer with local steps, whose ranks are equal at synchronizations only."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sirtaki.torch.elastic.handlers import ContentHandler, Entries, Names
from sirtaki.torch.elastic.optimizer_handler import overwrite, parameter_entries
from sirtaki.torch.nested import Path
from sirtaki.torch.optimizer_state import parameters_of
from sirtaki.torch.periodic.optimizer import PeriodicOptimizer


class LocalStepsHandler(ContentHandler):
    """A handler of an optimizer of LocalSGD or DiLoCo.

    Replicated are the parameters, and DiLoCo's copy of them with the state of the outer optimizer. The state
    of a rank's own steps, such as momenta, is its own; a rank that joins begins with rank 0's.
    """

    keeps_rest = True
    value: PeriodicOptimizer

    def parameters(self) -> list[Tensor]:
        return parameters_of(self.value)

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

    def drop_gradients(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def entries(self, key: str, names: Names) -> Entries:
        return parameter_entries(self.value, key, names)

    def label(self, key: str, path: Path, names: Names) -> str:
        part, *place = path
        parameters = self.parameters()
        if part == "parameters" and isinstance(place[0], int) and place[0] < len(parameters):
            return names.get(id(parameters[place[0]]), f"{key} parameter {place[0]}")
        return super().label(key, path, names)
