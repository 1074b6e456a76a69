"""Notices calls of modules while parameters are in flight."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from sirtaki.torch.overlapped.parameter import ParameterInFlight, land


class _Watch:
    """A hook of all modules, which exists only while a flight is open: it costs each call a microsecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: set[int] = set()
        self._hook: Any = None

    def begin(self, flight: int) -> None:
        """Watches for a flight, given by a number of its own."""
        with self._lock:
            self._flights.add(flight)
            if self._hook is None:
                self._hook = register_module_forward_pre_hook(_land_parameters_of)

    def end(self, flight: int) -> None:
        """Ends the watch for a flight."""
        with self._lock:
            self._flights.discard(flight)
            if self._hook is not None and not self._flights:
                self._hook.remove()
                self._hook = None


WATCH = _Watch()


def _land_parameters_of(module: torch.nn.Module, _: Any) -> None:
    # TorchScript calls the parts of a module without hooks.
    is_whole = isinstance(module, torch.jit.ScriptModule)
    for parameter in module.parameters() if is_whole else module._parameters.values():
        if type(parameter) is ParameterInFlight:
            land(parameter)
