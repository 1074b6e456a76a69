"""Loaders of a script: all ranks read all batches, and compute parts of those with which they train."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch.utils.data import DataLoader

from sirtaki.common import checksums, shares
from sirtaki.common.shares import Share
from sirtaki.torch.auto import marks, positions, proof, random_states
from sirtaki.torch.auto.batches import arrays_of, part_of, rows_of
from sirtaki.torch.auto.delivered import give_all_rows, mark_rows
from sirtaki.torch.auto.job import LoadedBatch, job, refusal
from sirtaki.torch.auto.optimizers import adopt
from sirtaki.torch.collectives import allgather
from sirtaki.torch.consistency import checksum_of
from sirtaki.torch.reducer import GradientReducer


@dataclass
class LoaderState:
    """The knowledge of a loader at one line of the script.

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
        with random_states.common():
            iterator = plain(self)
        place = positions.place()
        state = _states.setdefault(self, {}).setdefault(place, LoaderState())
        return _Batches(iterator, Iteration(state, place))

    kind.__iter__ = iterate


class _Batches:
    """An iterator that delivers the batches of another one, or parts of them."""

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
            with random_states.common():
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
            random_states.leave_own()  # the code after the loop draws, or seeds, before the batch is ended


def _delivered(whole: Any, iteration: Iteration) -> Any:
    adopt()
    job.latest = iteration
    if not iteration.state.is_training:
        if all(one is not iteration for one in job.delivered):
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
    iteration.checksum = checksums.combined(checksum_of(torch.as_tensor(one)) for _, one in arrays_of(whole))
    if batch.is_part:
        job.has_split = True
        shares.make_current(share)
        for reducer in GradientReducer.of_world(job.context):
            reducer.weighting.count_by_rows(share)
        random_states.enter_own(job.context.rank)
    else:
        _check_same_data(batch)
        proof.start(batch)
    if batch.is_part:
        _count_rows(positions.loop_frame())
    part = batch.rows if batch.is_part else slice(0, rows)
    return part_of(whole, rows, part, mark_rows(batch), place)


def _count_rows(frame: Any) -> None:
    """Makes `len(tensor)` in the module of the loop the number of rows of the whole batch."""
    if frame is not None and "len" not in frame.f_globals:
        frame.f_globals["len"] = marks.length


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
    if isinstance(batch.link, proof.Child):
        batch.link.finish()
    try:
        _complete(batch)
    finally:
        _leave(batch)


def _complete(batch: LoadedBatch) -> None:
    marks.settle(batch)
    if batch.is_part:
        _check_same_data(batch)
    if isinstance(batch.link, proof.Parent):
        batch.link.finish()


def _leave(batch: LoadedBatch) -> None:
    batch.is_open, job.batch, batch.iteration.last = False, None, batch
    if batch.iteration.is_closed:
        _give_all_rows(batch.iteration)
    random_states.leave_own()
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
