"""Pickles functions with the names of their files, which cloudpickle 3.1.3 leaves out and tracebacks need."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any


def import_cloudpickle() -> Any:
    """Returns the module. Raises ImportError, with the command that installs it."""
    try:
        import cloudpickle
    except ImportError:
        raise ImportError(
            "sirtaki.run sends the function to the ranks with cloudpickle, which is not installed: "
            "pip install cloudpickle"
        ) from None
    return cloudpickle


def dump(value: object, file: Any) -> None:
    """Pickles a value into a file, functions of the program by value."""
    base: Any = import_cloudpickle().Pickler
    reduce: Callable[[CodeType], tuple[Any, ...]] = base.dispatch_table[CodeType]

    def reduced(code: CodeType) -> tuple[Any, ...]:
        return _code_of_file, (code.co_filename, *reduce(code))

    table = ChainMap({CodeType: reduced}, base.dispatch_table)
    type("Pickler", (base,), {"dispatch_table": table})(file).dump(value)


def _code_of_file(name: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=name)
