"""States with arrays: a newcomer, a rank behind, a failure in the middle, and an array that differs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from world import World, world

import sirtaki.numpy as hvd
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import HorovodInternalError, ParametersDifferError, UnsupportedError
from sirtaki.common.elastic.state import GenerationStart
from sirtaki.numpy.elastic import ArraysState
from sirtaki.numpy.elastic.arrays_state import Entry, EntryKind

DTYPES = (np.float32, np.float64, np.int64, np.bool_, ml_dtypes.bfloat16, np.complex64)
KINDS = {"statistics": EntryKind.SENT, "seed": EntryKind.OWN}


class Held(ArraysState):
    """A state of numpy arrays, which are replaced when they are written."""

    def __init__(self, arrays: dict[str, Any], **attributes: Any) -> None:
        self.arrays = dict(arrays)
        super().__init__(**attributes)

    def _entries(self) -> list[Entry]:
        return [
            Entry(name, array.shape, array.dtype, KINDS.get(name, EntryKind.EQUAL))
            for name, array in self.arrays.items()
        ]

    def _read(self, entries: Sequence[Entry]) -> list[Any]:
        return [self.arrays[entry.name] for entry in entries]

    def _write(self, entries: Sequence[Entry], arrays: Iterable[Any], details: Any) -> None:
        for entry, array in zip(entries, arrays, strict=True):
            self.arrays[entry.name] = array


class Account:
    """An object that loads its state instead of being replaced."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def values(seed: int) -> dict[str, Any]:
    """Returns arrays of all dtypes, of no elements, of no dimensions, and one that is not contiguous."""
    numbers = np.random.default_rng(seed)
    arrays = {f"of {np.dtype(kind).name}": numbers.integers(0, 2, (3, 5)).astype(kind) for kind in DTYPES}
    arrays |= {"empty": np.empty((0, 4), np.float32), "scalar": np.asarray(numbers.normal())}
    arrays |= {"transposed": numbers.normal(size=(4, 6)).T, "normal": numbers.normal(size=100_000)}
    return arrays


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def receive(state: ArraysState, *, is_current: bool, all_current: bool = False) -> None:
    state.receive(GenerationStart(current(), is_current, all_current))


def on_ranks(size: int, body: Callable[[], None], transport: str = "shm") -> World:
    with world(size, transport) as made:
        made.run(body)
    return made


def test_a_commit_is_a_copy_in_the_memory_of_the_one_before() -> None:
    state = Held(values(0), epoch=1, history=[1])
    first = dict(state._copies)
    state.arrays["normal"][:] = 7.0
    state.epoch = 2
    state.history.append(2)
    state.restore()
    assert_equal(state.arrays, values(0))
    assert (state.epoch, state.history) == (1, [1])
    state.arrays = values(1)
    state.save()
    assert all(state._copies[name] is first[name] for name in first)
    state.arrays["scalar"] = np.zeros(3)
    state.restore()
    state.arrays["normal"][:] = 0.0  # a restored array is not the copy
    state.restore()
    assert_equal(state.arrays, values(1))


def test_an_array_that_cannot_be_read_leaves_the_last_commit_intact() -> None:
    state = Held(values(0), epoch=1)
    reading = state._read
    state._read = lambda entries: [*reading(entries)[:-1], 1 / 0]  # type: ignore[method-assign,list-item]
    state.arrays, state.epoch = values(1), 2
    with pytest.raises(ZeroDivisionError):
        state.save()
    assert state.can_restore()
    state.restore()
    assert_equal(state.arrays, values(0))
    assert state.epoch == 1


def test_a_copy_that_was_interrupted_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Held(values(0))
    copied = np.copyto

    def interrupted(memory: Any, array: Any) -> None:
        if array.size == 100_000:
            raise KeyboardInterrupt
        copied(memory, array)

    monkeypatch.setattr(np, "copyto", interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.save()
    assert not state.can_restore()
    with pytest.raises(RuntimeError, match="interrupted"):
        state.restore()
    monkeypatch.undo()
    state.save()
    assert state.can_restore()


def test_a_dtype_that_cannot_be_sent_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedError, match="dtype"):
        Held({"words": np.array(["a", "b"])})


