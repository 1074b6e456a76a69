"""Exceptions have the names under which users import them."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from sirtaki.bindings import errors
from sirtaki.common import exceptions

KINDS = [
    kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not name.startswith("_")
]


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


def test_exceptions_are_pickled_beside_tblib() -> None:
    """Other libraries install it for the whole process."""
    pytest.importorskip("tblib")
    program = """
import pickle
import tblib.pickling_support
from sirtaki.bindings import errors
tblib.pickling_support.install()
for kind in errors.CLASSES.values():
    copied = pickle.loads(pickle.dumps(kind("ranks disagree")))
    assert (type(copied), str(copied)) == (kind, "ranks disagree"), kind
"""
    subprocess.run([sys.executable, "-c", program], check=True)
