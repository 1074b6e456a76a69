"""The fake libcuda.so.1 and libnccl.so.2, from Python; control.h describes their controls."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2] / "build" / "core"
FOLDER = Path(os.environ.get("CORE_TESTS", TESTS)) / "fake_gpu"


def tensors_on_gpus() -> contextlib.AbstractContextManager[object]:
    """Places torch's tensors on as many GPUs of the fakes as TORCH_TENSORS_ON_GPUS says, or on none."""
    gpus = int(os.environ.get("TORCH_TENSORS_ON_GPUS", "0"))
    if not gpus:
        return contextlib.nullcontext()
    from fake_gpu.tensors import FakeTensors

    return FakeTensors(gpus)


needs_fake = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the fake libraries are not built here; make test builds them"
)


class FakeGpu:
    """The fakes of this process. Creating it loads them, so that the core finds them before any others.

    The setting gpu_libraries may name a folder with another NCCL.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(FOLDER / "libcuda.so.1"))
        if "SIRTAKI_GPU_LIBRARIES" not in os.environ:
            self._nccl = ctypes.CDLL(str(FOLDER / "libnccl.so.2"))
        self._library.fake_gpu_misuse.restype = ctypes.c_char_p
        self._library.fake_gpu_copied.restype = ctypes.c_longlong

    def set(self, setting: str, value: int) -> None:
        self._library.fake_gpu_set(setting.encode(), value)

    def fail(self, function: str, nth: int, result: int) -> None:
        self._library.fake_gpu_fail(function.encode(), nth, result)

    def calls(self, function: str) -> int:
        return int(self._library.fake_gpu_calls(function.encode()))

    def copied(self) -> int:
        return int(self._library.fake_gpu_copied())

    def hold(self, stream: int, held: bool) -> None:
        self._library.fake_gpu_hold(ctypes.c_void_p(stream), int(held))

    def lend(self, address: int, size: int, device: int) -> None:
        self._library.fake_gpu_lend(ctypes.c_void_p(address), ctypes.c_size_t(size), device)

    def take_back(self, address: int) -> None:
        self._library.fake_gpu_take_back(ctypes.c_void_p(address))

    def read(self, stream: int, address: int, size: int) -> None:
        self._library.fake_gpu_read(ctypes.c_void_p(stream), ctypes.c_void_p(address), ctypes.c_size_t(size))

    def misuse(self) -> str:
        return str(self._library.fake_gpu_misuse().decode())

    def alive(self) -> int:
        return int(self._library.fake_gpu_alive())

    def reset(self) -> None:
        self._library.fake_gpu_reset()
