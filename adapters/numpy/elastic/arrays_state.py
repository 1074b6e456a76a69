"""The base of states with arrays that are kept as copies in the host's memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context, current, using
from sirtaki.bindings.errors import ParametersDifferError
from sirtaki.common.elastic.slices import SliceCopies, allocated, opened
from sirtaki.common.elastic.state import GenerationStart, ObjectState
from sirtaki.common.ops.handles import Operation, pooled_batch, run
from sirtaki.common.ops.objects import ByteTransport, broadcast_object, gather_objects
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.ops.requests import Call, describe
from sirtaki.common.semantics import hint
from sirtaki.common.training.consistency import Scope, combined, states_agree
from sirtaki.common.training.groups import Place, place_in
from sirtaki.numpy import arrays as adapter
from sirtaki.numpy.arrays import Array, row_major_view
from sirtaki.numpy.consistency import checksum_of

_OBJECTS = "elastic.objects"
_SLICES = "elastic.slices"


class ArraysState(ObjectState):
    """A state with arrays besides its attributes. A commit copies them, so that it can always be restored.

    A class derived from it tells which arrays there are (`_entries`), reads them (`_read`) and writes them
    (`_write`). Arrays that are divided among the ranks are divided anew when the ranks change. An attribute
    with `state_dict` and `load_state_dict` is not replaced: its state is saved, sent and loaded.

    Example:
        from sirtaki.numpy.elastic.arrays_state import Entry
        class Weights(hvd.elastic.ArraysState):
            def _entries(self): return [Entry("weights", tensor.shape, tensor.dtype)]
            def _read(self, entries): return [tensor]
            def _write(self, entries, arrays, details): tensor[...] = next(iter(arrays))
        state = Weights(epoch=0)
    """

    def __init__(self, **kwargs: Any) -> None:
        """Creates the state, and saves it. The keywords become attributes."""
        self._names = list(kwargs)
        self._saved_entries: Sequence[Entry] = ()
        self._copies: dict[str, Array] = {}  # by the names of the saved entries
        self._saved_details: Any = None
        self._is_saved = False
        self._slices = SliceCopies(self._whole_state)
        self._saved_place = Place(0, 1)
        self._world: weakref.ref[Context] | None = None  # in which arrays were divided last
        super().__init__(**kwargs)

    def _entries(self) -> list[Entry]:
        """Returns the descriptions of the arrays: equal on all ranks, unless their kind is OWN or DIVIDED."""
        raise NotImplementedError

    def _read(self, entries: Sequence[Entry]) -> list[Array]:
        """Returns the present values; the arrays may share the memory of what they are read from."""
        raise NotImplementedError

    def _write(self, entries: Sequence[Entry], arrays: Iterable[Array], details: Any) -> None:
        """Sets new values. May keep the arrays. `details` come from the rank that has made the values."""
        raise NotImplementedError

    def _details(self, entries: Sequence[Entry]) -> Any:
        """Returns what `_write` has to know besides the values; it is sent with the attributes."""
        return None

    def _clear_own(self) -> None:
        """Empties what has been collected for a step that this rank no longer takes."""

    def _begin_passes(self) -> None:
        """Clears, on all ranks, gradients accumulated for a step, where they may be local or reduced."""

    def _cut_for(self, place: Place) -> None:
        """Cuts this rank's entries of kind DIVIDED for a place. Their values are undefined afterwards."""

    def _part(self, entry: Entry, elements: Array, place: Place) -> Array:
        """Returns the part of a divided array that belongs to a place, given the elements of all ranks."""
        return elements.reshape(entry.shape)

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
        self._send_slices(entries, found)
        self._is_saved = False  # until the copies are complete
        self._copies = {
            entry.name: _copied(array, self._copies.get(entry.name))
            for entry, array in zip(entries, found, strict=True)
            if entry.kind is not EntryKind.DIVIDED
        }
        self._saved_entries, self._saved_details, self._saved_state = entries, details, values
        self._complete_slices()
        self._is_saved = True

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
        divided = self._saved_slices()
        copies = (
            np.array((divided if entry.kind is EntryKind.DIVIDED else self._copies)[entry.name])
            for entry in self._saved_entries
        )
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
        self.receive(GenerationStart(context, context.rank == 0, context.size == 1))

    def receive(self, start: GenerationStart) -> None:
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
            if self._is_divided and (self._world is None or self._world() is not start.context):
                self._divide(start.context)
            self.save()

    def _compare(self, start: GenerationStart, entries: Sequence[Entry]) -> None:
        if int(start.context.setting("check_parameters")) == 0:
            return
        equal = [entry for entry in entries if entry.kind is EntryKind.EQUAL]
        found = self._read(equal)
        if not agree(start.context, equal, found):
            self._replace(equal, repair(start.context, equal, found), self._details(equal))

    def _replace(self, entries: Sequence[Entry], right: dict[int, Array], details: Any) -> None:
        if right:
            self._write([entries[index] for index in right], right.values(), details)

    def _take_over(self, start: GenerationStart, entries: Sequence[Entry]) -> None:
        context, needs = start.context, not start.is_current
        agree(context, entries)
        found = [] if needs else self._read(entries)
        received = receive(context, entries, found, needs)
        values = received if needs else found
        which = [index for index, entry in enumerate(entries) if entry.kind is EntryKind.EQUAL]
        equal, compared = [entries[index] for index in which], [values[index] for index in which]
        right: dict[int, Array] = {}
        if not agree(context, equal, compared):
            right = {which[index]: array for index, array in repair(context, equal, compared).items()}
        attributes, details = broadcast_object((self._values(), self._details(entries)), 0, _OBJECTS)
        if needs:
            self._write(entries, [right.get(index, array) for index, array in enumerate(received)], details)
            self._clear_own()
            self._set(attributes)
        else:
            self._replace(entries, right, details)
        self._begin_passes()

    # ---- Arrays that are divided among the ranks -------------------------------------------------------

    def prepare_change(self) -> None:
        if self._is_divided:
            self._slices.spread(current(), _SLICES)

    def _send_slices(self, entries: Sequence[Entry], arrays: Sequence[Array]) -> None:
        """Has another rank store copies of this rank's slices. All ranks must call it.

        Raises:
            HorovodInternalError: a rank was lost; earlier copies are intact.
        """
        if not self._is_divided:
            return
        place = place_in(current())
        divided = {
            entry.name: array
            for entry, array in zip(entries, arrays, strict=True)
            if entry.kind is EntryKind.DIVIDED
        }
        self._slices.exchange(current(), _SLICES, place, _packed(place, divided))

    def _complete_slices(self) -> None:
        if self._is_divided:
            self._saved_place = place_in(current())
            self._slices.complete()

    def _saved_slices(self) -> Mapping[str, Array]:
        """Returns this rank's slices at the last commit, by the names of their entries."""
        payload = self._slices.payload_at(self._saved_place)
        return {} if payload is None else _unpacked(payload).arrays

    def _divide(self, context: Context) -> None:
        """Divides the slices of the last commit among the ranks of a new world. All ranks must call it.

        Raises:
            HorovodInternalError: the copies of a rank's slices were lost, too; on all ranks.
            ParametersDifferError: this rank's state has other divided arrays.
        """
        place = place_in(context)
        provided = [_unpacked(payload) for payload in self._slices.provided(context, _SLICES)]
        self._cut_for(place)
        entries = {entry.name: entry for entry in self._entries() if entry.kind is EntryKind.DIVIDED}
        details = self._details([*entries.values()])
        parts = {
            name: self._part(entries[name], elements, place)
            for name, elements in _whole_arrays(context, provided)
            if name in entries
        }
        if missing := [name for name in entries if name not in parts]:
            raise ParametersDifferError(
                f"rank {context.rank} has {missing[0]!r}, of which no rank of the last commit has a part: "
                "make the optimizer in the same way on all ranks"
            )
        self._write([entries[name] for name in parts], parts.values(), details)
        self._world = weakref.ref(context)

    # ---- Checkpoints ---------------------------------------------------------------------------------------

    def checkpoint(self) -> Any:
        """Returns copies of what the last commit has in common with other ranks.

        Raises:
            ValueError: arrays are divided among the ranks.
        """
        self._refuse_slices()
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
            differing = next((description for description in own if description not in described), None)
            differing = differing or next(
                (description for description in described if description not in own), own[0]
            )
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
    """Returns the entries that rank 0 sends to other ranks."""
    return [entry for entry in entries if entry.kind in (EntryKind.EQUAL, EntryKind.SENT)]


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


