"""The call `sirtaki.run`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sirtaki.runner.function.call import python_version, write_call
from sirtaki.runner.function.errors import RunError
from sirtaki.runner.function.pickling import import_cloudpickle, load_result
from sirtaki.runner.function.process import LauncherOrders, run_launcher
from sirtaki.runner.function.report import raise_reported
from sirtaki.runner.function.service import RankEnd, Summary, read_outcome, read_summary

CheckedCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def checked_call(func: Any, args: Any, kwargs: Any, name: str = "func") -> CheckedCall:
    """Returns a function and its arguments. `name` is that of the parameter for the function.

    Raises TypeError if one of them has the wrong type.
    """
    if not callable(func):
        hint = (
            "pass the function itself and its arguments in args, as in sirtaki.run(train, args=(0.1,), np=2)"
        )
        raise TypeError(f"{name} has to be a function, not {type(func).__name__}: {hint}")
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise TypeError(
            f"args has to be a tuple of arguments, not {type(args).__name__}: write args=(value,)"
        )
    if not isinstance(kwargs, Mapping | None) or not all(isinstance(name, str) for name in kwargs or ()):
        raise TypeError("kwargs has to be a dictionary from names of parameters to their values")
    return func, tuple(args), dict(kwargs or {})


def checked_variables(env: Any) -> dict[str, str]:
    """Returns variables for the environment of ranks. Raises TypeError or ValueError if they are none."""
    variables = dict(env or {})
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env has to be a dictionary of strings, but {name!r} is {value!r}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env has {name!r}: {value!r}, which cannot be a variable of an environment")
    return variables


def refuse_inside_a_rank(caller: str) -> None:
    """Raises RunError in a rank of a job that hvdrun or sirtaki.run has started."""
    if "SIRTAKI_RANK" in os.environ and "SIRTAKI_JOB" in os.environ:
        raise RunError(
            f"this is rank {os.environ['SIRTAKI_RANK']} of a job already, and a rank cannot start another "
            f"one: call {caller} outside of the function that it runs, and of programs that hvdrun starts"
        )


# ---- The calls of programs -----------------------------------------------------------------------------

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

    The parameters are those of `horovod.run`, in its order, and three more. docs/guide/run.md describes them.

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

    Example:
        def train(epochs):
            hvd.init()
            return f"{epochs} epochs on rank {hvd.rank()}"
        sirtaki.run(train, args=(10,), np=2)  # ["10 epochs on rank 0", "10 epochs on rank 1"]
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
    path = [folder for folder in sys.path if isinstance(folder, str)]
    try:
        run_launcher(LauncherOrders(os.getpid(), options, variables, file, results, path, python_version()))
        return results_in(results)
    finally:
        os.close(file)
        os.close(results)


# ---- The parameters of `sirtaki.run` as options of hvdrun ----------------------------------------------

_PATHS = (str, os.PathLike)


@dataclass(frozen=True)
class Option:
    """A parameter: the option of hvdrun, and a function that returns the option's values, or None."""

    flag: str
    values_of: Callable[[Any], Sequence[str] | None]
    takes: str


def _count(value: Any) -> Sequence[str] | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return [str(value)] if is_count else None


def _seconds(value: Any) -> Sequence[str] | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    return [str(value)] if is_number else None


def _path(value: Any) -> Sequence[str] | None:
    return [os.fspath(value)] if isinstance(value, _PATHS) else None


def _names(value: Any) -> Sequence[str] | None:
    names = [value] if isinstance(value, str) else value
    is_list = isinstance(names, Sequence) and all(isinstance(name, str) and name for name in names)
    return [",".join(names)] if is_list and names else None


def _launcher(value: Any) -> Sequence[str] | None:
    return [value] if isinstance(value, str) and value in ("ssh", "srun") else None


def _range(value: Any) -> Sequence[str] | None:
    both = list(value) if isinstance(value, Sequence) else []
    found = [_seconds(item) for item in both]
    return [text for item in found if item for text in item] if len(found) == 2 and all(found) else None


