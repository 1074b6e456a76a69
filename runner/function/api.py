"""The call `sirtaki.run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sirtaki.runner.function.arguments import (
    CheckedCall,
    checked_call,
    checked_variables,
    refuse_inside_a_rank,
)
from sirtaki.runner.function.call import python_version, write_call
from sirtaki.runner.function.options import options_of
from sirtaki.runner.function.process import Orders, run_launcher
from sirtaki.runner.function.results import results_in

_WORKER = "sirtaki.runner.function.worker"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    hosts: str | Sequence[str] | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    host_discovery_script: str | os.PathLike[str] | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | os.PathLike[str] | None = None,
    disable_cache: bool | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | Sequence[str] | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | os.PathLike[str] | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    env: Mapping[str, str] | None = None,
    oversubscribe: bool = False,
    launcher: str | None = None,
) -> list[Any]:
    """Calls `func(*args, **kwargs)` on every rank of a new job, and returns the results, by rank.

    The parameters are those of `horovod.run`, in its order, and three more. docs/run.md describes them.

    Args:
        func: a function, also one of a script or a notebook; a lambda; or another callable object.
        args, kwargs: its arguments, the same on every rank.
        num_proc, np: the number of ranks; one per slot of the hosts by default, or 1 without hosts.
        min_num_proc, max_num_proc: make the job elastic, and the list one by final rank.
        slots, reset_limit, cooldown_range, host_discovery_script: hvdrun's options for elastic jobs.
        hosts, hostfile: the hosts and their slots, as in "hostA:4,hostB:4".
        start_timeout: seconds that a rank waits in hvd.init() for the others (120).
        output_filename: a folder for the output of each rank, in addition.
        verbose: whether to show what the launcher does.
        network_interfaces: the only ones that ranks use to reach each other.
        executable: the Python of the ranks; by default that of this process.
        env: variables of the ranks' environment, in addition to those of this process.
        oversubscribe: whether to start ranks although their hosts seem to have no room for them.
        launcher: the program that starts ranks on other hosts: "ssh", or "srun" in a Slurm job ("ssh").
        disable_cache, use_gloo, use_mpi, mpi_args: have no meaning here.

    Raises:
        The exception that `func` has raised on the rank that failed first; its `__cause__` is a RemoteError
        with the rank, the host and the traceback there.
        RemoteError: that exception cannot be pickled.
        RunError: the job could not start, or a rank ended without a result.
        ValueError, TypeError: an argument is wrong, or cannot be sent.
    """
    options = options_of(locals())
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi exclude each other, and neither has a meaning here")
    if launcher == "srun" and (ssh_port is not None or ssh_identity_file is not None):
        raise ValueError("ssh_port and ssh_identity_file are for ssh: leave them out, or launcher='srun'")
    options += ["--verbose"] * bool(verbose) + ["--oversubscribe"] * bool(oversubscribe)
    python = sys.executable if executable is None else os.fspath(executable)
    return _run(checked_call(func, args, kwargs), [*options, python, "-m", _WORKER], checked_variables(env))


def _run(call: CheckedCall, options: Sequence[str], variables: Mapping[str, str]) -> list[Any]:
    refuse_inside_a_rank("sirtaki.run")
    file = write_call(*call)
    results = os.memfd_create("sirtaki-results")
    path = [one for one in sys.path if isinstance(one, str)]
    try:
        run_launcher(Orders(os.getpid(), options, variables, file, results, path, python_version()))
        return results_in(results)
    finally:
        os.close(file)
        os.close(results)
