"""The parameters of `sirtaki.run` as options of hvdrun."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    is_list = isinstance(names, Sequence) and all(isinstance(one, str) and one for one in names)
    return [",".join(names)] if is_list and names else None


def _launcher(value: Any) -> Sequence[str] | None:
    return [value] if isinstance(value, str) and value in ("ssh", "srun") else None


def _range(value: Any) -> Sequence[str] | None:
    both = list(value) if isinstance(value, Sequence) else []
    found = [_seconds(one) for one in both]
    return [text for one in found if one for text in one] if len(found) == 2 and all(found) else None


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
    """Returns the options for those arguments that have one and are not None. Raises ValueError.

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
