"""Refusals that name the user's line, equal on all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.ops.objects import gather_objects
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.training.equal_values import Value, require_equal


def line_of(function: Any) -> str:
    """Returns file and line of a function's definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def agree(context: Context, name: str, refusal: str | None) -> None:
    """Raises UnsupportedError on all ranks if any rank refuses. All ranks call it."""
    refusals = gather_objects(context, refusal, name, global_process_set)
    found = next((refusal for refusal in refusals if refusal is not None), None)
    if found is not None:
        raise UnsupportedError(found)


def require_equal_data(
    context: Context, name: str, where: str, values: Sequence[Value], refusal: str | None, advice: str
) -> None:
    """Raises UnsupportedError on all ranks unless they have read the same data. All ranks call it."""
    try:
        require_equal(context, name, values, refusal, advice)
    except ValueError as error:
        raise UnsupportedError(f"{where}: {error}") from None
