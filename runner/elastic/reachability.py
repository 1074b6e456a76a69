"""Hosts that do not reach each other although hvdrun reaches them: decides which of them stay in the job.

A firewall or a broken route may separate two hosts of a job. The ranks there cannot link to each other, as
often as they try; a part of the ranks can go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sirtaki.runner.elastic.pauses import doubled
from sirtaki.runner.elastic.workers import Worker

_FAILURES = 2  # generations that fail to link because of two hosts, before these count as separated
_SHORTEST_PAUSE, _LONGEST_PAUSE = 60.0, 3600.0  # seconds: each further attempt costs the others one to link

_Pair = frozenset[str]


class Reachability:
    """The pairs of hosts whose ranks could not reach each other."""

    def __init__(self) -> None:
        self._failures: dict[_Pair, int] = {}  # generations, since the two hosts were linked
        self._last: dict[_Pair, int] = {}  # the generation that has counted last
        self._times: Counter[str] = Counter()  # how often a host was left out

    def note_failure(self, generation: int, worker: Worker, members: Sequence[Worker]) -> None:
        """Notes the report of a member that has lost its generation, or could not link to the others.

        If it could not link, it has found out which hosts it does not reach. If all had been linked, the
        verdict on the lost rank is common: it proves a lost link of one of those that report it.
        """
        report = worker.report
        assert report is not None
        lost = (
            [report.culprit]
            if report.kind == "peer_lost" and all(member.has_received for member in members)
            else []
        )
        for other in (members[rank] for rank in report.unreachable or lost if 0 <= rank < len(members)):
            pair = frozenset((worker.slot.host, other.slot.host))
            if len(pair) == 2 and self._last.get(pair) != generation:
                self._last[pair] = generation
                self._failures[pair] = self._failures.get(pair, 0) + 1

    def note_links(self, members: Iterable[Worker]) -> None:
        """Notes that these workers have linked to each other."""
        hosts = {member.slot.host for member in members}
        for pair in [failure for failure in self._failures if failure <= hosts]:
            del self._failures[pair]

    def separated(self, workers: Sequence[Worker]) -> dict[str, str]:
        """Returns the hosts without which the others reach each other, each with a host it does not reach.

        The host that does not reach the most ranks goes first. If the network is cut in two, the larger part
        is left; if both are equal, that of the oldest worker. Ranks that can restore their commit count
        before the others that have one, and these before newcomers: a host that has the state of the training
        goes only if another one that stays has it.
        """
        ranks = Counter(worker.slot.host for worker in workers)
        holders = Counter(worker.slot.host for worker in workers if worker.can_restore)
        trained = Counter(worker.slot.host for worker in workers if worker.commit >= 0)
        first = min(workers, key=lambda worker: worker.number).slot.host if workers else ""
        cut = {pair for pair, count in self._failures.items() if count >= _FAILURES and pair <= ranks.keys()}
        gone: dict[str, str] = {}
        while cut:
            unreached = {host: _others(host, cut) for pair in cut for host in pair}
            missed = {
                host: [sum(counts[one] for one in others) for counts in (holders, trained, ranks)]
                for host, others in unreached.items()
            }
            worst = max(unreached, key=lambda host: (missed[host], first in unreached[host], host))
            gone[worst] = min(unreached[worst])
            cut = {pair for pair in cut if worst not in pair}
        return gone

    def leave_out(self, host: str) -> float:
        """Notes that a host is left out; returns for how many seconds. Then one more failure is enough."""
        for pair in [failure for failure in self._failures if host in failure]:
            self._failures[pair] = _FAILURES - 1
        self._times[host] += 1
        return doubled(_SHORTEST_PAUSE, _LONGEST_PAUSE, self._times[host] - 1)


def _others(host: str, pairs: Iterable[_Pair]) -> set[str]:
    """Returns the hosts that a host does not reach."""
    return {other for pair in pairs if host in pair for other in pair if other != host}
