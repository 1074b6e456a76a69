"""Variables that travel with a function: found, weighed, and named if they cannot travel."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launching import pickled_by_value

from sirtaki.runner.function import call
from sirtaki.runner.function.call import captured_by

TABLE = [1, 2, 3]
UNUSED = [4]
data = np.zeros(1000)


@pytest.fixture(autouse=True)
def functions_of_this_file_are_those_of_a_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for function in (outer, helper, Model, Model.forward):
        monkeypatch.setattr(function, "__module__", "__main__")
    with pickled_by_value(__name__):
        yield


def outer() -> Any:
    return helper() + [TABLE for _ in range(2)]


def helper() -> list[Any]:
    return [np.sum(data)]


class Model:
    size = 3

    def forward(self) -> Any:
        return TABLE, self.size


def names_of(function: object) -> list[str]:
    return sorted(name for name, _ in captured_by(function))


def test_variables_are_found_in_functions_and_classes_that_are_used() -> None:
    assert names_of(outer) == ["TABLE", "data", "np"]
    assert names_of(Model) == ["TABLE", "size"]

    number = 5
    assert names_of(lambda: [number, TABLE]) == ["TABLE", "number"]
    assert names_of(functools.partial(outer, TABLE)) == ["argument 0 of functools.partial", "data", "np"]
    assert names_of(Model().forward) == ["TABLE", "self"]


def test_an_attribute_of_the_same_name_is_no_variable() -> None:
    def work(batch: SimpleNamespace) -> Any:
        return batch.data

    assert names_of(work) == []


def test_functions_of_modules_carry_nothing() -> None:
    assert names_of(threading.active_count) == [] or "threading" not in names_of(threading.active_count)


def test_a_large_array_is_refused_before_it_is_copied() -> None:
    class Large:
        nbytes = 100_000_001

        def __reduce__(self) -> Any:
            raise AssertionError("it was pickled")

    large = Large()
    with pytest.raises(
        ValueError, match=r"^the function uses the variable 'large' of 100 MB, and a variable of "
    ):
        call.write_call(lambda: large, (), {})


def test_a_large_object_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_LARGEST_VARIABLE", 1_000_000)
    table = b"x" * 3_000_000
    with pytest.raises(
        ValueError, match=r"^the function uses the variable 'table' of 3 MB, and a variable of "
    ):
        call.write_call(lambda: table, (), {})


def test_large_arguments_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr(call, "_LARGEST_VARIABLE", 1_000_000)
    descriptor = call.write_call(lambda table: table, (b"x" * 2_000_000,), {})
    assert os.fstat(descriptor).st_size > 2_000_000
    os.close(descriptor)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((threading.Lock(),), {}, r"because of args\[0\], a lock"),
        ((1,), {"key": threading.Lock()}, r"because of kwargs\['key'\], a lock"),
    ],
)
def test_arguments_that_cannot_travel(args: Any, kwargs: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"^the function cannot be sent to the ranks {text}: "):
        call.write_call(lambda *_: None, args, kwargs)


def test_a_variable_that_cannot_travel() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="sent to the ranks because of its variable 'lock', a lock: "):
        call.write_call(lambda: lock, (), {})


def test_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match=r"which is not installed: pip install cloudpickle$"):
        call.write_call(len, (), {})
