"""The environment of each rank."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sirtaki.bindings.bootstrap.job import SERVER
from sirtaki.bindings.topology import RankPlacement

AS_HOROVOD = "SIRTAKI_AS_HOROVOD"
# The folder whose package `horovod` stands for sirtaki, on the host of the ranks (adapters/as_horovod).
_HOROVOD_FOLDER = str(Path(__file__).parents[2] / "as_horovod" / "packages")
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Variables of a login, a shell or one machine, which are therefore not copied to other hosts.
_LOCAL_VARIABLES = (
    *("HOME", "LOGNAME", "USER", "USERNAME", "MAIL", "HOST", "HOSTNAME", "HOSTTYPE", "INVOCATION_ID"),
    *("SHELL", "SHLVL", "PWD", "OLDPWD", "_", "ENV", "BASH_ENV", "BASH_FUNC_*"),
    *("TTY", "TMUX", "TMUX_PANE", "STY", "WINDOWID", "DISPLAY", "XAUTHORITY", "WAYLAND_DISPLAY"),
    *("SSH_*", "XDG_*", "DBUS_*", "JOURNAL_STREAM", "TMPDIR", "TMP", "TEMP"),
    *("*CUDA_VISIBLE_DEVICES", "*ROCR_VISIBLE_DEVICES", "*HIP_VISIBLE_DEVICES"),
    *("SIRTAKI_KEY", "SIRTAKI_KEY_FILE"),
)
_OF_A_RANK = ("SIRTAKI_RANK", "SIRTAKI_SIZE", "SIRTAKI_JOB", "SIRTAKI_RENDEZVOUS")


@dataclass(frozen=True)
class RankEnvironment:
    """The environment of a job's ranks and table servers on a host."""

    job: str
    rendezvous: str
    key_file: str
    start_timeout: float
    additions: Mapping[str, str] = field(default_factory=dict)  # thread counts and knobs
    torch: Mapping[str, str] = field(default_factory=dict)  # torch's, of the host; empty: none are set

    def of(self, placement: RankPlacement, base: Mapping[str, str]) -> dict[str, str]:
        """Returns the whole environment of a rank, based on `base`."""
        environment = self._of_job(base)
        for name, value in asdict(placement).items():
            environment[f"SIRTAKI_{name.upper()}"] = environment[f"HOROVOD_{name.upper()}"] = str(value)
        if self.torch:
            environment = _without_torchruns(environment) | {
                **self.torch,
                **_torch_variables(placement),
            }
        return environment

    def of_server(self, index: int, base: Mapping[str, str]) -> dict[str, str]:
        """Returns the whole environment of a table server, based on `base`."""
        return {**self._of_job(base), SERVER: str(index)}

    def _of_job(self, base: Mapping[str, str]) -> dict[str, str]:
        environment = {"PYTHONUNBUFFERED": "1", **base, **self.additions}
        environment["SIRTAKI_LAUNCHER"] = "hvdrun"
        environment["SIRTAKI_JOB"] = self.job
        environment["SIRTAKI_RENDEZVOUS"] = self.rendezvous
        environment["SIRTAKI_KEY_FILE"] = self.key_file
        environment["SIRTAKI_START_TIMEOUT"] = f"{self.start_timeout:g}"
        if environment.get(AS_HOROVOD) == "1":
            path = environment.get("PYTHONPATH", "")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_HOROVOD_FOLDER, path)))
        return environment


def _without_torchruns(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the variables by which torchrun says that it serves the store."""
    return {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}


def _torch_variables(placement: RankPlacement) -> dict[str, str]:
    """Returns the variables that each rank has for itself."""
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_size),
    }


def encrypts(environment: Mapping[str, str]) -> bool:
    """Returns whether the ranks encrypt connections between hosts, according to their variables."""
    names = ("SIRTAKI_ENCRYPT", "HOROVOD_ENCRYPT")
    return next((environment[name] for name in names if name in environment), "0") == "1"


def thread_counts(size: int, cores: int, user: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that divide `cores` among a host's `size` ranks, except the user's own.

    The math libraries fall back to OMP_NUM_THREADS: if the user has set it, it applies to all of them.
    """
    if "OMP_NUM_THREADS" in user:
        return {}
    return {name: str(max(1, cores // size)) for name in THREAD_COUNTS if name not in user}


def outside_of_a_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which hvdrun starts a job, also where this process is a rank."""
    return {name: value for name, value in environment.items() if name not in _OF_A_RANK}


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of hvdrun's environment that is copied to other hosts."""
    return {
        name: value
        for name, value in environment.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _LOCAL_VARIABLES)
    }


def merge_login(sent: Mapping[str, str], login: Mapping[str, str]) -> dict[str, str]:
    """Returns the base environment of a rank on another host: that host's own, overridden by what was sent.

    The program search path is that of hvdrun's host, then that of the login on this host.
    """
    environment = {**login, **sent}
    folders = [*sent.get("PATH", "").split(os.pathsep), *login.get("PATH", "").split(os.pathsep)]
    if path := os.pathsep.join(dict.fromkeys(folder for folder in folders if folder)):
        environment["PATH"] = path
    return environment
