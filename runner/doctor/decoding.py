"""Reads dataclasses of facts from JSON that another host sent: bounded, typed, without control characters."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from sirtaki.bindings.bootstrap.connection.wire import printable

MAX_TEXT, MAX_ENTRIES = 1000, 256
MAX_ADDRESSES = 64  # of a listener
_MAX_NUMBER = 1 << 62
_T = TypeVar("_T")


def decode(cls: type[_T], value: object) -> _T:
    """Returns an object of a dataclass. Fields that it does not have are ignored.

    Raises:
        ValueError: a field is missing, of another type, or too large.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{cls.__name__} is no object")
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls) if field.name in value]  # type: ignore[arg-type]
    try:
        return cls(**{name: _decode(hints[name], value[name]) for name in names})
    except TypeError:
        raise ValueError(f"{cls.__name__} lacks a field") from None


def line(value: object, limit: int = MAX_TEXT) -> str:
    """Converts text from another host to a single printable line."""
    return printable(" ".join(str(value)[: 2 * limit].split()), limit)


def shortened(value: Any) -> Any:
    """Returns a value for JSON, with lists and objects cut to the number of entries that `decode` accepts."""
    if isinstance(value, dict):
        return {name: shortened(item) for name, item in list(value.items())[:MAX_ENTRIES]}
    if isinstance(value, (list, tuple)):
        return [shortened(item) for item in value[:MAX_ENTRIES]]
    return value


def _decode(hint: Any, value: object) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else _decode(arguments[0], value)
    if is_dataclass(hint) and isinstance(hint, type):
        return decode(hint, value)
    if origin is tuple:
        return tuple(_decode(arguments[0], item) for item in _bounded(value, list))
    if origin is Mapping:
        entries = _bounded(value, dict)
        return {_decode(arguments[0], name): _decode(arguments[1], entry) for name, entry in entries.items()}
    return _scalar(hint, value)


def _bounded(value: object, kind: type) -> Any:
    if not isinstance(value, kind) or len(value) > MAX_ENTRIES:  # type: ignore[arg-type]
        raise ValueError(f"there is no {kind.__name__} of at most {MAX_ENTRIES} entries")
    return value


def _scalar(hint: Any, value: object) -> Any:
    if hint is str and isinstance(value, str):
        return line(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and type(value) is int and abs(value) <= _MAX_NUMBER:
        return value
    if hint is float and type(value) in (int, float) and abs(value) <= _MAX_NUMBER:  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    raise ValueError(f"{line(value, 100)!r} is no {getattr(hint, '__name__', hint)}")


# ---- Removes secrets from what is shown, sent or written to a report -----------------------------------


REMOVED = "<removed>"
_SECRET_NAME = re.compile(r"KEY(?!_FILE)|TOKEN|SECRET|PASSW|PWD|AUTH|CREDENTIAL", re.IGNORECASE)
_WORD = r"(?:passw(?:or)?d|passphrase|pwd|token|secret|api[_-]?key)[\w-]{0,40}"
_VALUE = rf"""(?!{REMOVED})(?:"[^"]*"|'[^']*'|[^\s"']+)"""
# A job's key, a password in an address, and what follows such a word in a text, in an option or in a header.
_SECRET_TEXT = re.compile(
    r"\b[0-9a-f]{64}\b|(?<=://)[^/\s@]+(?=@)"
    rf"|({_WORD}(?:=|[\"']\s?:\s?)|--[\w-]{{0,40}}{_WORD}\s+|bearer\s+|authorization:\s?\w+\s+){_VALUE}",
    re.IGNORECASE,
)


def redacted(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns variables with the values removed where a name, or a value, looks like a secret."""
    return {
        name: REMOVED if _SECRET_NAME.search(name) else redact(value) for name, value in variables.items()
    }


def redact(text: str) -> str:
    """Returns a text without keys and passwords."""
    return _SECRET_TEXT.sub(lambda match: f"{match[1] or ''}{REMOVED}", text)


def redact_all(value: Any) -> Any:
    """Returns a value of JSON in which each text is redacted."""
    if isinstance(value, dict):
        return {name: redact_all(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_all(item) for item in value]
    return redact(value) if isinstance(value, str) else value
