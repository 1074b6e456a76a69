"""How ranks that have come apart are told of it, whatever library they use."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import sirtaki.numpy as hvd
from sirtaki.common.exceptions import ParametersDifferError


def differ(call: Callable[[], Any], *words: str) -> None:
    """All ranks raise the same text, with these words, and go on."""
    with pytest.raises(ParametersDifferError) as caught:
        call()
    for word in words:
        assert re.search(word, str(caught.value)), f"{word!r} is not in {str(caught.value)!r}"
    texts = hvd.allgather_object(str(caught.value))
    assert len(set(texts)) == 1, texts


def hints_of(call: Callable[[], Any]) -> list[str]:
    """The hints that sirtaki gives on rank 0 while it is called; on the others there are none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        call()
    found = [str(one.message) for one in caught if "rank" in str(one.message)]
    assert hvd.rank() == 0 or not found, found
    return hvd.broadcast_object(found)
