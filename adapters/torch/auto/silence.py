"""Keeps a fork that computes part of a batch from writing: the rank itself writes what the step writes."""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import stat
import sys
from collections.abc import Callable
from typing import Any

import torch

_CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.truncate"}


def silence(fail: Callable[[str], None]) -> None:
    """Drops what this process writes to files and its outputs from now on; calls `fail` before it deletes."""
    silent = os.open(os.devnull, os.O_RDWR)
    for entry in os.listdir("/proc/self/fd"):
        descriptor = int(entry)
        if descriptor in (1, 2) or _is_written_file(descriptor):
            os.dup2(silent, descriptor)
    opened: Any = io.open

    def harmless(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+"):
            file, mode = os.devnull, mode.replace("x", "w")
        return opened(file, mode, *args, **kwargs)

    builtins.open = io.open = harmless
    torch.save = lambda *args, **kwargs: None

    def audited(event: str, arguments: Any) -> None:
        if event in _CHANGES:
            fail(f"the step changes the file {arguments[0]!r} while a batch is computed twice")

    sys.addaudithook(audited)


def _is_written_file(descriptor: int) -> bool:
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        return bool(flags & os.O_ACCMODE) and stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:  # the folder that was listed
        return False
