"""Output of the login on another host before that of an agent: it is removed, and bounded."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sirtaki.bindings.bootstrap.connection.wire import WireError
from sirtaki.runner.hosts.channel import MAX_BEFORE_MARK, START_MARK, LoginOutput


def read(login: LoginOutput, data: bytes, step: int) -> bytes:
    """Returns the bytes that follow the login's output when all come in pieces."""
    return b"".join(login(data[start : start + step]) for start in range(0, len(data), step))


@given(st.binary(max_size=100), st.integers(1, 50), st.binary(max_size=100))
@example(b"frame" + START_MARK, 7, START_MARK[:-1])
def test_what_follows_the_mark_is_the_agents(data: bytes, step: int, banner: bytes) -> None:
    assume((banner + START_MARK).index(START_MARK) == len(banner))
    login = LoginOutput()
    assert read(login, banner + START_MARK + data, step) == data
    assert login.printed == banner


def test_the_login_may_not_print_without_end() -> None:
    login = LoginOutput()
    with pytest.raises(WireError, match="the login there has printed more than 65536 bytes"):
        read(login, b"x" * (MAX_BEFORE_MARK + 2), 1000)
