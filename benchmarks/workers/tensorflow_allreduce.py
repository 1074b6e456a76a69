"""A rank of benchmarks/tensorflow_allreduce.py: calls the ordered peer's function, which sums a tensor.

Usage: python -m workers.tensorflow_allreduce SOCKET PORTS
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from common.collectives import check, pattern
from common.serving import CompiledCalls, serve

import sirtaki.tensorflow as hvd

CHAINED = 10
SMALL_BYTES = 64 * 1024


def strategy(ports: list[int]) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Returns TensorFlow's own world of the same processes. Must be called before the first operation."""
    workers = [f"127.0.0.1:{port}" for port in ports]
    task = {"type": "worker", "index": hvd.rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    return tf.distribute.MultiWorkerMirroredStrategy()


class Rank(CompiledCalls):
    """The orders that a rank executes."""

    def __init__(self, workers: tf.distribute.MultiWorkerMirroredStrategy) -> None:
        super().__init__()
        self._workers = workers

    def versions(self) -> dict[str, str]:
        """Returns the available peers and their versions."""
        return {"sirtaki": "sirtaki.tensorflow", "MWMS": f"TensorFlow {tf.__version__}"}

    def prepare(self, size: int) -> list[str]:
        """Checks each peer's sum of `size` bytes, then prepares the measurement. Returns the peers."""
        count = size // 4
        source = tf.constant(pattern(count, hvd.rank()))
        self.calls = {"sirtaki": self._of_sirtaki(source), "MWMS": self._of_strategy(source)}
        for call in self.calls.values():
            check("allreduce", np.asarray(call()), count, hvd.rank(), hvd.size())
        if size <= SMALL_BYTES:
            self.calls["alone"] = tf.function(lambda: source + 1)
            self.calls["chained"] = self._chain(source)
        return list(self.calls)

    def _chain(self, source: tf.Tensor) -> Callable[[], Any]:
        def average_often() -> tf.Tensor:
            value = source
            for _ in range(CHAINED):
                value = hvd.allreduce(value)
            return value

        return tf.function(average_often)

    def _of_sirtaki(self, source: tf.Tensor) -> Callable[[], Any]:
        return tf.function(lambda: hvd.allreduce(source, op=hvd.Sum))

    def _of_strategy(self, source: tf.Tensor) -> Callable[[], Any]:
        def of_replica() -> tf.Tensor:
            replica = tf.distribute.get_replica_context()
            return replica.all_reduce(tf.distribute.ReduceOp.SUM, source)

        return tf.function(lambda: self._workers.run(of_replica))


def main() -> None:
    path, ports = sys.argv[1:]
    hvd.init()
    serve(path, hvd.rank(), Rank(strategy([int(port) for port in ports.split(",")])))


if __name__ == "__main__":
    main()
