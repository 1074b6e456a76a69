"""Hosts that hvdrun reaches, but that do not reach each other: those that stay, and the arbiter's orders."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from elastic.arbiter_job import Job, finish, opened
from elastic.arbiter_job import place as arbiters_place
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.bindings.bootstrap.elastic import process
from sirtaki.bindings.bootstrap.elastic.messages import Counted, End, Enlist
from sirtaki.bindings.bootstrap.elastic.process import WorkerProcess, find_unreachable
from sirtaki.bindings.bootstrap.job import Job as JobOfRanks
from sirtaki.bindings.bootstrap.providers import World
from sirtaki.bindings.bootstrap.world_builder import Offer, RankDescription, WorldBuilder
from sirtaki.bindings.errors import HorovodInternalError, InitializationError
from sirtaki.bindings.library import Config
from sirtaki.bindings.survivors import Survivors
from sirtaki.common.elastic import loop
from sirtaki.runner.elastic.arbiter.model import Action, Send, Slot, Start, Worker
from sirtaki.runner.elastic.arbiter.policy import Reachability

# ---- The hosts that stay ---------------------------------------------------------------------------------


def workers_on(ranks: Mapping[str, int]) -> list[Worker]:
    slots = [Slot(host, index) for host, count in ranks.items() for index in range(count)]
    return [Worker(number, slot, 0.0) for number, slot in enumerate(slots)]


def report(
    reach: Reachability, generation: int, worker: Worker, members: Sequence[Worker], unreachable: list[int]
) -> None:
    worker.report = Enlist(generation, "lost", kind="link", unreachable=unreachable)
    reach.note_failure(generation, worker, members)


def left(ranks: Mapping[str, int], cut: Sequence[tuple[str, str]]) -> set[str]:
    """Returns the hosts that stay after two generations that could not link because of these pairs."""
    reach, workers = Reachability(), workers_on(ranks)
    first = {one.slot.host: one for one in reversed(workers)}
    for generation in (1, 2):
        for host, other in cut:
            report(reach, generation, first[host], workers, [workers.index(first[other])])
    return ranks.keys() - reach.separated(workers).keys()


def test_of_two_hosts_the_one_with_more_ranks_stays_or_the_older_one() -> None:
    assert left({"a": 1, "b": 2}, [("a", "b")]) == {"b"}
    assert left({"a": 2, "b": 1}, [("a", "b")]) == {"a"}
    assert left({"b": 2, "a": 2}, [("a", "b")]) == {"b"}


def test_one_host_goes_that_the_others_do_not_reach() -> None:
    assert left({"a": 3, "b": 2, "c": 2}, [("a", "b"), ("c", "a")]) == {"b", "c"}
    assert left({"a": 3, "b": 1, "c": 1}, [("a", "b"), ("c", "a")]) == {"a"}


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_a_network_that_is_cut_in_two_keeps_its_larger_part(
    hosts: list[tuple[int, bool]], order: object
) -> None:
    ranks = {f"host{number}": count for number, (count, _) in enumerate(hosts)}
    parts: list[set[str]] = [set(), set()]
    for name, (_, is_second) in zip(ranks, hosts, strict=True):
        parts[is_second].add(name)
    totals = [sum(ranks[name] for name in part) for part in parts]
    larger = parts[totals[1] > totals[0]]
    if totals[0] == totals[1]:
        larger = parts["host0" in parts[1]]
    assert left(ranks, [(one, other) for one in parts[0] for other in parts[1]]) == larger


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=6),
    st.sets(st.frozensets(st.integers(0, 5), min_size=2, max_size=2)),
)
def test_a_host_with_the_state_stays_whatever_is_cut(
    hosts: list[tuple[int, int]], cut: set[frozenset[int]]
) -> None:
    """Has workers of some hosts report a commit (1), which those of some can restore (2)."""
    reach, workers = Reachability(), workers_on({f"h{one}": count for one, (count, _) in enumerate(hosts)})
    first = {one.slot.host: one for one in reversed(workers)}
    for generation in (1, 2):
        for here, there in map(sorted, cut):
            if there < len(hosts):
                other = workers.index(first[f"h{there}"])
                report(reach, generation, first[f"h{here}"], workers, [other])
    for one in workers:
        has_state = hosts[int(one.slot.host[1:])][1]
        one.report = Enlist(2, "lost", 4 if has_state else -1, has_state == 2)
    staying = first.keys() - reach.separated(workers).keys()
    assert max(hosts[int(host[1:])][1] for host in staying) == max(has_state for _, has_state in hosts)


def test_two_generations_have_to_fail_in_a_row() -> None:
    reach, workers = Reachability(), workers_on({"a": 1, "b": 1})
    for _ in range(3):  # all members report the same generation
        report(reach, 1, workers[0], workers, [1])
    assert reach.separated(workers) == {}
    reach.note_links(workers)
    report(reach, 3, workers[0], workers, [1])
    assert reach.separated(workers) == {}
    report(reach, 4, workers[1], workers, [0])
    assert reach.separated(workers) == {"b": "a"}
    assert reach.separated(workers[:1]) == {}  # the other one has no ranks


def test_reports_about_the_own_host_or_no_rank_have_no_effect() -> None:
    reach, workers = Reachability(), workers_on({"a": 2, "b": 1})
    for generation in range(5):
        report(reach, generation, workers[0], workers, [1, -1, 7])
    assert reach.separated(workers) == {}


def test_a_link_that_was_lost_counts_if_it_cannot_be_made_again() -> None:
    reach, workers = Reachability(), workers_on({"a": 1, "b": 1, "c": 1})
    for one in workers:
        one.has_received = True
    for one in workers:
        one.report = Enlist(1, "lost", kind="peer_lost", culprit=2)
        reach.note_failure(1, one, workers)
    assert reach.separated(workers) == {}
    report(reach, 2, workers[2], workers, [1])
    assert reach.separated(workers) == {"c": "b"}


def test_a_rank_that_is_lost_twice_was_reached_in_between() -> None:
    reach, workers = Reachability(), workers_on({"a": 1, "b": 1})
    for generation, has_received in ((1, True), (2, False), (3, False)):
        for one in workers:
            one.has_received = has_received
        for one in workers:
            one.report = Enlist(generation, "lost", kind="peer_lost", culprit=1)
            reach.note_failure(generation, one, workers)
    assert reach.separated(workers) == {}


def test_the_pause_of_a_host_doubles_up_to_an_hour() -> None:
    reach = Reachability()
    assert [reach.leave_out("a") for _ in range(3)] == [60.0, 120.0, 240.0]
    assert [reach.leave_out("a") for _ in range(20)][-1] == 3600.0
    assert reach.leave_out("b") == 60.0


# ---- The arbiter -----------------------------------------------------------------------------------------

SLOTS = [Slot("a", 0), Slot("a", 1), Slot("b", 0), Slot("c", 0)]


def try_to_link(job: Job, first: Sequence[Action], cut: Sequence[str], commit: int) -> list[Action]:
    """Returns the orders after the members of the generation that is opened could not link.

    `first` are the orders that open it. The ranks on the two hosts of `cut` do not reach each other.
    """
    generation = opened(first)
    hosts = [slot.host for slot in generation.slots]
    orders = []
    for rank, worker in enumerate(generation.members):
        here = hosts[rank]
        unreachable = [hosts.index(one) for one in cut if one != here] if here in cut else []
        orders += job.leaves(worker, "lost", commit, kind="link", text="no way", unreachable=unreachable)
    return orders


def test_a_host_that_another_one_does_not_reach_is_left_out() -> None:
    job = Job(start=4, slots=SLOTS).trains()
    losses = [job.leaves(one, "lost", 5, kind="peer_lost", culprit=2, text="no answer") for one in range(4)]
    assert set(opened(losses[-1]).members) == {0, 1, 2, 3}
    third = try_to_link(job, losses[-1], ("b", "c"), 5)
    assert set(opened(third).members) == {0, 1, 2}
    text = "c is left out: it and b do not reach each other, although hvdrun reaches both"
    assert Send(3, End(0, text)) in third
    assert job.said[-1] == f"3 ranks from commit 5 on: {text}"
    assert job.receives_all(0, 1, 2) == []
    assert job.arbiter.losses == 0
    job.sees_exit(3)
    assert job.ticks(59.0) == []
    assert job.ticks(60.0) == [Start(4, SLOTS[3])]


def test_a_host_that_comes_back_is_left_out_after_one_more_failure() -> None:
    job = Job(start=4, slots=SLOTS).trains()
    losses = [job.leaves(one, "lost", 5, kind="peer_lost", text="no answer") for one in range(4)]
    third = try_to_link(job, try_to_link(job, losses[-1], ("b", "c"), 5), ("b", "c"), 5)
    job.receives_all(*opened(third).members)
    job.sees_exit(3)
    job.ticks(60.0)
    job.enlists_new(4)
    for worker in (0, 1, 2):
        job.receives(worker, Counted(4, 1, 7))
    joined = [order for one in (0, 1, 2) for order in job.leaves(one, "changed", 9)]
    assert set(opened(joined).members) == {0, 1, 2, 4}
    again = try_to_link(job, joined, ("b", "c"), 9)
    assert set(opened(again).members) == {0, 1, 2}
    job.receives_all(0, 1, 2)
    job.sees_exit(4)
    assert job.ticks(60.0 + 119.0) == []
    assert job.ticks(60.0 + 120.0) == [Start(5, SLOTS[3])]


def test_new_ranks_do_not_displace_one_that_has_the_state() -> None:
    job = Job(start=1, slots=[Slot("a", 0), Slot("b", 0), Slot("b", 1)]).trains()
    job.enlists_new(1, 2)
    job.receives(0, Counted(1, 1, 6))
    orders = job.leaves(0, "changed", 7)
    for _ in range(2):
        assert set(opened(orders).members) == {0, 1, 2}
        cut = {0: (7, [1]), 1: (-1, [0]), 2: (-1, [0])}
        orders = [
            order
            for one, (commit, unreachable) in cut.items()
            for order in job.leaves(one, "lost", commit, kind="link", unreachable=unreachable)
        ]
    assert opened(orders).members == (0,)
    assert opened(orders).places[0].commit == 7


def test_a_host_that_was_left_out_returns_at_once_if_ranks_are_missing() -> None:
    job = Job(start=4, slots=SLOTS, minimum=3).trains()
    losses = [job.leaves(one, "lost", 5, kind="peer_lost", text="no answer") for one in range(4)]
    third = try_to_link(job, try_to_link(job, losses[-1], ("b", "c"), 5), ("b", "c"), 5)
    job.receives_all(*opened(third).members)
    job.sees_exit(3)
    job.loses(2)
    job.leaves(0, "lost", 6)
    assert Start(4, SLOTS[3]) in job.leaves(1, "lost", 6)


@pytest.mark.parametrize("kind", ["peer_lost", "timeout", "protocol"])
def test_a_rank_that_others_blame_while_it_lives_enlists(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(worker=SimpleNamespace(commit=4, is_over=False, counts_differ=""), unreachable=[])
    state: Any = SimpleNamespace(can_restore=lambda: True, _checkpoints=None)
    failure = SimpleNamespace(kind=kind, culprit=2, text="no answer")
    context = SimpleNamespace(rank=2, failure=failure, has_missed_peer=False)
    monkeypatch.setattr(loop.this_process, "context", context)
    here = arbiters_place(2, 4, [0], [0, 1, 2], generation=7)
    report = loop._loss(found, here, state, HorovodInternalError("no answer"))  # type: ignore[arg-type]
    assert report == Enlist(7, "lost", 4, True, 2, kind, "no answer")
    failure.kind = "aborted"  # by its own exception
    with pytest.raises(ZeroDivisionError):
        loop._loss(found, here, state, ZeroDivisionError())  # type: ignore[arg-type]


def test_a_job_ends_if_too_few_ranks_reach_each_other() -> None:
    job = Job(start=2, slots=[Slot("a", 0), Slot("b", 0)], minimum=2).trains()
    losses = [job.leaves(one, "lost", 5, kind="peer_lost", text="no answer") for one in range(2)]
    orders = losses[-1]
    for _ in range(9):
        orders = try_to_link(job, orders, ("a", "b"), 5)
    end = finish(try_to_link(job, orders, ("a", "b"), 5))
    assert end.code == 1
    assert end.text.endswith("the ranks have begun 10 times from commit 5, and none of them was lost: no way")


# ---- The network -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("descriptors", [0, 1])
def test_nothing_is_found_out_without_descriptors(descriptors: int) -> None:
    """Leaves so many descriptors: a host that cannot be tried is not reported."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # the lowest free one
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + descriptors, before[1]))
    try:
        found = find_unreachable({1: ["192.0.2.1:9"], 2: ["192.0.2.2:9"]})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found == []


