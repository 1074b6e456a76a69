"""The core's settings as options of hvdrun. They are read from the core's own table, so none is declared
here.

Opening the core takes time, so this module is imported only for --help, or when an option is not one of
hvdrun's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sirtaki.runner.cli.autotune_options import loaded_settings
from sirtaki.runner.cli.horovod_flags import add_translated_flags
from sirtaki.runner.launch.errors import LaunchError

if TYPE_CHECKING:
    from sirtaki.bindings.library import Knob

_PREFIX = "knob_"


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
    add_translated_flags(parser, lambda name: _PREFIX + name)
    return knobs()


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


def _check(knob: Knob, value: str) -> None:
    from sirtaki.bindings.config import Config
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
