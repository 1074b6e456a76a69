"""Bounds of facts that another host sent, and the texts that are shown of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from sirtaki.bindings.bootstrap.connection.wire import printable
from sirtaki.runner.observe.typed_json import Bounds, check_of

MAX_TEXT, MAX_ENTRIES = 1000, 256
MAX_ADDRESSES = 64  # of a listener
_T = TypeVar("_T")


def decode(cls: type[_T], value: object, entries: int = MAX_ENTRIES) -> _T:
    """Returns a value of a type, such as a dataclass. Fields that the type does not have are ignored.

    Raises ValueError for another type, or more than `entries` entries of a list or an object.
    """
    hint: Any = cls
    found: _T = check_of(hint, Bounds(entries, MAX_TEXT))(value)
    return found


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