@pytest.mark.parametrize("transport", ["shm", "socket"])
def test_newcomers_take_everything_from_rank_0(transport: str) -> None:
    def body() -> None:
        rank = hvd.rank()
        state = Held(values(rank) | {"seed": np.array([rank])}, epoch=rank, account=Account())
        account = state.account
        account.done = 10 + rank
        receive(state, is_current=rank == 0)
        assert_equal(state.arrays, values(0) | {"seed": np.array([rank])})
        assert state.epoch == 0
        assert state.account is account
        assert account.done == 10
        state.arrays["normal"] += 1.0
        state.epoch, account.done = 5, 5
        state.restore()  # what has been received is the last commit
        assert_equal(state.arrays, values(0) | {"seed": np.array([rank])})
        assert (state.epoch, account.done) == (0, 10)

    on_ranks(3, body, transport)


def test_a_rank_behind_takes_the_commit_and_others_stay_as_they_are() -> None:
    """Rank 1 has the commit, too; its statistics are its own. Rank 2 has missed it."""

    def body() -> None:
        rank = hvd.rank()
        state = Held(values(5) | {"statistics": np.array([float(rank)])}, step=5)
        if rank < 2:
            state.arrays, state.step = values(6) | {"statistics": np.array([rank + 0.5])}, 6
            state.save()
        receive(state, is_current=rank < 2)
        statistics = {0: 0.5, 1: 1.5, 2: 0.5}[rank]
        assert_equal(state.arrays, values(6) | {"statistics": np.array([statistics])})
        assert state.step == 6

    on_ranks(3, body)


def test_sync_copies_rank_0() -> None:
    def body() -> None:
        state = Held(values(hvd.rank()), epoch=hvd.rank())
        state.sync()
        assert_equal(state.arrays, values(0))
        assert state.epoch == 0

    on_ranks(2, body)
    on_ranks(1, body)


def test_equal_ranks_only_compare() -> None:
    def body() -> None:
        state = Held(values(3) | {"statistics": np.array([float(hvd.rank())])}, epoch=1)
        before = hvd.stats()["bytes"]
        receive(state, is_current=True, all_current=True)
        assert hvd.stats()["bytes"] - before < 1000
        assert_equal(state.arrays, values(3) | {"statistics": np.array([float(hvd.rank())])})

    on_ranks(3, body)


@pytest.mark.parametrize("all_current", [True, False])
def test_an_array_that_differs_is_repaired_and_reported(all_current: bool) -> None:
    """Rank 1 differs by 0.5 in one place; a newcomer does not hide that."""
    told: list[str] = []

    def body() -> None:
        rank = hvd.rank()
        state = Held(values(4), epoch=1)
        if rank == 1:
            state.arrays["normal"][17] += 0.5
        elif rank == 2 and not all_current:
            state.arrays = values(9)
        untouched = state.arrays["transposed"]
        receive(state, is_current=rank < 2 or all_current, all_current=all_current)
        assert_equal(state.arrays, values(4))
        assert rank == 2 or state.arrays["transposed"] is untouched
        state.restore()
        assert_equal(state.arrays, values(4))

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: told.append(str(message))
        warnings.simplefilter("always")
        on_ranks(3, body)
    (text,) = told
    assert "'normal' on rank 1" in text
    assert "by up to 0.5" in text


def test_nothing_is_compared_without_the_setting() -> None:
    def body() -> None:
        state = Held({"a": np.array([float(hvd.rank())])})
        receive(state, is_current=True, all_current=True)
        assert state.arrays["a"].tolist() == [float(hvd.rank())]

    with world(2, check_parameters="0") as made:
        made.run(body)


def test_a_value_that_is_no_number_is_repaired() -> None:
    def body() -> None:
        state = Held({"a": np.array([1.0, np.nan if hvd.rank() else 2.0])})
        with warnings.catch_warnings(record=True):
            receive(state, is_current=True, all_current=True)
        assert state.arrays["a"].tolist() == [1.0, 2.0]

    on_ranks(2, body)


