"""Warnings of one rank: `warnings.catch_warnings` is one for a process, and ranks may be its threads."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

_lock = threading.Lock()
_texts: dict[int, list[str]] = {}  # by thread
_catcher = contextlib.ExitStack()


@contextlib.contextmanager
def warnings_of_this_rank() -> Iterator[list[str]]:
    """Collects the texts of the warnings that the calling thread gives in the block, and shows none.

    A warning from a thread that is no rank goes to all ranks that collect at that time.
    """
    me, texts = threading.get_ident(), list[str]()
    with _lock:
        if not _texts:
            _catcher.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            warnings.showwarning = _keep
        _texts[me] = texts
    try:
        yield texts
    finally:
        with _lock:
            del _texts[me]
            if not _texts:
                _catcher.close()


def _keep(message: Warning | str, *_place: Any) -> None:
    with _lock:
        own = _texts.get(threading.get_ident())
        for texts in [own] if own is not None else list(_texts.values()):
            texts.append(str(message))
