"""The settings that autotune changes, and the values that it tries."""

from __future__ import annotations

from collections.abc import Mapping

from sirtaki.bindings.config import Config
from sirtaki.common.autotune.search import SettingChange

_K, _M = 1 << 10, 1 << 20
# The values that matter. All of these settings can be changed while the ranks run, and none of them changes
# the bits of a sum. A chunk is at most as large as a slot of the shared region, 1 MiB.
_VALUES: dict[str, tuple[str, ...]] = {
    "hand_over": ("early", "late"),
    "chunk_bytes": (f"{128 * _K}", f"{256 * _K}", f"{512 * _K}", f"{_M}"),
    "fusion_threshold": (f"{64 * _M}", f"{4 * _M}"),
    "report_bytes": (f"{_M}", f"{16 * _M}"),
    "report_window": ("0.0003", "0.003"),
    "spin": ("0", "0.0002", "0.002"),
}
TUNED = tuple(_VALUES)


def candidates(start: Mapping[str, str], hands_over: bool = True) -> list[SettingChange]:
    """Returns the changes worth a trial: values that differ from the start.

    The size of a chunk is 0 where the ranks share no memory; then it does not matter. `hands_over`: whether
    the optimizer has a choice when to launch the reduction of gradients.
    """
    return [
        SettingChange(name, value)
        for name, values in _VALUES.items()
        for value in values
        if name != "chunk_bytes" or start[name] != "0"
        if name != "hand_over" or hands_over
        if number_of(name, value) != number_of(name, start[name])
    ]


def number_of(name: str, value: str) -> int:
    """Returns a setting's value as a number: of bytes, of nanoseconds, or of the choice."""
    return Config({name: value}).integer(name)