@pytest.mark.parametrize("all_current", [True, False])
@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"scalar": np.zeros(2)}, r"'scalar' is float64 of shape \[2\] on rank 1"),
        ({"normal": np.zeros(100_000, np.float32)}, r"'normal' is float32 of shape \[100000\] on rank 1"),
        ({"more": np.zeros(1)}, "'more' is on rank 1"),
    ],
    ids=["shape", "dtype", "name"],
)
def test_arrays_that_do_not_match_are_refused_on_all_ranks(
    change: dict[str, Any], pattern: str, all_current: bool
) -> None:
    texts = []

    def body() -> None:
        state = Held(values(0) | (change if hvd.rank() == 1 else {}), epoch=hvd.rank())
        before = dict(state.arrays)
        with pytest.raises(ParametersDifferError, match=pattern) as raised:
            receive(state, is_current=hvd.rank() == 0 or all_current, all_current=all_current)
        texts.append(str(raised.value))
        assert_equal(state.arrays, before)
        assert state.epoch == hvd.rank()

    on_ranks(3, body)
    assert len(set(texts)) == 1


@pytest.mark.parametrize("operation", ["check", "arrays.3", "objects"])
def test_a_failure_in_the_middle_leaves_the_last_commit_intact(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 fails when it is about to take part in this operation."""
    from sirtaki.numpy.elastic import arrays_state

    def failing(function: Callable[..., Any], is_it: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if hvd.rank() == 2 and is_it(*arguments):
                current().abort("this rank fails here")
            return function(*arguments)

        return call

    if operation == "check":
        once = iter([False, True])
        monkeypatch.setattr(arrays_state, "agree", failing(arrays_state.agree, lambda *_: next(once)))
    elif operation == "objects":
        sending = failing(arrays_state.broadcast_object, lambda *_: True)
        monkeypatch.setattr(arrays_state, "broadcast_object", sending)
    else:
        monkeypatch.setattr(arrays_state, "_GROUP_BYTES", 1)
        sending = failing(arrays_state._broadcast, lambda _, names, __: f"{operation}." in names[0])
        monkeypatch.setattr(arrays_state, "_broadcast", sending)

    def body() -> None:
        rank = hvd.rank()
        state = Held(values(rank), epoch=rank)
        with pytest.raises(HorovodInternalError, match="this rank fails here"):
            receive(state, is_current=rank == 0)
        assert_equal(state.arrays, values(rank))
        assert state.can_restore()
        state.arrays, state.epoch = values(99), 99
        state.restore()
        assert_equal(state.arrays, values(rank))
        assert state.epoch == rank

    on_ranks(3, body)


def test_a_checkpoint_is_loaded_by_another_process() -> None:
    import cloudpickle

    state = Held(values(1) | {"seed": np.array([1])}, epoch=3, account=Account())
    content = state.checkpoint()
    expected = cloudpickle.dumps(content)
    state.arrays["normal"][:] = 0.0
    state.save()
    assert cloudpickle.dumps(content) == expected  # later commits do not change it
    other = Held(values(2) | {"seed": np.array([2])}, epoch=0, account=Account())
    other.load_checkpoint(cloudpickle.loads(expected))
    other.restore()
    assert_equal(other.arrays, values(1) | {"seed": np.array([2])})
    assert other.epoch == 3
    wrong = Held(values(2) | {"scalar": np.zeros(2)}, epoch=0, account=Account())
    with pytest.raises(ParametersDifferError, match="'scalar'"):
        wrong.load_checkpoint(cloudpickle.loads(expected))


def test_large_arrays_are_sent_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from sirtaki.numpy.elastic import arrays_state

    monkeypatch.setattr(arrays_state, "_GROUP_BYTES", 1000)

    def body() -> None:
        state = Held({f"{index}": np.full(100, float(hvd.rank() + index)) for index in range(7)})
        receive(state, is_current=hvd.rank() == 0)
        assert_equal(state.arrays, {f"{index}": np.full(100, float(index)) for index in range(7)})

    on_ranks(2, body)
