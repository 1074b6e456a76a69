"""Settings that change while the ranks run. None of them has an effect on a result."""

from __future__ import annotations

from sirtaki.bindings.config import call
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import knobs, lib


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
