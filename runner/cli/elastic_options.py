"""The options of hvdrun that make a job elastic.

Their names are Horovod's, except --elastic-survive, --spares and --spares-run-script.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ELASTIC = ("min_np", "max_np", "host_discovery_script")


def add_elastic_options(
    parser: argparse.ArgumentParser, whole_number: Callable[[str], int], seconds: Callable[[str], float]
) -> None:
    """Adds the options to the parser."""
    add = parser.add_argument_group("ranks that may be lost or join (docs/guide/elastic.md)").add_argument
    add(
        "--min-np",
        "--min-num-proc",
        metavar="N",
        type=whole_number,
        help="ranks may be lost: the job goes on while there are N; training runs in @hvd.elastic.run",
    )
    add("--max-np", "--max-num-proc", metavar="N", type=whole_number, help="ranks may join, up to N (-np)")
    add(
        "--host-discovery-script",
        metavar="PATH",
        type=Path,
        help="a program that prints the available hosts, a line 'host:slots' each; it runs every second",
    )
    add(
        "--slots-per-host",
        "--slots",
        metavar="N",
        type=whole_number,
        help="slots of hosts that the script prints without a number (1)",
    )
    elastic = "with --min-np"
    add(
        "--elastic-timeout",
        metavar="SECONDS",
        type=seconds,
        help=f"{elastic}: how long the job waits while there are too few ranks (600)",
    )
    add(
        "--reset-limit", metavar="N", type=whole_number, help=f"{elastic}: losses that the job survives (any)"
    )
    add(
        "--blacklist-cooldown-range",
        metavar=("MIN", "MAX"),
        nargs=2,
        type=seconds,
        help=f"{elastic}: pause in seconds before a slot that has lost ranks is used again (1 60)",
    )
    add(
        "--elastic-failure-domain",
        choices=("rank", "host"),
        help=f"{elastic}: a lost rank costs only itself, or, as with Horovod, all ranks of its host (rank)",
    )
    add(
        "--elastic-survive",
        choices=("lost", "exit"),
        help=f"{elastic}: survive lost ranks only, or, as Horovod, any that ends with an error (lost)",
    )
    _add_spares(add, whole_number, elastic)


def _add_spares(
    add: Callable[..., argparse.Action], whole_number: Callable[[str], int], elastic: str
) -> None:
    add(
        "--spares",
        metavar="N",
        type=whole_number,
        help=f"{elastic}: processes with modules loaded, spread over the hosts, that replace lost ranks (0)",
    )
    add(
        "--spares-run-script",
        action="store_true",
        default=None,
        help="with --spares: they also run the program, up to hvd.init()",
    )


def is_elastic(options: argparse.Namespace) -> bool:
    """Returns whether the options ask for an elastic job."""
    return any(getattr(options, name) is not None for name in _ELASTIC)


def unused_option(options: argparse.Namespace) -> str:
    """Returns an option that has an effect in elastic jobs only, if this is none and it is given; else ""."""
    names: dict[str, Any] = vars(options)
    others = (
        "elastic_timeout",
        "reset_limit",
        "blacklist_cooldown_range",
        "elastic_survive",
        "elastic_failure_domain",
        "slots_per_host",
        "spares",
        "spares_run_script",
    )
    given = [f"--{name.replace('_', '-')}" for name in others if names[name] is not None]
    return "" if is_elastic(options) or not given else given[0]
