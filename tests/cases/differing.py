"""Checks of the reports about ranks that have diverged, for every framework."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import sirtaki.numpy as hvd
from cases.warned import warnings_of_this_rank
from sirtaki.common.exceptions import ParametersDifferError


def differ(call: Callable[[], Any], *words: str) -> None:
    """Checks that all ranks raise the same text, with these words, and continue."""
    with pytest.raises(ParametersDifferError) as caught:
        call()
    for word in words:
        assert re.search(word, str(caught.value)), f"{word!r} is not in {str(caught.value)!r}"
    texts = hvd.allgather_object(str(caught.value))
    assert len(set(texts)) == 1, texts


def hints_of(call: Callable[[], Any]) -> list[str]:
    """Returns the hints that sirtaki gives on rank 0 during the call; the other ranks must give none."""
    with warnings_of_this_rank() as texts:
        call()
    found = [text for text in texts if "rank" in text]
    assert hvd.rank() == 0 or not found, found
    return hvd.broadcast_object(found)


def expect_hint_for_equal_batches(train: Callable[[float], None]) -> None:
    """Checks that training on one batch on all ranks gives a hint, and on a batch of each rank's own none."""
    (told,) = hints_of(lambda: train(1.0))
    assert "have computed the same gradients" in told
    assert hints_of(lambda: train(1.0 + hvd.rank())) == []