_COUNT = "a whole number of at least 1"
_SECONDS = "a number of seconds above 0"
_GIVE_A_SIZE = {"num_proc", "min_num_proc", "hosts", "hostfile", "host_discovery_script"}
_OTHER_NAMES = {
    "np": "num_proc",
    "min_np": "min_num_proc",
    "max_np": "max_num_proc",
    "network_interface": "network_interfaces",
}
_OPTIONS = {
    "num_proc": Option("-np", _count, _COUNT),
    "min_num_proc": Option("--min-np", _count, _COUNT),
    "max_num_proc": Option("--max-np", _count, _COUNT),
    "slots": Option("--slots-per-host", _count, _COUNT),
    "reset_limit": Option("--reset-limit", _count, _COUNT),
    "cooldown_range": Option("--blacklist-cooldown-range", _range, "a pair of seconds"),
    "hosts": Option("--hosts", _names, "hosts with their slots, such as 'hostA:4,hostB:4'"),
    "hostfile": Option("--hostfile", _path, "the path of a file"),
    "host_discovery_script": Option("--host-discovery-script", _path, "the path of a program"),
    "start_timeout": Option("--start-timeout", _seconds, _SECONDS),
    "ssh_port": Option("--ssh-port", _count, "the number of a port"),
    "ssh_identity_file": Option("--ssh-identity-file", _path, "the path of a file"),
    "output_filename": Option("--output-filename", _path, "the path of a folder"),
    "launcher": Option("--launcher", _launcher, "'ssh' or 'srun'"),
    "network_interfaces": Option("--network-interfaces", _names, "names such as 'eth0,eth1'"),
}


def options_of(arguments: Mapping[str, Any]) -> list[str]:
    """Returns the command-line options for arguments that are not None and have an option. Raises ValueError.

    Without a size there is one rank; with srun, one for each task of the Slurm job.
    """
    options: list[str] = []
    given: dict[str, str] = {}  # how each parameter was called
    for name, value in arguments.items():
        parameter = _OTHER_NAMES.get(name, name)
        if parameter not in _OPTIONS or value is None:
            continue
        if parameter in given:
            raise ValueError(f"{given[parameter]} and {name} are one parameter: give one of them")
        given[parameter] = name
        option = _OPTIONS[parameter]
        values = option.values_of(value)
        if values is None:
            raise ValueError(f"{name} takes {option.takes}, not {value!r}")
        options += [option.flag, *values]
    has_size = given.keys() & _GIVE_A_SIZE or arguments.get("launcher") == "srun"
    return options if has_size else ["-np", "1", *options]


# The results of a job in the process that has called `sirtaki.run`, or the exception that it raises.


_NO_SUMMARY = (
    "the launcher of the ranks ended before it could report their results: it was killed, or crashed"
)


def results_in(file: int) -> list[Any]:
    """Returns the results in a file that the launcher has written, by rank.

    Raises the exception of the rank that caused the job to fail, or RunError.
    """
    summary = read_summary(file)
    if summary is None:
        raise RunError(_NO_SUMMARY)
    if summary.error:
        raise RunError(summary.error)
    if summary.failure is not None:
        _raise_failure(file, summary)
    _check_complete(summary)
    returned = [rank for rank, outcome in summary.outcomes.items() if _has_returned(outcome)]
    if not returned:
        raise RunError("no rank has returned a result")
    ordered = sorted(returned, key=lambda worker: (summary.last_ranks.get(worker, worker), worker))
    ended = [summary.outcomes[key] for key in ordered]
    return [load_result(read_outcome(file, end), rank, end.host) for rank, end in enumerate(ended)]


def _has_returned(outcome: RankEnd) -> bool:
    return outcome.is_complete and outcome.report["kind"] == "returned"


def _check_complete(summary: Summary) -> None:
    for rank in range(summary.size):
        outcome = summary.outcomes.get(rank)
        if outcome is None or not _has_returned(outcome):
            raise RunError(f"rank {rank} ended with exit code 0 before the function had returned a result")


def _raise_failure(file: int, summary: Summary) -> NoReturn:
    culprit, failure = summary.culprit, RunError(summary.failure or "the job was interrupted")
    outcome = None if culprit is None else summary.outcomes.get(culprit)
    if culprit is None or outcome is None or not outcome.is_complete:
        raise failure
    rank, report = summary.last_ranks.get(culprit, culprit), outcome.report
    if report["kind"] == "returned":  # it failed after its function had returned
        raise failure

    def load() -> object:
        return import_cloudpickle().loads(read_outcome(file, outcome))

    raise_reported(rank, outcome.host, outcome.pid, report, load)
