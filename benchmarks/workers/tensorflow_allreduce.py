"""A rank of benchmarks/tensorflow_allreduce.py: calls the ordered peer's function, which sums a tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from common.serving import CompiledCalls

import sirtaki.tensorflow as hvd
from sirtaki.bench.patterns import Patterns
from sirtaki.runner.bench.operations import OPERATIONS

CHAINED = 10
SMALL_BYTES = 64 * 1024


def strategy(ports: str) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Returns TensorFlow's own world of the same processes. Must be called before the first operation."""
    workers = [f"127.0.0.1:{port}" for port in ports.split(",")]
    task = {"type": "worker", "index": hvd.rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    return tf.distribute.MultiWorkerMirroredStrategy()


class FunctionRank(CompiledCalls):
    """The orders that a rank executes."""

    def __init__(self, _: Path, ports: str) -> None:
        super().__init__()
        hvd.init()
        self.number, self._workers = hvd.rank(), strategy(ports)

    def versions(self) -> dict[str, str]:
        """Returns the available peers and their versions."""
        return {"sirtaki": "sirtaki.tensorflow", "MWMS": f"TensorFlow {tf.__version__}"}

    def prepare(self, size: int) -> list[str]:
        """Checks each peer's sum of `size` bytes, then prepares the measurement. Returns the peers."""
        patterns = Patterns(OPERATIONS["allreduce"], "float32", hvd.size())
        source = tf.constant(patterns.input(size // 4, self.number))
        self.calls = {"sirtaki": self._of_sirtaki(source), "MWMS": self._of_strategy(source)}
        for who, call in self.calls.items():
            if patterns.count_wrong(np.asarray(call()), size // 4, self.number):
                raise SystemExit(f"rank {self.number}: the sum of {who} is wrong")
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
