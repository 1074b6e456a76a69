"""The environment variables that sirtaki reads: settings of the core, further variables, misspelt names."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sirtaki.bindings.library import knobs

# Read by bootstrap, bindings and hvdrun; every other variable with the prefix SIRTAKI_ is a setting of the
# core.
OWN = frozenset(
    f"SIRTAKI_{name}"
    for name in (
        *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        *("JOB", "KEY", "KEY_FILE", "RENDEZVOUS", "START_TIMEOUT", "NETWORK_INTERFACES", "PORT"),
        *("LAUNCHER", "INITIALISED_BY", "TIMELINE", "TIMELINE_MARK_CYCLES", "FULL_TRACEBACKS"),
        *("AS", "AS_HOROVOD", "SERVERS", "SERVER", "TABLES", "DEBUGGED"),
    )
)
# Kubernetes sets these for a Service whose name begins with "sirtaki".
_KUBERNETES = re.compile(
    r"SIRTAKI_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
# Horovod's variables that have another name here.
_HOROVOD_NAMES = {
    "stall_report": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_deadline": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
}
_NO_STALL_CHECK, _A_DAY = "HOROVOD_STALL_CHECK_DISABLE", "86400"


class Setting(NamedTuple):
    """A setting of the core in the environment, and the variable that sets it."""

    variable: str
    value: str


def settings(environment: Mapping[str, str] = os.environ) -> dict[str, Setting]:
    """Returns the core's settings in the environment: SIRTAKI_<NAME>, else HOROVOD_<NAME>, else Horovod's
    own name for it.
    """
    found = {}
    for knob in knobs():
        own = knob.name.upper()
        names = [f"SIRTAKI_{own}", f"HOROVOD_{own}", _HOROVOD_NAMES.get(knob.name, "")]
        if given := next((name for name in names if name in environment), ""):
            found[knob.name] = Setting(given, environment[given])
    if environment.get(_NO_STALL_CHECK, "0") not in ("", "0"):
        found.setdefault("stall_report", Setting(_NO_STALL_CHECK, _A_DAY))
    return found


def values(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the same settings without the variables, for the core.

    It also searches for NCCL where PyPI's packages nvidia-nccl-cu12 and nvidia-nccl-cu13 install it. The
    user's own choice comes first.
    """
    found = {knob: setting.value for knob, setting in settings(environment).items()}
    folders = [found.get("gpu_libraries", ""), *_package_folders()]
    return {**found, "gpu_libraries": ":".join(filter(None, folders))}


def _package_folders() -> list[str]:
    """Returns the folders of these packages, found without importing anything."""
    folders = (Path(entry, "nvidia", "nccl", "lib") for entry in sys.path)
    return [str(folder) for folder in folders if folder.is_dir() and ":" not in str(folder)]


def name_in(error: ValueError, given: Mapping[str, str]) -> ValueError:
    """Rewrites the core's rejection of a setting to name the user's own variable or option."""
    text = str(error)
    for knob, name in given.items():
        text = text.replace(f"setting '{knob}'", name, 1)
    return ValueError(text)


def check(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ValueError, naming the variable, for an invalid value of a setting."""
    from sirtaki.bindings.library import Config

    found = settings(environment)
    try:
        Config(values(environment))
    except ValueError as error:
        raise name_in(error, {knob: setting.variable for knob, setting in found.items()}) from None


def set_since_start() -> dict[str, str]:
    """Returns the variables of this process that it did not have at its start."""
    with open("/proc/self/environ", "rb") as file:
        names = {entry.partition(b"=")[0] for entry in file.read().split(b"\0")}
    return {name: value for name, value in os.environ.items() if os.fsencode(name) not in names}


def unknown(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns a sentence for each variable that has sirtaki's prefix but is unknown."""
    known = OWN | {f"SIRTAKI_{knob.name.upper()}" for knob in knobs()}
    others = [name for name in environment if name.startswith("SIRTAKI_") and name not in known]
    return [_describe_unknown(name, sorted(known)) for name in others if not _KUBERNETES.fullmatch(name)]


def _describe_unknown(name: str, known: list[str]) -> str:
    prefix = "SIRTAKI_"
    names = [item.removeprefix(prefix) for item in known]
    similar = difflib.get_close_matches(name.removeprefix(prefix), names, n=1, cutoff=0.7)
    hint = f": did you mean {prefix}{similar[0]}?" if similar else ""
    return f"the environment variable {name} means nothing to sirtaki and is ignored{hint}"
