"""A rank's share of an epoch, dealt anew in each epoch and, in an elastic job, for the rest of an epoch."""

from __future__ import annotations

from typing import Any, Literal

import keras
import numpy as np

from sirtaki.bindings.context import Context, add_survivor, current, find, is_elastic
from sirtaki.keras._private import is_evaluation, keep_order_of

_SHUFFLED = (
    "the batches are not read in their order, so nobody knows which of them are left when the ranks change: "
    "call fit(..., shuffle=False); hvd.shard_arrays() and hvd.shard() shuffle the samples themselves"
)

Uneven = Literal["pad", "drop", "keep"]


class Deal:
    """The distribution of an epoch's units (samples or batches) over the ranks.

    In each batch all ranks together take the next units of the epoch's order. So its state is the epoch, and
    the number of units that have been taken; the others can be dealt to any number of ranks. A batch keeps
    its number in the epoch: when the rest of an epoch is dealt, the first numbers stand for nothing.

    Attributes:
        batches: the number of batches in an epoch, for this number of ranks.
        skipped: the first batch with units that are not done.
    """

    def __init__(
        self, count: int, what: str, batch_size: int, shuffle: bool, seed: int, uneven: Uneven
    ) -> None:
        """Deals the first epoch.

        Raises:
            ValueError: an unknown `uneven`, or fewer units than ranks; `what` names them.
        """
        if uneven not in ("pad", "drop", "keep"):
            raise ValueError(f"uneven is {uneven!r}, but it has to be 'pad', 'drop' or 'keep'")
        self._count, self._what, self._batch_size = count, what, batch_size
        self._shuffle, self._seed, self._uneven = shuffle, seed, uneven
        self.epoch = 0
        self._done = 0  # units that were done when this rest was dealt
        self._taken = 0  # batches of this rest that have been done since
        self.deal(current())

    def deal(self, context: Context) -> None:
        """Deals what is left of the epoch to the ranks of a world."""
        if self._count < context.size:
            raise ValueError(
                f"there are {self._count} {self._what} for {context.size} ranks: each needs at least one"
            )
        self._done, self._taken = self.done, 0
        self._rank, self._size = context.rank, context.size
        order = np.arange(self._count)
        if self._shuffle:
            np.random.default_rng((self._seed, self.epoch)).shuffle(order)
        whole, self._own = self._share(order, order), self._share(order[self._done :], order)
        self._filler = whole[: self._batch_size]
        self.batches = -(-len(whole) // self._batch_size)
        self.skipped = self.batches - -(-len(self._own) // self._batch_size)

    def _share(self, units: Any, order: Any) -> Any:
        if self._uneven == "pad":
            units = np.concatenate([units, order[: -len(units) % self._size]])
        elif self._uneven == "drop":
            units = units[: len(units) - len(units) % self._size]
        return units[self._rank :: self._size]

    def units(self, index: int) -> Any:
        """Returns the numbers of the units in this rank's batch `index`; of a skipped batch, any."""
        first = (index - self.skipped) * self._batch_size
        return self._own[first : first + self._batch_size] if first >= 0 else self._filler

    @property
    def done(self) -> int:
        """Returns the number of units that the ranks have done in this epoch."""
        if not self._taken:
            return self._done
        return min(self._done + self._taken * self._batch_size * self._size, self._count)

    def record(self, batches: int) -> None:
        """Records that all ranks have done the epoch's first `batches` batches."""
        self._taken = max(batches - self.skipped, 0)

    def resize(self, count: int) -> None:
        """Sets the number of units, from the next epoch on."""
        self._count = count

    def start_epoch(self, epoch: int, done: int = 0) -> None:
        """Deals another epoch, of which a number of units may have been done.

        Between two worlds, that waits for the next one.
        """
        self.epoch, self._done, self._taken = epoch, done, 0
        context = find()
        if context is not None:
            self.deal(context)


class DatasetShare(keras.utils.PyDataset):
    """A rank's share of a dataset, which continues within an epoch if a state of an elastic job has it.

    Without such a state it starts from its first epoch when the ranks change, which is the same on all ranks.
    """

    def __init__(self, deal: Deal) -> None:
        super().__init__()
        self._deal = deal
        self._is_in_state = False
        self._is_counted = False  # whether a callback records batches and epochs, instead of Keras
        self._next: set[int] = set()  # the batches that may be read next, besides the first
        if is_elastic():
            add_survivor(self)
            keep_order_of(DatasetShare)

    def __len__(self) -> int:
        return self._deal.batches

    @property
    def skipped(self) -> int:
        """Returns the number of the epoch's first batch that has not been done by other ranks."""
        return self._deal.skipped

    def count(self) -> None:
        """Leaves it to the caller to record batches and epochs. They are then read in their order only."""
        self._is_counted = True
        self._next.clear()

    def _units(self, index: int) -> Any:
        """Returns the numbers of the units in batch `index`.

        Raises:
            ValueError: batches are recorded, and are not read in their order.
        """
        if self._is_counted:  # Keras may have several iterators at a time
            if index and index not in self._next:
                raise ValueError(_SHUFFLED)
            self._next.discard(index)
            self._next.add(index + 1)
        return self._deal.units(index)

    def record(self, batches: int) -> None:
        """Records that all ranks have been trained on the epoch's first `batches` batches."""
        self._deal.record(batches)

    def finish_epoch(self) -> None:
        """Begins the next epoch."""
        self._deal.start_epoch(self._deal.epoch + 1)

    def on_epoch_end(self) -> None:
        """Begins the next epoch, unless a callback does that.

        An evaluation or a prediction begins none: one rank may make it alone, and its later epochs would
        overlap with those of other ranks.
        """
        if not self._is_counted and not is_evaluation():
            self.finish_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, and how many of its samples (or batches) the ranks have done."""
        self._is_in_state = True
        return {"epoch": self._deal.epoch, "done": self._deal.done, "is_counted": self._is_counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the ranks were, with what is left of the epoch. All ranks must call it."""
        self._is_counted = state["is_counted"]
        self._deal.start_epoch(state["epoch"], state["done"])

    def move_to(self, context: Context) -> None:
        """Deals the rest of the epoch to the ranks of another world."""
        if not self._is_in_state:
            self._is_counted = False
            self._deal.epoch = self._deal._done = self._deal._taken = 0
        self._deal.deal(context)

    def retire(self) -> None:
        """Does nothing: no other object refers to the world's number of ranks."""
