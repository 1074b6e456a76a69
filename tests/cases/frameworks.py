"""torch, TensorFlow and JAX in one process, which is one rank."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch

import sirtaki.jax
import sirtaki.numpy as hvd
import sirtaki.tensorflow
import sirtaki.torch
from cases import case

STEPS = 20


@tf.function
def add_in_tensorflow(value: tf.Tensor) -> tf.Tensor:
    return sirtaki.tensorflow.allreduce(value, op=sirtaki.tensorflow.Sum, name="in TensorFlow")


@jax.jit
def add_in_jax(value: jax.Array) -> jax.Array:
    return sirtaki.jax.allreduce(value, op=sirtaki.jax.Sum, name="in JAX")


@case()
def all_share_one_context() -> None:
    before = hvd.stats()["operations"]
    for step in range(STEPS):
        start = np.arange(1000, dtype=np.float32) + step
        handle = sirtaki.torch.allreduce_async(torch.from_numpy(start), op=sirtaki.torch.Sum, name="in torch")
        found = add_in_tensorflow(tf.constant(start)), add_in_jax(jnp.asarray(start))
        for result in (*found, sirtaki.torch.synchronize(handle)):
            np.testing.assert_array_equal(np.asarray(result), start * hvd.size())
    assert hvd.stats()["operations"] - before == 3 * STEPS
    ranks = {one.rank() for one in (hvd, sirtaki.torch, sirtaki.tensorflow, sirtaki.jax)}
    assert ranks == {hvd.rank()}
