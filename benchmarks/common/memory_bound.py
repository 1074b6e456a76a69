"""The memory-bound prototype: the memory's speed without a library around it (native/memory_bound.cc)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cffi import FFI

ffi = FFI()
ffi.cdef("""
int memory_bound_segment();
void *memory_bound_open(int fd, int rank, int size, int yields);
void memory_bound_allreduce(void *prototype, float *const *tensors, const int64_t *counts, int64_t n);
""")


class MemoryBound:
    """One rank's end of the prototype. All ranks have to make the same calls in the same order."""

    def __init__(self, folder: Path, rank: int, size: int, share: Callable[[Any], Any]) -> None:
        """`share` returns rank 0's object on every rank; all must call it."""
        self._lib = ffi.dlopen(str(folder / "libmemory_bound.so"))
        own = (os.getpid(), self._lib.memory_bound_segment()) if rank == 0 else None
        process, descriptor = share(own)
        if rank:
            descriptor = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
        crowded = size > len(os.sched_getaffinity(0))
        self._prototype = self._lib.memory_bound_open(descriptor, rank, size, crowded)
        if self._prototype == ffi.NULL:
            raise OSError("the memory-bound prototype's segment cannot be mapped")
        self._nothing = ffi.new("float *", 0.0)
        self.barrier = self.bind([int(ffi.cast("uintptr_t", self._nothing))], [1])

    def bind(self, addresses: Sequence[int], counts: Sequence[int]) -> Callable[[], None]:
        """Returns a call that sums these float32 tensors in place over all ranks, one after the other."""
        described = ffi.new("uintptr_t[]", list(addresses)), ffi.new("int64_t[]", list(counts))
        tensors, lengths = ffi.cast("float *const *", described[0]), described[1]
        allreduce, prototype, number = self._lib.memory_bound_allreduce, self._prototype, len(counts)

        def call(_: Any = described) -> None:  # keeps the arrays alive
            allreduce(prototype, tensors, lengths, number)

        return call
