"""The check of calls that a rank rejects by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest

from sirtaki.bindings.errors import HorovodInternalError


class Refused(Protocol):
    """Checks that this rank gets an error of this kind at once, with these words, and nothing is queued."""

    def __call__(self, call: Callable[[], Any], *words: str, kind: type[Exception] = ValueError) -> None: ...


def refusal_check(still_works: Callable[[], None]) -> Refused:
    """Returns the check for a framework; `still_works` is an exchange among all ranks."""

    def refused(call: Callable[[], Any], *words: str, kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind) as caught:
            call()
        assert not isinstance(caught.value, HorovodInternalError)
        for word in words:
            assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"
        still_works()

    return refused
