"""torchft as a peer: its settings, and the command that starts ranks as replica groups of one process."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from importlib.metadata import version

Settings = Mapping[str, int]  # milliseconds

# The defaults of the command torchft_lighthouse, of Manager and of ProcessGroupGloo.
DEFAULTS: Settings = {
    "quorum_tick_ms": 100,
    "join_timeout_ms": 60_000,
    "heartbeat_timeout_ms": 5_000,
    "heartbeat_interval_ms": 100,
    "gloo_timeout_ms": 60_000,
}
# Short timeouts that trained on two busy cores. A lost rank breaks the connections of two others only; the
# rest wait for gloo's timeout, and with one of 300 ms, steps fail without a loss. A join timeout of 300 ms
# is no faster; with one of 100 ms, the default of LighthouseServer, slow ranks miss most steps.
SHORT: Settings = {
    **DEFAULTS,
    "quorum_tick_ms": 10,
    "heartbeat_timeout_ms": 300,
    "heartbeat_interval_ms": 50,
    "gloo_timeout_ms": 500,
}
VARIANTS: Mapping[str, Settings] = {"torchft": DEFAULTS, "torchft, short timeouts": SHORT}
LIGHTHOUSE = ("quorum_tick_ms", "join_timeout_ms", "heartbeat_timeout_ms")  # the others are those of a rank


def is_installed() -> bool:
    """Returns whether torchft and what it imports are there; prints how to install it if not."""
    if importlib.util.find_spec("torchft") and importlib.util.find_spec("opentelemetry"):
        return True
    print("no torchft: it is left out (pip install torchft)")
    return False


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "torchft")}


def launcher(ranks: int, settings: Settings) -> list[str]:
    """Returns the start of a command that runs a Python program as replica groups with a lighthouse."""
    return [sys.executable, "-m", "workers.torchft_launcher", str(ranks), json.dumps(dict(settings))]


def describe(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
