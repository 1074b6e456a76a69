"""The variables that a function carries along when cloudpickle sends it by value."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_OWN_SCRIPT = "__main__"
_GLOBAL_OPERATIONS = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"}


def captured_by(function: object) -> Iterator[tuple[str, Any]]:
    """Yields the global and enclosing variables that a function uses, with their names.

    Functions and classes of the user's own program or notebook carry their variables along, and so do those
    that they use; functions of modules do not, because every rank imports the module.
    """
    return ((name, value) for name, value in _walk(function) if not _travels_by_value(value))


def definitions_for(*used: object) -> dict[str, Any]:
    """Returns the functions and classes of the user's own program in `used`, and what these use, by name."""
    return {
        value.__name__: value
        for one in used
        for _, value in [("", one), *_walk(one)]
        if isinstance(value, FunctionType | type)
        and value.__module__ == _OWN_SCRIPT
        and value.__qualname__ == value.__name__
    }


def _walk(function: object) -> Iterator[tuple[str, Any]]:
    """Yields everything that travels with a function by value, each once, with the name of its variable."""
    pending, seen = [function], {id(function)}
    while pending:
        for name, value in _variables_of(pending.pop()):
            if id(value) in seen:
                continue
            seen.add(id(value))
            if _travels_by_value(value):
                pending.append(value)
            yield name, value


def _variables_of(one: object) -> Iterator[tuple[str, Any]]:
    """Yields the variables that one function or class uses itself."""
    if isinstance(one, functools.partial):
        yield from [("the function of functools.partial", one.func), *one.keywords.items()]
        yield from (
            (f"argument {index} of functools.partial", one.args[index]) for index in range(len(one.args))
        )
    elif inspect.ismethod(one):
        yield from [(one.__func__.__name__, one.__func__), ("self", one.__self__)]
    elif inspect.isclass(one):
        yield from ((name, value) for name, value in vars(one).items() if _is_of_user(name, value))
    elif isinstance(one, FunctionType):
        names = set(_globals_in(one.__code__)) & one.__globals__.keys()
        yield from ((name, one.__globals__[name]) for name in sorted(names))
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # it has no value yet
                continue


def _globals_in(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_OPERATIONS:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_in(constant)


def _is_of_user(name: str, value: object) -> bool:
    """Returns whether an attribute of a class is the user's, and not one that Python has made."""
    return isinstance(value, FunctionType) or not name.startswith("__")


def _travels_by_value(value: object) -> bool:
    if isinstance(value, functools.partial) or inspect.ismethod(value):
        return True
    if not isinstance(value, FunctionType | type):
        return False
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return value.__module__ == _OWN_SCRIPT or found is not value
