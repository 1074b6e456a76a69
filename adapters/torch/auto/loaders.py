"""Loaders of a script: all ranks read all batches; of training batches, each rank computes its part."""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.observing.user_code import user_line
from sirtaki.common.training import shares
from sirtaki.common.training.consistency import combined
from sirtaki.common.training.shares import Share
from sirtaki.torch.auto import marks, proof
from sirtaki.torch.auto.job import LoadedBatch, job, refusal
from sirtaki.torch.auto.marks import Mark, mark_of, put, unmark
from sirtaki.torch.auto.optimizers import adopt
from sirtaki.torch.consistency import checksum_of
from sirtaki.torch.ops.collectives import allgather
from sirtaki.torch.training.reducer import GradientReducer


@dataclass
class LoaderState:
    """Knowledge about a loader at a line of the script.

    Attributes:
        is_training: whether an optimizer has stepped inside its iteration.
        was_beside_another: whether it has delivered a batch before a step for which another loader had, too.
        proven: whether batches were proven that divide evenly (True), and that do not (False).
    """

    is_training: bool = False
    was_beside_another: bool = False
    proven: set[bool] = field(default_factory=set)


@dataclass
class Iteration:
    """One pass over a loader. It is closed once the script has dropped its iterator, or come to the end."""

    state: LoaderState
    place: str
    is_closed: bool = False
    checksum: int = 0  # of the batch in progress
    last: LoadedBatch | None = None  # that has ended


_states: weakref.WeakKeyDictionary[Any, dict[str, LoaderState]] = weakref.WeakKeyDictionary()


def install() -> None:
    """Starts observing the iterations of all loaders."""
    kind: Any = DataLoader
    plain = kind.__iter__

    @wraps(plain)
    def iterate(self: Any) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            return plain(self)
        end_closed_batch()
        with common():
            iterator = plain(self)
        place = user_line()
        state = _states.setdefault(self, {}).setdefault(place, LoaderState())
        return _Batches(iterator, Iteration(state, place))

    kind.__iter__ = iterate


class _Batches:
    """An iterator that delivers the batches of another iterator, or parts of them."""

    def __init__(self, iterator: Any, iteration: Iteration) -> None:
        self._iterator, self._iteration = iterator, iteration

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __next__(self) -> Any:
        if job.batch is not None and job.batch.iteration is self._iteration:
            end_batch()
        end_closed_batch()
        try:
            with common():
                whole = next(self._iterator)
        except StopIteration:
            self._iteration.is_closed = True
            _give_all_rows(self._iteration)
            raise
        return _delivered(whole, self._iteration)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # the interpreter ends, so the names of modules may be None
            return
        self._iteration.is_closed = True
        if job.batch is not None and job.batch.iteration is self._iteration:
            leave_own()  # the code after the loop draws, or seeds, before the batch is ended


def _delivered(whole: Any, iteration: Iteration) -> Any:
    adopt()
    job.latest = iteration
    if not iteration.state.is_training:
        if all(item is not iteration for item in job.delivered):
            job.delivered.append(iteration)
        return whole
    place = iteration.place
    if job.batch is not None and job.batch.is_refused:  # the script has caught the error, and left the loop
        end_batch()
    _check_use(iteration)
    rows = rows_of(whole, place)
    assert job.context is not None
    share = Share(job.context, rows)
    if not rows or not torch.is_grad_enabled():
        return whole
    batch = job.batch = LoadedBatch(iteration, share, is_part=share.is_even in iteration.state.proven)
    iteration.checksum = combined(checksum_of(torch.as_tensor(array)) for _, array in arrays_of(whole))
    if batch.is_part:
        job.has_split = True
        shares.make_current(share)
        for reducer in GradientReducer.of_world(job.context):
            reducer.weighting.count_by_rows(share)
        enter_own()
    else:
        _check_same_data(batch)
        proof.start(batch)
    if batch.proof is None:
        return part_of(whole, batch, place)
    with batch.proof.following():
        return part_of(whole, batch, place)


def _check_use(iteration: Iteration) -> None:
    if job.batch is not None:
        raise refusal(
            f"{iteration.place}: a loader with which the script trains is read inside the loop of another "
            f"one ({job.batch.iteration.place}), so it is not known which batch a step uses: let one loader "
            "deliver both"
        )
    if threading.current_thread() is not threading.main_thread():
        raise refusal(
            f"{iteration.place}: the script trains in a thread, in which scalars cannot be read as those of "
            "the whole batch: train in the main thread"
        )


def end_closed_batch() -> None:
    """Ends the batch in progress if the script has left its loop."""
    if job.batch is not None and job.batch.iteration.is_closed:
        end_batch()


def end_batch() -> None:
    """Ends the batch in progress. All ranks call it together."""
    batch = job.batch
    if batch is None:
        return
    try:
        _complete(batch)
    finally:
        _leave(batch)


def _complete(batch: LoadedBatch) -> None:
    marks.settle(batch)
    if batch.is_part:
        _check_same_data(batch)
    if batch.proof is not None:
        batch.proof.finish()


def _leave(batch: LoadedBatch) -> None:
    if batch.proof is not None:
        batch.proof.close()
    batch.is_open, job.batch, batch.iteration.last = False, None, batch
    if batch.iteration.is_closed:
        _give_all_rows(batch.iteration)
    leave_own()
    if batch.is_part:
        shares.make_current(None)
        for reducer in GradientReducer.of_world(batch.share.context):
            reducer.weighting.count_by_rows(None)


