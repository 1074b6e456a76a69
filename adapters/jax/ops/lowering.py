"""Lowers collectives to calls in compiled programs, and keeps the ranks' programs consistent.

**Names.** Ranks match operations by their names. A program's names must be the same on all ranks, regardless
of which of them compiles it again or takes it from a cache, and must distinguish the operations that may run
at the same time. So names are assigned when a program has been lowered as a whole: in its order, as if all
its functions were inlined, the second call of a name gets the number 2, and so on. A function that is called
twice becomes two. Nothing counts across programs, and nothing at run time: the iterations of a loop reuse one
name, and so do programs, which XLA runs one after another.

**Order.** Calls that do not depend on each other may start in any order, which differs between ranks. On the
CPU none blocks a thread, so each eventually starts on every rank. There is one exception: a small program
runs its calls one by one, each when the last has ended. Its order is XLA's choice, which may depend on shapes
that only this rank has. So small calls, and the first ones of each block, wait for their predecessor in the
order of the program, by a value that carries no data. On a GPU a call blocks the thread that launches the
program until all ranks have launched the operation, so all calls of a block wait for their predecessor.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from sirtaki.bindings import request as core
from sirtaki.bindings.context import find
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.autotune import is_tuned
from sirtaki.jax import _private
from sirtaki.jax._private import ir
from sirtaki.jax.ops.exchange_options import ExchangeOptions
from sirtaki.jax.ops.target import TARGET

_ORDERED_CALLS = 16  # per block; XLA runs at most 8 steps one by one, or more if all have little data
_SMALL = 4096  # bytes
_LOWERED = _private.LOWERED_EVENT
_NOT_NUMBERED = -1  # rejected by the core: calls without a number would be mistaken for each other
_CONFIGURATIONS = ("mhlo.backend_config", "backend_config")  # the attribute's name in different versions


class _Lowered:
    """A module that is being lowered, with the last call of each of its blocks."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.blocks: list[list[Any]] = []  # [block, calls so far, the value that orders the next one]

    def last(self, block: Any) -> list[Any]:
        for entry in self.blocks:
            if entry[0] == block:
                return entry
        self.blocks.append([block, 0, None])
        return self.blocks[-1]


class _Modules(threading.local):
    def __init__(self) -> None:
        self.unnamed: list[_Lowered] = []

    def current(self, module: Any) -> _Lowered:
        for lowered in self.unnamed:
            if lowered.module is module:
                return lowered
        self.unnamed.append(_Lowered(module))
        return self.unnamed[-1]


_modules = _Modules()


def lower(on_gpu: bool) -> Callable[..., Any]:
    """Returns the rule that lowers a call of a primitive with `options`."""

    def rule(ctx: Any, *operands: Any, options: ExchangeOptions) -> Sequence[Any]:
        _refuse_several_devices(ctx.module_context.axis_context, options)
        entry = _modules.current(ctx.module_context.module).last(ir.InsertionPoint.current.block)
        _, calls, link = entry
        smallest = min((_bytes(aval) for aval in ctx.avals_in), default=0)
        is_free = not on_gpu and calls >= _ORDERED_CALLS and smallest > _SMALL
        links = [] if link is None or is_free else [link]
        link_aval = jax.core.ShapedArray((), np.dtype(np.int32))
        in_place = options.kind in (core.ALLREDUCE, core.BROADCAST)
        call = jax.ffi.ffi_lowering(
            TARGET,
            has_side_effect=True,
            operand_output_aliases={index: index for index in range(len(operands))} if in_place else None,
        )
        extended = ctx.replace(
            avals_in=[*ctx.avals_in, *[link_aval] * len(links)], avals_out=[*ctx.avals_out, link_aval]
        )
        *results, link = call(extended, *operands, *links, **_attributes(options, on_gpu))
        entry[1:] = [calls + 1, link]
        return results

    return rule


def _attributes(options: ExchangeOptions, on_gpu: bool) -> dict[str, Any]:
    return {
        "kind": options.kind,
        "reduce_op": options.op,
        "root": options.root,
        "process_set": options.process_set,
        "members": options.members,
        "number": _NOT_NUMBERED,
        "count": len(options.paths),
        "ends_step": _number_of_optimizer(options),
        "prescale": float(options.prescale),
        "postscale": float(options.postscale),
        "names": "\n".join(options.names),
    }


