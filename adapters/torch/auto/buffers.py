"""The buffers of layers that a batch changes, which may depend on how it is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sirtaki.torch.auto import rules


class Buffers:
    """The buffers of the modules that are called during a batch."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self._before: dict[tuple[int, str], tuple[Tensor | None, int]] = {}
        self._hook = register_module_forward_pre_hook(self._called)

    def _called(self, module: nn.Module, _: Any) -> None:
        if id(module) not in self.modules:
            number = len(self.modules)
            self.modules[id(module)] = module
            for name, buffer in module.named_buffers(recurse=False):
                self._before[number, name] = (buffer, buffer._version)

    def close(self) -> None:
        self._hook.remove()

    def changed(self) -> dict[tuple[int, str], np.ndarray]:
        """Returns the buffers that have changed, by the number of the module and the name."""
        found = {}
        for number, module in enumerate(self.modules.values()):
            for name, buffer in module.named_buffers(recurse=False):
                before, version = self._before.get((number, name), (None, 0))
                if before is not buffer or version != buffer._version:
                    found[number, name] = _portable(buffer)
        return found

    def difference(self, others: dict[tuple[int, str], np.ndarray]) -> str | None:
        """Returns which buffer is another one after the whole batch than after the part."""
        mine = self.changed()
        modules = list(self.modules.values())
        for key in sorted({*mine, *others}):
            first, second = mine.get(key), others.get(key)
            if first is None or second is None or not _is_close(first, second):
                kind = type(modules[key[0]]).__name__ if key[0] < len(modules) else "a module"
                return f"the buffer {key[1]!r} of {kind}"
        return None


def _portable(buffer: Tensor) -> np.ndarray:
    """Returns a copy that can be pickled: torch's own pickles refer to the memory of the process."""
    wide = buffer.detach()
    return (
        wide.float() if wide.dtype.is_floating_point and wide.element_size() < 4 else wide.clone()
    ).numpy()


def _is_close(first: np.ndarray, second: np.ndarray) -> bool:
    if first.shape != second.shape or first.dtype.kind != "f":
        return np.array_equal(first, second)
    bound = rules.tolerance(torch.as_tensor(first).dtype)
    return np.allclose(first, second, rtol=bound, atol=bound * np.abs(first).max(initial=0.0))
