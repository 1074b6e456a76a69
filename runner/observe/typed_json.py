"""Reads typed values from JSON that another process sent or may have changed.

Values are bounded and finite, and their texts are single lines without control characters, so that readers
can rely on their types and show them on terminals.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints, is_typeddict

from sirtaki.bindings.bootstrap.connection.wire import one_line

Check = Callable[[Any], Any]  # returns the checked value; raises ValueError if it has another shape
_MAX_NUMBER = 1 << 62  # larger integers raise OverflowError where they meet a float


class Bounds(NamedTuple):
    """The most entries of a list or an object, the longest text in characters, and the least integer."""

    entries: int
    text: int
    least: int = -_MAX_NUMBER


@cache
def check_of(hint: Any, bounds: Bounds) -> Check:
    """Returns the check for values of the type that a hint describes, such as a dataclass or a TypedDict."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return partial(_optional, check_of(arguments[0], bounds))
    if is_typeddict(hint):
        return fields_check(get_type_hints(hint), bounds, hint.__optional_keys__)
    if is_dataclass(hint):
        with_default = [
            field.name
            for field in fields(hint)
            if field.default is not MISSING or field.default_factory is not MISSING
        ]
        read = fields_check(get_type_hints(hint), bounds, with_default)
        return lambda value: hint(**read(value))  # type: ignore[operator]
    if origin is tuple and Ellipsis not in arguments:
        return partial(_row, [check_of(part, bounds) for part in arguments])
    if origin in (tuple, list, Sequence):
        return partial(_items, tuple if origin is tuple else list, check_of(arguments[0], bounds), bounds)
    if origin in (dict, Mapping):
        return partial(_entries, check_of(str, bounds), check_of(arguments[1], bounds), bounds)
    return partial(_scalar, hint, bounds)


def fields_check(hints: Mapping[str, Any], bounds: Bounds, optional: Collection[str] = ()) -> Check:
    """Returns the check for an object with fields of these hints; the check drops all other fields."""
    checks = {name: check_of(hint, bounds) for name, hint in hints.items()}

    def check_fields(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise ValueError("it is no object")
        found = {}
        for name, check in checks.items():
            if name in value:
                try:
                    found[name] = check(value[name])
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            elif name not in optional:
                raise ValueError(f"it has no {name}")
        return found

    return check_fields


def _optional(check: Check, value: Any) -> Any:
    return None if value is None else check(value)


def _row(checks: Sequence[Check], value: Any) -> tuple[Any, ...]:
    if type(value) is not list or len(value) != len(checks):
        raise ValueError(f"it is no row of {len(checks)}")
    return tuple(check(element) for check, element in zip(checks, value, strict=True))


def _items(kind: Callable[[Any], Any], check: Check, bounds: Bounds, value: Any) -> Any:
    if type(value) is not list or len(value) > bounds.entries:
        raise ValueError(f"it is no list of at most {bounds.entries} entries")
    return kind(map(check, value))


def _entries(check_name: Check, check: Check, bounds: Bounds, value: Any) -> dict[str, Any]:
    if type(value) is not dict or len(value) > bounds.entries:
        raise ValueError(f"it is no object of at most {bounds.entries} entries")
    return {check_name(name): check(element) for name, element in value.items()}


def _scalar(hint: type, bounds: Bounds, value: Any) -> Any:
    if hint is str and type(value) is str:
        return one_line(value, bounds.text)
    if hint is bool and type(value) is bool:
        return value
    if hint is int and type(value) is int and bounds.least <= value <= _MAX_NUMBER:
        return value
    if hint is float and type(value) in (int, float) and abs(value) <= _MAX_NUMBER:
        return float(value)
    raise ValueError(f"it is no {hint.__name__} within bounds")
