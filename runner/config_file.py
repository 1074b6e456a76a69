"""--config-file: a YAML file with Horovod's keys, or those of hvdrun, as options of the command line.

Both forms become the same options, so the meaning of a flag, and why it is rejected, is stated in one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sirtaki.runner.errors import LaunchError

_SECTIONS = {
    "params": {
        "fusion_threshold_mb": "--fusion-threshold-mb",
        "cycle_time_ms": "--cycle-time-ms",
        "cache_capacity": "--cache-capacity",
        "hierarchical_allreduce": "--[no-]hierarchical-allreduce",
        "hierarchical_allgather": "--[no-]hierarchical-allgather",
        "torus_allreduce": "--[no-]torus-allreduce",
    },
    "autotune": {
        "enabled": "--[no-]autotune",
        "log_file": "--autotune-log-file",
        "warmup_samples": "--autotune-warmup-samples",
        "steps_per_sample": "--autotune-steps-per-sample",
        "bayes_opt_max_samples": "--autotune-bayes-opt-max-samples",
        "gaussian_process_noise": "--autotune-gaussian-process-noise",
    },
    "timeline": {"filename": "--timeline-filename", "mark_cycles": "--[no-]timeline-mark-cycles"},
    "stall_check": {
        "enabled": "--[no-]stall-check",
        "warning_time_seconds": "--stall-check-warning-time-seconds",
        "shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
    },
    "library_options": {
        "mpi_threads_disable": "--[no-]mpi-threads-disable",
        "num_nccl_streams": "--num-nccl-streams",
        "thread_affinity": "--thread-affinity",
        "gloo_timeout_seconds": "--gloo-timeout-seconds",
    },
    "logging": {"level": "--log-level", "with_timestamp": "--log-[with|without]-timestamp"},
}
_CONTROLLERS = {"gloo": "--gloo", "mpi": "--mpi", "jsrun": "--jsrun"}
_CHOICES = {"[no-]": ("", "no-"), "[with|without]": ("with", "without")}  # the prefixes for true and false


def config_arguments(path: Path) -> list[str]:
    """Returns the options that the file stands for. Raises LaunchError for what it does not recognise."""
    return list(_arguments(_read(path), str(path)))


def _read(path: Path) -> Mapping[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise LaunchError("--config-file needs PyYAML: install it with `pip install pyyaml`") from None
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise LaunchError(f"{path} is not valid YAML: {error}") from None
    if content is not None and not isinstance(content, Mapping):
        raise LaunchError(f"{path} has to consist of keys and values, such as 'params:'")
    return content or {}


def _arguments(content: Mapping[Any, Any], file: str) -> Iterator[str]:
    for section, value in content.items():
        if section == "controller":
            if value not in _CONTROLLERS:
                raise LaunchError(f"{file}: controller is one of {', '.join(_CONTROLLERS)}, not {value!r}")
            yield _CONTROLLERS[value]
        elif section in _SECTIONS:
            yield from _of_section(section, value, file)
        else:
            yield from _of_option(section, value, file)


def _of_section(section: str, content: Any, file: str) -> Iterator[str]:
    if not isinstance(content, Mapping):
        raise LaunchError(f"{file}: {section} has to have keys and values below it")
    for key, value in content.items():
        if key not in _SECTIONS[section]:
            known = ", ".join(_SECTIONS[section])
            raise LaunchError(f"{file}: there is no {section}.{key}: {section} has {known}")
        if value is not None:
            yield _option(_SECTIONS[section][key], f"{section}.{key}", value, file)


def _of_option(key: Any, value: Any, file: str) -> Iterator[str]:
    """Yields an option of hvdrun itself that is at the top level of the file: "num_proc: 4"."""
    if not isinstance(key, str) or not key.replace("_", "").replace("-", "").isalnum():
        raise LaunchError(f"{file}: {key!r} is not a setting")
    flag = f"--{key.replace('_', '-')}"
    if value is True:
        yield flag
    elif value is not False and value is not None:
        yield f"{flag}={_plain(value, key, file)}"


def _option(flag: str, key: str, value: Any, file: str) -> str:
    for choice, (yes, no) in _CHOICES.items():
        if choice in flag:
            if not isinstance(value, bool):
                raise LaunchError(f"{file}: {key} is true or false, not {value!r}")
            return flag.replace(choice, yes if value else no)
    return f"{flag}={_plain(value, key, file)}"


def _plain(value: Any, key: str, file: str) -> str:
    if isinstance(value, list) and all(isinstance(one, str | int) for one in value):
        return ",".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise LaunchError(f"{file}: {key} has to be a number or a text, not {value!r}")
    return str(value)
