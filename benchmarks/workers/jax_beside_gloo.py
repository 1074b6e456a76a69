"""A rank of benchmarks/jax_beside_gloo.py: calls a compiled function of the ordered peer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import sirtaki.jax as hvd  # isort: skip  # before JAX

import jax
import jax.numpy as jnp
import numpy as np
from common.serving import CompiledCalls
from jax.sharding import NamedSharding, PartitionSpec

from sirtaki.bench.patterns import Patterns
from sirtaki.runner.bench.operations import OPERATIONS

LAYERS, ROWS, RATE = 6, 32, 1e-3  # rows of each rank


def loss_of(params: list[Any], inputs: Any) -> Any:
    for weights in params:
        inputs = jnp.tanh(inputs @ weights)
    return (inputs**2).mean()


def updated(params: list[Any], gradients: list[Any]) -> list[Any]:
    return jax.tree.map(lambda p, g: p - RATE * g, params, gradients)


class JaxRank(CompiledCalls):
    """The orders that a rank executes. The carrier of JAX's own collectives is gloo or sirtaki."""

    def __init__(self, _: Path, port: str, carrier: str) -> None:
        super().__init__()
        hvd.init()
        self.number = hvd.rank()
        if carrier == "sirtaki":
            hvd.enable_collectives(f"127.0.0.1:{port}")
        else:
            jax.distributed.initialize(f"127.0.0.1:{port}", hvd.size(), hvd.rank())
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()), "ranks")

    def versions(self) -> dict[str, str]:
        """Returns the available peers and their versions."""
        return {"sirtaki": "sirtaki.jax", "jax": f"jax.distributed of JAX {jax.__version__}"}

    def prepare_sum(self, size: int) -> None:
        """Checks each peer's sum of `size` bytes, then prepares the measurement."""
        patterns = Patterns(OPERATIONS["allreduce"], "float32", hvd.size())
        own = patterns.input(size // 4, self.number)
        self.calls = {"sirtaki": self._sum_of_sirtaki(own), "jax": self._sum_of_jax(own)}
        for who, call in self.calls.items():
            own_part = np.asarray(call().addressable_data(0)).reshape(-1)
            if patterns.count_wrong(own_part, size // 4, self.number):
                raise SystemExit(f"rank {self.number}: the sum of {who} is wrong")

    def _sum_of_sirtaki(self, own: Any) -> Callable[[], Any]:
        program = jax.jit(partial(hvd.allreduce, op=hvd.Sum), donate_argnums=0)
        return _in_turn(program, jax.device_put(own, jax.local_devices()[0]))

    def _sum_of_jax(self, own: Any) -> Callable[[], Any]:
        sharding = NamedSharding(self._mesh, PartitionSpec("ranks"))
        whole = jax.make_array_from_process_local_data(sharding, own[None])
        mapped = jax.shard_map(
            lambda x: jax.lax.psum(x, "ranks"),
            mesh=self._mesh,
            in_specs=PartitionSpec("ranks"),
            out_specs=PartitionSpec("ranks"),
            check_vma=False,
        )
        return _in_turn(jax.jit(mapped, donate_argnums=0), whole)

    def prepare_step(self, width: int) -> int:
        """Prepares training a network of this width with each peer. Returns its number of parameters."""
        keys = jax.random.split(jax.random.key(0), LAYERS)
        params = [np.asarray(jax.random.normal(key, (width, width))) / width**0.5 for key in keys]
        inputs = np.asarray(jax.random.normal(hvd.rank_key(keys[0]), (ROWS, width)))
        self.calls = {
            "sirtaki": self._step_of_sirtaki(params, inputs),
            "jax": self._step_of_jax(params, inputs),
        }
        return sum(weights.size for weights in params)

    def _step_of_sirtaki(self, params: list[Any], inputs: Any) -> Callable[[], Any]:
        gradient = hvd.grad(loss_of)
        own = jax.device_put(inputs, jax.local_devices()[0])
        program = jax.jit(lambda p: updated(p, gradient(p, own)), donate_argnums=0)
        return _in_turn(program, jax.device_put(params, jax.local_devices()[0]))

    def _step_of_jax(self, params: list[Any], inputs: Any) -> Callable[[], Any]:
        whole = jax.make_array_from_process_local_data(
            NamedSharding(self._mesh, PartitionSpec("ranks")), inputs
        )
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        placed = [jax.make_array_from_process_local_data(everywhere, weights) for weights in params]
        program = jax.jit(lambda p, x: updated(p, jax.grad(loss_of)(p, x)), donate_argnums=0)
        return _in_turn(lambda p: program(p, whole), placed)


def _in_turn(program: Callable[[Any], Any], state: Any) -> Callable[[], Any]:
    """Calls a program with its previous result, and waits for it."""
    held = [state]

    def call() -> Any:
        held[0] = jax.block_until_ready(program(held[0]))
        return held[0]

    return call