# ---- The description of a state's arrays: their names, and what the ranks have in common ---------------


class EntryKind(Enum):
    """The relation between the ranks' values of an array.

    Attributes:
        EQUAL: the same on all ranks, such as parameters. Checked after each change of the ranks.
        SENT: sent to ranks that need a state, but otherwise each rank's own, such as moving statistics.
        OWN: never sent, such as the states of random number generators.
        DIVIDED: each rank has a part, which a commit copies to another rank, as with shard=.
    """

    EQUAL = "equal"
    SENT = "sent"
    OWN = "own"
    DIVIDED = "divided"


class Entry(NamedTuple):
    """One array of a state.

    Attributes:
        name: unique in the state; the same on all ranks, unless the kind is OWN.
        shape: elements along each dimension; of this rank's part, if the kind is DIVIDED.
        dtype: the element type.
        kind: the relation between the ranks' values.
        target: what the array is written to, as the state's class understands it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: EntryKind = EntryKind.EQUAL
    target: Any = None

    @property
    def description(self) -> str:
        return f"{self.dtype} of shape {list(self.shape)}"


class RankSlices(NamedTuple):
    """The parts of divided arrays that a rank has.

    Attributes:
        place: the rank's, for which the arrays have been cut.
        arrays: the parts, by name.
    """

    place: Place
    arrays: Mapping[str, Array]


def _packed(place: Place, arrays: Mapping[str, Array]) -> memoryview:
    """Returns copies of a rank's parts as bytes."""
    described = [(name, array.shape, array.dtype) for name, array in arrays.items()]
    payload, memory = allocated((place, described), [array.nbytes for array in arrays.values()])
    for (_, shape, dtype), array, target in zip(described, arrays.values(), memory, strict=True):
        np.copyto(np.ndarray(shape, dtype, target), array)
    return payload


