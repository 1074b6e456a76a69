"""JAX's own collectives between processes, with their data exchanged by sirtaki: `enable_collectives`.

JAX runs them over any MPI library behind MPItrampoline's interface; sirtaki has such a library, with what JAX
calls. jaxlib opens it when jaxlib is loaded, and ends the process if the library lacks a name. So this module
must be imported before JAX, and offers the library to known versions only.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
from importlib.metadata import PackageNotFoundError, version

from sirtaki.bindings.context import Context, current, is_elastic
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.library import PATH
from sirtaki.common.ops.objects import broadcast_object

__all__ = ["enable_collectives"]

_VARIABLE = "MPITRAMPOLINE_LIB"
_LIBRARY = str(PATH.with_name("libsirtaki_mpi.so"))
_NEWEST = (0, 10)  # jaxlib whose names the library is known to have


def _load_jax() -> str:
    """Imports JAX, which opens the library. Returns why it has not; "" if it has."""
    advice = f"or start all ranks with {_VARIABLE}={_LIBRARY} in their environment"
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        return (
            ""
            if chosen == _LIBRARY
            else f"the variable {_VARIABLE} chooses another library, {chosen}: unset it"
        )
    if "jaxlib" in sys.modules:
        return f"jax was imported before sirtaki.jax. Import sirtaki.jax first, {advice}"
    try:
        jaxlib = version("jaxlib")
    except PackageNotFoundError:
        return "jaxlib is not installed as a package"
    if tuple(map(int, re.findall(r"\d+", jaxlib)[:2])) > _NEWEST:
        return f"this sirtaki does not know jaxlib {jaxlib}. Use jaxlib {_NEWEST[0]}.{_NEWEST[1]}, {advice}"
    os.environ[_VARIABLE] = _LIBRARY
    try:
        import jax  # noqa: F401
    finally:
        del os.environ[_VARIABLE]  # programs that this process starts may have another jaxlib
    return ""


_PROBLEM = _load_jax()


def enable_collectives(coordinator_address: str | None = None) -> None:
    """Gives JAX the CPUs of all ranks as a single set of devices; sirtaki carries JAX's own collectives.

    `jax.devices()` has one CPU device of each rank, and programs with sharded arrays, `jax.shard_map`,
    `jax.lax.psum` and so on run over all of them. All ranks must call it, once, after `hvd.init()` and before
    the first use of JAX; `sirtaki.jax` must be imported before `jax`. It calls `jax.distributed.initialize`.

    Args:
        coordinator_address: host and port at which rank 0 serves `jax.distributed`; without it, a free port.
            Rank 0's argument counts.

    Raises:
        NotInitializedError: before `hvd.init()`.
        UnsupportedError: JAX was imported or used too early, this jaxlib is unknown, a rank has several CPU
            devices, or ranks may come and go (`hvdrun --min-np`).

    Example:
        hvd.enable_collectives()  # after hvd.init(), before the first use of JAX
        mesh = jax.make_mesh((hvd.size(),), ("ranks",))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
        own = np.full((1, 4), hvd.rank())  # a row of each rank
        whole = jax.make_array_from_process_local_data(rows, own)
        total = jax.jit(lambda x: x.sum(0))(whole)  # on 2 ranks: [1, 1, 1, 1]
    """
    context = current()
    _refuse_what_cannot_work()
    import jax

    address = broadcast_object(coordinator_address or _free_address(context))
    jax.config.update("jax_cpu_collectives_implementation", "mpi")
    jax.distributed.initialize(address, context.size, context.rank)
    context.shutdown_callbacks.append(ctypes.CDLL(_LIBRARY).MPIABI_Finalize)
    _exchange_first(context)


def _refuse_what_cannot_work() -> None:
    from sirtaki.jax._private import has_chosen_devices

    if is_elastic():
        raise _refusal("JAX needs the same ranks from beginning to end; start the job without --min-np")
    if _PROBLEM:
        raise _refusal(_PROBLEM)
    if has_chosen_devices():
        raise _refusal("JAX is already in use here; call hvd.enable_collectives() right after hvd.init()")


def _refusal(problem: str) -> UnsupportedError:
    return UnsupportedError(f"sirtaki cannot carry JAX's own collectives: {problem}")


def _free_address(context: Context) -> str:
    """Returns where rank 0 can serve the ranks, with a port that is free on this host."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    host = "127.0.0.1" if context.topology.cross_size == 1 else socket.gethostname()
    return f"{host}:{port}"


def _exchange_first(context: Context) -> None:
    """Forms JAX's group of all ranks, while all of them take part, and checks a sum."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.devices("cpu")
    if len(devices) != context.size:
        found = f"JAX has {len(devices)} CPU devices on {context.size} ranks"
        raise _refusal(f"{found}; each rank may have one (see XLA_FLAGS and jax_num_cpu_devices)")
    mesh = Mesh(np.array(devices), "ranks")
    own = np.array([context.rank + 1], np.int32)
    whole = jax.make_array_from_callback(
        (context.size,), NamedSharding(mesh, PartitionSpec("ranks")), lambda _: own
    )
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(whole)
    if int(total.addressable_data(0)) != context.size * (context.size + 1) // 2:
        raise RuntimeError("JAX's first sum over all ranks is wrong; this is a bug in sirtaki")
