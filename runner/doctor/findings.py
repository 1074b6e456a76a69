"""A finding, the rule that makes it, and the picture that rules judge. Nothing here does any I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from sirtaki.runner.doctor.facts import ClockOffset, HostFacts, JobFacts, LinkFacts
from sirtaki.runner.hosts.ssh import StartFailure

PROBLEM, WARNING, NOTE = "problem", "warning", "note"  # a problem makes the exit code 1
LEVELS = (PROBLEM, WARNING, NOTE)
_P = TypeVar("_P")  # a picture: what rules judge


@dataclass(frozen=True)
class Picture:
    """All facts, by the names of hosts as the user wrote them, and the number of ranks on each host."""

    hosts: Mapping[str, HostFacts]
    ranks: Mapping[str, int]
    failures: Mapping[str, StartFailure] = field(default_factory=dict)  # of hosts that sent no facts
    links: tuple[LinkFacts, ...] = ()
    clocks: Mapping[str, ClockOffset] = field(default_factory=dict)
    job: JobFacts | None = None  # on all hosts; None: it was not tried

    @property
    def has_several_hosts(self) -> bool:
        return len(self.ranks) > 1

    @property
    def size(self) -> int:
        return sum(self.ranks.values())

    def each(self, topic: str) -> Iterator[tuple[str, Any]]:
        """Yields the hosts of which a topic is known, and that topic."""
        for host, facts in self.hosts.items():
            if (known := getattr(facts, topic)) is not None:
                yield host, known


class Evidence(NamedTuple):
    """A rule's observation on a host ("" for several); `values` fill the braces of the rule's texts."""

    host: str
    text: str
    values: Mapping[str, object] = {}


@dataclass(frozen=True)
class Rule(Generic[_P]):
    """A rule. `what` and `remedy` may have names in braces."""

    name: str
    level: str
    what: str
    remedy: str
    find: Callable[[_P], Iterable[Evidence]]


@dataclass(frozen=True)
class Finding:
    """A rule that applies: a line of the doctor's output. Without hosts it concerns all of them."""

    rule: str
    level: str
    hosts: tuple[str, ...]
    what: str
    evidence: str
    remedy: str

    def __str__(self) -> str:
        place = f"{', '.join(self.hosts)}: " if self.hosts else ""
        evidence = f" ({self.evidence})" if self.evidence else ""
        return f"{self.level}: {place}{self.what}{evidence}: {self.remedy} [{self.rule}]"


def judge(picture: _P, rules: Iterable[Rule[_P]]) -> list[Finding]:
    """Returns all findings, most serious first; findings of several hosts with the same remedy are merged."""
    found = [finding for rule in rules for finding in _apply(rule, picture)]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def _apply(rule: Rule[_P], picture: _P) -> Iterator[Finding]:
    texts: dict[tuple[str, str], list[Evidence]] = {}
    for evidence in rule.find(picture):
        key = rule.what.format(**evidence.values), rule.remedy.format(**evidence.values)
        texts.setdefault(key, []).append(evidence)
    for (what, remedy), each in texts.items():
        hosts = tuple(dict.fromkeys(fact.host for fact in each if fact.host))
        text = "; ".join(dict.fromkeys(fact.text for fact in each if fact.text))
        yield Finding(rule.name, rule.level, hosts, what, text, remedy)
