"""The program `sirtaki`: runs the subcommand that its first argument names."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from sirtaki.runner.launch.errors import LaunchError

CANNOT_RUN = 2  # the exit code of a subcommand that could not do its work


class Command(NamedTuple):
    """A subcommand: its module, with `main(arguments)` that returns the exit code, and its help line."""

    module: str
    help: str


COMMANDS = {
    "bench": Command("sirtaki.runner.bench.cli", "measures collectives beside the machine's limit and peers"),
    "doctor": Command("sirtaki.runner.doctor.cli", "tries what a job needs on each host, and names remedies"),
    "top": Command("sirtaki.runner.top.cli", "shows the ranks of a running job, once a second"),
    "trace": Command("sirtaki.runner.trace.cli", "finds the slow rank or exchange in the timelines of a job"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name in ("-v", "--version"):
        from sirtaki.bindings._version import VERSION

        print(f"sirtaki {VERSION}")
        return 0
    if name not in COMMANDS:
        print(f"sirtaki: there is no command {name!r}\n{_usage()}", file=sys.stderr)
        return CANNOT_RUN
    try:
        code: int = importlib.import_module(COMMANDS[name].module).main(rest)
        sys.stdout.flush()
        return code
    except LaunchError as error:
        print(f"sirtaki {name}: {error}", file=sys.stderr)
        return CANNOT_RUN
    except BrokenPipeError:  # whoever reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CANNOT_RUN
    except KeyboardInterrupt:
        return 130
    except Exception:  # the interpreter's own exit code, 1, means that a problem was found
        traceback.print_exc()
        return CANNOT_RUN


def _usage() -> str:
    lines = [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    text = "\n".join(["Usage: sirtaki COMMAND [options]", "", *lines])
    return f"{text}\n\n`sirtaki COMMAND --help` lists the options. hvdrun starts jobs: `hvdrun --help`."
