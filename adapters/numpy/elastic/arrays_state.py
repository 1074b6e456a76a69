"""The base of states with arrays that are kept as copies in the host's memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sirtaki.bindings.default_context import current, using
from sirtaki.bindings.errors import ParametersDifferError
from sirtaki.common.elastic.state import ObjectState, Start
from sirtaki.common.objects import broadcast_object
from sirtaki.numpy import arrays as adapter
from sirtaki.numpy.arrays import Array
from sirtaki.numpy.elastic import replication
from sirtaki.numpy.elastic.entries import Entry, Kind

_OBJECTS = "elastic.objects"


class ArraysState(ObjectState):
    """A state with arrays besides its attributes. A commit copies them, so that it can always be restored.

    A class derived from it tells which arrays there are (`_entries`), reads them (`_read`) and writes them
    (`_write`). An attribute with `state_dict` and `load_state_dict` is not replaced: its state is saved, sent
    and loaded.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Creates the state, and saves it. The keywords become attributes."""
        self._names = list(kwargs)
        self._saved_entries: Sequence[Entry] = ()
        self._copies: dict[str, Array] = {}  # by the names of the saved entries
        self._saved_details: Any = None
        self._is_saved = False
        super().__init__(**kwargs)

    def _entries(self) -> list[Entry]:
        """Returns the descriptions of the arrays: the same on all ranks, except for those of kind OWN."""
        raise NotImplementedError

    def _read(self, entries: Sequence[Entry]) -> list[Array]:
        """Returns the present values; the arrays may share the memory of what they are read from."""
        raise NotImplementedError

    def _write(self, entries: Sequence[Entry], arrays: Iterable[Array], details: Any) -> None:
        """Sets new values. May keep the arrays. `details` are those of the rank that has made the values."""
        raise NotImplementedError

    def _details(self, entries: Sequence[Entry]) -> Any:
        """Returns what `_write` has to know besides the values; it is sent with the attributes."""
        return None

    def _clear_own(self) -> None:
        """Empties what has been collected for a step that this rank no longer takes."""

    def _begin_passes(self) -> None:
        """Empties on all ranks what has been collected for a step, if it may be one rank's or that of all."""

    # ---- Saving and restoring ------------------------------------------------------------------------------

    def save(self) -> None:
        """Copies the arrays and the attributes; the arrays, into the memory of the previous copy.

        If an array cannot be read, as after a failed computation, the previous copy is intact.

        Raises:
            ValueError: this rank has taken local steps since the ranks were equal.
        """
        self._require_commit()
        entries = self._entries()
        found = self._read(entries)
        details = self._details(entries)
        values = copy.deepcopy(self._values())
        self._is_saved = False  # until the copies are complete
        self._copies = {
            entry.name: _copied(array, self._copies.get(entry.name))
            for entry, array in zip(entries, found, strict=True)
        }
        self._saved_entries, self._saved_details, self._saved_state = self._stored(entries), details, values
        self._is_saved = True

    def _stored(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Returns the entries as they are kept with the copies."""
        return entries

    def can_restore(self) -> bool:
        """Returns True, unless saving has been interrupted."""
        return self._is_saved

    def restore(self) -> None:
        """Sets arrays and attributes to their values at the last commit.

        Raises:
            RuntimeError: saving has been interrupted, so there is no complete copy.
        """
        if not self._is_saved:
            raise RuntimeError("the last commit was interrupted while it was being copied")
        copies = (np.array(self._copies[entry.name]) for entry in self._saved_entries)
        self._write(self._saved_entries, copies, self._saved_details)
        self._set(copy.deepcopy(self._saved_state))

    # ---- Between ranks -------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Copies the arrays and attributes of rank 0 to all ranks, and saves them. All ranks call it.

        Raises:
            ParametersDifferError: the ranks' states hold different arrays.
            PeerLostError: a rank died.
        """
        context = current()
        self.receive(Start(context, context.rank == 0, context.size == 1))

    def receive(self, start: Start) -> None:
        """Takes arrays and attributes from rank 0, if a rank needs them; otherwise only compares the arrays.

        Nothing is changed before everything has arrived and has been verified. Nothing is compared if the
        setting check_parameters is 0.

        Raises:
            ParametersDifferError: the ranks' states hold different arrays; on all ranks, with the same text.
            PeerLostError: a rank died.
        """
        with using(start.context):
            entries = _shared(self._entries())
            if start.all_current:
                self._compare(start, entries)
            else:
                self._take_over(start, entries)
            self.save()

    def _compare(self, start: Start, entries: Sequence[Entry]) -> None:
        if int(start.context.setting("check_parameters")) == 0:
            return
        equal = [entry for entry in entries if entry.kind is Kind.EQUAL]
        found = self._read(equal)
        if not replication.agree(start.context, equal, found):
            self._replace(equal, replication.repair(start.context, equal, found), self._details(equal))

    def _replace(self, entries: Sequence[Entry], right: dict[int, Array], details: Any) -> None:
        if right:
            self._write([entries[index] for index in right], right.values(), details)

    def _take_over(self, start: Start, entries: Sequence[Entry]) -> None:
        context, needs = start.context, not start.is_current
        replication.agree(context, entries)
        found = [] if needs else self._read(entries)
        received = replication.receive(context, entries, found, needs)
        values = received if needs else found
        which = [index for index, entry in enumerate(entries) if entry.kind is Kind.EQUAL]
        equal, compared = [entries[index] for index in which], [values[index] for index in which]
        right: dict[int, Array] = {}
        if not replication.agree(context, equal, compared):
            right = {which[index]: one for index, one in replication.repair(context, equal, compared).items()}
        attributes, details = broadcast_object((self._values(), self._details(entries)), 0, _OBJECTS)
        if needs:
            self._write(entries, [right.get(index, one) for index, one in enumerate(received)], details)
            self._clear_own()
            self._set(attributes)
        else:
            self._replace(entries, right, details)
        self._begin_passes()

    # ---- Checkpoints ---------------------------------------------------------------------------------------

    def checkpoint(self) -> Any:
        """Returns copies of what the last commit has in common with other ranks."""
        entries = _shared(self._saved_entries)
        arrays = [np.array(array) for array in self._saved_arrays(entries)]
        described = [(entry.name, entry.description) for entry in entries]
        return described, arrays, self._saved_details, copy.deepcopy(self._saved_state)

    def load_checkpoint(self, content: Any) -> None:
        """Sets the state to that of a checkpoint, and saves it.

        Raises:
            ParametersDifferError: it holds other arrays than this state.
        """
        described, arrays, details, attributes = content
        entries = _shared(self._entries())
        own = [(entry.name, entry.description) for entry in entries]
        if own != described:
            differing = next((one for one in own if one not in described), None)
            differing = differing or next((one for one in described if one not in own), own[0])
            raise ParametersDifferError(
                f"the checkpoint holds other arrays than this state, which differ in {differing[0]!r}: make "
                "the model and its optimizer as in the training that has written it, or delete it"
            )
        self._write(entries, arrays, details)
        self._set(attributes)
        self._begin_passes()
        self.save()

    def _saved_arrays(self, entries: Sequence[Entry]) -> list[Array]:
        """Returns the arrays of the last commit, for some of its entries."""
        return [self._copies[entry.name] for entry in entries]

    # ---- Attributes ----------------------------------------------------------------------------------------

    def _values(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self._names}
        return {name: value.state_dict() if _loads(value) else value for name, value in values.items()}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            held: Any = getattr(self, name, None)
            if _loads(held):
                held.load_state_dict(value)
            else:
                setattr(self, name, value)


def _shared(entries: Sequence[Entry]) -> list[Entry]:
    """Returns the entries that are sent to other ranks."""
    return [entry for entry in entries if entry.kind is not Kind.OWN]


def _loads(value: Any) -> bool:
    """Returns whether an attribute's state is saved and loaded, instead of the attribute itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _copied(array: Array, memory: Array | None) -> Array:
    """Returns a copy of an array, in memory that is used again if it fits."""
    if memory is None or memory.shape != array.shape or memory.dtype != array.dtype:
        memory = np.empty(array.shape, array.dtype)
        adapter.view(memory)  # refuses a dtype that cannot be sent at the first save, not at the first change
    np.copyto(memory, array)
    return memory
