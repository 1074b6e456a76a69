"""`horovod.run`: ranks that a program starts itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sirtaki.common.exceptions import UnsupportedError

__all__ = ["run"]


def run(*args: Any, **kwargs: Any) -> Any:
    """Calls a function on ranks that it starts, and returns their results: `sirtaki.run`.

    Raises:
        UnsupportedError: this version of sirtaki has no `run`.
    """
    own = getattr(import_module("sirtaki"), "run", None)
    if own is None:
        raise UnsupportedError(
            "horovod.run stands for sirtaki.run, which this version of sirtaki does not have: start the "
            "program with hvdrun -np N --as-horovod python train.py"
        )
    return own(*args, **kwargs)
