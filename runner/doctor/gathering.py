"""Gathers the facts about this host, one topic at a time, each with its own deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from sirtaki.bindings._version import VERSION
from sirtaki.runner.doctor import local_network, machine
from sirtaki.runner.doctor.deadline import answer_within
from sirtaki.runner.doctor.facts import FRAMEWORKS, Framework, HostFacts
from sirtaki.runner.doctor.trials import TRIAL_SECONDS, find_framework, try_adapter, try_framework

_SECONDS = 10.0
Note = Callable[[str], None]


class Topic(NamedTuple):
    """A topic's gatherer, and the seconds that it may take."""

    gather: Callable[[], object]
    seconds: float = _SECONDS


TOPICS = {
    "installation": Topic(machine.gather_installation),
    "cores": Topic(machine.gather_cores),
    "memory": Topic(machine.gather_memory),
    "kernel": Topic(machine.gather_kernel),
    "limits": Topic(machine.gather_limits),
    "network": Topic(local_network.gather_network),
    "identity": Topic(local_network.gather_identity),
    "variables": Topic(machine.gather_variables),
    "ssh": Topic(local_network.gather_ssh),
    "gpu": Topic(machine.gather_gpu, TRIAL_SECONDS),
}


class Trial(Enum):
    """How frameworks are tried."""

    NONE = "none"  # their versions are read from the metadata of packages
    IMPORT = "import"
    JOB = "job"  # of two ranks


class Choice(NamedTuple):
    """The frameworks to look at, and how they are tried."""

    frameworks: Sequence[str] = FRAMEWORKS
    trial: Trial = Trial.JOB


def gather(choice: Choice = Choice(), note: Note = lambda text: None) -> HostFacts:  # noqa: B008
    """Returns all facts about this host; calls `note` with the name of each topic before it begins."""
    found: dict[str, Any] = {}
    missed: dict[str, str] = {}
    for name in (*TOPICS, "frameworks"):
        note(name)
        topic = TOPICS[name] if name in TOPICS else _frameworks(_possible(choice, found), note)
        found[name], reason = answer_within(topic.seconds, topic.gather)
        if reason:
            missed[name] = reason
    return HostFacts(version=VERSION, missed=missed, **found)


def _possible(choice: Choice, found: Mapping[str, Any]) -> Choice:
    """Returns what can work: no adapter without the core, and no job with a wrong setting."""
    installation, variables = found["installation"], found["variables"]
    if installation is not None and installation.broken:
        return Choice((), Trial.NONE)
    if variables is not None and variables.invalid and choice.trial is Trial.JOB:
        return Choice(choice.frameworks, Trial.IMPORT)
    return choice


_TRIALS = {Trial.NONE: find_framework, Trial.IMPORT: try_adapter, Trial.JOB: try_framework}


def _frameworks(choice: Choice, note: Note) -> Topic:
    def gather_frameworks() -> tuple[Framework, ...]:
        found = []
        for name in choice.frameworks:
            note(f"sirtaki.{name}")
            found.append(_TRIALS[choice.trial](name))
        return tuple(found)

    return Topic(gather_frameworks, 2 * TRIAL_SECONDS * max(1, len(choice.frameworks)))