def _give_all_rows(iteration: Iteration) -> None:
    if iteration.last is not None:
        give_all_rows(iteration.last)
        iteration.last = None


def _check_same_data(batch: LoadedBatch) -> None:
    word = batch.iteration.checksum - (1 << 63)
    found = allgather(torch.tensor([word, batch.share.total]), name="auto.data").view(-1, 2)
    if (found != found[0]).any():
        raise refusal(
            f"{batch.iteration.place}: the ranks have read different batches from this loader, and each "
            "computes its rows of its own: make the order and the content of the data the same in each "
            "process (seeds; sorted lists of files; no sets, no clocks)"
        )


# ---- The tensors that a training loop is given ---------------------------------------------------------
# Some rows of a batch, which every rank has read as a whole.


def _marked(whole: Tensor, batch: LoadedBatch) -> Tensor:
    """Returns the rows that this process computes, with the mark that keeps all rows."""
    mark = Mark(batch, "the batch")
    mark.whole, mark.version = whole, whole._version
    mark.part = whole[batch.rows].clone() if batch.proof is not None else None
    mine = whole[batch.rows if batch.is_part else slice(None)]
    put(mine, mark)
    batch.delivered.append((weakref.ref(mine), mark))
    return mine


def give_all_rows(batch: LoadedBatch) -> None:
    """Gives the tensors of the last batch of a loop all rows, unless the loop has changed them.

    The code that follows a loop may use them. Those of other batches stay as they are, because a loss that
    is differentiated in a later batch may have been computed from them.
    """
    for reference, mark in batch.delivered:
        tensor, whole = reference(), mark.whole
        if tensor is None or mark_of(tensor) is not mark or not mark.is_delivered or tensor.requires_grad:
            continue
        unmark(tensor)
        if batch.is_part and whole is not None:
            with torch.no_grad():
                tensor.set_(whole)  # type: ignore[call-overload]
    batch.delivered.clear()


# ---- The parts of a batch: its tensors split along their first axis ------------------------------------


_PLAIN = (str, bytes, int, float, complex, type(None), np.generic, np.ndarray)


def arrays_of(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yields each tensor and array of a batch with at least 1 axis, with the expression that reaches it."""
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            yield path, value
    elif isinstance(value, Mapping):
        for key, element in value.items():
            yield from arrays_of(element, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, element in enumerate(value):
            yield from arrays_of(element, f"{path}[{index}]")


def rows_of(batch: Any, place: str) -> int:
    """Returns the number of rows of a batch.

    Raises:
        UnsupportedError: it has no tensor, or tensors that disagree.
    """
    found = list(arrays_of(batch))
    if not found:
        raise UnsupportedError(
            f"{place}: this loader's batches hold no tensor with an axis of rows, so they cannot be split "
            "over the ranks; let collate_fn return tensors whose first axis is that of the rows"
        )
    rows = len(found[0][1])
    for path, leaf in found[1:]:
        if len(leaf) != rows:
            raise UnsupportedError(
                f"{place}: {found[0][0]} has shape {list(found[0][1].shape)} and {path} has shape "
                f"{list(leaf.shape)}: the ranks split a batch along the first axis of all its tensors, so "
                "let the first axis be that of the rows (batch first), and pad rows of several lengths "
                "instead of joining them"
            )
    return rows


def part_of(value: Any, batch: LoadedBatch, place: str) -> Any:
    """Returns a batch with the rows of its tensors that this process computes."""
    if isinstance(value, Tensor):
        return _marked(value, batch) if value.ndim else value
    if type(value) is dict:
        return {key: part_of(element, batch, place) for key, element in value.items()}
    if isinstance(value, list | tuple):
        cuts = [part_of(element, batch, place) for element in value]
        return type(value)(*cuts) if hasattr(value, "_fields") else type(value)(cuts)
    if isinstance(value, _PLAIN):
        return value
    raise UnsupportedError(
        f"{place}: this loader's batches hold a {type(value).__name__}, of which it is not known how it is "
        "split over the ranks; let collate_fn return tensors in tuples, lists or dictionaries"
    )


# ---- Random states: equal on all ranks, except while a rank computes its part of a batch ---------------
# Loaders, initial values and everything else that a script draws between batches have to be the same on
# all ranks; the numbers that a step draws for its rows, such as those of dropout, have to differ.


@dataclass
class _States:
    """The random states that are not in use: this rank's own, or the common; None before the first use."""

    others: list[Any] | None = None
    is_own: bool = False


_random_states = _States()


def enter_own() -> None:
    """Begins to draw this rank's own numbers."""
    if not _random_states.is_own:
        _swap()


def leave_own() -> None:
    """Continues with the numbers that all ranks draw."""
    if _random_states.is_own:
        _swap()


@contextmanager
def common() -> Iterator[None]:
    """Draws the numbers of all ranks inside."""
    was_own = _random_states.is_own
    leave_own()
    try:
        yield
    finally:
        if was_own:
            enter_own()


def _swap() -> None:
    numpy = sys.modules.get("numpy")
    used = [torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None]
    if _random_states.others is not None:
        torch.set_rng_state(_random_states.others[0])
        random.setstate(_random_states.others[1])
        if numpy and _random_states.others[2] is not None:
            numpy.random.set_state(_random_states.others[2])
    else:
        assert job.context is not None
        text = f"{torch.initial_seed()} {job.context.rank}".encode()
        seed = int.from_bytes(blake2b(text, digest_size=4).digest(), "big")
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed)
    _random_states.others, _random_states.is_own = used, not _random_states.is_own
