"""hvdrun's options for autotune that are not settings of the core."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Collection, Mapping
from pathlib import Path

from sirtaki.runner.cli.elastic_options import is_elastic
from sirtaki.runner.launch.errors import LaunchError

_KEPT = "kept"  # the verdict of the line with the result (adapters/common/autotune/tuner.py)
_ON = "1"


def add_autotune_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are no settings of the core."""
    parser.add_argument(
        "--autotune-load",
        metavar="FILE",
        type=Path,
        help="start with the settings that a job with --autotune-log FILE has kept; options override them",
    )


def check_autotune(options: argparse.Namespace, settings: Mapping[str, str]) -> None:
    """Raises LaunchError for combinations that have no meaning."""
    is_on = settings.get("SIRTAKI_AUTOTUNE") == _ON
    if is_on and is_elastic(options):
        raise LaunchError(
            "--autotune is for jobs whose ranks stay, because step times before and after a change of the "
            "ranks cannot be compared: leave it out, or the options of elastic jobs (--min-np, --max-np, "
            "--host-discovery-script); --autotune-load works with both"
        )
    if settings.get("SIRTAKI_AUTOTUNE_LOG") and not is_on:
        raise LaunchError("--autotune-log is for --autotune: give that as well, or leave it out")


def loaded_settings(path: Path, known: Collection[str]) -> dict[str, str]:
    """Returns the settings that a log of autotune ends with, by variable.

    Args:
        path: a file that --autotune-log has written.
        known: the names of the core's settings.

    Raises:
        LaunchError: it cannot be read, or has no result.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LaunchError(f"--autotune-load: cannot read {path}: {reason}") from None
    if not rows or rows[-1].get("verdict") != _KEPT:
        raise LaunchError(
            f"--autotune-load: {path} has no result: its last line has to have the verdict '{_KEPT}', which "
            "autotune writes when it, or the training, ends"
        )
    return {f"SIRTAKI_{name.upper()}": value for name, value in rows[-1].items() if name in known and value}
