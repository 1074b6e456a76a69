"""Removes secrets from what is shown, sent or written to a report."""

from __future__ import annotations

import re
from collections.abc import Mapping

REMOVED = "<removed>"
_SECRET_NAME = re.compile(r"KEY(?!_FILE)|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
# A job's key, a password in an address, and what follows such a word in a text.
_SECRET_TEXT = re.compile(
    r"\b[0-9a-fA-F]{64}\b|(?<=://)[^/\s@]+(?=@)|(?<=password=)\S+|(?<=token=)\S+|(?<=secret=)\S+"
)


def redacted(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns variables without the values of those whose name, or whose value, looks like a secret."""
    return {
        name: REMOVED if _SECRET_NAME.search(name) else redact(value) for name, value in variables.items()
    }


def redact(text: str) -> str:
    """Returns a text without keys and passwords."""
    return _SECRET_TEXT.sub(REMOVED, text)
