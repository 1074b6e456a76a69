"""Checks the options of `sirtaki bench` before anything is started, and makes the ranks' plan of them."""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from collections.abc import Sequence

from sirtaki.runner.allocation import find_allocation
from sirtaki.runner.bench.kinds import KINDS, SETTINGS
from sirtaki.runner.bench.messages import Plan
from sirtaki.runner.bench.peers import CUDA, DEVICES, MPI, check_peers, left_out, parse_peers
from sirtaki.runner.bench.plot import check_plot
from sirtaki.runner.bench.sizes import ITEMSIZES, check_range
from sirtaki.runner.errors import LaunchError

_MOST_ROUNDS = 200  # ranks send a figure for each


def make_plan(options: Namespace) -> Plan:
    """Returns the plan that the options ask for. Raises LaunchError if there can be none."""
    kind = KINDS.get(options.operation)
    if kind is None:
        raise LaunchError(f"there is no operation {options.operation!r}: choose one of {', '.join(KINDS)}")
    if options.dtype not in ITEMSIZES:
        raise LaunchError(f"-d takes {', '.join(ITEMSIZES)}, not {options.dtype!r}")
    if options.rounds > _MOST_ROUNDS:
        raise LaunchError(f"--rounds takes at most {_MOST_ROUNDS}, not {options.rounds}")
    for name, setting in SETTINGS.items():
        if name not in kind.settings and getattr(options, name) != setting.default:
            raise LaunchError(f"{options.operation} is measured without {setting.flag}: leave it out")
    if "first" in kind.settings:
        check_range(options.first, options.last, options.factor)
    if options.device not in DEVICES:
        raise LaunchError(f"--device takes {' or '.join(DEVICES)}, not {options.device!r}")
    named = parse_peers(options.peers)
    others = left_out(named, options.device)
    peers = [name for name in named if name not in others]
    for name in named:
        if name not in kind.peers:
            taken = ", ".join(kind.peers) or "none"
            raise LaunchError(f"{options.operation} is not measured with the peer {name}: it takes {taken}")
    _check_ranks(options, peers)
    extra = "torch" if options.device == CUDA else kind.extra
    if importlib.util.find_spec(extra) is None:
        raise LaunchError(f"{options.operation} needs {extra}: pip install 'sirtaki[{extra}]'")
    check_peers(peers, options.dtype)
    if options.plot is not None:
        check_plot(options.plot)
    sizes = options.first, options.last, options.factor
    return Plan(options.operation, options.dtype, *sizes, options.rounds, peers, options.device, others)


def _check_ranks(options: Namespace, peers: Sequence[str]) -> None:
    """Raises LaunchError if there are too few ranks, or if MPI would have to start them elsewhere."""
    if options.size == 1:
        raise LaunchError("one rank exchanges nothing: measure with -np 2 or more")
    has_hosts = options.hosts is not None or options.hostfile is not None
    if options.size is None and not has_hosts and find_allocation(os.environ) is None:
        raise LaunchError("the number of ranks is missing: give it with -np, for example -np 2")
    if MPI in peers and (has_hosts or options.size is None):
        raise LaunchError(
            f"the peer {MPI} is measured on this host only: give -np, and leave out -H and --hostfile"
        )
