"""CUDA's driver and NCCL, as the core finds them in this process."""

from __future__ import annotations

from typing import NamedTuple

from sirtaki.bindings.library import Config, ffi, lib, text
from sirtaki.bindings.variables import values


class GpuLibrary(NamedTuple):
    """The result of the search for a library.

    `version` is a number in the library's own encoding (libcuda: 12080 is 12.8; libnccl: 22803 is 2.28.3), 0
    if the library cannot be used. `path` is its file, "" if there is none. `text` states the same in a line,
    or what was searched for where, and why it was unsuitable.
    """

    version: int
    path: str
    text: str


class GpuLibraries(NamedTuple):
    """Both libraries, and the number of GPUs that this process sees."""

    cuda: GpuLibrary
    nccl: GpuLibrary
    devices: int


def find_libraries() -> GpuLibraries:
    """Searches for both libraries, with the settings of the environment. Does not initialise any GPU.

    Raises:
        ValueError: a setting in the environment has a wrong value.
    """
    config = Config(values())
    found, devices = ffi.new("srt_gpu_library[2]"), ffi.new("int32_t *")
    lib.srt_gpu_libraries(config.pointer, found, found + 1, devices)
    cuda, nccl = (GpuLibrary(library.version, text(library.path), text(library.text)) for library in found)
    return GpuLibraries(cuda, nccl, devices[0])
