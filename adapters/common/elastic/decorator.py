"""`hvd.elastic.run`: a training function that continues when ranks are lost or join."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from sirtaki.bindings.context import current
from sirtaki.bindings.errors import InitializationError
from sirtaki.common.elastic.state import State

_State = TypeVar("_State", bound=State)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def run(
    func: Callable[Concatenate[_State, _Parameters], _Result],
) -> Callable[Concatenate[_State, _Parameters], _Result]:
    """Decorates a training function, so that it continues when ranks are lost or join. All ranks call it.

    The first argument of the function is the state. Before the function begins, and whenever the ranks have
    changed, all ranks get the state of the newest commit; then the function begins anew in each process, and
    has to go on from the state. `hvd.rank()` and `hvd.size()` may then have changed. Objects that were made
    before (DistributedOptimizer, ElasticSampler) continue to work.

    The ranks are those of `hvdrun --min-np`. In a single process without hvdrun the function is called once.

    Raises:
        InitializationError: this job was started without `--min-np`, or a second function is run in it.
        NotInitializedError: init() has not been called.
        Exception: that of the function, if no other rank has caused it.

    Example:
        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 3):
                state.commit()
                ...  # an epoch
        train(hvd.elastic.ObjectState(epoch=0))
    """

    @functools.wraps(func)
    def wrapper(state: _State, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        from sirtaki.bindings.bootstrap.elastic import process  # imported late: few programs need it

        if not isinstance(state, State):
            raise ValueError(
                f"the first argument of {func.__name__}() has to be a state, such as "
                f"hvd.elastic.ObjectState, not {type(state).__name__}"
            )
        found, context = process.find(), current()
        if found is None:
            if context.size > 1:
                raise InitializationError(
                    "hvd.elastic.run needs a launcher that can replace ranks: start this job with "
                    "`hvdrun --min-np`, for example hvdrun -np 4 --min-np 2 python train.py"
                )
            return func(state, *args, **kwargs)
        if found.has_run:
            raise InitializationError(
                "a process of an elastic job runs one training function: put both into one that "
                "@hvd.elastic.run decorates"
            )
        found.has_run = True
        from sirtaki.bindings.bootstrap.elastic.worker import WorkerEnded
        from sirtaki.common.elastic import loop

        try:
            return loop.train(found, state, lambda: func(state, *args, **kwargs))
        except WorkerEnded as end:
            found.leave()
            sys.exit(end.code)

    return wrapper
