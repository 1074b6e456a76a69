"""Chooses the members of a generation, their ranks, and the commit with which it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sirtaki.runner.elastic.workers import Worker
from sirtaki.runner.rendezvous.elastic.messages import World


@dataclass(frozen=True)
class Formation:
    """A generation to be.

    Attributes:
        members: its workers, by rank.
        commit: the commit with which it begins.
        current: the ranks that can restore that commit by themselves; rank 0 is one of them.
    """

    members: Sequence[Worker]
    commit: int
    current: Sequence[int]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Returns the numbers of the members, by rank."""
        return tuple(member.number for member in self.members)

    @property
    def summary(self) -> str:
        """Formats "3 ranks from commit 17 on"."""
        return f"{len(self.members)} rank{'s' * (len(self.members) > 1)} from commit {self.commit} on"

    def places(self, generation: int, initial: int, text: str) -> tuple[World, ...]:
        """Returns the message to each member, without what the opener of the rendezvous fills in."""
        first = World(
            generation=generation,
            rank=0,
            slots=[str(member.slot) for member in self.members],
            workers=list(self.numbers),
            initial=initial,
            job="",
            address="",
            commit=self.commit,
            current=list(self.current),
            joined=sum(member.first_generation in (0, generation) for member in self.members),
            text=text,
            elapsed=0,
        )
        return tuple(replace(first, rank=rank) for rank in range(len(self.members)))


class Unrestorable(Exception):  # a verdict on the job
    """No worker can restore the newest commit; the text says why."""


def choose_candidates(enlisted: Sequence[Worker]) -> list[Worker]:
    """Returns the workers that may belong to the next generation. One that drains may stay as the source."""
    staying = [one for one in enlisted if not one.is_draining]
    newest = max((one.commit for one in enlisted), default=-1)
    owners = [one for one in enlisted if one.commit == newest]
    holders = [owner for owner in owners if owner.can_restore] or owners
    if holders and all(holder.is_draining for holder in holders):
        staying.append(min(holders, key=lambda holder: holder.first_generation))
    return staying


def form(candidates: Sequence[Worker], limit: int) -> Formation:
    """Returns the generation of at most `limit` of the candidates, of which there is one at least.

    Rank 0 is the oldest of those that can restore the commit. The others follow by host and slot, so that the
    ranks of a host are contiguous; hosts that were used earlier come first. Candidates that have been members
    before are preferred to new ones.

    Raises Unrestorable: no candidate can restore the newest commit.
    """
    chosen = sorted(candidates, key=lambda candidate: (candidate.commit < 0, _age(candidate)))[:limit]
    commit = _commit(chosen)
    holders = [one for one in chosen if one.can_restore and one.commit == commit]
    first = min(holders or chosen, key=_age)
    oldest = {one.slot.host: one.number for one in sorted(chosen, key=lambda one: -one.number)}
    members = sorted(
        chosen,
        key=lambda one: (one is not first, one.slot.host != first.slot.host, oldest[one.slot.host], one.slot),
    )
    current = [rank for rank, member in enumerate(members) if member in holders] if holders else [0]
    return Formation(members, max(commit, 0), current)


def _commit(chosen: Sequence[Worker]) -> int:
    """Returns the highest commit that a worker can restore; -1 at the start of the job."""
    newest = max(one.commit for one in chosen)
    if newest < 0:
        return -1
    restorable = max((one.commit for one in chosen if one.can_restore), default=-1)
    if restorable < newest:
        owner = next(one for one in chosen if one.commit == newest)
        raise Unrestorable(
            f"no rank can return to commit {newest}, the last one of {owner.name}: all ranks that have it "
            "had begun to change their parameters, and had no copy. A state with copy='always' keeps one"
        )
    return restorable


def _age(worker: Worker) -> tuple[float, int]:
    return (worker.first_generation or float("inf"), worker.number)
