"""JAX's own collectives over all devices: `programs_jax_collectives.py NAME FOLDER`.

`results` writes what collectives leave on this process's devices: a rank's one, or all of a process alone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import sirtaki.jax as hvd  # isort: skip  # before JAX

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

try:
    from jax import shard_map
except ImportError:  # before 0.6
    from jax.experimental.shard_map import shard_map  # type: ignore[no-redef]

FOLDER = Path(sys.argv[2])
DTYPES = ("float32", "float64", "int32", "bfloat16", "bool", "complex64")
AXES = ("slow", "fast")
FAILURES = (ValueError, jax.errors.JaxRuntimeError)  # a program that has just started raises the first
Outputs = dict[str, Any]


def whole(mesh: Mesh, shape: tuple[int, ...], dtype: str) -> Any:
    """Returns small whole numbers, so that sums are exact in any order; split in the first dimension."""
    numbers = np.random.default_rng(0).integers(-4, 5, shape)
    if dtype == "bool":
        values = numbers > 0
    else:
        values = (numbers + 1j * numbers[::-1] if dtype == "complex64" else numbers).astype(dtype)
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback(shape, sharding, lambda part: values[part])


def mapped(mesh: Mesh, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    spec = PartitionSpec(mesh.axis_names)
    return jax.jit(shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))


def collectives(x: Any, axis: Any, members: int) -> Outputs:
    ring = [(rank, (rank + 1) % members) for rank in range(members)]
    outputs = {
        "psum": lax.psum(x, axis),
        "all_gather": lax.all_gather(x, axis, tiled=True),
        "all_to_all": lax.all_to_all(x, axis, 0, 1, tiled=True),
        "ppermute": lax.ppermute(x, axis, ring),
        "one message": lax.ppermute(x, axis, [(0, members - 1)]),
    }
    if x.dtype != bool:
        outputs["psum_scatter"] = lax.psum_scatter(x, axis, tiled=True)
    if x.dtype != jnp.complex64:
        outputs |= {"pmin": lax.pmin(x, axis), "pmax": lax.pmax(x, axis)}
    return outputs


def partitioned(x: Any) -> Outputs:
    """Leaves the choice of collectives to the compiler."""
    return {
        "product": jnp.prod(x, 0),
        "largest": jnp.argmax(x, 0),
        "sorted": jnp.sort(x, 0),
        "gradient": jax.grad(lambda x: ((x @ x.T) ** 2).sum())(x),
        "nothing": x[:, :0].sum(0),
    }


def calls() -> Iterator[tuple[str, Outputs]]:
    """Yields the outputs for each dtype over all devices, for float32 also over parts and in other orders."""
    devices = np.array(jax.devices())
    count = len(devices)
    meshes = {"all": Mesh(devices, "all"), "backwards": Mesh(devices[::-1], "all")}
    if count == 4:
        meshes["square"] = Mesh(devices[[2, 0, 3, 1]].reshape(2, 2), AXES)
    for title, mesh in meshes.items():
        for axis in [*AXES, AXES[::-1]] if title == "square" else ["all"]:
            function = partial(collectives, axis=axis, members=2 if axis in AXES else count)
            for dtype in DTYPES if title == "all" else ("float32",):
                yield (
                    f"{title} {axis} {dtype}",
                    mapped(mesh, function)(whole(mesh, (count * count * 6, 3), dtype)),
                )
        everywhere = NamedSharding(mesh, PartitionSpec())
        yield title, jax.jit(partitioned, out_shardings=everywhere)(whole(mesh, (count * 2, 3), "float32"))


def results() -> None:
    own = {}
    order = {device: index for index, device in enumerate(jax.devices())}
    for title, outputs in calls():
        for name, output in outputs.items():
            for shard in output.addressable_shards:
                value = np.asarray(shard.data)
                is_known = value.dtype != jnp.bfloat16  # to numpy's files
                own[f"{name} {title} {order[shard.device]}"] = value if is_known else value.astype("float32")
    np.savez(FOLDER / f"{jax.process_index()}.npz", **own)


def failures() -> None:
    """Programs that differ between ranks fail on all of them, and later ones work; a lost rank is named."""
    mesh = Mesh(np.array(jax.devices()), "all")
    psum = mapped(mesh, partial(lax.psum, axis_name="all"))
    for differing in (
        partial(psum, whole(mesh, (2 * (hvd.rank() + 1),), "float32")),
        partial(
            psum if hvd.rank() else mapped(mesh, partial(lax.all_gather, axis_name="all")),
            whole(mesh, (2,), "int32"),
        ),
    ):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="ranks disagree about 'jax collective, group 1'"
        ):
            jax.block_until_ready(differing())
    tensor = whole(mesh, (2,), "int32")
    jax.block_until_ready(psum(tensor))
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # hvdrun soon ends other ranks; this rank reports first
    with pytest.raises(FAILURES, match=r"rank 1 .* was lost") as caught:
        jax.block_until_ready(psum(tensor))
    (FOLDER / "seen").write_text(str(caught.value))


def shut_down() -> None:
    mesh = Mesh(np.array(jax.devices()), "all")
    total = mapped(mesh, partial(lax.psum, axis_name="all"))
    tensor = whole(mesh, (2,), "int32")
    jax.block_until_ready(total(tensor))
    hvd.shutdown()
    hvd.init()  # another world: what JAX remembers of the first is not used in it
    with pytest.raises(ValueError, match=r"hvd\.shutdown\(\) was called"):
        jax.block_until_ready(total(tensor))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    if "alone" not in sys.argv:
        hvd.init()
        hvd.enable_collectives()
    globals()[sys.argv[1]]()