def test_a_host_that_accepts_or_refuses_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes own loopback addresses for other hosts; one of them does not answer: its queue is full."""
    monkeypatch.setattr(process, "is_own_address", lambda family, sockaddr: False)
    with socket.socket() as listening, socket.socket() as closed, socket.socket() as silent:
        for number, one in enumerate((listening, closed, silent)):
            one.bind((f"127.0.0.{number + 2}", 0))
        listening.listen()
        silent.listen(0)
        names = ["{}:{}".format(*one.getsockname()) for one in (listening, closed, silent)]
        with socket.create_connection(silent.getsockname()):
            ranks = {1: names[:1], 2: names[1:2], 3: names[2:], 4: names[1:], 5: ["127.0.0.1:0"]}
            assert find_unreachable(ranks) == [3]


def test_a_rank_tries_those_that_it_connects_to() -> None:
    """Higher ranks connect to it: whether it could connect to them does not matter."""
    members = [RankDescription(host, host, 1 + rank, "", "") for rank, host in enumerate("aabbc")]
    offers = [Offer([f"192.0.2.{rank}:9"], "") for rank in range(5)]
    tried = []
    for rank in range(5):
        world = World(rank, JobOfRanks("job", 5, b"k", "1"))
        builder = WorldBuilder(world, 1, None, Config({}))  # type: ignore[arg-type]
        builder._endpoints(members, offers)
        tried.append(sorted(builder._elsewhere))
    assert tried == [[], [], [0, 1], [0, 1], [0, 1, 2, 3]]


def test_one_rank_of_each_host_is_tried_under_each_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = ["localhost:0", "localhost:1", "hosta:2", "hostb:0"]
    place = replace(arbiters_place(3, 5, [0], [0, 1, 2, 3]), slots=slots)
    found = WorkerProcess(None, Survivors(), JobOfRanks("job", 4, b"k", "1"), "")  # type: ignore[arg-type]

    def fail_to_link(find: Callable[[], World], counts: bool) -> None:
        world = find()
        assert world.on_no_link is not None
        world.on_no_link({rank: [str(rank)] for rank in range(3)})
        raise InitializationError("no link")

    monkeypatch.setattr(process, "find_unreachable", lambda addresses: list(addresses))
    monkeypatch.setattr(process.lifecycle, "enter", fail_to_link)
    with pytest.raises(InitializationError):
        found.enter(place)
    assert found.unreachable == [1, 2]


def test_an_address_of_this_host_says_nothing_about_another_one() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert find_unreachable({1: [f"127.0.0.1:{port}"], 4: []}) == [1, 4]
    assert find_unreachable({}) == []
