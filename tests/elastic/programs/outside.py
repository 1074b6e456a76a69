"""Runs a compiled exchange between init() and hvd.elastic.run: outside.py jax (or tensorflow)."""

from __future__ import annotations

import sys

if sys.argv[1] == "jax":
    import jax
    import jax.numpy as jnp

    import sirtaki.jax as hvd

    hvd.init()
    print(jax.jit(lambda one: hvd.allreduce(one, name="early"))(jnp.ones(3)))
else:
    import tensorflow as tf

    import sirtaki.tensorflow as hvd

    hvd.init()
    print(tf.function(lambda: hvd.allreduce(tf.ones(3), name="early"))())
