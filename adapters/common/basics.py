"""init, shutdown, and queries about the world, equal for every framework."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context, current, find, process
from sirtaki.bindings.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    ParametersDifferError,
    PeerLostError,
)
from sirtaki.bindings.observing import observe
from sirtaki.bindings.observing.observe import Lateness, Statistics, operation_counts
from sirtaki.common.autotune import tuner_of
from sirtaki.common.ops.handles import Operation, pooled_batch, run
from sirtaki.common.ops.objects import broadcast_object, view_of_bytes
from sirtaki.common.ops.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from sirtaki.common.ops.requests import Call, Reduction, describe
from sirtaki.common.semantics import are_horovods

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.termination import StopRequests
    from sirtaki.bindings.gpu import GpuLibraries
    from sirtaki.bindings.topology import Topology

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "MismatchError", "ParametersDifferError"]
__all__ += ["PeerLostError"]
__all__ += ["init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size"]
__all__ += ["cross_rank", "cross_size", "is_homogeneous", "is_root", "on_root"]
__all__ += ["ProcessSet", "global_process_set", "add_process_set", "remove_process_set"]
__all__ += ["mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"]
__all__ += ["Lateness", "Statistics", "start_timeline", "should_stop", "stats", "stop_timeline"]
__all__ += ["nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"]


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    key: bytes | str | None = None,
) -> None:
    """Makes this process a rank. All ranks must call it, before anything else.

    A repeated call without arguments, or with the same arguments, does nothing; with Horovod's rules
    (`sirtaki.common.semantics`), neither does one with a communicator or a list of all ranks, or with process
    sets that are in use.

    Without arguments the world is the one that a launcher has made (hvdrun, mpirun, srun, torchrun,
    Kubernetes or TF_CONFIG; docs/operations/clusters.md describes how each is detected), or this process
    alone. Without a launcher, start `size` processes and give each its `rank`, and the `address`
    ("host:port") at which rank 0 listens.

    Args:
        comm: a communicator of mpi4py, whose processes become the world. All of them must call init.
        process_sets: sets to add at once, the same on all ranks, as by `add_process_set`. The text "dynamic",
            by which Horovod allows sets to be added later, is accepted and has no effect: that is always
            allowed.
        rank: this process's number, from 0 to size - 1.
        size: the number of processes.
        address: the address at which rank 0 listens; required if size is more than 1.
        key: 32 random bytes, or 64 hexadecimal digits, the same on all ranks; default: that of
            SIRTAKI_KEY_FILE. Without a key only this machine is served.

    Raises:
        ValueError: incomplete arguments, arguments that differ from the first call, a setting with a wrong
            value, or a process set that cannot be added; in that last case no set is added, and the process
            is a rank nevertheless.
        DeadlineError: a rank did not arrive in time; the text names it.
        InitializationError: the ranks are inconsistent, or a rank has started this process.
        ForkedError: this process was forked from a rank.

    Example:
        hvd.init()
        print(f"rank {hvd.rank()} of {hvd.size()}")
    """
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f'process_sets is {process_sets!r}; it takes a list of process sets, or "dynamic"')
    from sirtaki.bindings.bootstrap import (
        lifecycle,  # imported late: a third of the time to import sirtaki.torch
    )

    sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    arguments = {"comm": comm, "rank": rank, "size": size, "address": address, "key": key}
    arguments["process_sets"] = [_ranks_of(process_set) for process_set in sets] or None
    if is_initialized():
        lifecycle.check_repeated_init(compatible(arguments, sets) if are_horovods() else arguments)
        return
    lists_ranks = are_horovods() and is_list_of_ranks(comm)
    lifecycle.start(rank, size, address, key, None if lists_ranks else comm)
    lifecycle.store_arguments(arguments)
    for act in process.after_init:
        act(current())
    watch(current())
    tuner_of(current())  # on rank 0 of a job with autotune, it also reports that there was nothing to tune
    if lists_ranks:
        require_all_ranks(comm)
    _add_all(sets)


def _ranks_of(process_set: Any) -> Any:
    return process_set.ranks if isinstance(process_set, ProcessSet) else process_set


def _add_all(process_sets: Sequence[ProcessSet]) -> None:
    """Adds all of the process sets, or none."""
    added: list[ProcessSet] = []
    try:
        for process_set in process_sets:
            added.append(add_process_set(process_set))
    except (ValueError, MismatchError) as error:
        for process_set in reversed(added):
            remove_process_set(process_set)
        raise type(error)(f"init(process_sets=...): {error}") from None


def shutdown() -> None:
    """Completes operations in flight and leaves the world. init() may be called again afterwards.

    Does nothing in a process that is not initialised.

    Example:
        if hvd.is_root():
            print(hvd.stats()["operations"], "operations")
        hvd.shutdown()  # hvd.init() may follow
    """
    if is_initialized():
        from sirtaki.bindings.bootstrap import lifecycle

        lifecycle.stop()


def is_initialized() -> bool:
    """Returns whether this process is a rank: after init(), before shutdown().

    Example:
        if not hvd.is_initialized():
            hvd.init()
    """
    return find() is not None


def _topology() -> Topology:
    return current().topology


def rank() -> int:
    """Returns this rank, from 0 to size() - 1. Raises NotInitializedError (a ValueError) before init().

    Example:
        inputs = inputs[hvd.rank() :: hvd.size()]  # the samples of this rank
    """
    return _topology().rank


def size() -> int:
    """Returns the number of ranks. Raises NotInitializedError (a ValueError) before init().

    Example:
        learning_rate = 0.1 * hvd.size()  # scaled with the global batch: 0.2 on 2 ranks
    """
    return _topology().size


def local_rank() -> int:
    """Returns this rank's number on its host. Raises NotInitializedError (a ValueError) before init().

    Example:
        import os
        if hvd.local_rank() == 0:
            os.makedirs("cache", exist_ok=True)  # once per host
        hvd.barrier()
    """
    return _topology().local_rank


def local_size() -> int:
    """Returns the number of ranks on this host. Raises NotInitializedError (a ValueError) before init().

    Example:
        import os
        workers = (os.cpu_count() or 1) // hvd.local_size()  # processes that load data for this rank
    """
    return _topology().local_size


def cross_rank() -> int:
    """Returns the index of this rank's host among the hosts that have a rank with this local rank.

    Raises NotInitializedError (a ValueError) before init().

    Example:
        from pathlib import Path
        files = sorted(Path("data").glob("*.npy"))
        files = files[hvd.cross_rank() :: hvd.cross_size()]  # the files of this host
    """
    return _topology().cross_rank


def cross_size() -> int:
    """Returns the number of hosts that have a rank with this local rank.

    Raises NotInitializedError (a ValueError) before init().

    Example:
        if hvd.is_root():
            print(f"ranks: {hvd.size()}, hosts: {hvd.cross_size()}")
    """
    return _topology().cross_size


def is_homogeneous() -> bool:
    """Returns whether every host has the same number of ranks.

    Raises NotInitializedError (a ValueError) before init().

    Example:
        if hvd.is_root() and not hvd.is_homogeneous():
            print("the hosts have different numbers of ranks")
    """
    hosts = [peer.host_index for peer in _topology().peers]
    return len({hosts.count(host) for host in set(hosts)}) == 1


def mpi_threads_supported() -> bool:
    """Returns whether MPI allows calls from several threads.

    Raises:
        ValueError: always, because sirtaki uses no MPI.

    Example:
        threads = hvd.mpi_enabled() and hvd.mpi_threads_supported()  # False
    """
    raise ValueError("sirtaki uses no MPI; its own calls may be made from any thread")


def mpi_enabled() -> bool:
    """Returns False: sirtaki uses no MPI.

    Example:
        if hvd.mpi_enabled():  # never
            from mpi4py import MPI
    """
    return False


def mpi_built() -> bool:
    """Returns False: sirtaki uses no MPI.

    Example:
        controllers = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built()}
    """
    return False


def gloo_enabled() -> bool:
    """Returns False: sirtaki uses no Gloo.

    Example:
        controller = "gloo" if hvd.gloo_enabled() else "mpi" if hvd.mpi_enabled() else "sirtaki"  # "sirtaki"
    """
    return False


def gloo_built() -> bool:
    """Returns False: sirtaki uses no Gloo.

    Example:
        controllers = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built()}
    """
    return False


def nccl_built() -> int:
    """Returns the version of NCCL that is used for tensors on GPUs, as NCCL's number: 22803 is 2.28.3. 0:
    none.

    Opens NCCL and CUDA's driver, if they are not open yet. `hvdrun --check-build` reports what was searched
    for, and where.

    Example:
        version = hvd.nccl_built()
        print(f"NCCL {version // 10000}.{version // 100 % 100}" if version else "no NCCL")
    """
    found = _gpu_libraries()
    return found.nccl.version if found.devices else 0


def _gpu_libraries() -> GpuLibraries:
    from sirtaki.bindings import gpu  # imported late: few programs ask

    return gpu.find_libraries()


def ddl_built() -> bool:
    """Returns False: sirtaki uses no DDL.

    Example:
        libraries = {"NCCL": hvd.nccl_built(), "oneCCL": hvd.ccl_built(), "DDL": hvd.ddl_built()}
    """
    return False


def ccl_built() -> bool:
    """Returns False: sirtaki uses no oneCCL.

    Example:
        libraries = {"NCCL": hvd.nccl_built(), "oneCCL": hvd.ccl_built(), "DDL": hvd.ddl_built()}
    """
    return False


def cuda_built() -> bool:
    """Returns whether tensors may be on GPUs here: CUDA's driver exists, and it sees a GPU.

    Opens the driver, if it is not open yet.

    Example:
        device = f"cuda:{hvd.local_rank()}" if hvd.cuda_built() else "cpu"
    """
    return _gpu_libraries().devices > 0


def rocm_built() -> bool:
    """Returns False: only NVIDIA's GPUs are supported.

    Example:
        has_gpu = hvd.cuda_built() or hvd.rocm_built()
    """
    return False


# ---- A warning for jobs that have trained without an exchange: each rank has its own model -------------
# torch's optimizers are watched step by step (`sirtaki.torch.plain_optimizers`). Keras and JAX have no
# hook for optimizers that are not distributed, so the whole job is looked at when it ends.


_LEAST_SECONDS = 5.0  # shorter jobs try something out
_TRAINING = {"keras": "sirtaki.keras", "optax": "sirtaki.jax"}  # libraries with optimizers, and our modules
_ALONE = {"broadcast", "barrier"}  # kinds that connect no training


def watch(context: Context) -> None:
    """Makes rank 0 warn at the end of this world if its ranks have trained for themselves."""
    if context.size > 1 and context.rank == 0:
        begin = time.monotonic()
        context.shutdown_callbacks.append(lambda: _warn(context, begin))


def _warn(context: Context, begin: float) -> None:
    seconds = time.monotonic() - begin
    modules = [module for library, module in _TRAINING.items() if library in sys.modules]
    if seconds < _LEAST_SECONDS or not modules or context.failure is not None:
        return
    kinds = {row["kind"] for row in operation_counts(context)}
    if kinds <= _ALONE:
        sys.stderr.write(
            f"sirtaki: in {seconds:.0f} s the {context.size} ranks have exchanged nothing"
            f"{' but what they have broadcast' * ('broadcast' in kinds)}: if they were to train one model, "
            f"each has trained a model of its own. Wrap the optimizer: {modules[0]}.DistributedOptimizer\n"
        )


# ---- Calls of init() as Horovod allows: with a list of all ranks, and repeated -------------------------
# Repeated calls need equivalent arguments.


def is_list_of_ranks(comm: Any) -> bool:
    """Returns whether the argument `comm` lists ranks; otherwise it is a communicator of MPI."""
    return isinstance(comm, list | tuple | range) and all(isinstance(item, int) for item in comm)


def require_all_ranks(comm: Sequence[int]) -> None:
    """Raises ValueError if a list of ranks leaves some of them out."""
    count = current().size
    if sorted(comm) != list(range(count)):
        raise ValueError(
            f"init(comm={list(comm)!r}) does not list all {count} ranks, of which a world consists: "
            "add a process set of some ranks, init(process_sets=[[...]]), or start fewer ranks"
        )


def compatible(arguments: Mapping[str, Any], process_sets: Sequence[Any]) -> dict[str, Any]:
    """Returns the arguments of a repeated init() that this world does not fulfil already.

    Raises:
        ValueError: a list of ranks that leaves some of them out.
    """
    rest = dict(arguments)
    comm: Any = rest.get("comm")
    if is_list_of_ranks(comm):
        require_all_ranks(comm)
        rest["comm"] = None
    elif hasattr(comm, "Get_size") and comm.Get_size() == current().size:
        rest["comm"] = None
    if all(
        isinstance(process_set, ProcessSet) and process_set.process_set_id is not None
        for process_set in process_sets
    ):
        rest["process_sets"] = None
    return rest


# ---- Work of a single rank for all ranks, such as writing a file or downloading data -------------------


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def is_root() -> bool:
    """Returns whether this is rank 0, which writes files and prints. Other ranks do not wait for it.

    Raises NotInitializedError (a ValueError) before init().

    Example:
        if hvd.is_root():
            print(f"loss {float(loss):.3f}")
    """
    return current().rank == 0


def on_root(
    function: Callable[_Parameters, _Result], *arguments: _Parameters.args, **options: _Parameters.kwargs
) -> _Result:
    """Calls a function on rank 0 alone, while all other ranks wait for it. All ranks must call it.

    For example `hvd.on_root(torch.save, model.state_dict(), "model.pt")`, or `path = hvd.on_root(download)`.

    Returns:
        The function's result, on all ranks: anything that cloudpickle can pickle.

    Raises:
        Exception: on rank 0, the exception of the function.
        HorovodInternalError: on the others, if it raised; the text contains its error.

    Example:
        import os
        hvd.on_root(os.makedirs, "checkpoints", exist_ok=True)  # the folder exists when any rank goes on
    """
    name = getattr(function, "__name__", "the function")
    if current().rank:
        failure, result = broadcast_object(None, 0, "on_root")
        if failure:
            raise HorovodInternalError(f"{name}() has failed on rank 0: {failure}")
        return result
    try:
        result = function(*arguments, **options)
    except BaseException as error:
        broadcast_object((f"{type(error).__name__}: {error}", None), 0, "on_root")
        raise
    broadcast_object(("", result), 0, "on_root")
    return result


# ---- Observability of a rank: statistics and timelines -------------------------------------------------


def stats() -> Statistics:
    """Returns this rank's counters since init(), and each rank's lateness: `Statistics` documents fields and
    units.

    The call is cheap and local: other ranks need not make it.

    Raises:
        NotInitializedError: before init() or after shutdown() (a ValueError).

    Example:
        stats = hvd.stats()
        print(f"{stats['moving_seconds']:.2f} s of data movement, {stats['busbw']:.2f} GB/s")
    """
    return observe.statistics(current())


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Starts writing the events of each operation to a file that Perfetto (https://ui.perfetto.dev) shows.

    Works at any time after init(), without an environment variable. Each rank that calls it writes its own
    file: rank 0 `file_path`, the others `file_path` with ".rank1" and so on. A timeline in progress is
    completed first. `hvdrun --timeline-filename` does this from the start, and merges the files.

    In an elastic job the timeline goes on when the ranks change: each process writes a file for each of its
    generations, `file_path`.worker<W>.generation<G>, and one for the changes of the ranks,
    `file_path`.worker<W>.changes. The training function may call this again each time it begins.

    Args:
        file_path: the file to create or overwrite.
        mark_cycles: also mark when this rank received a Decision of the coordinator.

    Raises:
        NotInitializedError: before init() or after shutdown() (a ValueError).
        OSError: the file cannot be written (a HorovodInternalError).

    Example:
        hvd.start_timeline("timeline.json")
        for inputs, targets in loader:
            ...  # a training step
        hvd.stop_timeline()
    """
    observe.start_timeline(current(), os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Completes the timeline's file; does nothing if none is being written. shutdown() does the same.

    Raises:
        NotInitializedError: before init() or after shutdown() (a ValueError).

    Example:
        hvd.start_timeline("first_steps.json")
        mean = hvd.allreduce(tensor)
        hvd.stop_timeline()  # the file is complete
    """
    observe.stop_timeline(current())


# ---- The early end of a training, of all ranks after the same step: a scheduler wants the machine back -


_CALL = Call("should_stop")
_ANY = Reduction(core.MAX)


def should_stop() -> bool:
    """Returns whether to save and end, because any rank was asked to: the same on all ranks.

    All ranks call it once a step, outside of compiled functions; ranks that have joined need not. It
    exchanges one byte. From the first call on, SIGUSR1 and a first SIGTERM, to a rank or to hvdrun, no longer
    end a rank; a second SIGTERM ends the rank, or the job, at once. Once the answer is True it stays so,
    without an exchange. In an elastic job only SIGUSR1 counts: a rank that gets SIGTERM leaves at the next
    commit.

    Returns:
        Whether any rank has received such a signal since its first call.

    Raises:
        RuntimeError: the first call is not in the main thread, which alone receives signals.
        PeerLostError: a rank died.

    Example:
        for inputs, targets in loader:
            ...  # a training step
            if hvd.should_stop():
                if hvd.rank() == 0:
                    save()
                sys.exit(143)
    """
    context = current()
    if context.is_stopping:
        return True
    requests = _requests()
    if not requests.is_listening:
        _listen(context, requests)
    data = bytearray([requests.is_asked])
    batch, view = pooled_batch(), view_of_bytes(data)
    describe(batch, core.ALLREDUCE, view, view.pointer, _CALL, how=_ANY)
    run(context, Operation(batch, view, lambda *_: None))
    context.is_stopping = bool(data[0])
    return context.is_stopping


@cache
def _requests() -> StopRequests:
    """Returns the requests to stop that this process has received as signals."""
    from sirtaki.bindings.bootstrap.termination import StopRequests  # imported late, as by hvd.init()

    return StopRequests(_has_failed)


def _has_failed() -> bool:
    """Returns whether the world of this process has failed."""
    return process.context is not None and process.context.failure is not None


def _listen(context: Context, requests: StopRequests) -> None:
    from sirtaki.bindings.bootstrap import lifecycle
    from sirtaki.bindings.bootstrap.job import ASK_TO_STOP

    if context.survivors is not None:  # SIGTERM is the elastic job's, and its next world goes on listening
        requests.listen([signal.SIGUSR1])
        return
    requests.listen([signal.SIGTERM, signal.SIGUSR1, ASK_TO_STOP])
    context.shutdown_callbacks.append(requests.end)
    lifecycle.report_can_stop()
