"""Results that the core has allocated."""

from __future__ import annotations

from typing import Any, NamedTuple


class Output(NamedTuple):
    """A result that the core allocated. The buffer owns it: the memory lives as long as the buffer does."""

    buffer: Any
    dtype: int
    shape: tuple[int, ...]


class DeviceOutput(NamedTuple):
    """A result that the core allocated on a GPU. The core owns its memory until the request is released."""

    address: int
    bytes: int
    dtype: int
    shape: tuple[int, ...]
