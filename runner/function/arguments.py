"""Checks of the arguments of calls that run a function on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sirtaki.runner.function.errors import RunError

CheckedCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def checked_call(func: Any, args: Any, kwargs: Any, name: str = "func") -> CheckedCall:
    """Returns a function and its arguments. `name` is that of the parameter for the function.

    Raises TypeError if one of them has the wrong type.
    """
    if not callable(func):
        hint = (
            "pass the function itself and its arguments in args, as in sirtaki.run(train, args=(0.1,), np=2)"
        )
        raise TypeError(f"{name} has to be a function, not {type(func).__name__}: {hint}")
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise TypeError(
            f"args has to be a tuple of arguments, not {type(args).__name__}: write args=(value,)"
        )
    if not isinstance(kwargs, Mapping | None) or not all(isinstance(name, str) for name in kwargs or ()):
        raise TypeError("kwargs has to be a dictionary from names of parameters to their values")
    return func, tuple(args), dict(kwargs or {})


def checked_variables(env: Any) -> dict[str, str]:
    """Returns variables for the environment of ranks. Raises TypeError or ValueError if they are none."""
    variables = dict(env or {})
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env has to be a dictionary of strings, but {name!r} is {value!r}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env has {name!r}: {value!r}, which cannot be a variable of an environment")
    return variables


def refuse_inside_a_rank(caller: str) -> None:
    """Raises RunError in a rank of a job that hvdrun or sirtaki.run has started."""
    if "SIRTAKI_RANK" in os.environ and "SIRTAKI_JOB" in os.environ:
        raise RunError(
            f"this is rank {os.environ['SIRTAKI_RANK']} of a job already, and a rank cannot start another "
            f"one: call {caller} outside of the function that it runs, and of programs that hvdrun starts"
        )
