"""The program of a trial, run by each rank: random collectives with exact results, and at most one fault.

    python program.py SEED FLAVOUR STEPS FAULT VICTIM STEP FOLDER

All ranks derive the same operations from the seed. Values are small whole numbers, so that every sum is exact
in every dtype and order; a wrong one ends the rank with WRONG_SUM. `FOLDER/started.RANK` exists once a rank
has completed its first step; `FOLDER/struck` holds the time of the fault, in seconds of time.monotonic().
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from faults import IN_A_RANK, OUTSIDE

WRONG_SUM = 77
OUTSIDE_STEP_SECONDS = 0.02  # so that the program runs for a while after all ranks have begun
Step = Callable[[int], None]


def check(found: Any, expected: Any) -> None:
    """Ends this rank at once if a result is wrong: a wrong result must be noticed whatever else happens."""
    if not np.array_equal(np.asarray(found), np.asarray(expected)):
        print(
            f"WRONG SUM: {np.asarray(found).ravel()[:4]} instead of {np.asarray(expected).ravel()[:4]}",
            flush=True,
        )
        os._exit(WRONG_SUM)


def total(size: int, step: int) -> int:
    """Returns the sum over ranks of rank + step."""
    return size * (size - 1) // 2 + size * step


def numpy_steps(rng: random.Random) -> Iterator[Step]:
    """Runs every collective of the numpy adapter, on arrays of random length."""
    import sirtaki.numpy as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    def allreduce(step: int, count: int, dtype: str) -> None:
        check(
            hvd.allreduce(np.full(count, rank + step, dtype), op=hvd.Sum), np.full(count, total(size, step))
        )

    def grouped(step: int, count: int, dtype: str) -> None:
        arrays = [np.full(count + i, rank + step + i, dtype) for i in range(5)]
        for i, result in enumerate(hvd.grouped_allreduce(arrays, op=hvd.Sum)):
            check(result, np.full(count + i, total(size, step + i)))

    def allgather(step: int, count: int, dtype: str) -> None:
        rows = np.full((rank + 1, min(count, 1000)), rank + step, dtype)
        expected = [np.full((r + 1, min(count, 1000)), r + step, dtype) for r in range(size)]
        check(hvd.allgather(rows), np.concatenate(expected))

    def broadcast(step: int, count: int, dtype: str) -> None:
        root = step % size
        check(hvd.broadcast(np.full(count, rank + step, dtype), root), np.full(count, root + step))

    def alltoall(step: int, count: int, dtype: str) -> None:
        rows = np.full((size, min(count, 1000)), rank + step, dtype)
        received = hvd.alltoall(rows)
        received = received[0] if isinstance(received, tuple) else received
        check(received, np.repeat(np.arange(size) + step, min(count, 1000)).reshape(size, -1))

    def in_flight(step: int, count: int, dtype: str) -> None:
        handles = [
            hvd.allreduce_async(np.full(count, rank + step + i, dtype), name=f"flight.{i}", op=hvd.Sum)
            for i in range(4)
        ]
        for i, handle in enumerate(handles):
            check(hvd.synchronize(handle), np.full(count, total(size, step + i)))

    def barrier(step: int, count: int, dtype: str) -> None:
        hvd.barrier()

    kinds = [allreduce, grouped, allgather, broadcast, alltoall, in_flight, barrier]
    while True:
        kind, dtype = rng.choice(kinds), rng.choice(["float32", "float64", "int32", "int64"])
        count = rng.choice([1, 7, 1000, 40_000, 300_000])
        yield lambda step, kind=kind, count=count, dtype=dtype: kind(step, count, dtype)


def torch_steps(rng: random.Random, workers: int = 0) -> Iterator[Step]:
    """Runs training steps of a linear model with whole-number gradients; with DataLoader workers, too."""
    import torch

    import sirtaki.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    width = rng.choice([3, 200, 1000])
    model = torch.nn.Linear(width, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), named_parameters=model.named_parameters(), op=hvd.Sum
    )
    data = [torch.full((width,), float(rank + step)) for step in range(200)]
    loader = iter(torch.utils.data.DataLoader(data, batch_size=1, num_workers=workers))

    def train(step: int) -> None:
        optimizer.zero_grad()
        model(next(loader)).sum().backward()
        assert model.weight.grad is not None
        check(model.weight.grad, np.full((1, width), total(size, step)))
        optimizer.step()

    while True:
        yield train


def loader_steps(rng: random.Random) -> Iterator[Step]:
    yield from torch_steps(rng, workers=1)


def compiled_steps(
    rng: random.Random, hvd: Any, compiled: Callable[..., Any], full: Callable[[int, float], Any]
) -> Iterator[Step]:
    """Runs all-reduces inside a compiled program, on arrays that `full` makes from a count and a value."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    count = rng.choice([1, 1000, 50_000])

    @compiled
    def program(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum) + 2 * hvd.allreduce(x + 1, op=hvd.Sum)

    def run(step: int) -> None:
        expected = total(size, step) + 2 * total(size, step + 1)
        check(program(full(count, float(rank + step))), np.full(count, expected))

    while True:
        yield run


def jax_steps(rng: random.Random) -> Iterator[Step]:
    import jax
    import jax.numpy as jnp

    import sirtaki.jax as hvd

    yield from compiled_steps(rng, hvd, jax.jit, lambda count, value: jnp.full(count, value, jnp.float32))


def tensorflow_steps(rng: random.Random) -> Iterator[Step]:
    import tensorflow as tf

    import sirtaki.tensorflow as hvd

    yield from compiled_steps(rng, hvd, tf.function, lambda count, value: tf.fill([count], value))


def keras_steps(rng: random.Random) -> Iterator[Step]:
    """Runs `fit` of a model with one weight, whose gradient is the mean over ranks of whole numbers."""
    os.environ.setdefault("KERAS_BACKEND", rng.choice(["torch", "jax"]))
    import keras

    import sirtaki.keras as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), loss=lambda y, p: -y * p)
    sums = [0.0]

    def run(step: int) -> None:
        x = np.full((1, 1), float(size * (rank + step)), "float32")
        model.fit(x, np.ones((1, 1), "float32"), batch_size=1, epochs=1, verbose=0)
        sums[0] += total(size, step)
        check(layer.kernel.numpy() if hasattr(layer.kernel, "numpy") else layer.kernel, [[sums[0]]])

    while True:
        yield run


FLAVOURS: dict[str, Callable[[random.Random], Iterator[Step]]] = {
    "numpy": numpy_steps,
    "torch": torch_steps,
    "DataLoader": loader_steps,
    "jit": jax_steps,
    "tf.function": tensorflow_steps,
    "keras": keras_steps,
}


def main() -> None:
    seed, flavour, steps, fault, victim, strike_at, folder = sys.argv[1:]
    rank = int(os.environ["SIRTAKI_RANK"])
    program = FLAVOURS[flavour](random.Random(int(seed)))
    for step in range(int(steps)):
        if rank == int(victim) and step == int(strike_at) and fault in IN_A_RANK:
            Path(folder, "struck").write_text(str(time.monotonic()))
            IN_A_RANK[fault][0]()
        next(program)(step)
        if step == 0:
            Path(folder, f"started.{rank}").write_text(str(os.getpid()))
        if fault in OUTSIDE:
            time.sleep(OUTSIDE_STEP_SECONDS)
    print("end of the program", flush=True)


if __name__ == "__main__":
    main()
