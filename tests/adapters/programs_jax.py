"""Programs that a test starts: `programs_jax.py NAME FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sirtaki.jax as hvd
from sirtaki.bindings.errors import UnsupportedError

FOLDER = Path(sys.argv[2])


def total(x: Any) -> Any:
    return hvd.allreduce(x, op=hvd.Sum, name="loss")


def lost_rank() -> None:
    """The others' programs fail with an error that names the lost rank."""
    step = jax.jit(total)
    assert float(step(1.0)) == hvd.size()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # hvdrun soon ends other ranks; this rank reports first
    try:
        for _ in range(3):
            jax.block_until_ready(step(1.0))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        (FOLDER / "seen").write_text(str(error))
        raise


def several_devices() -> None:
    """A rank works on one device: a program for two is rejected before it runs."""
    devices = jax.local_devices()
    assert len(devices) == 2
    mesh = jax.sharding.Mesh(devices, "x")
    spec = jax.sharding.PartitionSpec("x")
    sharded = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, spec))
    mapped = jax.pmap(total)
    calls = [lambda: total(sharded), lambda: jax.jit(total)(sharded), lambda: mapped(jnp.ones((2, 3)))]
    if hasattr(jax, "shard_map"):  # since 0.6
        over_both = jax.shard_map(total, mesh=mesh, in_specs=spec, out_specs=spec)
        calls.append(lambda: jax.jit(over_both)(sharded))
    for call in calls:
        with pytest.raises(UnsupportedError, match=r"2 devices.*hvdrun"):
            call()
    assert jax.jit(total)(jnp.ones(2)).tolist() == [1, 1]


def own_gpu() -> None:
    """Each rank of a host has been restricted to another GPU, unless the program has restricted JAX."""
    visible = jax._src.xla_bridge.CUDA_VISIBLE_DEVICES
    assert visible.value == str(hvd.local_rank())
    jax.config.update("jax_cuda_visible_devices", "5")
    hvd.shutdown()
    hvd.init()
    assert visible.value == "5"


def crowded_gpus() -> None:
    """Ranks beyond the number of GPUs share them."""
    assert jax._src.xla_bridge.CUDA_VISIBLE_DEVICES.value == str(hvd.local_rank() % 2)


def profiled() -> None:
    """JAX's profiler shows an eager operation by its span, and one of a compiled program by itself."""
    traced = FOLDER / "profile"
    with jax.profiler.trace(str(traced)):
        hvd.allreduce(jnp.ones(4), name="eager")
        jax.block_until_ready(jax.jit(total)(jnp.ones(5)))
    shown = b"".join(file.read_bytes() for file in traced.rglob("*.xplane.pb"))
    assert b"sirtaki:all_reduce, 16 bytes, process set 0" in shown
    assert b"sirtaki_allreduce" in shown


hvd.init()
globals()[sys.argv[1]]()
print(f"rank {hvd.rank()} is done")
hvd.shutdown()
