"""Pickles calls and results; functions with the names of their files, which cloudpickle 3.1.3 leaves out."""

from __future__ import annotations

import socket
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any

from sirtaki.runner.function.errors import RunError


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


def load_call(data: bytes | bytearray, rank: int, advice: str) -> Any:
    """Returns the call that `rank`, this process, is to make.

    Raises RunError if it cannot be loaded, with `advice` if a module is missing.
    """
    try:
        return import_cloudpickle().loads(data)
    except Exception as error:
        text = f"rank {rank} on {socket.gethostname()} cannot load the function"
        text += f": {type(error).__name__}: {error}"
        raise RunError(text + advice * isinstance(error, ImportError)) from error


def cannot_pickle(result: object, rank: int, error: Exception) -> TypeError:
    """Returns the error for a result that cannot be sent."""
    text = f"the result of rank {rank}, a {type(result).__name__}, cannot be pickled: {error}"
    return TypeError(f"{text}; return plain values, arrays or tensors")


def load_result(data: bytes | bytearray, rank: int, host: str) -> Any:
    """Returns the result of a rank. Raises RunError if it cannot be loaded here."""
    try:
        return import_cloudpickle().loads(data)
    except Exception as error:
        text = f"the result of rank {rank} on {host} cannot be loaded here"
        raise RunError(f"{text}: {type(error).__name__}: {error}") from error
