"""Options of horovodrun that hvdrun lacks under the same name: their translation, or why they are rejected.

`--cache-capacity`, `--hosts` and others are identical and need no entry.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sirtaki.runner.launch.errors import LaunchError

_OWN_STEPS = "autotune chooses the number of its steps, and models no noise: leave it out"

# Options with an alternative, by the reason. With or without a value, the answer is the reason.
_REFUSED_FOR: dict[str, Sequence[str]] = {
    "hvdrun keeps nothing between jobs: leave it out": ("--disable-cache",),
    "there is no MPI here: leave it out": ("--mpi", "--jsrun", "--mpi-args", "--mpi-threads-disable"),
    "it is for MPI and NCCL; to keep NCCL off InfiniBand, set NCCL_IB_DISABLE=1": ("--tcp",),
    "there are no cycles; the closest equivalent is --report-window SECONDS": ("--cycle-time-ms",),
    "all-gathers need no such option: leave it out": ("--hierarchical-allgather",),
    "use --cpu-algorithm hierarchical": ("--torus-allreduce",),
    _OWN_STEPS: (
        *("--autotune-warmup-samples", "--autotune-steps-per-sample"),
        *("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
    ),
    "hvdrun binds no rank to cores: start the command through taskset or numactl": (
        "--binding-args",
        "--thread-affinity",
    ),
    "all operations on a GPU share one stream": ("--num-nccl-streams",),
    "use --start-timeout for the start, --progress-deadline afterwards": ("--gloo-timeout-seconds",),
    "there are no log levels: --verbose shows more, --log-descriptor -1 silences the ranks' core": (
        "--log-level",
        "--log-with-timestamp",
        "--log-hide-timestamp",
    ),
    "pipe hvdrun's output through `ts` instead": ("-prefix-timestamp", "--prefix-output-with-timestamp"),
}
REFUSED = {flag: reason for reason, flags in _REFUSED_FOR.items() for flag in flags}
# Options that request the behaviour that is always on.
_ALREADY_SO = (
    *("--gloo", "--no-autotune", "--stall-check", "--no-torus-allreduce", "--no-hierarchical-allgather"),
    *("--no-mpi-threads-disable", "--log-without-timestamp", "--no-log-hide-timestamp"),
)


@dataclass(frozen=True)
class Translation:
    """A Horovod flag for a setting of the core: sets its value, converted to sirtaki's format, or `fixed`."""

    knob: str
    in_our_words: Callable[[str], str] | None = None
    fixed: str = ""


TRANSLATED = {
    "--fusion-threshold-mb": Translation("fusion_threshold", lambda value: f"{value}M"),
    "--autotune-log-file": Translation("autotune_log", str),
    "--hierarchical-allreduce": Translation("cpu_algorithm", fixed="hierarchical"),
    "--no-hierarchical-allreduce": Translation("cpu_algorithm", fixed="direct"),
    "--stall-check-warning-time-seconds": Translation("stall_report", str),
    "--stall-check-shutdown-time-seconds": Translation("stall_deadline", str),
    "--no-stall-check": Translation("stall_report", fixed="86400"),
}


class _Refuse(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        raise LaunchError(f"hvdrun does not take {option_string}: {REFUSED[option_string or '']}")


def add_horovod_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that need no knowledge of the core's settings."""
    for flag in REFUSED:
        parser.add_argument(flag, nargs="?", action=_Refuse, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for flag in _ALREADY_SO:
        nothing = argparse.SUPPRESS
        parser.add_argument(flag, action="store_true", dest=nothing, default=nothing, help=nothing)


def add_translated_flags(parser: argparse.ArgumentParser, destination: Callable[[str], str]) -> None:
    """Adds Horovod's flags for settings of the core; `destination` maps a setting to its argparse `dest`."""
    group = parser.add_argument_group("Horovod's names for the same settings")
    for flag, translation in TRANSLATED.items():
        into, ours = destination(translation.knob), f"--{translation.knob.replace('_', '-')}"
        if translation.in_our_words is None:
            text = f"{ours} {translation.fixed}"
            group.add_argument(flag, action="store_const", const=translation.fixed, dest=into, help=text)
        else:
            words = translation.in_our_words
            group.add_argument(flag, type=words, dest=into, metavar="N", help=f"{ours} {words('N')}")
