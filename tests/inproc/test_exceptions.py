"""Exceptions have the names under which users import them."""

from __future__ import annotations

import pickle

import pytest

from sirtaki.bindings import errors
from sirtaki.common import exceptions

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_is_named_and_pickled_as_users_import_it(kind: type[Exception]) -> None:
    assert getattr(exceptions, kind.__name__) is kind
    assert kind.__name__ in exceptions.__all__
    assert kind.__module__ == "sirtaki.common.exceptions"
    if kind is errors.HostsUpdatedInterrupt:  # Horovod's has a truth value in place of a text
        assert pickle.loads(pickle.dumps(kind(True))).skip_sync is True
        return
    copied = pickle.loads(pickle.dumps(kind("ranks disagree")))
    assert (type(copied), str(copied)) == (kind, "ranks disagree")
