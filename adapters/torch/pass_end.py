"""The end of a backward pass."""

from __future__ import annotations

import sys
from collections.abc import Callable


class PassEnd:
    """Autograd's callback at the end of a pass. A pass that raises drops it instead of calling it."""

    def __init__(self, ended: Callable[[], None], raised: Callable[[], None]) -> None:
        self._pass_ended = ended
        self._raised: Callable[[], None] | None = raised

    def __call__(self) -> None:
        self._raised = None
        self._pass_ended()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._raised is not None and not is_finalizing():  # then the names of modules may be None
            self._raised()
