"""Runs the examples in the docstrings of a package, on the ranks of a job: run_examples.py PACKAGE [NAME...].

Prints the names of public functions and classes without an example, and the errors of examples that fail.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator
from typing import Any

EXAMPLE = re.compile(r"^Example:\n((?:    .*\n|\n)+)", re.MULTILINE)
COMMON = """
loader = [(inputs, targets)] * 2
tensors = [tensor, tensor + 1]
"""
NUMPY = """
import numpy as np
tensor = np.ones((2, 3), np.float32)
loss = tensor.mean()
inputs, targets = np.ones((4, 8), np.float32), np.ones((4, 2), np.float32)
"""
TORCH = """
import torch
torch.manual_seed(0)
tensor = torch.ones(2, 3)
loss = tensor.mean()
inputs, targets = torch.ones(4, 8), torch.ones(4, 2)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = torch.utils.data.TensorDataset(torch.ones(16, 8), torch.ones(16, 2))
def loss_of(model, inputs, targets):
    return torch.nn.functional.mse_loss(model(inputs), targets)
"""
JAX = """
import jax, jax.numpy as jnp, optax
tensor = jnp.ones((2, 3))
loss = tensor.mean()
inputs, targets = jnp.ones((4, 8)), jnp.ones((4, 2))
params = {"w": jnp.zeros((8, 2)), "b": jnp.zeros(2)}
optimizer = optax.sgd(0.1)
def loss_of(params, inputs, targets):
    return ((inputs @ params["w"] + params["b"] - targets) ** 2).mean()
gradients = jax.grad(loss_of)(params, inputs, targets)
"""
TENSORFLOW = """
import keras, tensorflow as tf
tensor = tf.ones((2, 3))
loss = tf.reduce_mean(tensor)
inputs, targets = tf.ones((4, 8)), tf.ones((4, 2))
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(2)])
optimizer = keras.optimizers.SGD(0.1)
"""
KERAS = """
import keras, numpy as np
tensor = keras.ops.ones((2, 3))
loss = keras.ops.mean(tensor)
inputs, targets = np.eye(16, 8, dtype=np.float32), np.ones((16, 2), np.float32)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(2)])
optimizer = keras.optimizers.SGD(0.1)
"""
# Entries with an example that needs a job of its own, before any use of the library, and their preludes.
ALONE = {"enable_collectives": "import jax, numpy as np\n"}
PRELUDES = {"numpy": NUMPY, "torch": TORCH, "jax": JAX, "tensorflow": TENSORFLOW, "keras": KERAS}


def public(package: Any) -> Iterator[tuple[str, Any]]:
    """Yields the public functions and classes of a package, without exceptions, by their names in it."""
    for name in getattr(package, "__all__", dir(package)):
        value = getattr(package, name)
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        if callable(value) and not name.startswith("_") and not is_error:
            yield name, value


def example_of(value: Any) -> str | None:
    found = EXAMPLE.search((inspect.getdoc(value) or "") + "\n")
    return textwrap.dedent(found[1]) if found else None


def main(name: str, *wanted: str) -> int:
    library = name.partition(".")[0]
    hvd = importlib.import_module(f"sirtaki.{library}")
    failed = 0
    for entry, value in public(importlib.import_module(f"sirtaki.{name}")):
        if wanted and entry not in wanted:
            continue
        example = example_of(value)
        if example is None:
            print(f"{entry} has no example", flush=True)
            failed += 1
            continue
        if entry in ALONE and entry not in wanted:
            continue
        hvd.init()
        names: dict[str, Any] = {"hvd": hvd}
        exec(ALONE.get(entry) or PRELUDES[library] + COMMON, names)
        try:
            exec(compile(example, f"<example of {entry}>", "exec"), names)
        except BaseException:
            print(f"the example of {entry} fails:\n{example}\n{traceback.format_exc(limit=-3)}", flush=True)
            failed += 1
            break  # the other ranks may be in the middle of an operation
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
