"""The helper of `horovod.runner.util.threads` that programs import."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["in_thread"]


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Returns a thread that was started to call `target(*args)`; if `silent`, it shows no exception.

    Raises:
        ValueError: `args` is neither a tuple nor a list.
    """
    if not isinstance(args, tuple | list):
        raise ValueError(f"args has to be a tuple or a list of arguments, not {type(args).__name__}")

    def call() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread
