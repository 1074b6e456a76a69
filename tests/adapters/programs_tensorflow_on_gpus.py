"""A program that test_tensorflow_on_gpus.py starts under hvdrun: `programs_tensorflow_on_gpus.py PLUGIN`."""

from __future__ import annotations

import os
import sys

import numpy as np
import tensorflow as tf
from fake_gpu import FakeGpu
from tensorflow.python.framework import load_library

import sirtaki.tensorflow as hvd

LATE = 2_000  # µs, at most: each task of a stream
ROWS = 1_000


def values(dtype: tf.DType) -> np.ndarray:
    return np.arange(ROWS).astype(dtype.as_numpy_dtype) % 7 + hvd.rank()


def on_gpu(data: np.ndarray) -> tf.Tensor:
    """Returns a tensor that a stream of the GPU is still making."""
    with tf.device("GPU:0"):
        return tf.raw_ops.DeepCopy(x=tf.constant(data))


def check(result: tf.Tensor, expected: np.ndarray, device: str = "GPU:0") -> None:
    if tf.executing_eagerly():
        assert result.device.endswith(device), result.device
    np.testing.assert_array_equal(result.numpy().astype(np.float64), expected.astype(np.float64))


def sums(fake: FakeGpu) -> None:
    for dtype in (tf.float32, tf.float16, tf.int32, tf.bfloat16):
        before = fake.calls("ncclAllReduce")
        check(hvd.allreduce(on_gpu(values(dtype)), op=hvd.Sum), 2 * values(dtype) + 1 - 2 * hvd.rank())
        assert fake.calls("ncclAllReduce") == before + 1
    group = [on_gpu(values(tf.float32)), on_gpu(np.float32(hvd.rank()))]
    results = hvd.grouped_allreduce(group, op=hvd.Average)
    check(results[0], values(tf.float32) + 0.5 - hvd.rank())
    check(results[1], np.float32(0.5))
    check(hvd.allreduce(on_gpu(np.zeros((0, 3), np.float32)), op=hvd.Sum), np.zeros((0, 3)))


def parts(fake: FakeGpu) -> None:
    check(hvd.broadcast(on_gpu(values(tf.float32)), root_rank=1), values(tf.float32) + 1 - hvd.rank())
    own = slice(hvd.rank() * ROWS // 2, (hvd.rank() + 1) * ROWS // 2)
    expected = 2 * values(tf.float32) + 1 - 2 * hvd.rank()
    check(hvd.reducescatter(on_gpu(values(tf.float32)), op=hvd.Sum), expected[own])


def on_the_cpu(fake: FakeGpu) -> None:
    """Operations that allocate their results late are on the CPU, as are those of its tensors."""
    rows = hvd.allgather(on_gpu(values(tf.float32)[: 3 + hvd.rank()]))
    assert rows.shape == (7,)
    assert rows.device.endswith("CPU:0")
    before = fake.calls("ncclAllReduce")
    with tf.device("CPU:0"):
        check(hvd.allreduce(tf.constant(1.0), op=hvd.Sum), np.float32(2), "CPU:0")
    assert fake.calls("ncclAllReduce") == before


def functions(fake: FakeGpu) -> None:
    @tf.function
    def chain(data: tf.Tensor) -> tf.Tensor:
        first = hvd.allreduce(data, op=hvd.Sum, name="first")
        return hvd.allreduce(first, op=hvd.Sum, name="second")

    for _ in range(5):
        before = fake.calls("ncclAllReduce")
        check(chain(on_gpu(values(tf.float32))), 4 * values(tf.float32) + 2 - 4 * hvd.rank())
        assert fake.calls("ncclAllReduce") == before + 2


def many_at_once(fake: FakeGpu) -> None:
    """Memory is used again while streams still work."""

    @tf.function
    def all_of(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [hvd.allreduce(tensor, op=hvd.Sum, name=f"t{i}") for i, tensor in enumerate(tensors)]

    for _ in range(5):
        made = [on_gpu(values(tf.float32) * (i + 1)) for i in range(20)]
        for i, result in enumerate(all_of(made)):
            check(result, (2 * values(tf.float32) + 1 - 2 * hvd.rank()) * (i + 1))


def through_the_host(fake: FakeGpu) -> None:
    """Without the setting, in another world."""
    hvd.shutdown()
    os.environ["SIRTAKI_TENSORFLOW_ON_GPUS"] = "0"
    hvd.init()
    before = fake.calls("ncclAllReduce")
    sums = hvd.allreduce(on_gpu(values(tf.float32)), op=hvd.Sum)
    check(sums, 2 * values(tf.float32) + 1 - 2 * hvd.rank(), "CPU:0")
    assert fake.calls("ncclAllReduce") == before


def main() -> None:
    fake = FakeGpu()
    fake.set("delay", LATE)
    load_library.load_pluggable_device_library(sys.argv[1])
    hvd.init()
    for case in (sums, parts, on_the_cpu, functions, many_at_once, through_the_host):
        case(fake)
        assert fake.misuse() == "", fake.misuse()
        print(f"well: {case.__name__}")


if __name__ == "__main__":
    main()
