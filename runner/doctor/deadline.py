"""A deadline for a function that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from sirtaki.runner.doctor.decoding import line

_T = TypeVar("_T")


def answer_within(seconds: float, function: Callable[[], _T]) -> tuple[_T | None, str]:
    """Calls a function; returns its result, or None and the reason why there is none.

    A function that hangs, for example in a name server that does not answer, is left behind in its thread.
    """
    results: list[tuple[_T | None, str]] = []

    def work() -> None:
        try:
            results.append((function(), ""))
        except Exception as error:  # whatever a host does, the other topics count
            results.append((None, line(f"{type(error).__name__}: {error}")))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else (None, f"no answer within {seconds:g} s")