def _unpacked(payload: memoryview) -> RankSlices:
    """Returns the parts in these bytes as views."""
    (place, described), memory = opened(payload)
    return RankSlices(
        place,
        {
            name: np.ndarray(shape, dtype, source)
            for (name, shape, dtype), source in zip(described, memory, strict=True)
        },
    )


def _whole_arrays(context: Context, provided: Sequence[RankSlices]) -> Iterator[tuple[str, Array]]:
    """Gathers divided arrays in turn. All ranks must exhaust the iterator.

    Args:
        context: this rank.
        provided: what this rank contributes. The contributions of all ranks have each place once.

    Yields:
        The name of an array, and the elements of its parts one after another, in the order of places.
    """
    mine = [
        (slices.place, {name: (array.nbytes, array.dtype) for name, array in slices.arrays.items()})
        for slices in provided
    ]
    gathered = gather_objects(context, mine, f"{_SLICES}.described", global_process_set)
    arriving = [item for of_rank in gathered for item in of_rank]
    transport = ByteTransport(context, _SLICES, global_process_set)
    names = dict.fromkeys(name for _, described in arriving for name in described)
    for index, name in enumerate(names):
        own = b"".join(slices.arrays[name].tobytes() for slices in provided if name in slices.arrays)
        data, parts, end = transport.gather(bytearray(own), f"whole.{index}"), {}, 0
        dtype = next(described[name][1] for _, described in arriving if name in described)
        for place, described in arriving:
            size = described[name][0] if name in described else 0
            parts[place] = np.ndarray((size // dtype.itemsize,), dtype, data[end : end + size])
            end += size
        yield name, np.concatenate([parts[place] for place in sorted(parts)])


# ---- The exchange by which all ranks get the arrays of rank 0, and make sure that they have them -------
# The names of all operations begin with "elastic.", which separates them from the user's.


_NAME = "elastic.arrays"
_GROUP_BYTES = 64 << 20  # sent together; bounds the memory of ranks that take part without needing anything


def agree(context: Context, entries: Sequence[Entry], arrays: Sequence[Array] | None = None) -> bool:
    """Compares descriptions over the ranks, and the arrays if they are given. All ranks call it alike.

    Returns:
        Whether the arrays are equal on all ranks; True if none are given.

    Raises:
        ParametersDifferError: names, dtypes or shapes differ. All ranks raise it, with the same text.
    """
    described = [(entry.name, entry.description) for entry in entries]
    values = combined([] if arrays is None else map(checksum_of, arrays))
    return states_agree(context, f"{_NAME}.check", described, values)


def receive(
    context: Context, entries: Sequence[Entry], sources: Sequence[Array], is_needed: bool
) -> list[Array]:
    """Sends rank 0's arrays to the ranks that need them. All ranks call it.

    Args:
        context: this rank, in its new world.
        entries: described alike on all ranks.
        sources: on rank 0, its arrays, which are only read. Ignored elsewhere.
        is_needed: whether this rank needs the arrays; False on rank 0.

    Returns:
        New arrays, in the order of entries, if they are needed; else an empty list.
    """
    received: list[Array] = []
    for group in _groups(entries):
        if context.rank == 0:
            own = [sources[index] for index in group]
        else:
            own = [np.empty(entries[index].shape, entries[index].dtype) for index in group]
        _broadcast(context, [f"{_NAME}.{index}.{entries[index].name}" for index in group], own)
        if is_needed:
            received += own
    return received


def _groups(entries: Sequence[Entry]) -> Iterator[list[int]]:
    group: list[int] = []
    size = 0
    for index, entry in enumerate(entries):
        group.append(index)
        size += int(np.prod(entry.shape)) * entry.dtype.itemsize
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _broadcast(context: Context, names: Sequence[str], arrays: Sequence[Array]) -> None:
    """Overwrites the arrays by rank 0's, which stay unchanged there."""
    batch = pooled_batch(len(arrays))
    views = [row_major_view(array) for array in arrays]
    for index, (name, view) in enumerate(zip(names, views, strict=True)):
        describe(batch, core.BROADCAST, view, view.pointer, Call(name), index, root=0)
    run(context, Operation(batch, views, lambda *_: None))


def repair(context: Context, entries: Sequence[Entry], arrays: Sequence[Array]) -> dict[int, Array]:
    """Finds the arrays that differ from rank 0's, and receives rank 0's. All ranks call it, after `agree`.

    A single rank warns, with the array's name and the largest difference.

    Returns:
        The right arrays by index, those that differ on this rank only.

    Raises:
        ParametersDifferError: an array still differs after it has been sent; on all ranks.
    """
    checksums = [checksum_of(array) for array in arrays]
    gathered: list[list[int]] = gather_objects(context, checksums, f"{_NAME}.checksums", global_process_set)
    different = [
        index
        for index in range(len(entries))
        if any(answers[index] != gathered[0][index] for answers in gathered)
    ]
    sources = [arrays[index] for index in different]
    fetched = receive(context, [entries[index] for index in different], sources, context.rank != 0)
    right = dict(zip(different, fetched or sources, strict=True))
    _report(context, entries, {index: _difference(arrays[index], right[index]) for index in different})
    now = [right.get(index, array) for index, array in enumerate(arrays)]
    if not agree(context, entries, now):
        raise ParametersDifferError(
            f"{entries[different[0]].name!r} still differs between the ranks after rank 0 has sent it: "
            "memory or a connection of one of the ranks is damaged"
        )
    return {index: array for index, array in right.items() if checksums[index] != gathered[0][index]}


def _report(context: Context, entries: Sequence[Entry], differences: dict[int, float]) -> None:
    gathered = gather_objects(context, differences, f"{_NAME}.differences", global_process_set)
    if context.rank != 0 or not differences:
        return
    scope = Scope(context, global_process_set, _NAME, "")
    parts = []
    for index in differences:
        rank = max(range(context.size), key=lambda rank: gathered[rank][index])
        parts.append(f"{entries[index].name!r} on {scope.label(rank)} (by up to {gathered[rank][index]:.3g})")
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    hint(
        f"after a change of the ranks, arrays were not as on rank 0, whose values replace them: "
        f"{', '.join(parts[:3])}{more}"
    )


def _difference(own: Array, right: Array) -> float:
    """Returns the largest difference of two elements; infinity if either is not a number."""
    if own.tobytes() == right.tobytes():
        return 0.0
    wide: Any = np.complex128 if own.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        differences = np.abs(own.astype(wide) - right.astype(wide))
    differences = np.where(own == right, 0.0, np.nan_to_num(differences, nan=np.inf, posinf=np.inf))
    return float(differences.max(initial=0.0))
