"""Collectives outside jit: they call the core directly, with the arrays' own memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import jax

from sirtaki.bindings.default_context import current
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.collectives import Collectives
from sirtaki.common.handles import run as run_operation
from sirtaki.common.ops import Call, Reduction
from sirtaki.common.requests import BY_KIND, CollectiveOptions
from sirtaki.jax import arrays as adapter
from sirtaki.jax.exchange_options import ExchangeOptions, dtype_code

_COLLECTIVES = Collectives(adapter)


def run(*arrays: Any, options: ExchangeOptions) -> list[Any]:
    """Returns this rank's results, as arrays. An all-to-all with splits adds the rows from each rank."""
    if not options.ends_step:
        return _run(*arrays, options=options, wait=nullcontext())
    steps = current().steps
    results = _run(*arrays, options=options._replace(ends_step=False, stepper=None), wait=steps.exposed)
    steps.end(by=options.stepper)
    return results


def _run(*arrays: Any, options: ExchangeOptions, wait: AbstractContextManager[None]) -> list[Any]:
    """Returns the results; `wait` contains the wait for other ranks, and none for the arrays or for a GPU."""
    arrays = tuple(jax.numpy.asarray(array) for array in arrays)
    names = options.names
    if any(_only_device(array, name).platform != "cpu" for array, name in zip(arrays, names, strict=True)):
        return _compiled(options)(*arrays)
    for array, name in zip(arrays, names, strict=True):
        dtype_code(array.dtype, name)
    how = Reduction(options.op, options.prescale, options.postscale)
    details = CollectiveOptions(reduction=how, root=options.root, splits=options.splits)
    calls = [Call(None if options.name is None else name, options.process_set) for name in names]
    context = current()
    operation = _COLLECTIVES.named(context, BY_KIND[options.kind], arrays, details, calls)
    with wait:
        results = run_operation(context, operation)
    return list(results[0]) if options.splits is not None else results


@lru_cache(maxsize=1024)
def _compiled(options: ExchangeOptions) -> Any:
    """Runs the collective as part of a program, which knows the streams of a GPU."""
    from sirtaki.jax.primitives import bind  # imported late: it imports this module

    return jax.jit(lambda *arrays: bind(options, arrays))


def _only_device(array: Any, name: str) -> Any:
    devices = array.devices()
    if len(devices) > 1:
        raise UnsupportedError(
            f"'{name}' lies on {len(devices)} devices of this process, but a rank works on one: start a "
            "process for each device (hvdrun -np), and leave arrays whole"
        )
    return next(iter(devices))