def _number_of_optimizer(options: ExchangeOptions) -> int:
    """Returns 0 for an exchange without a step, and 1 for any optimizer with steps that nothing measures.

    Other numbers count the optimizers of a process, so that programs would differ, and miss JAX's persistent
    cache, from one to the next.
    """
    context = find()
    if options.stepper is None or context is None or not is_tuned(context):
        return int(options.ends_step)
    return options.stepper.number


def _bytes(aval: Any) -> int:
    return aval.size * np.dtype(aval.dtype).itemsize


def _refuse_several_devices(axes: Any, options: ExchangeOptions) -> None:
    mesh, environment = getattr(axes, "mesh", None), getattr(axes, "axis_env", None)
    devices = getattr(axes, "num_devices", None) or getattr(mesh, "size", None)
    devices = devices or getattr(environment, "nreps", None) or 1
    if devices > 1:
        raise UnsupportedError(
            f"'{options.names[0]}' is part of a program for {devices} devices of this process, but a rank "
            "works on one: start a process for each device (hvdrun -np), instead of sharding arrays or "
            "using shard_map or pmap"
        )


def _name_all(event: str, *_: Any, **__: Any) -> None:
    if event == _LOWERED:
        lowered, _modules.unnamed = _modules.unnamed, []
        for program in lowered:
            functions = _functions(program.module)
            if "main" in functions:  # else lowering has failed before "main" existed
                with program.module.context, ir.Location.unknown():
                    _Naming(program.module, functions).function(functions["main"])


def _functions(module: Any) -> dict[str, Any]:
    return {_symbol(op): op for op in module.body.operations if op.operation.name == "func.func"}


def _symbol(op: Any) -> str:
    return ir.StringAttr(op.attributes["sym_name"]).value


class _Naming:
    """The numbering of a module's calls; each call of a function with collectives gets its own copy of it."""

    def __init__(self, module: Any, functions: dict[str, Any]) -> None:
        self._module = module
        self._functions = functions
        self._known: dict[str, bool] = {}  # whether a function has calls
        self._untouched = {
            name: op.operation.clone() for name, op in functions.items() if self._has_calls(name)
        }
        self._used: set[str] = set()
        self._numbers: Counter[tuple[Any, ...]] = Counter()

    def function(self, function: Any) -> None:
        for op in _all_operations(function):
            if _is_collective(op):
                self._number(op)
            elif op.operation.name == "func.call":
                self._follow(op)

    def _has_calls(self, name: str) -> bool:
        if name not in self._known:
            self._known[name] = any(
                _is_collective(op) or (op.operation.name == "func.call" and self._has_calls(_callee(op)))
                for op in _all_operations(self._functions[name])
            )
        return self._known[name]

    def _follow(self, call: Any) -> None:
        name = _callee(call)
        if name not in self._untouched:
            return
        if name in self._used:
            copy = self._untouched[name].clone()
            new = f"{name}_sirtaki_{len(self._used)}"
            copy.attributes["sym_name"] = ir.StringAttr.get(new)
            self._module.body.append(copy)
            call.operation.attributes["callee"] = ir.FlatSymbolRefAttr.get(new)
            self._functions[new] = copy
            name = new
        self._used.add(name)
        self.function(self._functions[name])

    def _number(self, op: Any) -> None:
        key = next(key for key in _CONFIGURATIONS if key in op.operation.attributes)
        configuration = {entry.name: entry.attr for entry in ir.DictAttr(op.operation.attributes[key])}
        names = tuple(str(configuration[part]) for part in ("process_set", "kind", "names"))
        number = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), self._numbers[names])
        self._numbers[names] += 1
        op.operation.attributes[key] = ir.DictAttr.get({**configuration, "number": number})


def _all_operations(op: Any) -> Iterator[Any]:
    for region in op.operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner
                yield from _all_operations(inner)


def _callee(op: Any) -> str:
    return ir.FlatSymbolRefAttr(op.operation.attributes["callee"]).value


def _is_collective(op: Any) -> bool:
    return (
        op.operation.name == "stablehlo.custom_call"
        and ir.StringAttr(op.operation.attributes["call_target_name"]).value == TARGET
    )


def name_when_lowered() -> None:
    """Starts naming each program's calls once it has been lowered."""
    jax.monitoring.register_event_duration_secs_listener(_name_all)


def register(primitive: Any) -> None:
    """Registers these lowering rules for a primitive, on CPUs and on GPUs."""
    for platform in ("cpu", "cuda"):
        rule = lower(platform == "cuda")
        try:
            mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)
        except TypeError:  # older versions lack the argument, and lower each call anew
            mlir.register_lowering(primitive, rule, platform=platform)
