"""The core's handler for XLA: found, checked and registered once, when this package is imported."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import jax
import jaxlib

from sirtaki.bindings.library import xla_handler

TARGET = "sirtaki_collective"
_PLATFORMS = {"cpu": 0, "CUDA": 1}


def _interface_version() -> tuple[int, int]:
    """Returns the version of XLA's foreign function interface that jaxlib's own header states.

    XLA rejects handlers of another version, and with them the CPU's whole backend.
    """
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR"))
    return (int(major[1]), int(minor[1])) if major and minor else (0, 0)


def _capsule(address: int) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(address, None, None)


def register() -> None:
    """Registers the handler with XLA.

    Raises:
        ImportError: this jaxlib is older than the supported versions.
    """
    found = tuple(map(int, re.findall(r"\d+", jaxlib.__version__)[:2]))
    version = _interface_version() if found >= (0, 5) else (0, 0)
    for platform, on_gpu in _PLATFORMS.items():
        handler = xla_handler(*version, on_gpu)
        if not handler:
            raise ImportError(
                f"sirtaki.jax needs jax and jaxlib 0.5 or later; this is jaxlib {jaxlib.__version__}"
            )
        jax.ffi.register_ffi_target(TARGET, _capsule(handler), platform=platform)
