"""The collectives as JAX primitives: shapes, derivatives and batches. Outside jit they run at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from sirtaki.bindings import request as core
from sirtaki.bindings.context import current, process
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.ops.collectives import Collectives
from sirtaki.common.ops.handles import run as run_operation
from sirtaki.common.ops.requests import BY_KIND, Call, CollectiveOptions, Reduction
from sirtaki.common.training.shares import refuse_derivative
from sirtaki.jax.ops import arrays as adapter
from sirtaki.jax.ops import lowering, target
from sirtaki.jax.ops.exchange_options import KINDS, ExchangeOptions, dtype_code, result_shape
from sirtaki.jax.ops.gpus import use_own_gpu
from sirtaki.jax.ops.programs import note_size

# ---- Collectives outside jit: they call the core directly, with the arrays' own memory -----------------


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

    return jax.jit(lambda *arrays: bind(options, arrays))


def _only_device(array: Any, name: str) -> Any:
    devices = array.devices()
    if len(devices) > 1:
        raise UnsupportedError(
            f"'{name}' lies on {len(devices)} devices of this process, but a rank works on one: start a "
            "process for each device (hvdrun -np), and leave arrays whole"
        )
    return next(iter(devices))


# ---- The collectives as JAX primitives: shapes, derivatives and batches. Outside jit they run at -------


_LINEAR_OPS = (core.SUM, core.AVERAGE)


def bind(options: ExchangeOptions, arrays: Sequence[Any]) -> list[Any]:
    """Returns the results of a collective over these arrays."""
    return PRIMITIVES[options.kind].bind(*arrays, options=options) if arrays else []


def _shapes(*avals: Any, options: ExchangeOptions) -> list[Any]:
    if options.members:  # shapes depend on it
        note_size()
    shaped = []
    for aval, name in zip(avals, options.names, strict=True):
        dtype_code(aval.dtype, name)
        shaped.append(jax.core.ShapedArray(result_shape(options, aval.shape, name), aval.dtype))
    return shaped


def _derivative(
    primals: Sequence[Any], tangents: Sequence[Any], *, options: ExchangeOptions
) -> tuple[Any, Any]:
    """Applies the linear operation to tangents as to values. Tangents zero on all ranks are not sent."""
    refuse_derivative()
    results = bind(options, primals)
    places = [place for place, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    reduces = options.kind in (core.ALLREDUCE, core.REDUCESCATTER)
    if places and reduces and options.op not in _LINEAR_OPS:
        raise NotImplementedError(
            f"'{options.names[0]}': there is no derivative of {KINDS[options.kind]} with this op; use Sum or "
            "Average, or jax.lax.stop_gradient"
        )
    moved = dict(zip(places, bind(options.of(places), [tangents[place] for place in places]), strict=True))
    return results, [
        moved[place] if place in moved else ad.Zero(jax.core.ShapedArray(result.shape, tangent.aval.dtype))
        for place, (result, tangent) in enumerate(zip(results, tangents, strict=True))
    ]


def _transpose(cotangents: Sequence[Any], *operands: Any, options: ExchangeOptions) -> list[Any]:
    places = [place for place, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    sent = bind(_transposed(options).of(places), [cotangents[place] for place in places])
    if options.kind == core.BROADCAST:
        note_size()
        is_root = current().rank == options.root  # a factor, so that all ranks' programs have the same steps
        sent = [jnp.asarray(is_root, cotangent.dtype) * cotangent for cotangent in sent]
    moved = dict(zip(places, sent, strict=True))
    return [
        moved[place] if place in moved else ad.Zero(operand.aval) for place, operand in enumerate(operands)
    ]


def _transposed(options: ExchangeOptions) -> ExchangeOptions:
    """Returns the options for derivatives: of the sum of all ranks' losses, by each rank's operand."""
    if options.kind == core.ALLGATHER:
        return options._replace(kind=core.REDUCESCATTER, op=core.SUM)
    if options.kind == core.BROADCAST:
        return options._replace(kind=core.ALLREDUCE, op=core.SUM)
    if options.kind == core.REDUCESCATTER:
        return options._replace(kind=core.ALLGATHER)
    return options


def _scatter_transpose(cotangents: Sequence[Any], *operands: Any, options: ExchangeOptions) -> list[Any]:
    """Transposes a scatter. A gather does not scale, so the scaling is done before it."""
    factor = options.prescale * options.postscale / (options.members if options.op == core.AVERAGE else 1)
    scaled = [c if type(c) is ad.Zero else c * jnp.asarray(factor, c.dtype) for c in cotangents]
    return _transpose(scaled, *operands, options=options)


def _batch(axis: int) -> Callable[..., Any]:
    """Returns the rule that exchanges a batch as a single array, with the batch axis behind any rows."""

    def rule(
        arrays: Sequence[Any], axes: Sequence[int | None], *, options: ExchangeOptions
    ) -> tuple[Any, Any]:
        if options.op == core.ADASUM and options.kind == core.ALLREDUCE:
            raise NotImplementedError(
                "Adasum combines whole arrays, so vmap cannot batch it; use jax.lax.map"
            )
        for array, at, name in zip(arrays, axes, options.names, strict=True):
            if axis and at is not None and array.ndim == 1:
                raise ValueError(f"'{name}' has no dimensions inside vmap: reshape it to (1,)")
        moved = [a if at is None else jnp.moveaxis(a, at, axis) for a, at in zip(arrays, axes, strict=True)]
        return bind(options, moved), [None if at is None else axis for at in axes]

    return rule


def _define(kind: int) -> Primitive:
    primitive = Primitive(f"sirtaki_{KINDS[kind]}")
    primitive.multiple_results = True
    primitive.def_impl(run)
    primitive.def_abstract_eval(_shapes)
    lowering.register(primitive)
    ad.primitive_jvps[primitive] = _derivative
    ad.primitive_transposes[primitive] = _scatter_transpose if kind == core.REDUCESCATTER else _transpose
    batching.primitive_batchers[primitive] = _batch(0 if kind in (core.ALLREDUCE, core.BROADCAST) else 1)
    return primitive


target.register()
lowering.name_when_lowered()
process.after_init.append(use_own_gpu)
PRIMITIVES = {kind: _define(kind) for kind in KINDS}
