"""Work of a single rank for all ranks, such as writing a file or downloading data."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sirtaki.bindings.default_context import current
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.common.ops.objects import broadcast_object

__all__ = ["is_root", "on_root"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def is_root() -> bool:
    """Returns whether this is rank 0, which writes files and prints. Other ranks do not wait for it.

    Raises NotInitializedError (a ValueError) before init().
    """
    return current().rank == 0


def on_root(
    function: Callable[_Parameters, _Result], *arguments: _Parameters.args, **options: _Parameters.kwargs
) -> _Result:
    """Calls a function on rank 0 alone, while all other ranks wait for it. All ranks must call it.

    For example `hvd.on_root(torch.save, model.state_dict(), "model.pt")`, or `path = hvd.on_root(download)`.

    Returns:
        The function's result, on all ranks: anything that cloudpickle can pickle.

    Raises:
        Exception: on rank 0, the exception of the function.
        HorovodInternalError: on the others, if it raised; the text contains its error.
    """
    name = getattr(function, "__name__", "the function")
    if current().rank:
        failure, result = broadcast_object(None, 0, "on_root")
        if failure:
            raise HorovodInternalError(f"{name}() has failed on rank 0: {failure}")
        return result
    try:
        result = function(*arguments, **options)
    except BaseException as error:
        broadcast_object((f"{type(error).__name__}: {error}", None), 0, "on_root")
        raise
    broadcast_object(("", result), 0, "on_root")
    return result
