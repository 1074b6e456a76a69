"""A call in a file without a name: the function, its arguments, and what a rank needs to load them."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import linecache
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from sirtaki.runner.function.pickling import dump, import_cloudpickle

_LARGEST_VARIABLE = 100 * 1000 * 1000  # bytes
_LARGEST_SOURCES = 1 << 20  # characters
_ADVICE = "load it inside the function, or, if every rank needs it, pass it in args"


@dataclass(frozen=True)
class FunctionCall:
    """A call.

    Attributes:
        function, args, kwargs: the function and its arguments.
        definitions: functions and classes of the program that has made the call, by name.
        sources: lines of code that exist in memory only, such as those of a notebook's cells, by file name.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    definitions: dict[str, Any]
    sources: dict[str, list[str]]


class _Counter:
    """A file that only counts the bytes written to it."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self.size += count
        return count


def write_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Writes a call to a new file in memory, and returns its descriptor.

    Raises:
        ValueError: the function uses a variable that is too large to travel with it.
        TypeError: something cannot be pickled; the text names it.
        ImportError: cloudpickle is not installed.
    """
    import_cloudpickle()
    for name, value in captured_by(function):
        _check_size(name, _size_in_memory(value))
    descriptor = os.memfd_create("sirtaki-call")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            try:
                definitions = definitions_for(function, *map(type, [*args, *kwargs.values()]))
                dump(FunctionCall(function, args, kwargs, definitions, _sources()), file)
            except Exception as error:
                raise _explained(error, function, args, kwargs) from error
        if os.fstat(descriptor).st_size > _LARGEST_VARIABLE:
            for name, value in captured_by(function):
                _check_size(name, _pickled_size(value))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Returns a call as bytes. Raises as `write_call`."""
    with open(write_call(function, args, kwargs), "rb") as file:
        file.seek(0)
        return file.read()


def python_version() -> str:
    """Returns the version that has to be equal: functions travel as bytecode."""
    return f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"


def _sources() -> dict[str, list[str]]:
    """Returns the lines of code that exist in memory only: the tracebacks of ranks show them."""
    found: dict[str, list[str]] = {}
    left = _LARGEST_SOURCES
    for name, entry in reversed(list(linecache.cache.items())):
        if len(entry) == 4 and entry[1] is None and (left := left - entry[0]) >= 0:
            found[name] = list(entry[2])
    return found


def settle(call: FunctionCall) -> None:
    """Makes this process resemble the program that has made the call.

    `pickle` finds the program's functions and classes in `__main__`, and tracebacks show its lines.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(call.definitions)
    show_sources(call)


def show_sources(call: FunctionCall) -> None:
    """Makes tracebacks show the lines of the program that has made the call."""
    for name, lines in call.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _size_in_memory(value: object) -> int:
    """Returns the size of an array or tensor in bytes, 0 of anything else."""
    size = getattr(value, "nbytes", 0) if not isinstance(value, type) else 0
    return size if isinstance(size, int) else 0


def _pickled_size(value: object) -> int:
    counter = _Counter()
    dump(value, counter)
    return counter.size


def _check_size(name: str, size: int) -> None:
    if size > _LARGEST_VARIABLE:
        raise ValueError(
            f"the function uses the variable '{name}' of {size / 1e6:.0f} MB, and a variable of more than "
            f"{_LARGEST_VARIABLE / 1e6:.0f} MB does not travel with the function: {_ADVICE}"
        )


def _explained(
    error: Exception, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TypeError:
    """Returns an error that names what cannot be sent."""
    arguments = [(f"args[{index}]", value) for index, value in enumerate(args)]
    arguments += [(f"kwargs['{name}']", value) for name, value in kwargs.items()]
    variables = [(f"its variable '{name}'", value) for name, value in captured_by(function)]
    what = _first_unpicklable([*variables, *arguments])
    return TypeError(
        f"the function cannot be sent to the ranks{what}: {error}; objects such as locks, open files and "
        "sockets have to be created inside the function"
    )


def _first_unpicklable(candidates: Iterable[tuple[str, object]]) -> str:
    for name, value in candidates:
        size = None
        with contextlib.suppress(Exception):
            size = _pickled_size(value)
        if size is None:
            return f" because of {name}, a {type(value).__name__}"
    return ""


# ---- The variables that a function carries along when cloudpickle sends it by value --------------------

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
        for item in used
        for _, value in [("", item), *_walk(item)]
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


def _variables_of(item: object) -> Iterator[tuple[str, Any]]:
    """Yields the variables that a function or class uses directly."""
    if isinstance(item, functools.partial):
        yield from [("the function of functools.partial", item.func), *item.keywords.items()]
        yield from (
            (f"argument {index} of functools.partial", item.args[index]) for index in range(len(item.args))
        )
    elif inspect.ismethod(item):
        yield from [(item.__func__.__name__, item.__func__), ("self", item.__self__)]
    elif inspect.isclass(item):
        yield from ((name, value) for name, value in vars(item).items() if _is_of_user(name, value))
    elif isinstance(item, FunctionType):
        names = set(_globals_in(item.__code__)) & item.__globals__.keys()
        yield from ((name, item.__globals__[name]) for name in sorted(names))
        for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
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
    """Returns whether an attribute of a class was written by the user, not made by Python."""
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
