"""A parameter server with workers that push gradients and pull parameters, each at its own pace."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sirtaki.bindings.context import Context, current
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.tables import world_of_next_table
from sirtaki.common.training.combinations import refuse_combinations
from sirtaki.torch.consistency import check_parameters
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.tensors import reducible_view
from sirtaki.torch.training.stale.arguments import check_staleness, refuse_parameters
from sirtaki.torch.training.stale.table import MakeOptimizer, Table, TableOptions, shared_table


class ParameterServer:
    """A table of parameters, in which each rank serves a part, and of which each rank is a worker.

    In a job with servers (`hvdrun --servers`), these serve the table instead, and the ranks are workers only.

    A worker pulls the parameters, computes gradients, and pushes them. Update number c of the table is made
    of push number c of every worker, averaged over the ranks. A pull after c pushes returns a table with at
    least the first c - staleness updates, and waits until there is one. So a worker that is slow now and then
    does not hold the others, but one that is always slow does.

    All ranks have to make it, with equal parameters, which is checked, and call `finish()` at the end.

    Args:
        params: `model.parameters()`, or pairs of names and parameters, in the memory of the CPU.
        optimizer: a function that is given the parameters that this rank serves and returns their optimizer,
            such as `lambda params: torch.optim.Adam(params, lr=0.001)`. It is called once, and never on a
            rank that serves nothing. Servers call that of rank 0, which is pickled with all it refers to.
        staleness: 0: each pull waits for the pushes of all workers, which is synchronous training.

    Raises:
        ValueError: wrong arguments, or an elastic job.
        ParametersDifferError: the ranks have different parameters.
        NotInitializedError: init() has not been called.
        DeadlineError, InitializationError: a rank or a server did not arrive, or failed.

    Example:
        table = hvd.ParameterServer(model.parameters(), lambda params: torch.optim.Adam(params, lr=0.01))
        for inputs, targets in loader:
            table.pull()
            loss = loss_of(model, inputs, targets)
            table.push(torch.autograd.grad(loss, tuple(model.parameters())))
        table.finish()
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        optimizer: MakeOptimizer,
        staleness: int = 0,
    ) -> None:
        check_staleness(staleness)
        if not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                "optimizer has to be a function of parameters that returns their optimizer, because each "
                "rank serves other ones: optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
            )
        self._named = _named(params)
        for name, entry in self._named.items():
            reducible_view(entry, name)
        context = current()
        is_elastic = context.survivors is not None
        refuse_combinations({"parameter_server": "ParameterServer", "elastic": is_elastic})
        refuse_parameters(self._named.items())
        if context.setting("check_parameters") != "0":
            check_parameters(self._named.items())
        self._has_finished = False
        self._table = _table_of(context, list(self._named.values()), optimizer, staleness)
        self._finalizer = weakref.finalize(self, self._table.end)
        self._finalizer.atexit = False

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the parameters that this rank serves; None if it serves none."""
        return self._table.optimizer

    def clock(self) -> int:
        """Returns the number of pushes of this rank."""
        return self._table.pushes

    def push(self, gradients: Sequence[Tensor | None] | None = None) -> None:
        """Sends gradients to the servers of their parameters. Does not wait.

        Args:
            gradients: one for each parameter, None for one without; by default the parameters' `grad`.

        Raises:
            ValueError: gradients of other shapes, sparse ones, or after `finish()`.
        """
        if self._has_finished:
            raise ValueError("this rank has called finish(), after which it pushes nothing")
        given = (
            [parameter.grad for parameter in self._named.values()] if gradients is None else list(gradients)
        )
        if len(given) != len(self._named):
            raise ValueError(f"push() got {len(given)} gradients for {len(self._named)} parameters")
        for (name, parameter), gradient in zip(self._named.items(), given, strict=True):
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise ValueError(f"the gradient of parameter {name!r} is sparse: push dense ones")
            if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
                raise ValueError(
                    f"the gradient of parameter {name!r} is {gradient.dtype} {tuple(gradient.shape)}, but "
                    f"the parameter is {parameter.dtype} {tuple(parameter.shape)}"
                )
        self._table.push(given)

    def pull(self) -> int:
        """Copies the table into the parameters, and returns the number of updates in it.

        Waits until all workers that have not called `finish()` have pushed often enough.

        Raises:
            DeadlineError: a worker has not pushed for `--stall-deadline` seconds; the text names it and its
                host.
            HorovodInternalError: another failure between ranks.
        """
        return self._table.pull(list(self._named.values()), self._has_finished)

    def finish(self) -> int:
        """Ends the pushes of this rank, waits until all ranks have ended theirs, and pulls the last table.

        All ranks must call it. The rank serves its parameters, if any, while it waits. Returns the number of
        updates.
        """
        self._has_finished = True
        self._table.end()
        return self.pull()


def _table_of(
    context: Context, parameters: Sequence[Tensor], make_optimizer: MakeOptimizer, staleness: int
) -> Table:
    """Returns this rank's side of a table, which the servers of the job serve, if it has any."""
    options = TableOptions(make_optimizer, staleness, context.size)
    world = world_of_next_table(context)
    if world is not None:
        return shared_table(world, parameters, options)
    name = f"parameter server.{context.next_number('parameter server')}"
    return Table(CollectiveScope(context, name, global_process_set), parameters, options)


def _named(params: Any) -> dict[str, Tensor]:
    found = list(params.named_parameters() if isinstance(params, nn.Module) else params)
    named: dict[str, Tensor] = dict(
        entry if isinstance(entry, tuple) else (f"parameter {i}", entry) for i, entry in enumerate(found)
    )
    if (
        not named
        or len(named) != len(found)
        or not all(isinstance(parameter, Tensor) for parameter in named.values())
    ):
        raise ValueError("params has to hold parameters, or pairs of unique names and parameters")
    return named
