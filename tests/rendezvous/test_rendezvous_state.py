"""All-gathers among ranks that arrive in any order, leave at any time, or never arrive."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sirtaki.bindings.bootstrap.job import RendezvousError, name_ranks
from sirtaki.bindings.bootstrap.server.rendezvous_state import Answer, RendezvousState

SIZE = 4

steps = st.lists(
    st.one_of(
        st.tuples(st.just("give"), st.integers(0, SIZE - 1), st.integers(1, 3), st.integers(0, 1)),
        st.tuples(st.just("note_departure"), st.integers(0, SIZE - 1), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 15), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(steps)
@example([("note_departure", 0, 1, 0), ("give", 0, 1, 1), ("give", 1, 1, 0), ("give", 0, 1, 0)])
def test_everyone_who_gives_is_answered_exactly_once(steps: list[tuple[str, int, int, int]]) -> None:
    rounds = RendezvousState(SIZE, timeout=10.0)
    now = 0.0
    given_by: set[tuple[int, int, int]] = set()
    answered: Counter[tuple[int, int, int]] = Counter()

    def take(answers: list[Answer]) -> None:
        for answer in answers:
            assert bool(answer.error) != bool(answer.payloads)
            for rank in answer.waiting:
                answered[(*answer.key, rank)] += 1
                assert rank not in answer.missing
            if answer.payloads:
                assert answer.payloads == tuple(b"%d" % rank for rank in range(SIZE))

    for what, number, generation, round_number in steps:
        key = generation, round_number, number
        open_ones = given_by - answered.keys() - {key}
        has_others = any((one[0], one[2]) == (generation, number) for one in open_ones)
        if what == "give" and has_others and not rounds.has_failed(generation):
            with pytest.raises(RendezvousError, match=f"rank {number} has not waited for the others"):
                rounds.contribute((generation, round_number), number, b"", now)
        elif what == "give" and (generation, round_number, number) not in given_by:
            given_by.add((generation, round_number, number))
            take(rounds.contribute((generation, round_number), number, b"%d" % number, now))
        elif what == "note_departure":
            take(rounds.note_departure(number, generation, "has gone"))
        elif what == "wait":
            now += number
            take(rounds.expire(now))
            assert (rounds.next_deadline() or now + 1) > now
    take(rounds.expire(now + 100))
    assert set(answered) == given_by
    assert set(answered.values()) <= {1}
    assert rounds.next_deadline() is None


def test_the_deadline_starts_with_the_first_rank_of_each_all_gather() -> None:
    rounds = RendezvousState(2, timeout=10.0)
    assert rounds.next_deadline() is None
    rounds.contribute((1, 0), 0, b"", 100.0)
    rounds.contribute((2, 0), 0, b"", 105.0)
    assert rounds.next_deadline() == 110.0
    rounds.contribute((1, 0), 1, b"", 109.0)
    assert rounds.next_deadline() == 115.0


def test_a_failed_start_does_not_spoil_the_next() -> None:
    rounds = RendezvousState(2, timeout=10.0)
    rounds.contribute((1, 0), 0, b"", 0.0)
    assert [answer.missing for answer in rounds.expire(10.0)] == [(1,)]
    rounds.contribute((2, 0), 0, b"a", 20.0)
    assert rounds.contribute((2, 0), 1, b"b", 20.0)[0].payloads == (b"a", b"b")


def test_a_rank_that_gives_twice_is_an_error() -> None:
    rounds = RendezvousState(SIZE, 10.0)
    rounds.contribute((1, 0), 2, b"", 0.0)
    with pytest.raises(RendezvousError, match="two processes claim to be rank 2"):
        rounds.contribute((1, 0), 2, b"", 0.0)


def test_ranks_by_name() -> None:
    assert name_ranks((1,)) == "rank 1"
    assert name_ranks((1, 3)) == "ranks 1 and 3"
    assert name_ranks(tuple(range(100))) == "ranks 0, 1, 2, 3, 4, 5, 6 and 93 more"
