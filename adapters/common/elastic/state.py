"""The state of an elastic training: what all ranks have in common, and can return to.

The classes have the contract of Horovod's `State` and `ObjectState`. A commit is a numbered state of the
training. After a loss, the ranks that survive return to the newest commit that any of them can restore.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from sirtaki.bindings.context import Context
from sirtaki.common.elastic.checkpoints import Checkpoints
from sirtaki.common.elastic.fencing import fence
from sirtaki.common.objects import broadcast_object

_OBJECTS = "elastic.objects"  # a reserved name, which separates this exchange from the user's operations


class Commits(Protocol):
    """The part of an elastic job that counts commits."""

    def check_operations(self) -> None:
        """Raises the world's failure if an operation has failed since the last check."""

    def count_commit(self) -> None:
        """Counts a commit, whose state has been saved."""

    def check(self, state: State) -> None:
        """Raises HostsUpdatedInterrupt if this rank has to leave its world here, or its world's failure."""


@dataclass(frozen=True)
class Start:
    """The start of a generation, as a rank's state sees it.

    Attributes:
        context: the new world. Rank 0 can restore the commit; the others receive its state.
        is_current: whether this rank's state is the commit: it has been restored, or it has not been changed.
        all_current: whether that is so on all ranks.
    """

    context: Context
    is_current: bool
    all_current: bool


class State:
    """The state of an elastic training; the base class of all of them.

    A class of one's own defines `save`, `restore`, `sync` and `reset`, as with Horovod.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        """Creates the state. The arguments are Horovod's; they are accepted and ignored."""
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits: Commits | None = None  # set while `hvd.elastic.run` uses this state
        self._checkpoints: Checkpoints | None = None
        self._averages_over_initial = False

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds functions that survivors call after each change of the ranks, before the state is synced.

        They may adapt what depends on `hvd.size()`, such as a learning rate. New ranks do not call them, so
        they must not exchange anything.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset()`, then the reset callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def keep_checkpoints(self, folder: str | os.PathLike[str], every: int = 100) -> None:
        """Writes checkpoints, for the case that all ranks are lost. All ranks call it, before the training.

        Rank 0 writes them in the background, at commits. `hvd.elastic.run` starts from the newest one in the
        folder, if there is one; delete it to start from the beginning. It is unpickled, so nobody else may be
        able to write there.

        Args:
            folder: all ranks have to see the same one.
            every: commits between two checkpoints; one that is not finished in time delays the next.

        Raises:
            ValueError: `every` is not positive.
        """
        self._checkpoints = Checkpoints(folder, every, fence)

    def average_over(self, ranks: str) -> None:
        """Chooses the divisor of averages of gradients. All ranks call it, before the training.

        This concerns the gradients of optimizers, tapes and functions that exchange them with op=Average. An
        `allreduce` of other values always divides by the number of ranks that take part.

        Args:
            ranks: "live", the default: the present number of ranks. "initial": the number of ranks of the
                first generation, so that the weight of each sample stays the same when ranks are lost or
                join.

        Raises:
            ValueError: another text.
        """
        if ranks not in ("live", "initial"):
            raise ValueError(f'average_over takes "live" or "initial", not {ranks!r}')
        self._averages_over_initial = ranks == "initial"

    def on_hosts_updated(self, timestamp: Any, result: Any) -> None:
        """Does nothing: hvdrun tells the ranks itself when to leave. Part of Horovod's contract."""

    def commit(self) -> None:
        """Saves the state, and leaves the world if its ranks are about to change. All ranks must call it.

        The state of the last commit survives the loss of any rank.

        Raises:
            ValueError: this rank has taken local steps since the ranks were equal.
            HostsUpdatedInterrupt: the ranks are about to change; `hvd.elastic.run` handles it.
            HorovodInternalError: the world has failed; `hvd.elastic.run` handles it if a rank was lost.
        """
        if self._commits is not None:
            self._commits.check_operations()
        self.save()
        if self._commits is not None:
            self._commits.count_commit()
            self._commits.check(self)

    def check_host_updates(self) -> None:
        """Leaves the world if its ranks are about to change. All ranks must call it, as often as the others.

        A rank that leaves here has committed. Raises as `commit` does.
        """
        self._require_commit()
        if self._commits is not None:
            self._commits.check(self)

    def _require_commit(self) -> None:
        """Raises ValueError if a rank has taken local steps, so that there is no common state to commit."""

    def save(self) -> None:
        """Saves the state, for `restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Returns to the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copies the state of rank 0 to all ranks. All ranks call it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepares for other ranks; called on survivors, after a change."""

    # ---- How hvd.elastic.run uses it -------------------------------------------------------------------

    def checkpoint(self) -> Any:
        """Returns the last commit's state: values that can be pickled, and share no memory with the training.

        Called after `save`, on rank 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no checkpoint(), so it cannot keep checkpoints")

    def load_checkpoint(self, content: Any) -> None:
        """Sets the state to what `checkpoint` has returned, in another process. Called on rank 0."""
        raise NotImplementedError(f"{type(self).__name__} has no load_checkpoint()")

    def can_restore(self) -> bool:
        """Returns whether this rank can return to its last commit by itself, without another rank's state."""
        return True

    def receive(self, start: Start) -> None:
        """Takes the commit's state from rank 0, if any rank lacks it. All ranks call it.

        If it raises, this rank's own last commit is still intact.
        """
        if not start.all_current:
            self.sync()
        self.save()


class ObjectState(State):
    """A state of plain Python values: its keywords become attributes, which `commit` saves.

    For example `ObjectState(epoch=0, batch=0)`. Values are deep-copied, and sent to ranks that join with
    cloudpickle.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        """Creates the state. The first two arguments are Horovod's; they are accepted and ignored."""
        super().__init__(bcast_object, get_rank)
        self._saved_state: dict[str, Any] = dict(kwargs)
        self._set(self._saved_state)
        self.save()

    def save(self) -> None:
        """Copies the attributes."""
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Sets the attributes to their values at the last commit."""
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Sets the attributes to those of rank 0. All ranks call it.

        Raises:
            PeerLostError: a rank died.
        """
        self._take(broadcast_object(self._values(), 0, _OBJECTS))

    def checkpoint(self) -> Any:
        return copy.deepcopy(self._saved_state)

    def load_checkpoint(self, content: Any) -> None:
        self._take(content)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _take(self, values: dict[str, Any]) -> None:
        self._saved_state = values
        self._set(copy.deepcopy(values))

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)
