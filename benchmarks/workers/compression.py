"""A rank of benchmarks/compression.py: averages an array in each format.

Usage: python -m workers.compression SOCKET
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import ml_dtypes
import numpy as np
from common.serving import CompiledCalls, serve

import sirtaki.numpy as hvd
from sirtaki.bindings import request as core
from sirtaki.bindings.error_feedback import quantise
from sirtaki.bindings.library import wire_formats
from sirtaki.common.ops.collectives import Collectives
from sirtaki.common.ops.reduction import Reduction
from sirtaki.common.ops.requests import ALLREDUCE_IN_PLACE, CollectiveOptions
from sirtaki.numpy import arrays

WIRE_FORMATS = {row.name: row.code for row in wire_formats() if row.block}
COLLECTIVES = Collectives(arrays)


class Rank(CompiledCalls):
    """The formats' calls. Each averages the same numbers, which differ between ranks."""

    def prepare(self, size: int) -> dict[str, float]:
        """Makes the calls for arrays of `size` bytes. Returns the relative error of each format's result."""
        rng = np.random.default_rng([hvd.rank(), size])
        given = rng.standard_normal(size // 4, np.float32)
        buffer = np.empty_like(given)
        self.calls = {"float32": lambda: hvd.allreduce_(buffer, name="float32"), "bfloat16": _casting(buffer)}
        for name, code in WIRE_FORMATS.items():
            self.calls[name] = _encoding(buffer, name, code)
            self.calls[f"{name}, feedback"] = _feeding_back(buffer, name, code)
        errors = {}
        for name, call in self.calls.items():
            np.copyto(buffer, given)
            call()
            if name == "float32":
                exact = buffer.copy()
            errors[name] = float(np.linalg.norm(buffer - exact) / np.linalg.norm(exact))
        return errors

    def wire_bytes(self) -> dict[str, int]:
        return {**hvd.stats()["wire_bytes"]}


def _casting(buffer: np.ndarray) -> Callable[[], object]:
    def call() -> None:
        buffer[:] = hvd.allreduce(buffer.astype(ml_dtypes.bfloat16), name="bfloat16")

    return call


def _encoding(buffer: np.ndarray, name: str, code: int) -> Callable[[], object]:
    options = CollectiveOptions(name, reduction=Reduction(core.AVERAGE, wire_format=code))
    return lambda: COLLECTIVES.run(ALLREDUCE_IN_PLACE, buffer, options)


def _feeding_back(buffer: np.ndarray, name: str, code: int) -> Callable[[], object]:
    residuals = np.zeros_like(buffer)
    exchange = _encoding(buffer, name, code)

    def call() -> None:
        quantise(code, buffer.ctypes.data, residuals.ctypes.data, buffer.size)
        exchange()

    return call


def main() -> None:
    hvd.init()
    gc.disable()
    serve(sys.argv[1], hvd.rank(), Rank())


if __name__ == "__main__":
    main()
