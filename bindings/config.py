"""The core's settings, and calls of the core that report errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sirtaki.bindings.errors import error_of
from sirtaki.bindings.library import ffi, knobs, lib, text

if TYPE_CHECKING:
    from sirtaki.bindings.context import Context

LONGEST_SETTING = 4096  # bytes

_OK: int = lib.SRT_OK


class Config:
    """The core's settings, by name."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.pointer: Any = ffi.gc(lib.srt_config_create(), lib.srt_config_destroy)
        for name, value in settings.items():
            call(lib.srt_config_set, self.pointer, name.encode(), value.encode())

    def get(self, name: str) -> str:
        """Returns the value of a setting, as text."""
        value = ffi.new("char[]", LONGEST_SETTING)
        lib.srt_config_get(self.pointer, name.encode(), value, LONGEST_SETTING)
        return text(value)

    def integer(self, name: str) -> int:
        """Returns the value of a setting that is a number: bytes, or nanoseconds of a time."""
        return int(lib.srt_config_integer(self.pointer, name.encode()))


def check(status: int, error: Any) -> None:
    """Raises the error that the core reported through an `srt_error`."""
    if status != _OK:
        raise error_of(status, text(error.text))


def call(function: Any, *arguments: Any) -> None:
    """Calls a function of the core that has an `srt_error` as its last parameter; raises what it reports."""
    error = ffi.new("srt_error *")
    check(function(*arguments, error), error)


# ---- Settings that change while the ranks run. None of them has an effect on a result ------------------


def change(context: Context, name: str, value: str) -> None:
    """Changes a setting on all ranks, from the next decision of rank 0 on: it travels with other news.

    Only rank 0 may call it, in a world with the setting autotune.

    Raises:
        ValueError: another rank, another world, a setting that cannot change, or a wrong value.
    """
    call(lib.srt_change_setting, context.pointer, name.encode(), value.encode())


def in_use(context: Context, name: str) -> str:
    """Returns the value that this rank uses now of a setting that can change."""
    number = lib.srt_live_setting(context.pointer, name.encode())
    return next(knob for knob in knobs() if knob.name == name).text_of(number)
