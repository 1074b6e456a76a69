"""The shape of a rank's state (`observing.state_file`), by which its readers check a file, a frame or a line.

A state may come from another host, or from a file that another process has changed. Readers rely on its types
and show its texts on terminals, so both are checked once, where the state is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sirtaki.bindings.bootstrap.connection.wire import one_line
from sirtaki.bindings.observing.watch_marks import ANSWER

Check = Callable[[Any], Any]  # returns the checked value; raises ValueError if it has another shape

_MOST = 1 << 63  # an absolute value: larger integers raise OverflowError where they meet a float
_LONGEST_LIST = 100_000
_LONGEST_TEXT = 2000  # characters


def count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError("it is no count")
    return value


def positive(value: Any) -> int:
    if not 0 < count(value) < 1 << 31:
        raise ValueError("it is no positive number")
    return int(value)


def real(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) >= _MOST:
        raise ValueError("it is no finite number")
    return float(value)


def flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("it is neither true nor false")
    return value


def text(value: Any) -> str:
    """Returns a text as a single line without control characters, so that no terminal obeys it."""
    if type(value) is not str:
        raise ValueError("it is no text")
    return one_line(value, _LONGEST_TEXT)


def maybe(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def list_of(check: Check) -> Check:
    def checked(value: Any) -> list[Any]:
        if type(value) is not list or len(value) > _LONGEST_LIST:
            raise ValueError("it is no list")
        return [check(element) for element in value]

    return checked


def row_of(*checks: Check) -> Check:
    def checked(value: Any) -> list[Any]:
        if type(value) is not list or len(value) != len(checks):
            raise ValueError(f"it is no row of {len(checks)}")
        return [check(element) for check, element in zip(checks, value, strict=True)]

    return checked


def table_of(check: Check) -> Check:
    def checked(value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) > _LONGEST_LIST:
            raise ValueError("it is no object")
        return {text(name): check(element) for name, element in value.items()}

    return checked


def fields_of(checks: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Returns a check for an object with these fields; the check drops all other fields."""

    def checked(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise ValueError("it is no object")
        found = {}
        for name, check in {**checks, **(optional or {})}.items():
            if name in value:
                try:
                    found[name] = check(value[name])
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            elif name in checks:
                raise ValueError(f"it has no {name}")
        return found

    return checked


def durations(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = fields_of(
        {"bounds": list_of(real), "counts": list_of(count), "total_seconds": real}
    )(value)
    if len(found["counts"]) != len(found["bounds"]) + 1:
        raise ValueError("it has not one count more than bounds")
    return found


_SHOWN: dict[str, Check] = {
    **dict.fromkeys(("time", "look_seconds", "waiting_seconds", "moving_seconds", "late_seconds"), real),
    "pid": positive,
    **dict.fromkeys(("rank", "size", "generation"), count),
    **dict.fromkeys(("operations", "failed", "bytes", "stalls", "late_times"), count),
    **dict.fromkeys(("host", "last_change", "line"), text),
    "stack": list_of(text),
    "activity": fields_of(
        {
            "operations": count,
            "name": text,
            "kind": text,
            "process_set": count,
            "is_agreed": flag,
            "seconds": real,
        }
    ),
    "steps": fields_of(
        {
            "count": count,
            "number": count,
            "times": durations,
            "last_seconds": real,
            "age_seconds": real,
            "exposed_seconds": maybe(real),
            "productive_seconds": real,
        }
    ),
}
_VIEWS: dict[str, Check] = {
    "sent": list_of(fields_of({"peer_host": text, "transport": text, "bytes": count})),
    "tensors": list_of(row_of(text, positive, maybe(real), real, real)),
}
_PROCESS: dict[str, Check] = {"cpu_seconds": real, "memory_bytes": count, "is_stopped": flag, "begin": real}
# Values that stay on the rank's host, where its metrics are served.
OF_METRICS: dict[str, Check] = {
    "by_backend": list_of(
        fields_of({"kind": text, "backend": text, "operations": count, "failed": count, "bytes": count})
    ),
    "wait": durations,
    "transfer": durations,
    "recoveries": table_of(list_of(real)),
    **dict.fromkeys(("plans", "cache_hits", "cache_misses", "ranks_lost"), count),
}
_STATE = {**_SHOWN, **_VIEWS, "is_member": flag}
_ANSWER = {ANSWER: fields_of({"number": count}, dict.fromkeys(("file", "note", "error"), text))}

process_shape = fields_of(_PROCESS)  # of `states.ProcessState`
sample_shape = fields_of({**_SHOWN, **_PROCESS, "is_up": flag}, _VIEWS)  # of `top.snapshot.RankSample`
remote_state = fields_of(_STATE, _ANSWER)
own_state = fields_of({**_STATE, **OF_METRICS}, _ANSWER)
