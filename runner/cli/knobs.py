"""The core's settings as options of hvdrun. They are read from the core's own table, so none is declared
here.

Opening the core takes time, so this module is imported only for --help, or when an option is not one of
hvdrun's own.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sirtaki.runner.launch.errors import LaunchError

if TYPE_CHECKING:
    from sirtaki.bindings.library import Knob

_PREFIX = "knob_"
_KEPT = "kept"  # the verdict of the line with the result (adapters/common/autotune/tuner.py)


@dataclass(frozen=True)
class _Translation:
    """A Horovod flag for a setting of the core: sets its value, converted to sirtaki's format, or `fixed`."""

    knob: str
    in_our_words: Callable[[str], str] | None = None
    fixed: str = ""


_TRANSLATED = {
    "--fusion-threshold-mb": _Translation("fusion_threshold", lambda value: f"{value}M"),
    "--autotune-log-file": _Translation("autotune_log", str),
    "--hierarchical-allreduce": _Translation("cpu_algorithm", fixed="hierarchical"),
    "--no-hierarchical-allreduce": _Translation("cpu_algorithm", fixed="direct"),
    "--stall-check-warning-time-seconds": _Translation("stall_report", str),
    "--stall-check-shutdown-time-seconds": _Translation("stall_deadline", str),
    "--no-stall-check": _Translation("stall_report", fixed="86400"),
}


def add_knobs(parser: argparse.ArgumentParser) -> Sequence[Knob]:
    """Adds an option for each of the core's settings; none if the core cannot be opened here."""
    try:
        from sirtaki.bindings.library import knobs
    except ImportError:
        return ()
    group = parser.add_argument_group("core settings, the same on all ranks")
    for knob in knobs():
        help_text = f"{knob.help} ({knob.default})".replace("%", "%%")
        if knob.type == "boolean":
            group.add_argument(
                _flag(knob), dest=_PREFIX + knob.name, action="store_const", const="1", help=help_text
            )
            continue
        value = "|".join(knob.choices) or knob.type.upper()
        group.add_argument(_flag(knob), dest=_PREFIX + knob.name, metavar=value, help=help_text)
    _add_translated_flags(parser)
    return knobs()


def _add_translated_flags(parser: argparse.ArgumentParser) -> None:
    """Adds Horovod's flags for settings of the core."""
    group = parser.add_argument_group("Horovod's names for the same settings")
    for flag, translation in _TRANSLATED.items():
        into, ours = _PREFIX + translation.knob, f"--{translation.knob.replace('_', '-')}"
        if translation.in_our_words is None:
            text = f"{ours} {translation.fixed}"
            group.add_argument(flag, action="store_const", const=translation.fixed, dest=into, help=text)
        else:
            words = translation.in_our_words
            group.add_argument(flag, type=words, dest=into, metavar="N", help=f"{ours} {words('N')}")


def knob_environment(options: argparse.Namespace, knobs: Sequence[Knob]) -> dict[str, str]:
    """Returns the variables that pass the settings to the ranks. Raises LaunchError for a bad value."""
    chosen = {}
    for knob in knobs:
        value = getattr(options, _PREFIX + knob.name)
        if value is not None:
            _check(knob, value)
            chosen[f"SIRTAKI_{knob.name.upper()}"] = value
    return chosen


def loaded_environment(path: Path, knobs: Sequence[Knob]) -> dict[str, str]:
    """Returns the variables for the settings that a log of autotune ends with.

    Raises:
        LaunchError: the file cannot be read, has no result, or has a bad value.
    """
    names = {f"SIRTAKI_{knob.name.upper()}": knob for knob in knobs}
    found = loaded_settings(path, {knob.name for knob in knobs})
    for variable, value in found.items():
        _check(names[variable], value)
    return found


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


def _check(knob: Knob, value: str) -> None:
    from sirtaki.bindings.library import Config
    from sirtaki.bindings.variables import name_in

    try:
        Config({knob.name: value})
    except ValueError as error:
        raise LaunchError(str(name_in(error, {knob.name: _flag(knob)}))) from None


def check_environment(environment: Mapping[str, str]) -> list[str]:
    """Returns warnings about variables without meaning. Raises LaunchError for a bad value of a setting."""
    try:
        from sirtaki.bindings import variables
    except ImportError:  # the core cannot be opened here
        return []
    try:
        variables.check(environment)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    return variables.unknown(environment)


def _flag(knob: Knob) -> str:
    return f"--{knob.name.replace('_', '-')}"
